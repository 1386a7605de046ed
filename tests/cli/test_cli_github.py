"""``check --github`` and JUnit as their readers take them, and ``compare --fail-on``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from fidelab.cli.check import exit_on_conditions, read_conditions
from fidelab.report.check import render_junit
from fidelab.report.github import job_annotations, workflow_command
from fidelab.results.check import Check, Policy, check
from fidelab.results.record import Report, Timing
from tests.cli.test_cli_check import WAS, decided, hostile, write_runs
from tests.report.hostile import TEXTS
from tests.report.sample import sample_report
from tests.run.harness import SMALL, Done, cli, refused, write_inputs

SUMMARY = "GITHUB_STEP_SUMMARY"


def obeyed(printed: str) -> Iterator[tuple[str, dict[str, str], str]]:
    """The workflow commands that a runner obeys: name, properties and message, by GitHub's description of them."""
    stopped = None
    for line in printed.splitlines():
        match = re.fullmatch(r"\s*::(?P<name>[^\s:]+)(?: (?P<properties>.*?))?::(?P<message>.*)", line)
        if stopped is not None:
            stopped = None if line.strip() == f"::{stopped}::" else stopped
        elif match and match["name"] == "stop-commands":
            stopped = match["message"]
        elif match or "##[" in line:
            assert match is not None, line
            pairs = (pair.partition("=") for pair in (match["properties"] or "").split(",") if pair)
            yield match["name"], {key: read(value) for key, _, value in pairs}, read(match["message"])
    assert stopped is None


def read(text: str) -> str:
    for escape, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(escape, char)
    return text


@pytest.fixture
def room(tmp_path: Path) -> Path:
    write_runs(tmp_path)
    return tmp_path


def test_a_no_go_is_an_error_that_names_configuration_figure_and_limit(room: Path) -> None:
    done = cli("check", "runs/worse", "--max-kld", 0.01, "--github", cwd=room)
    assert done.code == 1
    assert done.out.splitlines()[-1] == "::error title=NO-GO::fp8_e4m3 kld.mean 0.300 > 0.01"
    assert "NO-GO: worse" in done.out
    done = cli("check", "runs/worse", "--min-same-top", "99.9%", "--github", cwd=room)
    [(_, _, message)] = obeyed(done.out)
    assert message == "fp8_e4m3 kld.top1 76.92% < 99.9%"


def test_an_open_decision_is_a_warning_and_a_go_is_silent(room: Path) -> None:
    done = cli("check", "runs/before", "--max-kld", 0.03, "--github", cwd=room)
    [(name, properties, message)] = obeyed(done.out)
    assert (done.code, name, properties) == (3, "warning", {"title": "INCONCLUSIVE"})
    assert re.match(r"fp8_e4m3 kld\.mean 0\.0312 \(.*\), max 0\.03: .* would decide", message)
    assert [*obeyed(cli("check", "runs/before", "--max-kld", 1, "--github", cwd=room).out)] == []


def test_what_does_not_count_is_a_notice_and_errors_come_first() -> None:
    report = sample_report(candidates=(WAS,))
    tiers = (("advisory", 0.01), ("supporting", 0.01), ("supporting", 0.03), ("critical", 0.03), ("critical", 0.01))
    rules = [{"metric": "kld.mean", "max": limit, "tier": tier} for tier, limit in tiers]
    found = check(report, Policy.model_validate({"rules": rules}), report.candidates)
    said = [(name, properties["title"]) for name, properties, _ in obeyed("\n".join(job_annotations(found)))]
    assert said == [
        ("error", "NO-GO"),
        ("warning", "NO-GO (supporting)"),
        ("warning", "INCONCLUSIVE"),
        ("notice", "NO-GO (advisory)"),
        ("notice", "INCONCLUSIVE (supporting)"),
    ]


def test_a_baseline_that_does_not_pass_is_annotated(room: Path) -> None:
    done = cli("check", "runs/worse", "--baseline", "runs/before", "--github", cwd=room)
    [(name, _, message)] = obeyed(done.out)
    assert name == "error"
    assert re.match(r"against before: \d+ metrics regressed", message)


@pytest.mark.parametrize("text", ["50%", "a\r\nb", "a: b, c", "%0A::error::x", "::error::x", "##[error]x"])
def test_titles_and_messages_arrive_as_they_were(text: str) -> None:
    line = workflow_command("error", text, text)
    assert len(line.splitlines()) == 1
    [(name, properties, message)] = obeyed(line)
    clean = text.replace("\r\n", "\n")
    assert (name, properties, message) == ("error", {"title": clean}, clean)


@pytest.mark.parametrize("text", [*TEXTS, "##[set-output name=decision;]GO", "::add-mask::e"])
def test_names_in_a_report_are_no_commands_to_the_runner(text: str, tmp_path: Path) -> None:
    arm = WAS.model_copy(update={"name": text})
    sample_report(run_id=text, candidates=(arm,)).write(tmp_path / "report.json")
    done = cli("check", "report.json", "--max-kld", 0.01, "--github", cwd=tmp_path)
    assert {name for name, *_ in obeyed(done.out)} == {"error"}
    assert {name for name, *_ in obeyed("\n".join(job_annotations(hostile(text))))} <= {"error", "warning", "notice"}


