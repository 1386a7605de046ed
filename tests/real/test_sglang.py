"""SGLang for real, on the CPU: against its own log-probabilities, Transformers, and itself in other settings.

On a CPU it runs through import stand-ins (``tests/standins``) for two packages that want CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from fidelab.captures.container import to_float32
from fidelab.core import Arm, KVSpec
from fidelab.engines.hf import HFEngine
from fidelab.environments.answers import ask
from fidelab.environments.environment import Environment, locate
from fidelab.errors import EngineError
from fidelab.probes import Forced, Generate, Prefill, Probe, Timed, probe_record
from tests.engines import tiny

VOCAB = 515  # odd: SGLang pads it
BAD = 9  # a token whose embedding is NaN
SCRIPT = Path(__file__).parent / "sglang_answers.py"
STANDINS = Path(__file__).parent.parent / "standins"


def _environment() -> Environment | None:
    try:
        return locate("sglang", pythonpath=[str(STANDINS)])
    except EngineError:
        return None


ENVIRONMENT = _environment()
pytestmark = pytest.mark.skipif(
    ENVIRONMENT is None, reason="SGLang is not installed: fidelab engines install sglang --cpu"
)


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(10, VOCAB, n))


WINDOWS = tuple(tokens(100, seed) for seed in range(3))
PROMPTS = tuple(tokens(n, 10 + n) for n in (5, 17, 40, 9))
EQUAL = tuple(tokens(9, 30 + n) for n in range(4))
CONTINUATIONS = tuple(tokens(12, 50 + n) for n in range(4))
GENERATE = Generate("trajectory", PROMPTS, 12, (), batch=4)
PREFILL = Prefill("kld", WINDOWS, 10, 98, tuple((0,) * 89 for _ in WINDOWS))
PROBES: dict[str, Probe] = {
    "prefill": PREFILL,
    "generate": GENERATE,
    "one": replace(GENERATE, batch=1),
    "stop": replace(GENERATE, max_tokens=400, stop=tuple(range(0, VOCAB, 2))),
    "forced": Forced("forced", PROMPTS, CONTINUATIONS),
    "forced_text": Forced("forced", (WINDOWS[0][:11], WINDOWS[1][:3]), (WINDOWS[0][11:], ())),
    "timed": Timed("timing", PROMPTS[:2], n=6),
    "together": Timed("timing", EQUAL, n=6, warmup=0, batch=3),
    "free": replace(GENERATE, prompts=EQUAL, max_tokens=7, batch=1, rows=False),
    "crowd": Timed("timing", (tokens(500, 30),) * 5, n=6, batch=5),
    "nan": replace(GENERATE, prompts=((*PROMPTS[0], BAD), PROMPTS[1])),
    "full": Prefill("kld", (tokens(512, 1),), 500, 510, ((0,) * 11,)),
    "long": Prefill("kld", (tokens(600, 1),), 10, 598, ((0,) * 589,)),
    "foreign": replace(GENERATE, prompts=((VOCAB, 1),)),
}
OWN = {"prompts": PROMPTS, "max_tokens": 12, "window": WINDOWS[0], "vocabulary": VOCAB}


@dataclass(frozen=True)
class Said:
    """What the script found: arrays by ``probe.item.name``, the rest as plain data."""

    arrays: dict[str, NDArray[Any]]
    plain: dict[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def logprobs(self, name: str) -> Tensor:
        return (self[name] @ self["head.weight"].T).double().log_softmax(-1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights, in float32, whose head is not the embedding."""
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = transformers.LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, **shape, **heads, **none)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny.randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.model.embed_tokens.weight[BAD] = float("nan")
    return tiny.save(model, tmp_path_factory.mktemp("sglang") / "odd")


Run = Callable[..., Said]


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ask one arm in a process of SGLang's environment: ``run(probes, kv, path, own, end, options)``."""

    def asked(
        probes: tuple[str, ...] = ("prefill",),
        kv: str = "auto",
        path: Path = checkpoint,
        own: bool = False,
        end: bool = False,
        **options: str,
    ) -> Said:
        assert ENVIRONMENT is not None
        folder = tmp_path_factory.mktemp("answers")
        named = {"max-total-tokens": "2048", **{key.replace("_", "-"): value for key, value in options.items()}}
        job = {
            "arm": arm(kv, path, **named).record(),
            "probes": {name: probe_record(PROBES[name]) for name in probes},
            "own": OWN if own else None,
            "end": end,
        }
        (folder / "job.json").write_text(json.dumps(job))
        with (folder / "log").open("w") as log:  # a pipe would be held open by whatever outlives the script
            subprocess.run(
                [ENVIRONMENT.python, str(SCRIPT), str(folder / "job.json"), str(folder)],
                env={**os.environ, **ENVIRONMENT.variables()},
                stdout=log,
                stderr=log,
                check=False,
            )
        assert (folder / "said.json").exists(), (folder / "log").read_text()[-3000:]
        with np.load(folder / "arrays.npz") as arrays:
            return Said(dict(arrays), json.loads((folder / "said.json").read_text()))

    return cache(asked)


