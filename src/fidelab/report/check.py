"""The decision on a run, for people and for pipelines: text of 80 columns, Markdown for a pull request, JUnit XML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from rich.console import Console

from fidelab.report.diff import render_diff, render_diff_markdown
from fidelab.report.markdown import code_block, code_cell, code_span, escaped, pipe_table
from fidelab.report.text import literal, print_line, simple_table
from fidelab.results.check import Check, Decision, RuleResult, Tier
from fidelab.results.diff_record import ChangeOutcome
from fidelab.results.numbers import format_figure, format_interval, one_line, printable
from fidelab.results.record import Report

_STYLES: dict[Decision, str] = {"GO": "bold green", "NO-GO": "bold red", "INCONCLUSIVE": "yellow"}
_BASELINE: dict[ChangeOutcome, Decision] = {"regressed": "NO-GO", "cannot tell": "INCONCLUSIVE", "lost": "INCONCLUSIVE"}
_COLUMNS = ("decision", "configuration", "metric", "value", "95% interval", "limit")


def render_check(found: Check, console: Console) -> None:
    """Print the decision."""
    print_line(console, f"{found.decision}: {one_line(found.run_id)}", _STYLES[found.decision])
    if found.results:
        table = simple_table()
        table.add_column("decision", no_wrap=True)
        table.add_column("metric", overflow="fold")
        for name in ("value", "limit"):
            table.add_column(name, justify="right", no_wrap=True)
        for result in found.results:
            decision, arm, metric, value, interval, limit = _cells(result)
            reason = f"\n{one_line(result.reason)}" if result.reason else ""
            table.add_row(
                literal(decision.replace(" (", "\n(", 1), console, _STYLES[result.decision]),
                literal(f"{arm}: {metric}{reason}", console),
                literal(f"{value}\n{interval}" if result.ci else value, console),
                literal(limit, console),
            )
        console.print(table)
    if found.baseline is not None and found.baseline_decision is not None:
        print_line(console, f"{found.baseline_decision}: {_why(found)}", _STYLES[found.baseline_decision])
        render_diff(found.baseline, console)


def render_check_markdown(found: Check, command: str = "") -> str:
    """Return the decision in GitHub-flavoured Markdown, a comment for a pull request; ends in a newline.

    ``command``: command line that decides again; empty: none is shown.
    """
    parts = [f"**{found.decision}**: {code_span(found.run_id)}"]
    if found.results:
        rows = []
        for result in found.results:
            decision, arm, metric, *figures = _cells(result)
            rows.append((escaped(decision), code_cell(arm), code_cell(metric), *map(escaped, figures)))
        parts.append(pipe_table(_COLUMNS, 3, rows))
        reasons = [result for result in found.results if result.reason]
        parts.append(
            "\n".join(f"- {code_span(f'{r.arm}: {r.metric}')}: {escaped(one_line(r.reason))}" for r in reasons)
        )
    if found.baseline is not None:
        parts += [
            f"**{found.baseline_decision}**: {escaped(_why(found))}",
            render_diff_markdown(found.baseline).strip(),
        ]
    if command:
        parts += ["To repeat:", code_block(command)]
    return printable("\n\n".join(part for part in parts if part) + "\n")


class _Case(NamedTuple):
    """A test case: what it is about, its decision, and the line that explains it."""

    arm: str
    place: str
    decision: Decision
    tier: Tier
    line: str


def render_junit(found: Check, report: Report, command: str) -> str:
    """Return JUnit XML: a test case per rule and configuration, and one per metric that is compared with the baseline.

    NO-GO is a failure and INCONCLUSIVE an error, if they count. Otherwise the test is skipped.  The time of a case is
    that of its configuration's process, in seconds: model load and answers.  It is left out where the report has none.
    The time of a suite counts each configuration once.  Elements, attributes and their order are those of the schema
    that Jenkins' xUnit plugin publishes (``junit-10.xsd``).

    Args:
        report: the report that was decided.
        command: command line that decides it again.
    """
    arms = (report.reference, *report.candidates)
    seconds = {arm.name: arm.timing.seconds for arm in arms if arm.timing and arm.timing.seconds is not None}
    commands = {"measured by": report.command, "decided by": command}
    suites = ElementTree.Element("testsuites", name="fidelab check")
    rules = []
    for result in found.results:
        _, _, _, value, interval, limit = _cells(result)
        line = "; ".join(filter(None, (f"{value} ({interval}), {limit}" if limit else "", result.reason)))
        rules.append(_Case(result.arm, _place(result), result.decision, result.tier, line))
    _suite(suites, "rules", rules, found, commands, seconds)
    if found.baseline is not None:
        strict = not found.baseline.thresholds.allow_missing
        changes = [
            _Case(
                change.arm,
                f"{change.group}.{change.metric} {change.cell}".strip(),
                _BASELINE.get(change.outcome, "GO"),
                "critical",
                change.outcome,
            )
            for change in found.baseline.changes
            if change.counts and change.outcome != "new" and (change.outcome != "lost" or strict)
        ]
        _suite(suites, "baseline", changes, found, commands, seconds)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(
    suites: ElementTree.Element,
    name: str,
    cases: Iterable[_Case],
    found: Check,
    commands: Mapping[str, str],
    seconds: Mapping[str, float],
) -> None:
    suite = ElementTree.SubElement(suites, "testsuite", name=name)
    suite.set("timestamp", found.created.strftime("%Y-%m-%dT%H:%M:%S"))
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in {"run": found.run_id, "decision": found.decision, **commands}.items():
        ElementTree.SubElement(properties, "property", name=key, value=_attribute(value))
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    tags = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    timed = {}
    for case in cases:
        title = _attribute(f"{case.arm}: {case.place}")
        element = ElementTree.SubElement(suite, "testcase", classname=f"fidelab.{name}", name=title)
        if case.arm in seconds:
            timed[case.arm] = seconds[case.arm]
            element.set("time", f"{seconds[case.arm]:.3f}")
        counts["tests"] += 1
        if case.decision != "GO":
            counted = case.tier == "critical" or (case.tier == "supporting" and case.decision == "NO-GO")
            tag = "skipped" if not counted else "failure" if case.decision == "NO-GO" else "error"
            counts[tags[tag]] += 1
            message = _attribute(f"{case.decision}: {case.line}")
            ElementTree.SubElement(element, tag, type=case.decision, message=message)
        lines = "\n".join(f"{key}: {one_line(value)}" for key, value in commands.items() if value)
        ElementTree.SubElement(element, "system-out").text = printable(lines)
    for key, count in counts.items():
        suite.set(key, str(count))
    if timed:
        suite.set("time", f"{sum(timed.values()):.3f}")


def _attribute(text: str) -> str:
    return printable(one_line(text))


def _cells(result: RuleResult) -> tuple[str, ...]:
    """One cell per column."""
    tier = "" if result.tier == "critical" else f" ({result.tier})"
    limits = (("min", result.min), ("max", result.max))
    return (
        f"{result.decision}{tier}",
        one_line(result.arm),
        one_line(_place(result)),
        format_figure(result.value, result.unit),
        format_interval(result.ci, result.unit),
        ", ".join(f"{name} {_format_limit(limit, result.unit)}" for name, limit in limits if limit is not None),
    )


def _format_limit(limit: float, unit: str) -> str:
    return f"{100 * limit:g}%" if unit == "share" else f"{limit:,.6g}"


def breach_line(result: RuleResult) -> str:
    """Return a result in one line: ``q8_0 kld.mean 0.0865 > 0.01``; with limits and reason where nothing is shown."""
    _, arm, metric, value, interval, limits = _cells(result)
    if result.decision == "NO-GO" and result.ci is not None:
        over = result.max is not None and result.ci[0] > result.max
        sign, limit = (">", result.max) if over else ("<", result.min)
        assert limit is not None  # an interval beyond a limit is beyond one that was set
        return f"{arm} {metric} {value} {sign} {_format_limit(limit, result.unit)}"
    figure = f"{value} ({interval}), {limits}" if result.value is not None else limits
    return f"{arm} {metric} {figure}{f': {one_line(result.reason)}' if result.reason else ''}"


def baseline_line(found: Check) -> str:
    """Return the reasons for the decision on the baseline, in one line."""
    assert found.baseline is not None
    return f"against {one_line(found.baseline.baseline.run_id)}: {_why(found)}"


def rule_line(result: RuleResult) -> str:
    """Return a result in one line: metric, value, interval, limit, and the reason where it is inconclusive."""
    _, _, metric, value, interval, limit = _cells(result)
    return "; ".join(filter(None, (f"{metric} is {value} ({interval}), limit {limit}", one_line(result.reason))))


def _place(result: RuleResult) -> str:
    return f"{result.metric} {result.cell}".strip()


def _why(found: Check) -> str:
    return "; ".join(found.reasons) or "nothing is worse than allowed"
