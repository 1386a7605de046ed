"""K16/V8 bytes of KV chunks: keys bit by bit, values as e4m3, checked so that no wrong tensor comes out.

The bytes are described in :mod:`k16v8.plugins.lmcache.chunk`.  Both ends describe the chunk by a
:class:`~k16v8.plugins.lmcache.chunk.ChunkSpec`; a header is compared with it and decides neither sizes nor types.
Encoding and decoding hold a few frames beside the tensor, however large the chunk is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from k16v8.kernels.cache import FLOAT8, storage
from k16v8.kernels.torch_path import to_codes, token_scale
from k16v8.plugins.lmcache.chunk import (
    CRC,
    HEADER,
    MAGIC,
    ChunkSpec,
    CorruptError,
    ForeignError,
    PairError,
    Sides,
    TrailingError,
    TruncatedError,
)
from k16v8.plugins.lmcache.crc32c import crc32c

__all__ = ["decode", "decode_split", "encode", "encode_split", "verify"]

Buffer = bytes | bytearray | memoryview
_VALUES = storage("fp8_e4m3")


# --------------------------------------------------------------------------------------------------- encode


def encode(kv: Tensor, spec: ChunkSpec) -> Iterator[bytes]:
    """Keys and values in one stream, :meth:`ChunkSpec.encoded_bytes` in all, in pieces of at most one frame.

    Raises:
        ShapeError, DtypeError: ``kv`` is not what ``spec`` says; raised at once.
    """
    return _encoded(spec.canonical(kv), spec, "kv", (0, 0))


def encode_split(kv: Tensor, spec: ChunkSpec) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """Keys and values in streams of their own, for tiers of their own; in any order, each at its own pace.

    Raises:
        ShapeError, DtypeError: ``kv`` is not what ``spec`` says; raised at once.
    """
    k, v = both = spec.canonical(kv)
    pair = (_content_crc(k, spec), _content_crc(v, spec))
    return _encoded(both, spec, "k", pair), _encoded(both, spec, "v", pair)


def _encoded(both: Tensor, spec: ChunkSpec, sides: Sides, pair: tuple[int, int]) -> Iterator[bytes]:
    header = spec.header(sides, pair)
    yield header
    crc = crc32c(header)
    for side in sides:
        for layers, tokens in spec.frames():
            part = both["kv".index(side), layers, tokens].to("cpu")
            frame = _bits(part) if side == "k" else _coded(part, spec)
            crc = crc32c(frame, crc)
            yield frame
            yield CRC.pack(crc)


def _bits(x: Tensor) -> bytes:
    return x.view(torch.int16).contiguous().numpy().tobytes()


def _coded(x: Tensor, spec: ChunkSpec) -> bytes:
    """All codes, then all scales, as the kernels write them into a cache."""
    values = x.reshape(-1, spec.heads, spec.head_dim).float()
    if not spec.scaled:
        return to_codes(values, _VALUES).numpy().tobytes()
    scale = token_scale(values, _VALUES)
    codes = to_codes(values / scale.float().unsqueeze(-1), _VALUES)
    return codes.numpy().tobytes() + scale.numpy().tobytes()


def _content_crc(side: Tensor, spec: ChunkSpec) -> int:
    crc = 0
    for layers, tokens in spec.frames():
        crc = crc32c(_bits(side[layers, tokens].to("cpu")), crc)
    return crc


# --------------------------------------------------------------------------------------------------- decode


def decode(stream: Buffer | Iterable[Buffer], spec: ChunkSpec, out: Tensor | None = None) -> Tensor:
    """The chunk, from bytes or from pieces of them of any lengths, in a new tensor or in ``out``.

    ``out`` holds nothing of use after an error; where that matters, :func:`verify` first.

    Raises:
        ChunkError: the bytes are not this chunk, or ``out`` is not of its shape and type.
    """
    reader = _Reader(stream, spec, "kv")
    out = torch.empty(spec.shape, dtype=spec.dtype) if out is None else out
    k, v = spec.canonical(out)
    reader.read_keys(k)
    reader.read_values(v)
    reader.end()
    return out


def decode_split(
    keys: Buffer | Iterable[Buffer], values: Buffer | Iterable[Buffer], spec: ChunkSpec, out: Tensor | None = None
) -> Tensor:
    """The chunk from its two streams; otherwise as :func:`decode`.

    Raises:
        PairError: keys and values were encoded from different contents, though all else agrees.
        ChunkError: as :func:`decode`.
    """
    k_reader, v_reader = _Reader(keys, spec, "k"), _Reader(values, spec, "v")
    if k_reader.pair != v_reader.pair:
        raise PairError("keys and values do not belong together: they were encoded from different contents")
    out = torch.empty(spec.shape, dtype=spec.dtype) if out is None else out
    k, v = spec.canonical(out)
    k_reader.read_keys(k)
    k_reader.end()
    v_reader.read_values(v)
    v_reader.end()
    return out


def verify(stream: Buffer | Iterable[Buffer], spec: ChunkSpec, sides: Sides = "kv") -> None:
    """Read everything, decode nothing.

    Raises:
        ChunkError: the bytes are not these sides of this chunk.
    """
    reader = _Reader(stream, spec, sides)
    for side in sides:
        for _ in reader.frames(side):
            pass
    reader.end()


class _Reader:
    """Bytes that arrive in pieces; opening reads the header and compares it with ``spec``."""

    def __init__(self, stream: Buffer | Iterable[Buffer], spec: ChunkSpec, sides: Sides) -> None:
        self._pieces = iter([stream] if isinstance(stream, Buffer) else stream)
        self._piece = memoryview(b"")
        self._spec = spec
        header = bytes(self._take(len(MAGIC), "in its header"))
        if header != MAGIC:
            raise ForeignError("these bytes are not a K16/V8 chunk: they do not begin as one")
        header += self._take(HEADER - len(MAGIC), "in its header")
        self.pair = spec.check(header, sides)
        self._crc = crc32c(header)

    def frames(self, side: str) -> Iterator[tuple[slice, slice, memoryview]]:
        """Layers, tokens and checked bytes of each frame of a side."""
        spec = self._spec
        width = spec.heads * (2 * spec.head_dim if side == "k" else spec.value_bytes)
        for layers, tokens in spec.frames():
            where = f"in the {'keys' if side == 'k' else 'values'} of layer {layers.start}"
            frame = self._take((layers.stop - layers.start) * (tokens.stop - tokens.start) * width, where)
            self._crc = crc32c(frame, self._crc)
            if self._take(CRC.size, where) != CRC.pack(self._crc):
                raise CorruptError(f"the chunk is damaged {where}: its checksum differs; drop it and compute it again")
            yield layers, tokens, frame

    def read_keys(self, k: Tensor) -> None:
        """Keys into ``[L, T, H, D]``."""
        bits = k.view(torch.int16)
        for layers, tokens, frame in self.frames("k"):
            part = bits[layers, tokens]
            part.copy_(_tensor(frame, np.int16).view(part.shape))

    def read_values(self, v: Tensor) -> None:
        """Values into ``[L, T, H, D]``."""
        spec = self._spec
        for layers, tokens, frame in self.frames("v"):
            part = v[layers, tokens]
            codes = _tensor(frame[: part.numel()], np.uint8)
            scales = _tensor(frame[part.numel() :], np.float16) if spec.scaled else None
            part.copy_(_decoded(codes, scales, v.dtype).view(part.shape))

    def end(self) -> None:
        """Check that nothing is left."""
        if len(self._piece) or any(len(piece) for piece in self._pieces):
            raise TrailingError("bytes go on after the end of the chunk: drop it and compute it again")

    def _take(self, count: int, where: str) -> memoryview:
        """The next bytes: a view where one piece holds them all, else joined."""
        joined = bytearray()
        while len(joined) + len(self._piece) < count:
            joined += self._piece
            piece = next(self._pieces, None)
            if piece is None:
                raise TruncatedError(f"the chunk ends early, {where}: drop it and compute it again")
            self._piece = memoryview(piece).cast("B")
        missing = count - len(joined)
        taken, self._piece = self._piece[:missing], self._piece[missing:]
        return memoryview(joined + taken) if joined else taken


def _decoded(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values of flat codes in ``dtype``; with scales, code · scale, rounded once, what is beyond the range its end."""
    values = _table(dtype if scales is None else torch.float32).index_select(0, codes.int())
    if scales is None:
        return values
    top = torch.finfo(dtype).max
    return (values.view(len(scales), -1) * scales.float().unsqueeze(-1)).clamp(-top, top).to(dtype)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """The value of every code: several times faster than torch's cast on CPUs."""
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8[_VALUES.name]).to(dtype)


def _tensor(raw: memoryview, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype).copy())  # views of foreign bytes may be read-only or unaligned
