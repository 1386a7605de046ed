"""Summaries next to the main table: the headline metrics of the other axes and of benches, and the attribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.report.cells import STATUS, Estimate, estimate_of, kld_of, kv_of, ratio_of, scored, shared, text_of
from fidelab.report.sections import ReportArm
from fidelab.report.tables import NAME, SPEEDS, TextTable, counts
from fidelab.results.depth import is_deep
from fidelab.results.measurement import DECIDING, DOMAIN, Coordinates, Measurement, Metric, label
from fidelab.results.numbers import (
    ABSENT,
    MIB,
    counted,
    format_figure,
    format_kld,
    format_nats,
    format_percent,
    format_span,
    heading,
    one_line,
)
from fidelab.results.rates import MEASURED
from fidelab.results.record import ArmRecord, Attribution, AttributionPart, Contrast, Report


@dataclass(frozen=True)
class Performance:
    """Speed and memory: the headline metrics of each bench, one row per arm, with ratios to the reference.

    ``note``: hint on reading the figures; ``measured``: the names of the benches, as words.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[Estimate, ...], ...]
    note: str
    measured: str
    in_table: bool = False
    """Nothing but decode rates that the main table has."""


def contexts_of(report: Report) -> TextTable | None:
    """Return arm × contexts with the mean KL (nats) at each; ``None`` if no arm was measured at several."""
    klds = {arm.name: arm.axes[DECIDING] for arm in _compared(report) if DECIDING in arm.axes}
    sizes = sorted({n for axis in klds.values() for n in _contexts(axis)})
    if len(sizes) < 2:
        return None
    rows = [
        (one_line(name), *(str(kld_of(axis, {"context": n})) for n in sizes))
        for name, axis in klds.items()
        if any("context" in metric.cell for metric in axis.metrics)
    ]
    what = "depth" if any(is_deep(axis) for axis in klds.values()) else "context"
    title = f"KLD by {what} (nats). The verdict is that of the worst {what}"
    texts = {n: next((text for axis in klds.values() if (text := _text_at(axis, n))), "") for n in sizes}
    heads = (f"{n:,} tokens{f', {texts[n]}' if texts[n] else ''}" for n in sizes)
    return TextTable("contexts", title, (NAME, *heads), tuple(rows))


def _contexts(kld: Measurement) -> set[int]:
    """Return the contexts at which the mean KL was measured by itself."""
    cells = (metric.cell for metric in kld.metrics if metric.key == "mean" and {*metric.cell} == {"context"})
    return {n for cell in cells if isinstance(n := cell.get("context"), int)}


_DISTRIBUTION = ("median", "p90", "p95", "p99", "p999", "max")


def distribution_of(report: Report) -> TextTable | None:
    """Return arm × median, percentiles and maximum of the KLD of a position (nats); ``None`` if none is recorded.

    With several contexts there is a row for each.
    """
    klds = {one_line(arm.name): arm.axes[DECIDING] for arm in _compared(report) if DECIDING in arm.axes}
    places: list[tuple[str, Measurement, Coordinates]] = []
    for name, kld in klds.items():
        sizes = sorted(n for n in _contexts(kld) if kld.metric("median", {"context": n}) is not None)
        places += [(name, kld, {"context": n}) for n in sizes] if len(sizes) > 1 else [(name, kld, {})]
    found = [(name, at, [kld.metric(key, at) for key in _DISTRIBUTION]) for name, kld, at in places]
    columns = list(zip(*(metrics for _, _, metrics in found), strict=True))
    names = [next((m.name for m in column if m is not None), "") for column in columns]
    kept = [n for n, name in enumerate(names) if name]
    several = any(at for _, at, _ in found)
    rows = [
        (
            name,
            *([f"{at['context']:,}" if at else "worst"] if several else []),
            *(estimate_of(metrics[n]).value for n in kept),
        )
        for name, at, metrics in found
        if any(metrics)
    ]
    if not rows:
        return None
    heads = (NAME, *(["context"] if several else []), *(one_line(names[n]) for n in kept))
    worst = ", at the worst context" if not several and any(len(_contexts(kld)) > 1 for kld in klds.values()) else ""
    return TextTable(
        "distribution", f"Distribution of KLD over positions (nats){worst}", heads, tuple(rows), 1 + several
    )


