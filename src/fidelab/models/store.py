"""List the models of the cache, and remove unused ones.

``models/gguf/`` has two folders for a GGUF file, named by its SHA-256: tokenizer and config (``….text``), and the
converted weights, where an engine needed them.  Both are made again when they are needed.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from fidelab.core.locks import lock
from fidelab.core.scratch import abandoned, sweep
from fidelab.models import embedded
from fidelab.models.cache import cache_dir
from fidelab.models.gguf import ORIGIN

TEXT = ".text"  # the end of the names of folders without weights
_PART, _LOCK = ".part", ".lock"  # of a removal that was stopped; of cache.build_once


@dataclass(frozen=True)
class Listed:
    """Model in the cache: whether it exists, its bytes on disk, and the path that it has or would have.

    ``what`` was made from the GGUF file ``origin``, where that is known; embedded models have neither.
    """

    name: str
    present: bool
    size: int
    path: Path
    what: str = ""
    origin: Path | None = None


def gguf_dir() -> Path:
    """Return the folder of everything converted from GGUF files."""
    return cache_dir() / "models" / "gguf"


def listing() -> list[Listed]:
    """List the embedded models, the default first, and conversions of GGUF files. Nothing is fetched."""
    found = [
        Listed(name, (home / "model.gguf").is_file(), _size(home), home)
        for name, home in ((name, embedded.home(name)) for name in embedded.NAMES)
    ]
    for folder in _gguf_folders():
        origin = _origin(folder)
        name = origin.name if origin else folder.name.removesuffix(TEXT)[:12]
        what = "tokenizer and config" if folder.name.endswith(TEXT) else "converted weights"
        found.append(Listed(name, True, _size(folder), folder, what, origin))
    return found


def collect_garbage(*, older_than_days: float | None = None, dry_run: bool = False) -> list[tuple[Path, int]]:
    """Remove leftovers of killed conversions, and models converted from GGUF files that no longer exist.

    ``older_than_days``: also all other conversions of that age, the embedded models' among them, and never a GGUF
    file.  Returns (path, bytes) of what was removed, or with ``dry_run`` would be.
    """
    homes, now = [embedded.home(name) for name in embedded.NAMES], time.time()
    places = (*homes, gguf_dir())
    doomed = [part for folder in places for part in sorted(folder.glob(f".*{_PART}")) if _abandoned(part)]
    doomed += [part for folder in places for part in abandoned(folder)]
    for folder in (*_gguf_folders(), *(home / embedded.CONVERTED for home in homes)):
        origin = _origin(folder)
        gone = origin is not None and not origin.exists()
        if folder.is_dir() and (
            gone or (older_than_days is not None and now - folder.stat().st_mtime > older_than_days * 86_400)
        ):
            doomed.append(folder)
    removed = [(path, _size(path)) for path in doomed]
    if not dry_run:
        for folder in places:
            sweep(folder)
        for path in filter(Path.exists, doomed):
            if not path.name.endswith(_PART):  # stopped half-way, it must not be taken for a model
                path = path.rename(path.with_name(f".{path.name}{_PART}"))
            shutil.rmtree(path)
    return removed


def _gguf_folders() -> list[Path]:
    return sorted(path for path in gguf_dir().glob("[!.]*") if path.is_dir())


def _origin(folder: Path) -> Path | None:
    note = folder / ORIGIN
    return Path(note.read_text("utf-8").strip()) if note.is_file() else None


def _abandoned(part: Path) -> bool:
    """No process builds there: its lock is free."""
    with part.with_name(part.name.removesuffix(_PART) + _LOCK).open("a") as held:
        try:
            lock(held, wait=False)
        except BlockingIOError:
            return False
    return True


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
