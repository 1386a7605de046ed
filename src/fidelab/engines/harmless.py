"""Options that a file of somebody else may set without permission, and with which values.

Harmless is a property of an option of one engine, not of a word: ``port`` takes numbers, and so does the length of a
context.  Each engine has a table in ``engines/<name>/harmless.py``, which is its class's ``harmless``.  Options and
values that are not in it need permission; engines add options that load code by name with every release.
``docs/security.md`` is made from these tables.
"""

from __future__ import annotations

import ipaddress
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fidelab.core.errors import UsageError
from fidelab.engines.options import TRUST, switched

_MOST = (1 << 31) - 1  # what the engines' own integers hold
_LONGEST = 4096  # characters of a value that is looked into
_SIZE = re.compile(r"(\d{1,12})(\.\d{1,6})?[kKmMgGtT]i?", re.ASCII)  # 32K, 2.5M, 4G, as vLLM and SGLang read them
_WHOLE = re.compile(r"-?\d{1,12}", re.ASCII)
_DECIMAL = re.compile(r"-?\d{1,12}(\.\d{1,12})?([eE]-?\d{1,3})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][\w+-]{0,63}", re.ASCII)  # no dot and no slash: neither a module, a path nor an address
_MODEL = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}(/[A-Za-z0-9][\w.+-]{0,95})?", re.ASCII)
_SERVED = re.compile(r"[\w.,:+@/-]{1,200}", re.ASCII)


_UNSET = ("", "none", "null", "no", "false", "off", "[]", "{}")


class Values(ABC):
    """Values that an option may have.  ``said``: the same in words."""

    said: str

    @abstractmethod
    def allows(self, value: Any) -> bool:
        """Return whether a value is one of them: a text, or a part of JSON."""


@dataclass(frozen=True)
class Count(Values):
    """Whole numbers from ``least`` to ``most``; with ``sizes``, also ``32K``, ``4G``."""

    least: int = 0
    most: int = _MOST
    sizes: bool = False

    @property
    def said(self) -> str:  # type: ignore[override]
        ends = f" from {self.least}" if self.most == _MOST else f" from {self.least} to {self.most}"
        return f"a whole number{ends}{', or a size as 4G' if self.sizes else ''}"

    def allows(self, value: Any) -> bool:
        text = _number_text(value)
        if self.sizes and _SIZE.fullmatch(text):
            return True
        return _WHOLE.fullmatch(text) is not None and self.least <= int(text) and (int(text) <= self.most or self.sizes)


@dataclass(frozen=True)
class Amount(Values):
    """Numbers from ``least`` to ``most``, decimals included."""

    least: float = 0.0
    most: float = 1e12

    @property
    def said(self) -> str:  # type: ignore[override]
        return f"a number from {self.least:g} to {self.most:g}"

    def allows(self, value: Any) -> bool:
        text = _number_text(value)
        return _DECIMAL.fullmatch(text) is not None and self.least <= float(text) <= self.most


@dataclass(frozen=True)
class Switch(Values):
    """``yes`` and ``no``, as an option of an arm or as JSON has them."""

    said = "yes or no"

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool) or (isinstance(value, str) and switched(value) is not None)


@dataclass(frozen=True)
class Words(Values):
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def said(self) -> str:  # type: ignore[override]
        return ", ".join(f"`{word}`" for word in self.words)

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words


@dataclass(frozen=True)
class Shaped(Values):
    """Texts of a shape, which the engine looks up in a table of its own."""

    pattern: re.Pattern[str]
    said: str

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and self.pattern.fullmatch(value) is not None


@dataclass(frozen=True)
class Listed(Values):
    """A JSON list, or texts with spaces or commas between them, of ``each``."""

    each: Values

    @property
    def said(self) -> str:  # type: ignore[override]
        return f"several of: {self.each.said}"

    def allows(self, value: Any) -> bool:
        if isinstance(value, str):
            value = _json(value, list) if value.startswith("[") else value.replace(",", " ").split()
        return isinstance(value, list) and all(map(self.each.allows, value))


