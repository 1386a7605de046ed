"""A whole model in vLLM, without vLLM: command line, records, ratios, and arms whose process fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command import assert_one_line, command
from k16v8.bench import engine as bench
from k16v8.bench.engine import (
    EngineSettings,
    Job,
    bench_engine,
    fitting_batch,
    measure_context,
    model_config,
    ratios,
)
from k16v8.bench.model import model_shape
from k16v8.errors import NotSupportedError, OutputError

SETTINGS = EngineSettings("tiny", torch.device("cpu"), batch=2, lengths=(128, 64), steps=16)
JOB = Job("tiny", "cpu", "16/8", 2, (128, 64), 64, 16, 0, {}, None)
WORDS = ("bench", "--engine", "vllm", "--model-shape", "tiny")

# An arm's process: 16/16 holds 3000 tokens and takes 4 ms a step, 16/8 4000 and 3 ms, 8/8 6000 and 2 ms.
ARM = """
import json, os, signal, sys
job = json.loads(sys.argv[1])
held, seconds = {"16/16": (3000, 4e-3), "16/8": (4000, 3e-3), "8/8": (6000, 2e-3)}[job["pair"]]
def tell(**what):
    print(json.dumps(what), flush=True)
print("a line of the log", file=sys.stderr, flush=True)
if job["pair"] == FAILS and HOW == "early":
    sys.exit(3)
tell(arm={"start_seconds": 9.5, "cache_tokens": held, "block": 64, "backend": "FAKE"})
for tokens in job["lengths"]:
    if job["pair"] == FAILS and HOW == "killed" and tokens == 64:
        os.kill(os.getpid(), signal.SIGKILL)
    times = {"step_seconds": [seconds] * 3, "seconds": seconds, "tokens_per_second": job["batch"] / seconds}
    tell(context={
        "tokens": tokens, "asked_batch": job["batch"], "batch": job["batch"], "status": "measured", "reason": "",
        "fill_seconds": 1.5, "cached": 0.99, **times,
    })
if job["pair"] == FAILS and HOW == "told":
    tell(arm={"status": "not_supported", "reason": "NotImplementedError: no FP8 here"})
    sys.exit(0)
