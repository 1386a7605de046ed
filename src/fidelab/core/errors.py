"""The error tree.

FidelabError                  anything a user can fix; one line, exit code 2
├── UsageError                a flag, a name or a combination of settings that is invalid
│   └── UnknownNameError      a name that no table has; lists what exists, nearest first
├── ConfigError               an invalid settings file (with its place)
├── InputError                a text, a prompt file or a model that cannot be used
│   └── UnavailableError      a remote resource that cannot be fetched now; other axes continue
├── CaptureError              a capture that is damaged, foreign or incomplete
│   ├── MismatchError         two captures that must not be compared
│   └── OtherSchemaError      a capture of another version of fidelab, which may be whole
├── EngineError               an engine that cannot be opened or cannot do what was asked
│   └── NotSupportedError     the engine lacks this format or request (status ``not_supported``)
├── MissingPackageError       an optional package that is not installed or is broken; names the remedy
└── OutputError               an output folder that cannot be written
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CaptureError",
    "ConfigError",
    "EngineError",
    "FidelabError",
    "InputError",
    "MismatchError",
    "MissingPackageError",
    "NotSupportedError",
    "OtherSchemaError",
    "OutputError",
    "UnavailableError",
    "UnknownNameError",
    "UsageError",
    "nearest_first",
]


class FidelabError(Exception):
    """An error that the user can fix.  The message is one line: what was wrong, where, what to do."""


class UsageError(FidelabError):
    """A flag, a name or a combination of settings is invalid."""


class UnknownNameError(UsageError):
    """A name that no table has.  The message lists what exists, nearest first.

    ``hint``: what is known of the name, said in place of a guess.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        ordered = nearest_first(name, known)
        close = difflib.get_close_matches(name.lower(), [k.lower() for k in ordered], n=1, cutoff=0.6)
        guess = f": {hint}." if hint else f"; did you mean {ordered[0]!r}?" if close else "."
        super().__init__(f"unknown {kind} {name!r}{guess} There are: {', '.join(ordered) or 'none'}.")
        self.name = name
        self.known = ordered


class ConfigError(FidelabError):
    """A settings file is invalid; the message names the place."""


class InputError(FidelabError):
    """A text, a prompt file or a model that cannot be used."""


class UnavailableError(InputError):
    """A remote resource (on a hub) that cannot be fetched now: an axis that needs it is not measurable."""


class CaptureError(FidelabError):
    """A capture that is damaged, foreign or incomplete."""


class MismatchError(CaptureError):
    """Two captures that must not be compared; the message names the mismatch."""


class OtherSchemaError(CaptureError):
    """A capture of another version of fidelab, which may be whole."""


class EngineError(FidelabError):
    """An engine that cannot be opened or cannot do what was asked."""


class NotSupportedError(EngineError):
    """The engine lacks this format or request."""


class MissingPackageError(FidelabError):
    """An optional package that is not installed or is broken; the message names the command that installs it."""


class OutputError(FidelabError):
    """An output folder or file that cannot be written."""


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return all known names, the most similar to ``name`` first, ties in alphabetical order."""
    return sorted(known, key=lambda k: (-difflib.SequenceMatcher(None, name.lower(), k.lower()).ratio(), k))


UNTRUSTED_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading an invalid answer: another process wrote it, perhaps from a server."""
