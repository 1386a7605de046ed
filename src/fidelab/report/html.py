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

from fidelab.report import plots
from fidelab.report.gallery import compared, gallery_of
from fidelab.report.heatmap import draw_grid
from fidelab.report.positions import ArmPositions
from fidelab.report.sections import Fork, forks_of, table_of
from fidelab.report.tables import Table
from fidelab.report.view import build_view
from fidelab.results.numbers import ABSENT, format_kld, format_share, one_line
from fidelab.results.record import Report, write_atomically
from fidelab.results.store import POSITIONS

__all__ = ["render_html", "write_html"]

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_html(report: Report, positions: Path | None = None) -> str:
    """The whole page; ``positions`` is the run's ``positions.parquet``.

    Without that file, or with one that is damaged or of another run, the page lacks what is read from it, and says so.
    """
    view = build_view(report)
    gallery = gallery_of(report, view, positions)
    script, digest = _script()
    return _template().render(
        view=view,
        tables={table.key: table for table in view.tables},
        frontier=gallery.frontier,
        kld_plots=gallery.kld,
        survival=gallery.survival,
        noise=plots.noise(report),
        note=gallery.note,
        worst=[(one_line(name), _worst(arm)) for name, arm in gallery.measured.items() if arm.worst],
        forks=list(_forks(report)),
        sections=gallery.sections,
        bench_plots=gallery.benches,
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
    for _, arm in compared(report):
        if arm.axes.trajectory is not None and arm.axes.trajectory.divergences:
            yield one_line(arm.name), forks_of(arm.axes.trajectory.divergences)


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
