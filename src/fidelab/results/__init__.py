"""Results: the strict record of a run (``report.json``), reading, writing and comparing it.

This package neither measures nor judges: axes compute the metrics, ``runs`` the verdicts.
"""

from fidelab.core.registry import Registry

FACES = Registry(
    "face",
    {
        "markdown": "fidelab.report.markdown:render_markdown",
        "pandas": "fidelab.results.table:build_frame",
    },
)
"""Renderings of a report in Python, by those who read it."""
