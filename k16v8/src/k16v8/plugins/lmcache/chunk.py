"""Format of a K16/V8 chunk: its description, its header, and the checks of its bytes.

A chunk is the keys and values of some tokens in all layers.  As bytes it is a header, then frames; all numbers are
little-endian:

======  =====  =====================================================================================
offset  bytes  header
======  =====  =====================================================================================
0       8      magic ``FDLK16V8``
8       2      format version
10      4      one byte each: 3 (keys and values), element type, layout, scale
14      2      0
16      16     layers, tokens, KV heads, head dimension
32      32     BLAKE2b-128 of the model's name, BLAKE2b-128 of the chunk's key
64      8      0
72      4      CRC-32 (zlib's) of the 72 bytes before
======  =====  =====================================================================================

A frame holds up to 4 MiB of one side's 16-bit content, in the order layer, token, head, dimension: keys as they are,
values as FP8 e4m3 (OCP, saturating), all codes, then all scales.  Each frame is followed by the CRC-32 of
header and frames up to there, so that a frame of another chunk, or at another place, does not fit.  The frames of the
keys come first.

Errors::

    ChunkError (K16V8Error)     bytes that are not the chunk that was asked for
    ├── ForeignError              not of this format
    ├── VersionError              of another version of it
    ├── CorruptError              a checksum does not agree
    │   ├── TruncatedError        they end early
    │   └── TrailingError         they go on after the chunk
    └── FingerprintError          sound, but of another chunk; names what differs:
        └── ModelError, ChunkKeyError, ShapeError, LayoutError, DtypeError, ScaleError
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from k16v8.errors import K16V8Error, UnknownNameError, UsageError

LAYOUTS = ("2LTHD", "L2THD", "LT2HD", "2LHTD")  # order of sides (2), layers, tokens, heads, head dimension
SCALES = ("none", "per-token-head")

MAGIC, _VERSION = b"FDLK16V8", 2
_FIELDS = struct.Struct("<8sHBBBBHIIII16s16sQ")
CRC = struct.Struct("<I")
HEADER = _FIELDS.size + CRC.size  # bytes
_FRAME = 4 << 20  # bytes of 16-bit content; part of the format
_DTYPES = (torch.bfloat16, torch.float16)
_BOTH_SIDES = 3


class ChunkError(K16V8Error):
    """Bytes that are not the chunk that was asked for."""


class ForeignError(ChunkError):
    """Bytes that are not of this format."""


class VersionError(ChunkError):
    """Bytes of another version of the format."""


class CorruptError(ChunkError):
    """A checksum does not agree."""


class TruncatedError(CorruptError):
    """The bytes end before the chunk does."""


class TrailingError(CorruptError):
    """The bytes go on after the chunk."""


class FingerprintError(ChunkError):
    """A sound chunk, but another one; the message names what differs."""


class ModelError(FingerprintError):
    """The chunk is of another model."""


class ChunkKeyError(FingerprintError):
    """The chunk is of other tokens."""


class ShapeError(FingerprintError):
    """The chunk has other numbers of layers, tokens, heads or dimensions."""


class LayoutError(FingerprintError):
    """The chunk has another layout."""


class DtypeError(FingerprintError):
    """The chunk has another element type, or one that is not bfloat16 or float16."""


class ScaleError(FingerprintError):
    """The chunk has values under another scale."""


@dataclass(frozen=True)
class ChunkSpec:
    """Description of a chunk; both ends must agree on all of it.

    ``model``: its name.  ``tokens``: positions in the chunk.  ``heads``: KV heads.  ``dtype``: bfloat16 or float16.
    ``layout``: one of :data:`LAYOUTS`, the order of the tensor's dimensions.  ``scale``: ``none`` (1, values beyond
    ±448 saturate) or ``per-token-head`` (one float16 per token and head).  ``key``: which tokens, in the caller's
    terms.

    Raises:
        DtypeError, UnknownNameError, UsageError: If the element type, the layout, the scale or a size is invalid.
    """

    model: str
    layers: int
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    layout: str = "2LTHD"
    scale: str = "none"
    key: bytes = b""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise DtypeError(f"a K16/V8 chunk holds bfloat16 or float16, not {_dtype_name(self.dtype)}")
        for kind, name, known in (("layout", self.layout, LAYOUTS), ("scale", self.scale, SCALES)):
            if name not in known:
                raise UnknownNameError(kind, name, known)
        if not all(0 < size < 1 << 32 for size in self.sizes):
            raise UsageError(f"a chunk of {self._sizes_text()} cannot be: each has to be in 1 … 4294967295")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layers, tokens, KV heads, head dimension."""
        return self.layers, self.tokens, self.heads, self.head_dim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, in its layout."""
        sizes = dict(zip("2LTHD", (2, *self.sizes), strict=True))
        return tuple(sizes[letter] for letter in self.layout)

    def encoded_bytes(self) -> int:
        """Exact size of the encoded chunk."""
        frames = sum(1 for _ in self.frames())
        heads = self.layers * self.tokens * self.heads
        return HEADER + heads * (2 * self.head_dim + self.value_bytes) + 2 * frames * CRC.size

    @property
    def value_bytes(self) -> int:
        """Bytes of one head of one token: a code for each dimension, and a float16 scale where there is one."""
        return self.head_dim + (2 if self.scaled else 0)

    @property
    def scaled(self) -> bool:
        """Whether values have a scale per token and head."""
        return self.scale == "per-token-head"

    def frames(self) -> Iterator[tuple[slice, slice]]:
        """Layers and tokens of each frame of one side: whole layers where they fit, else tokens of one."""
        tokens = max(1, _FRAME // (self.heads * self.head_dim * 2))
        if layers := tokens // self.tokens:
            yield from (
                (slice(i, min(i + layers, self.layers)), slice(0, self.tokens)) for i in range(0, self.layers, layers)
            )
        else:
            for layer in range(self.layers):
                for i in range(0, self.tokens, tokens):
                    yield slice(layer, layer + 1), slice(i, min(i + tokens, self.tokens))

    def header(self) -> bytes:
        """The header."""
        fields = _FIELDS.pack(
            *(MAGIC, _VERSION, _BOTH_SIDES),
            *(_DTYPES.index(self.dtype), LAYOUTS.index(self.layout), SCALES.index(self.scale), 0),
            *self.sizes,
            *(_fingerprint(self.model.encode()), _fingerprint(self.key), 0),
        )
        return fields + CRC.pack(zlib.crc32(fields))

    def check(self, header: bytes) -> None:
        """Check a header that begins with the magic.

        Raises:
            VersionError, CorruptError, FingerprintError: If it is of another version, damaged, or of another chunk.
        """
        _, version, sides, dtype, layout, scale, zero, *sizes, model, key, unused = _FIELDS.unpack_from(header)
        if version != _VERSION:
            raise VersionError(f"the chunk is of format version {version}; this k16v8 reads version {_VERSION}")
        if header[_FIELDS.size :] != CRC.pack(zlib.crc32(header[: _FIELDS.size])):
            raise CorruptError("the chunk is damaged in its header: its checksum differs; drop it and compute it again")
        known = dtype < len(_DTYPES) and layout < len(LAYOUTS) and scale < len(SCALES)
        if sides != _BOTH_SIDES or zero or unused or not known:
            raise CorruptError("the chunk's header is sound but holds codes that this format does not have")
        if model != _fingerprint(self.model.encode()):
            raise ModelError(f"the chunk is of another model than {self.model!r}")
        for kind, what, found, due in (
            (DtypeError, "element type", _dtype_name(_DTYPES[dtype]), _dtype_name(self.dtype)),
            (LayoutError, "layout", LAYOUTS[layout], self.layout),
            (ScaleError, "scale", SCALES[scale], self.scale),
            (ShapeError, "layers, tokens, KV heads, head dimension", (*sizes,), self.sizes),
        ):
            if found != due:
                raise kind(f"the chunk is another one: {what} {found}, where {due} was asked for")
        if key != _fingerprint(self.key):
            raise ChunkKeyError("the chunk is of other tokens: its key is not the one that was asked for")

    def canonical(self, kv: Tensor) -> Tensor:
        """Return a view of the tensor as ``[2, L, T, H, D]``.

        Raises:
            ShapeError, DtypeError: If it is not of this shape or type.
        """
        if kv.shape != self.shape:
            raise ShapeError(f"the tensor is {list(kv.shape)}; {self.layout} of this chunk is {list(self.shape)}")
        if kv.dtype != self.dtype:
            raise DtypeError(f"the tensor is {_dtype_name(kv.dtype)}, the chunk {_dtype_name(self.dtype)}")
        return kv.detach().permute([self.layout.index(letter) for letter in LAYOUTS[0]])

    def _sizes_text(self) -> str:
        return "{} layers, {} tokens, {} KV heads of dimension {}".format(*self.sizes)


def _fingerprint(name: bytes) -> bytes:
    return blake2b(name, digest_size=16).digest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
