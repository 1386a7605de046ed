"""Reading captures: memory-mapped, checked against their checksums."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array, BFloat16, TensorFile, to_float32
from fidelab.captures.manifest import MANIFEST, PROBE, load_manifest
from fidelab.core import Estimator, Probe, Vocabulary, probe_from_record
from fidelab.errors import CaptureError

__all__ = ["Capture", "HeadFile", "find_captures", "is_complete"]


@dataclass(frozen=True)
class HeadFile:
    """A language-model head on disk: logits = softcap(scale · (hidden @ weightᵀ + bias))."""

    path: Path
    sha256: str
    softcap: float | None
    scale: float

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """``weight`` [V, d] and ``bias`` [V] or ``None``, as float32 in memory of their own."""
        file = TensorFile(self.path)
        weight = np.array(to_float32(file.get("weight")))
        return weight, np.array(to_float32(file.get("bias"))) if "bias" in file.names() else None


class Capture:
    """One finished capture.  ``array`` returns views into the file; nothing is loaded before it is used."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Open a capture folder.

        Raises:
            CaptureError: no capture, edited, truncated, or of another schema; the message names the folder.
        """
        self.folder = folder
        self.manifest = load_manifest(folder)
        self.axis: str = self.manifest["axis"]
        self.items: list[dict[str, Any]] = self.manifest["items"]
        self.estimator = Estimator(self.manifest["estimator"])
        self.vocabulary = Vocabulary(**self.manifest["vocabulary"])
        if verify:
            self.verify()

    def verify(self) -> None:
        """Compare every file with its recorded size and SHA-256."""
        for entry in self.manifest["files"]:
            path = self.folder / Path(entry["name"]).name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise CaptureError(f"capture {self.folder}: {path.name} is missing or truncated; capture again")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise CaptureError(f"capture {self.folder}: {path.name} was edited (checksum differs); capture again")

    @cached_property
    def probe(self) -> Probe:
        """The question, token ids included."""
        return probe_from_record(json.loads(gzip.decompress((self.folder / PROBE).read_bytes())))

    @cached_property
    def head(self) -> HeadFile | None:
        """The head that turns hidden states into logits (``None`` where rows are log-probabilities)."""
        record = self.manifest["head"]
        if record is None:
            return None
        path = self._beside("heads", record["file"])
        if path.stat().st_size != record["bytes"]:
            raise CaptureError(f"capture {self.folder}: heads/{path.name} is truncated; delete it and capture again")
        return HeadFile(path, record["sha256"], record["softcap"], record["scale"])

    def pieces(self) -> list[str]:
        """The token strings by id."""
        path = self._beside("vocabularies", f"{self.vocabulary.sha256[:24]}.json.gz")
        return list(json.loads(gzip.decompress(path.read_bytes())))

    def array(self, item: int, name: str) -> Array:
        """One stored array of one item."""
        part = self.items[item]["parts"] - 1
        return self._part(part).get(f"{item}.{name}")

    def names(self, item: int) -> list[str]:
        """The arrays stored for one item; empty for a failed one."""
        if "parts" not in self.items[item]:
            return []
        prefix = f"{item}."
        found = self._part(self.items[item]["parts"] - 1).names()
        return [name.removeprefix(prefix) for name in found if name.startswith(prefix)]

    def array_shape(self, item: int, name: str) -> tuple[int, ...]:
        """Shape of one stored array, without reading it."""
        array = self.array(item, name)
        return array.bits.shape if isinstance(array, BFloat16) else array.shape

    def floats(self, item: int, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` … ``stop`` - 1 of one stored array as float32, in memory of their own."""
        array = self.array(item, name)
        cut = BFloat16(array.bits[start:stop]) if isinstance(array, BFloat16) else array[start:stop]
        return np.array(to_float32(cut), dtype=np.float32)

    def ints(self, item: int, name: str) -> list[int]:
        """One stored array of token ids."""
        return [int(value) for value in np.asarray(self.array(item, name))]

    @property
    def bytes(self) -> int:
        """Size of the capture's own files (heads and vocabularies, which are shared, not counted)."""
        return sum(entry["bytes"] for entry in self.manifest["files"]) + (self.folder / MANIFEST).stat().st_size

    def _part(self, index: int) -> TensorFile:
        if index not in self._parts:
            self._parts[index] = TensorFile(self.folder / f"part-{index:05d}.safetensors")
        return self._parts[index]

    @cached_property
    def _parts(self) -> dict[int, TensorFile]:
        return {}

    def _beside(self, kind: str, name: str) -> Path:
        safe = Path(name).name  # a path from a file may not leave its folder
        for base in (self.folder.parent.parent, self.folder.parent, self.folder):
            if (base / kind / safe).is_file():
                return base / kind / safe
        raise CaptureError(f"capture {self.folder}: {kind}/{safe} is missing beside it; copy it along or capture again")


def is_complete(folder: Path) -> bool:
    """A finished, undamaged capture lies here."""
    try:
        Capture(folder)
    except CaptureError:
        return False
    return True


def find_captures(root: Path) -> Iterator[Path]:
    """All capture folders under ``root`` (itself included), in name order."""
    for manifest in sorted(root.rglob(MANIFEST)):
        if not any(part.startswith(".partial-") for part in manifest.relative_to(root).parts):
            yield manifest.parent
