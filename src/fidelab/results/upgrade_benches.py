"""Benches of schema ``fidelab.report/0`` as measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["upgrade_benches"]


def upgrade_benches(plain: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Bench → its measurement as JSON."""
    return {}
