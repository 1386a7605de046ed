"""Sizes by which the configurations of a report are compared.  See docs/metrics/bytes.md#bytes-of-a-sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import format_gib, one_line
from fidelab.results.record import ArmRecord

REFERENCE = "the reference"
SHARE_FACT = "encoded_share"
"""Fact of the KLD: share of the tokens that attention read encoded; absent where a format has no exceptions."""
CONTEXT_FACT = "encoded_90_at"
"""Fact of the KLD: smallest context at which that share is 90%; absent where none is known."""
MIN_ENCODED_SHARE = 0.5
"""Below it, most of what attention read was exact, and the loss says little about the format: no verdict."""
_WIDTH = re.compile(r"(?:bf|f|fp|float|bfloat)(16|32)", re.IGNORECASE)
_IN_16_BITS = "16 bits"
_LONG = 1000  # times the measured context: exact tokens and states hardly count
_DEPENDS = 0.01  # of a saving: a smaller change with the length is not worth words


def encoded_share(arm: ArmRecord) -> float | None:
    """Return the share of the tokens read by attention that were encoded; ``None`` for formats without exceptions."""
    share = arm.deciding.facts.get(SHARE_FACT) if arm.deciding else None
    return float(share) if isinstance(share, int | float) else None


def encoded_90_at(arm: ArmRecord) -> int | None:
    """Return the smallest context, in tokens, at which the share encoded is 90%."""
    context = arm.deciding.facts.get(CONTEXT_FACT) if arm.deciding else None
    return context if isinstance(context, int) else None


def _scale_to_16_bits(arm: ArmRecord) -> float | None:
    """Factor that turns keys and values into 16 bits; ``None`` for formats with neither 16 nor 32 bits."""
    ran = arm.ran
    if ran is None or not ran.cache_bytes_per_token:
        return None
    widths = {match and match[1] for side in (ran.k_dtype, ran.v_dtype) for match in [_WIDTH.fullmatch(side or "")]}
    return {"16": 1.0, "32": 0.5}.get(next(iter(widths)) or "") if len(widths) == 1 else None


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes by which arms are compared, for the arms that report them.

    ``n_ctx``: length of the sequence in tokens, the longest context measured; ``None``: no context is known, and one
    token counts.  ``what``: ``cache`` (bytes of the sequence's cache, per token) if weights are the same or unknown,
    ``weights`` (bytes) if caches are, and ``total`` (bytes of the sequence and the weights) if both differ.  ``base``:
    baseline of savings: for ``cache`` a 16-bit cache if any arm has a 16-bit or 32-bit one, else the reference.
    ``by_length``: names of the arms whose saving depends on the length.
    """

    what: str
    sizes: dict[str, float]
    base: float | None
    base_name: str
    n_ctx: int | None = None
    by_length: frozenset[str] = frozenset()

    @classmethod
    def of(cls, reference: ArmRecord, candidates: Sequence[ArmRecord], others: Sequence[ArmRecord] = ()) -> Sizes:
        """Return the sizes of the arms that ran."""
        n_ctx = reach(candidates)
        arms = [arm for arm in candidates if arm.ran is not None and arm.measured]
        caches, weights = ({_bytes_of(kind, arm, n_ctx) for arm in (reference, *arms)} for kind in ("cache", "weights"))
        what = "cache"
        if len(weights) > 1 and None not in weights:
            what = "total" if len(caches) > 1 and None not in caches and n_ctx else "weights"
        sizes = {arm.name: size for arm in arms if (size := _bytes_of(what, arm, n_ctx)) is not None}
        base, name = _base(what, reference, (*others, *candidates), n_ctx)
        here = cls(what, sizes, base, name, n_ctx)
        if what != "cache" or n_ctx is None:
            return here
        far = {arm.name: _bytes_of(what, arm, _LONG * n_ctx) for arm in arms}
        far_base = _base(what, reference, (*others, *candidates), _LONG * n_ctx)[0]
        by_length = {
            arm
            for arm, size in far.items()
            if size is not None
            and far_base
            and (saving := here.saving(arm)) is not None
            and abs(saving - (1 - size / far_base)) > _DEPENDS
        }
        return cls(what, sizes, base, name, n_ctx, frozenset(by_length))

    def of_arm(self, arm: ArmRecord) -> float | None:
        """Return the size of any arm of the report, bytes."""
        return _bytes_of(self.what, arm, self.n_ctx)

    def saving(self, name: str) -> float | None:
        """Return the share of the base's bytes that an arm saves; negative if it takes more."""
        size = self.sizes.get(name)
        return None if size is None or not self.base else 1 - size / self.base

    def describe(self, name: str) -> str:
        """Describe the saving, such as ``47% smaller KV cache than bf16``; empty if unknown.

        The length stands with a saving that depends on it: ``18% smaller KV cache than bf16 at 128 tokens``.
        """
        saving, size = self.saving(name), self.sizes.get(name)
        if saving is None or size is None:
            return ""
        share = f"{abs(saving):.0%} {'less' if saving >= 0 else 'more'}"
        if self.what == "cache":
            than = "smaller" if saving >= 0 else "larger"
            at = f" at {self.n_ctx:,} tokens" if name in self.by_length else ""
            return f"{abs(saving):.0%} {than} KV cache than {one_line(self.base_name)}{at}"
        what = "of weights" if self.what == "weights" else f"of weights and cache at {self.n_ctx:,} tokens"
        return f"{share} than the reference ({format_gib(size)} GiB {what})"


