"""Stored runs, unpacked once: many tests score them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import adapter
from tests.golden.bundle import Bundle
from tests.golden.rows import Row

Score = Callable[[str], list[Row]]


@pytest.fixture(scope="session")
def score(tmp_path_factory: pytest.TempPathFactory) -> Score:
    """Computes the rows of a stored run from its captures."""
    stored: dict[str, tuple[Bundle, Path, Any]] = {}

    def scored(name: str) -> list[Row]:
        if name not in stored:
            room, bundle = tmp_path_factory.mktemp(name), Bundle.read(name)
            stored[name] = (bundle, room, adapter.unpack(bundle, room))
        bundle, room, results = stored[name]
        return adapter.rows(adapter.score(bundle, results, room), name)

    return scored
