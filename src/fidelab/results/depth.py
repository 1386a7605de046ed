"""To which depth of context a verdict holds, of runs that scored rows at several depths.

See docs/metrics/distributions.md#depth.
"""

from __future__ import annotations

from dataclasses import dataclass

from fidelab.metrics.composite import Band, is_worse, verdict
from fidelab.results.measurement import Measurement
from fidelab.results.numbers import counted, format_tokens


@dataclass(frozen=True)
class Depth:
    """One depth: positions with half of ``n_ctx`` tokens to all of them before.

    ``clusters``: documents, or blocks of a text without them.  ``band``: of its mean KL alone; ``None`` where the
    interval or the number of documents does not suffice for one.
    """

    n_ctx: int
    clusters: int
    band: Band | None


def is_deep(kld: Measurement | None) -> bool:
    """Return whether a KLD was measured at several depths of the same documents."""
    return kld is not None and kld.facts.get("protocol") == "depth"


def depths_of(kld: Measurement) -> tuple[Depth, ...]:
    """Return the depths of a KLD, the shallowest first; empty for one that was measured otherwise."""
    if not is_deep(kld):
        return ()
    open_ = {size["n_ctx"] for size in _sizes(kld, "undecided")}
    sizes = {size["n_ctx"]: size for name in ("contexts", "undecided") for size in _sizes(kld, name)}
    found = []
    for n_ctx, size in sorted(sizes.items()):
        mean, band = kld.metric("mean", {"context": n_ctx}), None
        if n_ctx not in open_ and mean is not None and mean.interval is not None and not mean.bound:
            low, high = mean.interval
            band = verdict(high, 0, 0, kld_least=mean.value, kld_lower=low).band
        found.append(Depth(n_ctx, int(size.get("n_clusters") or 0), band))
    return tuple(found)


def depth_statement(kld: Measurement) -> str:
    """Return ``excellent to 8k, pass to 32k, beyond: not tested``; empty for a KLD that is not of several depths.

    The band that is stated of a depth is the worst one up to it.  The first depth that is not decided ends the list,
    and so does FAIL.
    """
    depths = depths_of(kld)
    if not depths or all(metric.bound for metric in kld.metrics if metric.key == "mean"):
        return ""
    ends: dict[Band, int] = {}  # of each band the deepest context
    worst, left = Band.EXCELLENT, list(depths)
    while left and left[0].band is not None and worst is not Band.FAIL:
        depth = left.pop(0)
        assert depth.band is not None
        worst = depth.band if is_worse(depth.band, worst) else worst
        ends[worst] = depth.n_ctx
    said = [
        f"{band.value.lower()} {'at' if band is Band.FAIL else 'to'} {format_tokens(n)}" for band, n in ends.items()
    ]
    if Band.FAIL in ends:
        return ", ".join(said)
    word = (kld.cluster or "document").rpartition(" ")[2]
    rest = (
        f"not decided ({counted(left[0].clusters, word)} at {format_tokens(left[0].n_ctx)})" if left else "not tested"
    )
    return f"{', '.join(said)}, beyond: {rest}" if said else rest


def _sizes(kld: Measurement, name: str) -> list[dict[str, int]]:
    listed = kld.facts.get(name)
    known = listed if isinstance(listed, list) else []
    return [size for size in known if isinstance(size, dict) and isinstance(size.get("n_ctx"), int)]
