"""Reports in which every text comes from somebody who wants to write the page."""

from __future__ import annotations

import itertools
import json
from typing import Any

from fidelab.results.record import Report
from tests.report.sample import HOSTILE, sample_report

TEXTS = (
    HOSTILE,
    "a|b||c|",
    "a\\|b\\\\|c\\",
    "one `tick`, ``two``, ```three```",
    "`|`",
    "```\n\nout of the block\n\n````\n",
    "line\n\n# heading\n\n| a |\n| - |\r\n\r\n- item\n\n---\n",
    "[text](http://evil.example) ![image](//evil.example/x.png) [a]: <b>",
    "see http://evil.example, (www.evil.example) or me@evil.example",
    "<https://evil.example> <b>bold</b> <!-- hidden",
    "**bold** __bold__ *it* _it_ ~~gone~~ $x^2$ [^1] &lt;b&gt; &#124;",
    "> quote",
    "1. one",
    "    indented",
    "{{ 7 * 7 }}{% raw %}",
)
_WORDS = {"schema", "created", "status", "band", "at_best", "unit", "better", "limit", "kind", "key"}
"""Keys whose values are words of the schema, not free text."""


def hostile_report(text: str) -> Report:
    """The sample with ``text`` in every free text, axis and metric name; a number keeps the arms' names apart."""
    number = itertools.count(1)

    def put(tree: Any, key: str = "", axis: str = "") -> Any:
        if isinstance(tree, dict) and key == "axes":
            return {
                name if name in ("kld", "trajectory") else text + name: put(value, name, name)
                for name, value in tree.items()
            }
        if key == "kv":
            return tree  # formats are parsed
        if isinstance(tree, dict):
            named = {name: put(value, name, axis) for name, value in tree.items()}
            if axis and "unit" in tree:
                named["name"] = text + tree["name"]
            return named
        if isinstance(tree, list):
            return [put(value, key, axis) for value in tree]
        if not isinstance(tree, str) or key in _WORDS:
            return tree
        return f"{text}{next(number)}" if key == "name" else text

    return Report.model_validate_json(json.dumps(put(json.loads(sample_report().to_json()))), strict=True)
