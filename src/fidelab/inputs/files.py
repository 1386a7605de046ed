"""Reading the user's text files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fidelab.core import read_file, strict_json
from fidelab.core.errors import InputError

_MAX_FILE_BYTES = 1 << 30
DATA = Path(__file__).parent / "data"


def read_utf8(path: Path, what: str) -> str:
    """Return the file's exact text, line ends included.  ``what`` names the file's role in messages.

    Raises:
        InputError: If the file does not exist, cannot be read, or is not UTF-8 (the message names line and byte).
    """
    try:
        raw = read_file(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror or error}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{what} {path} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line} "
            f"(byte {error.start} of the file); save it as UTF-8"
        ) from None


def numbered_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, without the space around them, and their numbers from 1."""
    lines = enumerate(read_utf8(path, what).removeprefix("\ufeff").split("\n"), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def json_lines(path: Path, what: str) -> Iterator[tuple[str, int, Any]]:
    """Yield the values of a JSON-lines file, each with its place for messages and its line number.

    Raises:
        InputError: If the file cannot be read, or a line is not JSON (with its number).
    """
    for number, line in numbered_lines(path, what):
        place = f"{what} {path}, line {number}"
        try:
            yield place, number, strict_json(line, not_finite=float)
        except ValueError as error:
            raise InputError(f"{place} is not JSON: {error}") from None
