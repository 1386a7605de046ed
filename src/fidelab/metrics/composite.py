"""The composite score, the only table of bands, and the verdict.

See docs/metrics/verdicts.md#composite-and-bands and docs/metrics/verdicts.md#verdicts.

The composite is REFRACT's summary of some axes and does not affect the verdict.  The verdict follows from the upper
95% bound of the mean KL and is downgraded by one band if another axis shows a loss.  FAIL takes more than a wide
interval: the mean or the lower bound has to be that of FAIL.  Without an upper bound the mean, or a lower bound of it,
still gives the best possible verdict, and may prove FAIL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import UnknownNameError
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS

Floats = NDArray[np.float64]


class Band(StrEnum):
    """The four grades, best first. See docs/metrics/verdicts.md#verdicts."""

    EXCELLENT = "EXCELLENT"
    PASS = "PASS"
    DEGRADED = "DEGRADED"
    FAIL = "FAIL"


_ORDER = tuple(Band)


@dataclass(frozen=True)
class Bands:
    """Lowest score (0…100) of each band; below the last one is FAIL.

    See docs/metrics/verdicts.md#composite-and-bands.
    """

    excellent: float
    passed: float
    degraded: float

    def band(self, score: float) -> Band:
        """Return the band of a score. NaN is FAIL."""
        edges = (self.excellent, self.passed, self.degraded)
        return next((band for band, edge in zip(_ORDER, edges, strict=False) if score >= edge), Band.FAIL)


BANDS = {"fidelab": Bands(95.0, 85.0, 70.0), "refract": Bands(90.0, 80.0, 60.0)}

_MIN_SCORE = 1e-9  # stands for 0 where its reciprocal is wanted

# Upper bounds (nats, exclusive) of the mean KL for each band; from the last one on is FAIL.
KL_EDGES = (0.01, 0.05, 0.1)
_EQUAL_COST_SHARE = 0.1  # of the larger mean: costs that differ by less are taken for the same

# ------------------------------------------------------------------------------------------- composite


def harmonic_mean(scores: Sequence[float]) -> float | None:
    """Return ``k / Σ 1/s``: 0 if any score is ≤ 0, NaN if any is NaN, None without scores.

    See docs/metrics/verdicts.md#composite-and-bands.
    """
    if not scores:
        return None
    return float(_harmonic(np.asarray(scores, dtype=np.float64)[None, :])[0])


def _harmonic(scores: Floats) -> Floats:
    positive = np.where(scores <= 0, 1.0, scores)  # keeps the division quiet; replaced below
    means: Floats = np.where((scores <= 0).any(axis=1), 0.0, scores.shape[1] / (1.0 / positive).sum(axis=1))
    return np.where(np.isnan(scores).any(axis=1), np.nan, means)


@dataclass(frozen=True)
class CompositeScore:
    """The harmonic mean of the axes measured. See docs/metrics/verdicts.md#composite-and-bands.

    Attributes:
        value: 0…100; None when no axis was measured.
        interval: 95% interval; None where an axis measured brought none, or a score is NaN.
        band: None unless all its axes were measured.
        too_close_to_call: the band is known and the interval reaches into another one.
        missing: the axes that were not measured.
    """

    value: float | None
    interval: tuple[float, float] | None
    band: Band | None
    too_close_to_call: bool
    missing: tuple[str, ...]


def composite(
    scores: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    *,
    bands: str = "fidelab",
) -> CompositeScore:
    """Return the harmonic mean of the axis scores (0…100), with its interval and band.

    ``scores``: score of each axis in the composite, None if it was not measured.  ``intervals``: of each score, 95%.
    The interval of the composite treats these as independent estimates: with x = 1/score and its ends, the sum S of the
    x reaches down by ``√Σ (x − x_low)²`` and up by ``√Σ (x_high − x)²`` (Zou & Donner, Statistics in Medicine 27,
    2008), and the mean is k/S.  See docs/metrics/verdicts.md#composite-and-bands.

    Raises:
        UnknownNameError: If the band table does not exist.
    """
    if bands not in BANDS:
        raise UnknownNameError("band table", bands, BANDS)
    measured = {axis: score for axis, score in scores.items() if score is not None}
    missing = tuple(axis for axis in scores if axis not in measured)
    value = harmonic_mean(list(measured.values()))
    if value is None:
        return CompositeScore(None, None, None, False, missing)
    interval = None
    if not math.isnan(value):
        intervals = intervals or {}
        if any(axis not in intervals for axis in measured):
            interval = None
        else:
            rows = [(intervals[axis][0], score, intervals[axis][1]) for axis, score in measured.items()]
            most, x, least = (1.0 / np.maximum(np.array(column), _MIN_SCORE) for column in zip(*rows, strict=True))
            high = x.sum() - math.hypot(*np.maximum(x - least, 0.0))
            low = x.sum() + math.hypot(*np.maximum(most - x, 0.0))
            ends = (len(x) / low, len(x) / high)
            interval = (0.0 if min(low for low, _, _ in rows) <= 0 else ends[0]), min(ends[1], 100.0)
    if missing:
        return CompositeScore(value, interval, None, False, missing)
    table = BANDS[bands]
    close = interval is not None and table.band(interval[0]) != table.band(interval[1])
    return CompositeScore(value, interval, table.band(value), close, missing)