def test_the_summary_of_the_job_is_appended(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = room / "summary.md"
    file.write_text("before\n")
    monkeypatch.setenv(SUMMARY, str(file))
    words = ("check", "runs/worse", "--max-kld", 0.01)
    assert cli(*words, "--github", cwd=room).err == ""
    assert file.read_text().startswith("before\n\n**NO-GO**: `worse`\n\n| decision | configuration |")
    assert "    fidelab check runs/worse --max-kld 0.01 --github\n" in file.read_text()


@pytest.mark.parametrize("place", [None, "", "none/summary.md", "."])
def test_without_a_summary_to_write_one_line_says_so_and_the_decision_stands(
    place: str | None, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place is None:
        monkeypatch.delenv(SUMMARY, raising=False)
    else:
        monkeypatch.setenv(SUMMARY, place)
    done = cli("check", "runs/worse", "--max-kld", 0.01, "--github", cwd=room)
    [line] = done.err.splitlines()
    assert done.code == 1
    assert "the job summary is left out" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--markdown",), "--github writes the job summary in Markdown: leave out --markdown"),
        (("--json", "-"), "write --json to a file"),
    ],
)
def test_annotations_share_standard_output_with_no_other_form(words: Sequence[str], said: str, room: Path) -> None:
    assert said in refused(cli("check", "runs/before", "--max-kld", 1, "--github", *words, cwd=room))


# ----------------------------------------------------------------------------------------------------- JUnit

NUMBER = r"\d+"
SECONDS = r"\d+(\.\d+)?"
# Element → attributes with the form of their values, and children in their order, by the schema of Jenkins' xUnit
# plugin (junit-10.xsd).  "!": must be there.
SCHEMA: dict[str, tuple[dict[str, str], str]] = {
    "testsuites": ({"name": ".*", "time": SECONDS, **dict.fromkeys(("tests", "failures", "errors"), NUMBER)}, "suite*"),
    "testsuite": (
        {
            "name!": ".+",
            **dict.fromkeys(("tests!", "failures", "errors", "skipped"), NUMBER),
            "time": SECONDS,
            "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
        },
        r"(properties )?(testcase )*",
    ),
    "properties": ({}, r"(property )+"),
    "property": ({"name!": ".+", "value!": ".*"}, ""),
    "testcase": (
        {"name!": ".+", "classname!": ".+", "time": SECONDS},
        r"((skipped|error|failure) )?(system-out )?",
    ),
    **{tag: ({"type": ".+", "message": ".*"}, "") for tag in ("skipped", "error", "failure")},
    "system-out": ({}, ""),
}
SCHEMA["testsuites"] = (SCHEMA["testsuites"][0], r"(testsuite )*")


def faults_of(element: ElementTree.Element) -> list[str]:
    """Differences of a document from the schema."""
    attributes, children = SCHEMA[element.tag]
    known = {name.rstrip("!"): form for name, form in attributes.items()}
    wrong = [f"{element.tag}: {key}={value}" for key, value in element.items() if not _fits(known.get(key), value)]
    needed = {name.rstrip("!") for name in attributes if name.endswith("!")}
    wrong += [f"{element.tag} lacks {name}" for name in needed - set(element.keys())]
    order = "".join(f"{child.tag} " for child in element)
    wrong += [] if re.fullmatch(children, order) else [f"{element.tag} holds {order}"]
    return [*wrong, *(fault for child in element for fault in faults_of(child))]


def _fits(form: str | None, value: str) -> bool:
    return form is not None and re.fullmatch(form, value, re.DOTALL) is not None


def junit(found: Check, report: Report, command: str = "fidelab check latest --max-kld 0.03") -> ElementTree.Element:
    return ElementTree.fromstring(render_junit(found, report, command))


def timed(seconds: float | None) -> Report:
    return sample_report(
        candidates=(WAS.model_copy(update={"timing": Timing(load_seconds=1.0, seconds=seconds)}),), command="fidelab x"
    )


@pytest.mark.parametrize("seconds", [None, 12.3456])
def test_junit_keeps_to_the_schema(seconds: float | None) -> None:
    report = timed(seconds)
    assert faults_of(junit(decided(report, report), report)) == []
    for text in TEXTS:
        assert faults_of(junit(hostile(text), report, text)) == []


def test_a_test_case_has_the_seconds_of_its_configuration_and_the_commands_that_repeat_it() -> None:
    report = timed(12.3456)
    rules, _ = junit(decided(report, report), report)
    assert [case.get("time") for case in rules.iter("testcase")] == ["12.346", "12.346"]
    assert rules.get("time") == "12.346"  # one configuration was measured once
    assert datetime.fromisoformat(str(rules.get("timestamp"))) == report.created.replace(tzinfo=None, microsecond=0)
    for case in rules.iter("testcase"):
        assert str(case.findtext("system-out")).splitlines() == [
            "measured by: fidelab x",
            "decided by: fidelab check latest --max-kld 0.03",
        ]
    properties = {one.get("name"): one.get("value") for one in rules.iter("property")}
    assert properties["measured by"] == "fidelab x"


