"""A run against a baseline, for people: a table in the terminal, the worst first, or Markdown for a pull request.

Unchanged figures, and figures without a better side, are only counted. Nothing from reports is read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from rich.console import Console

from fidelab.report.cells import plain
from fidelab.report.markdown import code_cell, code_span, escaped, pipe_table
from fidelab.report.text import literal, print_line, simple_table
from fidelab.results.comparability import describe_difference
from fidelab.results.diff_record import ChangeOutcome, Diff, MetricChange, Refusal
from fidelab.results.numbers import ABSENT, MINUS, format_figure, format_kld, one_line, printable
from fidelab.results.table import BENCH

_MAX_VALUE_CHARS = 40  # of a value that differs: hashes and lists are long
_STYLES: dict[ChangeOutcome, str] = {
    "regressed": "bold red",
    "lost": "red",
    "cannot tell": "yellow",
    "improved": "green",
}
_COLUMNS = ("outcome", "configuration", "metric", "baseline", "now", "change")
_UNNAMED_UNITS = ("share", "points", "count", "p", "ratio", "")  # no unit need be named
_PLACES = {"candidate": "", "floor": " (floor)", "truth": " (truth)", "control": " (control)"}
_LEGEND = (
    "Change: with its 95% interval where there are repeats or items to take it from. Regressed and improved: the "
    "change is certainly larger than allowed; cannot tell: it may or may not be. Single values count beyond twice the "
    "allowance."
)


def render_diff(diff: Diff, console: Console) -> None:
    """Print the comparison."""
    line = partial(print_line, console)
    line(f"{one_line(diff.now.run_id)} against baseline {one_line(diff.baseline.run_id)}", "bold")
    for refusal in dict.fromkeys(map(_refusal, diff.refused)):
        line(f"not compared: {refusal}", "red")
    shown = _rows(diff)
    if shown:
        table = simple_table()
        table.add_column("outcome", no_wrap=True)
        table.add_column("metric", overflow="fold")
        for name in ("baseline\nnow", "change"):
            table.add_column(name, justify="right", no_wrap=True)
        for change in shown:
            outcome, arm, place, old, new, changed = _cells(change)
            table.add_row(
                literal(outcome, console, _STYLES.get(change.outcome, "")),
                literal(f"{arm}: {place}", console),
                *(literal(figure, console) for figure in (f"{old}\n{new}", changed.replace(" (", "\n(", 1))),
            )
        console.print(table)
    for text in _missing(diff):
        line(text)
    line(_summary(diff), "bold")
    for text in _asides(diff):
        line(text)


def render_diff_markdown(diff: Diff) -> str:
    """Return the comparison in GitHub-flavoured Markdown, without headings; ends in a newline."""
    rows = []
    for change in _rows(diff):
        outcome, arm, place, *figures = _cells(change)
        rows.append((escaped(outcome), code_cell(arm), code_cell(place), *map(escaped, figures)))
    parts = [
        f"{code_span(diff.now.run_id)} against baseline {code_span(diff.baseline.run_id)}: {escaped(_summary(diff))}",
        _bullets(f"not compared: {refusal}" for refusal in dict.fromkeys(map(_refusal, diff.refused))),
        pipe_table(_COLUMNS, 3, rows) if rows else "",
        _bullets(_missing(diff)),
        _bullets(_asides(diff)),
        _LEGEND if rows else "",
    ]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)


# --------------------------------------------------------------------------------------------------------- strings


def _rows(diff: Diff) -> list[MetricChange]:
    """The rows of the table: metrics of both sides that changed or may have."""
    return [change for change in diff.changes if change.counts and change.outcome not in ("lost", "new", "unchanged")]


def _cells(change: MetricChange) -> tuple[str, ...]:
    """One cell per column; the change is followed by its interval, and by the reason why it is not a better one."""
    unit = "" if change.unit in _UNNAMED_UNITS else f" ({change.unit})"
    flags = f" [{', '.join(change.flags)}]" if change.flags else ""
    why = f" ({change.doubt})" if change.doubt else ""
    ends = "" if change.ci is None else f" ({' to '.join(_signed(end, change) for end in change.ci)})"
    shown = ABSENT if change.change is None else _signed(change.change, change)
    place = ", ".join(part for part in (change.group.removeprefix(BENCH), change.cell, change.name) if part)
    return (
        change.outcome,
        _arm(change),
        one_line(f"{place}{unit}{flags}"),
        _value(change.baseline, change.unit),
        _value(change.now, change.unit),
        one_line(shown + ends + why),
    )


def _arm(change: MetricChange) -> str:
    return one_line(change.arm) + _PLACES.get(change.role, " (reference)")


def _value(value: float | None, unit: str) -> str:
    return format_kld(value) if unit == "p" else format_figure(value, unit)  # two small ones must not look the same


def _signed(value: float, change: MetricChange) -> str:
    sign = MINUS if value < 0 else "+" if value > 0 else ""
    if not change.relative:
        return sign + _value(abs(value), change.unit)
    percent = 100 * abs(value)
    return f"{sign}{percent:,.1f}%" if percent < 1000 else f"{sign}{percent:,.0f}%"


def _missing(diff: Diff) -> Iterator[str]:
    """Every metric that one side lacks; arms that lack the same metrics share a line."""
    common = {(change.role, change.arm) for change in diff.changes if change.basis}
    for outcome in ("lost", "new"):
        places: dict[tuple[str, str, str], list[str]] = {}
        for change in diff.changes:
            if change.outcome == outcome:
                group = change.group.removeprefix(BENCH) if (change.role, change.arm) in common else ""
                name = ", ".join(part for part in (change.cell, change.name) if part)
                places.setdefault((_arm(change), group, change.doubt), []).append(name)
        alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for (arm, group, doubt), names in places.items():
            alike.setdefault((group, doubt, tuple(names)), []).append(arm)
        for (group, doubt, metrics), arms in alike.items():
            what = f"{group}: {'; '.join(metrics)}" if group else f"all {len(metrics)} metrics"
            yield one_line(f"{outcome}: {', '.join(arms)}, {what}{f' [{doubt}]' if doubt else ''}")


def _summary(diff: Diff) -> str:
    counts = diff.counted()
    named: tuple[ChangeOutcome, ...] = ("regressed", "lost", "cannot tell", "improved", "new", "unchanged")
    parts = [f"{counts[outcome]} {outcome}" for outcome in named if counts[outcome]]
    text = (", ".join(parts) or "nothing to judge") + "."
    aside = sum(not change.counts and change.outcome == "cannot tell" for change in diff.changes)
    if aside:
        text += f" {aside} of which neither side is better differ{'s' if aside == 1 else ''}."
    return text


def _refusal(refusal: Refusal) -> str:
    groups = ", ".join(group.removeprefix(BENCH) for group in refusal.groups)
    count = f"{refusal.n_metrics} metric{'' if refusal.n_metrics == 1 else 's'}"
    return one_line(f"{groups} ({count}): {describe_difference(refusal.field, refusal.baseline, refusal.now)}")


def _asides(diff: Diff) -> Iterator[str]:
    for text in diff.unmeasured:
        yield one_line(f"measured on neither side: {text}")
    for other in diff.beside:
        yield one_line(f"differs: {other.where}, {other.field}: {_shorten(other.baseline)} → {_shorten(other.now)}")


def _shorten(value: object) -> str:
    text = "not recorded" if value is None else plain(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 1]}…"
