"""Cells of terminal tables: foreign text as it is, long names on several lines."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

__all__ = ["literal", "wrap_name"]

_ASCII = str.maketrans({"–": "-", "−": "-", "≥": ">=", "≤": "<=", "≈": "~", "Δ": "d", "×": "x", "∞": "inf"})


def literal(text: str, console: Console, style: str = "") -> Text:
    """Text, never markup, that the console's encoding can hold."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(console.encoding, "replace").decode(console.encoding)
    return Text(text, style=style)


def wrap_name(name: str, width: int) -> str:
    """A long name on several lines, broken after a separator where there is one in the second half."""
    lines = []
    while len(name) > width:
        cuts = [match.end() for match in re.finditer(r"[/,:=_\-\s\]]", name[:width])]
        cut = cuts[-1] if cuts and cuts[-1] > width // 2 else width
        lines.append(name[:cut].rstrip())
        name = name[cut:]
    return "\n".join([*lines, name])
