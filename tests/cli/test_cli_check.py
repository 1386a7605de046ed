"""``fidelab check``: decisions as exit codes, what is printed and written, and what is refused."""

from __future__ import annotations

import io
import json
import re
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from fidelab.report.check import render_check, render_check_markdown, render_junit
from fidelab.results.check import Check, Policy, Rule, check
from fidelab.results.compare import compare
from fidelab.results.decision_record import Recommendation
from fidelab.results.record import Report
from tests.golden import adapter
from tests.golden.bundle import Bundle
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import candidate, kld_axis, sample_report
from tests.results.diff_sample import COMPOSITE
from tests.run.harness import Done, cli, refused

WAS = candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", composite=COMPOSITE)
WORSE = candidate("fp8_e4m3", 0.3, "FAIL", 23040, "no", composite=COMPOSITE)
LIMIT = ("--max-kld", 1)


def write_runs(folder: Path) -> None:
    """Three runs: before, the same again, and a worse one."""
    for name, arm in (("before", WAS), ("again", WAS), ("worse", WORSE)):
        sample_report(run_id=name, candidates=(arm,)).write(folder / "runs" / name / "report.json")


@pytest.fixture
def room(tmp_path: Path) -> Path:
    write_runs(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a golden run."""
    room, bundle = tmp_path_factory.mktemp("golden"), Bundle.read("certificate")
    return adapter.score(bundle, adapter.unpack(bundle, room), room).write(room / "golden.json")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--configuration", "tilt[q=0.52]", "--max-kld", 0.01), 0, "GO: golden"),
        (("--configuration", "tilt[q=0.75]", "--max-kld", 0.01), 1, "NO-GO: golden"),
        (("--configuration", "tilt[q=0.52]", "--min-same-top", "97%"), 3, "about 122 documents"),
        (("--all", "--max-kld", 0.2), 0, "tilt[q=0.75]: kld.mean"),
        (("--all", "--max-kld", 0.01), 1, "NO-GO: golden"),
    ],
)
def test_a_golden_report_ends_with_the_exit_code_of_its_decision(
    words: tuple[object, ...], code: int, said: str, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = cli("check", golden, *words, cwd=golden.parent)
    assert (done.code, done.err) == (code, "")
    assert said in " ".join(done.out.split())
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("downgrades", "limit", "code", "said"),
    [
        ((), 1, 0, "GO: r"),
        (("loses 4 of 36 needles",), 1, 3, "loses 4 of 36 needles"),
        (("loses 4 of 36 needles",), 0.001, 1, "NO-GO: r"),
    ],
)
def test_a_configuration_whose_verdict_another_axis_lowers_never_passes(
    downgrades: tuple[str, ...], limit: float, code: int, said: str, tmp_path: Path
) -> None:
    lost = kld_axis(0.0312, 0.002).model_copy(update={"downgrades": downgrades})
    arm = candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", axes={"kld": lost})
    sample_report(run_id="r", candidates=(arm,)).write(tmp_path / "report.json")
    done = cli("check", "report.json", "--max-kld", limit, cwd=tmp_path)
    assert done.code == code
    assert said in " ".join(done.out.split())


def test_the_recommended_configuration_is_checked_unless_another_is_named(tmp_path: Path) -> None:
    advice = Recommendation(kind="use", arm="fp8_e4m3", text="Use fp8_e4m3")
    sample_report(recommendation=advice).write(tmp_path / "report.json")
    for words, arm in (((), "fp8_e4m3"), (("--configuration", "k16v8"), "k16v8")):
        done = cli("check", "report.json", *LIMIT, *words, "--json", "-", cwd=tmp_path)
        assert {result["arm"] for result in json.loads(done.out)["results"]} == {arm}


def test_rules_of_a_file_are_added_to_the_flags(room: Path) -> None:
    (room / "policy.yaml").write_text(
        "rules:\n"
        "- {metric: kld.top1, min: 99%, tier: supporting}\n"
        "- {metric: kld.confident_flips, max: 5%, tier: advisory}\n"
    )
    done = cli("check", "runs/before", "--max-kld", 0.1, "--policy", "policy.yaml", "--json", "-", cwd=room)
    found = json.loads(done.out)
    assert [(result["metric"], result["tier"], result["decision"]) for result in found["results"]] == [
        ("kld.mean", "critical", "GO"),
        ("kld.top1", "supporting", "NO-GO"),
        ("kld.confident_flips", "advisory", "GO"),
    ]
    assert (found["decision"], done.code) == ("INCONCLUSIVE", 3)


def test_an_equal_run_passes_against_its_baseline(room: Path, plain: Done) -> None:
    done = cli("check", "runs/again", "--baseline", "runs/before", cwd=room)
    assert (done.code, done.err) == (0, "")
    assert "again against baseline before" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    done = cli("check", plain.folder, "--all", *LIMIT, "--baseline", plain.folder, cwd=plain.cwd)
    assert (done.code, done.err) == (0, "")
    assert "unchanged" in done.out


def test_a_regression_against_the_baseline_is_not_a_go(room: Path) -> None:
    done = cli("check", "runs/worse/report.json", "--baseline", "runs/before", cwd=room)
    assert done.code == 1
    assert re.search(r"NO-GO: \d+ metrics regressed", done.out)
    assert done.out.index("regressed") < done.out.index("cannot tell")
    (room / "policy.yaml").write_text("baseline: {kld_increase: 0%, kld_increase_nats: 1, score_drop: 50}\n")
    assert cli("check", "runs/worse", "--baseline", "runs/before", "--policy", "policy.yaml", cwd=room).code == 0


def test_a_lost_arm_is_inconclusive_unless_that_is_allowed(room: Path) -> None:
    other = candidate("int4", 0.03, "PASS", 1, "safe")
    sample_report(run_id="fewer", candidates=(other,)).write(room / "runs/fewer/report.json")
    done = cli("check", "runs/fewer", "--baseline", "runs/before", cwd=room)
    shown = " ".join(done.out.split())
    assert done.code == 3
    assert "of the baseline lost (allow_missing lets that pass)" in shown
    assert "lost: fp8_e4m3, all 25 metrics" in shown
    assert "new: int4" in shown
    (room / "policy.yaml").write_text("baseline: {allow_missing: true}\n")
    assert cli("check", "runs/fewer", "--baseline", "runs/before", "--policy", "policy.yaml", cwd=room).code == 0


def test_arms_that_lost_the_same_metrics_share_a_line(room: Path) -> None:
    arms = [WAS.model_copy(update={"name": name, "composite": None}) for name in ("a", "b")]
    bare = [arm.model_copy(update={"axes": {"kld": arm.axes["kld"]}}) for arm in arms]
    for name, found in (("both", arms), ("kld", bare)):
        sample_report(run_id=name, candidates=tuple(found)).write(room / f"{name}.json")
    done = cli("check", "kld.json", "--all", "--baseline", "both.json", cwd=room)
    lost = "lost: a, b, trajectory: score; exact match; positional agreement; median first"
    assert lost in " ".join(done.out.split())


def test_settings_that_differ_from_the_baseline_are_inconclusive_and_named(room: Path) -> None:
    for name, n_ctx in (("other", 4096), ("base", 512)):
        key = {"kld": {"settings": {"n_ctx": n_ctx}}}
        sample_report(run_id=name, comparability_key=key, candidates=(WAS,)).write(room / f"{name}.json")
    done = cli("check", "other.json", "--baseline", "base.json", cwd=room)
    shown = " ".join(done.out.split())
    assert done.code == 3
    assert "kld: n_ctx was 512 in the baseline and is 4096 now" in shown
    assert "INCONCLUSIVE: not comparable: kld, composite" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("runs/none", *LIMIT), "runs/none: there is no such run folder or report"),
        (("runs/before",), "nothing decides: give a limit such as --max-kld 0.01"),
        (("runs/before", "--policy", "advisory.yaml"), "nothing decides"),
        (("runs/before", "--policy", "none.yaml"), "none.yaml does not exist"),
        (("runs/before", "--policy", "metric.yaml"), "unknown metric 'kld.maen'; did you mean 'kld.mean'?"),
        (("runs/before", "--policy", "group.yaml"), "unknown metric 'kdl.mean'; did you mean 'kld.mean'?"),
        (("runs/before", "--policy", "key.yaml"), "unknown key 'rules.0.maximum'; did you mean 'max'?"),
        (("runs/before", "--policy", "empty.yaml"), "kld.mean: give max, min, or both"),
        (("runs/before", "--policy", "unit.yaml"), "kld.mean is in nats: write its limit 1% as a number"),
        (("runs/before", "--policy", "arm.yaml"), "unknown configuration 'fp8'. There are: fp8_e4m3."),
        (("runs/before", "--policy", "slowdown.yaml"), "baseline.slowdown: -5% is not a share: write 1% or 0.01"),
        (("runs/before", "--policy", "drop.yaml"), "baseline.score_drop: Input should be less than or equal to 100"),
        (("runs/before", "--min-same-top", "97"), "--min-same-top: 97 is not a share: write 97% or 0.97"),
        (("runs/before", "--min-same-top", "much"), "--min-same-top: 'much' is not a share: write 1% or 0.01"),
        (("runs/before", *LIMIT, "--configuration", "fp8"), "unknown configuration 'fp8'"),
        (("runs/before", "--baseline", "runs/before", "--configuration", "fp8"), "unknown configuration 'fp8'"),
        (("runs/before", "--baseline", "runs/before", "--configuration", "fp8_e4m3"), "has no effect: no limit"),
        (("runs/before", *LIMIT, "--configuration", "fp8_e4m3", "--all"), "--all and --configuration: name one"),
        (("runs/before", *LIMIT, "--json", "-", "--markdown"), "--markdown and --json -: name one"),
        (("runs/before", "--baseline", "half"), "finish the run with: fidelab compare --resume half"),
        (("runs/before", "--baseline", "mian"), "mian: there is no such run folder or report"),
        (("runs/before", "--baseline", "torn.json"), "torn.json: line "),
        (("runs/before", "--baseline", "other.json"), "nothing can be compared: "),
    ],
)
def test_bad_input_is_one_line(words: tuple[object, ...], said: str, room: Path) -> None:
    (room / "torn.json").write_text((room / "runs/before/report.json").read_text()[:1000])
    other = {name: {"items": "other"} for name in ("kld", "trajectory")}
    sample_report(comparability_key=other, candidates=(WAS,)).write(room / "other.json")
    (room / "half").mkdir()
    (room / "half/config.resolved.yaml").write_text("")
    for name, rule in {
        "advisory": "metric: kld.mean, max: 1, tier: advisory",
        "metric": "metric: kld.maen, max: 1",
        "group": "metric: kdl.mean, max: 1",
        "key": "metric: kld.mean, maximum: 1",
        "empty": "metric: kld.mean",
        "unit": "metric: kld.mean, max: 1%",
        "arm": "metric: kld.mean, max: 1, arm: fp8",
    }.items():
        (room / f"{name}.yaml").write_text(f"rules:\n- {{{rule}}}\n")
    (room / "slowdown.yaml").write_text("baseline: {slowdown: -5%}\n")
    (room / "drop.yaml").write_text("baseline: {score_drop: 101}\n")
    assert said in refused(cli("check", *words, cwd=room))


def test_files_are_written_beside_the_text(room: Path) -> None:
    words = ("--max-kld", 0.01, "--baseline", "runs/before", "--json", "check.json", "--junit", "check.xml")
    done = cli("check", "runs/worse", *words, cwd=room)
    assert done.out.startswith("NO-GO: worse\n")
    found = Check.model_validate_json((room / "check.json").read_text(), strict=True)
    assert found.decision == "NO-GO"
    assert found.baseline is not None
    assert found.baseline.changes[0].outcome == "regressed"
    suites = ElementTree.parse(room / "check.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["rules", "baseline"]
    assert (suites[0].get("tests"), suites[0].get("failures")) == ("1", "1")
    assert (suites[0].get("time"), suites[1].get("time")) == (None, None)  # none was recorded
    [failure] = suites.iterfind("testsuite[@name='rules']/testcase/failure")
    assert failure.get("message") == "NO-GO: 0.300 (0.24–0.36), max 0.01"


@pytest.mark.parametrize(
    ("tier", "limit", "tag"),
    [
        ("critical", 1.0, None),
        ("critical", 0.01, "failure"),
        ("critical", 0.03, "error"),
        ("supporting", 0.01, "failure"),
        ("supporting", 0.03, "skipped"),
        ("advisory", 0.01, "skipped"),
    ],
)
def test_junit_fails_where_a_rule_counts(tier: str, limit: float, tag: str | None) -> None:
    report = sample_report(candidates=(WAS,))
    rules = Policy.model_validate(
        {"rules": [{"metric": "kld.mean", "max": 9}, {"metric": "kld.mean", "max": limit, "tier": tier}]}
    )
    suites = ElementTree.fromstring(render_junit(check(report, rules, report.candidates), report, "fidelab check r"))
    _, case = suites.iter("testcase")
    assert [element.tag for element in case] == [*([] if tag is None else [tag]), "system-out"]


def decided(was: Report, now: Report) -> Check:
    policy = Policy(rules=(Rule(metric="kld.mean", max=0.03), Rule(metric="kld.top1", min="99%", tier="supporting")))
    return check(now, policy, now.candidates, diff=compare(was, now))


def drawn(found: Check, **options: object) -> str:
    console = Console(file=io.StringIO(), width=80, **options)  # type: ignore[arg-type]
    render_check(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def hostile(text: str) -> Check:
    """Hostile text on both sides, with something worse, lost, refused and beside."""
    was = hostile_report(text)
    arms = list(was.candidates)
    arms[1] = arms[1].model_copy(update={"axes": {**arms[1].axes, "kld": kld_axis(0.9, 0.01)}})
    environment = {text: f"{text}!"}
    now = was.model_copy(update={"candidates": (*arms[:2], *arms[3:]), "environment": environment, "run_id": text})
    return decided(was, now)


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_adds_no_markup(text: str) -> None:
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    page = render_check_markdown(hostile(text))
    tokens = chain.from_iterable((token, *(token.children or ())) for token in reader.parse(page))
    kinds = {re.sub(r"_(open|close)$", "", token.type) for token in tokens}
    inline = {"inline", "text", "code_inline", "strong"}
    assert kinds <= {"paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list", "list_item"} | inline
    for table in (block for block in page.split("\n\n") if block.startswith("|")):
        assert {len(re.split(r"(?<!\\)\|", line)) for line in table.split("\n")} == {8}


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_reaches_neither_a_terminal_nor_the_structure_of_xml(text: str) -> None:
    found = hostile(text)
    xml = render_junit(found, sample_report(candidates=(WAS,), command=text), text)
    assert not any(char in drawn(found) + xml for char in ("\x1b", "\u202e", "\u2028", "\r"))
    assert {element.tag for element in ElementTree.fromstring(xml).iter()} <= {
        *("testsuites", "testsuite", "properties", "property", "testcase"),
        *("failure", "error", "skipped", "system-out"),
    }
