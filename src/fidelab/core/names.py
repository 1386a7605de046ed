"""Names that stand in the place of a file's path."""

from __future__ import annotations

AUTO_TEXT = "auto"
"""The text that suits the engine: ``agents`` on a GPU and on servers, else ``default``."""
TEXTS = (AUTO_TEXT, "agents", "default", "domains", "wikitext-2")
"""Texts of the package and of the hub."""
PROMPTS = ("default",)
"""Prompt sets of the package."""
