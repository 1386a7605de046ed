"""One pass over the values of tensors: statistics for the rules, without keeping the values.

The maxima of the bits, read as signed and as unsigned integers, give the largest magnitude of either sign, and so
whether anything is infinite or NaN.  These are two reductions without a copy.  Exact counts are made only if something
was found, and for scales, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab_checkpoints.files import RAW, Checkpoint, TensorInfo, to_floats

MAX_EXPERTS = 4096  # experts of a layer

_CHUNK_BYTES = 1 << 20  # bytes that stay in a core's cache between the reductions

_SIGNED = {"BF16": "<i2", "F16": "<i2", "F32": "<i4", "F64": "<i8", "F8_E4M3": "i1", "F8_E5M2": "i1"}
_INFINITE = {  # bits of infinity, or of NaN for E4M3, which has no infinity
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F32": 0x7F80_0000,
    "F64": 0x7FF0_0000_0000_0000,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
}
_SUBNORMAL = 2.0**-14  # float16: below it precision is lost, and
_FLOAT16_UNDERFLOW = 2.0**-25  # up to it, rounding gives zero

# Places of the 16-bit scales within a block, in bytes, of ggml's types; of others the values are not looked at.
_BLOCK_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S"), (0,)),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor's values; for GGUF blocks, of their 16-bit scales (the first of each block).

    Attributes:
        size: number of values.
        nan, inf: number of NaN and of infinite values.
        largest: the largest finite magnitude; of packed integers 0 where all bits are zero, else 1.
        zeros: how many are zero; of weights in floating point, which are not counted, all or none.
        blank: how many packed words are zero or hold the middle code of 4 bits in all places (0x88888888).
        same: whether all stored values have the same bits; of weights in floating point only known of zeros.
        first: the first value.
        smallest, negative, subnormal, vanishing: of scales: the smallest magnitude besides zero; how many are below
            zero, of a magnitude that float16 has at less than full precision, of one that it rounds to zero.
        low, high: of integers: the smallest and the largest value.
    """

    size: int = 0
    nan: int = 0
    inf: int = 0
    largest: float = 0.0
    zeros: int = 0
    blank: int = 0
    same: bool = False
    first: float = 0.0
    smallest: float = 0.0
    negative: int = 0
    subnormal: int = 0
    vanishing: int = 0
    low: int = 0
    high: int = 0

    @property
    def dead(self) -> bool:
        """Whether all values are zero."""
        return self.size > 0 and self.zeros == self.size

    @property
    def finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return not self.nan and not self.inf

    def joined(self, more: Statistics) -> Statistics:
        """Return the statistics of two parts of a tensor together."""
        if not self.size or not more.size:
            return self if self.size else more
        smallest = [value for value in (self.smallest, more.smallest) if value]
        return Statistics(
            size=self.size + more.size,
            nan=self.nan + more.nan,
            inf=self.inf + more.inf,
            largest=max(self.largest, more.largest),
            zeros=self.zeros + more.zeros,
            blank=self.blank + more.blank,
            same=self.same and more.same and self.first == more.first,
            first=self.first,
            smallest=min(smallest, default=0.0),
            negative=self.negative + more.negative,
            subnormal=self.subnormal + more.subnormal,
            vanishing=self.vanishing + more.vanishing,
            low=min(self.low, more.low),
            high=max(self.high, more.high),
        )


def fused(info: TensorInfo) -> bool:
    """Return whether a tensor holds all experts of a layer."""
    named = ".experts." in info.name or "_exps." in info.name
    return named and len(info.shape) in (3, 4) and 1 < info.shape[0] <= MAX_EXPERTS


def slices(info: TensorInfo) -> Iterator[TensorInfo]:
    """Yield the experts of a tensor that holds all experts of a layer, with their numbers in square brackets."""
    count = info.shape[0]
    size = info.nbytes // count if count else 0
    for n in range(count):
        yield replace(info, name=f"{info.name}[{n}]", shape=info.shape[1:], start=info.start + n * size, nbytes=size)


def readable(info: TensorInfo) -> bool:
    """Return whether a tensor's values, or the scales of its blocks, can be read."""
    return info.dtype in RAW or info.dtype in _BLOCK_SCALES


