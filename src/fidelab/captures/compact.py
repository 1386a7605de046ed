"""Float16 rows of log-probabilities in about 5 bits an entry, with an error of the KL that is known and taken off.

A uniform quantizer of √p spends the same part of ``Σ p·e²`` (``e``: the error of log p) on every entry, so an entry
gets the digits that its probability deserves: steps of log p are ``w = c/√p``, at most :data:`WIDEST`.  Entries whose
step would be as fine as float16's keep their float16 value, and so do ids of the item's own tokens (the next tokens,
whose log-probability is a figure by itself) and what is no finite number.

The grid is shifted by a number in [0, 1) for each token id, which is hashed from the id and the capture's ``seed``: the
error is then independent of the value, and of the error in any other capture.  So

    KL(P̂‖Q̂) = KL(P‖Q) + KL(P̂‖P) + KL(Q̂‖Q) + terms of mean 0,

and ``bias`` holds KL(P̂‖P) of every row, which scoring subtracts.  ``digest`` tells rows that were equal before, whose
KL is exactly 0.  docs/design.md has the error analysis.  Runs inside engine processes: standard library and numpy only.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BIAS = 5e-6
"""Nats: KL(P̂‖P) of a row whose entries all have steps of c/√p; real rows have less, since entries are exact or wide."""

WIDEST = 1.0
"""Nats: the widest step of a log-probability."""

LEAST_VOCABULARY = 4096
"""Rows over fewer tokens are stored as they are."""

COMPACT = "compact."
"""What the names of arrays of compact rows begin with."""

NAMES = ("packed", "ends", "exact", "exact_ends", "lift", "bias", "digest", "form")
"""The arrays of an item's compact rows, each behind :data:`COMPACT`."""

_LOWEST = -60.0  # nats: lower log-probabilities, beyond all that float32 logits give, keep their float16 value
_ESCAPE = 255


