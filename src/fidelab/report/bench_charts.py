"""The plots of benches: which lines they show.  What is not valid is drawn hollow, and no line runs through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fidelab.core import Status
from fidelab.report.bars import Stack, draw_bars
from fidelab.report.bench_tables import labels_of
from fidelab.report.charts import Line, Size, draw_lines, line_style
from fidelab.report.labels import shorten
from fidelab.report.plots import MOST_LABELS, NARROW, WIDE, Plot
from fidelab.report.scales import Axis
from fidelab.report.serving import counts
from fidelab.report.view import arm_id
from fidelab.results.bench_record import MemoryPoint, SpeedCell
from fidelab.results.bench_values import Flag
from fidelab.results.numbers import MIB, format_tokens, one_line
from fidelab.results.record import ArmRecord, Report
from fidelab.results.serving_record import LoadCell

__all__ = ["bench_plots"]

FULL = Size(1120, 430, labels=False)
GROUPS = 6
"""Dash patterns: contexts or batch sizes that can be told apart within an arm's colour."""
LOG_FROM = 10**1.5
"""Ratio of largest to smallest from which an axis is logarithmic."""
DOUBTFUL = frozenset({"depth", "not-engaged", "inconsistent", "cache"})
"""Flags that say of an offline figure that it is one of something else."""
HOLLOW = "Hollow: not valid, see the table."


@dataclass(frozen=True, eq=False)
class _Arm:
    name: str
    id: str
    style: str
    record: ArmRecord


@dataclass(frozen=True)
class _Point:
    """``doubt``: why the point does not count."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    tag: str = ""
    doubt: str = ""


@dataclass(frozen=True)
class _Series:
    """One arm's points at one batch size, or context: ``group``, which is named ``label``."""

    arm: _Arm
    group: int
    label: str
    points: tuple[_Point, ...]


Cells = Sequence[tuple[_Arm, Sequence[LoadCell]]]


def bench_plots(report: Report) -> dict[str, list[Plot]]:
    """Bench → its plots, where there is something to draw."""
    given = [("reference", report.reference), *(("candidate", record) for record in report.candidates)]
    first, *names = labels_of(given)
    arms = [_Arm(first, "reference", "reference", report.reference)]
    arms += [
        _Arm(name, arm_id("candidate", n), line_style("candidate", n), record)
        for n, (name, record) in enumerate(zip(names, report.candidates, strict=True))
    ]
    if report.control is not None:
        arms.append(_Arm(f"control {one_line(report.control.name)}", "control", "control d0", report.control))
    found = {
        "startup": [_startup(arms)],
        "prefill": [_prefill(arms)],
        "decode": [_decode(arms)],
        "memory": [_cache(arms), _peak(arms)],
        "serving": list(_serving(arms)),
    }
    drawn = {name: [plot for plot in plots if plot is not None] for name, plots in found.items()}
    return {name: plots for name, plots in drawn.items() if plots}


# ------------------------------------------------------------------------------------------------ offline benches


def _prefill(arms: Sequence[_Arm]) -> Plot | None:
    found = [(arm, arm.record.benches.prefill.cells if arm.record.benches.prefill else ()) for arm in arms]
    series = [part for arm, cells in found for part in _speeds(arm, cells)]
    caption = "Median of the repeats; shaded from the slowest to the fastest."
    return _against_tokens("prefill", "Prefill against prompt length", caption, series, "prompt, tokens", "tok/s")


def _decode(arms: Sequence[_Arm]) -> Plot | None:
    found = [(arm, arm.record.benches.decode.cells if arm.record.benches.decode else ()) for arm in arms]
    series = [part for arm, cells in found for part in _speeds(arm, cells)]
    caption = (
        "Isolated: time between the first and the last token. Median of the repeats, shaded from slowest to fastest."
    )
    return _against_tokens("decode", "Decode against depth", caption, series, "tokens in the cache", "tok/s")


def _speeds(arm: _Arm, cells: Sequence[SpeedCell]) -> Iterator[_Series]:
    for batch in sorted({cell.batch for cell in cells}):
        points = tuple(
            _Point(cell.tokens, cell.rate.median, cell.rate.low, cell.rate.high, doubt=_doubt(cell))
            for cell in cells
            if cell.batch == batch and cell.rate
        )
        yield _Series(arm, batch, f"batch {batch}", points)


def _doubt(cell: SpeedCell) -> str:
    if cell.status is not Status.OK:
        return one_line(cell.reason or cell.status.value)
    return _texts(flag for flag in cell.flags if flag.kind in DOUBTFUL)


def _texts(flags: Iterator[Flag]) -> str:
    return "; ".join(one_line(flag.text) for flag in flags)


def _cache(arms: Sequence[_Arm]) -> Plot | None:
    series = list(_sizes(arms, lambda point: point.kv_bytes))
    return _sized("cache", "KV cache against context", "Measured bytes per token, times tokens.", series)


