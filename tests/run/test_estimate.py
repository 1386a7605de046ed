"""What runs will take: everything that they do is counted, and their progress is measured in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.cli.progress import _remaining_seconds
from fidelab.config.experiment import validate
from fidelab.config.schema import Experiment
from fidelab.core import Estimator, canonical_json
from fidelab.plan import estimate
from fidelab.plan.prepare import prepare
from fidelab.run.pipeline import execute
from fidelab.run.runner import Silent
from tests.run.harness import SMALL, cli, write_inputs

AXES: dict[str, Any] = {
    "kld": {"windows": 4, "n_ctx": 16},
    "trajectory": {"limit": 2, "n_predict": 4},
    "forced": {"limit": 2, "n_predict": 6},
}


@pytest.fixture(autouse=True)
def own_timings(tmp_path: Path) -> Iterator[None]:
    """A machine on which nothing has run."""
    with mock.patch("fidelab.plan.estimate.cache_dir", return_value=tmp_path / "cache"):
        yield


def fake(folder: Path, **change: Any) -> Experiment:
    write_inputs(folder)
    names = {"text": "text.txt", "prompts": "prompts.txt", "output_dir": "runs"}
    arms = {"reference": "exact", "control": "none", "candidates": ["tilt"]}
    settings = {"model": "fake", "engine": "fake", **arms, "axes": AXES}
    settings |= {key: str(folder / name) for key, name in names.items()}
    return validate({**settings, **change}, "test")


class Watched(Silent):
    """Keeps what is said about how far the run is."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def advanced(self, done: float, total: float) -> None:
        self.steps.append((done, total))


def test_loads_answers_follow_ups_benches_and_scoring_are_all_counted(tmp_path: Path) -> None:
    expected = prepare(fake(tmp_path, benches={"prefill": {"lengths": [16]}, "startup": {}})).estimate()
    assert [job.role for job in expected.jobs] == ["reference", "candidate:tilt", "floor"]
    assert min(expected.parts().values()) > 0
    asked = {job.role: job.captures for job in expected.jobs}
    assert asked["reference"] == {"kld", "trajectory", "forced.path", "forced.kl"}
    assert asked["candidate:tilt"] == {"kld", "trajectory", "forced.kl"}
    assert set(expected.benches) == {"", "prefill", "startup"}
    starts = 2 * 4 * expected.jobs[0].took["loads", ""]  # of each arm four
    assert expected.benches["startup"] == pytest.approx(starts, rel=0.1)
    assert expected.seconds == pytest.approx(sum(expected.parts().values()))


def test_tokens_of_questions_that_follow_are_those_that_the_run_then_asks(tmp_path: Path) -> None:
    experiment = fake(tmp_path)
    foretold = {job.role: job.tokens for job in prepare(experiment).estimate().jobs}
    execute(experiment, command="")
    prompt = len("prompt 0")
    [made, again] = [Capture(path) for path in (tmp_path / "runs" / "captures").glob("*/forced.kl-*-r0")]
    assert made.request == again.request
    assert sum(map(len, made.request.items())) == 2 * (prompt + 6)
    assert foretold["candidate:tilt"] == 4 * 16 + 2 * (prompt + 4) + 2 * (prompt + 6)
    expected = prepare(experiment).estimate()  # everything is captured: nothing but scoring is left
    assert [job.seconds for job in expected.jobs] == [0.0] * 3
    assert expected.seconds == expected.scoring > 0


def test_progress_never_falls_and_ends_when_only_scoring_is_left(tmp_path: Path) -> None:
    watched = Watched()
    experiment = fake(tmp_path, benches={"prefill": {"lengths": [16], "max_warmup": 1}}, engine_args={"delay": 0.01})
    scoring = prepare(experiment).estimate().scoring
    execute(experiment, command="", listener=watched)
    shares = [done for done, _ in watched.steps]
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    done, total = watched.steps[-1]
    assert done == pytest.approx(total - scoring)


def test_what_is_told_of_tokens_counts_them(tmp_path: Path) -> None:
    told: list[float] = []

    class Told(Watched):
        def progress(self, job: Any, tokens: int) -> None:
            told.append(self.steps[-1][0])

    experiment = fake(tmp_path, axes={"kld": {"windows": 12, "n_ctx": 16}}, engine_args={"delay": 0.01})
    took = prepare(experiment).estimate().jobs[0].took
    execute(experiment, command="", listener=Told())
    assert told[0] > took["loads", ""] + 1e-9
    first = [done for done in told if done <= sum(took.values()) + 1e-9]
    assert first[-1] == pytest.approx(sum(took.values()))  # after the last token of a job all of it is done


