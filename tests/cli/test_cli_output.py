"""What commands print, and how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.cli.output import failures
from fidelab.results.measurement import Flag
from fidelab.results.record import Report
from tests.report.sample import sample_report
from tests.run.harness import SMALL, Done, cli, compare, refused, write_inputs

SIZES = ("--windows", 4, "--n-ctx", 16, "--n-predict", 4, "--limit", 2)


def test_a_finished_run_prints_its_table_on_standard_output(plain: Done) -> None:
    assert plain.code == 0
    for word in ("tilt[q=0.6]", "exact", "pass"):
        assert word in plain.out


def test_progress_goes_to_standard_error_in_plain_lines(plain: Done) -> None:
    lines = plain.err.splitlines()
    assert lines[0] == f"run {plain.folder}"
    assert [line for line in lines if line.startswith("reference:")] == [
        "reference: 160 tokens to do",
        *[line for line in lines if line.startswith("reference: model loaded in ")],
        *[line for line in lines if line.startswith("reference: ok in ")],
    ]
    assert "scoring" in lines


def test_markdown_has_the_same_answer_and_stands_alone(plain: Done) -> None:
    shown = cli("report", plain.folder, "--markdown", cwd=plain.cwd)
    assert "| KV cache | verdict | KLD |" in shown.out
    assert "--markdown prints a separate section" in refused(
        cli("report", plain.folder, "--markdown", "--details", cwd=plain.cwd)
    )


def test_a_report_that_was_shown_writes_its_page_again(plain: Done) -> None:
    html = (plain.folder / "report.html").read_bytes()
    (plain.folder / "report.html").unlink()
    cli("report", plain.folder, cwd=plain.cwd)
    assert (plain.folder / "report.html").read_bytes() == html


def test_report_shows_the_same_again_and_gives_the_object_when_asked(plain: Done) -> None:
    shown = cli("report", plain.folder, cwd=plain.cwd)
    assert (shown.code, shown.err, shown.out) == (0, "", plain.out)
    details = cli("report", plain.folder, "--details", cwd=plain.cwd).out
    assert "Run-to-run noise" in details
    assert "Run-to-run noise" not in shown.out
    assert json.loads(cli("report", plain.folder, "--json", cwd=plain.cwd).out) == plain.report


def test_a_failed_arm_exits_with_1(tmp_path: Path) -> None:
    done = compare(tmp_path, "tilt", flags=["--no-floor", "--engine-arg", "crash=tilt:0"], windows=4, limit=1)
    assert done.code == 1
    assert "fidelab: tilt failed: the worker was ended by SIGABRT" in done.err


def test_an_unsupported_arm_is_not_a_failure(tmp_path: Path) -> None:
    done = compare(tmp_path, "tilt", "refused", flags=["--no-floor"], windows=4, limit=1)
    assert (done.code, done.arm("refused")["status"]) == (0, "not_supported")


def flagged(kind: str) -> Report:
    report = sample_report()
    [first, *_] = report.candidates
    kld = first.axes["kld"].model_copy(update={"flags": (Flag(kind=kind, text="kld failed in run 2 of 3: x"),)})
    return report.model_copy(update={"candidates": (first.model_copy(update={"axes": {"kld": kld}}),)})


def test_an_axis_that_some_of_an_arms_runs_lost_is_a_fault() -> None:
    assert list(failures(flagged("spread"))) == []
    [fault] = failures(flagged("lost"))
    assert fault.endswith(": kld failed in run 2 of 3: x")


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A plan, as JSON; in the folder stand the inputs alone."""
    room = tmp_path_factory.mktemp("dry")
    write_inputs(room)
    flags = ("--kv", "tilt", "--kv", "refused", "--control", "tilt[q=0.52]", "--dry-run")
    return cli("compare", "fake", *SMALL, *SIZES, *flags, "--json", cwd=room)


def test_a_dry_run_lists_jobs_tokens_and_disk_and_writes_nothing(dry: Done) -> None:
    assert dry.code == 0
    assert sorted(path.name for path in dry.cwd.iterdir()) == ["prompts.txt", "text.txt"]
    plan = json.loads(dry.out)
    assert [job["role"] for job in plan["jobs"]] == ["reference", "control", "candidate:tilt", "floor"]
    windows, prompts = 4 * 16, 2 * (len("prompt 0") + 4)
    assert [job["tokens"] for job in plan["jobs"]][:3] == [windows + prompts] * 3
    assert plan["tokens"] == 3 * (windows + prompts) + windows // 4 + prompts // 2
    assert plan["disk_bytes"] > 0
    assert plan["not_supported"] == {"refused": "the fake engine refuses this format, as it was asked to"}


def test_a_dry_run_says_it_in_words_too_in_columns_as_wide_as_the_longest_name(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    long = "name=a candidate with quite a long name of its own,kv=tilt[q=0.6]"
    done = cli("compare", "fake", *SMALL, *SIZES, "--kv", "tilt", "--candidate", long, "--dry-run", cwd=tmp_path)
    assert done.code == 0
    for word in ("reference", "candidate:tilt", "tokens", "MiB of saved outputs in"):
        assert word in done.out
    jobs = [line for line in done.out.splitlines() if " tokens " in line and line.endswith(" s")]
    assert len(jobs) == 4
    assert len({len(line) for line in jobs}) == 1


def test_a_dry_run_knows_what_is_captured_already(plain: Done) -> None:
    done = cli("compare", "-f", plain.folder / "config.resolved.yaml", "--dry-run", "--json", cwd=plain.cwd)
    plan = json.loads(done.out)
    assert {job["captures_missing"] for job in plan["jobs"]} == {0}
    assert (plan["tokens"], plan["disk_bytes"]) == (0, 0)