@dataclass(frozen=True)
class Fields(Values):
    """A JSON object with these fields and no others; ``required`` ones must be there."""

    fields: Mapping[str, Values]
    required: tuple[str, ...] = ()

    @property
    def said(self) -> str:  # type: ignore[override]
        return "JSON with " + "; ".join(f"`{name}`: {values.said}" for name, values in self.fields.items())

    def allows(self, value: Any) -> bool:
        data = _json(value, dict) if isinstance(value, str) else value
        return (
            isinstance(data, dict)
            and all(name in data for name in self.required)
            and all(name in self.fields and self.fields[name].allows(inner) for name, inner in data.items())
        )


@dataclass(frozen=True)
class Either(Values):
    """Values of one of several kinds."""

    kinds: tuple[Values, ...]

    @property
    def said(self) -> str:  # type: ignore[override]
        return ", or ".join(kind.said for kind in self.kinds)

    def allows(self, value: Any) -> bool:
        return any(kind.allows(value) for kind in self.kinds)


@dataclass(frozen=True)
class Here(Values):
    """The address of a server on this machine."""

    said = "an address of this machine"

    def allows(self, value: Any) -> bool:
        try:
            url = str(value)
            host = (urlsplit(url if "//" in url else f"//{url}").hostname or "").rstrip(".")
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            return False
        return address.is_loopback or address.is_unspecified


@dataclass(frozen=True)
class Beside(Values):
    """A file in the settings file's own folder, which the caller looks for; else one of ``words``."""

    words: Values | None = None

    @property
    def said(self) -> str:  # type: ignore[override]
        return f"a file in the settings file's own folder{f', or {self.words.said}' if self.words else ''}"

    def allows(self, value: Any) -> bool:
        return self.words is not None and self.words.allows(value)


@dataclass(frozen=True)
class Anything(Values):
    """Every value that the engine takes; files outside the settings file's own folder are asked for."""

    said = "anything that it takes"

    def allows(self, value: Any) -> bool:
        return True


NAME = Shaped(_NAME, "a name without a dot or a slash")
MODEL = Shaped(_MODEL, "a model's name")
SERVED = Shaped(_SERVED, "a name")
COUNT = Count()
TOKENS = Count(sizes=True)
SHARE = Amount(0, 1)
SWITCH = Switch()


@dataclass(frozen=True)
class Harmless:
    """The values that an option may have without permission, and the reason why they are harmless."""

    values: Values
    why: str = field(compare=False)


class Everything(dict[str, Harmless]):
    """A table in which every option is harmless, for one reason: of an engine that loads no code and opens nothing."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._every = Harmless(Anything(), why)

    def __missing__(self, name: str) -> Harmless:
        return self._every


def group(why: str, values: Values, *names: str) -> dict[str, Harmless]:
    """Return rows of options that are harmless for one reason, with the same values."""
    return dict.fromkeys(names, Harmless(values, why))


def refuse_code(engine: str, options: Mapping[str, str], loading: Mapping[str, str]) -> None:
    """Refuse options that import code by its name, unless the arm trusts code (``trust-remote-code=yes``).

    Args:
        engine: the engine's name, for the message.
        options: options of an arm.
        loading: option → pattern of the values that import code; empty: all do.

    Raises:
        UsageError: If one of them is set. The message names it and the remedy.
    """
    if switched(options.get(TRUST, "no")) is True:
        return
    for name, pattern in loading.items():
        value = options.get(name, "")
        if value.lower() not in _UNSET and re.search(pattern, value):
            raise UsageError(
                f"engine {engine}: {name}={value[:80]!r} runs code that it names: add {TRUST}=yes if you trust it, "
                f"or leave {name} out"
            )


def table(harmless: Mapping[str, Harmless]) -> list[str]:
    """Return an engine's table in Markdown, line by line: options of one reason and the same values are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, one in harmless.items():
        rows.setdefault((one.why, one.values.said), []).append(name)
    lines = [
        f"| {', '.join(f'`{name}`' for name in names)} | {said.replace('|', chr(92) + '|')} | {why} |"
        for (why, said), names in rows.items()
    ]
    return ["| options | values | why they are harmless |", "|---|---|---|", *lines]


def _number_text(value: Any) -> str:
    """A number as text; JSON's booleans are no numbers."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _json(text: str, kind: type) -> Any:
    """The list or object in a text; ``None`` if it is none."""
    try:
        value = json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None