_CONCENTRATION = ("largest_document", "largest_positions", "unseen_documents", "breaking_document")


def concentration_of(report: Report) -> TextTable | None:
    """Return arm × how much its mean KLD rests on few documents and positions; ``None`` if that is not recorded.

    The title has the condition under which "confirmed" keeps its promise.
    """
    klds = {one_line(arm.name): arm.axes[DECIDING] for arm in _compared(report) if DECIDING in arm.axes}
    known = [key for key in _CONCENTRATION if any(kld.metric(key) for kld in klds.values())]
    if not known:
        return None
    names = [next(metric for kld in klds.values() if (metric := kld.metric(key))) for key in known]
    rows = [(name, *(estimate_of(kld.metric(key, {})).value for key in known)) for name, kld in klds.items()]
    title = (
        "What the mean KLD rests on. It holds for text that is like what was read. Unseen kinds: the rate of bad "
        "documents that could have been missed"
    )
    heads = (heading(metric.name, metric.unit) for metric in names)
    return TextTable("concentration", title, (NAME, *heads), tuple(rows))


def groups_of(report: Report, coordinate: str) -> TextTable | None:
    """Return kind of text (``domain``) or token (``structure``) × arm: mean KL, its interval, and flips.

    ``None`` if the text has no kinds. The last row names the kind on which an arm loses most.
    """
    klds = {one_line(arm.name): arm.axes[DECIDING] for arm in _compared(report) if DECIDING in arm.axes}
    cells = {
        name: {str(m.cell[coordinate]): m for m in axis.metrics if {*m.cell} == {coordinate} and m.key == "mean"}
        for name, axis in klds.items()
    }
    kinds = list(dict.fromkeys(kind for found in cells.values() for kind in found))
    if not kinds:
        return None
    rows = []
    for kind in kinds:
        at: Coordinates = {coordinate: kind}
        sizes = [axis.metric("positions", at) for axis in klds.values()]
        many = next((m.value for m in sizes if m is not None and m.value is not None), 0)
        row = [f"{one_line(kind)} ({many:,.0f})"]
        for axis in klds.values():  # ``0.0064 (0.0041–0.0093), 4.2%``
            same = axis.metric("top1", at)
            changed = f", {format_percent(1 - same.value)}" if same is not None and same.value is not None else ""
            row.append(f"{kld_of(axis, at)}{changed}")
        rows.append(tuple(row))
    title = _GROUPS[coordinate]
    if coordinate == "domain":
        worst = {name: max(found, key=lambda kind: found[kind].value or 0.0) for name, found in cells.items() if found}
        rows.append(("worst", *(one_line(worst.get(name, "")) for name in klds)))
    return TextTable(f"{coordinate}s", title, (f"{coordinate} (positions)", *klds), tuple(rows))


def kinds_by_depth_of(report: Report) -> TextTable | None:
    """Return arm and kind of text × depth: the mean KL (nats) with its interval; ``None`` without several depths."""
    klds = {one_line(arm.name): arm.axes[DECIDING] for arm in _compared(report) if DECIDING in arm.axes}
    cells = {
        (name, str(m.cell[DOMAIN])): axis
        for name, axis in klds.items()
        for m in axis.metrics
        if {*m.cell} == {"context", DOMAIN} and m.key == "mean"
    }
    sizes = sorted({n for axis in klds.values() for n in _contexts(axis)})
    rows = [
        (name, one_line(kind), *(str(kld_of(axis, {"context": n, DOMAIN: kind})) for n in sizes))
        for (name, kind), axis in cells.items()
    ]
    if not rows:
        return None
    heads = (f"{n:,} tokens" for n in sizes)
    return TextTable("kinds-by-depth", "KLD by kind of text and depth (nats)", (NAME, "kind", *heads), tuple(rows), 2)


