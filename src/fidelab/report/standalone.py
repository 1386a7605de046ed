"""Every chart of a report as a file of its own: SVG, or PNG drawn from it.

A file holds its own style in which all colours are plain values (those of the light page) and the font is generic, so
that any program shows it; the ground is white.  Heat maps, which are tables of numbers, are not among them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fidelab.errors import OutputError, UsageError
from fidelab.report.gallery import gallery_of
from fidelab.report.labels import LETTER
from fidelab.report.plots import Drawing
from fidelab.report.view import build_view
from fidelab.results.record import Report

__all__ = ["Format", "draw_charts", "write_charts"]

Format = Literal["svg", "png"]
FAMILIES = "Arial, Helvetica, DejaVu Sans, Liberation Sans, Noto Sans, Segoe UI, Roboto, Ubuntu, Cantarell"
TOP, ROW = 32.0, 21.0
_LEFT, _SWATCH, _GAP = 18.0, 27.0, 22.0


def draw_charts(report: Report, width: int, positions: Path | None = None) -> dict[str, str]:
    """Name → SVG of so many pixels' width, in reading order; ``positions`` is the run's ``positions.parquet``."""
    drawn: dict[str, str] = {}
    for plot in gallery_of(report, build_view(report), positions).plots():
        drawn[_free(plot.key, drawn)] = _draw(plot, width)
    return drawn


def write_charts(charts: Mapping[str, str], folder: Path, form: Format, width: int) -> list[Path]:
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


def _free(key: str, taken: Mapping[str, str]) -> str:
    """The key, or the first numbered one that no chart has; curves of an axis are named by their titles."""
    return next(name for name in (key, *(f"{key}-{n}" for n in range(2, len(taken) + 3))) if name not in taken)


def _draw(plot: Drawing, width: int) -> str:
    chart = plot.charts[0]
    legend = list(_legend(() if plot.labelled else plot.legend, chart.size.width, TOP + chart.size.height))
    tall = TOP + chart.size.height + (legend[-1][1] - TOP - chart.size.height + ROW if legend else 0)
    return _template().render(
        chart=chart,
        title=plot.title,
        style=Markup(_style()),
        legend=legend,
        top=TOP,
        tall=tall,
        width=width,
        height=round(width * tall / chart.size.width),
    )


def _legend(
    entries: Sequence[tuple[str, str, str]], width: float, top: float
) -> Iterator[tuple[float, float, str, str]]:
    """Entries side by side, as many to a line as there is room for: left, middle, style, name."""
    x, y = _LEFT, top + 6
    for name, _, style in entries:
        wide = _SWATCH + LETTER * len(name)
        if x > _LEFT and x + wide > width:
            x, y = _LEFT, y + ROW
        yield x, y, style, name
        x += wide + _GAP


def _png(svg: str, width: int) -> bytes:
    """The drawing as PNG; the generic family becomes those that systems have, which the package does not know."""
    try:
        import resvg_py
    except ImportError as error:
        raise UsageError(f"PNG files need resvg-py ({error}): pip install 'fidelab[charts]'") from None

    def paint(text: str, pixels: int) -> bytes:
        return bytes(resvg_py.svg_to_bytes(svg_string=text.replace("sans-serif", FAMILIES), width=pixels))

    probe = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    text = '<text y="15" style="font-family: sans-serif">M</text>'
    if paint(probe.format(text), 20) == paint(probe.format(""), 20):
        raise UsageError(f"PNG files need a font, one of {FAMILIES}; install one or use --format svg")
    return paint(svg, width)


@cache
def _style() -> str:
    """The page's rules for charts, their variables replaced by what they hold."""
    environment = _environment()
    page = environment.get_template("report.css.j2").render()
    light = page.partition("@media")[0]
    colours = {**dict(re.findall(r"--(\w+): (#\w+)", light)), "sheet": "#ffffff"}
    keys = re.findall(r"[.\w, ]+ \{ --key: [^}]+\}", page)
    rules = "\n".join([*keys, environment.get_template("charts.css.j2").render().strip()])
    # what an arm's colour is called: few programs know variables, all know the current colour
    rules = re.sub(r"--(?:own|key):", "color:", rules)
    rules = re.sub(r"var\(--(?:own|key)\)", "currentColor", rules)
    rules = re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)
    title = f".title {{ fill: {colours['ink']}; font-size: 15px; font-weight: 600; }}"
    return f"{rules}\n{title}".replace("system-ui, sans-serif", "sans-serif")


@cache
def _template() -> Template:
    return _environment().get_template("standalone.svg.j2")


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("fidelab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
