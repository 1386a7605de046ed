"""The decode rate next to the loss: what a run times by itself, and what its answer says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.experiment import load
from fidelab.engines.base import engine_class
from fidelab.engines.fake import FakeEngine
from fidelab.engines.options import with_default
from fidelab.plan.prepare import prepare
from fidelab.plan.speed import BUDGET, MIN_CONTEXT, REPEATS, affordable, measures_speed
from fidelab.results.measurement import Measurement
from fidelab.results.rates import DECODED
from tests.run.harness import Done, cli, compare, fake_file, refused

WRITTEN = 64.0  # tokens per second that the fake engine writes
CONTEXT = MIN_CONTEXT  # of a run whose windows are shorter


def starts(done: Done) -> int:
    """Processes that opened an engine."""
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    return sum(event["event"] == "opened" for event in events)


def rate(arm: dict[str, Any]) -> float | None:
    return Measurement.model_validate(arm["benches"]["decode"]).value("isolated", {"depth": CONTEXT, "batch": 1})


def small(cwd: Path, *flags: object) -> Done:
    return compare(cwd, "tilt[q=0.6]", flags=flags, windows=8, limit=2)


def test_a_cpu_is_timed_only_when_asked(tmp_path: Path) -> None:
    done = small(tmp_path)
    assert not (done.folder / "speed").exists()
    assert "speed" in done.report["recommendation"]["untested"]


def test_servers_and_gpus_are_timed_by_default_and_no_speed_switches_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = load(fake_file(tmp_path, axes={"kld": {"windows": 2, "n_ctx": 16}}, candidates=["tilt[q=0.6]"]))
    settings = prepare(experiment).settings
    here = settings.resolved[settings.reference.name]
    server = replace(here, engine_class=engine_class("openai"))
    gpu = replace(here, arm=replace(here.arm, device="cuda"))
    without = replace(settings, experiment=experiment.model_copy(update={"speed": False}))
    assert [measures_speed(settings, one) for one in (here, server, gpu)] == [False, True, True]
    assert not any(measures_speed(without, one) for one in (here, server, gpu))


def test_a_dry_run_has_the_time_of_the_measurement(tmp_path: Path) -> None:
    plain, timed = (json.loads(small(tmp_path, *flags, "--dry-run", "--json").out) for flags in ((), ("--speed",)))
    assert "decode" not in json.dumps(plain)
    assert timed["benches"]["decode"] > 0


def test_speed_takes_no_process_more_and_is_no_longer_listed_as_untested(tmp_path: Path) -> None:
    plain, timed = small(tmp_path / "a"), small(tmp_path / "b", "--speed")
    assert timed.code == 0, timed.err
    assert starts(timed) == starts(plain)
    for name in ("reference", "tilt[q=0.6]"):
        assert rate(timed.arm(name)) == WRITTEN
    assert rate(timed.report["reference"]) == WRITTEN
    assert "speed" not in timed.report["recommendation"]["untested"]
    words = f"64 → 64 tok/s at {CONTEXT} tokens, no difference seen"
    assert "tok/s" in timed.out
    evidence = timed.report["recommendation"]["evidence"]
    assert not evidence or words in evidence[0].replace(" (64 over 2 starts)", "")


def test_only_the_key_of_the_bench_is_added_to_what_makes_runs_comparable(tmp_path: Path) -> None:
    plain, timed = small(tmp_path / "a").report, small(tmp_path / "b", "--speed").report
    key = timed["comparability_key"]
    assert key.pop("benches.decode")["n"] == DECODED
    assert key == plain["comparability_key"]


def test_a_failed_timing_is_the_status_of_that_bench_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "as_deployed", classmethod(lambda cls, arm: with_default(arm, "delay", "0")))
    done = small(tmp_path, "--speed")
    arm = done.arm("tilt[q=0.6]")
    assert arm["axes"]["kld"]["status"] == "ok"
    assert arm["benches"]["decode"]["status"] == "failed"
    assert "--benches decode" in arm["benches"]["decode"]["reason"]
    assert arm["verdict"]["band"] is not None


def test_a_resumed_run_has_the_rates_of_the_run_that_was_stopped(tmp_path: Path) -> None:
    done = small(tmp_path, "--speed")
    before = [done.arm(name)["benches"] for name in ("reference", "tilt[q=0.6]")]
    (done.folder / "report.json").unlink()
    again = cli("compare", "--resume", done.folder, cwd=tmp_path)
    assert again.code == 0, again.err
    assert [again.arm(name)["benches"] for name in ("reference", "tilt[q=0.6]")] == before


def test_several_runs_give_the_spread_between_starts(tmp_path: Path) -> None:
    done = small(tmp_path, "--speed", "--runs", 2)
    assert done.code == 0, done.err
    found = done.arm("tilt[q=0.6]")["benches"]["decode"]
    assert found["facts"]["starts"] == 2
    assert found["metrics"][0]["repeats"] == [WRITTEN, WRITTEN]


def test_a_bench_of_the_same_question_replaces_it(tmp_path: Path) -> None:
    assert "bench decode measures it" in refused(small(tmp_path, "--speed", "--benches", "decode"))


def test_the_context_is_halved_until_its_repeats_fit_the_budget() -> None:
    read, decode = 1e-3, 1e-2
    context = affordable(65536, None, read, decode)
    assert (1 + REPEATS) * (context * read + DECODED * decode) <= BUDGET
    assert (1 + REPEATS) * (2 * context * read + DECODED * decode) > BUDGET
    assert affordable(2048, 1024, 0.0, 0.0) == 1024 - DECODED
    assert affordable(4096, None, 1.0, 1.0) == MIN_CONTEXT
