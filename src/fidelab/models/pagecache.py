"""Remove files from the system's page cache, so that a cold start is cold."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_ALLOWED_SHARE = 0.01  # of a file's pages that may stay in the cache: other processes hold some


def evict(files: Iterable[Path]) -> bool:
    """Drop the clean pages of these files from the cache. Returns whether that worked for all of them.

    Read permission is enough.  Pages of a file that another process maps stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    evicted = []
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = resident_share(path)
        evicted.append(share is not None and share <= _ALLOWED_SHARE)
    return bool(evicted) and all(evicted)


def resident_share(path: Path) -> float | None:
    """Return the share of a file's pages that are in the page cache; ``None`` if the system cannot report it."""
    size = path.stat().st_size
    if not size:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        holder = ctypes.c_char.from_buffer(view)  # the mapping's address; private, so that it may be writable
        try:
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(holder)), ctypes.c_size_t(size), vector)
        finally:
            del holder
    return None if failed else sum(page & 1 for page in vector) / pages