_GROUPS = {
    "domain": "KLD (nats) and flips by kind of text. The verdict is that of all together",
    "structure": "KLD (nats) and flips where tokens carry structure",
}


def ways_of(report: Report) -> TextTable | None:
    """Return serving mode × arm: mean KL from the arm's own cold prefill, and the position of divergence."""
    found = [(one_line(arm.name), axis) for arm in _compared(report) for axis in arm.axes.values() if _ways(axis)]
    if not found:
        return None
    ways = list({label(at): at for _, axis in found for at in _ways(axis)}.values())
    twins = [next((m for _, axis in found if (m := axis.metric(_TWIN, at)) is not None), None) for at in ways]
    columns = {f"reference {one_line(report.reference.name)}": [str(estimate_of(twin).value) for twin in twins]}
    columns |= {name: [_at_way(axis, at) for at in ways] for name, axis in found}
    rows = tuple((one_line(str(at["way"])), *cells) for at, *cells in zip(ways, *columns.values(), strict=True))
    title = "KL between each serving path and a cold prefill of the same configuration (nats), and where it diverges"
    return TextTable("ways", title, ("way", *columns), rows)


def partings_of(report: Report) -> tuple[str, ...]:
    """Return a sentence per diverging serving mode: ``decoding parts from prefill at position 97, fp8_e4m3 only``."""
    owners: dict[tuple[str, str], list[str]] = {}
    for arm in _compared(report):
        flags = [flag for axis in arm.axes.values() for cell in axis.cells for flag in cell.flags]
        for flag in flags:
            owners.setdefault((flag.kind, one_line(flag.text)), []).append(one_line(arm.name))
    return tuple(
        f"{text}, {joined(names)} only" if kind == "parts" else text
        for (kind, text), names in owners.items()
        if kind in ("parts", "reference")
    )


_TWIN = "reference"


def _compared(report: Report) -> list[ArmRecord]:
    return [*report.candidates, *([report.control] if report.control else [])]


def _ways(axis: Measurement) -> list[Coordinates]:
    return [cell.at for cell in axis.cells if "way" in cell.at]


def _at_way(axis: Measurement, at: Coordinates) -> str:
    """``0.0064 from 97``, or the reason for a missing figure."""
    cell = axis.cell(at)
    if cell is None or not cell.measured:
        return ABSENT if cell is None else STATUS[cell.status]
    start = axis.metric("parts_at", at)
    from_ = "" if start is None or start.value is None else f" from {start.value:,.0f}"
    return f"{estimate_of(axis.metric('kl_from_cold', at)).value}{from_}"


def _text_at(kld: Measurement, n_ctx: int) -> str:
    """``8 windows, 6 documents`` of one context; empty where the record does not say."""
    listed = [kld.facts.get(name) for name in ("contexts", "undecided")]
    sizes = [size for sizes in listed if isinstance(sizes, list) for size in sizes]
    size = next((size for size in sizes if isinstance(size, dict) and size.get("n_ctx") == n_ctx), None)
    return "" if size is None else text_of(kld, size)


