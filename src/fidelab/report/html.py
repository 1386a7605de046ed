"""A report as one HTML file: no network, no external fonts, one script of ours.

Everything from models, logs and configs passes through autoescape; the record itself is embedded as JSON in a
data block in which ``<``, ``>`` and ``&`` are written as escapes, so that no text in it can end the block.  The
page's content security policy names the script by its SHA-256 and allows no other, and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fidelab.core import Estimator
from fidelab.errors import InputError
from fidelab.report import plots
from fidelab.report.heatmap import draw_grid
from fidelab.report.numbers import ABSENT, format_kld, format_share, one_line
from fidelab.report.positions import ArmPositions, read_positions
from fidelab.report.sections import Fork, forks_of, sections_of, table_of
from fidelab.report.tables import Table
from fidelab.report.view import arm_id, build_view
from fidelab.results.record import ArmRecord, Report, write_atomically
from fidelab.results.store import POSITIONS

__all__ = ["render_html", "write_html"]

LEFT_OUT = "the tail of KL and the worst positions are left out"
REMEDY = f"{LEFT_OUT}; make them with: fidelab rescore RUN_DIR"
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_html(report: Report, positions: Path | None = None) -> str:
    """The whole page; ``positions`` is the run's ``positions.parquet``.

    Without that file, or with one that is damaged or of another run, the page lacks what is read from it, and says so.
    """
    view = build_view(report)
    measured, note = _read(report, positions)
    names = {arm: record.name for arm, record in _compared(report)}
    script, digest = _script()
    return _template().render(
        view=view,
        tables={table.key: table for table in view.tables},
        frontier=plots.frontier(report, view),
        kld_plots=_present(plots.position(report), plots.confidence(report), plots.tail(report, measured, names)),
        survival=plots.survival(report),
        noise=plots.noise(report),
        note=note,
        worst=[(one_line(name), _worst(arm)) for name, arm in measured.items() if arm.worst],
        forks=list(_forks(report)),
        sections=[(section, _present(*map(plots.curves, section.curves))) for section in sections_of(report)],
        draw_grid=draw_grid,
        table_of=table_of,
        one_line=one_line,
        data=Markup(report.to_json().translate(_ESCAPES)),
        script=Markup(script),
        digest=digest,
    )


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page in one step; single positions are read from the file that a run leaves beside it.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_atomically(path, render_html(report, Path(path).with_name(POSITIONS)))


def _read(report: Report, path: Path | None) -> tuple[dict[str, ArmPositions], str]:
    """Positions of the arms that have a KL, and why there are none."""
    expected = {
        arm.name: kld.n_positions
        for _, arm in _compared(report)
        if (kld := arm.axes.kld) and kld.mean is not None and kld.estimator is not Estimator.TOPK
    }
    if not expected:
        return {}, ""
    try:
        if path is None:
            raise InputError("no positions.parquet was given")
        return read_positions(path, expected), ""
    except InputError as error:
        imported = "imported" in report.settings  # another tool's figures: there is nothing to score again
        return {}, f"{one_line(str(error))}: {LEFT_OUT if imported else REMEDY}"


def _compared(report: Report) -> list[tuple[str, ArmRecord]]:
    """Ids and records of candidates and control."""
    arms = [(arm_id("candidate", number), arm) for number, arm in enumerate(report.candidates)]
    return [*arms, *([("control", report.control)] if report.control else [])]


def _worst(arm: ArmPositions) -> Table:
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
    return Table("worst", "Worst positions", columns, tuple(rows))


def _forks(report: Report) -> Iterator[tuple[str, tuple[Fork, ...]]]:
    for _, arm in _compared(report):
        if arm.axes.trajectory is not None and arm.axes.trajectory.divergences:
            yield one_line(arm.name), forks_of(arm.axes.trajectory.divergences)


def _present(*found: plots.Plot | None) -> list[plots.Plot]:
    return [plot for plot in found if plot is not None]


@cache
def _script() -> tuple[str, str]:
    """The page's script, and its hash as a content security policy names it."""
    text = (files("fidelab.report") / "templates" / "report.js").read_text("utf-8").replace("\r\n", "\n")
    return text, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _template() -> Template:
    environment: Any = Environment(
        loader=PackageLoader("fidelab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template: Template = environment.get_template("report.html.j2")
    return template
