"""Host memory of a process and its descendants, from Linux's ``/proc``; elsewhere of the process alone, its peak only.

Resident bytes: pages that two processes share count twice, mapped files count as far as they were read.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PEAK, _NOW = "VmHWM", "VmRSS"
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in the unit of getrusage


def resident_bytes() -> int | None:
    """Return the resident bytes of this process and its living descendants now; ``None`` if unknown."""
    return _total(_NOW)


def peak_bytes() -> int:
    """Return the sum of the peaks of resident bytes of this process and each of its living descendants.

    getrusage is avoided where possible: for a process started by vfork its figure includes the peak of the parent,
    and it leaves out living descendants.
    """
    total = _total(_PEAK)
    if total is not None:
        return total
    import resource  # Windows has none, and no engine of these workers either

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def reset_peak() -> None:
    """Begin a new peak of this process, where Linux allows it."""
    with suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5")


def _total(field: str) -> int | None:
    sizes = []
    for pid in _family(os.getpid()):
        with suppress(OSError):  # it ended meanwhile
            lines = (_PROC / str(pid) / "status").read_text().splitlines()
            sizes += [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    return sum(sizes) if sizes else None


def _family(pid: int) -> set[int]:
    """The process and its living descendants."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):  # it ended meanwhile
            stat = (folder / "stat").read_bytes().rpartition(b")")[2]  # after the name, which may hold any byte
            children.setdefault(int(stat.split(None, 2)[1]), []).append(int(folder.name))
    family, generation = {pid}, [pid]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, ())]
        family.update(generation)
    return family
