"""Remove captures that are no longer needed, and rows of a capture that no other run reads."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array, TensorFile, write_tensors
from fidelab.captures.manifest import FIGURES, PARTIAL, key_digest
from fidelab.captures.pair import Pair
from fidelab.captures.reader import ROWS, Capture, find_captures
from fidelab.captures.writer import CaptureWriter, abandoned, store_head, store_vocabulary
from fidelab.core import digest
from fidelab.core.errors import CaptureError, InputError, OtherSchemaError
from fidelab.core.locks import lock_byte

_IN_USE = "in-use"  # lock file; each arm's folder has one byte of it
_UNREFERENCED_SECONDS = 3600  # seconds that a head or a vocabulary may wait for its capture to be finished
_CAPTURE_NAME = re.compile(r".+-[0-9a-f]{12}-r\d+")  # names by manifest.capture_folder
_SHARED = {"heads": re.compile(r"[0-9a-f]{24}\.safetensors"), "vocabularies": re.compile(r"[0-9a-f]{24}\.json\.gz")}


def collect_garbage(store: Path, *, doomed: Collection[Path] = (), dry_run: bool = False) -> list[tuple[Path, int]]:
    """Remove files of ended writers, damaged and ``doomed`` captures, then heads and vocabularies without a capture.

    Only files with fidelab's names in fidelab's places are removed, since the folder may hold other files.  Captures of
    other versions are kept, and with them all heads and vocabularies, since their references are not known. Returns the
    path and size of each removed file, or with ``dry_run`` of each file that would be removed.

    Raises:
        InputError: If there is no such folder.
    """
    going: list[Path] = []
    needed: set[str] = set()
    now, foreign = time.time(), False
    if not store.is_dir():
        raise InputError(f"{store} is not a folder of captures; name one with --captures-dir")
    for folder in find_captures(store):
        try:
            # Open a capture to copy; a missing head does not count as damage, since it can still be copied
            capture = Capture(folder, verify=False)
            capture.verify()
        except OtherSchemaError:
            foreign = True
            continue
        except CaptureError:
            going += [folder] if _is_capture_folder(folder, store) else []
            continue
        if folder in doomed and _is_capture_folder(folder, store):
            going.append(folder)
            continue
        needed.add(f"{capture.vocabulary.sha256[:24]}.json.gz")
        if capture.manifest["head"]:
            needed.add(capture.manifest["head"]["file"])
    for kind, form in ({} if foreign else _SHARED).items():
        unused = [p for p in sorted(store.glob(f"{kind}/*")) if form.fullmatch(p.name) and p.name not in needed]
        going += [p for p in unused if now - p.stat().st_mtime > _UNREFERENCED_SECONDS]
    going += [p for p in sorted(store.glob(f"*/{PARTIAL}*")) if abandoned(p)]
    removed = [
        (path, sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size)
        for path in going
    ]
    if not dry_run:
        for path in going:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for folder in {path.parent for path in going}:
            if not any(folder.iterdir()):
                folder.rmdir()
    return removed


def drop_rows(pair: Pair, figures: Iterable[tuple[int, Mapping[str, NDArray[Any]]]]) -> None:
    """Replace the test side's rows (log-probabilities or hidden states) by figures; both captures keep their keys.

    ``figures``: columns ``[rows]`` by test item, which compare each row with the reference side's.  The capture is
    written next to the old one and takes its place when it is complete.

    Raises:
        CaptureError: If rows of an item without figures would be lost.
    """
    test = pair.test
    manifest = test.manifest
    writer = CaptureWriter(test.folder, test.request, manifest["key"], manifest["asked"], test.vocabulary)
    try:
        found = dict(figures)
        for item, record in enumerate(test.items):
            rows = ROWS & {*test.names(item)}
            if rows and item not in found:
                raise CaptureError(f"capture {test.folder}: item {item} was not compared, and its rows are kept")
            if arrays := _without_rows(test, item, found[item] if rows else {}):
                writer.add(item, arrays)
            if record["failed"] is not None:
                writer.fail(item, record["failed"])
        if manifest["head"]:
            writer.head(manifest["head"])
        writer.finish(manifest["estimator"], manifest["ran"], manifest["facts"], key_digest(pair.ref.manifest["key"]))
    except BaseException:
        writer.abort()
        raise


def drop_part_rows(test: Capture, part: int, figures: Mapping[int, Mapping[str, NDArray[Any]]]) -> tuple[str, int]:
    """Replace the rows of a part of a capture that is being written by figures; return the file's SHA-256 and size.

    ``figures``: columns ``[rows]`` of each item of the part.
    """
    path = test.folder / f"part-{part:05d}.safetensors"
    new = path.with_suffix(".new")
    tensors = {
        f"{item}.{name}": array
        for item, columns in figures.items()
        for name, array in _without_rows(test, item, columns).items()
    }
    try:
        sha, size = write_tensors(new, tensors)
        test.close()  # the old file's bytes are free once nothing maps it
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return sha, size


def _without_rows(test: Capture, item: int, columns: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
    """Return the arrays of an item with figures in the place of rows."""
    arrays: dict[str, Array] = {name: test.array(item, name) for name in test.names(item) if name not in ROWS}
    return arrays | {f"{FIGURES}{name}": np.asarray(column) for name, column in columns.items()}


class Readers:
    """Registers this process as a reader of some arms' captures; rows stay while another process reads them.

    Locks end with their process.  Runs of one process cannot be distinguished, nor runs on a file system without locks.
    """

    def __init__(self, store: Path, arms: Iterable[Path]) -> None:
        """Join the readers; wait while another process drops rows.  ``arms``: the arms' folders in the store."""
        store.mkdir(parents=True, exist_ok=True)
        self._file = (store / _IN_USE).open("a+b")
        for arm in {*arms}:
            with suppress(OSError):
                lock_byte(self._file, _byte(arm), shared=True)

    @contextmanager
    def alone(self, arm: Path) -> Iterator[bool]:
        """Yield whether no other process reads this arm's captures.

        If so, no other process can begin to read them until the block ends.
        """
        try:
            lock_byte(self._file, _byte(arm), wait=False)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError:  # the file system has no locks
            yield True
            return
        try:
            yield True
        finally:
            lock_byte(self._file, _byte(arm), shared=True)

    def close(self) -> None:
        """Leave the readers."""
        self._file.close()


