"""Bytes of one sequence in a KV cache.  See docs/metrics/bytes.md#bytes-of-a-sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fidelab.core.serial import OMIT

_MAX_PERIOD = 1 << 16  # lengths that are tried for a peak; blocks of formats have at most some hundred tokens


def encoded_tokens(tokens: int, sinks: int = 0, tail: int = 0, block: int = 1) -> int:
    """Return how many of a sequence's tokens are encoded: the whole blocks between ``sinks`` and ``tail``."""
    return max(0, tokens - sinks - tail) // block * block


@dataclass(frozen=True)
class KVLayer:
    """Cache of one layer per token: ``heads`` keys of ``k_dim`` and values of ``v_dim`` elements.

    ``window``: how many tokens at most; ``None``: all of them.  ``latent``: one compressed vector stands for keys and
    values of all heads (multi-head latent attention), and both parts are stored in one format.  ``number``: its place
    among all layers, those without a cache included; ``None``: its place in the list that it is in.
    """

    heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    latent: bool = False
    number: int | None = field(default=None, compare=False)

    def shard(self, tp: int) -> KVLayer:
        """Return the cache share of each of ``tp`` devices. Latents, and heads fewer than devices, are replicated."""
        return self if self.latent else replace(self, heads=math.ceil(self.heads / tp))


@dataclass(frozen=True)
class StoreBytes:
    """Bytes of storages with the same exceptions: keys or values of some layers.  All bytes are sums over them.

    Attributes:
        encoded_token: bytes of an encoded token, with the scales that belong to it.
        exact_token: bytes of a token in the compute type.  It counts for exceptions only.
        packed_token: bytes of an encoded token with codes packed without gaps; ``None``: they are stored so.
        sinks, tail: first and last tokens that stay exact.
        block: tokens that are encoded together.  An unfinished block stays exact.
        window: largest number of tokens held; ``None``: all of them.
        fitted: bytes of scales that belong to the sequence.
    """

    encoded_token: float
    exact_token: float = field(default=0.0, metadata=OMIT)
    packed_token: float | None = field(default=None, metadata=OMIT)
    sinks: int = field(default=0, metadata=OMIT)
    tail: int = field(default=0, metadata=OMIT)
    block: int = field(default=1, metadata=OMIT)
    window: int | None = field(default=None, metadata=OMIT)
    fitted: float = field(default=0.0, metadata=OMIT)

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block has at least 1 token, not {self.block}")

    @property
    def places(self) -> tuple[int, int, int, int | None]:
        """Return what decides which tokens are held and encoded; storages that share it can be added."""
        return self.sinks, self.tail, self.block, self.window

    def token_bytes(self, *, packed: bool = False) -> float:
        """Return the bytes of an encoded token."""
        return self.packed_token if packed and self.packed_token is not None else self.encoded_token

    def bytes_of_sequence(self, n_tokens: int, *, packed: bool = False) -> float:
        """Return the bytes of ``n_tokens`` tokens."""
        held = n_tokens if self.window is None else min(n_tokens, self.window)
        encoded = encoded_tokens(held, self.sinks, self.tail, self.block)
        return encoded * self.token_bytes(packed=packed) + (held - encoded) * self.exact_token + self.fitted


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence over all layers, by its length.

    Attributes:
        stores: storages of keys and values, layers that stay in 16 bits included.
        state: bytes of recurrent and convolution states, whatever the length.

    >>> quarter = StoreBytes(encoded_token=25, exact_token=100, tail=96)
    >>> SequenceBytes((quarter,)).bytes_of_sequence(128)
    10400.0
    """

    stores: tuple[StoreBytes, ...]
    state: float = field(default=0.0, metadata=OMIT)

    @classmethod
    def summed(cls, stores: list[StoreBytes], state: float = 0.0) -> SequenceBytes:
        """Build the record from single storages; those that share :attr:`StoreBytes.places` become one."""
        groups: dict[tuple[int, int, int, int | None], StoreBytes] = {}
        for store in stores:
            known = groups.get(store.places)
            if known is None:
                groups[store.places] = store
            else:
                emulated = known.packed_token is not None or store.packed_token is not None
                groups[store.places] = replace(
                    known,
                    encoded_token=known.encoded_token + store.encoded_token,
                    exact_token=known.exact_token + store.exact_token,
                    packed_token=known.token_bytes(packed=True) + store.token_bytes(packed=True) if emulated else None,
                    fitted=known.fitted + store.fitted,
                )
        return cls(tuple(groups.values()), state)

    def token_bytes(self, *, packed: bool = False) -> float:
        """Return the bytes of one more encoded token, as long as no window is full."""
        return sum(store.token_bytes(packed=packed) for store in self.stores)

    def bytes_of_sequence(self, n_tokens: int, *, packed: bool = False, kv_scale: float = 1.0) -> float:
        """Return the bytes of a sequence of ``n_tokens`` tokens.

        Args:
            packed: codes of emulated formats count as packed without gaps.
            kv_scale: factor of keys and values, not of states: 0.5 turns a 32-bit cache into a 16-bit one.
        """
        return kv_scale * sum(store.bytes_of_sequence(n_tokens, packed=packed) for store in self.stores) + self.state

    def peak_bytes(self, n_tokens: int, *, packed: bool = False, kv_scale: float = 1.0) -> float:
        """Return the most bytes that a sequence takes on its way to ``n_tokens`` tokens.

        A block that is complete is encoded, which frees bytes.  One common multiple of all blocks earlier or later the
        bytes are never smaller or larger, so the lengths of one such period suffice.
        """
        period = min(math.lcm(*(store.block for store in self.stores)), _MAX_PERIOD) if self.stores else 1
        lengths = range(max(0, n_tokens - period + 1), n_tokens + 1)
        return max(self.bytes_of_sequence(n, packed=packed, kv_scale=kv_scale) for n in lengths)
