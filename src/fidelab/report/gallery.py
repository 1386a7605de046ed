"""All plots of a report, and the single positions that some of them need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fidelab.core import slug
from fidelab.core.errors import InputError, MissingPackageError
from fidelab.report.plots import Drawing, draw_plots, frontier, noise, tail
from fidelab.report.positions import ArmPositions, read_positions
from fidelab.report.sections import ReportArm, Section, arms_of
from fidelab.report.tables import TextTable, free
from fidelab.report.view import View
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import ABSENT, format_kld, format_share, one_line
from fidelab.results.plots import Places
from fidelab.results.record import Report

OMITTED_NOTE = "the tail of KL and the worst positions are left out"
REMEDY = f"{OMITTED_NOTE}; where the run's folder is kept, fidelab report --rescore RUN_DIR makes them"


@dataclass(frozen=True)
class Part:
    """One axis or bench on the page, with its charts.

    ``noise``: remark on control and floor, if a chart has their bands.  ``worst``: the worst positions by arm;
    ``missing``: reason why these are missing.
    """

    anchor: str
    section: Section
    plots: tuple[Drawing, ...]
    noise: str = ""
    worst: tuple[tuple[str, TextTable], ...] = ()
    missing: str = ""

    @property
    def places(self) -> tuple[tuple[str, Places], ...]:
        """The worst places with their text by configuration: candidates first."""
        shown = sorted(self.section.shown, key=lambda shown: shown.arm.role != "candidate")
        return tuple((shown.arm.name, plot) for shown in shown for plot in shown.places if plot.places)


@dataclass(frozen=True)
class Gallery:
    """Plots by their place on the page."""

    frontier: Drawing | None
    parts: tuple[Part, ...]


def gallery_of(report: Report, view: View, positions: Path | None) -> Gallery:
    """Build the gallery. Without a readable ``positions`` (``positions.parquet`` of the run) it has fewer plots."""
    parts: dict[str, Part] = {}
    for section in sorted(view.sections, key=lambda section: section.kind != "bench"):
        anchor = free(f"{section.kind}-{slug(section.name)}", parts)
        plots = draw_plots(section, report)
        worst: tuple[tuple[str, TextTable], ...] = ()
        missing = ""
        if (section.kind, section.name) == ("axis", DECIDING):
            arms, measured, missing = _read(report, positions)
            plots = (*plots, *([drawn] if (drawn := tail(arms, measured)) else []))
            worst = tuple((arm.name, _worst(measured[arm.id])) for arm in arms if measured[arm.id].worst)
        shaded = any(curve.kl for group in section.curves for _, curve in group.lines)
        parts[anchor] = Part(anchor, section, plots, noise(report) if shaded else "", worst, missing)
    return Gallery(frontier(report, view), tuple(parts.values()))


def _read(report: Report, path: Path | None) -> tuple[list[ReportArm], dict[str, ArmPositions], str]:
    """Arms that have a mean KL, their positions by arm id, and the reason where these could not be read."""
    klds = {
        arm: (record.name, kld)
        for arm, record in arms_of(report)
        if (arm.role == "candidate" or record is report.control)
        and (kld := record.deciding)
        and (mean := kld.metric("mean"))
        and mean.value is not None
        and not mean.bound
    }
    if not klds:
        return [], {}, ""
    try:
        if path is None:
            raise InputError("no positions.parquet was given")
        expected = {name: kld.n_items for name, kld in klds.values()}
        measured = read_positions(path, expected, {name: kld.facts.get("n_ctx") for name, kld in klds.values()})
    except (InputError, MissingPackageError) as error:
        imported = "imported" in report.settings  # another tool's figures: there is nothing to score again
        return [], {}, f"{one_line(str(error))}: {OMITTED_NOTE if imported else REMEDY}"
    return list(klds), {arm.id: measured[name] for arm, (name, _) in klds.items()}, ""


def _worst(arm: ArmPositions) -> TextTable:
    columns = ("window", "position", "KL, nats", "reference's confidence", "same top-1")
    rows = (
        (
            str(worst.window),
            str(worst.position),
            format_kld(worst.kl),
            format_share(worst.confidence) if worst.confidence == worst.confidence else ABSENT,
            "yes" if worst.top1 else "no",
        )
        for worst in arm.worst
    )
    return TextTable("worst", f"up to {format_kld(arm.worst[0].kl)} nats", columns, tuple(rows))
