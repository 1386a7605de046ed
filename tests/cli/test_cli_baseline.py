"""``fidelab baseline`` and ``fidelab diff``: what is kept, what is printed, and how the gate exits."""

from __future__ import annotations

import io
import json
import re
from itertools import chain
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from fidelab.report.diff import render_diff, render_diff_markdown
from fidelab.results.compare import compare
from fidelab.results.diff_record import Diff
from fidelab.results.record import Report
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import candidate, kld_axis, sample_report
from tests.results.diff_sample import COMPOSITE
from tests.run.harness import Done, cli

WAS = candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", composite=COMPOSITE)
WORSE = candidate("fp8_e4m3", 0.3, "FAIL", 23040, "no", composite=COMPOSITE)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """Three runs: before, the same again, and a worse one."""
    for name, arm in (("before", WAS), ("again", WAS), ("worse", WORSE)):
        sample_report(run_id=name, candidates=(arm,)).write(tmp_path / "runs" / name / "report.json")
    return tmp_path


def refused(*words: object, cwd: Path) -> str:
    """The one line on standard error of a command that is refused."""
    done = cli(*words, cwd=cwd)
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith("fidelab: ")
    return line


# ---------------------------------------------------------------------------------------------------- baselines


def test_a_baseline_is_the_runs_report_under_its_name(room: Path) -> None:
    done = cli("baseline", "save", "main", "runs/before", cwd=room)
    assert (done.code, done.out) == (0, "baselines/main.json\n")
    assert (room / done.out.strip()).read_bytes() == (room / "runs/before/report.json").read_bytes()


def test_a_baseline_is_replaced_only_by_force(room: Path) -> None:
    cli("baseline", "save", "main", "runs/before", cwd=room)
    line = refused("baseline", "save", "main", "runs/worse", cwd=room)
    assert line == "fidelab: baseline 'main' exists in baselines; replace it with --force"
    assert Report.from_json(room / "baselines/main.json").run_id == "before"
    assert cli("baseline", "save", "main", "runs/worse", "--force", cwd=room).code == 0
    assert Report.from_json(room / "baselines/main.json").run_id == "worse"


def test_baselines_are_listed_and_removed(room: Path) -> None:
    for name in ("main", "v1.0"):
        cli("baseline", "save", name, "runs/before", "--dir", "kept", cwd=room)
    (room / "kept" / "torn.json").write_text('{"schema": "fidelab.rep')
    listed = json.loads(cli("baseline", "list", "--dir", "kept", "--json", cwd=room).out)["baselines"]
    assert [entry["name"] for entry in listed] == ["main", "torn", "v1.0"]
    assert listed[0]["arms"] == ["f32", "bf16", "fp8_e4m3"]
    assert "line 1, column 12" in listed[1]["problem"]
    lines = cli("baseline", "list", "--dir", "kept", cwd=room).out.splitlines()
    assert [line.split()[0] for line in lines] == ["main", "torn", "v1.0"]
    assert cli("baseline", "remove", "main", "--dir", "kept", cwd=room).code == 0
    assert not (room / "kept" / "main.json").exists()


def test_an_empty_list_says_so_on_standard_error(room: Path) -> None:
    done = cli("baseline", "list", cwd=room)
    assert (done.code, done.out, done.err) == (0, "", "fidelab: there is no baseline in baselines\n")


