"""A report as one HTML file: no network, no external fonts, one inline script.

Everything from models, logs and configs passes through autoescape; the record itself is embedded as JSON in a
data block in which ``<``, ``>`` and ``&`` are written as escapes, so that no text in it can end the block.  The
page's content security policy names the script by its SHA-256 and allows no other, and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fidelab.core import write_atomically
from fidelab.report.gallery import gallery_of
from fidelab.report.heatmap import scale_of, shades_of
from fidelab.report.sections import table_of
from fidelab.report.view import build_view
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import format_nats, format_percent, one_line, printable
from fidelab.results.record import Report
from fidelab.results.store import POSITIONS

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_html(report: Report, positions: Path | None = None) -> str:
    """Render the whole page; ``positions`` is the run's ``positions.parquet``.

    Without that file, or with one that is damaged or of another run, the page says that these figures are left out.
    """
    view = build_view(report)
    gallery = gallery_of(report, view, positions)
    axes = [part for part in gallery.parts if part.section.kind == "axis"]
    texts = [(shown.arm, plot) for part in axes for shown in part.section.shown for plot in shown.texts]
    return render_page(
        "report.html.j2",
        view.title,
        [view.title if view.answer else "", *view.facts, view.created],
        "report.js",
        view=view,
        tables={table.key: table for table in view.tables},
        frontier=gallery.frontier,
        loses=[part for part in axes if part.section.name == DECIDING],
        tests=[part for part in axes if part.section.name != DECIDING],
        benches=[part for part in gallery.parts if part.section.kind == "bench"],
        texts=[(arm.name, plot) for arm, plot in sorted(texts, key=lambda shown: shown[0].role != "candidate")],
        columns_of=lambda kept: [view.headings[n] for n in kept],
        shades_of=shades_of,
        scale_of=scale_of,
        table_of=table_of,
        one_line=one_line,
        format_nats=format_nats,
        format_percent=format_percent,
        data=data_block(report.model_dump_json(by_alias=True)),
    )


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page atomically; single positions are read from ``positions.parquet`` in the same folder.

    Raises:
        OutputError: If the file cannot be written.
    """
    return write_atomically(path, render_html(report, Path(path).with_name(POSITIONS)))


def render_page(template: str, title: str, facts: Sequence[str], *scripts: str, **values: object) -> str:
    """Render a page on the common base: head, style sheet, one line of facts, the button for colours, scripts.

    ``facts``: parts of the line above the answer; empty parts are left out.  ``scripts``: files that follow
    ``page.js``, in one element whose SHA-256 the content security policy names.
    """
    folder = files("fidelab.report") / "templates"
    script = "".join((folder / name).read_text("utf-8") for name in ("page.js", *scripts)).replace("\r\n", "\n")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = templates().get_template(template)
    links = project_links()
    common = {"home": links.get("homepage", ""), "documentation": links.get("documentation", "")}
    return page.render(title=title, facts=facts, script=Markup(script), digest=digest, **common, **values)


@cache
def project_links() -> dict[str, str]:
    """Return the addresses in the package's metadata by their labels in lower case; only those of the web."""
    try:
        lines = metadata("fidelab").get_all("Project-URL") or []
    except PackageNotFoundError:  # run from its sources
        return {}
    pairs = (line.partition(", ") for line in lines)
    return {label.lower(): url for label, _, url in pairs if url.startswith("https://")}


def data_block(text: str) -> Markup:
    """Return JSON for a ``<script type="application/json">``, which cannot end that element."""
    return Markup(printable(text, escaped=True).translate(_ESCAPES))


def _finalized(value: object) -> object:
    """Text of a value for a template; markup is kept."""
    if isinstance(value, Markup):
        return Markup(printable(value))
    return printable(value) if isinstance(value, str) else value


@cache
def templates() -> Environment:
    """Return the templates and style sheets of the page. All text that they are given is escaped and printable."""
    environment = Environment(
        loader=PackageLoader("fidelab.report"),
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Text that breaks between the settings of a name, rather than within a word
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(
        map(printable, re.split(r"(?<=,)(?=[^\W\d])", text))
    )
    return environment
