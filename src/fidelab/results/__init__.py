"""Results: the strict record of a run (``report.json``), reading, writing and comparing it.

This package neither measures nor judges: axes compute the metrics, ``runs`` the verdicts.
"""

from fidelab.core.registry import Registry

FACES = Registry(
    "face",
    {
        "markdown": "fidelab.report.markdown:render_markdown",
        "notebook": "fidelab.report.notebook:render_notebook",
        "pandas": "fidelab.results.table:build_frame",
        "plot": "fidelab.report.figure:draw_figure",
        "positions": "fidelab.results.table:read_frame",
    },
)
"""Renderings of a report in Python, by those who read it."""
