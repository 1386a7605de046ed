"""Names that stand in the place of a file's path."""

from __future__ import annotations

TEXTS = ("default", "domains", "agents", "wikitext-2")
"""Texts of the package and of the hub."""
PROMPTS = ("default",)
"""Prompt sets of the package."""
