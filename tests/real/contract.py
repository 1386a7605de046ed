"""What vLLM and SGLang, whose states are read inside them, have both to hold on the tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file

from fidelab.captures.requests import Layerwise
from tests.engines import tiny
from tests.real.harness import CONTINUATIONS, PLACES, PREFILL, PROBES, Run, Said, lacking, states_of_transformers


class Contract:
    """Fixtures of the test file: ``said`` (all requests in one process), ``run`` (other arms), ``checkpoint``."""

    unfilled: ClassVar[str]  # the first parameter that the engine misses in a checkpoint without the second layer's MLP

    def test_states_are_those_of_transformers(self, said: Said, checkpoint: Path) -> None:
        for item, theirs in enumerate(states_of_transformers(tiny.arm(checkpoint), PREFILL)):
            torch.testing.assert_close(said[f"prefill.{item}.hidden"], torch.from_numpy(theirs), rtol=1e-4, atol=1e-4)

    def test_rows_at_given_positions_are_those_of_the_whole_window(self, said: Said) -> None:
        for item, own in enumerate(PLACES):
            rows = said[f"depths.{item}.hidden"]
            whole = said[f"prefill.{item}.hidden"][[position - PREFILL.first for position in own]]
            torch.testing.assert_close(rows, whole, rtol=1e-4, atol=1e-4)

    def test_states_between_the_layers_are_those_of_transformers(self, said: Said, checkpoint: Path) -> None:
        request = PROBES["layers"]
        assert isinstance(request, Layerwise)
        for item, theirs in enumerate(states_of_transformers(tiny.arm(checkpoint), request)):
            assert theirs.shape == (3, 89, 128)
            torch.testing.assert_close(said[f"layers.{item}.states"], torch.from_numpy(theirs), rtol=1e-4, atol=1e-4)

    def test_the_head_is_the_checkpoints_without_padding_and_one_object(self, said: Said, checkpoint: Path) -> None:
        assert torch.equal(said["head.weight"], load_file(checkpoint / "model.safetensors")["lm_head.weight"])
        assert said.plain["heads"] == 1

    def test_two_ranks_leave_the_same_states_and_a_head_without_padding(self, said: Said, run: Run) -> None:
        two = run(("prefill", "forced", "layers"), tp="2")
        assert torch.equal(two["head.weight"], said["head.weight"])
        assert two.plain["ran"]["tp"] == 2
        assert two.plain["ran"]["cache_bytes_per_token"] == said.plain["ran"]["cache_bytes_per_token"]
        for name in ("prefill.0.hidden", "prefill.2.hidden", "forced.1.hidden", "layers.1.states"):
            torch.testing.assert_close(two[name], said[name], rtol=1e-4, atol=1e-4)

    def test_sentinels_replay_the_live_logits(self, said: Said) -> None:
        for name in ("prefill", "generate", "forced"):
            assert said.plain["facts"][name]["sentinel_cosine"] >= 0.9999
            assert said.plain["facts"][name]["sentinel_kl"] <= 1e-8

    def test_log_probabilities_can_be_stored_instead(self, said: Said, run: Run) -> None:
        rows = run(estimator="logprobs")["prefill.1.logprobs"]
        torch.testing.assert_close(rows.double(), said.logprobs("prefill.1.hidden"), rtol=1e-3, atol=1e-3)

    def test_a_window_may_fill_the_context(self, said: Said) -> None:
        assert len(said["full.0.hidden"]) == 11

    def test_a_prefix_cache_for_ways_of_serving_changes_no_other_answer(self, said: Said, run: Run) -> None:
        serving = run(("prefill", "generate", "served"))
        assert serving.plain["facts"]["served"]["engaged"] == {"forwards": 4, "largest forward": 32}
        for item in range(3):
            assert torch.equal(serving[f"prefill.{item}.hidden"], said[f"prefill.{item}.hidden"])
            assert torch.equal(serving[f"generate.{item}.hidden"], said[f"generate.{item}.hidden"])
            whole = said[f"prefill.{item}.hidden"]  # in one piece: chunks round otherwise in the last bits
            torch.testing.assert_close(serving[f"served.{item}.hidden"], whole, rtol=1e-4, atol=1e-4)

    def test_greedy_tokens_are_the_engines_own(self, said: Said) -> None:
        for item, own in enumerate(said.plain["own"]["generated"]):
            assert said[f"generate.{item}.ids"].tolist() == own

    def test_the_row_behind_each_token_predicts_it(self, said: Said) -> None:
        for item in range(4):
            assert said.logprobs(f"generate.{item}.hidden").argmax(-1).tolist() == said[f"generate.{item}.ids"].tolist()

    def test_a_batch_answers_as_single_prompts_do(self, said: Said) -> None:
        for item in range(4):
            assert torch.equal(said[f"generate.{item}.ids"], said[f"one.{item}.ids"])
            one = said[f"one.{item}.hidden"]
            torch.testing.assert_close(said[f"generate.{item}.hidden"], one, rtol=1e-4, atol=1e-4)

    def test_progress_counts_every_token_once(self, said: Said) -> None:
        for name in ("prefill", "generate", "one", "stop", "forced", "timed", "together", "layers"):
            assert said.plain["progress"][name] == said.plain["facts"][name]["tokens"]

    def test_progress_tells_decoded_tokens_from_those_of_prompts(self, said: Said) -> None:
        assert said.plain["decoded"]["prefill"] == 0
        for name in ("generate", "one", "forced", "timed", "together"):
            assert 0 < said.plain["decoded"][name] < said.plain["progress"][name]

    def test_a_stop_token_ends_a_sequence_and_is_part_of_it(self, said: Said) -> None:
        for item in range(4):
            ids = said[f"stop.{item}.ids"].tolist()
            assert [token % 2 == 0 for token in ids] == [False] * (len(ids) - 1) + [True]
            assert len(said[f"stop.{item}.hidden"]) == len(ids)

    def test_forced_tokens_leave_the_states_of_the_same_text_as_a_prompt(self, said: Said) -> None:
        torch.testing.assert_close(said["forced_text.0.hidden"], said["prefill.0.hidden"], rtol=1e-4, atol=1e-4)

    def test_forced_rows_stand_one_behind_each_token(self, said: Said) -> None:
        for item, continuation in enumerate(CONTINUATIONS):
            assert said[f"forced.{item}.ids"].tolist() == list(continuation)
            assert len(said[f"forced.{item}.hidden"]) == len(continuation)
        assert said.plain["failed"]["forced_text"] == {"1": "empty continuation"}

    def test_nan_logits_fail_their_prompt_alone(self, said: Said) -> None:
        assert said.plain["failed"]["nan"] == {"0": "NaN logits at generated token 0"}
        assert len(said["nan.1.ids"]) == 12

    def test_timed_prompts_have_a_time_for_each_token(self, said: Said) -> None:
        for item in range(2):
            seconds = said[f"timed.{item}.seconds"]
            assert (len(seconds), seconds.dtype) == (7, torch.float64)
            assert (seconds.diff() > 0).all()
            assert seconds[0] > 0

    def test_a_timed_group_decodes_the_tokens_of_its_prompts_together(self, said: Said) -> None:
        free = [said[f"free.{item}.ids"].tolist() for item in range(4)]
        steps = [[list(step) for step in zip(*group, strict=True)] for group in (free[:3], free[3:])]
        assert said.plain["steps"]["together"] == steps
        assert [said[f"together.{item}.seconds"].shape for item in (0, 1)] == [(7,), (7,)]
        assert (said["together.0.seconds"].diff() >= 0).all()
        facts = said.plain["facts"]["together"]
        assert (facts["tokens"], facts["generated"]) == (4 * 9 + 4 * 6, 4 * 6)

    def test_opening_is_told_apart(self, said: Said) -> None:
        assert said.plain["phases"][:2] == ["import", "weights"]

    def test_the_tokenizer_is_the_models_own(self, said: Said) -> None:
        assert said.plain["ids"] == [5, 6, 7]

    def test_a_parameter_that_no_tensor_filled_is_named(self, run: Run, checkpoint: Path, tmp_path: Path) -> None:
        error = run(path=lacking("layers.1.mlp", checkpoint, tmp_path)).plain["error"]
        assert f"2 parameters were filled by no checkpoint tensor, first {self.unfilled}" in error
