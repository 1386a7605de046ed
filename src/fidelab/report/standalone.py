"""The frontier of a report as a separate SVG file, for documents.

It holds its own style in which all colours are plain values (those of the light page) and the font is generic, so
that any program shows it; the ground is white.
"""

from __future__ import annotations

import re
from functools import cache

from markupsafe import Markup

from fidelab.core.errors import UsageError
from fidelab.report.cells import kld_of, top_token_estimate
from fidelab.report.charts import element, text
from fidelab.report.html import templates
from fidelab.report.plots import Drawing, draw_plots, frontier
from fidelab.report.sections import sections_of
from fidelab.report.view import build_view
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import ABSENT, one_line, printable
from fidelab.results.record import ArmRecord, Report

DEPTH_TITLE = "KL by depth"
_LONGEST_NAME = 40  # characters of a badge
_CHARACTER = 6.8  # pixels of a character at 11 px: the text is fitted to that width
_BADGE_COLOURS = {"excellent": "#1f7a3a", "pass": "#1f7a3a", "degraded": "#8a6100", "fail": "#a82a2a"}
TOP = 32.0  # height of the title


def frontier_svg(report: Report, width: int) -> str | None:
    """Return the wide drawing under its title, ``width`` pixels wide; ``None`` if no arm has both a KLD and a size."""
    plot = frontier(report, build_view(report))
    return None if plot is None else _svg(plot, width)


def depth_svg(report: Report, width: int) -> str | None:
    """Return the mean KL against the depth of context, as :func:`frontier_svg`; ``None`` for a run without depths."""
    drawn = (drawing for section in sections_of(report) for drawing in draw_plots(section, report))
    plot = next((drawing for drawing in drawn if drawing.title == DEPTH_TITLE), None)
    return None if plot is None else _svg(plot, width)


def badge_svg(report: Report, arm: ArmRecord) -> str:
    """Return a badge of a configuration: ``q8_0 | KLD 0.0037 · 95.1% same top``, coloured by its verdict.

    Grey: no verdict, or one that more data may change.

    Raises:
        UsageError: If it has no KLD.
    """
    kld = arm.axes.get(DECIDING)
    figure, same = kld_of(kld).value, top_token_estimate(kld).value
    if figure == ABSENT:
        raise UsageError(f"{arm.name} has no KLD: there is nothing for a badge")
    left, right = one_line(arm.name)[:_LONGEST_NAME], f"KLD {figure} · {same} same top"
    if same == ABSENT:
        right = f"KLD {figure}"
    band = next((row.mark for row in build_view(report).candidates if row.name == one_line(arm.name)), "")
    widths = [round(_CHARACTER * len(part)) for part in (left, right)]
    middle, width = widths[0] + 12, sum(widths) + 24
    texts = (
        element(
            "text",
            part,
            x=x,
            y=14,
            text_anchor="middle",
            textLength=size,
            lengthAdjust="spacingAndGlyphs",
            style="fill:#ffffff",
        )
        for part, size, x in ((left, widths[0], middle / 2), (right, widths[1], (middle + width) / 2))
    )
    parts = (
        element("title", f"{left}: {right}"),
        element("rect", width=width, height=20, rx=3, fill="#444444"),
        element(
            "path",
            d=f"M{middle} 0h{width - middle - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{width - middle - 3}z",
            fill=_BADGE_COLOURS.get(band, "#5a5a5a"),
        ),
        element("g", *texts, fill="#ffffff", font_family="Verdana, DejaVu Sans, sans-serif", font_size=11),
    )
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} 20"}
    return printable(element("svg", *parts, role="img", width=width, height=20, **attributes))


def _svg(plot: Drawing, width: int) -> str:
    chart = plot.charts[0]
    parts = [
        element("title", plot.title),
        element("style", Markup(_style())),
        element("rect", width="100%", height="100%", fill="#ffffff"),
        text(4, 24, plot.title, style="title"),
        element("g", chart.body, transform=f"translate(0 {TOP:g})"),
    ]
    tall = TOP + chart.size.height
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {chart.size.width} {tall:g}"}
    height = round(width * tall / chart.size.width)
    return printable(element("svg", *parts, class_="chart", role="img", width=width, height=height, **attributes))


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
