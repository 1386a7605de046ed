"""Reading captures: memory-mapped, checked against their checksums.

A capture may come from anybody, and a checksum only proves that nobody changed it afterwards.  All its files are
therefore read here, and type, shape and range are checked before anything is allocated.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array, BFloat16, TensorFile, to_float32
from fidelab.captures.manifest import FIGURES, MANIFEST, PARTIAL, PROBE, key_digest, load_manifest
from fidelab.captures.requests import (
    Forced,
    Layerwise,
    Prefill,
    Request,
    RoundedCache,
    RoundedWeights,
    Served,
    Timed,
    request_from_record,
    token_hashes,
)
from fidelab.core import Estimator, Vocabulary, digest, read_file, sha256_of, strict_json
from fidelab.core.errors import CaptureError

ROWS = frozenset((Estimator.HIDDEN, Estimator.LOGPROBS))
"""Names of arrays that are rows over the vocabulary, or become such."""
MAX_LOGPROB = 1e-3  # nats: rounding may raise a log-probability above 0 by this much
MAX_MASS = 1.01  # rounding may raise the sum of a row's probabilities to this
_MAX_UNPACKED_BYTES = 128 << 20  # bytes of an unpacked request or vocabulary: 15 million token ids
_MAX_ANSWER_IDS = 1 << 18  # ids of one answer
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


@dataclass(frozen=True)
class HeadFile:
    """A language-model head on disk: logits = softcap(scale · (hidden @ weightᵀ + bias))."""

    path: Path
    sha256: str
    softcap: float | None
    scale: float

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return ``weight`` [V, d] and ``bias`` [V] or ``None``, as float32 copies in memory."""
        file = TensorFile(self.path)
        weight = file.get("weight")
        bias = file.get("bias") if "bias" in file.names() else None
        shape = _shape(weight)
        if not (_is_float(weight) and len(shape) == 2 and 0 not in shape):
            raise CaptureError(f"{self.path}: 'weight' is not a matrix of numbers [vocabulary, width]; capture again")
        if bias is not None and not (_is_float(bias) and _shape(bias) == shape[:1]):
            raise CaptureError(f"{self.path}: 'bias' does not fit 'weight'; capture again")
        return to_float32(weight, copy=True), None if bias is None else to_float32(bias, copy=True)


