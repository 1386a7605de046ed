"""Typed dataclasses as plain JSON data and back, by their type hints.  Standard library only.

A field is written in the form of its hint: dataclasses and mappings as objects, ``tuple[tuple[str, X], ...]`` as an
object with sorted names, other tuples as lists, an :class:`AsText` as its text.  Fields with metadata :data:`OMIT` are
left out if they have their default.  Data may come from another process or from anybody, so reading checks every field.
Files whose schema is public are read by pydantic models (``results/``, ``config/``) instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Final, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from fidelab.core.errors import UsageError

OMIT: Final[Mapping[str, Any]] = MappingProxyType({"omit": True})
"""Metadata of a field that is left out where it has its default."""
_MAX_INTEGER = 2**63
_PLAIN: Final = frozenset({int, float, str, bool, type(None)})
_T = TypeVar("_T")


class AsText:
    """Base of classes whose plain form is ``str(value)``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that ``str`` returns.

        Raises:
            UsageError: If the text has another form.
        """
        raise NotImplementedError


def to_json(value: Any, kind: Any = None) -> Any:
    """Return plain data of a dataclass, or of a value of type ``kind``."""
    kind = type(value) if kind is None else kind
    if is_dataclass(value) and not isinstance(value, AsText):
        hints = _hints(value.__class__)
        shown = (field for field in fields(value) if not (field.metadata.get("omit") and _is_default(value, field)))
        return {field.name: to_json(getattr(value, field.name), hints[field.name]) for field in shown}
    if _is_pairs(kind):
        return {name: to_json(item) for name, item in value}
    match value:
        case AsText() | Path():
            return str(value)
        case Enum():
            return value.value
        case Mapping():
            return {key: to_json(item) for key, item in value.items()}
        case list() | tuple():  # token ids are most of what is written
            return [*value] if _PLAIN.issuperset(map(type, value)) else [to_json(item) for item in value]
    return value


def from_json(kind: type[_T], data: Any, at: str = "") -> _T:
    """Return the value of a type whose plain form is ``data``; the inverse of :func:`to_json`.

    Numbers must be finite, at least 0 and below 2^63, because they are sizes, counts and seconds.

    Args:
        at: place of the data, for messages.

    Raises:
        ValueError: If the data do not have this form.  The message names the field.
    """
    found: _T = _read(kind, data, at or getattr(kind, "__name__", "it"))
    return found


def fits(data: Any, kind: Any) -> bool:
    """Return whether plain data has the form of a type."""
    try:
        _read(kind, data, "")
    except ValueError:
        return False
    return True


def _read(kind: Any, data: Any, at: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (UnionType, Union):
        for part in parts:
            if fits(data, part):
                return _read(part, data, at)
    elif origin is Literal:
        if data in parts:
            return data
    elif _is_pairs(kind):
        if isinstance(data, dict):
            return tuple(sorted(_read(Mapping[str, get_args(parts[0])[1]], data, at).items()))  # type: ignore[misc]
    elif origin in (list, tuple):
        if isinstance(data, list | tuple):
            whole = parts[0] is int and (origin is list or parts[-1] is ...) and {*map(type, data)} == {int}
            if whole and min(data) >= 0 and max(data) < _MAX_INTEGER:  # else it is said which one
                return origin(data)
            each = parts[:1] * len(data) if origin is list or parts[-1] is ... else parts
            if len(each) == len(data):
                found = (_read(part, item, f"{at}[{n}]") for n, (part, item) in enumerate(zip(each, data, strict=True)))
                return origin(found)
    elif origin in (dict, Mapping):
        if isinstance(data, dict):
            return {_key(parts[0], key, at): _read(parts[1], item, f"{at}.{key}") for key, item in data.items()}
    elif kind in (int, float):
        number = type(data) is int or (kind is float and type(data) is float)
        if number and 0 <= data < _MAX_INTEGER:
            return data
    elif is_dataclass(kind) and not issubclass(kind, AsText):  # type: ignore[arg-type]
        if isinstance(data, dict):
            return _dataclass(kind, data, at)
    elif isinstance(kind, type) and issubclass(kind, Enum | Path | AsText):
        if isinstance(data, str):
            try:
                return kind.parse(data) if issubclass(kind, AsText) else kind(data)
            except (UsageError, ValueError) as error:
                raise ValueError(f"{at}: {error}") from None
    elif isinstance(data, kind):
        return data
    raise ValueError(f"{at} is of another type: {data!r:.60}")


def _dataclass(kind: Any, data: Mapping[str, Any], at: str) -> Any:
    known = {field.name: field for field in fields(kind) if field.init}
    if unknown := data.keys() - known.keys():
        raise ValueError(f"{at} has no field {min(map(str, unknown))!r}")
    needed = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := needed - data.keys():
        raise ValueError(f"{at} lacks {min(missing)!r}")
    return kind(**{name: _read(_hints(kind)[name], value, f"{at}.{name}") for name, value in data.items()})


def _key(kind: Any, key: str, at: str) -> Any:
    """Return the name of an object's entry; numbers are written as text there."""
    if kind is int:
        if not key.isdecimal():
            raise ValueError(f"{at} has a name that is not a number: {key!r:.60}")
        return int(key)
    return key


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_pairs(kind: Any) -> bool:
    """Return whether a type is ``tuple[tuple[str, X], ...]``."""
    parts = get_args(kind) if get_origin(kind) is tuple else ()
    return len(parts) == 2 and parts[1] is ... and get_origin(parts[0]) is tuple and get_args(parts[0])[:1] == (str,)


def _is_default(value: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(value, field.name) == default)
