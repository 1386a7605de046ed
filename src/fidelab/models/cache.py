"""The user's cache folder, in which entries appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fidelab.core import cache_dir
from fidelab.core.errors import OutputError
from fidelab.core.locks import lock
from fidelab.core.scratch import scratch

__all__ = ["build_once", "cache_dir"]


def build_once(target: Path, build: Callable[[Path], Path]) -> Path:
    """Return ``target``, which ``build`` makes if it is absent.

    ``build`` gets an empty :func:`~fidelab.core.scratch.scratch` folder next to ``target`` and returns the finished
    file or folder in it, which is renamed to ``target``, so that a file of that name is always complete.  Only one
    process builds; others wait for it.

    Raises:
        OutputError: If the folder cannot be written.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                # what a removal that was stopped left, and builds of earlier versions that were killed
                shutil.rmtree(target.with_name(f".{target.name}.part"), ignore_errors=True)
                with scratch("cache", beside=target) as room:
                    build(room).replace(target)
    except OSError as error:
        raise OutputError(
            f"cannot write {target} ({error.strerror or error}); "
            "set FIDELAB_CACHE to a folder that you may write and that has room"
        ) from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it when the process ends, however it ends."""
    with path.open("a") as file:
        lock(file)
        yield
