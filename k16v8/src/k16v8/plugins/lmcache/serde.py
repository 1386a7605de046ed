"""K16/V8 in LMCache: a serde for the chunks that its L2 adapters store.

LMCache (looked at and run: 0.5.6) has a table of serdes for the L2 adapters of its cache server, and nothing that
fills it from outside.  Either start the server through this module, which is LMCache's command with ``k16v8`` in the
table::

    python -m k16v8.plugins.lmcache.serde server … --l2-adapter '{"type": "fs", …, "serde": {"type": "k16v8"}}'

or, in a program that makes its own ``StorageManager``, say before it does::

    from k16v8.plugins.lmcache.serde import register
    register()

Options besides ``type``: ``scale`` (``none``; or ``per-token-head``, which needs ``head_dim``), ``head_dim`` (LMCache
merges heads and head dimension; without it a token counts as one head), ``max_workers`` (threads, 1).  The older
in-process storage (``remote_serde``) chooses among names that are fixed in LMCache's code and cannot be extended.
Keys in one tier and values in another have no place in LMCache's table either: it loads an object from one adapter.

A load that meets other bytes than those that were stored under its key fails, with the reason in LMCache's log, and
leaves the destination as it was: LMCache then computes the chunk again.  Nothing of LMCache is imported before
:func:`register`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k16v8.errors import EngineError, NotSupportedError, UnknownNameError, UsageError
from k16v8.plugins.lmcache.chunk import SCALES, ChunkSpec
from k16v8.plugins.lmcache.codec import decode, encode_into, verify

NAME = "k16v8"


@dataclass(frozen=True)
class _Serde:
    """Options of the chunks, on which both directions must agree."""

    scale: str = "none"
    head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UnknownNameError("scale", self.scale, SCALES)
        if self.scale != "none" and self.head_dim is None:
            raise UsageError(f"serde {NAME}: scale {self.scale} needs head_dim, which LMCache does not tell")

    def specs(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], key: Any = None) -> list[ChunkSpec]:
        """One chunk per group of layers: an object holds ``[2, layers, tokens, heads * head_dim]`` for each.

        Raises:
            NotSupportedError: If a group has another shape (latent attention, recurrent states) or element type.
        """
        specs = []
        for group, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            width = self.head_dim or (shape[-1] if shape else 1)
            if len(shape) != 4 or shape[0] != 2 or shape[-1] % width:
                wanted = f"[2, layers, tokens, heads * {self.head_dim or 'head_dim'}]"
                raise NotSupportedError(f"serde {NAME} stores {wanted}; layer group {group} is {list(shape)}")
            if dtype not in (torch.bfloat16, torch.float16):
                raise NotSupportedError(f"serde {NAME} stores bfloat16 and float16; layer group {group} is {dtype}")
            name, tokens = ("", b"") if key is None else (key.model_name, _identity(key, group))
            _, layers, length, hidden = shape
            specs.append(ChunkSpec(name, layers, length, hidden // width, width, dtype, scale=self.scale, key=tokens))
        return specs

    def chunks(self, obj: Any, key: Any) -> list[tuple[ChunkSpec, Tensor]]:
        """Each group of a memory object with its tensor."""
        specs = self.specs(obj.get_shapes(), obj.get_dtypes(), key)
        tensors = [obj.get_tensor(group) for group in range(len(specs))]
        if any(tensor is None for tensor in tensors):
            raise EngineError("LMCache handed over an object without memory: it was freed, or lies on a device file")
        return [(spec, tensor.view(spec.shape)) for spec, tensor in zip(specs, tensors, strict=True)]


class K16V8Serializer(_Serde):
    """LMCache's ``Serializer``: KV in, bytes out."""

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode the memory object ``src`` into the byte buffer ``dst``; returns the bytes written.

        Raises:
            NotSupportedError: See :meth:`specs`.
            EngineError: If the buffer is smaller than estimated, or has no memory that can be written here.
        """
        buffer, end = _buffer(dst), 0
        for spec, kv in self.chunks(src, key):
            if buffer.size - end < spec.encoded_bytes():
                raise EngineError(f"LMCache's buffer of {buffer.size} bytes is smaller than the estimate it was given")
            end += encode_into(kv, spec, buffer[end:])
        return end

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Exact bytes of an object.

        Raises:
            NotSupportedError: See :meth:`specs`.
        """
        return sum(spec.encoded_bytes() for spec in self.specs(layout_desc.shapes, layout_desc.dtypes))


class K16V8Deserializer(_Serde):
    """LMCache's ``Deserializer``: bytes in, KV out."""

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode the byte buffer ``src`` into the memory object ``dst``, which is written only if all is sound.

        Raises:
            ChunkError: If the bytes are not what was stored under ``key`` from an object like ``dst``.
            NotSupportedError, EngineError: As :meth:`K16V8Serializer.serialize`.
        """
        rest, parts = _buffer(src).data, []
        chunks = self.chunks(dst, key)
        for index, (spec, kv) in enumerate(chunks):
            end = spec.encoded_bytes() if index + 1 < len(chunks) else len(rest)
            verify(rest[:end], spec)
            parts.append((rest[:end], spec, kv))
            rest = rest[end:]
        for part, spec, kv in parts:
            decode(part, spec, kv, verified=True)


def create(options: Mapping[str, Any]) -> Any:
    """LMCache's factory: the options of ``"serde": {"type": "k16v8", …}`` → its asynchronous processor.

    Raises:
        UsageError: If an option does not exist, or has an invalid value.
    """
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor

    known = ("scale", "head_dim", "max_workers")
    for name in options:
        if name not in known:
            raise UnknownNameError(f"option of serde {NAME}", name, known)
    scale, head_dim, workers = (options.get(name) for name in known)
    for name, value in (("head_dim", head_dim), ("max_workers", workers)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"serde {NAME}: {name} is a number from 1 on, not {value!r}")
    serde = (str(scale or "none"), head_dim)
    return AsyncSerdeProcessor(K16V8Serializer(*serde), K16V8Deserializer(*serde), max_workers=workers or 1)


def register() -> None:
    """Put ``k16v8`` into LMCache's table of serdes; once is enough.

    Raises:
        EngineError: If this Python has no LMCache with such a table.
    """
    try:
        from lmcache.v1.distributed.serde import (
            Deserializer,
            Serializer,
            get_registered_serde_types,
            register_serde_factory,
        )
    except ImportError as error:
        raise EngineError(
            f"no LMCache with serdes for L2 adapters here ({error}): pip install 'lmcache>=0.5.6'"
        ) from None

    Serializer.register(K16V8Serializer)
    Deserializer.register(K16V8Deserializer)
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, create)


def _identity(key: Any, group: int) -> bytes:
    """Which tokens, whose, which rank's share of the heads and layers."""
    parts = (key.chunk_hash.hex(), key.kv_rank, key.object_group_id, group, key.cache_salt)
    return "/".join(map(str, parts)).encode()


def _buffer(obj: Any) -> NDArray[np.uint8]:
    tensor = obj.tensor
    if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise EngineError("LMCache handed over a byte buffer that does not lie in this process's memory")
    raw: NDArray[np.uint8] = tensor.view(torch.uint8).view(-1).numpy()
    return raw


if __name__ == "__main__":
    try:
        register()
    except EngineError as error:
        print(f"k16v8: {error}", file=sys.stderr)
        sys.exit(2)
    from lmcache.cli.main import main

    main()
