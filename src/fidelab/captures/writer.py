"""Writing a capture: temporary folder, parts as they fill, manifest last, rename.

Runs inside engine processes: standard library and numpy only.  A process killed at any moment leaves at most
a ``.partial-*`` folder, which nobody takes for a capture and the next writer of the same key removes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fidelab.captures.container import Array, array_bytes, write_tensors
from fidelab.captures.manifest import MANIFEST, PROBE, SCHEMA, dump_manifest
from fidelab.core import Probe, Vocabulary, canonical_json, probe_record, token_hashes
from fidelab.errors import CaptureError

__all__ = ["CaptureWriter", "store_head", "store_vocabulary", "sweep_partial"]

_PART_BYTES = 32 << 20


class CaptureWriter:
    """Collects the answers to one probe; never holds more than one part (32 MiB) in memory."""

    def __init__(
        self, target: Path, probe: Probe, key: Mapping[str, Any], asked: Mapping[str, Any], vocabulary: Vocabulary
    ) -> None:
        self._target = target
        self._probe = probe
        self._head: dict[str, Any] | None = None
        self._manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "key": dict(key),
            "asked": dict(asked),
            "kind": probe.kind,
            "axis": probe.axis,
            "settings": dict(probe.settings),
            "vocabulary": {"size": vocabulary.size, "sha256": vocabulary.sha256},
        }
        self._items: list[dict[str, Any]] = [{"hash": h, "failed": None} for h in token_hashes(probe.items())]
        self._files: list[dict[str, Any]] = []
        self._pending: dict[str, Array] = {}
        self._pending_bytes = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_partial(target)
        self._folder = target.parent / f".partial-{target.name}-{os.getpid()}"
        self._folder.mkdir()
        body = gzip.compress(canonical_json(probe_record(probe)).encode(), mtime=0)
        (self._folder / PROBE).write_bytes(body)
        self._files.append({"name": PROBE, "sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)})

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        """Store the arrays of one item (window or prompt); each item once, in any order."""
        if "parts" in self._items[item]:
            raise CaptureError(f"item {item} was answered twice")
        self._items[item]["parts"] = len(self._files)
        for name, array in arrays.items():
            self._pending[f"{item}.{name}"] = array
            self._pending_bytes += array_bytes(array)
        if self._pending_bytes >= _PART_BYTES:
            self._flush()

    def fail(self, item: int, reason: str) -> None:
        """Mark one item as unusable; it is counted and shown, never dropped."""
        self._items[item]["failed"] = reason

    def head(self, head: Mapping[str, Any]) -> None:
        """Name the head by which hidden states become logits (what :func:`store_head` returned)."""
        self._head = dict(head)

    def finish(self, estimator: str, ran: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write the manifest, flush to disk and move the folder to its place."""
        self._flush()
        missing = [i for i, item in enumerate(self._items) if "parts" not in item and item["failed"] is None]
        if missing:
            raise CaptureError(f"the engine left {len(missing)} of {len(self._items)} items unanswered, first {missing[0]}")
        manifest = {
            **self._manifest,
            "estimator": estimator,
            "head": self._head,
            "items": self._items,
            "files": self._files,
            "ran": dict(ran),
            "facts": dict(facts),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        path = self._folder / MANIFEST
        with path.open("w", encoding="utf-8") as file:
            file.write(dump_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        if self._target.exists():  # damaged or left by a racing run of the same key
            shutil.rmtree(self._target)
        self._folder.rename(self._target)
        return self._target

    def abort(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"part-{len(self._files) - 1:05d}.safetensors"
        sha, size = write_tensors(self._folder / name, self._pending)
        self._files.append({"name": name, "sha256": sha, "bytes": size})
        self._pending, self._pending_bytes = {}, 0


def sweep_partial(target: Path) -> None:
    """Remove what a killed writer of the same capture left behind."""
    for left in target.parent.glob(f".partial-{target.name}-*"):
        pid = left.name.rpartition("-")[2]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists() and int(pid) != os.getpid()):
            shutil.rmtree(left, ignore_errors=True)


def store_head(store: Path, arrays: Mapping[str, Array], softcap: float | None, scale: float) -> dict[str, Any]:
    """Keep a language-model head once per content under ``store/heads``; returns its record for manifests.

    ``arrays``: ``weight`` [V, d] and, where the head has one, ``bias`` [V].
    """
    folder = store / "heads"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".partial-{os.getpid()}"
    try:
        sha, size = write_tensors(temporary, arrays)
        target = folder / f"{sha[:24]}.safetensors"
        if target.exists() and target.stat().st_size == size:
            temporary.unlink()
        else:
            temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    return {"file": target.name, "sha256": sha, "bytes": size, "softcap": softcap, "scale": scale}


def store_vocabulary(store: Path, vocabulary: Vocabulary, pieces: Sequence[str]) -> None:
    """Keep the token strings once per content under ``store/vocabularies``."""
    target = store / "vocabularies" / f"{vocabulary.sha256[:24]}.json.gz"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".partial-{os.getpid()}")
        temporary.write_bytes(gzip.compress(canonical_json(list(pieces)).encode(), mtime=0))
        temporary.rename(target)
