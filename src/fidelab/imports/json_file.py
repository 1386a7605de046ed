"""A JSON file of another tool: it may contain NaN, and every value is checked when it is read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.core import read_file, strict_json
from fidelab.core.errors import InputError
from fidelab.results.measurement import Definition, Metric

_MAX_FILE_BYTES = 128 << 20
_MAX_COUNT = 1_000_000  # tokens of one answer, chunks: a larger number is not a count


@dataclass(frozen=True)
class Node:
    """A value of the file and its place in it; an absent value is None."""

    value: Any
    place: str

    def __getitem__(self, key: str) -> Node:
        if self.value is not None and not isinstance(self.value, dict):
            raise self.error("an object")
        return Node((self.value or {}).get(key), f"{self.place}{'' if self.place.endswith(': ') else '.'}{key}")

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def items(self) -> list[Node]:
        """Return the entries of a list."""
        if self.value is not None and not isinstance(self.value, list):
            raise self.error("a list")
        return [Node(value, f"{self.place}[{index}]") for index, value in enumerate(self.value or [])]

    def entries(self) -> Iterator[tuple[str, Node]]:
        """Yield the entries of an object."""
        for key in self.value if isinstance(self.value, dict) else ():
            yield _text(key), self[key]

    def number(self, low: float = -math.inf, high: float = math.inf) -> float | None:
        """Return a number in ``low … high``; None if it is absent or was not finite."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not low <= self.value <= high:
            span = f" in {low:g} … {high:g}" if math.isfinite(low) or math.isfinite(high) else ""
            raise self.error(f"a number{span}")
        return float(self.value)

    def count(self, most: int = _MAX_COUNT) -> int | None:
        """Return a whole number in ``0 … most``."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value <= most:
            raise self.error(f"a whole number in 0 … {most}")
        return self.value

    def text(self) -> str:
        """Return a text; empty if it is absent."""
        if self.value is not None and not isinstance(self.value, str):
            raise self.error("a text")
        return _text(self.value or "")

    def token_ids(self) -> list[int] | None:
        """Return a list of token ids."""
        if self.value is None:
            return None
        if not isinstance(self.value, list) or not all(type(entry) is int for entry in self.value):
            raise self.error("a list of token ids")
        return list(self.value)

    def error(self, expected: str) -> InputError:
        """Return the error that names the place, the expected kind of value and the actual one."""
        text = repr(self.value)
        return InputError(f"{self.place}: expected {expected}, found {text if len(text) <= 60 else text[:60] + '…'}")


@dataclass(frozen=True)
class JsonFile:
    """A file that was read.  ``root``: its content; ``not_finite``: how many NaN and infinities it held."""

    path: Path
    sha256: str
    not_finite: int
    root: Node


def read_json(path: Path, what: str = "file") -> JsonFile:
    """Read a JSON file; NaN and infinities are read as absent.  ``what``: name of the file in messages.

    Raises:
        InputError: If the file cannot be read or is not JSON.  The message names the place.
    """
    return parse_json(path, read_text(path, what))


def read_text(path: Path, what: str = "file") -> str:
    """Read a file of UTF-8 text, with or without a byte order mark.

    Raises:
        InputError: As :func:`read_json`.
    """
    try:
        return read_file(path, _MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot read the {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def parse_json(path: Path, text: str, line: int = 0) -> JsonFile:
    """Return the JSON of a file, or of one of its lines.

    Raises:
        InputError: If it is not JSON.  The message names the place.
    """
    not_finite = 0

    def absent(_constant: str) -> None:
        nonlocal not_finite
        not_finite += 1

    where = f"{path}: " + (f"line {line}: " if line else "")
    try:
        data = strict_json(text, not_finite=absent, half_pairs=True)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {line or error.lineno}, column {error.colno}: {error.msg}") from error
    except ValueError as error:
        raise InputError(f"{where}{error}") from error
    return JsonFile(path, hashlib.sha256(text.encode()).hexdigest(), not_finite, Node(data, where))


def _text(value: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return value.encode("utf-8", "replace").decode()


def metrics_of(figures: Mapping[str, Any], definitions: Mapping[str, Definition]) -> Iterator[Metric]:
    """Yield the available metrics, with the first one as headline."""
    for number, (field, definition) in enumerate(definitions.items()):
        value, ci = figures.get(field), figures.get(f"{field}_ci")
        if value is not None or ci is not None:
            yield definition(value, ci, headline=number == 0)
