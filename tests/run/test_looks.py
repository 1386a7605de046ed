"""Runs that ask until their candidates are decided: who is asked more, of what, and at which level."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fidelab.axes.base import AxisInputs
from fidelab.axes.kld import KLD, KLDSettings
from fidelab.captures.reader import Capture, find_captures
from fidelab.captures.requests import Prefill
from fidelab.engines.fake import FakeEngine
from fidelab.inputs.corpus import make_windows
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.equivalence import ALPHA, LOOK_ALPHAS, Loss, alpha_of, certify
from fidelab.metrics.intervals import RatioItems, paired_difference
from fidelab.models import resolve
from fidelab.results.decision_record import DocumentSums
from fidelab.results.record import ArmRecord, Report
from fidelab.run.runner import Silent
from fidelab.scoring.tiles import Figures, TileJob, compare_here
from tests.run.harness import Done, cli, refused, same_report

FAILS, HOLDS, VARIES = "tilt[q=0.9,bytes=6]", "tilt[q=0.55,bytes=8]", "tilt[q=0.6,bytes=7,every=3]"
ARMS = (FAILS, HOLDS, VARIES)  # decided by 8 windows, by 16, and not by 32
READ = {FAILS: 8, HOLDS: 16, VARIES: 32}


@pytest.fixture(autouse=True)
def unknown_speed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Estimates are the defaults', by which later looks take longer than a start."""
    with mock.patch("fidelab.plan.estimate.cache_dir", return_value=tmp_path_factory.mktemp("timings")):
        yield


