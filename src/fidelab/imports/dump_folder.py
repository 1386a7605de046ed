"""Dumped log-probabilities: a folder with a file per window, and the checks before anything is compared."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array, BFloat16, TensorFile, to_float32
from fidelab.core.errors import CaptureError, InputError, MismatchError

KEY: Final = "log_probs"
_NUMBERED = re.compile(r"(0|[1-9]\d*)\.safetensors")
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # zip (as torch.save writes), pickles
_MAX_VOCABULARY = 1 << 24  # of a vocabulary; whole rows are taken into memory
_CHECKED_ROWS = 4  # rows of each file whose probabilities are summed
# Largest |log Σ exp| of a row: rounding to 16 bits moves its entries, and not evenly up and down.
_SUM_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.05}


class WindowRows(Protocol):
    """The rows of one window."""

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return unnormalised log scores [stop - start, vocabulary] in new memory."""

    def unknown(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Return the items of which only the mean is known; ``None`` if all are known."""


@dataclass
class Dump(ABC):
    """Rows of next-token distributions, window by window; ``shapes``: window → (rows, vocabulary).

    ``first`` is the position in the window of the first row; ``n_ctx`` the tokens of a window and ``stride`` the tokens
    between windows, if known.
    """

    path: Path
    shapes: Mapping[int, tuple[int, int]]
    kind: str
    first: int = 0
    n_ctx: int | None = None
    stride: int | None = None

    @property
    def numbers(self) -> list[int]:
        """The windows, in order."""
        return sorted(self.shapes)

    @property
    def vocabulary(self) -> int:
        """Ids per row."""
        return next(iter(self.shapes.values()))[1]

    def tokens(self, number: int) -> NDArray[np.int64] | None:
        """Return the tokens of a window, if they are known."""
        return None

    @abstractmethod
    def name_of(self, number: int) -> str:
        """Return the name of a window in messages."""

    @abstractmethod
    def open(self, number: int) -> WindowRows:
        """Map one window into memory."""

    def facts(self) -> dict[str, Any]:
        """Return the facts for the report's environment."""
        name = self.path.resolve().name
        return {"folder": name, "files": len(self.shapes), "ids": self.vocabulary, "type": self.kind}


@dataclass(frozen=True)
class WindowFile:
    """One mapped file: ``log_probs`` [rows, vocabulary]."""

    path: Path
    array: Array
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and vocabulary."""
        n, vocab = (self.array.bits if isinstance(self.array, BFloat16) else self.array).shape
        return n, vocab

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return some rows as float32 in new memory."""
        if isinstance(self.array, BFloat16):
            return to_float32(BFloat16(self.array.bits[start:stop]))
        return np.array(self.array[start:stop], dtype=np.float32)

    def unknown(self, start: int, stop: int) -> None:
        return None


class DumpFolder(Dump):
    """A checked folder, whose windows have a row for each of their tokens."""

    def name_of(self, number: int) -> str:
        return str(self.path / f"{number}.safetensors")

    def open(self, number: int) -> WindowFile:
        return _open_file(self.path / f"{number}.safetensors")


def open_folder(path: Path) -> DumpFolder:
    """Open a folder: check every file, and the sum of some rows of each.

    Raises:
        InputError: If there is no folder or it has no numbered files, or if a file is a pickle, has rows of a draft
            head, lacks the tensor ``log_probs``, or has rows that are not log-probabilities.  The message names the
            file.
    """
    if not path.is_dir():
        raise InputError(
            f"{path} is not a folder: name one that holds 0.safetensors, 1.safetensors …, or a file that "
            "llama-perplexity --kl-divergence-base wrote"
        )
    files = sorted(entry.name for entry in path.iterdir())
    numbers = sorted(int(match[1]) for name in files if (match := _NUMBERED.fullmatch(name)))
    if not numbers:
        pickles = [name for name in files if name.endswith(_PICKLES)]
        if pickles:
            raise InputError(_pickled(path / pickles[0]))
        holds = f"it holds {', '.join(files[:3])}{' …' if len(files) > 3 else ''}" if files else "it is empty"
        raise InputError(f"{path} holds no 0.safetensors, 1.safetensors …: {holds}")
    shapes: dict[int, tuple[int, int]] = {}
    kinds: dict[str, int] = {}
    for number in numbers:
        file = _open_file(path / f"{number}.safetensors")
        shapes[number] = file.shape
        kinds.setdefault(file.kind, number)
        # Refuse rows that are not log-probabilities; rows with NaN are skipped here, and counted as failed later
        n = file.shape[0]
        for row in sorted({round(place) for place in np.linspace(0, n - 1, _CHECKED_ROWS)}):
            scores = file.rows(row, row + 1)[0].astype(np.float64)
            peak = scores.max()
            if not np.isfinite(peak):
                continue
            total = float(peak + np.log(np.exp(scores - peak).sum()))
            if abs(total) > _SUM_TOLERANCE[file.kind]:
                raise InputError(
                    f"{file.path}: row {row} of {KEY!r} is not normalised (log of its sum is {total:.3g}, not 0): "
                    "these are logits, or log-probabilities of a vocabulary cut later; save log_softmax of the "
                    "whole row"
                )
    in_turn = [shapes[number] for number in numbers]
    even, odd = set(in_turn[::2]), set(in_turn[1::2])
    if len(in_turn) >= 4 and len(even) == len(odd) == 1 and even != odd:
        a, b = (" × ".join(map(str, *side)) for side in (even, odd))
        raise InputError(f"{path}: its {len(in_turn)} files are {a} and {b} in turn: {_DRAFT}")
    first = shapes[numbers[0]][1]
    other = next((number for number in numbers if shapes[number][1] != first), None)
    if other is not None:
        raise InputError(
            f"{path}: {other}.safetensors has {shapes[other][1]} ids per row, {numbers[0]}.safetensors {first}: "
            "files of two models; capture again into an empty folder"
        )
    return DumpFolder(path, shapes, "/".join(kinds))


def pair_windows(ref: Dump, test: Dump) -> None:
    """Check that two dumps hold the same windows.

    Raises:
        MismatchError: If one side has twice as many files, other window numbers, or another number of rows.
    """
    many, few = sorted((ref, test), key=lambda dump: -len(dump.shapes))
    if len(many.shapes) == 2 * len(few.shapes):
        raise MismatchError(
            f"{many.path} has {len(many.shapes)} files for the {len(few.shapes)} windows of {few.path}: {_DRAFT}"
        )
    for dump, other in ((ref, test), (test, ref)):
        missing = sorted(set(dump.shapes) - set(other.shapes))
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise MismatchError(
                f"{other.path} lacks window {missing[0]}{rest}, which {dump.path} has: capture the same windows"
            )
    for number in ref.numbers:
        n_ref, n_test = ref.shapes[number][0], test.shapes[number][0]
        if n_ref != n_test:
            raise MismatchError(
                f"{test.name_of(number)} has {n_test} rows, the reference {n_ref}: "
                "the windows are not the same; capture both with one tokenizer and one window length"
            )

    for number in ref.numbers:
        ours, theirs = ref.tokens(number), test.tokens(number)
        if ours is None or theirs is None:
            continue
        # The first token may be the text's own or the one that begins a sequence, which takes its place.
        if ref.first != test.first or not np.array_equal(ours[1:], theirs[1:]):
            raise MismatchError(
                f"{test.name_of(number)} has other tokens or rows than {ref.name_of(number)}: compare dumps of the "
                "same text, tokenizer and context"
            )


_DRAFT = (
    "draft-head (multi-token prediction) rows are mixed in, which have other distributions; capture again without "
    "speculative decoding, or keep the main head's files (the even-numbered ones), renumbered from 0"
)


def _open_file(path: Path) -> WindowFile:
    if not path.is_file():
        raise InputError(f"{path}: cannot be read: it is not a regular file")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if head.startswith(_MAGIC):
        raise InputError(_pickled(path))
    try:
        tensors = TensorFile(path)
        names = tensors.names()
    except CaptureError as error:
        raise InputError(f"{path} is not a complete safetensors file: {error.__cause__ or error}") from error
    if KEY not in names:
        holding = ", ".join(map(repr, names[:5])) or "nothing"
        raise InputError(f"{path} has no tensor {KEY!r}; it holds {holding}")
    try:
        array = tensors.get(KEY)
    except CaptureError as error:
        raise InputError(f"{path}: tensor {KEY!r} cannot be read ({error})") from error
    values = array.bits if isinstance(array, BFloat16) else array
    kind = "bfloat16" if isinstance(array, BFloat16) else str(values.dtype)
    if kind not in _SUM_TOLERANCE:
        raise InputError(f"{path}: tensor {KEY!r} is of type {kind}; log-probabilities are floating-point numbers")
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"{path}: tensor {KEY!r} has shape {list(values.shape)}; expected [rows, vocabulary]")
    if values.shape[1] > _MAX_VOCABULARY:
        raise InputError(f"{path}: tensor {KEY!r} has {values.shape[1]:,} ids per row, more than any vocabulary")
    return WindowFile(path, array, kind)


def _pickled(path: Path) -> str:
    return (
        f"{path} is a Python pickle or archive, which can run code when it is read, and is never opened here: "
        f"convert it to safetensors (key {KEY!r}) where it was made"
    )
