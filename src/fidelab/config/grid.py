"""The grid of ``vary``: keys of an arm with several values each, and the arms of their Cartesian product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from fidelab.config.arms import arm_fields, split_commas

_MAX_CELLS = 64
_NO_LEVELS = ("name", "python", "image", "pythonpath")

Levels = dict[str, str]
"""One value of each key."""


def parse_vary(texts: list[Any]) -> dict[str, list[str]]:
    """Parse each ``KEY=a,b,…`` into a key and its values.

    Commas inside brackets do not separate values.

    Raises:
        ValueError: If there is no key, or a key is given twice.
    """
    vary: dict[str, list[str]] = {}
    for text in texts:
        key, eq, values = (piece.strip() for piece in str(text).partition("="))
        if not eq or not key:
            raise ValueError(f"{text!r}: write KEY=a,b,…")
        if option_key(key) in vary:
            raise ValueError(f"{key} is given twice; write all its values after one {key}=")
        vary[option_key(key)] = [value.strip() for value in split_commas(values)]
    return vary


def check_vary(vary: Mapping[str, list[str]]) -> None:
    """Check the keys and values of a grid.

    A key with one value applies to all cells.  At least one key must have several values.

    Raises:
        ValueError: If an arm cannot vary in a key, a value is empty or given twice, or there are too many cells.
    """
    for key, values in vary.items():
        if key in _NO_LEVELS:
            raise ValueError(f"{key} cannot be varied; vary kv, engine, model, dtype or an option")
        if not values or "" in values:
            raise ValueError(f"{key} has an empty value; write {key}=a,b,…")
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{key} has the value {twice!r} twice")
        several = next((value for value in values if len(split_commas(value)) > 1), None)
        if several is not None:
            raise ValueError(f"{key}: {several!r} holds a comma; write each value by itself")
    if vary and all(len(values) == 1 for values in vary.values()):
        raise ValueError(f"{next(iter(vary))} has a single value: nothing varies; give two, or use --candidate")
    cells = math.prod(map(len, vary.values()))
    if cells > _MAX_CELLS:
        raise ValueError(f"the grid has {cells} cells, more than {_MAX_CELLS}; vary fewer keys or values")


def levels_of(vary: Mapping[str, list[str]]) -> list[Levels]:
    """Return every combination of values; the last key varies fastest."""
    return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())] if vary else []


def cell_name(levels: Mapping[str, str]) -> str:
    """Return the name of the cell in reports, such as ``attention=eager, kv=int4``."""
    return ", ".join(f"{key}={value}" for key, value in levels.items())


def cell_fields(levels: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the cell's arm."""
    fields: dict[str, Any] = {"name": cell_name(levels)}
    maps: dict[str, dict[str, str]] = {"engine_args": {}, "env": {}}
    for key, value in levels.items():
        level = arm_fields(f"{key}={value}")
        for name, values in maps.items():
            values |= level.pop(name, {})
        fields |= level
    return {**fields, **{name: values for name, values in maps.items() if values}}


def option_key(text: str) -> str:
    """Write an option with dashes; names of variables stay as they are."""
    return text if text.startswith("env.") else text.replace("_", "-")
