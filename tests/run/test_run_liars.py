"""Workers that break every rule of their protocol: each is one arm's failure, and all other arms get their report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fidelab.plan.build import PlannedJob
from fidelab.run.runner import JobRunner
from fidelab.workers.messages import PROTOCOL
from tests.run.harness import Done, axis_of, cli, compare
from tests.sizes import first
from tests.workers import liar

KINDS = (*liar.SAYS, *liar.WRITES)
GOOD = "tilt[q=0.999]"
HONEST = {"writes-not-a-number", "writes-few-rows", "writes-odd-facts"}  # rows that fail, and what nobody reads


def label(kind: str) -> str:
    return f"tilt[q={0.1 + 0.01 * KINDS.index(kind):.2f}]"


def lying(monkeypatch: pytest.MonkeyPatch, kinds: Mapping[str, str]) -> None:
    """Have arms of these names run by :mod:`tests.workers.liar`."""
    process = JobRunner._process

    def start(asking: JobRunner, job: PlannedJob, log: Path) -> dict[str, Any]:
        known = process(asking, job, log)
        if job.arm.name not in kinds:
            return known
        return {**known, "command": [sys.executable, liar.__file__, kinds[job.arm.name], str(PROTOCOL)]}

    monkeypatch.setattr(JobRunner, "_process", start)
    monkeypatch.setattr("fidelab.run.runner.spawner", lambda *_: None)  # which starts none but fidelab's worker


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One run with a candidate of every kind, and one that is fine, the last."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        lying(monkeypatch, {label(kind): kind for kind in KINDS})
        flags = ["--no-floor", "--control", "none", "--deadline", "60"]
        labels = [*map(label, KINDS), GOOD]
        return compare(tmp_path_factory.mktemp("liars"), *labels, flags=flags, windows=4, limit=2)


def test_all_other_arms_get_their_report(liars: Done) -> None:
    assert liars.code == 1, liars.err
    assert (liars.arm("reference")["status"], liars.arm(GOOD)["status"]) == ("ok", "ok")
    assert liars.axis(GOOD, "kld").value("mean")
    assert liars.axis(GOOD, "trajectory").value("score") == 100
    assert (liars.folder / "report.html").exists()
    assert "Traceback" not in liars.err


@pytest.mark.parametrize("kind", KINDS)
def test_a_liar_is_one_arms_failure_with_one_line(kind: str, liars: Done) -> None:
    arm = liars.arm(label(kind))
    if kind in HONEST:
        assert arm["status"] in ("ok", "failed", "not_engaged")
        return
    assert arm["status"] == "failed", arm
    assert arm["reason"]
    assert arm["reason"].isprintable()
    assert len(arm["reason"]) < 3000
    assert axis_of(arm, "kld").value("mean") is None


def test_success_without_a_capture_asks_whether_both_sides_see_the_folder(liars: Done) -> None:
    reason = liars.arm(label("success-without-a-capture"))["reason"]
    assert "do both sides see this folder" in reason
    assert str(liars.cwd / "runs" / "captures") in reason


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("endless-line", "more than 4 MiB"),
        ("seconds-of-text", "seconds is of another type"),
        ("ran-odd-proof", "proof is of another type"),
        ("writes-above-0", "log-probability of 0.5"),
        ("writes-sums-above-1", "add up to"),
        ("writes-another-key", "answer to another request"),
    ],
)
def test_the_reason_says_what_was_wrong(kind: str, said: str, liars: Done) -> None:
    assert said in liars.arm(label(kind))["reason"]


@pytest.mark.parametrize("kind", first(["success-without-a-capture", "writes-vectors", "ran-odd-proof", "floods"]))
def test_a_reference_that_lies_leaves_a_whole_report_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, {"exact": kind})
    done = compare(tmp_path, GOOD, flags=["--no-floor"], windows=4, limit=2)
    assert done.code == 1
    assert done.arm("reference")["status"] == "failed"
    assert done.arm(GOOD)["reason"].startswith("the reference has no answer")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("kind", "said"),
    first(
        [
            ("deaf", "the worker ended"),
            ("writes-times-that-run-back", "times that no clock gives"),
            ("writes-an-odd-record", "misstates 'ran.versions'"),
        ]
    ),
)
def test_a_liar_leaves_the_other_arms_their_benches(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, {"tilt[q=0.6]": kind})
    words = ("bench", "fake", "--engine", "fake", "--kv", "exact", "--kv", "tilt[q=0.6]", "--benches", "decode")
    done = cli(*words, "--depths", "8", "--decode-tokens", "2", "--repeats", "1", cwd=tmp_path)
    assert done.code == 1, done.err
    assert done.arm("reference")["benches"]["decode"]["status"] == "ok"
    assert said in f"{done.arm('tilt[q=0.6]')['reason']} {done.arm('tilt[q=0.6]')['benches']['decode']['reason']}"
