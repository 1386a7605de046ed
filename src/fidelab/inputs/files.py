"""Reading the user's text files."""

from __future__ import annotations

from pathlib import Path

from fidelab.errors import InputError

__all__ = ["DATA", "read_utf8"]

DATA = Path(__file__).parent / "data"


def read_utf8(path: Path, what: str) -> str:
    """The file's text exactly as it is, line ends included.  ``what`` names the file's role in messages.

    Raises:
        InputError: no such file, it cannot be read, or it is not UTF-8 (with line and byte).
    """
    try:
        raw = path.read_bytes()
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