def _compare(folder: Path, *flags: object, kv: Sequence[str] = ARMS) -> Done:
    """Three documents to a window of 64 bytes, or more."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"# Title {i}\nline {i} of a {i * 7919 % 1000} text\n" for i in range(90))
    (folder / "text.txt").write_text(text)
    words = ("--engine", "fake", "--reference", "exact", "--text", "text.txt", "--axes", "kld", "--n-ctx", 64)
    return cli("compare", "fake", *words, *(word for name in kv for word in ("--kv", name)), *flags, cwd=folder)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("looks")


@pytest.fixture(scope="module")
def looked(room: Path) -> Done:
    with mock.patch("fidelab.plan.estimate.cache_dir", return_value=room / "timings"):
        done = _compare(room)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _compare(tmp_path_factory.mktemp("fixed"), "--windows", 32)


def _read(done: Done) -> dict[str, object]:
    """Windows of each candidate."""
    return {name: done.axis(name, "kld").facts.get("windows") for name in ARMS}


def _asked(done: Done) -> list[tuple[str, list[str]]]:
    """Arms in the order of their jobs, each with the captures that it is asked for."""
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    return [(event["arm"], event["missing"]) for event in events if event["event"] == "job_started"]


def _record(done: Done, name: str) -> ArmRecord:
    return next(arm for arm in Report.model_validate(done.report).candidates if arm.name == name)


def _sums(done: Done, name: str, windows: int) -> DocumentSums:
    return next(sums for sums in _record(done, name).documents if sums.windows == windows)


def test_a_decided_candidate_is_asked_no_more_and_an_undecided_one_is(looked: Done) -> None:
    assert _read(looked) == READ
    later = [(arm, captures) for arm, captures in _asked(looked) if captures != ["kld"]]
    second, third = ["kld.+1"], ["kld.+2"]
    assert later == [("exact", second), (HOLDS, second), (VARIES, second), ("exact", third), (VARIES, third)]


def test_windows_fix_the_size(fixed: Done) -> None:
    assert _read(fixed) == dict.fromkeys(ARMS, 32)
    assert _asked(fixed) == [(arm, ["kld", "kld.+1", "kld.+2"]) for arm in ("exact", *ARMS, "exact")]


def test_all_is_asked_at_once_where_a_start_takes_longer_than_the_later_looks(
    fixed: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "start_seconds", 1000.0)
    done = _compare(tmp_path)
    assert _read(done) == _read(fixed)
    for name in ARMS:  # tested at 5%
        assert _record(done, name).certificates == _record(fixed, name).certificates


@pytest.mark.parametrize("lines", [60, 30])
def test_a_text_that_is_too_short_for_all_looks_is_read_as_far_as_it_goes(lines: int, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("".join(f"line {i} of a text\n" for i in range(lines)))
    done = _compare(tmp_path, "--text", "short.txt", kv=[VARIES])
    assert done.code == 0, done.err
    facts, there = done.axis(VARIES, "kld").facts, len((tmp_path / "short.txt").read_bytes()) // 64
    if lines == 60:
        assert facts["windows"] == facts["at_most"] == there == 16
    else:  # for the first look alone: all is read at once
        assert (facts["windows"], "at_most" in facts) == (8, False)


def test_a_quick_run_looks_as_well(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(f"line {i} of a text\n" for i in range(2000)))
    words = ("--engine", "fake", "--reference", "exact", "--text", "long.txt", "--kv", VARIES, "--axes", "kld")
    done = cli("compare", "fake", *words, "--quick", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(done.out)["windows"] == [8, 32]
    assert json.loads(done.out)["tokens"] == (8 + 8) * 512


TEXT = Text("t", "".join(f"line {i} of a text\n" for i in range(400)), (), "")


def test_the_references_logits_of_a_look_are_computed_once_for_all_configurations(tmp_path: Path) -> None:
    asked: list[tuple[Path, int]] = []

    def noted(one: TileJob) -> Figures:
        asked.append((one.ref, len(one.tests)))
        return compare_here(one)

    hidden = ("--engine-arg", "estimator=hidden", "--control", "tilt[q=0.99]")
    with mock.patch("fidelab.scoring.pairing.compare_here", noted):
        assert _compare(tmp_path, *hidden).code == 0
    assert len(asked) == len({ref for ref, _ in asked}) > 0
    assert {tests for _, tests in asked[:1]} == {len(ARMS) + 2}  # with the control, and the repeat of the reference


def _whole() -> tuple[tuple[int, ...], ...]:
    return make_windows(Tokenizer.load(resolve("fake")), TEXT, 64, 32).windows


def _windows(looks: tuple[int, ...], **settings: object) -> dict[str, Prefill]:
    inputs = AxisInputs(Tokenizer.load(resolve("fake")), TEXT, (), 10_000)
    axis = KLD(KLDSettings.model_validate({"windows": 32, "n_ctx": 64, "looks": looks, **settings}))
    return {part: request for part, request in axis.requests(inputs).items() if isinstance(request, Prefill)}


def test_windows_of_looks_are_disjoint_evenly_spread_and_together_those_of_the_whole_as_of_a_fixed_run() -> None:
    parts, whole = _windows((8, 16)), _whole()
    assert {part: len(found.windows) for part, found in parts.items()} == {"": 8, "+1": 8, "+2": 16}
    assert sorted(window for part in parts.values() for window in part.windows) == sorted(whole)
    assert {part.axis for part in parts.values()} == {"kld", "kld.+1", "kld.+2"}
    read: list[int] = []
    for part in parts.values():
        read = sorted([*read, *map(whole.index, part.windows)])
        assert max(np.diff([-1, *read, 32])) < 2 * 32 / len(read)
    assert _windows(()) == parts
    assert [*_windows((), windows=24)] == [""]
    assert {"64", "256"} <= _windows((8, 16), n_ctx=(64, 256)).keys()  # the first look has the longest context


def test_several_looks_have_the_figures_of_one_capture_of_their_windows(looked: Done, fixed: Done) -> None:
    one, other = looked.axis(VARIES, "kld"), fixed.axis(VARIES, "kld")
    for metric in one.metrics:
        found = other.metric(metric.key, metric.cell)
        assert found is not None
        assert metric.value == pytest.approx(found.value, abs=1e-9), metric.key
        assert metric.interval == (None if found.interval is None else pytest.approx(found.interval, abs=1e-9))
    a, b = _sums(looked, VARIES, 32), _sums(fixed, VARIES, 32)
    assert (a.documents, a.positions) == (b.documents, b.positions)
    np.testing.assert_allclose([a.kl, a.probability_loss], [b.kl, b.probability_loss], atol=1e-9)


def test_a_mean_is_that_of_the_windows_that_the_arm_read(looked: Done) -> None:
    kl = 0.5 * np.log(0.5 / 0.55) + 0.5 * np.log(0.5 / 0.45)
    assert looked.axis(HOLDS, "kld").value("mean") == pytest.approx(kl, rel=1e-5)
    assert looked.axis(HOLDS, "kld").n_items == 16 * 31


def test_certificates_are_tested_at_the_level_of_the_look_that_decided(looked: Done) -> None:
    for name, alpha in zip(ARMS, LOOK_ALPHAS, strict=True):
        sums = _sums(looked, name, READ[name])
        loss = Loss.of_kl(RatioItems.of(sums.kl, sums.positions, sums.documents))
        [expected] = certify([replace(loss, alpha=alpha)], looked.report["settings"]["seed"]).claims
        claim = next(claim for claim in _record(looked, name).certificates["kld"].claims if claim.key == "mean_kl")
        assert claim.ci == pytest.approx(expected.interval, rel=1e-6)
        assert claim.clusters == len(sums.documents)


def test_levels_of_all_looks_add_up_to_that_of_one_test() -> None:
    for looks in (1, 2, 3):
        assert sum(alpha_of(look, looks) for look in range(1, looks + 1)) == pytest.approx(ALPHA)


def test_a_difference_of_arms_with_other_looks_is_over_the_windows_that_both_read(looked: Done) -> None:
    found = next(one for one in looked.report["comparisons"] if {one["better"], one["worse"]} == {HOLDS, VARIES})
    better, worse = (_sums(looked, found[side], 16) for side in ("better", "worse"))
    a, b = (RatioItems.of(sums.kl, sums.positions, sums.documents) for sums in (worse, better))
    expected = paired_difference(a, b, looked.report["settings"]["seed"])
    assert found["difference"] == pytest.approx(expected.estimate, abs=1e-9)
    assert found["ci"] == pytest.approx(expected.interval, abs=1e-6)


@pytest.mark.parametrize(("flags", "again"), [(("--keep-rows",), []), ((), ["kld.+1", "kld.+2"])])
def test_a_fixed_run_captures_only_what_the_looks_before_it_did_not(
    fixed: Done, tmp_path: Path, flags: tuple[str, ...], again: list[str]
) -> None:
    """The reference reads windows again whose rows went, and with which further candidates are compared."""
    _compare(tmp_path, *flags)
    done = _compare(tmp_path, "--windows", 32, *flags)
    second, third = "kld.+1", "kld.+2"
    missing = [again, [second, third], [third], [], [second, third]]
    assert _asked(done) == list(zip(("exact", *ARMS, "exact"), missing, strict=True))
    for name in ARMS:
        assert _record(done, name).axes == _record(fixed, name).axes
        assert _record(done, name).certificates == _record(fixed, name).certificates


def test_a_resumed_run_asks_nothing_again_and_gives_the_same_report(looked: Done, room: Path) -> None:
    before = looked.report
    (looked.folder / "report.json").unlink()
    done = cli("compare", "--resume", looked.folder, cwd=room)
    assert done.code == 0, done.err
    assert same_report(done.report) == same_report(before)
    resumed = _asked(done)[len(_asked(done)) // 2 :]
    assert not any(captures for _, captures in resumed)


def test_a_run_that_was_stopped_in_a_later_look_goes_on_there(looked: Done, tmp_path: Path) -> None:
    done = _compare(tmp_path)
    before = same_report(done.report)
    for folder in find_captures(tmp_path / "runs" / "captures"):
        if Capture(folder).axis == "kld.+2":
            shutil.rmtree(folder)
    (done.folder / "report.json").unlink()
    first = len(_asked(done))
    assert cli("compare", "--resume", done.folder, cwd=tmp_path).code == 0
    assert [asked for asked in _asked(done)[first:] if asked[1]] == [("exact", ["kld.+2"]), (VARIES, ["kld.+2"])]
    assert same_report(done.report) == before


def test_rescore_gives_the_same_report(looked: Done, room: Path) -> None:
    before = looked.report
    assert cli("report", looked.folder, "--rescore", cwd=room).code == 0
    assert looked.report == before


def test_a_candidate_that_fails_in_a_later_look_costs_the_others_nothing(looked: Done, tmp_path: Path) -> None:
    done = _compare(tmp_path, "--engine-arg", f"crash={VARIES}:8", "--no-floor")
    assert done.code == 1
    assert done.arm(VARIES)["status"] == "failed"
    for name in (FAILS, HOLDS):
        assert done.axis(name, "kld").metrics == looked.axis(name, "kld").metrics
    assert _asked(done)[-1] == (VARIES, ["kld.+2"])


def test_after_a_failure_of_the_reference_the_looks_before_it_stay(looked: Done, tmp_path: Path) -> None:
    done = _compare(tmp_path, "--engine-arg", "crash=exact:8", "--no-floor", kv=[VARIES])
    assert done.code == 1
    assert done.arm("reference")["status"] == "failed"
    assert done.axis(VARIES, "kld").facts["windows"] == 16
    sums = _sums(done, VARIES, 16)
    loss = Loss.of_kl(RatioItems.of(sums.kl, sums.positions, sums.documents))
    [expected] = certify([replace(loss, alpha=LOOK_ALPHAS[1])], done.report["settings"]["seed"]).claims
    [claim, _] = _record(done, VARIES).certificates["kld"].claims
    assert claim.ci == pytest.approx(expected.interval, rel=1e-6)


def test_no_look_begins_that_would_end_beyond_the_budget(tmp_path: Path) -> None:
    """Each arm takes longer than a second for a look, and scoring is expected to take three."""
    done = _compare(tmp_path, "--budget", "5.5s", "--engine-arg", "delay=0.15", "--no-floor", kv=[VARIES])
    assert done.code == 0, done.err
    assert done.axis(VARIES, "kld").facts["windows"] == 8
    assert "8 of at most 32 windows" in cli("report", done.folder, "--details", cwd=tmp_path).out
    assert done.report["recommendation"]["confidence"] != "confirmed"
    [claim, _] = _record(done, VARIES).certificates["kld"].claims
    assert claim.state != "holds"
    assert (claim.clusters_needed or 0) > claim.clusters


def test_a_budget_that_is_long_enough_changes_nothing(looked: Done, tmp_path: Path) -> None:
    done = _compare(tmp_path, "--budget", "1h")
    assert _read(done) == READ
    assert done.report["settings"]["budget"] == 3600


def test_a_budget_shorter_than_the_first_look_or_that_is_not_a_time_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    assert "--budget 1s: the first look takes about" in refused(_compare(tmp_path, "--budget", "1s"))
    said = "'soon' is not a time; write seconds, or a time such as 90s, 10m or 1h30m"
    assert said in refused(_compare(tmp_path, "--budget", "soon"))
    assert not list(tmp_path.glob("runs/2*"))


def test_a_dry_run_says_how_much_is_read_at_least_and_at_most(tmp_path: Path) -> None:
    assert "8 to 32 windows" in _compare(tmp_path, "--dry-run").out
    plan = json.loads(_compare(tmp_path, "--dry-run", "--json").out)
    assert plan["windows"] == [8, 32]
    assert plan["seconds"] < plan["seconds_at_most"]


def test_the_terminal_says_how_much_each_candidate_read(looked: Done, fixed: Done) -> None:
    details = [" ".join(cli("report", run.folder, "--details", cwd=run.cwd).out.split()) for run in (looked, fixed)]
    assert f"windows read: 8 by {FAILS}, 16 by {HOLDS}, 32 by {VARIES}" in details[0]
    assert "windows read" not in details[1]


def test_the_time_of_a_run_grows_by_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[float] = []
    monkeypatch.setattr(Silent, "advanced", lambda _self, _done, total: totals.append(total))
    monkeypatch.setattr("fidelab.cli.progress.watcher", Silent)
    _compare(tmp_path)
    assert len({*totals}) == len(LOOK_ALPHAS)
