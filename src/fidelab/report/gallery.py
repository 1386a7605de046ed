"""All plots of a report, and the single positions that some of them need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fidelab.core import Estimator
from fidelab.errors import InputError
from fidelab.report import plots
from fidelab.report.bench_charts import bench_plots
from fidelab.report.plots import Plot
from fidelab.report.positions import ArmPositions, read_positions
from fidelab.report.sections import Section, sections_of
from fidelab.report.view import View, arm_id
from fidelab.results.numbers import one_line
from fidelab.results.record import ArmRecord, Report

__all__ = ["Gallery", "compared", "gallery_of"]

LEFT_OUT = "the tail of KL and the worst positions are left out"
REMEDY = f"{LEFT_OUT}; make them with: fidelab rescore RUN_DIR"


@dataclass(frozen=True)
class Gallery:
    """The plots by where they stand on the page; ``note``: why what single positions show is missing."""

    frontier: Plot | None
    kld: tuple[Plot, ...]
    survival: Plot | None
    sections: tuple[tuple[Section, tuple[Plot, ...]], ...]
    benches: Mapping[str, list[Plot]]
    measured: Mapping[str, ArmPositions]
    note: str

    def plots(self) -> Iterator[Plot]:
        """In reading order."""
        yield from _present(self.frontier)
        yield from (plot for found in self.benches.values() for plot in found)
        yield from (*self.kld, *_present(self.survival))
        yield from (plot for _, found in self.sections for plot in found)


def gallery_of(report: Report, view: View, positions: Path | None) -> Gallery:
    """``positions`` is the run's ``positions.parquet``; without it, or with a damaged one, there is less to see."""
    measured, note = _read(report, positions)
    names = {arm: record.name for arm, record in compared(report)}
    return Gallery(
        frontier=plots.frontier(report, view),
        kld=_present(plots.position(report), plots.confidence(report), plots.tail(report, measured, names)),
        survival=plots.survival(report),
        sections=tuple((section, _present(*map(plots.curves, section.curves))) for section in sections_of(report)),
        benches=bench_plots(report),
        measured=measured,
        note=note,
    )


def compared(report: Report) -> list[tuple[str, ArmRecord]]:
    """Ids and records of candidates and control."""
    arms = [(arm_id("candidate", number), arm) for number, arm in enumerate(report.candidates)]
    return [*arms, *([("control", report.control)] if report.control else [])]


def _read(report: Report, path: Path | None) -> tuple[dict[str, ArmPositions], str]:
    """Positions of the arms that have a KL, and why there are none."""
    found = {
        arm.name: kld
        for _, arm in compared(report)
        if (kld := arm.axes.kld) and kld.mean is not None and kld.estimator is not Estimator.TOPK
    }
    if not found:
        return {}, ""
    try:
        if path is None:
            raise InputError("no positions.parquet was given")
        expected = {name: kld.n_positions for name, kld in found.items()}
        return read_positions(path, expected, {name: kld.n_ctx for name, kld in found.items()}), ""
    except InputError as error:
        imported = "imported" in report.settings  # another tool's figures: there is nothing to score again
        return {}, f"{one_line(str(error))}: {LEFT_OUT if imported else REMEDY}"


def _present(*found: Plot | None) -> tuple[Plot, ...]:
    return tuple(plot for plot in found if plot is not None)
