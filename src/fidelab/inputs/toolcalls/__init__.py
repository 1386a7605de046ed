"""Calls of tools: dialogues with one right next call each, readers of what models write, and what is wrong with it."""
