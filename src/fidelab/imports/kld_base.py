"""The file of ``llama-perplexity --kl-divergence-base``.

Magic ``_logits_``, then in 32 bits each the tokens per window ``n_ctx``, the size of the vocabulary and the number of
windows, then the tokens of all windows.  Each window has n_ctx - 1 - n_ctx // 2 rows, the first of position n_ctx // 2.
A row is two float32 numbers, scale and least log-probability, and a 16-bit number per id, padded to an even number of
ids: log P = least + scale · number.  Tokens 16 nats and more below the most likely one have the number 0.  Only their
sum is known: the probability that the others leave, two ten-thousandths with SmolLM2-135M.  See
docs/metrics/between-runs.md#imported-results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError
from fidelab.imports.dump_folder import Dump

_MAGIC = b"_logits_"
_HEADER = np.dtype("<i4")
_RANGE_NATS = 16.0  # nats below the most likely token
_STEPS = 65535
_MIN_PROBABILITY = 1e-15  # probability of a token that is cut off, where rounding leaves nothing
_MAX_NUMBER = 1 << 24  # of each number in the header


@dataclass
class BaseFile(Dump):
    """A checked file; the rows of a window are mapped when it is opened."""

    _tokens: NDArray[np.int32] = field(kw_only=True)
    _start: int = field(kw_only=True)  # byte of the first row

    @classmethod
    def read(cls, path: Path) -> BaseFile:
        """Read the header and the tokens.

        Raises:
            InputError: If it is another kind of file, has an impossible header, or is shorter or longer than the header
                says.
        """
        found = cls.begun(path)
        if found is None:
            if not is_base_file(path):
                raise InputError(f"{path} is not a file of llama-perplexity --kl-divergence-base")
            raise InputError(f"{path} ends within its header: llama-perplexity was ended early; write it again")
        size, expected = path.stat().st_size, found._start + len(found.shapes) * found.window_bytes
        if size != expected:
            hint = ": llama-perplexity was ended early" if size < expected else ""
            raise InputError(f"{path} has {size:,} bytes instead of {expected:,}{hint}; write it again")
        return found

    @classmethod
    def begun(cls, path: Path) -> BaseFile | None:
        """Read a file that may still be written; ``None`` until its header and tokens are there.

        Raises:
            InputError: If it begins as another kind of file, or has an impossible header.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(len(_MAGIC) + 3 * _HEADER.itemsize)
                if len(start) < len(_MAGIC) + 3 * _HEADER.itemsize:
                    return None
                if not start.startswith(_MAGIC):
                    raise InputError(f"{path} is not a file of llama-perplexity --kl-divergence-base")
                n_ctx, vocabulary, windows = np.frombuffer(start, _HEADER, offset=len(_MAGIC)).tolist()
                if not (4 <= n_ctx < _MAX_NUMBER and 2 <= vocabulary < _MAX_NUMBER and 1 <= windows < _MAX_NUMBER):
                    what = f"{windows} windows of {n_ctx} tokens over {vocabulary} ids"
                    raise InputError(f"{path} says that it has {what}: it is damaged")
                first_row = len(start) + windows * n_ctx * _HEADER.itemsize
                if size < first_row:
                    return None
                tokens = np.fromfile(file, _HEADER, windows * n_ctx).reshape(windows, n_ctx)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
        shapes = dict.fromkeys(range(windows), (n_ctx - 1 - n_ctx // 2, vocabulary))
        return cls(path, shapes, "llama-perplexity", n_ctx // 2, n_ctx, n_ctx, _tokens=tokens, _start=first_row)

    @property
    def window_bytes(self) -> int:
        """Bytes of the rows of one window."""
        n_rows, vocabulary = self.shapes[0]
        return n_rows * (2 * ((vocabulary + 1) // 2) + 4) * 2

    def complete(self) -> int:
        """Return how many windows are in the file by now, from the first on."""
        return min(len(self.shapes), max(0, self.path.stat().st_size - self._start) // self.window_bytes)

    def tokens(self, number: int) -> NDArray[np.int64]:
        return np.asarray(self._tokens[number], dtype=np.int64)

    def name_of(self, number: int) -> str:
        return f"window {number} of {self.path}"

    def open(self, number: int) -> _BaseRows:
        n_rows, vocabulary = self.shapes[number]
        shape = n_rows, self.window_bytes // n_rows // 2
        offset = self._start + number * self.window_bytes
        try:
            return _BaseRows(np.memmap(self.path, np.dtype("<u2"), "r", offset, shape), vocabulary)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.name_of(number)} cannot be read: {error}") from error


@dataclass(frozen=True)
class _BaseRows:
    mapped: NDArray[np.uint16]
    vocabulary: int

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        scale, least, numbers = self._read(start, stop)
        scores = numbers.astype(np.float32)
        scores *= scale
        scores += least
        unknown = self._cut(scale, numbers)
        count = np.count_nonzero(unknown, axis=-1)[:, None]
        # those that are cut off have the least score here: the sum of the others is that of all without them
        floor = np.exp(least.astype(np.float64))
        known = np.exp(scores).sum(axis=-1, keepdims=True, dtype=np.float64) - count * floor
        # none of them is above the least that is known, which rounding could make of what is left
        share = np.clip((1.0 - known) / np.maximum(count, 1), _MIN_PROBABILITY, floor)
        np.copyto(scores, np.log(share).astype(np.float32), where=unknown)
        return scores

    def unknown(self, start: int, stop: int) -> NDArray[np.bool_]:
        scale, _, numbers = self._read(start, stop)
        return self._cut(scale, numbers)

    def _read(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint16]]:
        """Scale and least log-probability [n, 1], and numbers [n, vocabulary]."""
        raw = self.mapped[start:stop]
        scale, least = np.array(raw[:, :4]).view("<f4").T[..., None]
        return scale, least, np.asarray(raw[:, 4 : 4 + self.vocabulary])

    def _cut(self, scale: NDArray[np.float32], numbers: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """Which tokens are cut off: rows that reach less far than the range hold all of theirs."""
        far: NDArray[np.bool_] = scale.astype(np.float64) * _STEPS > _RANGE_NATS * (1 - 1e-4)
        unknown: NDArray[np.bool_] = (numbers == 0) & far
        return unknown


def is_base_file(path: Path) -> bool:
    """Return whether a file begins like these files."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