def arm(kv: str, path: Path, **options: str) -> Arm:
    named = tuple(sorted(options.items()))
    return Arm(kv, "sglang", path.name, str(path), "0" * 8, KVSpec.parse(kv), "float32", "cpu", 1, named)


@pytest.fixture(scope="module")
def said(run: Run) -> Said:
    """All probes in one process, SGLang's own answers, and the end of its scheduler."""
    return run(tuple(PROBES), own=True, end=True)


# ------------------------------------------------------------------------------------------------ states


def test_states_and_head_give_the_engines_own_log_probabilities(said: Said) -> None:
    theirs = torch.tensor(said.plain["own"]["logprobs"], dtype=torch.float64)[PREFILL.first :]
    torch.testing.assert_close(said.logprobs("prefill.0.hidden"), theirs, rtol=0, atol=1e-4)


def test_states_are_those_of_transformers(said: Said, checkpoint: Path) -> None:
    engine, answers = HFEngine(), tiny.Answers()
    engine.open(tiny.arm(checkpoint))
    engine.answer(PREFILL, answers)
    for item in range(3):
        theirs = torch.from_numpy(to_float32(answers.items[item]["hidden"]))
        torch.testing.assert_close(said[f"prefill.{item}.hidden"], theirs, rtol=1e-4, atol=1e-4)


def test_the_head_is_the_checkpoints_without_padding_and_one_object(said: Said, checkpoint: Path) -> None:
    head = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    assert torch.equal(said["head.weight"], head)
    assert said.plain["heads"] == 1


def test_a_prompt_in_chunks_leaves_the_same_states(said: Said, run: Run) -> None:
    chunked = run(("prefill", "forced"), chunked_prefill_size="32")
    assert chunked.plain["ran"]["chunked_prefill"] == 32
    for name in ("prefill.0.hidden", "prefill.1.hidden", "prefill.2.hidden", "forced.2.hidden"):
        torch.testing.assert_close(chunked[name], said[name], rtol=1e-4, atol=1e-4)


def test_two_ranks_leave_the_same_states_and_a_head_without_padding(said: Said, run: Run) -> None:
    two = run(("prefill", "forced"), tp="2")
    assert torch.equal(two["head.weight"], said["head.weight"])
    assert two.plain["ran"]["tp"] == 2
    assert two.plain["ran"]["cache_bytes_per_token"] == said.plain["ran"]["cache_bytes_per_token"]
    for name in ("prefill.0.hidden", "prefill.2.hidden", "forced.1.hidden"):
        torch.testing.assert_close(two[name], said[name], rtol=1e-4, atol=1e-4)


def test_log_probabilities_can_be_stored_instead(said: Said, run: Run) -> None:
    rows = run(estimator="logprobs")["prefill.1.logprobs"]
    torch.testing.assert_close(rows.double(), said.logprobs("prefill.1.hidden"), rtol=1e-3, atol=1e-3)


def test_sentinels_replay_the_live_logits(said: Said) -> None:
    for name in ("prefill", "generate", "forced"):
        assert said.plain["facts"][name]["sentinel_cosine"] >= 0.9999
        assert said.plain["facts"][name]["sentinel_kl"] <= 1e-8


# ----------------------------------------------------------------------------------------------- decoding


def test_greedy_tokens_are_the_engines_own(said: Said) -> None:
    for item, own in enumerate(said.plain["own"]["generated"]):
        assert said[f"generate.{item}.ids"].tolist() == own


def test_the_row_behind_each_token_predicts_it(said: Said) -> None:
    for item in range(4):
        assert said.logprobs(f"generate.{item}.hidden").argmax(-1).tolist() == said[f"generate.{item}.ids"].tolist()


def test_a_batch_answers_as_single_prompts_do(said: Said) -> None:
    for item in range(4):
        assert torch.equal(said[f"generate.{item}.ids"], said[f"one.{item}.ids"])
        torch.testing.assert_close(said[f"generate.{item}.hidden"], said[f"one.{item}.hidden"], rtol=1e-4, atol=1e-4)


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(said: Said) -> None:
    for item in range(4):
        ids = said[f"stop.{item}.ids"].tolist()
        assert [token % 2 == 0 for token in ids] == [False] * (len(ids) - 1) + [True]
        assert len(said[f"stop.{item}.hidden"]) == len(ids)


def test_forced_tokens_leave_the_states_of_the_same_text_as_a_prompt(said: Said) -> None:
    torch.testing.assert_close(said["forced_text.0.hidden"], said["prefill.0.hidden"], rtol=1e-4, atol=1e-4)