def test_the_command_in_junit_is_the_one_that_was_typed(room: Path) -> None:
    cli("check", "runs/before", "--max-kld", 1, "--junit", "c.xml", cwd=room)
    case = next(ElementTree.parse(room / "c.xml").iter("testcase"))
    assert str(case.findtext("system-out")).endswith("decided by: fidelab check runs/before --max-kld 1 --junit c.xml")


# -------------------------------------------------------------------------------------------------- --fail-on


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """``compare`` with conditions, in one folder whose saved outputs are used again."""
    folder = tmp_path_factory.mktemp("fail-on")
    text = "".join(chr(97 + (i * 7) % 3) for i in range(4000))
    write_inputs(folder)
    (folder / "text.txt").write_text(text)

    def ask(*conditions: str, kv: Sequence[str] = ("tilt[q=0.6]",), flags: Sequence[object] = ()) -> Done:
        words: list[Any] = [word for condition in conditions for word in ("--fail-on", condition)]
        words += [word for name in kv for word in ("--kv", name)]
        return cli("compare", "fake", *SMALL, "--quick", "--windows", 40, "--n-ctx", 16, *words, *flags, cwd=folder)

    return ask


def decisions(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("fidelab: ")]


def test_a_condition_that_is_met_ends_the_run_with_1_and_one_line(asked: Callable[..., Done]) -> None:
    done = asked("kld.mean > 0.001")
    assert done.code == 1
    [line] = decisions(done)
    assert re.fullmatch(r"fidelab: NO-GO: tilt\[q=0\.6\] kld\.mean 0\.0\d+ > 0\.001", line)
    assert "KLD" in done.out  # the report was printed


def test_fail_on_decides_each_candidate_as_check_does(asked: Callable[..., Done]) -> None:
    kv = ("tilt[q=0.52]", "tilt[q=0.9]")
    done = asked("kld.mean > 0.05", "kld.top1<1%", kv=kv)
    gate = cli(
        "check", done.folder, "--all", "--max-kld", 0.05, "--min-same-top", "1%", "--junit", "c.xml", cwd=done.cwd
    )
    cases = ElementTree.parse(done.cwd / "c.xml").iter("testcase")
    found = {(str(case.get("name")), tag.tag) for case in cases for tag in case if tag.tag != "system-out"}
    tags = {"NO-GO": "failure", "INCONCLUSIVE": "error"}
    lines = [line.split(": ", 2)[1:] for line in decisions(done)]
    said = {(": ".join(text.split()[:2]), tags[decision]) for decision, text in lines}
    assert said == found
    assert done.code == gate.code == 1


def test_an_open_condition_ends_the_run_with_3_and_its_reason(asked: Callable[..., Done]) -> None:
    done = asked("kld.mean > 1")
    [line] = decisions(done)
    assert done.code == 3
    assert "the reference is unusable" in line  # that of engine fake predicts no text


def test_a_condition_that_is_ruled_out_leaves_the_exit_code_alone(capsys: pytest.CaptureFixture[str]) -> None:
    exit_on_conditions(sample_report(candidates=(WAS,)), read_conditions(["kld.mean > 1"]), [])
    exit_on_conditions(sample_report(candidates=(WAS,)), None, [])
    assert capsys.readouterr() == ("", "")


def test_a_failure_comes_before_an_open_condition(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop:
        exit_on_conditions(sample_report(candidates=(WAS,)), read_conditions(["kld.mean > 0.03"]), ["x failed"])
    assert stop.value.exit_code == 1
    assert capsys.readouterr().err.startswith("fidelab: x failed\nfidelab: INCONCLUSIVE: ")


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("kdl.mean > 0.01", "unknown test of --fail-on 'kdl'; did you mean 'kld'?"),
        ("mean > 0.01", "unknown test of --fail-on 'mean'"),
        ("kld.mean > 1%", "kld.mean is in nats: write its limit 1% as a number"),
        ("kld.top1 < 97", "kld.top1: 97 is not a share: write 97% or 0.97"),
        ("kld.mean >= 0.01", "'kld.mean >= 0.01' is not a condition: write 'kld.mean > 0.01' or 'kld.top1 < 97%'"),
        ("kld.mean > much", "'much' is not a limit"),
        ("trajectory.score < 90", "unknown test of --fail-on 'trajectory'"),
    ],
)
def test_a_condition_that_cannot_be_decided_is_refused_before_the_run(
    condition: str, said: str, asked: Callable[..., Done]
) -> None:
    assert said in refused(asked(condition))


def test_a_resumed_run_and_a_file_take_conditions(asked: Callable[..., Done]) -> None:
    done = asked()
    again = cli("compare", "--resume", done.folder, "--fail-on", "kld.mean > 0.001", cwd=done.cwd)
    assert (again.code, len(decisions(again))) == (1, 1)
    again = cli("compare", "-f", done.folder / "config.resolved.yaml", "--fail-on", "kld.mean > 0.001", cwd=done.cwd)
    assert (again.code, len(decisions(again))) == (1, 1)
