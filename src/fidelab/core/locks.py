"""Locks on open files, which the system frees however a process ends.  Standard library only.

``fcntl`` where the system has it.  Windows has ``msvcrt`` alone, whose locks are exclusive and keep others from reading
what they cover: there one byte far behind the end stands for the whole file.  The library filelock is not used, since
this runs in engines' own environments.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import IO

_BEHIND = 1 << 30  # byte that stands for a file on Windows

if sys.platform == "win32":
    import msvcrt

    def lock(file: IO[str] | IO[bytes] | int, *, shared: bool = False, wait: bool = True) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _BEHIND, os.SEEK_SET)
        try:
            while True:
                try:
                    msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                    return
                except OSError as error:
                    if not wait:
                        raise BlockingIOError(errno.EAGAIN, "another process holds it") from error
                    if error.errno != errno.EDEADLK:  # it waits for ten seconds, and then says this
                        raise
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)

    def lock_byte(file: IO[bytes], byte: int, *, shared: bool = False, wait: bool = True) -> None:
        raise OSError(errno.ENOTSUP, "no shared locks on this system")

else:
    try:
        import fcntl
    except ImportError:  # a build of Python without it
        fcntl = None  # type: ignore[assignment]

    def lock(file: IO[str] | IO[bytes] | int, *, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file for this process until it is closed; ``wait``: until another process frees it.

        ``shared``: several processes may hold it so.  On Windows every lock is exclusive.

        >>> with open("file", "a") as file:
        ...     lock(file)

        Raises:
            BlockingIOError: Another process holds it, and ``wait`` is false.
            OSError: The file system has no locks.
        """
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "no locks on this system")
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))

    def lock_byte(file: IO[bytes], byte: int, *, shared: bool = False, wait: bool = True) -> None:
        """Lock one byte of a file, which need not be there, as :func:`lock` does the file.

        Raises:
            BlockingIOError, PermissionError: Another process holds it, and ``wait`` is false.
            OSError: The system or the file system has no such locks.
        """
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "no locks on this system")
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB), 1, byte)