def _base(what: str, reference: ArmRecord, others: Sequence[ArmRecord], n_ctx: int | None) -> tuple[float | None, str]:
    """Return the size that savings refer to, and its name."""
    if what == "cache" and (found := cache_baseline(reference, others, n_ctx)) is not None:
        arm, scale, name = found
        return _cache_bytes(arm, n_ctx, scale), name
    return _bytes_of(what, reference, n_ctx), REFERENCE


def cache_baseline(
    reference: ArmRecord, others: Sequence[ArmRecord], n_ctx: int | None
) -> tuple[ArmRecord, float, str] | None:
    """Return the arm with the smallest 16-bit cache, the factor that turns its keys and values into 16 bits, its name.

    ``None`` if no arm has a cache of 16 or 32 bits.
    """
    wide = [
        (size, name == _IN_16_BITS, n, (arm, scale, name))
        for n, arm in enumerate((reference, *others))
        if (scale := _scale_to_16_bits(arm)) is not None and (size := _cache_bytes(arm, n_ctx, scale))
        for name in [arm.kv_text if scale == 1 else _IN_16_BITS]
    ]
    return min(wide, key=lambda known: known[:3])[3] if wide else None


def _bytes_of(what: str, arm: ArmRecord, n_ctx: int | None) -> float | None:
    cache, weights = _cache_bytes(arm, n_ctx), arm.ran.size if arm.ran else None
    if what == "cache":
        return cache
    if what == "weights" or weights is None:
        return weights
    return None if cache is None else weights + (n_ctx or 0) * cache


def _cache_bytes(arm: ArmRecord, n_ctx: int | None, kv_scale: float = 1.0) -> float | None:
    """Return the cache bytes of a sequence of ``n_ctx`` tokens, per token; without a context those of one more token.

    They are per token so that the sizes of caches that grow evenly do not depend on the context.
    """
    if arm.ran is None:
        return None
    if n_ctx:
        size = arm.ran.bytes_of_sequence(n_ctx, kv_scale)
        return None if size is None else size / n_ctx
    sequence = arm.ran.sequence_bytes
    return None if sequence is None else kv_scale * sequence.token_bytes(packed=True)


def reach(arms: Sequence[ArmRecord]) -> int | None:
    """Return the longest context, in tokens, at which the KLD of any arm was measured."""
    found: list[int] = []
    for arm in arms:
        facts = arm.axes[DECIDING].facts if DECIDING in arm.axes else {}
        contexts = facts.get("contexts")
        sizes = contexts if isinstance(contexts, list) else []
        found += [n for size in (facts, *sizes) if isinstance(size, dict) and isinstance(n := size.get("n_ctx"), int)]
    return max(found, default=None)
