"""Settings of decode that experiments vary; engines never touch them.  Standard library only.

    with turned(stages=7, registers=168):
        ...  # plans and launches of decode in here have them

0 stands for what :func:`k16v8.kernels.launch.tiles` and the work list choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from k16v8.errors import UsageError

_POWERS = ("tokens", "warps")
_NOT_OF_TILES = ("split_tokens", "merge_stages")


@dataclass
class Knobs:
    """``tokens`` of the cache in a tile, ``warps``, pipeline ``stages``, ``registers`` of a thread at most, tokens of a
    split (``split_tokens``), and stages of the loop that merges splits (``merge_stages``; 1: no load is early)."""

    tokens: int = 0
    warps: int = 0
    stages: int = 0
    registers: int = 0
    split_tokens: int = 0
    merge_stages: int = 0

    @property
    def of_tiles(self) -> dict[str, int]:
        """Those of tiles that are turned."""
        return {name: value for name, value in vars(self).items() if value and name not in _NOT_OF_TILES}


KNOBS = Knobs()


def knobs_of(text: str) -> dict[str, int]:
    """Read settings such as ``stages=7,registers=168``; none of an empty text.

    Raises:
        UsageError: If it is written in another way.
    """
    found = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if not value.isdecimal():
            raise UsageError(f"knobs {word!r}: write NAME=NUMBER, separated by commas")
        found[name] = int(value)
    return found


@contextmanager
def turned(**settings: int) -> Iterator[None]:
    """Turn knobs of this process for a while.

    Raises:
        UsageError: If a knob does not exist, or its value is impossible.
    """
    known = [field.name for field in fields(Knobs)]
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"decode has no knob {name}: it has {', '.join(known)}")
        if value < 0 or (value and name in _POWERS and value & (value - 1)):
            raise UsageError(f"{name} {value}: {'a power of two' if name in _POWERS else 'a whole number'} is wanted")
        if name == "tokens" and 0 < value < 16:
            raise UsageError(f"tokens {value}: a tile has 16 tokens at least")
    before = dict(vars(KNOBS))
    vars(KNOBS).update(settings)
    try:
        yield
    finally:
        vars(KNOBS).update(before)
