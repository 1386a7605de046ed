"""Write a capture: into a temporary folder, part by part, the manifest last, then rename the folder.

Runs inside engine processes: standard library and numpy only.  A process killed at any moment leaves at most a
``.partial-*`` folder, which never counts as a capture, and which the next writer of the same key removes.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fidelab.captures.container import Array, BFloat16, array_bytes, write_tensors
from fidelab.captures.manifest import MANIFEST, PARTIAL, PROBE, SCHEMA, dump_manifest
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.requests import Request, request_record, token_hashes
from fidelab.core import Estimator, Vocabulary, canonical_json, finite, sha256_of
from fidelab.core.errors import CaptureError, FidelabError

PART_BYTES = 32 << 20
"""A part ends with the item that reaches this size."""
_STALE_SECONDS = 86_400  # a file untouched for a day has no writer, even if its process number is in use


class Comparer(Protocol):
    """Compares the parts of a capture that is being written with another capture, and replaces rows by figures."""

    def begin(self, folder: Path, part: int, items: list[int]) -> None:
        """Begin to compare a part of the capture in ``folder``, which holds log-probabilities of these items."""

    def result(self) -> tuple[str, int]:
        """Wait for the comparison; return the SHA-256 and size of the new part, or no hash if the part keeps its rows.

        Raises:
            FidelabError: If nobody compares any more.
        """


class CaptureWriter:
    """Collects the answers to one request; never holds more than one part (32 MiB) and one item in memory.

    ``against``: digest of the key (:func:`~fidelab.captures.manifest.key_digest`) of the capture whose comparison with
    this one may stand in place of rows; empty: rows are wanted.  With a ``comparer``, which compares with that capture,
    at most one part on disk holds rows that were not compared.
    """

    def __init__(
        self,
        target: Path,
        request: Request,
        key: Mapping[str, Any],
        asked: Mapping[str, Any],
        vocabulary: Vocabulary,
        against: str = "",
        comparer: Comparer | None = None,
    ) -> None:
        self._target = target
        self._against, self._comparer = against, comparer
        self._comparing = self._compared = False
        self._head: dict[str, Any] | None = None
        self._manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "key": dict(key),
            "asked": dict(asked),
            "kind": request.kind,
            "axis": request.axis,
            "settings": dict(request.settings),
            "vocabulary": {"size": vocabulary.size, "sha256": vocabulary.sha256},
        }
        self._items: list[dict[str, Any]] = [{"hash": h, "failed": None} for h in token_hashes(request.items())]
        self._files: list[dict[str, Any]] = []
        self._pending: dict[str, Array] = {}
        self._pending_bytes = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_partial(target)
        self._folder = target.parent / _partial(target.name)
        self._folder.mkdir()
        body = gzip.compress(canonical_json(request_record(request)).encode(), mtime=0)
        (self._folder / PROBE).write_bytes(body)
        self._files.append({"name": PROBE, "sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)})

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        """Store the arrays of one item (window or prompt).  Items come in any order, each once.

        The arrays are copied: the engine may reuse their memory.
        """
        record = self._item(item)
        if "parts" in record:
            raise CaptureError(f"item {item} was answered twice")
        if not arrays:
            raise CaptureError(
                f"item {item} was answered with nothing; an item without an answer is to be marked failed"
            )
        record["parts"] = len(self._files)
        for name, array in arrays.items():
            copy: Array = BFloat16(array.bits.copy()) if isinstance(array, BFloat16) else np.array(array)
            self._pending[f"{item}.{name}"] = copy
            self._pending_bytes += array_bytes(copy)
        if self._pending_bytes >= PART_BYTES:
            self._flush()

    def fail(self, item: int, reason: str) -> None:
        """Mark one item as unusable.  It is counted and shown, never dropped."""
        self._item(item)["failed"] = reason

    def head(self, head: Mapping[str, Any]) -> None:
        """Set the head that turns hidden states into logits (the record that :func:`store_head` returned)."""
        self._head = dict(head)

    def finish(self, estimator: str, ran: Mapping[str, Any], facts: Mapping[str, Any], against: str = "") -> Path:
        """Write the manifest, flush to disk and move the folder to its place.

        ``against``: digest of the key of the capture with which the caller's figures compare this one.  They take the
        place of rows that are there.
        """
        self._flush()
        self._await_comparison()
        missing = [i for i, item in enumerate(self._items) if "parts" not in item and item["failed"] is None]
        if missing:
            raise CaptureError(
                f"the engine left {len(missing)} of {len(self._items)} items unanswered, first {missing[0]}"
            )
        other = against or (self._against if self._compared else "")
        compared = {"against": other} if other else {}
        self._write_manifest(estimator=estimator, items=self._items, ran=finite(ran), facts=finite(facts), **compared)
        self._take_place(against)
        return self._target

    def abort(self) -> None:
        """Remove everything that was written so far."""
        with suppress(FidelabError):  # the result of a comparison is not to be taken for that of the next capture's
            self._await_comparison()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _item(self, item: int) -> dict[str, Any]:
        if not 0 <= item < len(self._items):
            raise CaptureError(f"the engine answered item {item} of {len(self._items)}")
        return self._items[item]

    def _flush(self) -> None:
        if not self._pending:
            return
        self._await_comparison()
        part = len(self._files) - 1
        name = f"part-{part:05d}.safetensors"
        sha, size = write_tensors(self._folder / name, self._pending)
        self._files.append({"name": name, "sha256": sha, "bytes": size})
        has_rows = any(array.endswith(f".{Estimator.LOGPROBS}") for array in self._pending)
        self._pending, self._pending_bytes = {}, 0
        if self._comparer is not None and has_rows:
            if not (self._folder / MANIFEST).exists():  # so that the folder can be read already
                unanswered = [{"hash": item["hash"], "failed": "not answered yet"} for item in self._items]
                self._write_manifest(estimator=Estimator.LOGPROBS, items=unanswered, ran={}, facts={})
            here = [n for n, item in enumerate(self._items) if item.get("parts") == part + 1]
            self._comparer.begin(self._folder, part, here)
            self._comparing = True

    def _await_comparison(self) -> None:
        if self._comparer is not None and self._comparing:
            sha, size = self._comparer.result()
            self._comparing = False
            if sha:
                self._files[-1] |= {"sha256": sha, "bytes": size}
                self._compared = True

    def _write_manifest(self, **fields: Any) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        manifest = {**self._manifest, "head": self._head, "files": self._files, "created": created, **fields}
        with (self._folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(dump_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())

    def _take_place(self, against: str) -> None:
        """Rename the folder to the target.

        A folder that exists there is replaced if it is damaged, or has rows in the place of the caller's figures
        (``against``), or figures that cannot stand for rows.  Otherwise it is a racing writer's and stays: its key
        promises equal content, and another process may be reading it.
        """
        old = self._folder.with_name(f"{self._folder.name}-old")
        for last in (False, False, True):
            try:
                if self._target.exists():
                    if is_complete(self._target, self._manifest["key"]):
                        there = Capture(self._target, verify=False)
                        welcome = {against} if against else {"", self._against}
                        if there.against in welcome and not (against and there.has_rows()):
                            self.abort()
                            return
                    self._target.rename(old)
                self._folder.rename(self._target)
                return
            except OSError:  # another writer came in between
                if last:
                    raise
            finally:
                shutil.rmtree(old, ignore_errors=True)


def sweep_partial(target: Path) -> None:
    """Remove files that killed writers of the same capture left."""
    _sweep(target.parent, glob.escape(target.name), but_mine=True)


def _sweep(folder: Path, stem: str, *, but_mine: bool = False) -> None:
    for leftover in folder.glob(f"{PARTIAL}{stem}-*"):
        if not abandoned(leftover, but_mine=but_mine):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def abandoned(path: Path, *, but_mine: bool = False) -> bool:
    """Return whether the writer of this ``.partial-*`` file or folder is gone.

    ``but_mine``: a name with this process' number counts as abandoned.  This is for callers that have not made such a
    name yet, so that an earlier process had the same number.
    """
    match = re.fullmatch(rf"{re.escape(PARTIAL)}.*-(\w+)-(\d+)(-old)?", path.name)
    try:
        idle = time.time() - path.stat().st_mtime
    except OSError:  # removed in the meantime
        return False
    if match is None or idle > _STALE_SECONDS:
        return idle > _STALE_SECONDS
    pid = int(match[2])
    if match[1] != _host():
        return False  # a shared folder: only time can tell
    return but_mine if pid == os.getpid() else not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's, but alive
        pass
    return True


def _partial(stem: str) -> str:
    """Return a temporary name that identifies its process."""
    return f"{PARTIAL}{stem}-{_host()}-{os.getpid()}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", platform.node())[:24] or "host"


@contextmanager
def _temporary_path(folder: Path, stem: str) -> Iterator[Path]:
    """Yield the path of a temporary file in ``folder``, which is created.

    The file is removed afterwards if it still exists, and so are those of processes that have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder, stem)
    temporary = folder / _partial(stem)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def store_head(store: Path, arrays: Mapping[str, Array], softcap: float | None, scale: float) -> dict[str, Any]:
    """Store a language-model head under ``store/heads``, once per content, and return its record for manifests.

    ``arrays``: ``weight`` [V, d] and, if the head has one, ``bias`` [V].
    """
    with _temporary_path(store / "heads", "head") as temporary:
        sha, size = write_tensors(temporary, arrays)
        target = temporary.with_name(f"{sha[:24]}.safetensors")
        if target.is_file() and target.stat().st_size == size and sha256_of(target) == sha:
            target.touch()  # garbage collection spares recently used files
        else:
            temporary.replace(target)
    return {"file": target.name, "sha256": sha, "bytes": size, "softcap": softcap, "scale": scale}


def store_vocabulary(store: Path, vocabulary: Vocabulary, pieces: Sequence[str]) -> None:
    """Store the token strings once per content under ``store/vocabularies``."""
    target = store / "vocabularies" / f"{vocabulary.sha256[:24]}.json.gz"
    if target.exists():
        target.touch()
    else:
        with _temporary_path(target.parent, "vocabulary") as temporary:
            temporary.write_bytes(gzip.compress(canonical_json(list(pieces)).encode(), mtime=0))
            temporary.replace(target)
