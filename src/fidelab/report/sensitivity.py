"""Sensitivities as terminal text and as HTML pages: what costs most, cliffs, the plan, and a heat map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from fidelab.report.heatmap import scale_of, shades_of
from fidelab.report.html import templates
from fidelab.report.text import literal, print_line, print_path, simple_table
from fidelab.results.numbers import ABSENT, counted, format_kld, format_share, format_span, one_line
from fidelab.results.plots import Grid, Heatmap
from fidelab.results.record import write_atomically
from fidelab.results.sensitivity_record import (
    KVCell,
    KVPlan,
    KVSensitivityReport,
    Loss,
    SensitivityCell,
    SensitivityReport,
    WeightPlan,
    sample_words,
)

__all__ = [
    "render_kv_sensitivity",
    "render_sensitivity",
    "write_kv_sensitivity_html",
    "write_sensitivity_html",
]

_SHOWN = 15  # cells in the terminal
_COLUMNS = ("group", "format", "loss, nats", "95%", "same top-1", "KiB")


def render_sensitivity(report: SensitivityReport, console: Console, *, folder: Path | None = None) -> None:
    """Print the costliest cells and the plan; ``folder`` is where its files lie."""
    line = partial(print_line, console)
    line(f"{one_line(report.run_id)}: each {report.by} by itself, {sample_words(report)}", "bold")
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
            kicker="weight sensitivity",
            run_id=one_line(report.run_id),
            created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
            version=one_line(report.fidelab_version),
            command=report.command,
            lines=[sample_words(report), *_sentences(report)],
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


def _placed(formats: Mapping[str, str]) -> Iterator[str]:
    """Which groups get which format, a sentence each: ``int8: down_proj of layers 0–3, 7; q_proj of layer 2.``"""
    found: dict[str, dict[str, list[int]]] = {}
    for group, name in formats.items():
        parts = group.split(".")
        layers = [int(part) for part in parts if part.isdecimal()]
        kind = "" if parts[-1].isdecimal() else parts[-1]
        found.setdefault(name, {}).setdefault(one_line(kind), []).extend(layers)
    for name, kinds in found.items():
        words = (f"{kind}{' of ' if kind and layers else ''}{_layer_words(layers)}" for kind, layers in kinds.items())
        yield f"{one_line(name)}: {'; '.join(words)}."


def _layer_words(layers: Sequence[int]) -> str:
    """``layers 0–3, 7``; empty for none."""
    spans: list[list[int]] = []
    for layer in sorted(set(layers)):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    said = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in spans)
    return f"layer{'s' if len(set(layers)) > 1 else ''} {said}" if spans else ""


def _plan_sentences(plan: WeightPlan, by: str) -> list[str]:
    counts: dict[str, int] = {}
    for name in plan.formats.values():
        counts[name] = counts.get(name, 0) + 1
    kinds = ", ".join(f"{n} × {name}" for name, n in counts.items())
    found = plan.measured
    span = "" if found.kld_interval is None else f" ({format_span(found.kld_interval)})"
    sentences = [
        f"Plan of {plan.bytes / 2**20:.1f} MiB ({plan.bits_per_weight:.3f} bits per weight): {kinds}.",
        *_placed(plan.formats),
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


# ------------------------------------------------------------------------------------------- keys and values

_SIDE = {"k": "keys", "v": "values", "both": "both"}
_KV_COLUMNS = ("what", "format", "ΔNLL, nats", "95%", "KLD, nats", "95%", "same top-1")


def render_kv_sensitivity(report: KVSensitivityReport, console: Console, *, folder: Path | None = None) -> None:
    """Print cliffs, ratios and the cells of the whole cache; ``folder`` is where its files lie."""
    line = partial(print_line, console)
    line(f"{one_line(report.run_id)}: {sample_words(report)}", "bold")
    for text in _kv_sentences(report):
        line(text)
    table = simple_table()
    for n, heading in enumerate(_KV_COLUMNS):
        table.add_column(literal(heading, console), justify="right" if n > 1 else "left")
    whole = [cell for cell in report.cells if cell.place == "all"]
    for cell in whole:
        table.add_row(*(literal(text, console) for text in _kv_row(cell)))
    console.print(table)
    if len(whole) < len(report.cells):
        line(f"{len(report.cells) - len(whole)} cells of single layers or heads are in the files")
    if folder is not None:
        print_path(console, "files", folder)


def write_kv_sensitivity_html(report: KVSensitivityReport, path: Path) -> Path:
    """Write the page atomically: sentences, heat map of layers or of the whole cache, all cells; nothing is fetched.

    Raises:
        OutputError: the file cannot be written.
    """
    page = (
        templates()
        .get_template("sensitivity.html.j2")
        .render(
            title=f"Sensitivity of keys and values of {one_line(str(report.settings.get('model', '')))}",
            kicker="sensitivity of keys and values",
            run_id=one_line(report.run_id),
            created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
            version=one_line(report.fidelab_version),
            command=report.command,
            lines=[sample_words(report), *_kv_sentences(report)],
            heatmap=_kv_heatmap(report),
            scale_of=scale_of,
            shades_of=shades_of,
            columns=_KV_COLUMNS,
            rows=[_kv_row(cell) for cell in report.cells],
            plan=None,
        )
    )
    return write_atomically(path, page)


def _kv_row(cell: KVCell) -> list[str]:
    what = _SIDE[cell.side] if cell.place == "all" else f"{_SIDE[cell.side]}, {_place(cell.place)}"
    loss = cell.loss
    if loss is None:
        return [what, cell.format, one_line(cell.reason or ABSENT), "", "", "", ""]
    return [
        what,
        cell.format,
        ABSENT if loss.delta_nll is None else format_kld(loss.delta_nll, signed=True),
        ABSENT if cell.delta_nll_interval is None else format_span(cell.delta_nll_interval),
        format_kld(loss.kld),
        ABSENT if loss.kld_interval is None else format_span(loss.kld_interval),
        ABSENT if loss.top1 is None else format_share(loss.top1),
    ]


def _place(place: str) -> str:
    layer, _, head = place.partition(".")
    return f"layer {layer}, head {head}" if head else f"layer {layer}"


def _kv_sentences(report: KVSensitivityReport) -> list[str]:
    sentences = []
    if report.cliffs:
        parts = []
        for cliff in report.cliffs:
            span = "" if cliff.interval is None else f" (95%: {_bits(cliff.interval[0])} to {_bits(cliff.interval[1])})"
            parts.append(f"{_SIDE[cliff.side]} {_bits(cliff.bits or 0)}{span}")
        sentences.append(f"Cliff, where one more bit costs 0.1 nats per token or more: {'; '.join(parts)}.")
    parts = []
    for found in report.asymmetries:
        if found.ratio is None:
            parts.append(f"{found.bits} bits: the values' loss is within noise")
        else:
            span = "" if found.interval is None else f" ({found.interval[0]:.3g}–{found.interval[1]:.3g})"
            parts.append(f"{found.bits} bits: {found.ratio:.3g}{span}")
    if parts:
        sentences.append(f"ΔPPL of keys over that of values at {'; '.join(parts)}.")
    for known in report.predictors:
        if known.correlation is not None:
            span = "" if known.interval is None else f" ({known.interval[0]:.2f} to {known.interval[1]:.2f})"
            sentences.append(
                f"{known.name} in one window orders the losses of {_SIDE[known.side]} at {known.bits} bits by a rank "
                f"correlation of {known.correlation:.2f}{span} over {counted(known.places, 'place')}."
            )
    if report.plan is not None:
        sentences += _kv_plan_sentences(report.plan)
    if failed := sum(cell.loss is None for cell in report.cells):
        sentences.append(f"{failed} of {len(report.cells)} cells failed.")
    return sentences


def _bits(bits: int) -> str:
    return f"{bits} bits" if bits else "none"


def _kv_plan_sentences(plan: KVPlan) -> list[str]:
    sentences = [
        f"Plan of {plan.bits_per_value:.2f} bits per value: {plan.rules.replace(';', ', ')}.",
        f"It costs {_cost(plan.measured)} on windows that it was not chosen on. On the others its cells add up to "
        f"{format_kld(plan.predicted)}, and together they cost {format_kld(plan.measured_there.kld)}.",
    ]
    if plan.uniform is None or plan.uniform_loss is None or plan.difference is None or plan.uniform_bits is None:
        return [*sentences, "No single pair of formats fits this budget, so that there is nothing to compare it with."]
    interval = plan.difference_interval
    if interval is None or interval[0] <= 0 <= interval[1]:
        verdict = "the data do not tell them apart"
    else:
        verdict = "the plan is better" if interval[1] < 0 else "the plan is worse"
    said = "" if interval is None else f", 95% {format_span(interval)}"
    sentences.append(
        f"{plan.uniform} in all layers takes {plan.uniform_bits:.2f} bits and costs {_cost(plan.uniform_loss)}, the "
        f"least of the single pairs that fit: {verdict} ({format_kld(plan.difference, signed=True)} nats{said})."
    )
    return sentences


def _cost(loss: Loss) -> str:
    span = "" if loss.kld_interval is None else f" ({format_span(loss.kld_interval)})"
    return f"{format_kld(loss.kld)} nats{span}"


def _kv_heatmap(report: KVSensitivityReport) -> Heatmap | None:
    """Layer or head × width, a grid for keys and one for values; without these the side × width of the whole cache."""
    cells = [cell for cell in report.cells if cell.bits is not None and cell.loss is not None]
    single = [cell for cell in cells if cell.place != "all"]
    widths = sorted({cell.bits for cell in cells if cell.bits is not None}, reverse=True)
    if not cells:
        return None
    shown = single or cells
    known = {(cell.side, cell.place, cell.bits): cell.loss.kld for cell in shown if cell.loss is not None}
    places = list(dict.fromkeys(cell.place for cell in shown))
    grids = tuple(
        Grid(
            name=_SIDE[side],
            values=tuple(tuple(known.get((side, place, width)) for width in widths) for place in places),
        )
        for side in dict.fromkeys(cell.side for cell in shown)
    )
    return Heatmap(
        title="mean KL, nats: " + ("each layer or head by itself" if single else "all layers"),
        x_label="bits",
        y_label="layer" if single else "layers",
        x=tuple(map(str, widths)),
        y=tuple(places),
        low=0.0,
        high=max(known.values()) or 1.0,
        grids=grids,
    )
