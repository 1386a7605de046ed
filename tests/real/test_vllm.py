"""vLLM for real, on the CPU: against its own log-probabilities, Transformers, and itself in other settings."""

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

from fidelab import compare
from fidelab.captures.container import to_float32
from fidelab.core import Arm, KVSpec
from fidelab.engines.hf import HFEngine
from fidelab.environments.answers import ask
from fidelab.environments.environment import Environment, locate
from fidelab.errors import EngineError
from fidelab.models import Model
from fidelab.probes import Forced, Generate, Prefill, Probe, Timed, probe_record
from tests.engines import tiny

VOCAB = 515  # odd: vLLM pads it to a multiple of 64 for each rank
BAD = 9  # a token whose embedding is NaN
SCRIPT = Path(__file__).parent / "vllm_answers.py"
MISREAD = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "turboquant_k8v4", "nvfp4", "float16"]


def _environment() -> Environment | None:
    try:
        return locate("vllm")
    except EngineError:
        return None


ENVIRONMENT = _environment()
pytestmark = pytest.mark.skipif(ENVIRONMENT is None, reason="vLLM is not installed: fidelab engines install vllm --cpu")


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(10, VOCAB, n))


WINDOWS = tuple(tokens(100, seed) for seed in range(3))
PROMPTS = tuple(tokens(n, 10 + n) for n in (5, 17, 40, 9))
EQUAL = tuple(tokens(9, 30 + n) for n in range(4))
CONTINUATIONS = tuple(tokens(12, 50 + n) for n in range(4))
PREFILL = Prefill("kld", WINDOWS, 10, 98, tuple((0,) * 89 for _ in WINDOWS))
GENERATE = Generate("trajectory", PROMPTS, 12, (), batch=4)
PROBES: dict[str, Probe] = {
    "prefill": PREFILL,
    "generate": GENERATE,
    "one": replace(GENERATE, batch=1),
    "stop": replace(GENERATE, max_tokens=400, stop=tuple(range(0, VOCAB, 2)), rows=False),
    "forced": Forced("forced", PROMPTS, CONTINUATIONS),
    "forced_text": Forced("forced", (WINDOWS[0][:11],), (WINDOWS[0][11:],)),
    "timed": Timed("timing", PROMPTS[:2], n=6),
    "together": Timed("timing", EQUAL, n=6, warmup=0, batch=3),
    "free": replace(GENERATE, prompts=EQUAL, max_tokens=7, batch=1, rows=False),
    "crowd": Timed("timing", (tokens(9, 30),) * 17, n=6, batch=17),
    "nan": replace(GENERATE, prompts=((*PROMPTS[0], BAD), PROMPTS[1])),
    "long": Prefill("kld", (tokens(600, 1),), 10, 598, ((0,) * 589,)),
}
OWN = {"prompts": PROMPTS, "max_tokens": 12, "window": WINDOWS[0]}


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
    return tiny.save(model, tmp_path_factory.mktemp("vllm") / "odd")


