"""Lines of text for a terminal: its width, text wrapped at it, commands folded so that they can still be pasted."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

DEFAULT_COLUMNS, MIN_COLUMNS = 80, 20
_COMMAND = re.compile(r"(?::| with| see| run|,) ((?:ref=\$\()?(?:fidelab|pip install|python -m fidelab\S*) [^;)]*)$")
_PROSE = re.compile(r" (?:or|and|lists|shows|says|has|reads|is|takes) ")
_UNQUOTED_BLANK = re.compile(r" (?=(?:[^'\"]|'[^']*'|\"[^\"]*\")*$)")
_ASCII = str.maketrans(
    {
        **{"–": "-", "−": "-", "±": "+/-", "≥": ">=", "≤": "<=", "≈": "~", "Δ": "d", "×": "x", "∞": "inf", "…": "..."},
        **{"→": "->", "·": "|", "“": '"', "”": '"', "’": "'"},
    }
)


def columns(stream: Any = None) -> int:
    """Return the width for ``stream`` (default: standard output), at least 20.

    ``COLUMNS`` if it is set, else the terminal's width, else 80: also for files and pipes.
    """
    stream = sys.stdout if stream is None else stream
    given = os.environ.get("COLUMNS", "")
    width = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    if not width:
        try:
            width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
        except (OSError, ValueError, AttributeError):
            width = 0
    return max(MIN_COLUMNS, width or DEFAULT_COLUMNS)


def wrapped(text: str, width: int, *, indent: str = "", hang: str = "  ") -> list[str]:
    """Wrap one paragraph at blanks.  Words are never cut, so that paths and names can be copied.

    A command at the paragraph's end that does not fit into a line stands on lines of its own.

    Args:
        text: the paragraph; its own line ends become blanks.
        width: columns.
        indent: beginning of the first line.
        hang: beginning of all further lines.
    """
    text = " ".join(text.splitlines())
    if len(indent) + len(text) <= width:
        return [(indent + text).rstrip()]
    if (command := _COMMAND.search(text)) and not _PROSE.search(command[1]):
        head = _filled(text[: command.start(1)].rstrip(), width, indent, hang)
        if len(f"{head[-1]} {command[1]}") <= width:
            return [*head[:-1], f"{head[-1]} {command[1]}"]
        return [*head, *folded_command(command[1], width, indent=hang)]
    return _filled(text, width, indent, hang)


def _filled(text: str, width: int, indent: str, hang: str) -> list[str]:
    room = max(width, len(indent) + 8, len(hang) + 8)
    lines = textwrap.wrap(
        text,
        room,
        initial_indent=indent,
        subsequent_indent=hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.rstrip() for line in lines] or [indent.rstrip()]


def folded_command(command: str, width: int, *, indent: str = "") -> list[str]:
    """Fold a shell command at blanks outside of quotes; lines before the last end in a backslash, so that it runs.

    >>> folded_command("fidelab compare model.gguf --kv q8_0", 28)
    ['fidelab compare model.gguf \\\\', '  --kv q8_0']
    """
    if len(indent) + len(command) <= width:
        return [indent + command]
    lines, line = [], indent
    for word in _words(command):
        begun = line.strip() != ""
        if begun and len(line) + 1 + len(word) + 2 > width:
            lines.append(f"{line} \\")
            line, begun = f"{indent}  ", False
        line = f"{line} {word}" if begun else f"{line}{word}"
    return [*lines, line]


def _words(command: str) -> Sequence[str]:
    """Return the words of a command, an option together with its value."""
    words: list[str] = []
    for word in _UNQUOTED_BLANK.split(command):
        if words and words[-1].startswith("-") and "=" not in words[-1] and not word.startswith("-"):
            words[-1] = f"{words[-1]} {word}"
        else:
            words.append(word)
    return words


_ONE_COLUMN = str.maketrans({sign: text[0] for sign, text in ((chr(n), t) for n, t in _ASCII.items())})


def encodable(text: str, encoding: str | None, *, same_width: bool = False) -> str:
    """Return ``text`` as an encoding can hold it: signs become ASCII spellings, everything else ``?``.

    ``encoding``: ``None`` of a stream that holds text.  ``same_width``: for text that was laid out already.
    """
    if encoding is None:
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ONE_COLUMN if same_width else _ASCII).encode(encoding, "replace").decode(encoding)
    return text
