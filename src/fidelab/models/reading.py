"""Limits on what a plan reads: large weights stay unread, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

FREE_BYTES = 1 << 30
"""Bytes of weights that a plan reads all the same: hashing them takes about a second."""


@dataclass
class Reads:
    """Reads of a plan: bytes of weights that it may still read, and the files that it left unread."""

    left: int = FREE_BYTES
    unread: dict[Path, int] = field(default_factory=dict)

    def may_read(self, path: Path, size: int) -> bool:
        """Return whether a file of weights may be read, and count it."""
        if path in self.unread or size > self.left:
            self.unread[path] = size
            return False
        self.left -= size
        return True

    def may_read_all(self, files: Sequence[Path]) -> bool:
        """Return whether all files of a checkpoint may be read; else none of them is."""
        sizes = {file.resolve(): file.stat().st_size for file in files}
        if sum(sizes.values()) <= self.left:
            return True
        self.unread |= sizes
        return False


_reads: ContextVar[Reads | None] = ContextVar("reads", default=None)


def current() -> Reads | None:
    """Return the limits of the plan that is being made; ``None`` where anything may be read and fetched."""
    return _reads.get()


@contextmanager
def plan_alone() -> Iterator[Reads]:
    """Limit what is read inside of the block, in this thread.

    >>> with plan_alone() as reads:
    ...     model = resolve("./70b")
    >>> sum(reads.unread.values())
    141107412480
    """
    reads = Reads()
    token = _reads.set(reads)
    try:
        yield reads
    finally:
        _reads.reset(token)
