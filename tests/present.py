"""A value that a test relies on."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """The value, which fails the test where it is None."""
    assert value is not None
    return value
