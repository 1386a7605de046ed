"""Reading a REFRACT report: JSON that may hold bare NaN, with every value checked where it is taken."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, Final

from fidelab.core import KVSpec
from fidelab.errors import FidelabError, InputError
from fidelab.results.record import KVFormats

__all__ = ["READABLE", "Node", "RefractFile", "read_refract"]

READABLE: Final = ("refract.report.v0.2", "refract.report.v0.3")
_MOST = 1_000_000  # tokens of one answer, chunks: more than this is no count


@dataclass(frozen=True)
class Node:
    """A value of the file and its place in it; what is absent has the value None."""

    value: Any
    place: str

    def __getitem__(self, key: str) -> Node:
        if self.value is not None and not isinstance(self.value, dict):
            raise self.wrong("an object")
        return Node((self.value or {}).get(key), f"{self.place}{'' if self.place.endswith(': ') else '.'}{key}")

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def items(self) -> list[Node]:
        """The entries of a list."""
        if self.value is not None and not isinstance(self.value, list):
            raise self.wrong("a list")
        return [Node(value, f"{self.place}[{index}]") for index, value in enumerate(self.value or [])]

    def entries(self) -> Iterator[tuple[str, Node]]:
        """The entries of an object."""
        for key in self.value if isinstance(self.value, dict) else ():
            yield _text(key), self[key]

    def number(self, low: float = -math.inf, high: float = math.inf) -> float | None:
        """A number in ``low … high``; None where it is absent or was not finite."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not low <= self.value <= high:
            span = f" in {low:g} … {high:g}" if math.isfinite(low) or math.isfinite(high) else ""
            raise self.wrong(f"a number{span}")
        return float(self.value)

    def count(self, most: int = _MOST) -> int | None:
        """A whole number in ``0 … most``."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value <= most:
            raise self.wrong(f"a whole number in 0 … {most}")
        return self.value

    def text(self) -> str:
        """A text; empty where it is absent."""
        if self.value is not None and not isinstance(self.value, str):
            raise self.wrong("a text")
        return _text(self.value or "")

    def token_ids(self) -> list[int] | None:
        """A list of token ids."""
        if self.value is None:
            return None
        if not isinstance(self.value, list) or not all(type(entry) is int for entry in self.value):
            raise self.wrong("a list of token ids")
        return list(self.value)

    def wrong(self, wanted: str) -> InputError:
        """The error that says what should stand here."""
        found = repr(self.value)
        return InputError(f"{self.place}: expected {wanted}, found {found if len(found) <= 60 else found[:60] + '…'}")


@dataclass(frozen=True)
class RefractFile:
    """A report of REFRACT.  ``not_finite``: how many NaN and infinities it held, read as absent."""

    path: Path
    schema: str
    sha256: str
    not_finite: int
    root: Node

    @property
    def model(self) -> str:
        """The model's name, without the folders of the machine that ran it."""
        return PureWindowsPath(self.root["model"].text()).name or "unnamed model"  # reads both kinds of separators

    @property
    def backend(self) -> str:
        """The engine; up to schema 0.2 there was llama.cpp alone, and files do not name it."""
        named = self.root["environment"]["backend"].text()
        return named or ("llamacpp" if self.schema.startswith(READABLE[0]) else "unknown")

    @property
    def version(self) -> str | None:
        """REFRACT's version, which older files do not hold."""
        return self.root["framework_version"].text() or None

    def kv(self, side: str) -> KVFormats:
        """Cache formats of ``reference`` or ``candidate``: ``ctk=q8_0,ctv=turbo4``, a spec of ours, or any text."""
        text = self.root[side].text().strip() or "unknown"
        pairs = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        k, v = pairs.pop("ctk", None), pairs.pop("ctv", None)
        if k or v:
            return KVFormats(k=k or "unknown", v=v or "unknown", options=pairs)
        try:
            return KVFormats.from_spec(KVSpec.parse(text))
        except FidelabError:
            return KVFormats(k=text, v=text)

    def axis(self, name: str) -> Node | None:
        """An axis that was measured; the trajectory is also found under its old name, gtm."""
        for alias in _aliases(name):
            skipped = f"{alias}_score" in self.detail and self.detail[f"{alias}_score"].value is None
            if alias in self.root["axes"] and not skipped:
                return self.root["axes"][alias]
        return None

    @property
    def detail(self) -> Node:
        """The breakdown of the composite."""
        return self.root["composite_detail"]

    def score(self, name: str) -> float | None:
        """The score that the file gives for an axis."""
        axis = self.axis(name)
        stated = [self.detail[f"{alias}_score"].number() for alias in _aliases(name)]
        return next((score for score in stated if score is not None), axis["score"].number() if axis else None)


def _aliases(name: str) -> tuple[str, ...]:
    return ("trajectory", "gtm") if name == "trajectory" else (name,)


def read_refract(path: Path) -> RefractFile:
    """Read a report of REFRACT 0.2 or 0.3.

    Raises:
        InputError: unreadable, not JSON, or of another schema; the message names the place.
    """
    not_finite = 0

    def absent(_constant: str) -> None:
        nonlocal not_finite
        not_finite += 1

    def number(text: str) -> float | None:
        value = float(text)
        if math.isfinite(value):
            return value
        absent(text)
        return None

    try:
        raw = path.read_bytes()
        data = json.loads(raw.decode("utf-8-sig"), parse_constant=absent, parse_float=number)
    except OSError as error:
        raise InputError(f"{path}: cannot read the report: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    read = " and ".join(f"{name}.*" for name in READABLE)
    if not isinstance(schema, str):
        raise InputError(f"{path}: not a REFRACT report (it names no schema); read are {read}")
    if not any(schema == name or schema.startswith(f"{name}.") for name in READABLE):
        raise InputError(f"{path}: has schema {_text(schema)!r}; read are {read}")
    root = Node(data, f"{path}: ")
    if not root["axes"].value:
        raise InputError(f"{path}: holds no axis; make the report with at least one")
    return RefractFile(path, _text(schema), hashlib.sha256(raw).hexdigest(), not_finite, root)


def _text(value: str) -> str:
    """Without lone surrogates, which UTF-8 cannot hold."""
    return value.encode("utf-8", "replace").decode()