class Capture:
    """One finished capture.  ``array`` returns views into the file; nothing is loaded before it is used."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Open a capture folder.  With ``verify``, check all its content, including its head.

        Raises:
            CaptureError: If the folder holds no capture, or the capture was edited or truncated, or has another schema.
                The message names the folder.
        """
        self.folder = folder
        self._parts: dict[int, TensorFile] = {}
        self._names: dict[Path, dict[str, list[str]]] = {}  # of a part's arrays, by item
        self.manifest = load_manifest(folder)
        self.axis: str = self.manifest["axis"]
        self.items: list[dict[str, Any]] = self.manifest["items"]
        self.estimator = Estimator(self.manifest["estimator"])
        self.vocabulary = Vocabulary(**self.manifest["vocabulary"])
        self.against: str = self.manifest.get("against", "")
        """Digest of the key of the capture that this one was compared with before its rows were dropped, or empty."""
        if verify:
            self.verify()
            _ = self.head

    def verify(self) -> None:
        """Compare every file of the folder with its recorded size and SHA-256.

        Raises:
            CaptureError: If a file is missing, truncated or edited.  The message names the capture and the file.
        """
        for entry in self.manifest["files"]:
            path = self.folder / Path(entry["name"]).name
            _check(path, entry, f"capture {self.folder}: {path.name}")

    @cached_property
    def request(self) -> Request:
        """The request, token ids included.

        Raises:
            CaptureError: If the file holds no request, or another one than the manifest says.
        """
        try:
            text = _unpacked(self.folder / PROBE)
            request = request_from_record(strict_json(text))
            said = [self.manifest[name] for name in ("kind", "axis", "settings")]
            own = [request.kind, request.axis, dict(request.settings)]
            if digest(text) != self.manifest["key"]["probe"] or said != own:
                raise ValueError("manifest.json is of another request")
            if token_hashes(request.items()) != [item["hash"] for item in self.items]:
                raise ValueError("manifest.json is of other items")
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CaptureError(
                f"capture {self.folder}: {PROBE} is damaged ({error}); delete the folder and capture again"
            ) from None
        return request

    @cached_property
    def head(self) -> HeadFile | None:
        """The head that turns hidden states into logits; ``None`` if rows are log-probabilities."""
        record = self.manifest["head"]
        if record is None:
            return None
        path = self._shared_file("heads", record["file"])
        _check(path, record, f"capture {self.folder}: heads/{path.name}")
        return HeadFile(path, record["sha256"], record["softcap"], record["scale"])

    def pieces(self) -> list[str]:
        """Return the token strings by id."""
        path = self._shared_file("vocabularies", f"{self.vocabulary.sha256[:24]}.json.gz")
        try:
            pieces = strict_json(_unpacked(path))
            good = isinstance(pieces, list) and all(isinstance(piece, str) for piece in pieces)
        except (OSError, EOFError, ValueError, zlib.error):
            good = False
        if not good or len(pieces) != self.vocabulary.size or digest(*pieces) != self.vocabulary.sha256:
            raise CaptureError(
                f"capture {self.folder}: vocabularies/{path.name} is damaged; delete it and capture again"
            )
        return list(pieces)

    def ids(self, item: int) -> list[int]:
        """Return the token ids that answer one item; empty if the item failed before the first token."""
        return self.ints(item, "ids") if "ids" in self.names(item) else []

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._detokenizer(ids)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.pieces())

    def close(self) -> None:
        """Forget the mapped files, which are opened again when they are read."""
        self._parts.clear()

    def array(self, item: int, name: str) -> Array:
        """Return one stored array of one item.

        Raises:
            CaptureError: If there is no such array, or it does not have the shape and type that its name requires.
        """
        if "parts" not in self.items[item]:
            raise CaptureError(f"capture {self.folder}: item {item} failed and has no {name!r}")
        array = self._part(self.items[item]["parts"] - 1).get(f"{item}.{name}")
        shape, is_float = _shape(array), _is_float(array)
        match name.rpartition(".")[2]:
            case "ids":
                ids = np.asarray(array)
                good = len(shape) == 1 and _is_whole(array) and len(ids) <= _MAX_ANSWER_IDS
                good = good and (not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < 1 << 31))
            case "topk_ids":
                good = len(shape) == 2 and _is_whole(array)
            case "hidden" | "logprobs" | "topk_logprobs":
                good = len(shape) == 2 and shape[1] > 0 and is_float
            case "seconds":
                good = len(shape) == 1 and is_float
            case "states" | "q" | "k" | "v":
                good = len(shape) == 3 and is_float
            case _:
                good = True
        if not good:
            what = f"{name!r} of item {item} is not an array of the kind it should be (its shape is {list(shape)})"
            raise CaptureError(f"capture {self.folder}: {what}; delete the folder and capture again")
        return array

    def names(self, item: int) -> list[str]:
        """Return the names of the arrays stored for one item; empty for a failed item."""
        if "parts" not in self.items[item]:
            return []
        part = self._part(self.items[item]["parts"] - 1)
        if part.path not in self._names:
            by_item: dict[str, list[str]] = {}
            for stored in part.names():
                number, _, name = stored.partition(".")
                by_item.setdefault(number, []).append(name)
            self._names[part.path] = by_item
        return [*self._names[part.path].get(str(item), ())]

    def has_rows(self) -> bool:
        """Return whether an item has rows over the vocabulary, as log-probabilities or as hidden states."""
        return any(ROWS & {*self.names(item)} for item in range(len(self.items)))

    def figures(self, item: int, ref: Capture) -> dict[str, NDArray[Any]]:
        """Return the figures that replace an item's rows: columns ``[rows]`` that compare these rows with ``ref``.

        The result is empty if the rows were kept, or if the item had none.

        Raises:
            CaptureError: If the columns compare with another capture, or do not fit each other.
        """
        if not self.against:
            return {}
        if self.against != key_digest(ref.manifest["key"]):
            raise CaptureError(
                f"capture {self.folder} was compared with another reference, and its rows are gone; "
                "capture again with --keep-rows"
            )
        names = [name for name in self.names(item) if name.startswith(FIGURES)]
        columns = {name.removeprefix(FIGURES): np.asarray(self.array(item, name)) for name in names}
        if len({column.shape for column in columns.values()}) > 1 or any(c.ndim != 1 for c in columns.values()):
            what = f"the figures of item {item} do not fit each other"
            raise CaptureError(f"capture {self.folder}: {what}; delete the folder and capture again")
        return columns

    def array_shape(self, item: int, name: str) -> tuple[int, ...]:
        """Return the shape of one stored array, without reading it."""
        return _shape(self.array(item, name))

    def floats(self, item: int, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Return rows ``start`` … ``stop`` - 1 of one stored array as float32, copied into memory."""
        array = self.array(item, name)
        cut = BFloat16(array.bits[start:stop]) if isinstance(array, BFloat16) else array[start:stop]
        return to_float32(cut, copy=True)

    def ints(self, item: int, name: str) -> list[int]:
        """Return one stored array of token ids."""
        return [int(value) for value in np.asarray(self.array(item, name))]

    @property
    def bytes(self) -> int:
        """Size of the capture's own files, without shared heads and vocabularies."""
        return sum(int(entry["bytes"]) for entry in self.manifest["files"]) + (self.folder / MANIFEST).stat().st_size

    def _part(self, index: int) -> TensorFile:
        if index not in self._parts:
            self._parts[index] = TensorFile(self.folder / f"part-{index:05d}.safetensors")
        return self._parts[index]

    def _shared_file(self, kind: str, name: str) -> Path:
        safe = Path(name).name  # a path from a file may not leave its folder
        for base in (self.folder.parent.parent, self.folder.parent, self.folder):
            if (base / kind / safe).is_file():
                return base / kind / safe
        raise CaptureError(
            f"capture {self.folder}: {kind}/{safe} is missing next to it; copy it along or capture again"
        )


def check_answers(capture: Capture) -> None:
    """Check the types and dimensions of all stored arrays, and the values of top tokens, ids and times.

    Raises:
        CaptureError: If an array is invalid.  The message names the item.
    """
    try:
        expected = len(capture.request.items())
        if len(capture.items) != expected:
            raise ValueError(f"{len(capture.items)} items answer {expected}")
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise CaptureError(f"capture {capture.folder} answers no request ({error}); capture again") from None
    for item in range(len(capture.items)):
        try:
            fault = _fault(capture, item)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            fault = f"cannot be read ({type(error).__name__}: {error})"
        if fault:
            raise CaptureError(f"capture {capture.folder}: item {item} {fault}; delete it and capture again")


def why_no_distribution(logprobs: NDArray[np.floating]) -> str:
    """Return why log-probabilities ``[rows, k]`` cannot be those of top tokens; empty if they can."""
    if not logprobs.size:
        return ""
    worst = float(np.max(logprobs))
    if not worst <= MAX_LOGPROB:  # NaN, too
        return f"has a log-probability of {worst:.4g}, and none is above 0"
    mass = float(np.exp(logprobs.astype(np.float64)).sum(axis=-1).max())
    return f"has probabilities that add up to {mass:.4g}, and none do to more than 1" if mass > MAX_MASS else ""


def _fault(capture: Capture, item: int) -> str:
    """Return what is wrong with the arrays of one item; empty if they are valid."""
    names = capture.names(item)
    if not names:
        return "" if capture.items[item]["failed"] is not None else "has no answer"
    if not isinstance(capture.items[item]["failed"], str | None):
        return "has a reason that is not a text"
    arrays = {name: capture.array(item, name) for name in names if not name.startswith(FIGURES)}
    shapes = {name: (one.bits if isinstance(one, BFloat16) else one).shape for name, one in arrays.items()}
    for name, one in arrays.items():
        kind = "f" if isinstance(one, BFloat16) else one.dtype.kind
        if kind != ("i" if name in ("ids", "topk_ids") else "f"):
            return f"has {name} of type {kind}"
    for name, dimensions in (("ids", 1), ("seconds", 1), *((str(estimator), 2) for estimator in Estimator)):
        if name in shapes and len(shapes[name]) != dimensions:
            return f"has {name} of {len(shapes[name])} dimensions"
    if "ids" in arrays and min(capture.ints(item, "ids"), default=0) < 0:
        return "has a negative token id"
    if ("topk_ids" in arrays or "topk_logprobs" in arrays) and shapes.get("topk_ids") != shapes.get("topk_logprobs"):
        return "has other ids than log-probabilities"
    rows = Prefill | Forced | Served | RoundedWeights | RoundedCache
    if isinstance(capture.request, rows) and not ({"topk_ids", *map(str, Estimator)} & {*names} or capture.against):
        return "" if capture.items[item]["failed"] is not None else "has no rows"
    if isinstance(capture.request, Layerwise) and capture.request.tensors == "states":
        return "" if len(shapes.get("states", ())) == 3 else "has no states of layers"
    if "topk_logprobs" in arrays:
        if len(shapes["topk_logprobs"]) != 2:
            return "has top tokens that are no rows"
        return why_no_distribution(np.asarray(arrays["topk_logprobs"]))
    if isinstance(capture.request, Timed):
        seconds = np.asarray(arrays.get("seconds", np.empty(0)), dtype=np.float64)
        if len(seconds) != 1 + capture.request.n:
            return f"has {len(seconds)} times of {1 + capture.request.n}"
        if not (np.isfinite(seconds).all() and seconds[0] >= 0 and (np.diff(seconds) >= 0).all()):
            return "has times that no clock gives"
    return ""


def is_complete(folder: Path, key: Mapping[str, Any] | None = None, against: str | None = None) -> bool:
    """Return whether the folder holds a finished, undamaged capture with usable answers.

    ``key``: the capture must have this key.  ``against``: a capture without rows is complete if it was compared with
    the capture that has this key digest.
    """
    checked = _complete.get(folder)
    if checked is None or checked.files != _state(checked.files):
        try:
            before = _state(folder.iterdir() if folder.is_dir() else ())
            capture = Capture(folder)
            check_answers(capture)
        except CaptureError:
            return False
        files = {**before, **_state([capture.head.path] if capture.head else ())}
        checked = _Complete(files, capture.manifest["key"], capture.against)
        if time.time_ns() - max(stat[2] for stat in files.values()) > _SETTLED:
            _complete[folder] = checked
    if against is not None and checked.against not in ("", against):
        return False
    return key is None or checked.key == dict(key)


@dataclass(frozen=True)
class _Complete:
    """A capture whose files were all checked, as they are on disk: a run asks for each of its captures many times."""

    files: Mapping[Path, tuple[int, int, int]]
    key: Mapping[str, Any]
    against: str


_complete: dict[Path, _Complete] = {}
_SETTLED = 50_000_000  # ns: a file that changes again within a tick of its clock, which is up to 10 ms, looks the same


def _state(files: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """Inode, size and time of the last change of each file; a missing one has zeros."""
    found = {}
    for path in files:
        try:
            stat = path.stat()
            found[path] = (stat.st_ino, stat.st_size, stat.st_ctime_ns)
        except OSError:
            found[path] = (0, 0, 0)
    return found


def find_captures(root: Path) -> Iterator[Path]:
    """Yield all capture folders under ``root`` (itself included) in name order.

    Damaged captures are included, half-written ones are not.
    """
    folders = {file.parent for name in (MANIFEST, PROBE) for file in root.rglob(name)}
    for folder in sorted(folders):
        if not any(part.startswith(PARTIAL) for part in folder.relative_to(root).parts):
            yield folder


def key_name(capture: Capture) -> str:
    """Return the folder name that :func:`~fidelab.captures.manifest.capture_folder` gives a capture with this key."""
    key = capture.manifest["key"]
    return f"{capture.axis}-{key_digest(key)[:12]}-r{key['replicate']}"


def _unpacked(path: Path) -> bytes:
    """Return the content of a gzip file.

    Raises:
        OSError, EOFError, ValueError, zlib.error: it cannot be read, is damaged, or unpacks to more than 128 MiB.
    """
    unpacker = zlib.decompressobj(wbits=31)
    text = unpacker.decompress(read_file(path, _MAX_UNPACKED_BYTES), _MAX_UNPACKED_BYTES)
    if not unpacker.eof and not unpacker.unconsumed_tail:
        raise EOFError("it is truncated")
    if not unpacker.eof:
        raise ValueError(f"it unpacks to more than {_MAX_UNPACKED_BYTES >> 20} MiB")
    return text


def _shape(array: Array) -> tuple[int, ...]:
    return array.bits.shape if isinstance(array, BFloat16) else array.shape


def _is_float(array: Array) -> bool:
    return isinstance(array, BFloat16) or array.dtype.kind == "f"


def _is_whole(array: Array) -> bool:
    return not isinstance(array, BFloat16) and array.dtype.kind in "iu"


def _check(path: Path, record: Mapping[str, Any], name: str) -> None:
    """Check the size and the hash of a file.

    Raises:
        CaptureError: If they differ from ``record``.  The message calls the file ``name``.
    """
    if not path.is_file() or path.stat().st_size != record["bytes"]:
        raise CaptureError(f"{name} is missing or truncated; delete it and capture again")
    stat = path.stat()
    if _sha256(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) != record["sha256"]:
        raise CaptureError(f"{name} was edited (checksum differs); delete it and capture again")


@lru_cache(maxsize=1 << 16)
def _sha256(path: Path, _inode: int, _size: int, _mtime: int) -> str:
    """Return the SHA-256 of a file.

    A file that did not change is read only once for planning, running and scoring.
    """
    return sha256_of(path)


# The character that stands for each byte: the byte's own if it is printable, else the next from U+0100 on.
_PLAIN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_STAND_INS = {chr(byte): byte for byte in _PLAIN} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}


class Detokenizer:
    """Turns token ids into text by a vocabulary's pieces (the tokenizer's own string for each id), without a tokenizer.

    Three notations for a token's bytes cover what decoders use: ``<0x41>`` (byte tokens), the printable stand-ins for
    bytes of GPT-2's vocabulary (``Ġ`` for a space), and SentencePiece's ``▁`` for a space.  Other pieces are taken
    literally, as special tokens are.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def __call__(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, special tokens included.

        Bytes that are not UTF-8 become U+FFFD, and unknown ids give nothing.
        """
        return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

    @cached_property
    def _uses_gpt2_bytes(self) -> bool:
        """Whether more words begin with GPT-2's space than with SentencePiece's.

        ``Ġ`` is a letter too, but a rare one.  Without words of either kind, it is whether each of the 256 bytes has a
        piece.
        """
        first = [piece[0] for piece in self._pieces if len(piece) > 1]
        gpt2, sentencepiece = first.count("Ġ"), first.count(_SPACE)
        return gpt2 > sentencepiece or (gpt2 == sentencepiece == 0 and _STAND_INS.keys() <= {*self._pieces})

    def _bytes(self, token: int) -> bytes:
        piece = self._pieces[token] if 0 <= token < len(self._pieces) else ""
        if self._uses_gpt2_bytes:
            if all(char in _STAND_INS for char in piece):
                return bytes(_STAND_INS[char] for char in piece)
            return piece.encode("utf-8", errors="replace")
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode("utf-8", errors="replace")