def other_tests_table(report: Report) -> TextTable | None:
    """Return the reference, then arm × headline metrics of each axis besides KLD that any arm was measured on.

    An axis gives its result in words, followed by its headline metric in parentheses.  ``None`` without such axes.  The
    last column is the composite, if all its axes were measured or its bands were requested.  Where nothing was
    compared, the reference's own figures are shown.
    """
    arms = _compared(report) or [report.reference]
    columns: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for arm in arms for name in arm.axes if name != DECIDING):
        axes = [arm.axes.get(name) for arm in arms]
        known = [axis for axis in axes if axis is not None and axis.measured]
        base = next((axis.reference_summary for axis in known if axis.reference_summary), "")
        nobody: list[Metric | None] = [None] * len(arms)
        for n, (head, cells) in enumerate(_headlines(name, axes) or [(one_line(name), nobody)] if known else ()):
            brief = zip(axes, cells, strict=True)
            base_axis = next((axis for axis in known if axis.n_clusters and axis.cluster), None) if n == 0 else None
            over = "" if base_axis is None else f", {counted(base_axis.n_clusters or 0, one_line(base_axis.cluster))}"
            own = [_brief(axis, cell, first=n == 0) for axis, cell in brief]
            columns[f"{head}{over}"] = [(one_line(base) if n == 0 else "") or ABSENT, *own]
    if not columns:
        return None
    composites = [arm.composite for arm in report.candidates if arm.composite is not None]
    chosen = report.settings.get("bands", "fidelab") != "fidelab"
    if bool(composites) and (chosen or any(composite.band is not None for composite in composites)):
        columns["composite"] = [
            ABSENT,
            *(ABSENT if arm.composite is None else str(scored(arm.composite.value, arm.composite.ci)) for arm in arms),
        ]
    names = [f"reference {one_line(report.reference.name)}", *(one_line(arm.name) for arm in arms)]
    rows = list(zip(names, *columns.values(), strict=True))
    kept = tuple(row for row in rows if any(cell != ABSENT for cell in row[1:]))
    return TextTable("others", "Other tests (score, 95% CI)", (NAME, *columns), kept)


def remarks_of(report: Report) -> tuple[str, ...]:
    """Return the remarks of the axes on each arm, a sentence each, such as those about speculation."""
    arms = (*([report.control] if report.control else []), *report.candidates)
    flags = ((arm, flag) for arm in arms for axis in arm.axes.values() for flag in axis.flags)
    return tuple(shared((one_line(arm.name), one_line(flag.text)) for arm, flag in flags))


def engine_remarks_of(report: Report) -> tuple[str, ...]:
    """Return remarks of engines on how their arms ran, a sentence each, after the remark on a borrowed reference."""
    arms = (report.reference, *([report.control] if report.control else []), *report.controls, *report.candidates)
    remarks = ((arm, text) for arm in arms if arm.ran for text in arm.ran.remarks)
    borrowed = []
    if (found := report.borrowed) is not None:
        weights = f", weights {one_line(found.weights)}" if found.weights else ""
        machines = "difference between machines unknown"
        if found.difference is not None:
            machines = f"verdicts allow for {format_nats(found.difference.mean)} between machines"
        origin = f"{one_line(found.place)} ({one_line(found.machine)}{weights})"
        borrowed = [f"reference borrowed from {origin}, {machines}"]
    return (*borrowed, *shared((one_line(arm.name), one_line(text)) for arm, text in remarks))


def describe_other_tests(arm: ArmRecord) -> tuple[str, ...]:
    """Return a sentence per measured axis besides KLD: ``rniah: lost 9 of 36 (reference: finds 36 of 45)``."""
    lines = []
    for name, axis in arm.axes.items():
        if name != DECIDING and axis.measured:
            base = f" (reference: {one_line(axis.reference_summary)})" if axis.reference_summary else ""
            headline = next((metric for metric in axis.headlines if _is_counted(axis, metric)), None)
            said = f"{one_line(axis.summary)}{base}" if axis.summary else _brief(axis, headline, first=True)
            lines.append(f"{one_line(name)}: {said}")
    return tuple(lines)


def _brief(axis: Measurement | None, metric: Metric | None, *, first: bool) -> str:
    """The axis' words and the metric, or the metric alone; without both the first column shows the axis' status."""
    if axis is not None and axis.measured and axis.summary and first:
        estimate = estimate_of(metric)
        margin = ", ".join(part for part in (estimate.value, estimate.margin) if part != ABSENT)
        return str(Estimate(one_line(axis.summary), margin or ABSENT))
    if metric is not None or axis is None:
        return str(estimate_of(metric))
    return STATUS[axis.status] if first else ABSENT


