"""The file of ``llama-perplexity --kl-divergence-base``.

Magic ``_logits_``, then in 32 bits each the tokens per window ``n_ctx``, the size of the vocabulary and the number of
windows, then the tokens of all windows.  Each window has n_ctx - 1 - n_ctx // 2 rows, the first of position n_ctx // 2.
A row is two float32 numbers, scale and least log-probability, and a 16-bit number per id, padded to an even number of
ids: log P = least + scale · number.  Tokens 16 nats and more below the most likely one have the number 0.  Only their
sum is known: the probability that the others leave, two ten-thousandths with SmolLM2-135M.  See
docs/metrics.md#imported-results.
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
    """A checked file; its rows are mapped."""

    _tokens: NDArray[np.int32] = field(kw_only=True)
    _rows: NDArray[np.uint16] = field(kw_only=True)

    @classmethod
    def read(cls, path: Path) -> BaseFile:
        """Read the header, and map the rest.

        Raises:
            InputError: If it is another kind of file, has an impossible header, or is shorter or longer than the header
                says.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(len(_MAGIC) + 3 * _HEADER.itemsize)
                if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + 3 * _HEADER.itemsize:
                    raise InputError(f"{path} is not a file of llama-perplexity --kl-divergence-base")
                n_ctx, vocabulary, windows = np.frombuffer(start, _HEADER, offset=len(_MAGIC)).tolist()
                if not (4 <= n_ctx < _MAX_NUMBER and 2 <= vocabulary < _MAX_NUMBER and 1 <= windows < _MAX_NUMBER):
                    what = f"{windows} windows of {n_ctx} tokens over {vocabulary} ids"
                    raise InputError(f"{path} says that it has {what}: it is damaged")
                rows, width = windows * (n_ctx - 1 - n_ctx // 2), 2 * ((vocabulary + 1) // 2) + 4
                expected = len(start) + windows * n_ctx * _HEADER.itemsize + rows * width * 2
                if size != expected:
                    hint = ": llama-perplexity was ended early" if size < expected else ""
                    raise InputError(f"{path} has {size:,} bytes instead of {expected:,}{hint}; write it again")
                tokens = np.fromfile(file, _HEADER, windows * n_ctx).reshape(windows, n_ctx)
                mapped = np.memmap(file, np.dtype("<u2"), "r", file.tell(), (rows, width))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
        shapes = dict.fromkeys(range(windows), (n_ctx - 1 - n_ctx // 2, vocabulary))
        return cls(path, shapes, "llama-perplexity", n_ctx // 2, n_ctx, n_ctx, _tokens=tokens, _rows=mapped)

    def tokens(self, number: int) -> NDArray[np.int64]:
        return np.asarray(self._tokens[number], dtype=np.int64)

    def name_of(self, number: int) -> str:
        return f"window {number} of {self.path}"

    def open(self, number: int) -> _BaseRows:
        per_window, vocabulary = self.shapes[number]
        return _BaseRows(self._rows[number * per_window : (number + 1) * per_window], vocabulary)


@dataclass(frozen=True)
class _BaseRows:
    mapped: NDArray[np.uint16]
    vocabulary: int

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        scale, least, numbers, unknown = self._unpack_rows(start, stop)
        scores = least + scale * numbers
        known = np.where(unknown, 0.0, np.exp(scores)).sum(axis=-1, keepdims=True)
        count = np.maximum(unknown.sum(axis=-1, keepdims=True), 1)
        # none of them is above the least that is known, which rounding could make of what is left
        share = np.clip((1.0 - known) / count, _MIN_PROBABILITY, np.exp(least))
        return np.where(unknown, np.log(share), scores).astype(np.float32)

    def unknown(self, start: int, stop: int) -> NDArray[np.bool_]:
        return self._unpack_rows(start, stop)[3]

    def _unpack_rows(
        self, start: int, stop: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.uint16], NDArray[np.bool_]]:
        """Scale and least log-probability [n, 1], numbers, and which of them are cut off."""
        raw = np.array(self.mapped[start:stop])
        scale, least = raw[:, :4].copy().view("<f4").astype(np.float64).T[..., None]
        numbers = raw[:, 4 : 4 + self.vocabulary]
        return scale, least, numbers, (numbers == 0) & (scale * _STEPS > _RANGE_NATS * (1 - 1e-4))


def is_base_file(path: Path) -> bool:
    """Return whether a file begins like these files."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
