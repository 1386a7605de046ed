"""The user's cache folder, in which entries appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fidelab.core import cache_dir
from fidelab.core.errors import OutputError

__all__ = ["build_once", "cache_dir"]


def build_once(target: Path, build: Callable[[Path], Path]) -> Path:
    """Return ``target``, which ``build`` makes if it is absent.

    ``build`` gets an empty scratch folder next to ``target`` and returns the finished file or folder in it,
    which is renamed to ``target``, so that a file of that name is always complete.  The scratch folder is removed
    afterwards, that of a killed process at the next attempt.  Only one process builds; others wait for it.

    Raises:
        OutputError: If the folder cannot be written.
    """
    if target.exists():
        return target
    scratch = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                try:
                    build(scratch).replace(target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {target} ({error.strerror or error}); "
            "set FIDELAB_CACHE to a folder that you may write and that has room"
        ) from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it when the process ends, however it ends."""
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