def _peak(arms: Sequence[_Arm]) -> Plot | None:
    points = [point for arm in arms if arm.record.benches.memory for point in arm.record.benches.memory.points]
    device = bool(points) and all(point.peak_device_bytes is not None for point in points)
    series = list(_sizes(arms, lambda point: point.peak_device_bytes if device else point.peak_host_bytes))
    where = "device memory" if device else "memory of the worker's processes"
    return _sized("memory", "Peak memory against context", f"Most {where} up to each length.", series)


def _sizes(arms: Sequence[_Arm], size: Callable[[MemoryPoint], float | None]) -> Iterator[_Series]:
    for arm in arms:
        points = arm.record.benches.memory.points if arm.record.benches.memory else ()
        for batch in sorted({point.batch for point in points}):
            found = [(point.tokens, size(point)) for point in points if point.batch == batch]
            yield _Series(arm, batch, f"batch {batch}", tuple(_Point(n, y / MIB) for n, y in found if y is not None))


def _sized(key: str, title: str, caption: str, series: Sequence[_Series]) -> Plot | None:
    return _against_tokens(key, title, caption, series, "tokens in the cache, per sequence", "MiB")


def _against_tokens(
    key: str, title: str, caption: str, series: Sequence[_Series], x_label: str, y_label: str
) -> Plot | None:
    x = _axis(x_label, [point.x for part in series for point in part.points], lambda value: format_tokens(int(value)))
    return _lines(key, title, caption, series, x, Axis(y_label, low=0.0))


def _startup(arms: Sequence[_Arm]) -> Plot | None:
    splits = [
        (arm, kind, split)
        for arm in arms
        if (found := arm.record.benches.startup)
        for kind, split in (("cold", found.cold), ("warm", found.warm))
        if split is not None
    ]
    if not splits:
        return None
    parts = list(dict.fromkeys(one_line(part) for _, _, split in splits for part in split.parts))
    stacks = [
        Stack(
            f"{shorten(arm.name, 30)}, {kind}",
            arm.id,
            [(one_line(part), spread.median) for part, spread in split.parts.items()],
            split.total.median,
        )
        for arm, kind, split in splits
    ]
    wide, narrow = (draw_bars(stacks, parts, "seconds", size.width) for size in (WIDE, NARROW))
    legend = tuple((part, "", f"s{n} d0 part") for n, part in enumerate(parts))
    caption = (
        "From the process' start to the first token, medians of the parts. Cold: the weight files were not in the page "
        "cache. The figure is the median of the whole, which the parts' medians need not sum up to."
    )
    return Plot("startup", "Where the start-up time goes", caption, (wide, narrow), legend)


# -------------------------------------------------------------------------------------------------------- serving


def _serving(arms: Sequence[_Arm]) -> Iterator[Plot | None]:
    """Closed loop against concurrency, open loop against the request rate, and output against latency."""
    cells = [(arm, arm.record.benches.serving.cells if arm.record.benches.serving else ()) for arm in arms]
    closed = [(arm, [c for c in found if c.concurrency is not None and c.request_rate is None]) for arm, found in cells]
    opened = [(arm, [c for c in found if c.request_rate is not None]) for arm, found in cells]
    at_once = _against_load("", closed, "concurrency", "requests at once", lambda cell: cell.concurrency)
    per_second = _against_load(
        "-rate", opened, "request rate", "requests asked per second", lambda cell: cell.request_rate
    )
    yield from (*at_once[:2], *per_second[:2], _latency(cells), at_once[2], per_second[2])


def _against_load(
    suffix: str, cells: Cells, against: str, label: str, load: Callable[[LoadCell], float | None]
) -> list[Plot | None]:
    """Output rate, time per output token, time to the first token."""
    plots = []
    for key, title, y_label, value in (
        ("throughput", "Throughput", "output tok/s", _output_rate),
        ("tpot", "Time per output token", "TPOT p50, ms", _tpot),
        ("ttft", "Time to the first token", "TTFT p50, ms", _ttft),
    ):
        series = list(_loads(cells, load, value))
        x = _axis(label, [point.x for part in series for point in part.points], lambda number: f"{number:g}")
        plots.append(_lines(f"{key}{suffix}", f"{title} against {against}", "", series, x, Axis(y_label, low=0.0)))
    return plots


def _latency(cells: Cells) -> Plot | None:
    """What more throughput costs: time per output token, or to the first one where no answer had two."""
    name, latency = ("TPOT", _tpot)
    if all(_tpot(cell) is None for _, found in cells for cell in found):
        name, latency = ("TTFT", _ttft)
    series = list(_loads(cells, latency, _output_rate, tagged=True))
    values = [point.x for part in series for point in part.points if point.x > 0]
    log = bool(values) and max(values) / min(values) >= LOG_FROM
    return _lines(
        "latency-throughput",
        "Throughput against latency",
        "A point per load, named by its requests at once (or per second). Further up is more throughput, further left "
        "less waiting.",
        series,
        Axis(f"{name} p50, ms", log=log, low=None if log else 0.0),
        Axis("output tok/s", low=0.0),
        FULL,
    )


