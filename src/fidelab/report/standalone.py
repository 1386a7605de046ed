"""Every chart of a report as a separate file: SVG, or PNG drawn from it.

A file holds its own style in which all colours are plain values (those of the light page) and the font is generic, so
that any program shows it; the ground is white.  Heat maps, which are tables of numbers, are not among them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from fidelab.core.errors import OutputError, UsageError
from fidelab.report.charts import element, text
from fidelab.report.gallery import gallery_of
from fidelab.report.html import templates
from fidelab.report.labels import LETTER
from fidelab.report.plots import Drawing
from fidelab.report.tables import free
from fidelab.report.view import build_view
from fidelab.results.numbers import printable
from fidelab.results.record import Report

FileFormat = Literal["svg", "png"]
FAMILIES = "Arial, Helvetica, DejaVu Sans, Liberation Sans, Noto Sans, Segoe UI, Roboto, Ubuntu, Cantarell"
TOP, ROW = 32.0, 21.0
_LEFT, _SWATCH, _GAP = 18.0, 27.0, 22.0


def draw_charts(report: Report, width: int, positions: Path | None = None) -> dict[str, str]:
    """Name → SVG of the given width in pixels, in reading order; ``positions`` is the run's ``positions.parquet``."""
    drawn: dict[str, str] = {}
    for plot in gallery_of(report, build_view(report), positions).plots():
        drawn[free(plot.key, drawn)] = _draw(plot, width)
    return drawn


def write_charts(charts: Mapping[str, str], folder: Path, form: FileFormat, width: int) -> list[Path]:
    """Write the files, all of them or none; those of the same names are replaced.

    Raises:
        UsageError: PNG was asked for and its package is not installed.
        OutputError: the folder or a file cannot be written.
    """
    contents = {f"{name}.{form}": svg.encode() if form == "svg" else _png(svg, width) for name, svg in charts.items()}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        folder.mkdir(exist_ok=True)
        return [(temporary / name).replace(folder / name) for name in contents]
    except OSError as error:
        raise OutputError(f"{folder}: cannot write: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _draw(plot: Drawing, width: int) -> str:
    """The wide drawing under its title, with a legend below it where its lines are not named."""
    chart = plot.charts[0]
    parts = [
        element("title", plot.title),
        element("style", Markup(_style())),
        element("rect", width="100%", height="100%", fill="#ffffff"),
        text(4, 24, plot.title, style="title"),
        element("g", chart.body, transform=f"translate(0 {TOP:g})"),
    ]
    x, y, tall = _LEFT, TOP + chart.size.height + 6, TOP + chart.size.height
    for name, _, style in () if plot.labelled else plot.legend:  # as many to a line as there is room for
        wide = _SWATCH + LETTER * len(name)
        if x > _LEFT and x + wide > chart.size.width:
            x, y = _LEFT, y + ROW
        line = element("path", d="M0 0H20")
        parts += [element("g", line, class_=f"swatch {style}", transform=f"translate({x:g} {y:g})")]
        parts += [text(x + _SWATCH, y + 4, name)]
        x, tall = x + wide + _GAP, y + ROW
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {chart.size.width} {tall:g}"}
    height = round(width * tall / chart.size.width)
    return printable(element("svg", *parts, class_="chart", role="img", width=width, height=height, **attributes))


def _png(svg: str, width: int) -> bytes:
    """The drawing as PNG; the generic family becomes those that systems have, which the package does not know."""
    try:
        import resvg_py
    except ImportError as error:
        raise UsageError(f"PNG files need resvg-py ({error}): pip install 'fidelab[charts]'") from None

    def paint(text: str, pixels: int) -> bytes:
        return bytes(resvg_py.svg_to_bytes(svg_string=text.replace("sans-serif", FAMILIES), width=pixels))

    request = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    text = '<text y="15" style="font-family: sans-serif">M</text>'
    if paint(request.format(text), 20) == paint(request.format(""), 20):
        raise UsageError(f"PNG files need a font, one of {FAMILIES}; install one or use --format svg")
    return paint(svg, width)


@cache
def _style() -> str:
    """The page's rules for charts, their variables replaced by what they hold."""
    page = templates().get_template("report.css.j2").render()
    light = page.partition("@media")[0]
    colours = {**dict(re.findall(r"--(\w+): (#\w+)", light)), "sheet": "#ffffff"}
    keys = re.findall(r"[.\w, ]+ \{ --key: [^}]+\}", page)
    rules = "\n".join([*keys, templates().get_template("charts.css.j2").render().strip()])
    # what an arm's colour is called: few programs know variables, all know the current colour
    rules = re.sub(r"--(?:own|key):", "color:", rules)
    rules = re.sub(r"var\(--(?:own|key)\)", "currentColor", rules)
    rules = re.sub(r"var\(--(\w+)\)", lambda variable: colours[variable[1]], rules)
    title = f".title {{ fill: {colours['ink']}; font-size: 15px; font-weight: 600; }}"
    return f"{rules}\n{title}".replace("system-ui, sans-serif", "sans-serif")
