"""Arms that fail: an outcome with a readable reason, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.results.store import RunFolder
from tests.run.harness import Done, axis_of, cli, compare


def test_a_crash_is_explained_with_the_last_line_of_its_log_and_leaves_the_other_arms_theirs(broken: Done) -> None:
    fine, arm = broken.arm("tilt[q=0.6]"), broken.arm("tilt[q=0.7]")
    assert (fine["status"], fine["verdict"]["band"], arm["status"]) == ("ok", "PASS", "failed")
    assert arm["reason"].startswith("the worker was ended by SIGABRT")
    assert "crashing as asked" in arm["reason"]


@pytest.mark.parametrize("name", ["tilt[q=0.7]", "tilt[q=0.8]"])
def test_a_failed_arm_is_named_and_has_no_score_no_composite_and_no_verdict(name: str, broken: Done) -> None:
    arm = broken.arm(name)
    assert (axis_of(arm, "kld").value("score"), arm["composite"], arm["verdict"]["band"]) == (None, None, None)
    assert arm["verdict"]["sentence"].startswith("not running: ")
    assert f"fidelab: {name} failed: {arm['reason']}" in broken.err.splitlines()


def test_a_cause_that_hits_all_arms_is_printed_once_with_the_place_of_the_logs(room: Path) -> None:
    done = compare(room, "tilt[q=0.6]", "tilt[q=0.7]", flags=["--engine-arg", "crash=1"], windows=4, limit=2)
    report = " ".join(cli("report", done.folder, "--details", cwd=room).out.split())
    assert report.count("the worker was ended by SIGABRT") == 1
    assert "tilt[q=0.6], tilt[q=0.7]: not running, for the same reason as the reference" in report
    assert f"what the workers printed: runs/{done.folder.name}/logs" in done.out  # from where it ran
    assert done.err.count("fidelab: exact, tilt[q=0.6], tilt[q=0.7] failed: the worker was ended by SIGABRT") == 1


def test_each_arm_has_a_log_of_its_own_and_a_crashed_one_leaves_no_half_capture(broken: Done) -> None:
    logs = sorted((broken.folder / "logs").iterdir())
    assert len(logs) == 4
    crashed = [path for path in logs if "crashing as asked" in path.read_text()]
    assert [path.name.startswith("candidate-tilt_q_0.7") for path in crashed] == [True]
    captures = broken.cwd / "runs" / "captures"
    assert list(captures.rglob(".partial-*")) == []
    assert not any(path.is_file() for folder in captures.glob("*tilt_q_0.7*") for path in folder.rglob("*"))


def test_a_crashed_reference_is_said_for_every_arm_in_a_whole_run_folder_and_its_cause_once(
    crashed_reference: Done,
) -> None:
    run = crashed_reference
    assert run.code == 1
    assert run.arm("reference")["status"] == "failed"
    candidate = run.arm("tilt[q=0.6]")
    assert candidate["status"] == "failed"
    assert candidate["reason"].startswith("the reference has no answer: the worker was ended by SIGABRT")
    assert "Traceback" not in run.err
    report = " ".join(cli("report", run.folder, "--details", cwd=run.cwd).out.split())
    assert report.count("the worker was ended by SIGABRT") == 1
    assert "tilt[q=0.6]: not compared: the reference has no answer" in report
    files = {path.name for path in run.folder.iterdir()}
    assert files >= {"config.resolved.yaml", "events.jsonl", "report.json", "report.html"}


def test_a_report_of_failures_can_be_rescored(crashed_reference: Done, broken: Done) -> None:
    for run in (crashed_reference, broken):
        before = (run.folder / "report.json").read_bytes()
        assert cli("report", "--rescore", run.folder, cwd=run.cwd).code == 1
        assert (run.folder / "report.json").read_bytes() == before


def test_resuming_a_run_tries_failed_arms_again_and_only_those(broken: Done) -> None:
    run = cli("compare", "--resume", broken.folder, cwd=broken.cwd)
    events = [json.loads(line) for line in (broken.folder / "events.jsonl").read_text().splitlines()]
    at = max(i for i, event in enumerate(events) if event["event"] == "resumed")
    missing = {event["role"]: event["missing"] for event in events[at:] if event["event"] == "job_started"}
    assert missing["reference"] == missing["candidate:tilt[q=0.6]"] == []
    assert missing["candidate:tilt[q=0.7]"] == missing["candidate:tilt[q=0.8]"] == ["trajectory", "kld"]
    assert run.code == 1


def test_arms_whose_names_look_alike_in_a_file_name_have_logs_of_their_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert len({folder.log(f"candidate:{name}") for name in ("a/b", "a_b", "a:b", "a b", "a" * 300, "a" * 301)}) == 6
    assert folder.log("candidate:../../x").parent == tmp_path / "logs"
