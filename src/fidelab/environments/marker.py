"""The file that says that an environment was made by fidelab, by which recipe, and whether it was completed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MARKER", "read_marker", "write_marker"]

MARKER = "fidelab-environment.json"


def read_marker(folder: Path) -> dict[str, Any] | None:
    """``{"recipe", "versions", "created"}`` of a completed environment; ``None`` of an unfinished or foreign one."""
    try:
        content = json.loads((folder / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("versions") else None


def write_marker(folder: Path, content: Mapping[str, Any]) -> None:
    """Without ``versions`` it says that the environment is being made."""
    part = folder / f".{MARKER}.part"
    part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    part.replace(folder / MARKER)
