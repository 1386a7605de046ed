"""A folder of captures as a whole: what lies in it, and what can go."""

from __future__ import annotations

import calendar
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from fidelab.captures.manifest import load_manifest
from fidelab.captures.reader import Capture, find_captures
from fidelab.errors import CaptureError, InputError

__all__ = ["Entry", "collect_garbage", "entries"]

_RACE_SECONDS = 3600  # a partial folder younger than this may belong to a running writer


@dataclass(frozen=True)
class Entry:
    """One capture; ``created`` is ``None`` for a damaged one."""

    folder: Path
    title: str
    size: int
    created: str | None


def entries(store: Path) -> list[Entry]:
    """All captures under a folder, in name order.

    Raises:
        InputError: there is no such folder.
    """
    if not store.is_dir():
        raise InputError(f"{store} is no folder of captures; name one with --captures-dir")
    return [_entry(folder) for folder in find_captures(store)]


def collect_garbage(
    store: Path, *, older_than_days: float | None = None, dry_run: bool = False
) -> list[tuple[Path, int]]:
    """Remove partial folders, damaged and old captures, then heads and vocabularies without a capture.

    Returns the (path, bytes) of what went, or with ``dry_run`` would go.
    """
    doomed: list[Path] = []
    keep_heads: set[str] = set()
    keep_words: set[str] = set()
    now = time.time()
    for entry in entries(store):
        if entry.created is None or (older_than_days is not None and now - _seconds(entry.created) > older_than_days * 86_400):
            doomed.append(entry.folder)
            continue
        manifest = load_manifest(entry.folder)
        keep_words.add(f"{manifest['vocabulary']['sha256'][:24]}.json.gz")
        if manifest["head"]:
            keep_heads.add(manifest["head"]["file"])
    doomed += [p for p in store.rglob(".partial-*") if now - p.stat().st_mtime > _RACE_SECONDS]
    for kind, keep in (("heads", keep_heads), ("vocabularies", keep_words)):
        doomed += [p for p in (store / kind).glob("*") if p.name not in keep and not p.name.startswith(".partial-")]
    removed = [(path, _size(path)) for path in doomed]
    if not dry_run:
        for path in doomed:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for arm in [p for p in store.iterdir() if p.is_dir() and not any(p.iterdir())]:
            arm.rmdir()
    return removed


def _entry(folder: Path) -> Entry:
    try:
        capture = Capture(folder)
    except CaptureError:
        return Entry(folder, "damaged", _size(folder), None)
    asked = capture.manifest["asked"]
    title = f"{capture.axis} {asked['kv']['label']} ({len(capture.items)} items)"
    return Entry(folder, title, _size(folder), capture.manifest["created"])


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def _seconds(created: str) -> float:
    return calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))