def _output_rate(cell: LoadCell) -> float | None:
    return cell.output_rate


def _tpot(cell: LoadCell) -> float | None:
    return cell.tpot.percentiles.get("p50") if cell.tpot else None


def _ttft(cell: LoadCell) -> float | None:
    return cell.ttft.percentiles.get("p50") if cell.ttft else None


def _loads(
    arms: Cells,
    x: Callable[[LoadCell], float | None],
    y: Callable[[LoadCell], float | None],
    tagged: bool = False,
) -> Iterator[_Series]:
    shapes = sorted({_shape(cell) for _, cells in arms for cell in cells})
    outputs = len({output for _, output in shapes}) > 1
    for arm, cells in arms:
        for number, (context, output) in enumerate(shapes):
            points = []
            for cell in cells:
                at, value = x(cell), y(cell)
                if _shape(cell) == (context, output) and at is not None and value is not None:
                    doubt = "" if counts(cell) else _texts(iter(cell.flags)) or one_line(cell.reason or "not valid")
                    points.append(_Point(at, value, tag=_tag(cell) if tagged else "", doubt=doubt))
            label = "mixed" if context < 0 else f"{format_tokens(context)} in"
            yield _Series(arm, number, f"{label}, {output} out" if outputs else label, tuple(points))


def _shape(cell: LoadCell) -> tuple[int, int]:
    """(context, output); −1 of a mixture."""
    return (-1 if cell.context is None else cell.context, -1 if cell.output is None else cell.output)


def _tag(cell: LoadCell) -> str:
    load = cell.concurrency if cell.request_rate is None else cell.request_rate
    return "" if load is None else f"{load:g}"


# ---------------------------------------------------------------------------------------------------------- lines


def _axis(label: str, values: Sequence[float], name: Callable[[float], str]) -> Axis:
    """Ticks at the measured values; logarithmic where they are far apart, 0 then at the low end."""
    at = tuple((value, name(value)) for value in sorted(set(values)))
    above = [value for value in values if value > 0]
    if above and max(above) / min(above) >= LOG_FROM:
        return Axis(label, log=True, low=min(above) / 4 if len(above) < len(values) else None, at=at)
    return Axis(label, low=0.0, high=1.04 * max(above, default=1.0), at=at)


def _lines(
    key: str, title: str, caption: str, series: Sequence[_Series], x: Axis, y: Axis, size: Size = WIDE
) -> Plot | None:
    """Colour by arm and dashes by group; of a single arm, colour by group."""
    series = [part for part in series if part.points]
    if len({point.x for part in series for point in part.points}) < 2:
        return None  # the table says it better
    arms = list(dict.fromkeys(part.arm for part in series))
    groups = list(dict.fromkeys((part.group, part.label) for part in sorted(series, key=lambda part: part.group)))
    lines = []
    for part in series:
        number = groups.index((part.group, part.label))
        if len(groups) == 1:
            name, style = part.arm.name, part.arm.style if len(arms) > 1 else "s0 d0"
        elif len(arms) == 1:
            name, style = part.label, line_style("candidate", number)
        else:
            name = f"{shorten(part.arm.name, 11)} {part.label}"
            style = f"{part.arm.style.split(' ')[0]} d{number % GROUPS}"
        lines.append(_line(part, name, style))
    wide = Size(size.width, size.height, labels=size.labels and len(lines) <= MOST_LABELS)
    bare = lines if len(lines) <= MOST_LABELS else [replace(line, tags=()) for line in lines]
    drawn = draw_lines(lines, x, y, wide), draw_lines(bare, x, y, NARROW)
    if len(arms) > 1 < len(groups):
        legend = [(arm.name, arm.id, f"{arm.style.split(' ')[0]} d0") for arm in arms]
        legend += [(label, "", f"plain d{n % GROUPS}") for n, (_, label) in enumerate(groups)]
    else:
        legend = [(line.name, line.arm, line.style) for line in lines]
    note = HOLLOW if any(line.hollow for line in lines) else ""
    return Plot(key, title, f"{caption} {note}".strip(), drawn, tuple(legend))


def _line(part: _Series, name: str, style: str) -> Line:
    valid = sorted((point for point in part.points if not point.doubt), key=lambda point: point.x)
    spread = any(point.low is not None for point in valid)
    return Line(
        name=name,
        arm=part.arm.id,
        style=style,
        x=[point.x for point in valid],
        y=[point.y for point in valid],
        low=[point.low for point in valid] if spread else (),
        high=[point.high for point in valid] if spread else (),
        tags=[point.tag for point in valid],
        hollow=[(point.x, point.y, f"{name}: {point.doubt}") for point in part.points if point.doubt],
    )