def _headlines(name: str, measurements: Sequence[Measurement | None]) -> list[tuple[str, list[Metric | None]]]:
    """(heading, the metric of all arms) of each headline metric, by the first arm that has any.

    The heading names the coordinates that vary.
    """
    known = [measurement for measurement in measurements if measurement is not None and measurement.measured]
    shapes = [at for measurement in known for at in measurement.shapes()]
    leading = next(
        (
            heads
            for measurement in known
            if (heads := [m for m in measurement.headlines if _is_counted(measurement, m)])
        ),
        [],
    )
    columns = []
    for metric in leading:
        alike = [at for at in shapes if tuple(at) == tuple(metric.cell)]
        varied = {key: value for key, value in metric.cell.items() if any(at[key] != value for at in alike)}
        cells = [
            measurement.metric(metric.key, metric.cell) if measurement is not None else None
            for measurement in measurements
        ]
        shown = [
            m if m and measurement and _is_counted(measurement, m) else None
            for m, measurement in zip(cells, measurements, strict=True)
        ]
        at = f", {one_line(label(varied))}" if varied else ""
        mib = any(m is not None and _in_mib(m) for m in shown)
        columns.append((heading(titled(name, metric), metric.unit, mib=mib) + at, shown))
    return columns


def _is_counted(measurement: Measurement, metric: Metric) -> bool:
    return metric.value is not None and counts(measurement, metric.cell)


def _in_mib(metric: Metric) -> bool:
    return metric.unit == "bytes" and (metric.value or 0) >= MIB


def titled(name: str, metric: Metric) -> str:
    """Return a metric's title. A score has the name of its axis."""
    return one_line(name if metric.key == "score" else f"{name}: {metric.name}")


def performance_of(arms: Sequence[tuple[ReportArm, ArmRecord]]) -> Performance | None:
    """Return the headline metrics of the benches, arm by arm; ``None`` if no bench was run."""
    names = list(dict.fromkeys(name for _, record in arms for name in record.benches))
    if not names:
        return None
    columns: dict[str, list[Estimate]] = {}
    repeated, notes = False, []
    for name in names:
        for head, metrics in _headlines(name, [record.benches.get(name) for _, record in arms]):
            mib = any(metric is not None and _in_mib(metric) for metric in metrics)
            columns[head] = [
                Estimate()
                if metric is None
                else Estimate(
                    format_figure(metric.value, metric.unit, mib=mib),
                    ratio_of(metric, metrics[0] if n else None) if metric.unit in SPEEDS else ABSENT,
                )
                for n, metric in enumerate(metrics)
            ]
            known = [metric for metric in metrics if metric is not None]
            repeated |= any(metric.repeats for metric in known)
            about = one_line(known[0].about).rstrip(".")
            notes += [f"{titled(name, known[0])}: {about}."] if about else []
    if repeated:
        notes.append("Medians of the repeats.")
    if len(arms) > 1 and columns:
        notes.append("× : over the reference's; ≈ : the repeats overlap.")
    return Performance(
        columns=tuple(columns),
        names=tuple(arm.name for arm, _ in arms),
        rows=tuple(tuple(cells[n] for cells in columns.values()) for n, _ in enumerate(arms)),
        note=" ".join(notes),
        measured=joined([one_line(name) for name in names]),
        in_table=all(found.facts.get(MEASURED) for _, record in arms for found in record.benches.values()),
    )


