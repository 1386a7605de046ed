"""Sizes of tests: small for each push, full where FIDELAB_TEST_LONG=1 asks for them."""

from __future__ import annotations

import os

__all__ = ["LONG", "size"]

LONG = os.environ.get("FIDELAB_TEST_LONG", "") == "1"


def size(short: int, long: int) -> int:
    """``long`` where the full size is asked for, else ``short``."""
    return long if LONG else short