def scan(checkpoint: Checkpoint, info: TensorInfo, *, scale: bool = False) -> Statistics:
    """Read a tensor once.

    ``scale``: the tensor holds scales, so every number is examined.

    Raises:
        InputError: If the file ends early.
    """
    chunks = checkpoint.chunks(info, _CHUNK_BYTES)
    return reduce(Statistics.joined, (_of_chunk(chunk, info, scale) for chunk in chunks), Statistics())


def _of_chunk(chunk: NDArray[Any], info: TensorInfo, scale: bool) -> Statistics:
    if info.dtype in _BLOCK_SCALES:
        return _of_blocks(chunk, info)
    if scale and (info.dtype in _SIGNED or info.dtype in ("F8_E8M0", "U8")):
        return _of_scales(to_floats(chunk, "F8_E8M0" if info.dtype == "U8" else info.dtype))  # of MXFP4
    if info.dtype in _SIGNED:
        return _of_floats(chunk, info.dtype)
    if info.dtype in RAW:
        return _of_integers(chunk)
    return Statistics(size=chunk.size, largest=1.0)


def _of_floats(chunk: NDArray[Any], dtype: str) -> Statistics:
    signed = chunk.view(_SIGNED[dtype])
    unsigned = signed.view(signed.dtype.str.replace("i", "u"))
    sign = 1 << (8 * signed.itemsize - 1)
    top = int(unsigned.max())
    magnitude = max(int(signed.max()), top - sign if top >= sign else 0, 0)
    nan = inf = 0
    if magnitude >= _INFINITE[dtype]:
        values = to_floats(chunk, dtype)
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        finite = values[np.isfinite(values)]
        largest = float(np.abs(finite).max()) if finite.size else 0.0
        return Statistics(size=chunk.size, nan=nan, inf=inf, largest=largest, zeros=0)
    largest = float(to_floats(np.array([magnitude], unsigned.dtype).view(RAW[dtype]), dtype)[0])
    return Statistics(size=chunk.size, largest=largest, zeros=0 if magnitude else chunk.size, same=not magnitude)


def _of_scales(values: NDArray[np.float32]) -> Statistics:
    finite = np.isfinite(values)
    sizes = np.abs(values[finite] if not finite.all() else values)
    live = sizes[sizes > 0]
    nan = int(np.isnan(values).sum())
    return Statistics(
        size=values.size,
        nan=nan,
        inf=values.size - int(finite.sum()) - nan,
        largest=float(sizes.max(initial=0.0)),
        zeros=sizes.size - live.size,
        same=bool((values == values[0]).all()) or nan == values.size,
        first=float(values[0]),
        smallest=float(live.min(initial=np.inf)) if live.size else 0.0,
        negative=int((values < 0).sum()),
        subnormal=int((live < _SUBNORMAL).sum()),
        vanishing=int((live <= _FLOAT16_UNDERFLOW).sum()),
    )


def _of_integers(chunk: NDArray[Any]) -> Statistics:
    low, high = int(chunk.min()), int(chunk.max())
    zeros = chunk.size - int(np.count_nonzero(chunk)) if low <= 0 <= high else 0
    blank = zeros
    if chunk.dtype.kind == "i" and chunk.itemsize == 4:
        blank += int(np.count_nonzero(chunk == np.int32(-0x77777778)))
    return Statistics(
        size=chunk.size,
        largest=float(max(abs(low), abs(high))),
        zeros=zeros,
        blank=blank,
        same=low == high,
        first=float(chunk[0]),
        low=low,
        high=high,
    )


def _of_blocks(chunk: NDArray[np.uint8], info: TensorInfo) -> Statistics:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    words = chunk.view("<u2").reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]][1] // 2)
    first, *others = _BLOCK_SCALES[info.dtype]
    found = _of_floats(np.ascontiguousarray(words[:, first // 2]).view("<f2"), "F16")
    for place in others:  # minima, which may all be zero
        more = _of_floats(np.ascontiguousarray(words[:, place // 2]).view("<f2"), "F16")
        found = replace(
            found,
            nan=found.nan + more.nan,
            inf=found.inf + more.inf,
            largest=max(found.largest, more.largest),
            zeros=found.zeros if more.largest == 0 and more.finite else 0,
        )
    return found
