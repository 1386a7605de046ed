"""The decision on a run, for people and for pipelines: text of 80 columns, Markdown for a pull request, JUnit XML."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from rich.console import Console

from fidelab.report.diff import render_diff, render_diff_markdown
from fidelab.report.markdown import code_cell, code_span, escaped, pipe_table
from fidelab.report.text import literal, print_line, simple_table
from fidelab.results.check import Check, Decision, RuleResult, Tier
from fidelab.results.diff_record import ChangeOutcome
from fidelab.results.numbers import format_figure, format_interval, one_line, printable

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


def render_check_markdown(found: Check) -> str:
    """Return the decision in GitHub-flavoured Markdown, a comment for a pull request; ends in a newline."""
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
    return printable("\n\n".join(part for part in parts if part) + "\n")


def render_junit(found: Check) -> str:
    """Return JUnit XML: a test case per rule and configuration, and one per metric that is compared with the baseline.

    NO-GO is a failure and INCONCLUSIVE an error, if they count. Otherwise the test is skipped.
    """
    suites = ElementTree.Element("testsuites", name="fidelab check")
    rules = []
    for r in found.results:
        _, _, _, value, interval, limit = _cells(r)
        line = "; ".join(filter(None, (f"{value} ({interval}), {limit}" if limit else "", r.reason)))
        rules.append((f"{r.arm}: {_place(r)}", r.decision, r.tier, line))
    _suite(suites, "rules", iter(rules))
    if found.baseline is not None:
        strict = not found.baseline.thresholds.allow_missing
        _suite(
            suites,
            "baseline",
            (
                (
                    f"{change.arm}: {change.group}.{change.metric} {change.cell}".strip(),
                    decision,
                    "critical",
                    change.outcome,
                )
                for change in found.baseline.changes
                if change.counts and change.outcome != "new"
                for decision in [_BASELINE.get(change.outcome, "GO")]
                if change.outcome != "lost" or strict
            ),
        )
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(suites: ElementTree.Element, name: str, cases: Iterator[tuple[str, Decision, Tier, str]]) -> None:
    suite = ElementTree.SubElement(suites, "testsuite", name=name)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    tags = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    for case, decision, tier, text in cases:
        element = ElementTree.SubElement(suite, "testcase", classname=f"fidelab.{name}", name=printable(one_line(case)))
        counts["tests"] += 1
        if decision == "GO":
            continue
        counted = tier == "critical" or (tier == "supporting" and decision == "NO-GO")
        tag = "skipped" if not counted else "failure" if decision == "NO-GO" else "error"
        counts[tags[tag]] += 1
        ElementTree.SubElement(element, tag, message=printable(one_line(f"{decision}: {text}")))
    for key, count in counts.items():
        suite.set(key, str(count))


def _cells(result: RuleResult) -> tuple[str, ...]:
    """One cell per column."""
    tier = "" if result.tier == "critical" else f" ({result.tier})"
    limits = (("min", result.min), ("max", result.max))
    share = result.unit == "share"
    return (
        f"{result.decision}{tier}",
        one_line(result.arm),
        one_line(_place(result)),
        format_figure(result.value, result.unit),
        format_interval(result.ci, result.unit),
        ", ".join(
            f"{name} {f'{100 * limit:g}%' if share else f'{limit:,.6g}'}" for name, limit in limits if limit is not None
        ),
    )


def rule_line(result: RuleResult) -> str:
    """Return a result in one line: metric, value, interval, limit, and the reason where it is inconclusive."""
    _, _, metric, value, interval, limit = _cells(result)
    return "; ".join(filter(None, (f"{metric} is {value} ({interval}), limit {limit}", one_line(result.reason))))


def _place(result: RuleResult) -> str:
    return f"{result.metric} {result.cell}".strip()


def _why(found: Check) -> str:
    return "; ".join(found.reasons) or "nothing is worse than allowed"
