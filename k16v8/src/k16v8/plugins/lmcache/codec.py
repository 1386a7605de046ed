"""K16/V8 bytes of KV chunks: keys bit by bit, values as e4m3, checked so that no wrong tensor comes out.

The bytes are described in :mod:`k16v8.plugins.lmcache.chunk`.  Both ends describe the chunk by a
:class:`~k16v8.plugins.lmcache.chunk.ChunkSpec`; a header is compared with it and decides neither sizes nor types.
Encoding and decoding hold a few frames and the tensor, however large the chunk is.  Values are converted a block at
a time, small enough for a core's cache (``benchmarks/kv_codec.py`` prints GB/s).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k16v8.errors import UsageError
from k16v8.kernels.cache import FLOAT8, storage
from k16v8.kernels.torch_path import token_scale
from k16v8.plugins.lmcache.chunk import (
    CRC,
    HEADER,
    MAGIC,
    ChunkSpec,
    CorruptError,
    ForeignError,
    TrailingError,
    TruncatedError,
)

Buffer = bytes | bytearray | memoryview
Bytes = NDArray[np.uint8]
_VALUES = storage("fp8_e4m3")
_FP8 = FLOAT8[_VALUES.name]
_BLOCK = 1 << 16  # values converted at a time: with their float32 they take 384 KiB


# --------------------------------------------------------------------------------------------------- encode


def encode(kv: Tensor, spec: ChunkSpec) -> Iterator[memoryview]:
    """Yield the chunk in pieces of at most one frame, :meth:`ChunkSpec.encoded_bytes` in all.

    Raises:
        ShapeError, DtypeError: If ``kv`` does not match ``spec``. Raised at once.
    """
    pieces = _encoded(spec.canonical(kv), spec, lambda size: np.empty(size, np.uint8))
    return (piece.data for piece in pieces)


def encode_into(kv: Tensor, spec: ChunkSpec, out: Bytes) -> int:
    """Encode the chunk into the front of ``out``, without a copy in between. Returns its bytes.

    Raises:
        ShapeError, DtypeError: If ``kv`` does not match ``spec``.
        UsageError: If ``out`` has less room than :meth:`ChunkSpec.encoded_bytes`.
    """
    size = spec.encoded_bytes()
    if out.size < size:
        raise UsageError(f"a chunk of {size} bytes does not fit into a buffer of {out.size}")
    end = 0

    def room(count: int) -> Bytes:
        nonlocal end
        end += count
        return out[end - count : end]

    for _ in _encoded(spec.canonical(kv), spec, room):
        pass
    return end


def _encoded(both: Tensor, spec: ChunkSpec, room: Callable[[int], Bytes]) -> Iterator[Bytes]:
    """Header, frames and checksums, each in memory that ``room`` gives for its size."""

    def placed(data: bytes) -> Bytes:
        piece = room(len(data))
        piece[:] = np.frombuffer(data, np.uint8)
        return piece

    header = spec.header()
    yield placed(header)
    crc = zlib.crc32(header)
    for side, width, write in ((0, 2 * spec.head_dim, _write_keys), (1, spec.value_bytes, _write_values)):
        for layers, tokens in spec.frames():
            part = both[side, layers, tokens].to("cpu")
            frame = room(part.shape[:3].numel() * width)
            write(part, spec, frame)
            crc = zlib.crc32(frame.data, crc)
            yield frame
            yield placed(CRC.pack(crc))


def _write_keys(x: Tensor, _: ChunkSpec, frame: Bytes) -> None:
    bits = x.view(torch.int16).numpy()
    frame.view(np.int16).reshape(bits.shape)[:] = bits


def _write_values(x: Tensor, spec: ChunkSpec, frame: Bytes) -> None:
    """All codes, then all scales, as the kernels write them into a cache."""
    rows = x.reshape(-1, spec.head_dim)
    codes = torch.from_numpy(frame[: x.numel()]).view(_FP8).view(rows.shape)
    scales = frame[x.numel() :].view(np.float16)
    step = max(1, _BLOCK // spec.head_dim)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        numbers = block.float()
        if spec.scaled:
            scale = _scales(block, numbers)
            scales[start : start + step] = scale.numpy()
            numbers /= scale.float().unsqueeze(-1)
        codes[start : start + step].copy_(numbers.clamp_(-_VALUES.top, _VALUES.top))


def _scales(block: Tensor, numbers: Tensor) -> Tensor:
    """Scale of each row as :func:`token_scale` has it.  If all are finite, only the largest number matters."""
    bits = block.view(torch.int16).bitwise_and(0x7FFF).amax(-1)  # magnitudes are in the order of their bit patterns
    largest = bits.view(block.dtype).float()
    return token_scale(largest.unsqueeze(-1) if largest.isfinite().all() else numbers, _VALUES)


# --------------------------------------------------------------------------------------------------- decode


def decode(
    stream: Buffer | Iterable[Buffer], spec: ChunkSpec, out: Tensor | None = None, *, verified: bool = False
) -> Tensor:
    """Decode a chunk, from bytes or from pieces of any lengths, into a new tensor or ``out``.

    ``out`` holds nothing of use after an error; where that matters, :func:`verify` first and say that these bytes are
    ``verified``: their frames' checksums are not computed again.

    Raises:
        ChunkError: If the bytes are not this chunk, or ``out`` is not of its shape and type.
    """
    reader = _Reader(stream, spec, verified)
    out = torch.empty(spec.shape, dtype=spec.dtype) if out is None else out
    k, v = spec.canonical(out)
    for layers, tokens, frame in reader.frames("keys"):
        _store(np.frombuffer(frame, np.uint16), k[layers, tokens])
    for layers, tokens, frame in reader.frames("values"):
        _read_values(np.frombuffer(frame, np.uint8), spec, v[layers, tokens])
    reader.end()
    return out


def verify(stream: Buffer | Iterable[Buffer], spec: ChunkSpec) -> None:
    """Read and check everything, without decoding.

    Raises:
        ChunkError: If the bytes are not this chunk.
    """
    reader = _Reader(stream, spec)
    for side in ("keys", "values"):
        for _ in reader.frames(side):
            pass
    reader.end()


class _Reader:
    """Bytes that arrive in pieces; opening reads the header and compares it with ``spec``."""

    def __init__(self, stream: Buffer | Iterable[Buffer], spec: ChunkSpec, verified: bool = False) -> None:
        self._verified = verified
        self._pieces = iter([stream] if isinstance(stream, Buffer) else stream)
        self._piece = memoryview(b"")
        self._spec = spec
        header = bytes(self._take(len(MAGIC), "in its header"))
        if header != MAGIC:
            raise ForeignError("these bytes are not a K16/V8 chunk: they do not begin as one")
        header += self._take(HEADER - len(MAGIC), "in its header")
        spec.check(header)
        self._crc = zlib.crc32(header)

    def frames(self, side: str) -> Iterator[tuple[slice, slice, memoryview]]:
        """Layers, tokens and checked bytes of each frame of a side."""
        spec = self._spec
        width = spec.heads * (2 * spec.head_dim if side == "keys" else spec.value_bytes)
        for layers, tokens in spec.frames():
            where = f"in the {side} of layer {layers.start}"
            frame = self._take((layers.stop - layers.start) * (tokens.stop - tokens.start) * width, where)
            checksum = self._take(CRC.size, where)
            if not self._verified and checksum != CRC.pack(self._chained(frame)):
                raise CorruptError(f"the chunk is damaged {where}: its checksum differs; drop it and compute it again")
            yield layers, tokens, frame

    def _chained(self, frame: memoryview) -> int:
        """CRC-32 of header and frames up to this one."""
        self._crc = zlib.crc32(frame, self._crc)
        return self._crc

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


def _read_values(frame: Bytes, spec: ChunkSpec, part: Tensor) -> None:
    """Codes (with scales: times scale, rounded once, what is beyond the range its end) into ``part``."""
    codes, scales = frame[: part.numel()], frame[part.numel() :].view(np.float16)
    flat = part.view(-1) if part.device.type == "cpu" and part.is_contiguous() else None
    values = torch.empty(part.numel(), dtype=part.dtype) if flat is None else flat
    table = _pairs(torch.float32 if spec.scaled else part.dtype)
    step = max(1, _BLOCK // spec.head_dim) * spec.head_dim
    for start in range(0, codes.size, step):
        block = values[start : start + step]
        numbers = _lookup(codes[start : start + step], table)
        if spec.scaled:
            rows = slice(start // spec.head_dim, (start + step) // spec.head_dim)
            scale = torch.from_numpy(scales[rows].astype(np.float32)).unsqueeze(-1)
            top = torch.finfo(part.dtype).max
            product = torch.from_numpy(numbers.view(np.float32)).view(-1, spec.head_dim).mul_(scale).clamp_(-top, top)
            block.copy_(product.view(-1))
        else:
            block.view(torch.int16).numpy()[:] = numbers.view(np.int16)
    if flat is None:
        part.copy_(values.view(part.shape))


def _lookup(codes: Bytes, table: NDArray[Any]) -> NDArray[Any]:
    """The entries of ``table`` for codes two at a time, as bytes; an odd last one alone."""
    even = codes.size & ~1
    found = np.take(table, codes[:even].view(np.uint16), mode="wrap").view(np.uint8)  # wrap: no check of bounds
    if even == codes.size:
        return found
    return np.concatenate((found, table[codes[-1:]].view(np.uint8)[: table.itemsize // 2]))


@cache
def _pairs(dtype: torch.dtype) -> NDArray[Any]:
    """The values of two neighbouring codes, by the codes as one little-endian number: half as many look-ups."""
    codes = torch.from_numpy(np.arange(1 << 16, dtype="<u2").view(np.uint8))
    values = codes.view(_FP8).to(dtype)
    return values.view(torch.uint8).numpy().view(np.uint64 if dtype == torch.float32 else np.uint32)


def _store(bits: NDArray[np.uint16], part: Tensor) -> None:
    """16-bit patterns of foreign memory, which may be read-only or unaligned, into a part of the tensor."""
    if part.device.type == "cpu":
        part.view(torch.int16).numpy()[...] = bits.view(np.int16).reshape(part.shape)
    else:
        part.copy_(torch.from_numpy(bits.view(np.int16).copy()).view(part.dtype).view(part.shape))
