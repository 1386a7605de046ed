"""Paths that users write."""

from __future__ import annotations

from pathlib import Path

from fidelab.errors import InputError

__all__ = ["expand"]


def expand(path: str) -> Path:
    """The path as it holds from any folder.

    Raises:
        InputError: it names the home of a user who does not exist.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # "~nobody"
        raise InputError(f"{path}: {error}") from None
