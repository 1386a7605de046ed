"""An evaluation as a record: shares, pairs with a baseline, faults, open points, and parts at a time limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import pytest
import typer

from fidelab.bench.eval import (
    EVAL,
    EvalSettings,
    Evaluated,
    answers_of,
    compare_with,
    decide_change,
    evaluate,
    faults_of,
    open_of,
)
from fidelab.bench.eval.checks import CheckResult
from fidelab.bench.eval.checks import State as CheckState
from fidelab.bench.eval.measure import EvalWatch as Watch
from fidelab.bench.eval.measure import QuestionResult, State
from fidelab.bench.eval.record import Change, measurement
from fidelab.bench.serving.record import server_arm, server_report
from fidelab.cli.output import exit_on
from fidelab.core import Status
from fidelab.core.errors import MismatchError
from fidelab.engines.openai.server import Server
from fidelab.inputs.questions.question import Question
from fidelab.results.measurement import Measurement
from fidelab.results.record import Report
from tests.bench.eval.asking import chat_server, evaluated, known_questions
from tests.bench.eval.chat_server import serving
from tests.report.sample import sample_report

SETTINGS = EvalSettings(base_url="http://127.0.0.1:8000")
Z = 1.959963984540054
ANSWERS: Mapping[str, State] = {"+": "right", "-": "wrong", "?": "not reached", "0": "not tested"}


def of_kind(kind: str) -> list[Question]:
    return [one for one in known_questions() if one.kind == kind]


def run(checks: Mapping[str, CheckState] | None = None, **marks: str) -> Evaluated:
    """An evaluation made by hand; ``marks``: of each kind, a sign of :data:`ANSWERS` per question."""
    found = Evaluated(Server("tiny"), seconds=1.5, tokens=70)
    found.checks += [CheckResult(name, state, f"{name} was seen") for name, state in (checks or {}).items()]
    for kind, signs in marks.items():
        asked = of_kind(kind.replace("_", "-"))
        states = [ANSWERS[sign] for sign in signs]
        found.questions += [QuestionResult(*pair, "an answer", "why") for pair in zip(asked, states, strict=False)]
    return found


def stored(found: Evaluated, settings: EvalSettings = SETTINGS) -> Report:
    """The report of an evaluation as it is read from its file."""
    report = server_report(
        server_arm(found.server, EVAL, measurement(found, settings)),
        run_id="before",
        created=datetime.now(UTC),
        command="fidelab eval",
        settings={},
        comparability_key={},
    )
    return Report.model_validate_json(report.to_json())


def value(found: Measurement, key: str, **cell: str) -> Any:
    [metric] = [one for one in found.metrics if one.key == key and dict(one.cell) == cell]
    return metric.value


# ------------------------------------------------------------------------------------------------- shares


def wilson(right: int, n: int) -> tuple[float, float]:
    """Ends p of the interval, where the share lies z standard errors of p from p: roots of a quadratic equation."""
    share = right / n
    a, b, c = 1 + Z * Z / n, -(2 * share + Z * Z / n), share * share
    reach = math.sqrt(max(0.0, b * b - 4 * a * c))
    return (-b - reach) / (2 * a), (-b + reach) / (2 * a)


def test_shares_of_kinds_have_wilsons_interval() -> None:
    found = measurement(run(arithmetic="++++++--", sql="+-----", reasoning="++++++++", json="-----"), SETTINGS)
    shares = {one.cell.get("kind", ""): one for one in found.metrics if one.key == "accuracy"}
    counts = {"": (15, 27), "arithmetic": (6, 8), "sql": (1, 6), "reasoning": (8, 8), "json": (0, 5)}
    assert shares.keys() == counts.keys()
    for kind, (right, n) in counts.items():
        assert shares[kind].value == pytest.approx(right / n)
        assert shares[kind].ci == pytest.approx(wilson(right, n), abs=1e-9)
    assert [one.headline for one in shares.values()].count(True) == 1


def test_counts_are_of_answered_questions_alone() -> None:
    found = measurement(run(arithmetic="+++-????", images="00000000"), SETTINGS)
    assert (found.n_items, found.status) == (4, Status.OK)
    assert (value(found, "right", kind="arithmetic"), value(found, "asked", kind="arithmetic")) == (3, 4)
    assert not any(one.cell == {"kind": "images"} for one in found.metrics)
    cells = {one.at["kind"]: (one.status, one.reason or one.flags[0].text) for one in found.cells}
    assert cells == {"arithmetic": (Status.OK, "4 of 8 asked: why"), "images": (Status.NOT_SUPPORTED, "why")}
    assert (value(found, "generated_tokens"), value(found, "seconds")) == (70, 1.5)


def test_tables_show_the_checks_and_the_questions_that_failed() -> None:
    found = measurement(run({"stop": "failed"}, arithmetic="+-"), SETTINGS)
    serving_table, questions = found.plots
    assert serving_table.rows == (("stop", "failed", "stop was seen"),)  # type: ignore[union-attr]
    [row] = questions.rows  # type: ignore[union-attr]
    assert row[:3] == ("arithmetic-2", "why", "an answer")
    assert found.summary == "1 of 2 questions right; 0 of 1 serving checks passed"


def test_markdown_has_the_kinds_the_serving_checks_and_the_failed_questions() -> None:
    text = stored(run({"stop": "failed", "length": "passed"}, arithmetic="+-", sql="++")).to_markdown()
    lines = text.splitlines()
    assert "| check | result | seen |" in lines
    assert "| `stop` | failed | stop was seen |" in lines
    [wrong] = [line for line in lines if line.startswith("| `arithmetic-2` |")]
    assert wrong.startswith("| `arithmetic-2` | why | an answer | ")
    kinds = [line.split(" | ")[:4] for line in lines if line.startswith(("| arithmetic |", "| sql |"))]
    assert [(kind, right, asked) for kind, right, asked, _ in kinds] == [
        ("| arithmetic", "1", "2"),
        ("| sql", "2", "2"),
    ]


def test_an_evaluation_without_any_answer_failed_with_its_reason() -> None:
    found = measurement(run(arithmetic="????????"), SETTINGS)
    assert (found.status, found.reason) == (Status.FAILED, "why")


# ------------------------------------------------------------------------------------------------- baseline


def two_sided(lost: int, gained: int) -> float:
    """Share of the ways to deal the pairs out that are at most as likely as this one."""
    n = lost + gained
    ways = [math.comb(n, k) for k in range(n + 1)]
    return float(Fraction(sum(way for way in ways if way <= ways[lost]), 2**n))


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (3, 1), (5, 0), (6, 0), (2, 2), (1, 9), (11, 3)])
def test_the_p_of_a_change_is_that_of_mcnemars_exact_test(lost: int, gained: int) -> None:
    change = Change(("q",) * lost, ("q",) * gained, 84, ())
    assert change.p == pytest.approx(two_sided(lost, gained))


def test_answers_are_paired_by_question() -> None:
    before = stored(run(arithmetic="++++----", sql="++++++"))
    change = compare_with(run(arithmetic="-++++---", sql="+++++-"), before)
    assert (change.lost, change.gained, change.both) == (("arithmetic-1", "sql-6"), ("arithmetic-5",), 14)
    assert change.sentence == "lost 2, gained 1 of 14 (p = 1)"


def test_the_change_is_among_the_metrics() -> None:
    now = run(arithmetic="---+++++")
    change = compare_with(now, stored(run(arithmetic="++++++++")))
    found = measurement(now, SETTINGS, change)
    assert [value(found, key) for key in ("lost", "gained", "mcnemar_p")] == [3, 0, 0.25]
    assert found.summary.endswith(change.sentence)


def test_only_questions_that_both_runs_answered_are_paired() -> None:
    before = stored(run(arithmetic="++?0++++", sql="++"))
    change = compare_with(run(arithmetic="+-+++?0+"), before)
    assert (change.lost, change.gained, change.both) == (("arithmetic-2",), (), 4)


def test_equal_answers_are_unchanged() -> None:
    now = run({"stop": "failed"}, arithmetic="++--++--")
    change = compare_with(now, stored(now))
    assert change.sentence == "unchanged: all 8 answers are right or wrong as in the baseline"
    assert decide_change(change) == ([], [])


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": ({"role": "user", "content": "Another text?"},)},
        {"check": {"number": "12"}},
        {"tools": ({"type": "function", "function": {"name": "add"}},)},
        {"image": {"color": "red"}},
    ],
    ids=lambda changed: str(*changed),
)
def test_a_question_with_another_text_or_answer_is_not_paired(changed: dict[str, Any]) -> None:
    now = run(arithmetic="--++++++")
    now.questions[0] = replace(now.questions[0], question=replace(now.questions[0].question, **changed))
    change = compare_with(now, stored(run(arithmetic="++++++++")))
    assert (change.lost, change.both) == (("arithmetic-2",), 7)


def test_a_question_with_another_budget_is_still_paired() -> None:
    now = run(arithmetic="--++++++")
    now.questions[0] = replace(now.questions[0], question=replace(now.questions[0].question, max_tokens=99))
    assert compare_with(now, stored(run(arithmetic="++++++++"))).both == 8


def test_checks_that_passed_before_are_named() -> None:
    before = stored(run({"stop": "passed", "usage": "failed", "loops": "not reached", "turns": "passed"}, sql="+"))
    now = run({"stop": "failed", "usage": "failed", "loops": "failed", "turns": "not reached"}, sql="+")
    change = compare_with(now, before)
    assert change.broken == ("stop",)
    assert change.sentence == "lost 0, gained 0 of 1 (p = 1); stop passed in the baseline"
    assert decide_change(change) == (["stop passed in the baseline and fails now"], [])


def test_a_baseline_of_another_kind_of_run_is_refused() -> None:
    with pytest.raises(MismatchError, match="the baseline r is not a run of fidelab eval"):
        answers_of(sample_report(run_id="r"))
    with pytest.raises(MismatchError, match="the baseline r is not a run of fidelab eval"):
        compare_with(run(sql="+"), sample_report(run_id="r"))


def test_a_baseline_without_a_common_question_is_refused() -> None:
    with pytest.raises(MismatchError, match="the baseline before has no answered question in common"):
        compare_with(run(sql="+", arithmetic="?"), stored(run(arithmetic="+")))


@pytest.mark.parametrize("facts", [{"questions": 7}, {"questions": {"sql-1": "right"}}, {}])
def test_damaged_facts_of_a_baseline_are_no_answers(facts: dict[str, Any]) -> None:
    before = stored(run(sql="+"))
    bench = before.reference.benches[EVAL].model_copy(update={"facts": facts})
    arm = before.reference.model_copy(update={"benches": {EVAL: bench}})
    with pytest.raises(MismatchError, match="no answered question in common"):
        compare_with(run(sql="+"), before.model_copy(update={"reference": arm}))


@pytest.mark.parametrize(
    ("lost", "gained", "faults", "undecided"),
    [(0, 3, 0, 0), (2, 2, 0, 0), (1, 0, 0, 1), (5, 0, 0, 1), (6, 0, 1, 0), (9, 1, 1, 0), (9, 2, 0, 1)],
)
def test_a_loss_is_a_fault_if_it_is_shown_and_else_open(lost: int, gained: int, faults: int, undecided: int) -> None:
    names = tuple(f"sql-{n}" for n in range(lost))
    found, open_ = decide_change(Change(names, names[:1] * gained, 84, ()))
    assert (len(found), len(open_)) == (faults, undecided)
    assert all(f"lost {lost} of 84, gained {gained}" in line for line in found + open_)


def test_at_most_eight_lost_questions_are_listed() -> None:
    [line], _ = decide_change(Change(tuple(f"sql-{n}" for n in range(20)), (), 84, ()))
    assert line.endswith("sql-6, sql-7, …")


# ------------------------------------------------------------------------------------ faults and open points


def exit_code(found: Evaluated) -> int:
    try:
        exit_on(list(faults_of(found)), list(open_of(found)))
    except typer.Exit as stop:
        return stop.exit_code
    return 0


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (run({"stop": "passed"}, sql="++++++"), 0),
        (run({"stop": "not tested"}, sql="000000"), 3),
        (run({"stop": "failed"}, sql="++++++"), 1),
        (run({"stop": "passed"}, sql="------"), 1),
        (run({"stop": "not reached"}, sql="++++++"), 3),
        (run({"stop": "passed"}, sql="+++++?"), 3),
        (run({"stop": "failed"}, sql="+++++?"), 1),
    ],
    ids=["passed", "nothing tested", "check failed", "kind failed", "check open", "kind open", "both"],
)
def test_the_exit_code_is_that_of_faults_before_open_points(found: Evaluated, code: int) -> None:
    assert exit_code(found) == code


def test_faults_and_open_points_are_sentences_with_their_counts() -> None:
    found = run({"stop": "failed", "usage": "not reached"}, sql="-----+", arithmetic="----??", json="+++++")
    assert list(faults_of(found)) == ["stop: stop was seen", "arithmetic: 0 of 4 right"]
    assert list(open_of(found)) == ["usage was seen: usage", "why: arithmetic (2 of 6)"]
    kept = measurement(found, SETTINGS)
    assert [*kept.fails, *kept.downgrades] == faults_of(found)


@pytest.mark.parametrize("right", range(9))
def test_a_kind_fails_where_its_interval_lies_below_half(right: int) -> None:
    found = run(arithmetic="+" * right + "-" * (8 - right))
    below = wilson(right, 8)[1] < 0.5
    assert list(faults_of(found)) == ([f"arithmetic: {right} of 8 right"] if below else [])


def test_wrong_calls_are_named_though_the_question_without_a_call_is_right() -> None:
    assert [one.check["call"] == "none" for one in of_kind("tools")] == [False] * 5 + [True]
    assert list(faults_of(run(tools="-----+"))) == ["tools: 0 of 5 calls right"]
    assert list(faults_of(run(tools="------"))) == ["tools: 0 of 6 right"]
    assert list(faults_of(run(tools="+----+"))) == []
    assert list(faults_of(run(tools="00000+"))) == []


@pytest.mark.parametrize(
    ("signs", "fault"),
    [
        ("++++++++++++", None),
        ("++++++------", "0 of 6 found in texts of about 8,192 tokens and more, 6 of 6 in shorter ones"),
        ("++++++++----", "0 of 4 found in texts of about 16,384 tokens and more, 8 of 8 in shorter ones"),
        ("+++++++++++-", None),
        ("++++++++++--", None),  # 0 of 2 may be chance
        ("+-+-+-+-+-+-", None),  # no loss with length
        ("+-+-----0000", None),  # shorter texts have losses, too
        ("++++++-+----", "0 of 4 found in texts of about 16,384 tokens and more, 7 of 8 in shorter ones"),
        ("++++----0000", "0 of 4 found in texts of about 4,096 tokens and more, 4 of 4 in shorter ones"),
    ],
)
def test_a_loss_with_the_length_of_the_text_is_named(signs: str, fault: str | None) -> None:
    assert list(faults_of(run(retrieval=signs))) == ([f"retrieval: {fault}"] if fault else [])


# ------------------------------------------------------------------------------------------------ time limit


def limited(kinds: Sequence[str], seconds: float, **about: Any) -> Evaluated:
    return evaluated(*kinds, settings={"time_limit": seconds, "parallel": 1}, **about)


def test_a_time_limit_keeps_the_questions_that_were_answered() -> None:
    found = limited(("arithmetic", "sql"), 3.0, delay=0.3)
    states = [one.state for one in found.questions]
    n = states.count("right")
    assert states == ["right"] * n + ["not reached"] * (14 - n)
    assert 0 < n < 14
    assert found.seconds < 14 * 0.3
    assert list(faults_of(found)) == []
    assert "within --time-limit" in list(open_of(found))[-1]


def test_a_time_limit_keeps_the_checks_that_were_reached() -> None:
    with serving(chat_server(delay=0.1)) as server:
        found = evaluate(EvalSettings(base_url=server.url, kinds=("serving",), time_limit=4.0))
    states = [check.state for check in found.checks]
    assert "passed" in states
    assert "not reached" in states
    assert "failed" not in states


def test_long_texts_that_the_time_does_not_allow_are_not_reached() -> None:
    found = limited(("retrieval",), 5.0, delay=0.4)
    reached = [one.question.context for one in found.questions if one.state == "right"]
    assert {1024, 2048} <= {*reached}
    assert 32768 not in reached
    assert exit_code(found) == 3


def test_a_server_that_ends_leaves_the_answers_before_it() -> None:
    with serving(chat_server()) as server:
        settings = EvalSettings(base_url=server.url, kinds=("arithmetic", "sql"), timeout=5.0)

        class Ending(Watch):
            def begin(self, name: str) -> None:
                if name == "sql":
                    server.key = "changed"  # from here on it refuses access

        found = evaluate(settings, watch=Ending())
    assert {one.state for one in found.of("arithmetic")} == {"right"}
    assert {one.state for one in found.of("sql")} == {"not reached"}
    assert found.notes[-1].startswith("the server is gone: ")
    assert exit_code(found) == 3
