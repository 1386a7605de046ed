"""Summaries beside the main table: what stands for each other axis and for each bench, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.report.cells import STATUS, Estimate, estimate_of, kld_of, ratio_of, scored
from fidelab.report.sections import Arm
from fidelab.report.tables import SPEEDS, Table, counts
from fidelab.results.measurement import Measurement, Metric, label
from fidelab.results.numbers import ABSENT, MIB, format_figure, heading, one_line
from fidelab.results.record import ArmRecord, Report

__all__ = ["KLD", "Performance", "contexts_of", "joined", "others_of", "performance_of", "titled"]

KLD = "kld"
"""The axis of the main table, the frontier and the verdict."""


@dataclass(frozen=True)
class Performance:
    """Speed and memory: what stands for each bench, a row of figures per arm, each with its ratio to the reference's.

    ``note``: how to read the figures; ``measured``: which benches, in words.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[Estimate, ...], ...]
    note: str
    measured: str


def contexts_of(report: Report) -> Table | None:
    """Arm × contexts: mean KL (nats) at each; ``None`` where nothing was measured at several."""
    arms = [*report.candidates, *([report.control] if report.control else [])]
    found = {arm.name: arm.axes[KLD] for arm in arms if KLD in arm.axes}
    means = [metric for axis in found.values() for metric in axis.metrics if metric.name == "mean"]
    sizes = sorted({n for metric in means if isinstance(n := metric.cell.get("context"), int)})
    if len(sizes) < 2:
        return None
    rows = [
        (one_line(name), *(str(kld_of(axis, {"context": n})) for n in sizes))
        for name, axis in found.items()
        if any(metric.cell for metric in axis.metrics)
    ]
    title = "KLD by context (nats); the verdict and all other figures are those of an arm's worst context"
    return Table("contexts", title, ("arm", *(f"{n:,} tokens" for n in sizes)), tuple(rows))


def others_of(report: Report) -> Table | None:
    """Arm × what stands for each axis besides KLD; ``None`` without such axes.

    The composite closes the row where all its axes were measured, or where its bands were asked for.
    """
    arms = [*report.candidates, *([report.control] if report.control else [])]
    columns: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for arm in arms for name in arm.axes if name != KLD):
        found = [arm.axes.get(name) for arm in arms]
        nobody: list[Metric | None] = [None] * len(arms)
        for n, (head, cells) in enumerate(_headlines(name, found) or [(one_line(name), nobody)]):
            brief = zip(found, cells, strict=True)
            columns[head] = [_brief(axis, cell, first=n == 0) for axis, cell in brief]
    if not columns:
        return None
    if _shows_composite(report):
        columns["composite"] = [
            ABSENT if arm.composite is None else str(scored(arm.composite.value, arm.composite.ci)) for arm in arms
        ]
    rows = zip((one_line(arm.name) for arm in arms), *columns.values(), strict=True)
    return Table("others", "Other axes", ("arm", *columns), tuple(rows))


def _brief(found: Measurement | None, metric: Metric | None, *, first: bool) -> str:
    """The metric; where there is none, in the first column how the axis ended."""
    if metric is not None or found is None:
        return str(estimate_of(metric))
    return STATUS[found.status] if first else ABSENT


def _shows_composite(report: Report) -> bool:
    """It has a band where all its axes were measured; a band table that is not the default was asked for."""
    found = [arm.composite for arm in report.candidates if arm.composite is not None]
    asked = report.settings.get("bands", "fidelab") != "fidelab"
    return bool(found) and (asked or any(composite.band is not None for composite in found))


def _headlines(name: str, found: Sequence[Measurement | None]) -> list[tuple[str, list[Metric | None]]]:
    """What stands for an axis or a bench by the first arm that has it: heading, and the same metric of all arms.

    A coordinate that is the same wherever anything was measured is not told.
    """
    known = [one for one in found if one is not None and one.measured]
    shapes = [at for one in known for at in one.shapes()]
    leading = next((heads for one in known if (heads := [m for m in one.headlines if _shown(one, m)])), [])
    columns = []
    for metric in leading:
        alike = [at for at in shapes if tuple(at) == tuple(metric.cell)]
        told = {key: value for key, value in metric.cell.items() if any(at[key] != value for at in alike)}
        cells = [one.metric(metric.name, metric.cell) if one is not None else None for one in found]
        shown = [m if m and one and _shown(one, m) else None for m, one in zip(cells, found, strict=True)]
        at = f", {one_line(label(told))}" if told else ""
        mib = any(m is not None and _in_mib(m) for m in shown)
        columns.append((heading(titled(name, metric), metric.unit, mib=mib) + at, shown))
    return columns


def _shown(found: Measurement, metric: Metric) -> bool:
    return metric.value is not None and counts(found, metric.cell)


def _in_mib(metric: Metric) -> bool:
    return metric.unit == "bytes" and (metric.value or 0) >= MIB


def titled(name: str, metric: Metric) -> str:
    """A score has the name of its axis."""
    return one_line(name if metric.name == "score" else f"{name}: {metric.name}")


def performance_of(arms: Sequence[tuple[Arm, ArmRecord]]) -> Performance | None:
    """What stands for the benches, arm by arm; ``None`` where none was run."""
    names = list(dict.fromkeys(name for _, record in arms for name in record.benches))
    if not names:
        return None
    columns: dict[str, list[Estimate]] = {}
    repeated, notes = False, []
    for name in names:
        for head, metrics in _headlines(name, [record.benches.get(name) for _, record in arms]):
            mib = any(metric is not None and _in_mib(metric) for metric in metrics)
            columns[head] = [_beside(metric, metrics[0] if n else None, mib) for n, metric in enumerate(metrics)]
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
    )


def _beside(metric: Metric | None, base: Metric | None, mib: bool) -> Estimate:
    """A value, and its ratio to the reference's."""
    if metric is None:
        return Estimate()
    value = format_figure(metric.value, metric.unit, mib=mib)
    return Estimate(value, ratio_of(metric, base) if metric.unit in SPEEDS else ABSENT)


def joined(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
