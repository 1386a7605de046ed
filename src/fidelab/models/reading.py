"""Reads of weights: limits for a plan, which downloads nothing; how far hashing is; files that a run relies on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


@dataclass
class Progress:
    """Bytes of weights that were hashed, and of all that are known to be; ``tell`` gets both from time to time.

    ``announced``: bytes of ``total`` whose files are still to be opened.
    """

    tell: Callable[[int, int], None]
    done: int = 0
    total: int = 0
    announced: int = 0

    def __post_init__(self) -> None:
        self._lock, self._next = threading.Lock(), time.monotonic() + _FIRST_SECONDS

    def add(self, read: int) -> None:
        """Count bytes, and tell if the last time is long ago."""
        with self._lock:
            self.done += read
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _EVERY_SECONDS
                self.tell(self.done, self.total)


_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)
_FIRST_SECONDS, _EVERY_SECONDS = 3.0, 10.0  # before the first word about hashing, and between two


@contextmanager
def told(tell: Callable[[int, int], None]) -> Iterator[None]:
    """Have ``tell`` called with the bytes of weights hashed so far and of all opened files, if it takes seconds."""
    token = _progress.set(Progress(tell))
    try:
        yield
    finally:
        _progress.reset(token)


def hashing(size: int) -> Callable[[int], None]:
    """Announce that a file of this size is hashed. Returns the function that counts its bytes."""
    progress = _progress.get()
    if progress is None:
        return lambda read: None
    with progress._lock:
        known = min(size, progress.announced)
        progress.announced -= known
        progress.total += size - known
    return progress.add


def announce(size: int) -> None:
    """Announce the bytes of files that will be hashed one after another."""
    if (progress := _progress.get()) is not None:
        progress.total += size
        progress.announced += size


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


@dataclass
class Relied:
    """Files of weights whose hashes a run relies on: as they were when it was planned, and which still to hash.

    ``states``: size and time of change of every file.  ``named``: files that the hub's cache names by their hash.
    """

    states: dict[Path, tuple[int, int]] = field(default_factory=dict)
    named: set[Path] = field(default_factory=set)

    def changed(self) -> list[Path]:
        """Return the files that are not what they were: another size or time of change, or gone."""
        return [path for path, state in self.states.items() if state_of(path) != state]


def state_of(path: Path) -> tuple[int, int] | None:
    """Return size and time of change of a file, in bytes and nanoseconds; ``None`` if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


_relied: ContextVar[Relied | None] = ContextVar("relied", default=None)


def relied() -> Relied | None:
    """Return the files that the run that is being planned relies on; ``None`` outside of a run."""
    return _relied.get()


@contextmanager
def relying() -> Iterator[Relied]:
    """Collect the files of weights whose hashes are asked for inside of the block, in this thread and its pools.

    A file of the hub's cache has its name for a hash, which is to be verified beside the run.
    """
    found = Relied()
    token = _relied.set(found)
    try:
        yield found
    finally:
        _relied.reset(token)
