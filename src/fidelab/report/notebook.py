"""A report in a cell of a notebook: the answer, a row per candidate, and the chart of loss against size."""

from __future__ import annotations

import base64

from markupsafe import Markup, escape

from fidelab.report.charts import element
from fidelab.report.standalone import frontier_svg
from fidelab.report.view import View, build_view
from fidelab.results.numbers import ABSENT, printable
from fidelab.results.record import Report

_PIXELS = 480


def render_notebook(report: Report) -> tuple[str, str, str]:
    """Return plain text, Markdown, and HTML with the chart, which has no styles or scripts that reach outside."""
    view = build_view(report)
    heads, rows = _table(view)
    lines = [f"**{_escaped(_head(view))}**", "", *(f"{_escaped(fact)}  " for fact in _facts(view))]
    if rows:
        lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
    plain = "\n".join([_head(view), *_facts(view)])
    return printable(plain), "\n".join(lines).strip() + "\n", printable(_html(report, view))


def _head(view: View) -> str:
    return view.answer.head if view.answer else view.title


def _facts(view: View) -> tuple[str, ...]:
    return view.answer.facts if view.answer else view.headlines


def _table(view: View) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the candidates, with the columns that any of them has."""
    kept = view.kept if view.fidelity else ()
    heads = [view.subject, "verdict", *(view.headings[n] for n in kept)]
    return heads, [[row.name, row.mark, *(row.cells[n] for n in kept)] for row in view.candidates if kept]


def _html(report: Report, view: View) -> Markup:
    heads, rows = _table(view)
    parts = [element("p", element("strong", _head(view)))]
    parts += [element("p", fact, style="margin:2px 0") for fact in _facts(view)]
    if rows:
        body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
        table = (element("thead", element("tr", *(element("th", head) for head in heads))), element("tbody", *body))
        parts.append(element("table", *table))
    if (drawn := frontier_svg(report, _PIXELS)) is not None:
        data = base64.b64encode(drawn.encode()).decode()
        about = "; ".join(f"{row.name}: KLD {row.kld.value}" for row in view.candidates if row.kld.value != ABSENT)
        parts.append(Markup(f'<img width="{_PIXELS}" alt="{escape(about)}" src="data:image/svg+xml;base64,{data}">'))
    return element("div", *parts)


def _escaped(text: str) -> str:
    """Text in which Markdown finds no markup."""
    marks = str.maketrans({mark: f"\\{mark}" for mark in "\\|*_`[]<>#~"})
    return printable(text).translate(marks)
