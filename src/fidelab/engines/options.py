"""Options of an arm (``--engine-arg key=value``): which an engine has, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fidelab.errors import UsageError

__all__ = ["NAME", "NUMBER", "SHARE", "SWITCH", "TOKENS", "YES_NO", "Value", "check_options", "is_count", "one_of"]

Value = tuple[Callable[[str], bool], str]  # the check of a value, and what valid values are called


def is_count(text: str) -> bool:
    """A whole number above 0."""
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def one_of(*words: str) -> Value:
    """One of some words."""
    return words.__contains__, " or ".join(words)


NUMBER: Value = (is_count, "a whole number above 0")
TOKENS: Value = (is_count, "a number of tokens")
SHARE: Value = (_is_share, "a share between 0 and 1")
NAME: Value = (bool, "a name")
SWITCH = one_of("on", "off")
YES_NO = one_of("yes", "no")


def check_options(engine: str, options: Sequence[tuple[str, str]], known: Mapping[str, Value]) -> None:
    """Reject unknown options and invalid values.

    Raises:
        UsageError: names the options that exist, or what the value should be.
    """
    for key, value in options:
        if key not in known:
            raise UsageError(f"engine {engine} has no option {key!r}; it has: {', '.join(known)}")
        good, what = known[key]
        if not good(value):
            raise UsageError(f"engine {engine}: {key}={value!r} is not {what}")
