"""The error tree.

FidelabError                  anything a user can fix; one line, exit code 2
├── UsageError                a flag, a name or a combination of settings that is invalid
│   └── UnknownNameError      a name that no table has; lists the nearest ones
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
from collections.abc import Iterable, Sequence

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
    "listed",
    "nearest_first",
]


MAX_LISTED = 5
"""Names that an error lists at most."""


class FidelabError(Exception):
    """An error that the user can fix.  The message is one line: what was wrong, where, what to do."""


class UsageError(FidelabError):
    """A flag, a name or a combination of settings is invalid."""


class UnknownNameError(UsageError):
    """A name that no table has.  The message lists the nearest ones.

    ``hint``: what is known of the name, in place of a guess and of the list.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        ordered = nearest_first(name, known)
        close = difflib.get_close_matches(name.lower(), [k.lower() for k in ordered], n=1, cutoff=0.6)
        guess = f": {hint}" if hint else f"; did you mean {ordered[0]!r}?" if close else "."
        super().__init__(f"unknown {kind} {name!r}{guess}{'' if hint else f' {listed(ordered)}'}")
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
    """Return all known names, nearest first: the same beginning counts, then similar letters; ties by alphabet."""
    return sorted(known, key=lambda k: (-_likeness(name.lower(), k.lower()), k))


def listed(names: Sequence[str]) -> str:
    """Return ``There are: a, b.``, or of many names the first ones: ``Nearest: a, b, c, d, e, of 41.``"""
    if len(names) <= MAX_LISTED:
        return f"There are: {', '.join(names) or 'none'}."
    return f"Nearest: {', '.join(names[:MAX_LISTED])}, of {len(names)}."


def _likeness(name: str, other: str) -> float:
    """Return the share of equal letters, and a tenth for each of the first three letters that are equal."""
    shared = next((n for n, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))
    return difflib.SequenceMatcher(None, name, other).ratio() + 0.1 * min(shared, 3)


UNTRUSTED_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading an invalid answer: another process wrote it, perhaps from a server."""