# --------------------------------------------------------------------------------------------- verdict


def kl_band(upper_mean_kl: float) -> Band:
    """Return the band of the upper 95% bound of a mean KL in nats. NaN is FAIL.

    See docs/metrics/verdicts.md#verdicts.
    """
    return next((b for b, edge in zip(_ORDER, KL_EDGES, strict=False) if upper_mean_kl < edge), Band.FAIL)


def is_worse(band: Band, other: Band) -> bool:
    """Whether a band is worse than another one. See docs/metrics/verdicts.md#verdicts."""
    return _ORDER.index(band) > _ORDER.index(other)


def lower(band: Band) -> Band:
    """Return the next worse band; FAIL stays FAIL. See docs/metrics/verdicts.md#verdicts."""
    return _ORDER[min(_ORDER.index(band) + 1, len(_ORDER) - 1)]


@dataclass(frozen=True)
class BandDecision:
    """Verdict on a candidate: ``band``, or None if there is no verdict, and ``because``, the reasons.

    ``at_best``: the best band still possible, if there is no verdict (None: none is ruled out) or the interval crosses
    the edge of a band.  ``at_worst``: FAIL, where the upper end alone is that of FAIL, so that there is no verdict:
    anything from ``at_best`` to it is possible.  ``preliminary``: the band rests on an interval over too few clusters.
    ``by_kld``: nothing but the mean KL gave the band: no position failed, and nothing lowered it.
    See docs/metrics/verdicts.md#verdicts.
    """

    band: Band | None
    because: tuple[str, ...]
    at_best: Band | None = None
    at_worst: Band | None = None
    preliminary: bool = False
    by_kld: bool = True

    @property
    def label(self) -> str:
        """The band's name, or "no verdict", or "cannot tell" where the interval is too wide for one."""
        if self.band is not None:
            return self.band.value
        return "no verdict" if self.at_worst is None else "cannot tell"


