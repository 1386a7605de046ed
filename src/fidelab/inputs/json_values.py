"""Equality of JSON values, as graders of answers and of calls take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def same_value(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 and 1.0 are, 1 and true are not; texts but for case and outer space.

    Example:
        >>> same_value({"n": [1, " Oslo"]}, {"n": [1.0, "oslo"]})
        True
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, str) and isinstance(other, str):
        return one.strip().casefold() == other.strip().casefold()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)
