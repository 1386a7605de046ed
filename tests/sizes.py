"""Sizes of tests: small in ``make test``, full in ``make test-full`` or where FIDELAB_TEST_LONG=1 asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

LONG = os.environ.get("FIDELAB_TEST_LONG", "") == "1"


def size(short: int, long: int) -> int:
    """``long`` where the full size is asked for, else ``short``."""
    return long if LONG else short


def first(values: Iterable[Any], n: int = 1) -> list[Any]:
    """The values for ``parametrize``, those after the ``n`` first marked ``full``: one promise, several times."""
    rows = list(values)
    kept = rows[:n]
    return kept + [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.full) for row in rows[n:]
    ]
