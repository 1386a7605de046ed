"""Results: what a run found, as one strict record (``report.json``), and how it is read and written.

Nothing here measures or judges: the axes bring the numbers, the conductor the verdicts.
"""

from fidelab.registry import Registry

FACES = Registry(
    "face",
    {
        "html": "fidelab.report.html:render_notebook",
        "markdown": "fidelab.report.markdown:render_markdown",
    },
)
"""How a report shows itself in Python: the room ``report`` knows how, and this one does not import it."""

READERS = Registry("report schema", {"fidelab.report/0": "fidelab.imports.upgrade:upgrade"})
"""Older schemas, and what makes today's record of them."""
