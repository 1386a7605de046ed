"""Options of an arm (``--engine-arg key=value``): which an engine has, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from fidelab.errors import UsageError

__all__ = [
    "NAME",
    "NUMBER",
    "SHARE",
    "SWITCH",
    "TOKENS",
    "YES_NO",
    "Value",
    "check_options",
    "flags",
    "is_count",
    "one_of",
    "switched",
]

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


def switched(value: str) -> bool | None:
    """Whether a value switches an option on or off; ``None``: it is another kind of value."""
    return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}.get(value.lower())


def flags(
    options: Iterable[tuple[str, str]],
    renamed: Mapping[str, str] = MappingProxyType({}),
    valued: Collection[str] = (),
    *,
    negates: bool = True,
) -> list[str]:
    """Options of an arm as words of a command line: ``--NAME VALUE``; switches ``--NAME`` or ``--no-NAME``.

    Args:
        options: name and value, in their order.
        renamed: what the command line calls options that have another name there; an empty name: it has none.
        valued: options that take words such as ``on`` and ``auto``, and so are no switches.
        negates: whether the parser knows ``--no-NAME``; where it does not, what is off is left away.
    """
    words: list[str] = []
    for key, value in options:
        name, on = renamed.get(key, key), None if key in valued else switched(value)
        if not name:
            continue
        if on is None:
            words += [f"--{name}", value]
        elif on:
            words.append(f"--{name}")
        elif negates:
            words.append(f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}")
    return words
