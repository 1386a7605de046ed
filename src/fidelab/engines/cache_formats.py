"""Cache formats of engines as data: bytes, scales, layers that stay in 16 bits, what they need, how they are proven.

Each engine has its table in ``engines/<name>/cache_formats.py``, which is its class's ``cache_formats``: the engine's
own names, verbatim.  Formats that fidelab itself defines are in :mod:`fidelab.formats`.  Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fidelab.core import KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.core.sequence import KVLayer

_ENDS = 2  # first layers, and last ones, that ``keeps="ends"`` leaves in the compute type


@dataclass(frozen=True)
class Codes:
    """How one side of the cache, keys or values, holds a token of a head.

    Attributes:
        bits: of a value's code; 0: as many as the compute type has.
        group: values along the head that share a scale; 0: the whole head.
        scale: bytes of a group's scale, with its zero point where it has one.
        block: the head size must be a multiple of it.
        fixed: bytes of a head whatever its size, instead of all these.
        params: numbers of the compute type that a group has besides ``scale``.  Such groups go on over heads and
            tokens, so that a head may have a part of one.
    """

    bits: float = 0.0
    group: int = 0
    scale: int = 0
    block: int = 1
    fixed: int = 0
    params: int = 0

    def head_bytes(self, dim: int, native: int) -> int:
        """Return the bytes of a token of one head of ``dim`` values; ``native``: bytes of a compute-type value."""
        if self.fixed:
            return self.fixed
        if not self.bits:
            return dim * native
        if self.params:
            return math.ceil(dim * self.bits / 8 + dim / self.group * self.params * native)
        groups = math.ceil(dim / self.group) if self.group else 1
        return math.ceil(dim * self.bits / 8) + groups * self.scale


NATIVE = Codes()
"""The compute type."""


@dataclass(frozen=True)
class CacheFormat:
    """One format of an engine's cache.

    Attributes:
        name: as the engine's own option takes it.
        k, v: keys and values.
        latent: the one vector of multi-head latent attention; ``None``: the engine has no such cache in this format.
        scales: where scales come from, and what shares one; empty: there are none.
        align: bytes to whose multiple a head's keys and values together are rounded up.
        keeps: ``ends``: the first and the last two layers stay in the compute type, unless the model is a hybrid with
            recurrent layers.
        needs: what it runs on, for readers.
        proof: ``content``: written and stored numbers are compared; ``bytes``: the engine's name of the format and the
            bytes of its pages are.
        since: the engine's first version that has it; empty: all that fidelab runs.
        instead: what the engine has in its place, for a format that is gone.
        means: the format of fidelab that holds the same numbers.
    """

    name: str
    k: Codes
    v: Codes
    latent: Codes | None = None
    scales: str = ""
    align: int = 1
    keeps: Literal["", "ends"] = ""
    needs: str = ""
    proof: Literal["content", "bytes"] = "content"
    since: str = ""
    instead: str = ""
    means: str = ""

    @classmethod
    def both(cls, name: str, codes: Codes, **more: object) -> CacheFormat:
        """Return a format that holds keys, values and latents alike."""
        return cls(name, codes, codes, **{"latent": codes, **more})  # type: ignore[arg-type]

    def head_bytes(self, layer: KVLayer, native: int) -> tuple[int, ...]:
        """Return the bytes of a token of one head: of keys and of values, or of both where they share a slot.

        Raises:
            NotSupportedError: If the engine has no such cache for this layer.
        """
        if layer.latent:
            if self.latent is None:
                raise NotSupportedError(f"{self.name} does not hold latents, which this model caches")
            return (self.latent.head_bytes(layer.k_dim + layer.v_dim, native),)
        if reason := self.refusal(layer.k_dim, layer.v_dim):
            raise NotSupportedError(reason)
        k, v = self.k.head_bytes(layer.k_dim, native), self.v.head_bytes(layer.v_dim, native)
        return (k, v) if self.align == 1 else (math.ceil((k + v) / self.align) * self.align,)

    def kept(self, layers: int, *, hybrid: bool = False) -> frozenset[int]:
        """Return the numbers of the layers that the engine itself leaves in the compute type.

        Args:
            layers: of the decoder.
            hybrid: it has recurrent layers.
        """
        if not self.keeps or hybrid:
            return frozenset()
        ends = min(_ENDS, layers // 2)
        return frozenset((*range(ends), *range(layers - ends, layers)))

    def refusal(self, k_dim: int | None, v_dim: int | None = None) -> str:
        """Return the reason why heads of these sizes cannot be stored; empty if they can, or if sizes are unknown."""
        if self.latent is not None and self.latent.fixed:
            return f"{self.name} is a format of latents, which this model does not cache"
        for codes, dim in ((self.k, k_dim), (self.v, v_dim or k_dim)):
            if dim and dim % codes.block:
                return f"heads of {dim} are no multiple of {self.name}'s block of {codes.block}"
        return ""


NATIVE_FORMAT = CacheFormat.both("auto", NATIVE)
"""The compute type for keys and values."""


def table(*formats: CacheFormat) -> Mapping[str, CacheFormat]:
    """Return formats by their names."""
    return {one.name: one for one in formats}


def named(names: Iterable[str], one: CacheFormat) -> Iterable[CacheFormat]:
    """Return the same format under several names."""
    return (replace(one, name=name) for name in names)


def exact_layers(
    one: CacheFormat, kv: KVSpec, layers: Sequence[KVLayer], total: int, *, hybrid: bool
) -> frozenset[int]:
    """Return the numbers of the layers that stay in the compute type, by the spec or by the engine itself.

    Args:
        layers: those with a cache; ``total``: how many the decoder has.
        hybrid: it has recurrent layers.
    """
    kept = one.kept(total, hybrid=hybrid)
    return frozenset(n for n, x in numbered(layers) if n in kept or kv.skips(n, x.window is not None))


def numbered(layers: Iterable[KVLayer]) -> Iterator[tuple[int, KVLayer]]:
    """Yield each layer with its number."""
    for at, layer in enumerate(layers):
        yield at if layer.number is None else layer.number, layer
