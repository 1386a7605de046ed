"""Benches in a run: in turn, resumable, beside fidelity or alone."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fidelab.engines.fake import FakeEngine
from fidelab.engines.options import with_default
from tests.bench.load.mock import MockServer, MockSettings
from tests.engines.openai_server import save_model
from tests.run.harness import Done, cli, compare, refused, same_report

RATE, WRITTEN = 1024.0, 64.0  # tokens per second of the fake engine, read and written
PREFILL = ("--benches", "prefill", "--prompt-lens", "16,32", "--repeats", 3)
SIZES = ("--prompt-lens", "16,32", "--depths", "0,16", "--decode-tokens", 4, "--repeats", 3)


def bench(cwd: Path, *flags: object) -> Done:
    cwd.mkdir(parents=True, exist_ok=True)
    return cli("bench", "fake", "--engine", "fake", "--kv", "exact", "--kv", "tilt[q=0.6]", *flags, cwd=cwd)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return bench(tmp_path_factory.mktemp("alone"), *SIZES, "--json")


def cells(arm: dict[str, Any], name: str) -> dict[tuple[int, int], dict[str, Any]]:
    """(length, batch) → how it ended, and its leading metric as ``rate``."""
    found = arm["benches"][name]
    rates = {str(metric["cell"]): metric for metric in reversed(found["metrics"])}
    return {tuple(cell["at"].values()): {**cell, "rate": rates.get(str(cell["at"]))} for cell in found["cells"]}


def value(found: dict[str, Any], name: str, **cell: object) -> float:
    """A metric of a measurement: of this shape of work, or the first."""
    metrics = [metric for metric in found["metrics"] if metric["key"] == name]
    return next(float(metric["value"]) for metric in metrics if not cell or metric["cell"] == cell)


def test_a_bench_without_axes_gives_speed_and_no_verdict(alone: Done) -> None:
    assert alone.code == 0, alone.err
    report = json.loads(alone.out)
    arms = [report["reference"], *report["candidates"]]
    assert [arm["name"] for arm in arms] == ["exact", "tilt[q=0.6]"]
    for arm in arms:
        assert arm["status"] == "ok"
        assert arm["ran"]["k_format"] == arm["kv"]["k"] + ("[q=0.6]" if arm["kv"]["k"] == "tilt" else "")
        rates = {key: cell["rate"]["value"] for key, cell in cells(arm, "prefill").items()}
        assert rates == {(16, 1): RATE, (32, 1): RATE}
        assert arm["axes"] == {}
        assert value(arm["benches"]["startup"], "total", start="warm") > 0
    assert report["candidates"][0]["verdict"] is None or report["candidates"][0]["verdict"]["band"] is None


def test_loaded_arms_are_asked_in_turn(alone: Done) -> None:
    folders = sorted((alone.folder / "timed").glob("*/*/prefill.16.b1-*"), key=lambda path: path.stat().st_mtime_ns)
    arms = [folder.parent.parent.name for folder in folders]
    assert len(arms) == 6
    assert all({*turn} == {*arms} for turn in zip(arms[::2], arms[1::2], strict=True))


def test_two_arms_that_compute_the_same_are_measured_apart(tmp_path: Path) -> None:
    done = cli("bench", "fake", "--engine", "fake", "--kv", "exact", "--kv", "exact", *PREFILL, cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(list((done.folder / "timed").glob("*/*/prefill.16.b1-*"))) == 6


def test_benches_time_the_arm_as_it_is_deployed_and_axes_capture_it_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed = classmethod(lambda cls, arm: with_default(arm, "delay", "0"))
    monkeypatch.setattr(FakeEngine, "as_deployed", deployed)
    options = ("--engine", "fake", "--reference", "exact", "--kv", "tilt[q=0.6]", "--axes", "kld")
    done = cli("compare", "fake", *options, "--benches", "prefill", cwd=tmp_path)
    assert done.code == 0, done.err
    timed = [json.loads(path.read_text()) for path in (done.folder / "timed").rglob("manifest.json")]
    asked = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "captures").rglob("manifest.json")]
    assert {"delay" in found["asked"]["options"] for found in timed} == {True}
    assert {"delay" in found["asked"]["options"] for found in asked} == {False}


def test_warm_up_answers_are_not_kept(alone: Done) -> None:
    assert not (alone.folder / "timed" / "warm-up").exists()
    facts = cells(json.loads(alone.out)["reference"], "prefill")[16, 1]["facts"]
    assert facts["warmups"] == 3  # three alike are steady


def test_fidelity_speed_and_memory_stand_in_one_report(tmp_path: Path) -> None:
    flags = ["--control", "tilt[q=0.52]", "--benches", "prefill,decode,memory"]
    done = compare(tmp_path, "tilt[q=0.6]", flags=flags, windows=8, limit=2)
    assert done.code == 0, done.err
    for name in ("reference", "control", "tilt[q=0.6]"):
        arm = done.arm(name)
        assert cells(arm, "decode")[512, 1]["rate"]["value"] == WRITTEN
        assert value(arm["benches"]["memory"], "kv", tokens=128, batch=1) > 0
    assert value(done.arm("tilt[q=0.6]")["axes"]["kld"], "mean") > 0
    assert set(done.report["comparability_key"]) >= {"kld", "trajectory", "benches.decode", "benches.memory"}


def test_a_resumed_bench_asks_only_what_is_missing_and_finds_the_same(tmp_path: Path) -> None:
    done = bench(tmp_path, "--benches", "prefill,decode", *SIZES)
    before, folder = done.report, done.folder
    timed = {path: path.stat().st_mtime_ns for path in (folder / "timed").glob("*/*/*")}
    lost = sorted(timed)[3]
    shutil.rmtree(lost)
    (folder / "report.json").unlink()
    again = cli("compare", "--resume", folder, cwd=tmp_path)
    assert again.code == 0, again.err
    assert {p for p in (folder / "timed").glob("*/*/*") if p.stat().st_mtime_ns != timed[p]} == {lost}
    after = again.report
    for report in (before, after):
        for arm in (report["reference"], *report["candidates"]):
            for name in ("prefill", "decode"):
                for cell in arm["benches"][name]["cells"]:
                    cell["facts"]["warmups"] = None
    assert speeds(after) == speeds(before)


def speeds(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [arm["benches"] for arm in (report["reference"], *report["candidates"])]


def test_rescoring_keeps_the_benches(tmp_path: Path) -> None:
    done = bench(tmp_path, *PREFILL)
    before = done.report
    again = cli("report", "--rescore", done.folder, cwd=tmp_path)
    assert again.code == 0, again.err
    assert same_report(again.report) == same_report(before)
    assert speeds(again.report) == speeds(before)


def test_a_run_that_was_stopped_before_its_benches_is_not_rescored_without_them(tmp_path: Path) -> None:
    done = bench(tmp_path, *PREFILL)
    outcomes = json.loads((done.folder / "outcomes.json").read_text())
    for arm in outcomes["arms"]:
        arm["benches"] = {}
    (done.folder / "outcomes.json").write_text(json.dumps(outcomes))
    assert f"resume with: fidelab compare --resume {done.folder}" in refused(
        cli("report", "--rescore", done.folder, cwd=tmp_path)
    )


def test_an_arm_that_dies_in_a_bench_leaves_the_others_theirs(tmp_path: Path) -> None:
    done = bench(tmp_path, *SIZES, "--benches", "offline", "--engine-arg", "crash=tilt[q=0.6]:0")
    assert done.code == 1
    bad, good = done.arm("tilt[q=0.6]"), done.arm("reference")
    assert bad["status"] == "failed"
    assert "the worker" in bad["benches"]["prefill"]["reason"]
    assert good["status"] == "ok"
    assert cells(good, "prefill")[32, 1]["rate"]["value"] == RATE
    assert "tilt[q=0.6]" in done.err


@pytest.mark.parametrize("full", [False, True])
def test_repeats_are_spread_over_several_loads_where_asked_or_where_arms_do_not_fit_together_and_say_so(
    full: bool, tmp_path: Path
) -> None:
    if full:
        memory = mock.Mock(available=0, total=1)
        with mock.patch("fidelab.plan.benches.psutil.virtual_memory", return_value=memory):
            done = bench(tmp_path, *PREFILL)
    else:
        done = bench(tmp_path, *PREFILL, "--interleave", "loads")
    cell = cells(done.arm("reference"), "prefill")[16, 1]
    assert len(cell["rate"]["repeats"]) == 3
    assert [flag["kind"] for flag in cell["flags"]] == ["loads"]
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    loads = [event["role"] for event in events if event["event"] == "benched"]
    assert len(loads) == 6  # three loads of two arms, the arms alternating
    assert all(one != other for one, other in pairwise(loads))


def test_speeds_are_comparable_by_work_and_machine_not_by_the_list_of_cells(alone: Done) -> None:
    keys = alone.report["comparability_key"]
    assert keys["benches.decode"]["n"] == 4
    assert {"weights", "dtype", "processor", "device", "threads"} <= set(keys["benches.prefill"])
    assert not {"depths", "lengths", "batch", "repeats"} & {*keys["benches.decode"], *keys["benches.prefill"]}


def test_the_resolved_file_of_a_bench_repeats_it(tmp_path: Path, alone: Done) -> None:
    own = f"output_dir={tmp_path / 'runs'}"
    done = cli("compare", "-f", alone.folder / "config.resolved.yaml", "--set", own, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.report["settings"]["benches"] == alone.report["settings"]["benches"]
    measured = [cells(run.arm("reference"), "prefill").keys() for run in (alone, done)]
    assert measured[0] == measured[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--benches", "prefil"], "unknown bench 'prefil'"),
        (["--batch", "two"], "--batch 'two': write numbers"),
        (["--interleave", "sometimes"], "benches.prefill.interleave"),
        (["--repeats", "0"], "benches.startup.repeats"),
        (
            ["--benches", "startup", "--prompt-lens", "16"],
            "--prompt-lens belongs to bench prefill or memory, which --benches startup leaves out",
        ),
    ],
)
def test_bad_flags_are_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    assert message in refused(cli("bench", "fake", "--engine", "fake", *flags, cwd=tmp_path))
    assert not (tmp_path / "runs").exists()


def test_load_on_servers_stands_beside_their_arms(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    sizes = ("contexts=[16]", "concurrency=[2]", "output=8", "num_prompts=6")
    flags = [word for size in sizes for word in ("--set", f"benches.serving.{size}")]
    with MockServer(MockSettings(itl=0.004)) as fast, MockServer(MockSettings(itl=0.02)) as slow:
        arms = ("--base-url", fast.url, "--candidate", f"base-url={slow.url},name=slow")
        done = cli("bench", model, "--engine", "openai", *arms, "--benches", "serving", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    one, other = (done.arm(name)["benches"]["serving"] for name in ("reference", "slow"))
    assert [found["cells"][0]["facts"]["measured"]["output_tokens"] for found in (one, other)] == [48, 48]
    assert value(one, "output_rate") > value(other, "output_rate")
    rows = [json.loads(line) for line in (done.folder / "requests.jsonl").read_text().splitlines()]
    assert {row["arm"] for row in rows} == {done.arm("reference")["name"], "slow"}
    assert sum(row["arm"] == "slow" and not row["warmup"] for row in rows) == 6


def test_a_server_that_is_gone_fails_its_own_arm_alone(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    shape = ("--benches", "serving", "--set", "benches.serving.concurrency=[1]")
    with MockServer(MockSettings(itl=0.001)) as there:
        gone = "http://127.0.0.1:9"
        arms = ("--base-url", there.url, "--candidate", f"base-url={gone},name=gone")
        done = cli("bench", model, "--engine", "openai", *arms, *shape, cwd=tmp_path)
    assert done.code == 1
    assert done.arm("reference")["benches"]["serving"]["status"] == "ok"
    assert "127.0.0.1:9" in done.arm("gone")["benches"]["serving"]["reason"]
    assert "gone" in done.err