def test_a_failed_arm_does_not_hold_the_progress_up(tmp_path: Path) -> None:
    watched = Watched()
    execute(fake(tmp_path, engine_args={"crash": "tilt:0"}), command="", listener=watched)
    done, total = watched.steps[-1]
    assert 0 < done <= total


def test_time_left_follows_the_plan_first_and_the_run_s_own_pace_later() -> None:
    assert _remaining_seconds(0.0, 0.0, 100.0) == 100.0
    assert _remaining_seconds(1000.0, 500.0, 1000.0) == pytest.approx(1000.0, rel=0.02)  # twice as slow as planned
    assert _remaining_seconds(50.0, 120.0, 100.0) == 0.0


def test_a_run_leaves_rates_for_the_next_estimate(tmp_path: Path) -> None:
    experiment = fake(tmp_path, engine_args={"delay": 0.03})
    assert all("defaults" in source for source in prepare(experiment).estimate().sources)
    execute(experiment, command="")
    again = fake(tmp_path, engine_args={"delay": 0.03}, output_dir=str(tmp_path / "other"))
    assert set(prepare(again).estimate().sources) == {"its last runs here"}


def test_a_dry_run_says_what_takes_the_time_and_where_its_rates_are_from(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = ("compare", "fake", *SMALL, "--kv", "tilt", "--axes", "kld,forced", "--windows", 4, "--n-ctx", 16)
    flags = ("--benches", "prefill", "--set", "benches.prefill.lengths=16", "--dry-run")
    done, data = (cli(*words, *flags, *more, cwd=tmp_path) for more in ((), ["--json"]))
    assert done.code == data.code == 0
    for word in ("about ", "loads ", "scoring ", "bench prefill", "tests: ", "rates from defaults"):
        assert word in done.out
    assert max(map(len, done.out.splitlines()[:4])) <= 80
    plan = json.loads(data.out)
    parts = [*("planning", "loads", "prefill", "decoding", "follow-up questions"), "benches", "scoring"]
    assert list(plan["parts"]) == parts
    assert plan["seconds"] == pytest.approx(sum(plan["parts"].values()), abs=0.5)
    assert (plan["follows"], plan["not_counted"]) == (["forced"], [])
    assert "factor of several" in done.err


def test_a_dry_run_of_a_cross_engine_file_counts_every_engine_and_runs_none(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    line = {"engine": "fake", "reference": "exact", "candidate": "tilt"}
    experiment = {
        "kind": "cross-engine",
        "model": "fake",
        "engines": [{**line, "name": "one"}, {**line, "name": "absent", "engine_args": {"colour": "red"}}],
        "axes": {"kld": {"windows": 4, "n_ctx": 16}},
        "text": "text.txt",
        "prompts": "prompts.txt",
        "benches": {"decode": {"depths": [64], "n": 16, "repeats": 3}},
    }
    (tmp_path / "cross.yaml").write_text(canonical_json(experiment))
    done, data = (cli("compare", "-f", "cross.yaml", "--dry-run", *more, cwd=tmp_path) for more in ((), ["--json"]))
    assert done.code == data.code == 0
    plan = json.loads(data.out)
    roles = [job["role"] for job in plan["engines"]["one"]["jobs"]]
    assert roles == ["reference", "candidate:tilt", "floor"]
    assert "has no option 'colour'" in plan["engines"]["absent"]["reason"]
    assert plan["tokens"] == sum(job["tokens"] for job in plan["engines"]["one"]["jobs"]) > 0
    assert plan["seconds"] == plan["engines"]["one"]["seconds"]
    assert "cannot run: " in done.out
    assert done.out.splitlines()[-1].endswith(" in all")
    assert not list(tmp_path.glob("runs"))


@pytest.mark.parametrize(("candidates", "measured"), [(1, 8.4), (4, 26.4)])
def test_scoring_on_a_gpu_is_expected_to_take_what_an_h200_took(
    candidates: int, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """204,800 rows of Qwen3-8B's vocabulary and width (benchmarks/RESULTS.md), from the table's rates."""
    window = (tuple(range(2049)),)
    rows = Prefill("kld", window * 100, 0, 2047, ((0,) * 2048,) * 100)
    model = SimpleNamespace(vocab_size=151_936, hidden_size=4096)
    resolved = SimpleNamespace(model=model, estimator=Estimator.HIDDEN)
    job = SimpleNamespace(role="candidate:x", resolved=resolved, captures=[SimpleNamespace(request=rows)])
    monkeypatch.setattr(estimate, "graphics", lambda: {"gpus": ["NVIDIA H200"]})
    expected = estimate._scoring(cast(Any, [job] * candidates)) - estimate._scoring([])
    assert expected == pytest.approx(measured, rel=0.35)
