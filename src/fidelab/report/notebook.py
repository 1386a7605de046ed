"""A report as an HTML fragment for notebooks: what is read first, and nothing that leaves its own element.

One root element, one style sheet whose every rule begins with its class, no script, nothing fetched.  It follows the
notebook's theme (JupyterLab, VS Code, Colab, Sphinx) and else the system's; where the style sheet is stripped, a
plain table remains.
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fidelab.report.view import build_view
from fidelab.results.numbers import ABSENT
from fidelab.results.record import Report

__all__ = ["render_notebook"]


def render_notebook(report: Report) -> str:
    """The fragment: title, failures, a card per candidate, main table, floor, control, ranking, command."""
    return _template().render(view=build_view(report), absent=ABSENT)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("fidelab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("notebook.html.j2")