@pytest.mark.parametrize("name", ["", "../main", "a/b", ".hidden", "-x y", "a\nb", "n" * 101, "ä"])
def test_a_name_that_is_no_file_name_is_refused(name: str, room: Path) -> None:
    assert "a name has up to 100 letters" in refused("baseline", "save", "--", name, "runs/before", cwd=room)
    assert not (room / "baselines").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("baseline", "save", "main", "runs/none"), "runs/none: there is no such run folder or report"),
        (("baseline", "save", "main", "runs"), "runs is no run folder: it holds no report.json"),
        (("baseline", "save", "main", "half"), "finish the run with: fidelab compare --resume half"),
        (("baseline", "save", "main", "torn.json"), "torn.json: line "),
        (("baseline", "remove", "mian"), "unknown baseline 'mian'. There are: torn, kept."),
        (("diff", "mian", "runs/before"), "unknown baseline 'mian'"),
        (("diff", "./mian", "runs/before"), "mian: there is no such run folder or report"),
        (("diff", "torn", "runs/before"), "baselines/torn.json: line "),
        (("diff", "runs/before", "runs/other"), "nothing can be compared: "),
        (("diff", "kept", "runs/before", "--max-slowdown", "0.1"), "--max-slowdown '0.1': write a percentage"),
        (("diff", "kept", "runs/before", "--max-slowdown", "-5%"), "--max-slowdown '-5%': write a percentage"),
        (("diff", "kept", "runs/before", "--max-memory-increase", "nan%"), "write a percentage"),
        (("diff", "kept", "runs/before", "--max-kld-increase", "much"), "or nats such as 0.001"),
        (("diff", "kept", "runs/before", "--max-score-drop", "101"), "write points between 0 and 100"),
        (("diff", "kept", "runs/before", "--json", "--markdown"), "name one"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str, room: Path) -> None:
    cli("baseline", "save", "kept", "runs/before", cwd=room)
    whole = (room / "runs/before/report.json").read_text()
    for torn in (room / "torn.json", room / "baselines/torn.json"):
        torn.write_text(whole[: len(whole) // 2])
    (room / "half").mkdir()
    (room / "half/config.resolved.yaml").write_text("")
    other = {name: {"items": "other"} for name in ("kld", "trajectory")}
    sample_report(comparability_key=other, candidates=(WAS,)).write(room / "runs/other/report.json")
    line = refused(*words, cwd=room)
    assert said in line


# --------------------------------------------------------------------------------------------------------- gate


def test_an_equal_run_passes(room: Path) -> None:
    cli("baseline", "save", "main", "runs/before", cwd=room)
    done = cli("diff", "main", "runs/again", cwd=room)
    assert (done.code, done.err) == (0, "")
    assert "again against baseline main" in done.out


@pytest.mark.parametrize(("was", "now"), [("main", "runs/worse"), ("runs/before", "runs/worse/report.json")])
def test_a_regression_fails_and_is_said_on_standard_error(was: str, now: str, room: Path) -> None:
    cli("baseline", "save", "main", "runs/before", cwd=room)
    done = cli("diff", was, now, cwd=room)
    assert done.code == 1
    assert re.match(r"fidelab: \d+ metrics regressed\n", done.err)
    assert done.out.index("regressed") < done.out.index("cannot tell")
    assert cli("diff", was, now, "--max-kld-increase", 1, "--max-score-drop", 50, cwd=room).code == 0


def test_a_lost_arm_is_undecided_unless_that_is_allowed(room: Path) -> None:
    sample_report(run_id="fewer", candidates=()).write(room / "runs/fewer/report.json")
    done = cli("diff", "runs/before", "runs/fewer", cwd=room)
    assert done.code == 3
    assert "of the baseline lost (--allow-missing lets that pass)" in done.err
    assert "lost: fp8_e4m3, all 25 metrics" in done.out
    assert cli("diff", "runs/before", "runs/fewer", "--allow-missing", cwd=room).code == 0
    assert "new: fp8_e4m3" in cli("diff", "runs/fewer", "runs/before", cwd=room).out


def test_arms_that_lost_the_same_metrics_share_a_line(room: Path) -> None:
    arms = [WAS.model_copy(update={"name": name, "composite": None}) for name in ("a", "b")]
    bare = [arm.model_copy(update={"axes": {"kld": arm.axes["kld"]}}) for arm in arms]
    for name, found in (("both", arms), ("kld", bare)):
        sample_report(run_id=name, candidates=tuple(found)).write(room / f"{name}.json")
    shown = " ".join(cli("diff", "both.json", "kld.json", cwd=room).out.split())
    assert "lost: a, b, trajectory: score; exact match; positional agreement; median first divergence;" in shown


def test_settings_that_differ_leave_it_undecided_and_are_named(room: Path) -> None:
    other = {"kld": {"settings": {"n_ctx": 4096}}}
    sample_report(run_id="other", comparability_key=other, candidates=(WAS,)).write(room / "runs/other/report.json")
    base = {"kld": {"settings": {"n_ctx": 512}}}
    sample_report(run_id="base", comparability_key=base, candidates=(WAS,)).write(room / "runs/base/report.json")
    done = cli("diff", "runs/base", "runs/other", cwd=room)
    assert done.code == 3
    assert "kld: n_ctx was 512 in the baseline and is 4096 now" in " ".join(done.out.split())
    assert "not comparable: kld, composite" in done.err
    assert cli("diff", "runs/base", "runs/other", "--allow-missing", cwd=room).code == 0


def test_all_lists_what_did_not_change(room: Path) -> None:
    short, full = (cli("diff", "runs/before", "runs/again", *flag, cwd=room).out for flag in ((), ("--all",)))
    assert "--all lists every metric" in short
    assert "top-1" not in short
    assert "top-1" in full


def test_the_object_is_all_that_is_printed_when_asked(room: Path) -> None:
    done = cli("diff", "runs/before", "runs/worse", "--json", cwd=room)
    found = Diff.model_validate_json(done.out, strict=True)
    assert done.code == 1
    assert found.thresholds.slowdown == 0.1
    assert found.changes[0].outcome == "regressed"


def test_the_widest_line_fits_a_file(room: Path) -> None:
    out = cli("diff", "runs/before", "runs/worse", "--all", cwd=room).out
    assert max(map(len, out.splitlines())) <= 100


# ------------------------------------------------------------------------------------------------------- faces


def pair() -> Diff:
    return compare(sample_report(candidates=(WAS,)), sample_report(candidates=(WORSE,)))


def drawn(diff: Diff, **options: object) -> str:
    console = Console(file=io.StringIO(), width=80, **options)  # type: ignore[arg-type]
    render_diff(diff, console, full=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_no_color_leaves_no_colour_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    assert coloured.search(drawn(pair(), force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(drawn(pair(), force_terminal=True))


def hostile(text: str) -> Diff:
    """Hostile text on both sides, with something worse, lost, refused and beside."""
    was = hostile_report(text)
    arms = list(was.candidates)
    arms[1] = arms[1].model_copy(update={"axes": {**arms[1].axes, "kld": kld_axis(0.9, 0.01)}})
    environment = {text: f"{text}!"}
    now = was.model_copy(update={"candidates": (*arms[:2], *arms[3:]), "environment": environment, "run_id": text})
    return compare(was, now)


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_adds_no_markup(text: str) -> None:
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    page = render_diff_markdown(hostile(text), full=True)
    tokens = chain.from_iterable((token, *(token.children or ())) for token in reader.parse(page))
    kinds = {re.sub(r"_(open|close)$", "", token.type) for token in tokens}
    inline = {"inline", "text", "code_inline"}
    assert kinds <= {"paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list", "list_item"} | inline
    table = next(block for block in page.split("\n\n") if block.startswith("|"))
    assert {len(re.split(r"(?<!\\)\|", line)) for line in table.split("\n")} == {8}


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_reaches_no_terminal(text: str) -> None:
    out = drawn(hostile(text))
    assert not any(char in out for char in ("\x1b", "\u202e", "\u2028", "\r"))


def test_a_real_run_against_itself_passes(plain: Done) -> None:
    done = cli("diff", plain.folder, plain.folder, cwd=plain.cwd)
    assert (done.code, done.err) == (0, "")
    assert "unchanged" in done.out