Run = Callable[..., Said]


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ask one arm in a process of vLLM's environment: ``run(probes, kv, dtype, path, own, options)``."""

    def asked(
        probes: tuple[str, ...] = ("prefill",),
        kv: str = "auto",
        dtype: str = "float32",
        path: Path = checkpoint,
        own: bool = False,
        **options: str,
    ) -> Said:
        assert ENVIRONMENT is not None
        named = {"kv-cache-memory": "32M", **{key.replace("_", "-"): value for key, value in options.items()}}
        folder = tmp_path_factory.mktemp("answers")
        job = {
            "arm": arm(kv, dtype, path, **named).record(),
            "probes": {name: probe_record(PROBES[name]) for name in probes},
            "own": OWN if own else None,
        }
        (folder / "job.json").write_text(json.dumps(job))
        done = subprocess.run(
            [ENVIRONMENT.python, str(SCRIPT), str(folder / "job.json"), str(folder)],
            env={**os.environ, **ENVIRONMENT.variables()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (folder / "said.json").exists(), done.stderr[-3000:]
        with np.load(folder / "arrays.npz") as arrays:
            return Said(dict(arrays), json.loads((folder / "said.json").read_text()))

    return cache(asked)


def arm(kv: str, dtype: str, path: Path, **options: str) -> Arm:
    named = tuple(sorted(options.items()))
    return Arm(kv, "vllm", path.name, str(path), "0" * 8, KVSpec.parse(kv), dtype, "cpu", 1, named)


EVERYTHING = tuple(PROBES)


@pytest.fixture(scope="module")
def said(run: Run) -> Said:
    """All probes in one process, and vLLM's own answers."""
    return run(EVERYTHING, own=True)


# ------------------------------------------------------------------------------------------------ states


def test_states_and_head_give_the_engines_own_log_probabilities(said: Said) -> None:
    ours = said.logprobs("prefill.0.hidden")
    for row, theirs in zip(ours, said.plain["own"]["prompt_logprobs"][PREFILL.first :], strict=False):
        assert len(theirs) >= 20
        for token, value in theirs.items():
            assert float(row[int(token)]) == pytest.approx(value, abs=2e-5)


def test_states_are_those_of_transformers(said: Said, checkpoint: Path) -> None:
    engine, answers = HFEngine(), tiny.Answers()
    engine.open(tiny.arm(checkpoint))
    engine.answer(PREFILL, answers)
    for item in range(3):
        theirs = torch.from_numpy(to_float32(answers.items[item]["hidden"]))
        torch.testing.assert_close(said[f"prefill.{item}.hidden"], theirs, rtol=1e-4, atol=1e-4)


def test_a_prompt_in_chunks_leaves_the_same_states(said: Said, run: Run) -> None:
    chunked = run(max_num_batched_tokens="32")
    assert chunked.plain["ran"]["max_num_batched_tokens"] == 32
    for item in range(3):
        torch.testing.assert_close(chunked[f"prefill.{item}.hidden"], said[f"prefill.{item}.hidden"])


def test_two_ranks_leave_the_same_states_and_a_head_without_padding(said: Said, run: Run, checkpoint: Path) -> None:
    two = run(("prefill", "forced"), tp="2")
    head = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    assert torch.equal(two["head.weight"], head)
    assert two.plain["ran"]["tp"] == 2
    assert two.plain["ran"]["cache_bytes_per_token"] == said.plain["ran"]["cache_bytes_per_token"]
    for name in ("prefill.0.hidden", "prefill.2.hidden", "forced.1.hidden"):
        torch.testing.assert_close(two[name], said[name], rtol=1e-4, atol=1e-4)


def test_sentinels_replay_the_live_logits(said: Said) -> None:
    for name in ("prefill", "generate", "forced"):
        assert said.plain["facts"][name]["sentinel_cosine"] >= 0.9999
        assert said.plain["facts"][name]["sentinel_kl"] <= 1e-8


def test_log_probabilities_can_be_stored_instead(said: Said, run: Run) -> None:
    rows = run(estimator="logprobs")["prefill.1.logprobs"]
    torch.testing.assert_close(rows.double(), said.logprobs("prefill.1.hidden"), rtol=1e-3, atol=1e-3)


# ----------------------------------------------------------------------------------------------- decoding


def test_greedy_tokens_are_the_engines_own(said: Said) -> None:
    for item, own in enumerate(said.plain["own"]["generated"]):
        assert said[f"generate.{item}.ids"].int().tolist() == own


def test_the_row_behind_each_token_predicts_it(said: Said) -> None:
    for item in range(4):
        assert said.logprobs(f"generate.{item}.hidden").argmax(-1).tolist() == said[f"generate.{item}.ids"].tolist()


def test_a_batch_answers_as_single_prompts_do(said: Said) -> None:
    for item in range(4):
        assert torch.equal(said[f"generate.{item}.ids"], said[f"one.{item}.ids"])
        torch.testing.assert_close(said[f"generate.{item}.hidden"], said[f"one.{item}.hidden"], rtol=1e-4, atol=1e-4)


def test_progress_counts_every_token_once(said: Said) -> None:
    for name in ("prefill", "generate", "one", "stop", "forced", "timed", "together"):
        assert said.plain["progress"][name] == said.plain["facts"][name]["tokens"]


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(said: Said) -> None:
    for item in range(4):
        ids = said[f"stop.{item}.ids"].int().tolist()
        assert [token % 2 == 0 for token in ids] == [False] * (len(ids) - 1) + [True]


def test_forced_tokens_leave_the_states_of_the_same_text_as_a_prompt(said: Said) -> None:
    torch.testing.assert_close(said["forced_text.0.hidden"], said["prefill.0.hidden"], rtol=1e-4, atol=1e-4)


def test_forced_rows_stand_one_behind_each_token(said: Said) -> None:
    for item, continuation in enumerate(CONTINUATIONS):
        assert said[f"forced.{item}.ids"].int().tolist() == list(continuation)
        assert len(said[f"forced.{item}.hidden"]) == len(continuation)


def test_nan_logits_fail_their_prompt_alone(said: Said) -> None:
    assert said.plain["failed"]["nan"] == {"0": "NaN logits at generated token 0"}
    assert len(said["nan.1.ids"]) == 12


def test_timed_prompts_have_a_time_for_each_token(said: Said) -> None:
    for item in range(2):
        seconds = said[f"timed.{item}.seconds"]
        assert len(seconds) == 7
        assert seconds.dtype == torch.float64
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


def test_what_does_not_fit_is_said_in_one_line(said: Said) -> None:
    assert said.plain["errors"] == {
        "long": "600 tokens are more than this arm's 512: raise max-model-len",
        "crowd": "17 sequences are more than this arm's 16 at once: raise max-num-seqs",
    }


def test_the_tokenizer_is_the_models_own(said: Said) -> None:
    assert said.plain["ids"] == [5, 6, 7]


# ------------------------------------------------------------------------------------------------ formats


def test_the_record_says_what_ran(said: Said) -> None:
    ran = said.plain["ran"]
    assert (ran["attention"], ran["k_format"], ran["k_dtype"], ran["kv_layers"]) == ("CPU_ATTN", "auto", "float32", 2)
    assert ran["cache_bytes_per_token"] == ran["expected_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert ran["cache_bytes"] <= 32 << 20
    assert ran["cache_tokens"] == ran["cache_blocks"] * ran["block_size"]
    assert (ran["prefix_caching"], ran["enforce_eager"], ran["tp"], ran["threads"]) == (False, True, 1, 1)
    assert (ran["unfilled_parameters"], ran["read_back"]["matches"]) == (0, 1.0)


@pytest.mark.parametrize(("kv", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_an_eight_bit_cache_is_read_back_and_costs_half(run: Run, kv: str, dtype: str) -> None:
    wide, narrow = run(dtype="bfloat16"), run(kv=kv, dtype="bfloat16")
    ran = narrow.plain["ran"]
    assert (ran["k_format"], ran["v_format"], ran["read_back"]["stored"]) == (kv, kv, dtype)
    assert ran["read_back"]["matches"] == 1.0
    assert ran["cache_bytes_per_token"] == wide.plain["ran"]["cache_bytes_per_token"] / 2
    assert (ran["scale_source"], ran["scale_granularity"]) == ("default 1.0", "per tensor")
    assert not torch.equal(narrow["prefill.0.hidden"], wide["prefill.0.hidden"])


@pytest.mark.parametrize("kv", MISREAD)
def test_a_format_that_the_kernel_misreads_is_not_claimed(run: Run, kv: str) -> None:
    ran = run(kv=kv, dtype="bfloat16", force="yes").plain["ran"]
    assert ran["forced"]
    assert ran["k_format"].endswith(", which CPU_ATTN does not list")


def test_formats_that_the_kernel_misreads_are_refused_before_anything_runs(checkpoint: Path) -> None:
    assert ENVIRONMENT is not None
    with ask(ENVIRONMENT) as engine:
        assert {*MISREAD} < {*engine.kv_names()}
        for kv in MISREAD:
            verdict = engine.supports(arm(kv, "bfloat16", checkpoint))
            assert (verdict.ok, f"CPU_ATTN reads auto, fp8, fp8_e4m3, fp8_e5m2, not {kv}" in verdict.reason) == (
                False,
                True,
            )
        for kv in ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"):
            assert engine.supports(arm(kv, "bfloat16", checkpoint)).ok


def test_a_parameter_that_no_tensor_filled_is_named(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    kept = {k: v for k, v in load_file(checkpoint / "model.safetensors").items() if "layers.1.mlp" not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = run(path=tmp_path).plain["error"]
    assert "2 parameters were filled by no checkpoint tensor, first model.layers.1.mlp.down_proj.weight" in error


def test_another_attention_backend_than_asked_for_is_an_error(run: Run) -> None:
    error = run(attention_backend="TORCH_SDPA").plain["error"]
    assert error == "attention-backend=TORCH_SDPA was asked for, vLLM runs CPU_ATTN"


# --------------------------------------------------------------------------------------------- whole runs


@pytest.mark.model
def test_a_run_measures_what_works_and_says_why_the_rest_does_not(smollm2: Model, tmp_path: Path) -> None:
    report = compare(
        "smollm2-135m",
        engine="vllm",
        reference="auto",
        candidates=["fp8_e4m3", "int8_per_token_head"],
        axes={"kld": {"windows": 4, "n_ctx": 128}},
        device="cpu",
        threads=1,
        output_dir=str(tmp_path),
    )
    fp8, broken = report.candidates
    assert fp8.status == "ok"
    assert fp8.axes.kld is not None
    assert 0.001 < (fp8.axes.kld.mean or 0) < 0.2
    assert broken.status == "not_supported"
    assert "CPU_ATTN reads auto, fp8, fp8_e4m3, fp8_e5m2, not int8_per_token_head" in (broken.reason or "")
