"""Perplexity of two arms on the same tokens. See docs/metrics/distributions.md#perplexity.

Perplexity is ``exp(Σ NLL / n)``, NLL = −log P(actual next token) in nats.  The cost of a cache is the paired

    ``ln(PPL_test / PPL_ref) = Σ (NLL_test − NLL_ref) / n``

over the tokens that both sides give a probability.  Its standard error is that of a mean over resampling clusters
(documents, or blocks of windows): tokens of one document are not independent, so it is wider than an error over
single tokens, such as llama.cpp prints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.metrics.divergence import log_softmax
from fidelab.metrics.intervals import Interval, RatioItems, ratio_estimate, ratio_interval, standard_error

Floats = NDArray[np.float64]

_BLOCK = 1 << 19  # float64 elements at a time: 4 MiB
_MAX_EXPONENT = 700.0  # nats: beyond it the exponential overflows a double


def row_nll(logits: NDArray[Any], targets: NDArray[Any]) -> Floats:
    """Return −log softmax(logits)[target] of each row, nats, in float64.

    ``logits [n, V]``: unnormalised log scores of any float type; ``targets [n]``: ids in 0 … V − 1, any other id has
    no probability.  NaN where a row holds NaN or +inf, or gives its target the probability 0: the row failed.
    See docs/metrics/distributions.md#perplexity.
    """
    n, vocab = logits.shape
    if targets.shape != (n,):
        raise ValueError(f"{n} rows do not fit targets of shape {targets.shape}")
    losses = np.empty(n)
    block = max(1, _BLOCK // vocab)
    for start in range(0, n, block):
        at = slice(start, start + block)
        pick = targets[at, None].clip(0, vocab - 1)
        losses[at] = -np.take_along_axis(log_softmax(logits[at]), pick, axis=-1)[:, 0]
    return np.where(np.isfinite(losses) & (targets >= 0) & (targets < vocab), losses, np.nan)


def unigram_nll(text: NDArray[np.int64], targets: NDArray[np.int64], vocab: int) -> Floats:
    """Return −log p of each target under a unigram model of the text, nats, ``[n]``.

    ``text [N]``: ids of the whole text, of which the targets ``[n]`` are some tokens; ``vocab``: ids that exist.  Each
    target is left out of its own model.  With c counts, N tokens and T distinct ids of the rest, Witten and Bell's
    method C (IEEE Transactions on Information Theory 37, 1991) gives a seen id ``c / (N + T)``, and shares
    ``T / (N + T)`` among the ``vocab − T`` others.  See docs/metrics/verdicts.md#the-reference-itself.
    """
    ids, counts = np.unique(text, return_counts=True)
    rest = counts[np.searchsorted(ids, targets)] - 1.0
    total, types = len(text) - 1.0, len(ids) - (rest == 0)
    unseen = types / np.maximum(vocab - types, 1.0)
    losses: Floats = np.log(total + types) - np.log(np.where(rest > 0, rest, unseen))
    return losses


@dataclass(frozen=True)
class PerplexityPair:
    """Two arms' perplexities over the rows that are usable on both sides, and their paired log-ratio.

    ``log_ratio``, its 95% ``interval`` and ``stderr`` are in nats; the perplexities have no unit, and ``…_interval``
    is their own 95% interval.  ``None``: no usable row, a single cluster (intervals, error), or no finite number.
    See docs/metrics/distributions.md#perplexity.
    """

    ppl_ref: float | None
    ppl_test: float | None
    ppl_ref_interval: Interval | None
    ppl_test_interval: Interval | None
    log_ratio: float | None
    interval: Interval | None
    stderr: float | None
    n_rows: int
    n_failed: int


def compare_nll(nll_ref: Floats, nll_test: Floats, clusters: NDArray[Any], seed: int = 0) -> PerplexityPair:
    """Return perplexities and the paired log-ratio from the NLL of rows ``[n]``, NaN where a row failed.

    See docs/metrics/distributions.md#perplexity.
    """
    usable = np.isfinite(nll_ref) & np.isfinite(nll_test)
    ref, test, gap = (
        RatioItems.of(values[usable], 1.0, clusters[usable]) for values in (nll_ref, nll_test, nll_test - nll_ref)
    )
    return PerplexityPair(
        ppl_ref=exponential(ratio_estimate(ref)),
        ppl_test=exponential(ratio_estimate(test)),
        ppl_ref_interval=_exponentials(ratio_interval(ref, seed, bounds=(0.0, math.inf))),
        ppl_test_interval=_exponentials(ratio_interval(test, seed, bounds=(0.0, math.inf))),
        log_ratio=ratio_estimate(gap),
        interval=ratio_interval(gap, seed),
        stderr=standard_error(gap),
        n_rows=len(usable),
        n_failed=int((~usable).sum()),
    )


def exponential(nats: float | None) -> float | None:
    """Return ``exp(nats)``, or ``None`` if that is not finite. See docs/metrics/distributions.md#perplexity."""
    return None if nats is None or nats > _MAX_EXPONENT else math.exp(nats)


def _exponentials(interval: Interval | None) -> Interval | None:
    return None if interval is None or interval[1] > _MAX_EXPONENT else (math.exp(interval[0]), math.exp(interval[1]))
