"""Sizes by which the configurations of a report are compared.  See docs/metrics.md#bytes-per-token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import one_line
from fidelab.results.record import ArmRecord

REFERENCE = "the reference"
_WIDTH = re.compile(r"(?:bf|f|fp|float|bfloat)(16|32)", re.IGNORECASE)


def bytes_in_16_bits(arm: ArmRecord) -> float | None:
    """Return an arm's bytes per token with 16 bits on both sides; ``None`` for formats with neither 16 nor 32 bits."""
    ran = arm.ran
    if ran is None or not ran.cache_bytes_per_token:
        return None
    widths = {match and match[1] for side in (ran.k_dtype, ran.v_dtype) for match in [_WIDTH.fullmatch(side or "")]}
    return (
        {"16": 1.0, "32": 0.5}.get(next(iter(widths)) or "", 0.0) * ran.cache_bytes_per_token
        if len(widths) == 1
        else None
    )


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes by which arms are compared, for the arms that report them.

    ``what``: ``cache`` (bytes per token) if weights are the same or unknown, ``weights`` (bytes) if caches are, and
    ``total`` (bytes of one sequence of ``n_ctx`` tokens with the weights) if both differ.  ``base``: baseline of
    savings: for ``cache`` a 16-bit cache if any arm has a 16-bit or 32-bit one, else the reference.
    """

    what: str
    sizes: dict[str, float]
    base: float | None
    base_name: str
    n_ctx: int | None = None

    @classmethod
    def of(cls, reference: ArmRecord, candidates: Sequence[ArmRecord], others: Sequence[ArmRecord] = ()) -> Sizes:
        """Return the sizes of the arms that ran."""
        arms = [arm for arm in candidates if arm.ran is not None and arm.measured]
        caches, weights = ({_bytes_of(kind, arm) for arm in (reference, *arms)} for kind in ("cache", "weights"))
        n_ctx = reach(candidates)
        what = "cache"
        if len(weights) > 1 and None not in weights:
            what = "total" if len(caches) > 1 and None not in caches and n_ctx else "weights"
        base, name = _bytes_of(what, reference, n_ctx), REFERENCE
        if what == "cache":
            wide = [
                (size, arm.kv_text if size == (arm.ran and arm.ran.cache_bytes_per_token) else "16 bits")
                for arm in (reference, *others, *candidates)
                if (size := bytes_in_16_bits(arm))
            ]
            base, name = min(wide, key=lambda known: (known[0], known[1] == "16 bits"), default=(base, name))
        sizes = {arm.name: size for arm in arms if (size := _bytes_of(what, arm, n_ctx)) is not None}
        return cls(what, sizes, base, name, n_ctx if what == "total" else None)

    def of_arm(self, arm: ArmRecord) -> float | None:
        """Return the size of any arm of the report, bytes."""
        return _bytes_of(self.what, arm, self.n_ctx)

    def saving(self, name: str) -> float | None:
        """Return the share of the base's bytes that an arm saves; negative if it takes more."""
        size = self.sizes.get(name)
        return None if size is None or not self.base else 1 - size / self.base

    def describe(self, name: str) -> str:
        """Describe the saving, such as ``47% smaller KV cache than bf16``; empty if unknown."""
        saving, size = self.saving(name), self.sizes.get(name)
        if saving is None or size is None:
            return ""
        share = f"{abs(saving):.0%} {'less' if saving >= 0 else 'more'}"
        if self.what == "cache":
            than = "smaller" if saving >= 0 else "larger"
            return f"{abs(saving):.0%} {than} KV cache than {one_line(self.base_name)}"
        what = "of weights" if self.what == "weights" else f"of weights and cache at {self.n_ctx:,} tokens"
        return f"{share} than the reference ({size / 2**20:,.0f} MiB {what})"


def _bytes_of(what: str, arm: ArmRecord, n_ctx: int | None = None) -> float | None:
    cache, weights = (arm.ran.packed_cache_bytes, arm.ran.size) if arm.ran else (None, None)
    if what == "cache":
        return cache
    if what == "weights" or weights is None:
        return weights
    return None if cache is None else weights + (n_ctx or 0) * cache


def reach(arms: Sequence[ArmRecord]) -> int | None:
    """Return the longest context, in tokens, at which the KLD of any arm was measured."""
    found: list[int] = []
    for arm in arms:
        facts = arm.axes[DECIDING].facts if DECIDING in arm.axes else {}
        contexts = facts.get("contexts")
        sizes = contexts if isinstance(contexts, list) else []
        found += [n for size in (facts, *sizes) if isinstance(size, dict) and isinstance(n := size.get("n_ctx"), int)]
    return max(found, default=None)