def verdict(
    kld_upper: float | None,
    n_failed: int,
    n_positions: int,
    lowered_because: Sequence[str] = (),
    failed_because: Sequence[str] = (),
    *,
    kld_least: float | None = None,
    kld_lower: float | None = None,
    n_clusters: int | None = None,
) -> BandDecision:
    """Judge one candidate. See docs/metrics/verdicts.md#verdicts.

    Args:
        kld_upper: upper 95% bound of the mean KL, nats, from an estimator over the full vocabulary; None
            without one.  By itself, with neither of the two below, it stands for the mean.
        n_failed: positions with NaN, +inf or Q = 0 under P > 0, out of ``n_positions`` scored ones.
        lowered_because: reasons for a downgrade by one band (R-NIAH or task loss, perplexity against KLD, earlier
            degeneration).  Several reasons together downgrade by one band only.
        failed_because: what makes the output unusable (garbage).
        kld_least: the mean KL itself, or a lower bound of it (``topk``), nats: no upper bound can lie below it.
            Without ``kld_upper`` it can rule bands out, and give none but FAIL.
        kld_lower: lower 95% bound of the mean KL, nats; where its band is a better one, that is ``at_best``.
        n_clusters: resampling clusters (documents) that the mean KL was computed over.  A verdict from fewer than
            :data:`~fidelab.metrics.intervals.MIN_STUDENTIZED_CLUSTERS` is preliminary, unless every KL was exactly 0.

    FAIL by ``kld_upper`` needs ``kld_least`` or ``kld_lower`` in FAIL, too.  Else the interval is only wide: ``band``
    is None and ``at_worst`` FAIL.

    Any failed position caps the verdict at DEGRADED; more than 1% of them, or a reason in ``failed_because``, is FAIL.
    That also holds if no KLD could be computed, so that broken output always gets a verdict.
    """
    if not 0 <= n_failed <= n_positions:
        raise ValueError(f"{n_failed} failed of {n_positions} positions")
    failures = [f"{n_failed} of {n_positions} positions failed"] if n_failed else []
    if failed_because or n_failed * 100 > n_positions:
        return BandDecision(Band.FAIL, (*failures, *failed_because, *lowered_because), by_kld=False)

    def graded(*costs: float | None) -> Band:
        """Return the band of the largest of these costs, after downgrade and cap."""
        band = max((kl_band(cost) for cost in costs if cost is not None), key=_ORDER.index, default=Band.EXCELLENT)
        band = lower(band) if lowered_because else band
        return max(band, Band.DEGRADED, key=_ORDER.index) if n_failed else band

    band, by_kld = graded(kld_upper, kld_least), not (failures or lowered_because)
    preliminary = n_clusters is not None and n_clusters < MIN_STUDENTIZED_CLUSTERS and kld_upper != 0.0
    least = graded(kld_lower) if kld_lower is not None else band
    few = f"preliminary: fewer than {MIN_STUDENTIZED_CLUSTERS} clusters were resampled ({n_clusters})"
    early = [few] if preliminary else []
    if kld_upper is not None:
        facts = [f"mean KL at most {kld_upper:.3g} nats (95%)", *failures, *lowered_because]
        shown = [cost for cost in (kld_least, kld_lower) if cost is not None]
        if band is Band.FAIL and shown and graded(*shown) is not Band.FAIL:
            best = least if kld_lower is not None else graded(kld_least)
            facts.append(f"of the interval only the upper end is that of FAIL: at best {best.value}")
            facts += early
            return BandDecision(None, tuple(facts), best, Band.FAIL, preliminary, by_kld)
        crossing = least if least is not band else None
        if crossing is not None:
            facts.append(f"the interval begins at {kld_lower:.3g} nats: at best {crossing.value}")
        return BandDecision(band, (*facts, *early), crossing, None, preliminary, by_kld)
    if band is Band.FAIL and kld_least is not None:
        facts = [f"mean KL at least {kld_least:.3g} nats on this text", *failures, *lowered_because]
        return BandDecision(band, tuple(facts), preliminary=preliminary, by_kld=by_kld)
    reason = "no upper bound of a mean KL over the full vocabulary"
    at_best = None if band is Band.EXCELLENT else band
    return BandDecision(None, (reason, *failures, *lowered_because), at_best)


def worse_of(first: BandDecision, other: BandDecision, what: str) -> BandDecision:
    """Return the verdict on a candidate with a second KL that the same bands judge, which ``what`` names.

    It is the worse one of the two; undecided if either is and neither is FAIL.  ``by_kld`` is False where the second KL
    makes the candidate DEGRADED or FAIL: a limit on the first one does not go over that.
    See docs/metrics/verdicts.md#verdicts.
    """
    if first.band is Band.FAIL:
        return first
    reasons = (f"{what}: {other.because[0]}", *first.because)
    if other.band is Band.FAIL:
        return BandDecision(Band.FAIL, reasons, preliminary=other.preliminary, by_kld=False)
    best = max((ruling.at_best or ruling.band or Band.EXCELLENT for ruling in (first, other)), key=_ORDER.index)
    preliminary = first.preliminary or other.preliminary
    if first.band is None or other.band is None:
        worst = max((ruling.at_worst or ruling.band or Band.FAIL for ruling in (first, other)), key=_ORDER.index)
        because = first.because if first.band is None else reasons
        return BandDecision(None, because, best, worst, preliminary, first.by_kld)
    if not is_worse(other.band, first.band):
        return first
    by_kld = first.by_kld and other.band is Band.PASS
    crossing = best if is_worse(other.band, best) else None
    return BandDecision(other.band, reasons, crossing, None, preliminary, by_kld)


def costs_equivalent(difference: tuple[float, float] | None, larger: float) -> bool:
    """Whether the 95% interval of the paired difference of two costs is within ± 10% of the larger mean.

    Two one-sided tests at 2.5% (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987).  The margin is relative, as costs
    span orders of magnitude.  See docs/metrics/statistics.md#paired-differences.
    """
    return difference is not None and max(abs(end) for end in difference) <= _EQUAL_COST_SHARE * larger
