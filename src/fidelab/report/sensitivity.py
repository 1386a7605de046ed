"""A weight sensitivity as terminal text and as an HTML page: what costs most, the plan, and a heat map."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from fidelab.report.heatmap import scale_of, shades_of
from fidelab.report.html import templates
from fidelab.report.text import literal, print_line, print_path, simple_table
from fidelab.results.numbers import ABSENT, format_kld, format_share, format_span, one_line
from fidelab.results.plots import Grid, Heatmap
from fidelab.results.record import write_atomically
from fidelab.results.sensitivity_record import SensitivityCell, SensitivityReport, WeightPlan

__all__ = ["render_sensitivity", "write_sensitivity_html"]

_SHOWN = 15  # cells in the terminal
_COLUMNS = ("group", "format", "loss, nats", "95%", "same top-1", "KiB")


def render_sensitivity(report: SensitivityReport, console: Console, *, folder: Path | None = None) -> None:
    """Print the costliest cells and the plan; ``folder`` is where its files lie."""
    line = partial(print_line, console)
    line(
        f"{one_line(report.run_id)}: each {report.by} by itself, {report.windows} windows, {report.rows:,} rows", "bold"
    )
    for text in _sentences(report):
        line(text)
    table = simple_table()
    for n, heading in enumerate(_COLUMNS):
        table.add_column(literal(heading, console), justify="right" if n > 1 else "left")
    cells = _ordered(report)
    for cell in cells[:_SHOWN]:
        table.add_row(*(literal(text, console) for text in _row(cell)))
    console.print(table)
    if len(cells) > _SHOWN:
        line(f"the costliest {_SHOWN} of {len(cells)} cells; all are in the files")
    if folder is not None:
        print_path(console, "files", folder)


def write_sensitivity_html(report: SensitivityReport, path: Path) -> Path:
    """Write the page atomically: the sentences, the heat map and the table of all cells; nothing is fetched.

    Raises:
        OutputError: the file cannot be written.
    """
    page = (
        templates()
        .get_template("sensitivity.html.j2")
        .render(
            title=f"Weight sensitivity of {one_line(str(report.settings.get('model', '')))}",
            run_id=one_line(report.run_id),
            created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
            version=one_line(report.fidelab_version),
            command=report.command,
            lines=_sentences(report),
            heatmap=_heatmap(report),
            scale_of=scale_of,
            shades_of=shades_of,
            columns=_COLUMNS,
            rows=[_row(cell) for cell in _ordered(report)],
            plan=report.plan,
        )
    )
    return write_atomically(path, page)


def _ordered(report: SensitivityReport) -> list[SensitivityCell]:
    """Costliest first; those that failed before all."""
    return sorted(report.cells, key=lambda cell: -(cell.loss.kld if cell.loss else float("inf")))


def _row(cell: SensitivityCell) -> list[str]:
    if cell.loss is None:
        return [cell.group, cell.format, one_line(cell.reason or ABSENT), "", "", ""]
    loss = cell.loss
    share = ABSENT if loss.top1 is None else format_share(loss.top1)
    return [
        cell.group,
        cell.format,
        format_kld(loss.kld),
        ABSENT if loss.kld_interval is None else format_span(loss.kld_interval),
        share,
        f"{cell.bytes / 1024:,.0f}",
    ]


def _sentences(report: SensitivityReport) -> list[str]:
    measured = [cell for cell in report.cells if cell.loss is not None]
    sentences = []
    by_format: dict[str, float] = {}
    for cell in measured:
        assert cell.loss is not None
        by_format[cell.format] = by_format.get(cell.format, 0.0) + cell.loss.kld
    if by_format:
        sums = ", ".join(f"{name} {format_kld(total)}" for name, total in by_format.items())
        sentences.append(f"Losses of all {report.by}s added up, in nats: {sums}.")
    if failed := len(report.cells) - len(measured):
        sentences.append(f"{failed} of {len(report.cells)} cells failed.")
    if report.plan is not None:
        sentences += _plan_sentences(report.plan, report.by)
    return sentences


def _plan_sentences(plan: WeightPlan, by: str) -> list[str]:
    counts: dict[str, int] = {}
    for name in plan.formats.values():
        counts[name] = counts.get(name, 0) + 1
    kinds = ", ".join(f"{n} × {name}" for name, n in counts.items())
    found = plan.measured
    span = "" if found.kld_interval is None else f" ({format_span(found.kld_interval)})"
    sentences = [
        f"Plan of {plan.bytes / 2**20:.1f} MiB ({plan.bits_per_weight:.3f} bits per weight): {kinds}.",
        f"It costs {format_kld(found.kld)} nats{span} on windows that it was not chosen on. On the others its "
        f"cells add up to {format_kld(plan.predicted)}, and together they cost {format_kld(plan.measured_there.kld)}.",
    ]
    if plan.uniform is None or plan.uniform_loss is None or plan.difference is None:
        sentences.append("No single format fits this budget everywhere, so that there is nothing to compare it with.")
        return sentences
    if set(plan.formats.values()) == {plan.uniform}:
        sentences.append(
            f"That is {plan.uniform} everywhere: no mixture of these formats promises less in this budget."
            f"{'' if by == 'module' else ' Smaller groups (--by module) differ more.'}"
        )
        return sentences
    interval = plan.difference_interval
    said = "" if interval is None else f", 95% {format_span(interval)}"
    if interval is None or interval[0] <= 0 <= interval[1]:
        verdict = "the data do not tell them apart"
    else:
        verdict = "the plan is better" if interval[1] < 0 else "the plan is worse"
    assert plan.uniform_bytes is not None
    less = plan.bytes - plan.uniform_bytes
    size = (
        "the same bytes" if not less else f"{abs(less) / 1024:,.0f} KiB {'less' if less > 0 else 'more'} than the plan"
    )
    sentences.append(
        f"{plan.uniform} everywhere takes {size} and costs {format_kld(plan.uniform_loss.kld)}, "
        f"the least of the single formats that fit: {verdict} ({format_kld(plan.difference, signed=True)} nats{said})."
    )
    return sentences


def _heatmap(report: SensitivityReport) -> Heatmap | None:
    """Layer × kind, a grid per format; of whole layers or kinds one column or row."""
    known = {(cell.group, cell.format): cell.loss.kld for cell in report.cells if cell.loss is not None}
    if not known:
        return None
    places: dict[tuple[str, str], str] = {}
    for cell in report.cells:
        y = "all" if cell.layer is None else str(cell.layer)
        places[y, cell.kind or "all"] = cell.group
    rows, columns = (list(dict.fromkeys(place[n] for place in places)) for n in (0, 1))
    grids = tuple(
        Grid(
            name=name,
            values=tuple(tuple(known.get((places.get((y, x), ""), name)) for x in columns) for y in rows),
        )
        for name in dict.fromkeys(cell.format for cell in report.cells)
    )
    return Heatmap(
        title="mean KL of each group by itself, nats",
        x_label="kind of weight",
        y_label="layer",
        x=tuple(columns),
        y=tuple(rows),
        low=0.0,
        high=max(known.values()) or 1.0,
        grids=grids,
    )