def test_forced_rows_stand_one_behind_each_token(said: Said) -> None:
    for item, continuation in enumerate(CONTINUATIONS):
        assert said[f"forced.{item}.ids"].tolist() == list(continuation)
        assert len(said[f"forced.{item}.hidden"]) == len(continuation)
    assert said.plain["failed"]["forced_text"] == {"1": "empty continuation"}


def test_nan_logits_fail_their_prompt_alone(said: Said) -> None:
    assert said.plain["failed"]["nan"] == {"0": "NaN logits at generated token 0"}
    assert len(said["nan.1.ids"]) == 12


def test_timed_prompts_have_a_time_for_each_token(said: Said) -> None:
    for item in range(2):
        seconds = said[f"timed.{item}.seconds"]
        assert (len(seconds), seconds.dtype) == (7, torch.float64)
        assert (seconds.diff() > 0).all()
        assert seconds[0] > 0


def test_a_timed_group_decodes_the_tokens_of_its_prompts_together(said: Said) -> None:
    free = [said[f"free.{item}.ids"].int().tolist() for item in range(4)]
    steps = [[list(step) for step in zip(*group, strict=True)] for group in (free[:3], free[3:])]
    assert said.plain["steps"]["together"] == steps
    assert [said[f"together.{item}.seconds"].shape for item in (0, 1)] == [(7,), (7,)]
    assert (said["together.0.seconds"].diff() >= 0).all()
    facts = said.plain["facts"]["together"]
    assert (facts["tokens"], facts["generated"]) == (4 * 9 + 4 * 6, 4 * 6)


def test_opening_is_told_apart(said: Said) -> None:
    assert said.plain["phases"][:2] == ["import", "weights"]


def test_a_window_may_fill_the_context(said: Said) -> None:
    assert len(said["full.0.hidden"]) == 11


def test_the_tokenizer_is_the_models_own(said: Said) -> None:
    assert said.plain["ids"] == [5, 6, 7]


# ------------------------------------------------------------------------------------- what ran, what not


def test_the_record_says_what_ran(said: Said) -> None:
    ran = said.plain["ran"]
    assert (ran["attention"], ran["k_format"], ran["v_format"]) == ("TorchNativeAttnBackend", "auto", "auto")
    assert (ran["k_dtype"], ran["kv_layers"], ran["layers_without_kv"]) == ("float32", 2, 0)
    assert ran["cache_bytes_per_token"] == ran["expected_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert (ran["cache_tokens"], ran["cache_read_back"], ran["unfilled_parameters"]) == (2048, 1.0, 0)
    assert (ran["prefix_caching"], ran["graphs"], ran["tp"], ran["threads"]) == (False, False, 1, 1)
    assert ran["chunked_prefill"] is None


def test_a_16_bit_cache_in_a_32_bit_model_is_read_back_and_costs_half(said: Said, run: Run) -> None:
    ran = run(kv="bfloat16").plain["ran"]
    assert (ran["k_format"], ran["k_dtype"], ran["cache_read_back"]) == ("bfloat16", "bfloat16", 1.0)
    assert ran["cache_bytes_per_token"] == said.plain["ran"]["cache_bytes_per_token"] / 2


def test_what_cannot_be_answered_is_said_in_one_line(said: Said) -> None:
    errors = said.plain["errors"]
    assert errors["long"].startswith("599 + 1 tokens exceed the context of 512")
    assert errors["foreign"] == "token ids 1 … 515 are not all in the vocabulary of 515"
    assert errors["crowd"].startswith("5 prompts of 2539 tokens in all do not fit the cache of 2039 together")
    assert errors.keys() == {"long", "foreign", "crowd", "ended"}


def test_a_scheduler_that_dies_is_an_error_and_not_a_hang(said: Said) -> None:
    assert said.plain["errors"]["ended"] == "SGLang's scheduler has ended: see the log"


def test_no_process_outlives_its_engine(said: Said) -> None:
    assert said.plain["left"] == []
    assert not [pid for pid in said.plain["processes"] if Path(f"/proc/{pid}").exists()]


def test_a_parameter_that_no_tensor_filled_is_named(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    kept = {k: v for k, v in load_file(checkpoint / "model.safetensors").items() if "layers.1.mlp" not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = run(path=tmp_path).plain["error"]
    assert error == "2 parameters were filled by no checkpoint tensor, first model.layers.1.mlp.gate_up_proj.weight"


def test_formats_that_cpus_have_not_are_refused_before_anything_runs(checkpoint: Path) -> None:
    assert ENVIRONMENT is not None
    with ask(ENVIRONMENT) as engine:
        names = engine.kv_names()
        assert {"auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"} <= {*names}
        for kv in ("auto", "bf16", "bfloat16"):
            assert engine.supports(arm(kv, checkpoint)).ok
        assert not engine.supports(arm("fp8_e5m2", checkpoint)).ok