def bench_headlines(arms: Sequence[tuple[ReportArm, ArmRecord]]) -> tuple[str, ...]:
    """Return a sentence per bench: its own summary, or its first headline metric of every arm.

    A metric has the ratio to the reference's: ``decode: rate at depth 512: bf16 40.1 tok/s; int8 41.2 tok/s (1.03×,
    better)``.
    """
    sentences = []
    for name in dict.fromkeys(name for _, record in arms for name in record.benches):
        summaries = [(arm.name, record.benches[name].summary) for arm, record in arms if name in record.benches]
        if any(summary for _, summary in summaries):
            named = [(f"{arm}: " if len(arms) > 1 else "", summary) for arm, summary in summaries if summary]
            sentences.append("; ".join(f"{name}{one_line(summary)}" for name, summary in named))
            continue
        columns = _headlines(name, [record.benches.get(name) for _, record in arms])
        if not columns:
            if any(name in record.benches and record.benches[name].measured for _, record in arms):
                sentences.append(f"{one_line(name)}: no valid figure; the notes of its table say why")
            continue
        _, metrics = columns[0]
        first = next(metric for metric in metrics if metric is not None)
        at = f" at {one_line(label(first.cell))}" if first.cell else ""
        mib = any(metric is not None and _in_mib(metric) for metric in metrics)
        unit = "MiB" if mib else "" if first.unit == "count" else first.unit
        figures = [
            f"{arm.name} {format_figure(metric.value, metric.unit, mib=mib)} {unit}".rstrip()
            + _against(metric, metrics[0] if n else None)
            for n, ((arm, _), metric) in enumerate(zip(arms, metrics, strict=True))
            if metric is not None
        ]
        sentences.append(f"{titled(name, first)}{at}: {'; '.join(figures)}")
    return tuple(sentences)


def _against(own: Metric, base: Metric | None) -> str:
    """`` (1.03×, better)``: a ratio to the reference's and what it means; empty where there is none."""
    ratio = ratio_of(own, base) if own.unit in SPEEDS else ABSENT
    if ratio == ABSENT or base is None or own.value is None or base.value is None:
        return ""
    if ratio.startswith("≈") or own.value == base.value or own.better is None:
        word = "no difference shown" if ratio.startswith("≈") else ""
    else:
        word = "better" if (own.value > base.value) == (own.better == "higher") else "worse"
    return f" ({', '.join(part for part in (ratio, word) if part)})"


def joined(words: Sequence[str]) -> str:
    """Join words as ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ------------------------------------------------------------------------------------ format loss and kernel loss

_PARTS = (
    NAME,
    "format and kernel",
    "kernel alone",
    "format alone",
    "16-bit queries",
    "both − kernel",
    "both − format",
    "format − kernel",
    "both − 16-bit queries",
)


def attribution_of(report: Report) -> TextTable | None:
    """Return candidate × (mean KLs, their paired differences), nats, as far as measured; ``None`` if nothing was."""
    if not report.attribution:
        return None
    rows = [_attribution_lines(split) for split in report.attribution]
    kept = [0, *(n for n in range(1, len(_PARTS)) if any(row[n] != ABSENT for row in rows))]
    if len(kept) < 3:
        return None  # the arm's own KLD alone, which the main table has
    return TextTable(
        "attribution",
        "Format loss and kernel loss (mean KL, nats). KL is not additive, so the parts need not sum up",
        tuple(_PARTS[n] for n in kept),
        tuple(tuple(row[n] for n in kept) for row in rows),
    )


def truth_line(report: Report) -> str:
    """Return the mean KL of the reference's cache from its 32-bit twin; empty if the run has no such twin."""
    truth = report.truth
    if truth is None:
        return ""
    cost = kld_of(truth.deciding)
    twin = f"32-bit twin of the reference ({kv_of(truth)})"
    if cost.absent:
        return f"{twin}: not measured ({one_line(truth.reason or 'no KLD')})"
    return f"{twin}: {cost} nats away"


def _attribution_lines(split: Attribution) -> tuple[str, ...]:
    parts = split.here, split.kernel, split.format, split.native_queries
    contrasts = (
        split.here_minus_kernel,
        split.here_minus_format,
        split.format_minus_kernel,
        split.here_minus_native_queries,
    )
    return (
        one_line(split.candidate),
        *(_nats(part) for part in parts),
        *(_nats(contrast, signed=True) for contrast in contrasts),
    )


def _nats(part: AttributionPart | Contrast | None, *, signed: bool = False) -> str:
    if part is None or part.mean is None:
        return ABSENT
    return str(Estimate(format_kld(part.mean, signed=signed), format_span(part.ci)))