def seed_of(key: str) -> int:
    """The seed of a capture's grid, from the text of its key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")


def encode_rows(rows: NDArray[np.float16], tokens: Iterable[int], seed: int) -> dict[str, NDArray[Any]]:
    """Rows ``[n, V]`` of log-probabilities as the arrays :data:`NAMES`; ids in ``tokens`` keep their values."""
    n, vocab = rows.shape
    step = float(np.sqrt(24 * BIAS / vocab))
    shift = _shift(vocab, seed)
    known = np.array(sorted({token for token in tokens if 0 <= token < vocab}), dtype=np.int64)
    packed, exact = [], []
    lift, bias, digest = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32), np.empty(n, dtype=np.uint64)
    for i, row in enumerate(np.ascontiguousarray(rows)):
        digest[i] = int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")
        values = row.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            places = np.floor(_place(values, step) + shift)
            outside = ~((values >= _LOWEST) & (places >= 0) & (places < _ESCAPE))
        outside[known] = True
        codes = np.where(outside, _ESCAPE, places).astype(np.uint8)
        packed.append(_pack(codes))
        exact.append(row[outside])
        decoded = _values(codes, exact[-1], shift, step)
        lift[i] = _lift(decoded, values, ~outside)
        decoded[~outside] += lift[i]
        bias[i] = _bias(decoded, values)
    return {
        "packed": np.frombuffer(b"".join(packed), dtype=np.uint8),
        "ends": np.cumsum([len(one) for one in packed], dtype=np.int64),
        "exact": np.concatenate(exact) if exact else np.empty(0, dtype=np.float16),
        "exact_ends": np.cumsum([len(one) for one in exact], dtype=np.int64),
        "lift": lift,
        "bias": bias,
        "digest": digest,
        "form": np.array([vocab, seed, step], dtype=np.float64),
    }


def decode_rows(arrays: Mapping[str, NDArray[Any]], start: int, stop: int) -> NDArray[np.float32]:
    """Rows ``start`` … ``stop`` - 1 as float32 ``[rows, V]``, not normalised.

    Raises:
        ValueError: the arrays are no compact rows; says why.
    """
    _, vocab = row_shape(arrays)
    _, seed, step = arrays["form"].tolist()
    ends, exact_ends = (arrays[name].tolist() for name in ("ends", "exact_ends"))
    shift = _shift(vocab, int(seed))
    rows = np.empty((max(0, min(stop, len(ends)) - start), vocab), dtype=np.float32)
    for k in range(len(rows)):
        i = start + k
        body = arrays["packed"][ends[i - 1] if i else 0 : ends[i]].tobytes()
        unpacker = zlib.decompressobj(wbits=-15)
        try:
            codes = np.frombuffer(unpacker.decompress(body, vocab + 1), dtype=np.uint8)
        except zlib.error as error:
            raise ValueError(f"row {i} is damaged ({error})") from None
        exact = arrays["exact"][exact_ends[i - 1] if i else 0 : exact_ends[i]]
        if len(codes) != vocab or np.count_nonzero(codes == _ESCAPE) != len(exact):
            raise ValueError(f"row {i} is not of {vocab} entries")
        rows[k] = _values(codes, exact, shift, step)
        rows[k][codes != _ESCAPE] += arrays["lift"][i]
    return rows


def row_shape(arrays: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    """The number of rows and of tokens.

    Raises:
        ValueError: the arrays are no compact rows; says why.
    """
    form = arrays.get("form", np.empty(0))
    vocab, _, step = form.tolist() if form.dtype == np.float64 and form.shape == (3,) else (0.0, 0.0, 0.0)
    if not (1 <= vocab <= 1 << 24 and 0 <= form[1] < 1 << 32 and 0 < step < 1):
        raise ValueError("their form is not known")
    types = dict(zip(NAMES, ("u1", "i8", "f2", "i8", "f4", "f4", "u8", "f8"), strict=True))
    if any(name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype != types[name] for name in NAMES):
        raise ValueError("an array of them is of another type")
    n = len(arrays["digest"])
    for name, body in (("ends", "packed"), ("exact_ends", "exact")):
        ends = arrays[name]
        if len(ends) != n or (np.diff(ends, prepend=0) < 0).any() or (n and ends[-1] != len(arrays[body])):
            raise ValueError("they do not fit each other")
    if not len(arrays["lift"]) == len(arrays["bias"]) == n:
        raise ValueError("they do not fit each other")
    if not (np.isfinite(arrays["lift"]).all() and np.isfinite(arrays["bias"]).all()):
        raise ValueError("their corrections are not finite")
    return n, int(vocab)


def _pack(codes: NDArray[np.uint8]) -> bytes:
    """Huffman codes of a row, without the search for repeats, of which there are none."""
    packer = zlib.compressobj(level=1, wbits=-15, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    return packer.compress(codes.tobytes()) + packer.flush()


def _place(values: NDArray[np.float32], step: float) -> NDArray[np.float32]:
    """Where log-probabilities lie on the grid: steps of :data:`WIDEST` up to √p = step/WIDEST, then of step/√p."""
    knee = 2 * np.log(step / WIDEST)
    first = np.float32(-_LOWEST / WIDEST + knee / WIDEST)  # the knee's place
    low = (values - np.float32(_LOWEST)) / np.float32(WIDEST)
    high = first + (np.exp(values / 2) - np.float32(step / WIDEST)) * np.float32(2 / step)
    return np.asarray(np.where(values < knee, low, high), dtype=np.float32)


def _values(
    codes: NDArray[np.uint8], exact: NDArray[np.float16], shift: NDArray[np.float32], step: float
) -> NDArray[np.float32]:
    """The log-probabilities in the middle of each step; the inverse of :func:`_place`."""
    knee = 2 * np.log(step / WIDEST)
    first = np.float32((-_LOWEST + knee) / WIDEST)
    place = codes + (np.float32(0.5) - shift)
    root = np.maximum((place - first) * np.float32(step / 2), 0) + np.float32(step / WIDEST)
    values = np.where(place < first, place * np.float32(WIDEST) + np.float32(_LOWEST), 2 * np.log(root))
    values[codes == _ESCAPE] = exact
    return np.asarray(values, dtype=np.float32)


def _lift(decoded: NDArray[np.float32], values: NDArray[np.float32], coded: NDArray[np.bool_]) -> float:
    """What added to the coded entries keeps their mass, so that exact entries keep their normalised value."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        before, after = (np.exp(x[coded], dtype=np.float64).sum() for x in (values, decoded))
        lift = np.log(before / after)
    return float(lift) if np.isfinite(lift) else 0.0


def _bias(decoded: NDArray[np.float32], values: NDArray[np.float32]) -> float:
    """KL(P̂‖P) of one row, nats; 0 where it has no distribution."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        gap = np.where(np.isneginf(values), 0, decoded.astype(np.float64) - values)
        weights = np.exp(values, dtype=np.float64)
        weights /= weights.sum()
        raised = weights * np.expm1(gap)  # p̂ before it is normalised, minus p
        total = 1 + raised.sum()
        bias = ((weights + raised) * gap).sum() / total - np.log(total)
    return float(max(bias, 0.0)) if np.isfinite(bias) else 0.0


@lru_cache(maxsize=4)
def _shift(vocab: int, seed: int) -> NDArray[np.float32]:
    """A number in [0, 1) for each token id, by the finalizer of SplitMix64."""
    x = np.arange(vocab, dtype=np.uint64) + (np.uint64(seed) << np.uint64(24))
    for factor, bits in ((0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
        x = x * np.uint64(factor)
        x ^= x >> np.uint64(bits)
    return np.asarray((x >> np.uint64(44)).astype(np.float32) / np.float32(1 << 20))
