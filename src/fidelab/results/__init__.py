"""Results: the strict record of a run (``report.json``), reading, writing and comparing it.

This package neither measures nor judges: axes compute the metrics, ``runs`` the verdicts.
"""

from fidelab.registry import Registry

FACES = Registry(
    "face",
    {
        "html": "fidelab.report.html:render_notebook",
        "markdown": "fidelab.report.markdown:render_markdown",
    },
)
"""Renderings of a report in Python, implemented in ``report``, which this package does not import."""
