"""Read types, and the numbers of the first layer, of llama.cpp's cache from the saved state of a sequence.

A state is, after a header and the positions of its cells: whether values are stored transposed (uint32), how many
layers there are (uint32); of each layer the keys' ggml type (int32), bytes of a row (uint64) and rows; then the values
in the same way, or transposed: type (int32), bytes of an element (uint32), elements of a row (uint32) and the numbers.
Header and cells differ between builds, so the start is searched from which this layout ends exactly with the state.

A hybrid model's state ends with that of its recurrent layers: how many cells (uint32), of the one cell its position
and sequences (8 bytes), then 0 (uint32), how many layers (uint32), and for each state its ggml type (int32), its bytes
(uint64) and its numbers, up to the end.

``received`` rests on the graph: its attention must read views of the cache in the asked type.

The first layer's keys and values do not depend on the cache, so that those of an f32 cache are the input of any other;
where llama.cpp rotates them, multiplied by a Hadamard matrix whose size is a power of two.  Of the other layers the
types are compared, not the content.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fidelab.engines.llamacpp.library import GGML_TYPES

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_TYPES = {number: name for name, (number, _, _) in GGML_TYPES.items()}
# The largest error in shares of a block's largest magnitude: half a step, a whole one where codes end before it.  The
# steps of q8_0 are so small that rounding the scale to float16 matters next to them.
_BOUND = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11, "q5_1": 1 / 31, "q5_0": 1 / 16}
_BOUND |= {"q4_1": 1 / 15, "q4_0": 1 / 8, "iq4_nl": 0.15}
_SLACK = 1.05  # of headers in float16
_HEADER = {"q8_0": 1, "q5_1": 2, "q5_0": 1, "q4_1": 2, "q4_0": 1, "iq4_nl": 1}  # float16 numbers of a block
_BLOCK = 32
_CELL = 12  # bytes before the states: how many cells there are, and the one
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


@dataclass(frozen=True)
class CacheSide:
    """Keys or values of the first layer. ``kind`` is ggml's number for their type, ``rows`` [tokens, bytes].

    ``kinds``: the types of all layers.
    """

    kind: int
    rows: Bytes
    kinds: frozenset[int] = frozenset()


def read_state(state: bytes, tokens: int, layers: int) -> tuple[CacheSide, CacheSide] | None:
    """Read keys and values of the first layer; ``None`` if the state is laid out in another way, or not one cache."""
    for start in range(0, min(len(state), 4096 + 64 * tokens) - 8, 4):
        transposed, count = struct.unpack_from("<II", state, start)
        if transposed in (0, 1) and count == layers and (sides := _sides(state, start + 8, tokens, layers, transposed)):
            return sides
    return None


def read_recurrent(state: bytes, layers: int) -> tuple[list[tuple[str, int]], int] | None:
    """Return the type and bytes of each state of the recurrent layers, and the bytes of this part of a saved state.

    ``None`` if it is laid out in another way.
    """
    for start in range(_CELL, min(len(state), 4096) - 8, 4):
        if struct.unpack_from("<II", state, start) == (0, layers) and (found := _recurrent(state, start + 8)):
            return found, len(state) - start + _CELL
    return None


def _recurrent(state: bytes, at: int) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    while at < len(state):
        try:
            kind, size = struct.unpack_from("<iQ", state, at)
        except struct.error:
            return []
        at += 12 + size
        if kind not in _TYPES or at > len(state):
            return []
        found.append((_TYPES[kind], size))
    return [(kind, size) for kind, size in found if size]  # a convolution has no second state


def _sides(state: bytes, at: int, tokens: int, layers: int, transposed: int) -> tuple[CacheSide, CacheSide] | None:
    firsts: list[CacheSide] = []
    kinds: tuple[set[int], set[int]] = (set(), set())
    try:
        for of_side, columns in zip(kinds, (0, transposed), strict=True):
            for layer in range(layers):
                if columns:
                    kind, size, width = struct.unpack_from("<iII", state, at)
                    shape = (width, tokens * size)
                    at += 12
                else:
                    kind, row = struct.unpack_from("<iQ", state, at)
                    shape = (tokens, row)
                    at += 12
                size_all = shape[0] * shape[1]
                if kind not in _TYPES or not 0 < size_all <= len(state) - at:
                    return None
                if layer == 0:
                    raw = np.frombuffer(state, np.uint8, size_all, at).reshape(shape)
                    if columns:
                        raw = raw.reshape(width, tokens, size).swapaxes(0, 1).reshape(tokens, width * size)
                    firsts.append(CacheSide(kind, raw))
                of_side.add(kind)
                at += size_all
    except struct.error:
        return None
    if at != len(state):
        return None
    keys, values = (replace(side, kinds=frozenset(of_side)) for side, of_side in zip(firsts, kinds, strict=True))
    return keys, values


def proof(
    asked: tuple[str, str],
    state: tuple[CacheSide, CacheSide] | None,
    exact: tuple[CacheSide, CacheSide] | None,
    rotated: tuple[bool, bool],
    read: Mapping[str, Collection[str]],
) -> dict[str, str]:
    """Return ``proof`` of a cache whose first layer is ``state``, given the state ``exact`` with f32 for both sides.

    ``read``: the types in which the graph's operations read keys (``k``) and values (``v``) of the cache.
    """
    received = "shown"
    for name, kinds, word in zip(asked, (read["k"], read["v"]), ("keys", "values"), strict=True):
        if {*kinds} != {name}:
            sentence = (
                f"reads {word} as {' and '.join(sorted(kinds))}" if kinds else "shows no operation that reads the cache"
            )
            received = f"open: the graph {sentence}"
            break
    if state is None or exact is None:
        open_ = "open: the saved state has a layout that is not known"
        return {"received": received, "stored": open_, "named": open_}
    result = {"received": received, "stored": "shown", "named": "shown"}
    for name, side, truth, turned, word in zip(asked, state, exact, rotated, ("keys", "values"), strict=True):
        original = truth.rows.copy().view(np.float32)
        values = [_turned(original, size) for size in _sizes(original.shape[1])] if turned else [original]
        kind = _TYPES[side.kind]
        alike = [other for other in _TYPES.values() if _bytes(other, original.shape[1]) == side.rows.shape[1]]
        best = {other: min(_error(decoded(side.rows, other), x, other) for x in values) for other in alike}
        nearest = min(best, key=lambda other: best[other], default=None)
        if kind != name or nearest != name:
            return result | {"named": f"refuted: {word} of the first layer are {nearest or kind}, not {name}"}
        if others := sorted(_TYPES[other] for other in side.kinds - {side.kind}):
            return result | {"named": f"refuted: {word} of some layers are {others[0]}, not {name}"}
        if best[name] > 1:
            return result | {
                "stored": f"refuted: {word} of the first layer are not those that came, as {name} has them"
            }
    return result


def _error(values: Floats, original: Floats, name: str) -> float:
    """The largest error relative to the bound of the format for its block; infinite for numbers that are not finite."""
    if values.shape != original.shape or not np.isfinite(values).all():
        return float("inf")
    size = _BLOCK if name in _HEADER else 1
    blocks = np.abs(original).reshape(len(original), -1, size)
    allowed = _SLACK * _BOUND[name] * blocks.max(-1, keepdims=True) + np.float32(2**-24 if _BOUND[name] else 0)
    error = np.abs(values - original).reshape(blocks.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nan_to_num(error / allowed, nan=0.0, posinf=np.inf).max())


def _sizes(width: int) -> list[int]:
    return [1 << power for power in range(4, 13) if width % (1 << power) == 0]


def _turned(x: Floats, size: int) -> Floats:
    """Rows times the normalised Hadamard matrix of this size, group by group."""
    matrix = np.ones((1, 1), dtype=np.float64)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned = x.reshape(-1, size).astype(np.float64) @ (matrix / np.sqrt(size))
    return np.asarray(turned.reshape(x.shape), dtype=np.float32)


def _bytes(name: str, width: int) -> int:
    """Bytes of a row of ``width`` values; -1 where they do not fill whole blocks."""
    _, per_block, size = GGML_TYPES[name]
    return width // per_block * size if width % per_block == 0 else -1


def decoded(rows: Bytes, name: str) -> Floats:
    """Decode rows of a ggml type [tokens, bytes] → [tokens, values], like ``dequantize_row_*`` of ggml."""
    rows = np.ascontiguousarray(rows)
    if name == "f32":
        return rows.view(np.float32)
    if name == "f16":
        return rows.view(np.float16).astype(np.float32)
    if name == "bf16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = rows.reshape(len(rows), -1, GGML_TYPES[name][2])
    header = 2 * _HEADER[name]
    numbers = np.ascontiguousarray(blocks[..., :header]).view(np.float16).astype(np.float32)
    codes = np.ascontiguousarray(blocks[..., header:])
    if name == "q8_0":
        multiples = codes.view(np.int8).astype(np.float32)
    else:
        halves = codes[..., -16:]
        whole = np.concatenate([halves & 15, halves >> 4], -1)
        if name.startswith("q5"):
            whole = whole | np.unpackbits(codes[..., :4], axis=-1, bitorder="little") << 4
        multiples = _IQ4[whole] if name == "iq4_nl" else whole.astype(np.float32)
        multiples = multiples - {"q4_0": 8, "q5_0": 16}.get(name, 0)
    values = multiples * numbers[..., :1] + (numbers[..., 1:] if header == 4 else 0)
    return np.asarray(values.reshape(len(rows), -1), dtype=np.float32)
