"""The error tree.

K16V8Error                    anything a user can fix; one line, exit code 2
├── UsageError                a flag, a name or a combination of settings that cannot be
│   └── UnknownNameError      a name that no table has; lists what exists, nearest first
├── InputError                a file that cannot be used
├── EngineError               an engine or a device that cannot be used, or cannot go on
│   └── NotSupportedError     the kernels, the engine or this machine lack what was asked for
├── OutputError               a file that cannot be written
└── ChunkError                (plugins/lmcache/chunk.py) bytes that are not the KV chunk that was asked for
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "EngineError",
    "InputError",
    "K16V8Error",
    "NotSupportedError",
    "OutputError",
    "UnknownNameError",
    "UsageError",
    "one_line",
]


class K16V8Error(Exception):
    """An error that the user can fix.  The message is one line: what was wrong, where, what to do."""


class UsageError(K16V8Error):
    """A flag, a name or a combination of settings that cannot be."""


class UnknownNameError(UsageError):
    """A name that no table has.  The message lists what exists, nearest first."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        def distance(candidate: str) -> tuple[float, str]:
            return -difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio(), candidate

        ordered = sorted(known, key=distance)
        close = difflib.get_close_matches(name.lower(), [k.lower() for k in ordered], n=1, cutoff=0.6)
        guess = f"; did you mean {ordered[0]!r}?" if close else "."
        tail = f" {hint}" if hint else ""
        super().__init__(f"unknown {kind} {name!r}{guess} There are: {', '.join(ordered) or 'none'}.{tail}")


class InputError(K16V8Error):
    """A file that cannot be used."""


class EngineError(K16V8Error):
    """An engine or a device that cannot be used, or cannot go on."""


class NotSupportedError(EngineError):
    """The kernels, the engine or this machine lack what was asked for."""


class OutputError(K16V8Error):
    """A file that cannot be written."""


def one_line(error: BaseException) -> str:
    """The message of a foreign exception without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