tell(arm={"status": "measured"})
"""


def faked(monkeypatch: pytest.MonkeyPatch, fails: str = "", how: str = "") -> list[Job]:
    """Arms that need no vLLM; the jobs that they were given."""
    jobs: list[Job] = []

    def arm_command(job: Job) -> list[str]:
        jobs.append(job)
        return [sys.executable, "-c", f"FAILS, HOW = {fails!r}, {how!r}\n{ARM}", json.dumps(asdict(job))]

    monkeypatch.setattr(bench, "arm_command", arm_command)
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    return jobs


def arms(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["formats"]: one for one in record["arms"]}


def test_every_arm_is_a_process_whose_lengths_and_ratios_are_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = faked(monkeypatch)
    record = bench_engine(SETTINGS, tmp_path / "engine.json")
    assert json.loads((tmp_path / "engine.json").read_text()) == record
    assert [path.name for path in tmp_path.iterdir()] == ["engine.json"]
    assert [job.pair for job in jobs] == ["16/16", "16/8", "8/8"]
    assert (record["schema"], record["engine"], record["model"]) == ("k16v8.engine/0", "vllm", "tiny")
    assert {one["status"] for one in record["arms"]} == {"measured"}
    assert [one["tokens"] for one in arms(record)["16/8"]["contexts"]] == [128, 64]
    speed = {"16/8 over 16/16": pytest.approx(4 / 3), "16/8 over 8/8": pytest.approx(2 / 3)}
    assert record["ratios"]["speed"] == {"128": speed, "64": speed}
    assert record["ratios"]["capacity"] == {"16/8 over 16/16": pytest.approx(4 / 3), "8/8 over 16/16": 2.0}


def test_the_record_is_written_after_every_arm_and_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch)
    seen = []
    monkeypatch.setattr(
        bench,
        "save",
        lambda path, record: seen.append([(len(one["contexts"]), one["status"]) for one in record["arms"]]),
    )
    bench_engine(replace(SETTINGS, pairs=("16/16",)), tmp_path / "engine.json")
    begun, done = (0, "unfinished"), (2, "measured")
    assert seen == [[], [begun], [begun], [(1, "unfinished")], [(2, "unfinished")], [done], [done], [done]]


@pytest.mark.parametrize(
    ("how", "status", "said", "lengths"),
    [
        ("early", "failed", "its process ended with exit code 3: a line of the log", 0),
        ("killed", "failed", "its process ended by SIGKILL: a line of the log", 1),
        ("told", "not_supported", "NotImplementedError: no FP8 here", 2),
    ],
)
@pytest.mark.parametrize("pair", ["16/16", "8/8"])
def test_an_arm_that_fails_keeps_what_it_measured_and_its_log_and_leaves_the_others(
    pair: str, how: str, status: str, said: str, lengths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, pair, how)
    record = bench_engine(SETTINGS, tmp_path / "engine.json")
    failed = arms(record).pop(pair)
    assert (failed["status"], failed["reason"], len(failed["contexts"])) == (status, said, lengths)
    others = [one for one in record["arms"] if one is not failed]
    assert {(one["status"], len(one["contexts"])) for one in others} == {("measured", 2)}
    log = tmp_path / f"engine-{pair.replace('/', '-')}.log"
    assert log.read_text() == "a line of the log\n"
    assert len(record["ratios"]["speed"]["128"]) == (1 if lengths == 0 else 2)


def test_after_its_time_nothing_more_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = faked(monkeypatch)
    record = bench_engine(replace(SETTINGS, until=time.monotonic() - 1), tmp_path / "engine.json")
    assert (record["left_out"], record["arms"], jobs) == (6, [], [])
    bench_engine(replace(SETTINGS, until=time.monotonic() + 500), tmp_path / "engine.json")
    assert all(job.seconds_left is not None and 0 < job.seconds_left <= 500 for job in jobs)


def test_only_the_arm_16_8_has_the_plug_in_and_its_knobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = faked(monkeypatch)
    bench_engine(replace(SETTINGS, knobs={"stages": 3}), tmp_path / "engine.json")
    assert [(job.pair, job.knobs) for job in jobs] == [("16/16", {}), ("16/8", {"stages": 3}), ("8/8", {})]
    monkeypatch.setenv("K16V8", "int8")
    assert [bench.arm_environment(job)["K16V8"] for job in jobs] == ["0", "1", "0"]
    here = bench.arm_environment(jobs[0])
    assert (here["HF_HUB_OFFLINE"], here["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("1", "0")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in here
    monkeypatch.setattr(bench, "find_spec", lambda _name: None)
    assert bench.arm_environment(jobs[0])["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_ratios_are_of_equal_batches_and_of_what_was_measured() -> None:
    def arm(pair: str, held: int | None, *steps: tuple[int, int, float | None]) -> dict[str, Any]:
        contexts = [{"tokens": tokens, "batch": batch, "seconds": seconds} for tokens, batch, seconds in steps]
        return {"formats": pair, "cache_tokens": held, "contexts": contexts}

    wide = arm("16/16", 300, (64, 4, 8.0), (128, 2, 9.0), (256, 1, None))
    mine = arm("16/8", 400, (64, 4, 4.0), (128, 4, 9.0), (256, 1, 9.0))
    found = ratios([wide, mine, arm("8/8", None)])
    assert found == {"speed": {"64": {"16/8 over 16/16": 2.0}}, "capacity": {"16/8 over 16/16": 4 / 3}}
    assert ratios([]) == {"speed": {}, "capacity": {}}


def test_a_batch_that_the_cache_does_not_hold_is_halved() -> None:
    # 128 tokens, the one that is computed, 8 and 16 decoded, and a block of room: 4 blocks of 64
    sizes = {"steps": 16, "block": 64}
    for blocks, batch in ((4 * 8 + 1, 8), (4 * 8, 4), (4 * 2 + 1, 2), (5, 1), (4, 0)):
        assert fitting_batch(8, 128, cache_tokens=64 * blocks, **sizes) == batch


def timed(short: float, steps: list[float], cached: float = 0.99) -> dict[str, Any]:
    """A context whose runs take ``short`` seconds, and 16 times one of ``steps`` more."""
    left = iter(steps)
    entry: dict[str, Any] = {"batch": 2, "status": "unfinished", "reason": "", "seconds": None}

    def run(count: int) -> tuple[float, float]:
        return (short + 16 * next(left) if count == 8 + 16 else short), (0.0 if count == 1 else cached)

    measure_context(entry, run, 16)
    return entry


def test_a_step_is_the_median_difference_of_two_lengths() -> None:
    entry = timed(0.5, [0.03, 0.01, 0.02])
    assert (entry["status"], entry["reason"], entry["cached"], entry["fill_seconds"]) == ("measured", "", 0.99, 0.5)
    assert entry["step_seconds"] == pytest.approx([0.03, 0.01, 0.02])
    assert (entry["seconds"], entry["tokens_per_second"]) == (pytest.approx(0.02), pytest.approx(100))


def test_prompts_that_were_not_found_in_the_cache_have_no_time() -> None:
    entry = timed(0.5, [], cached=0.5)
    assert (entry["status"], entry["seconds"], entry["step_seconds"]) == ("wrong", None, [])
    assert entry["reason"].startswith("only 50% of the prompts were found in the prefix cache, 90% are needed")


def test_a_difference_that_is_lost_in_noise_is_not_a_time() -> None:
    entry = timed(0.5, [-0.01, 0.0, 0.02])
    assert (entry["status"], entry["seconds"]) == ("wrong", None)
    assert "too busy" in entry["reason"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotImplementedError("FP8 KV cache on CPU requires x86 with AVX-512 or AMX."), "not_supported"),
        (ImportError("no module named flashinfer"), "not_supported"),
        (ValueError("kv_cache_dtype not supported"), "not_supported"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "no_memory"),
        (ValueError("No available memory for the cache blocks."), "no_memory"),
        (ValueError("Free memory on device (1/2 GiB) on startup is less than desired"), "no_memory"),
        (RuntimeError("something\nelse"), "failed"),
    ],
)
def test_what_vllm_raises_has_a_status_and_one_line(error: Exception, status: str) -> None:
    found, reason = bench._failure(error)
    assert (found, "\n" in reason) == (status, False)
    assert reason.startswith(type(error).__name__)


def test_a_length_beyond_the_models_positions_is_said_and_the_others_are_measured() -> None:
    told: list[dict[str, Any]] = []
    assert bench._possible(replace(JOB, lengths=(64, 4096)), told.append) == [64]
    (context,) = (one["context"] for one in told)
    assert (context["tokens"], context["status"]) == (4096, "not_supported")
    assert context["reason"] == "tiny has 4096 positions"


@pytest.mark.parametrize("name", ["qwen2.5-7b", "llama-3.1-8b", "mistral-7b", "tiny"])
def test_the_config_has_the_sizes_of_the_shape(name: str) -> None:
    shape, config = model_shape(name), model_config(name)
    one = shape.geometry
    assert config["num_attention_heads"] * config["head_dim"] == one.heads * one.head_dim
    assert (config["num_key_value_heads"], config["hidden_size"]) == (one.kv_heads, one.hidden)
    assert (config["num_hidden_layers"], config["vocab_size"]) == (shape.layers, shape.vocabulary)
    assert config["max_position_embeddings"] >= 30720 + 64 or name == "tiny"


def test_the_command_prints_two_tables_and_the_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = faked(monkeypatch, "8/8", "told")
    path = tmp_path / "engine.json"
    done = command(*WORDS, "--lengths", "128", "--batch", "4", "--output", path)
    assert (done.exit_code, jobs[0].lengths, jobs[0].batch, jobs[0].page) == (0, (128,), 4, 64)
    for said in ("FAKE", "128 tokens, 16/8 over 16/16: 1.333×", "tokens in the cache, 8/8 over 16/16: 2.000×"):
        assert said in done.stdout
    assert "8/8: not supported (NotImplementedError: no FP8 here)" in done.stdout
    done = command(*WORDS, "--formats", "16/8", "--lengths", "64", "--json", "--output", path)
    assert json.loads(done.stdout) == json.loads(path.read_text())
    assert [job.pair for job in jobs[3:]] == ["16/8"]
    assert command(*WORDS, "--minutes", "0.000001", "--output", path).stdout.endswith(
        "3 measurements were left out: time was over\n"
    )


def test_a_command_that_measured_nothing_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, "8/8", "early")
    done = command(*WORDS, "--formats", "8/8", "--output", tmp_path / "engine.json")
    assert done.exit_code == 1
    assert "8/8: failed (its process ended with exit code 3: a line of the log)" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "sglang"), "unknown engine 'sglang'"),
        (("--rows", "3"), "--rows: a whole model has none"),
        (("--resume", "x"), "--resume: a whole model has none"),
        (("--batch", "1,2"), "a whole model has one batch"),
        (("--kernels", "torch"), "--kernels: has no effect with --engine, the plug-in chooses its kernels"),
        (("--seconds", "1"), "--seconds: has no effect with --engine"),
        (("--layouts", "awq"), "--layouts: has no effect with --engine"),
        (("--split-tokens", "64"), "--split-tokens: has no effect with --engine"),
        (("--stages", "3"), "knobs are of decode in Triton"),
        (("--formats", "16/4"), "unknown formats '16/4'"),
        (("--operations", "weights"), "the weights of a whole model are of 16 bits"),
        (("--device", "cuda"), "sees no"),
        (("--page", "24"), "page 24: pages have a multiple of 16 tokens"),
        (("--lengths", "100"), "length 100 is not a multiple of the page, 64 tokens"),
        (("--lengths", "4k"), "length 4096: tiny has 4096 positions"),
    ],
)
def test_what_an_engine_cannot_do_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faked(monkeypatch)
    assert_one_line(command(*WORDS, *words), said)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_needs_a_models_shape_and_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_line(command("bench", "--engine", "vllm"), "--engine vllm: add --model-shape")
    monkeypatch.setattr(bench, "find_spec", lambda _name: None)
    assert_one_line(command(*WORDS), "vLLM is not installed for")
    with pytest.raises(NotSupportedError):
        bench_engine(SETTINGS, tmp_path / "engine.json")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_and_a_folder_as_output_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = faked(monkeypatch)
    with pytest.raises(OutputError):
        bench_engine(SETTINGS, tmp_path)
    monkeypatch.setattr(bench, "free_bytes", lambda _: 1 << 20)
    assert_one_line(command(*WORDS, "--output", tmp_path / "engine.json"), "the weights take")
    assert jobs == []


def test_an_arms_process_says_why_it_ends_on_its_own_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself, on a Python without vLLM."""
    (tmp_path / "vllm.py").write_text("print('noise of a library')\nraise ImportError('no vLLM here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    record = bench_engine(replace(SETTINGS, pairs=("16/16",)), tmp_path / "engine.json")
    (arm,) = record["arms"]
    assert (arm["status"], arm["reason"]) == ("not_supported", "ImportError: no vLLM here")
    assert "noise of a library" in (tmp_path / "engine-16-16.log").read_text()


def test_an_arms_process_ends_when_its_parent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would keep the GPU."""
    (tmp_path / "vllm.py").write_text(f"open({str(tmp_path / 'begun')!r}, 'w').close()\nimport time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    arm = bench.arm_command(replace(JOB, pair="16/16"))
    with subprocess.Popen(arm, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.05)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1
