"""Paths as users write them."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from fidelab.core.errors import InputError


def expand(path: str | Path) -> Path:
    """Return the absolute path of a path that a user wrote.

    Raises:
        InputError: If it names the home of a user who does not exist.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise InputError(f"{path}: this machine has no user {str(path).partition('/')[0][1:]!r}") from None


def is_file(path: Path) -> bool:
    """Return whether a path is that of a file, also where its name comes from a file and no file can have it."""
    try:
        return path.is_file()
    except OSError:  # too long, say
        return False


def expand_existing(value: str, reserved: Collection[str] = ()) -> str:
    """Return the absolute path if ``value`` names a file or folder, else ``value`` itself.

    A reserved name is also returned unchanged.
    """
    return str(expand(value)) if value not in reserved and expand(value).exists() else value


def path_from_here(name: str) -> str:
    """Return an absolute path below the working folder as people write it, relative; any other name as it is."""
    path = Path(name)
    try:
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else name
    except (ValueError, OSError):  # elsewhere, or the working folder is gone
        return name


def command_from_here(command: str) -> str:
    """Return a command of fidelab with paths below the working folder relative; any other command as it is.

    Other programs may take a relative path for a name on a hub.
    """
    if not command.startswith("fidelab "):
        return command
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    for word in dict.fromkeys(words):
        if (short := path_from_here(word)) != word:
            command = command.replace(shlex.quote(word), shlex.quote(short))
    return command