def _byte(arm: Path) -> int:
    return int(digest(arm.name)[:12], 16)


def copy_capture(capture: Capture, folder: Path, key: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Rewrite a capture under another key in ``folder``, two levels below a store, with its head and vocabulary.

    ``asked``: the arm of the copy, in the form of manifests.

    Raises:
        CaptureError: If the rows are gone, or the capture is damaged.
    """
    if capture.against:
        raise CaptureError(
            f"capture {capture.folder}: its rows went after a comparison; capture again with --keep-rows"
        )
    store, head = folder.parent.parent, capture.head
    writer = CaptureWriter(folder, capture.request, key, asked, capture.vocabulary)
    try:
        for item, record in enumerate(capture.items):
            if names := capture.names(item):
                writer.add(item, {name: capture.array(item, name) for name in names})
            if record["failed"] is not None:
                writer.fail(item, record["failed"])
        if head is not None:
            file = TensorFile(head.path)
            writer.head(store_head(store, {name: file.get(name) for name in file.names()}, head.softcap, head.scale))
        store_vocabulary(store, capture.vocabulary, capture.pieces())
        writer.finish(str(capture.estimator), capture.manifest["ran"], capture.manifest["facts"])
    except BaseException:
        writer.abort()
        raise


def _is_capture_folder(folder: Path, store: Path) -> bool:
    return folder.parent.parent == store and _CAPTURE_NAME.fullmatch(folder.name) is not None
