"""The page of ``fidelab estimate explain``: three interactive pieces in one file, which fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fidelab.core import finite, write_atomically
from fidelab.report.html import data_block, render_page


def render_explainer(found: Mapping[str, Any], version: str) -> str:
    """Return the page; ``found`` is the result of :func:`fidelab.physics.explainer.explainer`."""
    return render_page(
        "explainer.html.j2",
        "What a step of decoding reads",
        ["explainers", f"fidelab {version}"],
        "explainer.js",
        data=data_block(json.dumps(finite(found), ensure_ascii=False)),
        formats=found["formats"],
        published=found["published"],
    )


def write_explainer(found: Mapping[str, Any], version: str, path: Path) -> Path:
    """Write the page atomically.

    Raises:
        OutputError: If the file cannot be written.
    """
    return write_atomically(path, render_explainer(found, version))
