"""A report as one HTML file, and as a fragment for notebooks: no network, no external fonts, one script of ours.

Everything from models, logs and configs passes through autoescape; the record itself is embedded as JSON in a
data block in which ``<``, ``>`` and ``&`` are written as escapes, so that no text in it can end the block.  The
page's content security policy names the script by its SHA-256 and allows no other, and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fidelab.report.gallery import gallery_of
from fidelab.report.heatmap import scale_of, shades_of
from fidelab.report.sections import table_of
from fidelab.report.view import FIGURES, build_view
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import ABSENT, one_line, printable
from fidelab.results.record import Report, write_atomically
from fidelab.results.store import POSITIONS

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_html(report: Report, positions: Path | None = None) -> str:
    """The whole page; ``positions`` is the run's ``positions.parquet``.

    Without that file, or with one that is damaged or of another run, the page says that these figures are left out.
    """
    view = build_view(report)
    gallery = gallery_of(report, view, positions)
    script, digest = script_of("page.js", "report.js")
    axes = [part for part in gallery.parts if part.section.kind == "axis"]
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            view=view,
            tables={table.key: table for table in view.tables},
            frontier=gallery.frontier,
            loses=[part for part in axes if part.section.name == DECIDING],
            tests=[part for part in axes if part.section.name != DECIDING],
            benches=[part for part in gallery.parts if part.section.kind == "bench"],
            texts=[(shown.arm.name, plot) for part in axes for shown in part.section.shown for plot in shown.texts],
            columns_of=lambda kept: [FIGURES[n] for n in kept],
            shades_of=shades_of,
            scale_of=scale_of,
            table_of=table_of,
            one_line=one_line,
            data=data_block(report.model_dump_json(by_alias=True)),
            script=script,
            digest=digest,
        )
    )


def render_notebook(report: Report) -> str:
    """The fragment: answer, failures, main table, a sentence per candidate, noise, control, ranking, command.

    One root element, one style sheet whose every rule begins with its class, no script.  It follows the notebook's
    theme (JupyterLab, VS Code, Colab, Sphinx) and else the system's; where the style sheet is stripped, a plain table
    remains.
    """
    return templates().get_template("notebook.html.j2").render(view=build_view(report), figures=FIGURES, absent=ABSENT)


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page atomically; single positions are read from ``positions.parquet`` in the same folder.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_atomically(path, render_html(report, Path(path).with_name(POSITIONS)))


@cache
def script_of(*names: str) -> tuple[Markup, str]:
    """A page's script, of several files in one, and its hash as a content security policy names it."""
    folder = files("fidelab.report") / "templates"
    text = "".join((folder / name).read_text("utf-8") for name in names).replace("\r\n", "\n")
    return Markup(text), base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_block(text: str) -> Markup:
    """JSON as it stands in a ``<script type="application/json">``: nothing in it can end that element."""
    return Markup(printable(text, escaped=True).translate(_ESCAPES))


def _finalized(value: object) -> object:
    """What a template shows of a value, in which markup stays markup."""
    if isinstance(value, Markup):
        return Markup(printable(value))
    return printable(value) if isinstance(value, str) else value


@cache
def templates() -> Environment:
    """The templates and style sheets of the page; all text that they are given is escaped, and can be printed."""
    return Environment(
        loader=PackageLoader("fidelab.report"),
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
