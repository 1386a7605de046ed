"""KL divergence of next-token distributions: rows, summaries, the top-k bound.

See docs/metrics/distributions.md#mean-kl-divergence.

``P`` is the reference arm's distribution, ``Q`` the candidate's; everything is in nats.

A row is never partly trusted: NaN or +inf anywhere in the common vocabulary, or Q = 0 where P > 0, makes the
whole row *failed*, and a failed row is counted, not averaged.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fidelab.metrics.intervals import Interval, RatioItems, event_interval, ratio_estimate, ratio_interval

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Estimate = tuple[float | None, Interval | None]
Bools = NDArray[np.bool_]

CONFIDENT_FLIP = 0.1
"""Nats: a smaller margin of the reference is a near tie.  See docs/metrics/distributions.md#confident-flips."""

TOP = 10
"""Tokens of each side whose overlap is counted."""

# Elements of a work buffer over the whole vocabulary, and over some of its columns.  Of smaller ones there are so many
# calls that threads wait for the interpreter's lock: twice the time with two threads.
_BLOCK = 1 << 18
_COLUMNS = 1 << 14
_TOP_K_FOLD = 64
# Sums of float32 log-probabilities are known to about this much.
_MASS_RESOLUTION = 1e-6
_UNLISTED = -30.0  # log-probability of a token that a side does not list, in a definition of others
_MAX_STATISTIC = 1e100  # of χ² and k3: what is larger has no mean that a float could square
_MIN_WINDOW_END_ROWS = 8  # at the end of windows: fewer are not evidence that a way diverges

# ------------------------------------------------------------------------------------------------- head


@dataclass(frozen=True, eq=False)
class Head:
    """The LM head of a checkpoint: final-norm states to logits.

    ``weight``: ``[V, d]`` float32; ``bias``: ``[V]`` float32 or None.  Logits are
    ``cap·tanh(scale·(h·Wᵀ + b) / cap)``, or ``scale·(h·Wᵀ + b)`` where ``softcap`` is None.
    See docs/metrics/distributions.md#estimators.
    """

    weight: Singles
    bias: Singles | None = None
    softcap: float | None = None
    scale: float = 1.0


def head_logits(
    hidden: Singles,
    head: Head,
    vocab: int | None = None,
    product: Callable[[Singles, Singles], Singles] = operator.matmul,
) -> Singles:
    """Compute the head's logits ``[n, vocab]`` from states ``hidden [n, d]``, all in float32.

    ``vocab`` keeps the first ids only; None keeps all.  The product is a float32 matmul (estimator ``hidden``), of
    numpy's or another's.  See docs/metrics/distributions.md#estimators.
    """
    logits = product(hidden, head.weight[:vocab].T)
    if head.bias is not None:
        logits += head.bias[:vocab]
    if head.scale != 1.0:
        logits *= np.float32(head.scale)
    if head.softcap is not None:
        cap = np.float32(head.softcap)
        logits /= cap
        np.tanh(logits, out=logits)
        logits *= cap
    return logits


def log_softmax(logits: NDArray[Any]) -> Floats:
    """Return the log softmax of each row ``[n, V]``, in float64; NaN for a row with NaN, +inf or only −inf.

    See docs/metrics/distributions.md#mean-kl-divergence.
    """
    rows = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        rows -= rows.max(axis=-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows


# ------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, eq=False)
class RowComparison:
    """Comparison of ``n`` rows, one array element per row. See docs/metrics/distributions.md#failed-positions.

    Attributes:
        kl: KL(P‖Q) in nats, ≥ 0; NaN where the row failed.
        failed: the row is unusable (see the module's docstring).
        top1: both sides have the same most likely token (the first of equals); False where failed.
        confidence: the reference's largest probability; NaN where the reference's own row is broken.
        dp: Q(actual) − P(actual) for the actual next token; NaN where failed or where there is no such token.
        nll_ref: −log P(actual), nats; NaN where that side is broken or where there is no such token.
        nll_test: −log Q(actual), nats; likewise.
        margin: log P of the reference's most likely token minus log P of the candidate's, nats, ≥ 0: how clearly
            the reference prefers its own; 0 where they agree, NaN where the row failed or that is not known.
        cut: the probability of the ids that one side alone has, before both were cut to the common ones; NaN where
            the row failed, or both have the same ids.
        right_ref: 1 where the actual next token is the reference's most likely one (or one of equals), else 0; NaN
            where that side is broken or where there is no such token.
        right_test: the same of the candidate.
        reverse_kl: KL(Q‖P) in nats, ≥ 0; inf where P = 0 under Q > 0.
        jsd: the Jensen–Shannon divergence, ½KL(P‖M) + ½KL(Q‖M) with M = ½(P + Q), nats, 0 … log 2.
        tv: the total variation, ½Σ|P − Q|, 0 … 1.
        chi2: χ²(P‖Q) = Σ P²/Q − 1, ≥ 0: the variance of P/Q over tokens that Q draws.
        overlap: share of P's :data:`TOP` most likely tokens that are among Q's.

    The last five are NaN where the row failed, and of rows that hold the top tokens alone.
    """

    kl: Floats
    failed: Bools
    top1: Bools
    confidence: Floats
    dp: Floats
    nll_ref: Floats
    nll_test: Floats
    margin: Floats
    cut: Floats
    right_ref: Floats
    right_test: Floats
    reverse_kl: Floats
    jsd: Floats
    tv: Floats
    chi2: Floats
    overlap: Floats

    def __len__(self) -> int:
        return len(self.kl)

    @classmethod
    def concat(cls, parts: Sequence[RowComparison]) -> RowComparison:
        """Concatenate the rows of several chunks, in order. At least one chunk is needed."""
        columns: dict[str, Any] = {
            f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)
        }
        return cls(**columns)


def compare_rows(
    ref_logits: NDArray[Any],
    test_logits: NDArray[Any],
    targets: NDArray[Any],
    threads: int = 1,
    *,
    kl_only: bool = False,
) -> RowComparison:
    """Return KL(P‖Q) = Σ_x P(x)·(log P(x) − log Q(x)) of each row over the whole vocabulary, nats.

    Inputs are unnormalised log scores (logits or log-probabilities) of any float type, ``[n, V_ref]`` and
    ``[n, V_test]``; both are cut to the common ids and normalised there.  ``targets [n]``: the actual next tokens; an
    id outside the common vocabulary (−1 for "none") gives NaN in the columns that need it.  ``threads`` does not affect
    the results.  ``kl_only``: skip the other divergences, whose columns are then NaN. This takes half of the time.

    Everything is in float64: with a = scores minus their peak, ``KL = Σ_x P·(a_P − a_Q) + log Σ_x exp a_Q − log Σ_x
    exp a_P``.  (``torch.log_softmax`` of float32 normalises by a float32 sum, which costs 1e-6, and 4e-5 in a flat row
    of 150,000: more than a 16-bit cache does.)  0·log 0 = 0; tiny negative results become 0; bit-identical rows give
    exactly 0.

    "P > 0 where Q = 0" is judged on log scores: Q has −inf at a token where P has not, however small P is
    there.  −inf on both sides is a masked token and costs nothing.

    Rows go through small buffers, a few at a time: the memory needed does not grow with ``n``.
    See docs/metrics/distributions.md#mean-kl-divergence.
    """
    [found] = compare_rows_of(ref_logits, [test_logits], targets, threads, kl_only=kl_only)
    return found


def compare_rows_of(
    ref_logits: NDArray[Any],
    tests: Sequence[NDArray[Any]],
    targets: NDArray[Any],
    threads: int = 1,
    *,
    kl_only: bool = False,
) -> list[RowComparison]:
    """Compare several tests with one reference: what :func:`compare_rows` returns of each, bit for bit.

    ``tests``: each ``[n, V_test]``.  What depends on the reference alone is computed once for tests of one width.
    See docs/metrics/distributions.md#mean-kl-divergence.
    """
    for test in tests:
        if ref_logits.ndim != 2 or test.ndim != 2 or len(ref_logits) != len(test):
            raise ValueError(f"rows do not match: reference {ref_logits.shape}, test {test.shape}")
    n, found = len(ref_logits), dict[int, RowComparison]()
    for width in {test.shape[1] for test in tests}:
        same = [number for number, test in enumerate(tests) if test.shape[1] == width]
        vocab = min(ref_logits.shape[1], width)
        if targets.shape != (n,) or vocab == 0:
            raise ValueError(f"{n} rows over {vocab} common ids do not fit targets of shape {targets.shape}")
        rows = _of_one_width(ref_logits, [tests[number] for number in same], vocab, targets, threads, kl_only)
        found |= dict(zip(same, rows, strict=True))
    return [found[number] for number in range(len(tests))]


def _of_one_width(
    ref: NDArray[Any],
    tests: Sequence[NDArray[Any]],
    vocab: int,
    targets: NDArray[Any],
    threads: int,
    kl_only: bool,
) -> list[RowComparison]:
    n = len(ref)
    has_goal = (targets >= 0) & (targets < vocab)
    pick = np.where(has_goal, targets, 0)
    block = max(1, _BLOCK // vocab)
    top1 = np.empty((len(tests), n), dtype=bool)
    cut = np.full((len(tests), n), np.nan)
    columns = np.empty((len(tests), 11, n))

    def fill(span: range) -> None:
        work = _Work(min(block, len(span)), vocab, kl_only)
        with np.errstate(invalid="ignore", divide="ignore"):
            for start in span[::block]:
                at = slice(start, min(start + block, span.stop))
                work.refer(ref[at])
                for k, test in enumerate(tests):
                    top1[k, at], cut[k, at] = work.compare(test[at], pick[at], columns[k, :, at])

    step = max(block, -(-n // threads))
    spans = [range(start, min(start + step, n)) for start in range(0, n, step)]
    if len(spans) > 1:
        with ThreadPoolExecutor(len(spans)) as pool:
            list(pool.map(fill, spans))
    elif spans:
        fill(spans[0])
    return [comparison_of(*one, has_goal) for one in zip(columns, top1, cut, strict=True)]


def comparison_of(columns: Floats, top1: Bools, cut: Floats, has_goal: Bools) -> RowComparison:
    """Build rows from the columns that were computed for them.

    ``columns [11, n]``: KL; log-sum-exp of a_P and of a_Q; a_P and a_Q of the actual token; a_P of Q's most likely
    token; KL(Q‖P), Jensen–Shannon divergence, total variation, χ²(P‖Q), overlap of the top tokens.  ``has_goal``: the
    actual token is in the common vocabulary.  A row whose KL is not finite has failed.  See
    docs/metrics/distributions.md#mean-kl-divergence.
    """
    kl, norm_p, norm_q, score_p, score_q, flipped, reverse, jsd, tv, chi2, overlap = columns
    failed = ~np.isfinite(kl)
    with np.errstate(invalid="ignore"):
        nll_ref, nll_test = (np.where(has_goal, norm - a, np.nan) for norm, a in ((norm_p, score_p), (norm_q, score_q)))
        right_ref, right_test = (
            np.where(has_goal & ~np.isnan(a), a == 0.0, np.nan).astype(np.float64) for a in (score_p, score_q)
        )
        return RowComparison(
            kl=np.where(failed, np.nan, np.maximum(kl, 0.0)),
            failed=failed,
            top1=top1 & ~failed,
            confidence=np.exp(-norm_p),
            dp=np.where(failed, np.nan, np.exp(-nll_test) - np.exp(-nll_ref)),
            nll_ref=nll_ref,
            nll_test=nll_test,
            margin=np.where(failed, np.nan, 0.0 - flipped),
            cut=np.where(failed, np.nan, cut),
            right_ref=right_ref,
            right_test=right_test,
            **{
                name: np.where(failed, np.nan, np.where(kl == 0.0, 0.0, np.maximum(column, 0.0)))
                for name, column in (("reverse_kl", reverse), ("jsd", jsd), ("tv", tv), ("chi2", chi2))
            },
            overlap=np.where(failed, np.nan, overlap),
        )


class _Work:
    """Some rows of the reference, and buffers of :func:`compare_rows_of`: ``[block, vocab]``, ``[block, columns]``."""

    def __init__(self, block: int, vocab: int, kl_only: bool) -> None:
        self._vocab = vocab
        self._kl_alone = kl_only
        self._probabilities = [np.empty((block, vocab)) for _ in range(2)]
        self._columns = [np.empty((block, min(vocab, _COLUMNS))) for _ in range(3)]

    def refer(self, ref: NDArray[Any]) -> None:
        """Take rows of the reference, with which :meth:`compare` compares rows of tests."""
        n = len(ref)
        self._ref, ref = ref, ref[:, : self._vocab]
        self._best = ref.argmax(axis=-1)
        self._peak = ref[np.arange(n), self._best, None].astype(np.float64)
        self._sum = np.zeros(n)  # Σ exp a_P
        p = self._probabilities[0][:n]
        for at, (a_p, _, _) in self._spans(n):
            np.subtract(ref[:, at], self._peak, out=a_p)
            self._sum += np.exp(a_p, out=p[:, at]).sum(axis=-1)
        self._top = None if self._kl_alone else _top(ref, min(TOP, ref.shape[1]))

    def compare(self, test: NDArray[Any], pick: NDArray[Any], columns: Floats) -> tuple[Bools, Floats | float]:
        """Return whether both rows have the same top token, and the probability that is cut off.

        Fills ``columns [11, rows]``, those of :func:`comparison_of`.
        """
        vocab, n, ref = self._vocab, len(test), self._ref
        whole, rows = ref if ref.shape[1] > vocab else test if test.shape[1] > vocab else None, np.arange(n)
        ref, test = ref[:, :vocab], test[:, :vocab]
        p, q = (buffer[:n] for buffer in self._probabilities)
        best_p, best_q = self._best, test.argmax(axis=-1)
        peak_p, peak_q = self._peak, test[rows, best_q, None].astype(np.float64)
        totals = np.zeros((3, n))  # Σ exp a_Q, Σ exp(a_P)·(a_P − a_Q), Σ exp(a_Q)·(a_P − a_Q)
        for at, (a_p, a_q, work) in self._spans(n):
            np.subtract(ref[:, at], peak_p, out=a_p)
            np.subtract(test[:, at], peak_q, out=a_q)
            totals[0] += np.exp(a_q, out=q[:, at]).sum(axis=-1)
            gap = np.subtract(a_p, a_q, out=a_q)
            forward, backward = _dot(p[:, at], gap, work), _dot(q[:, at], gap, work)
            if not (np.isfinite(forward).all() and np.isfinite(backward).all()):  # masked tokens (0·∞), a broken row
                masked = a_p == -np.inf
                unheard = (masked & (q[:, at] > 0)).any(axis=-1)
                gap[masked] = 0.0
                # an infinity that is left is Q = 0 under P > 0; where P underflows to 0 the product is NaN
                forward, backward = _dot(p[:, at], gap, work), _dot(q[:, at], gap, work)
                backward[unheard] = -np.inf
            totals[1:] += forward, backward
        sum_p, (sum_q, forward, backward) = self._sum, totals
        norm_p, norm_q = np.log(sum_p), np.log(sum_q)
        columns[0], columns[6] = forward / sum_p + norm_q - norm_p, norm_p - norm_q - backward / sum_q
        columns[1:3] = norm_p, norm_q
        for column, (x, peak, ids) in zip(
            (3, 4, 5), ((ref, peak_p, pick), (test, peak_q, pick), (ref, peak_p, best_q)), strict=True
        ):
            columns[column] = x[rows, ids] - peak[:, 0]
        if self._top is None:
            columns[6:] = np.nan
        else:
            # Share, per row `[n, V]`, of the `TOP` largest of one side that are among those of the other
            shared = self._top[:, :, None] == _top(test, self._top.shape[1])[:, None, :]
            columns[10] = np.asarray(shared.any(axis=-1).mean(axis=-1))
            columns[7:10] = self._other_divergences(p, q, sum_p, sum_q, columns[0])
        return best_p == best_q, np.nan if whole is None else np.exp(log_softmax(whole)[:, vocab:]).sum(axis=-1)

    def _other_divergences(
        self, p: Floats, q: Floats, sum_p: Floats, sum_q: Floats, kl: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Jensen–Shannon divergence, total variation and χ² of unnormalised rows; overwrites ``q``."""
        # With ρ = P/Q: JSD = log 2 + ½KL − ½Σ (P + Q)·log(1 + ρ), because log(1 + 1/ρ) = log(1 + ρ) − log ρ.
        shared, logs, squares = sums = np.zeros((3, len(p)))
        scale = (sum_p / sum_q)[:, None]
        for at, (ratio, both, work) in self._spans(len(p)):
            x, y = p[:, at], q[:, at]
            y *= scale  # both sum to sum_p: cheaper than to make both sum to 1
            shared += np.minimum(x, y, out=work).sum(axis=-1)
            np.divide(x, y, out=ratio)
            part = _dot(x, ratio, work)
            if np.isnan(part).any():  # tokens without probability on both sides
                ratio[(x == 0) & (y == 0)] = 0.0
                part = _dot(x, ratio, work)
            squares += part
            np.add(x, y, out=both)
            logs += _dot(both, np.log(np.add(ratio, 1.0, out=ratio), out=ratio), work)
        shared, logs, squares = sums / sum_p
        return math.log(2) + (kl - logs) / 2, 1 - shared, squares - 1

    def _spans(self, n: int) -> Iterator[tuple[slice, list[Floats]]]:
        """Some columns at a time, with three buffers ``[n, columns]``."""
        for start in range(0, self._vocab, _COLUMNS):
            at = slice(start, min(start + _COLUMNS, self._vocab))
            yield at, [buffer[:n, : at.stop - start] for buffer in self._columns]


def _dot(weights: Floats, scores: Floats, work: Floats) -> Floats:
    """``Σ_x weight·score`` of each row.  Not by ``einsum``, which holds the interpreter's lock while it computes."""
    return np.asarray(np.multiply(weights, scores, out=work).sum(axis=-1))


def _top(scores: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Return the ids ``[n, count]`` of the largest scores of each row ``[n, V]``. Ties are broken arbitrarily."""
    n, vocab = scores.shape
    width = vocab // _TOP_K_FOLD
    if width <= count:
        return _largest(scores, count)
    # They are in columns with the largest maxima, or after the table: four times as fast as to partition all.
    inside = width * _TOP_K_FOLD
    columns = _largest(scores[:, :inside].reshape(n, _TOP_K_FOLD, width).max(axis=1), count)
    within = (np.arange(_TOP_K_FOLD)[:, None] * width + columns[:, None, :]).reshape(n, -1)
    ids = np.concatenate([within, np.broadcast_to(np.arange(inside, vocab), (n, vocab - inside))], axis=1)
    return np.take_along_axis(ids, _largest(np.take_along_axis(scores, ids, axis=1), count), axis=1)


def _largest(scores: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Return the indices of the ``count`` largest values along the last axis."""
    most = scores.shape[-1] - count
    return np.argpartition(scores, most, axis=-1)[..., most:]


# ------------------------------------------------------------------------------------------------ top-k


def topk_lower_bound(
    ref_ids: ArrayLike, ref_logprobs: ArrayLike, test_ids: ArrayLike, test_logprobs: ArrayLike
) -> float:
    """Return a lower bound, in nats, of one position's KL from the log-probabilities that two engines report.

    Ids ``[k_ref]`` and ``[k_test]`` are distinct per side.  With C the ids on both sides and the rest masses
    p = 1 − Σ_C P and q = 1 − Σ_C Q (clamped at 0), ``Σ_C P·(log P − log Q) + p·log(p/q) ≤ KL(P‖Q)`` by the
    log-sum inequality (estimator ``topk``).  q is taken as at least 1e-6, the resolution of
    float32 log-probabilities: rounding can lower the bound, never lift it above the truth.

    Returns NaN where an input is NaN or +inf, and inf where Q = 0 is reported under P > 0: the position
    failed.  See docs/metrics/distributions.md#mean-kl-divergence.
    """
    ref, test = _reported(ref_ids, ref_logprobs), _reported(test_ids, test_logprobs)
    if any(math.isnan(value) or value == math.inf for value in (*ref.values(), *test.values())):
        return math.nan
    kept = [(ref[token], test[token]) for token in ref if token in test]
    rest_p = max(0.0, 1.0 - math.fsum(math.exp(log_p) for log_p, _ in kept))
    rest_q = max(_MASS_RESOLUTION, 1.0 - math.fsum(math.exp(log_q) for _, log_q in kept))
    terms = [math.exp(log_p) * (log_p - log_q) for log_p, log_q in kept if log_p > -math.inf]
    if rest_p > 0.0:
        terms.append(rest_p * math.log(rest_p / rest_q))
    return max(0.0, math.fsum(terms))


def floored_topk(ref_logits: NDArray[Any], test_logits: NDArray[Any], k: int) -> Floats:
    """Return the KL by REFRACT's definition from logits ``[n, V]`` of both sides, nats ``[n]``. For comparison only.

    ``Σ P·(log P − log Q)`` over the union of both sides' ``k`` most likely tokens, where a token that one side does not
    list has the log-probability −30 on that side.  See docs/metrics/between-runs.md#imported-results.
    """
    found = np.empty(len(ref_logits))
    common = min(ref_logits.shape[1], test_logits.shape[1])
    k = min(k, common)
    sides = log_softmax(ref_logits[:, :common]), log_softmax(test_logits[:, :common])
    for row, logs in enumerate(zip(*sides, strict=True)):
        if np.isnan(logs).any():
            found[row] = np.nan
            continue
        listed = [_largest(side, k) for side in logs]
        ids = np.union1d(*listed)
        log_p, log_q = (
            np.where(np.isin(ids, own), side[ids], _UNLISTED) for side, own in zip(logs, listed, strict=True)
        )
        with np.errstate(invalid="ignore"):
            found[row] = np.where(log_p == -np.inf, 0.0, np.exp(log_p) * (log_p - log_q)).sum()
    return found


def _reported(ids: ArrayLike, logprobs: ArrayLike) -> Mapping[int, float]:
    keys, values = np.asarray(ids).tolist(), np.asarray(logprobs, dtype=np.float64).tolist()
    table = dict(zip(keys, values, strict=True))
    if len(table) != len(keys):
        raise ValueError("a token id is reported twice")
    return table


def compare_topk(
    ref: tuple[NDArray[Any], NDArray[Any]], test: tuple[NDArray[Any], NDArray[Any]], targets: NDArray[Any]
) -> RowComparison:
    """Compare ``n`` rows of which each side reports only some tokens: (ids ``[n, k]``, log-probabilities ``[n, k]``).

    Negative ids are padding.  ``kl`` is :func:`topk_lower_bound`; a row has failed if a side reports nothing for it.
    Columns that depend on the actual token, ``targets [n]``, are NaN where a side does not report it. ``dp`` is then
    NaN in all rows, since a mean over the reported ones would cover only likely tokens.  See
    docs/metrics/distributions.md#mean-kl-divergence.
    """
    columns = np.full((6, len(targets)), np.nan)  # KL, confidence, Δp, NLL of both sides, margin
    top1 = np.zeros(len(targets), dtype=bool)
    for row, target in enumerate(targets.tolist()):
        p, q = (
            {k: v for k, v in zip(*side, strict=True) if k >= 0}
            for side in [(ids[row].tolist(), logprobs[row].tolist()) for ids, logprobs in (ref, test)]
        )
        columns[3:5, row] = -p.get(target, math.nan), -q.get(target, math.nan)
        if not (p and q):
            continue
        columns[0, row] = topk_lower_bound(list(p), list(p.values()), list(q), list(q.values()))
        columns[1, row] = math.exp(max(p.values()))
        top1[row] = _likeliest(p) == _likeliest(q)
        columns[5, row] = max(p.values()) - p.get(_likeliest(q), math.nan)
    kl, confidence, dp, nll_ref, nll_test, margin = columns
    if np.isfinite(columns[3:5, targets >= 0]).all():
        dp = np.exp(-nll_test) - np.exp(-nll_ref)
    failed = ~np.isfinite(kl)
    return RowComparison(
        kl=np.where(failed, np.nan, kl),
        failed=failed,
        top1=top1 & ~failed,
        confidence=confidence,
        dp=np.where(failed, np.nan, dp),
        nll_ref=nll_ref,
        nll_test=nll_test,
        margin=np.where(failed, np.nan, margin),
        **dict.fromkeys(
            ("cut", "right_ref", "right_test", "reverse_kl", "jsd", "tv", "chi2", "overlap"), np.full(len(kl), np.nan)
        ),
    )


def _likeliest(reported: Mapping[int, float]) -> int:
    """Return the token of the largest log-probability. Among equals it is the one with the lowest id."""
    return min(reported, key=lambda token: (-reported[token], token))


# -------------------------------------------------------------------------------------------- summaries


@dataclass(frozen=True)
class KLSummary:
    """KL over positions, nats. Every statistic covers the usable positions and is None without any.

    ``n_positions`` counts all scored positions, the ``n_failed`` ones among them.  ``top1`` is the rate of
    agreeing most likely tokens (0…1), ``rms_dp`` the root mean square of Q(actual) − P(actual).
    See docs/metrics/distributions.md#mean-kl-divergence.
    """

    mean: float | None
    median: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None
    top1: float | None
    rms_dp: float | None
    n_positions: int
    n_failed: int


def summarise_kl(kl: Floats, failed: Bools, top1: Bools, dp: Floats) -> KLSummary:
    """Summarise ``n`` positions: mean, percentiles (linear interpolation), top-1 agreement and RMS Δp.

    A position that is marked failed, or whose KL is not finite, is counted but left out of every statistic. See
    docs/metrics/distributions.md#mean-kl-divergence.
    """
    usable = ~failed & np.isfinite(kl)
    n_failed = len(kl) - int(usable.sum())
    if not usable.any():
        none: dict[str, Any] = {f.name: None for f in fields(KLSummary) if not f.name.startswith("n_")}
        return KLSummary(**none, n_positions=len(kl), n_failed=n_failed)
    good, shift = kl[usable], dp[usable]
    shift = shift[np.isfinite(shift)]
    median, p90, p95, p99, p999 = np.percentile(good, [50, 90, 95, 99, 99.9]).tolist()
    return KLSummary(
        mean=float(good.mean()),
        median=median,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        max=float(good.max()),
        top1=float(top1[usable].mean()),
        rms_dp=float(np.sqrt(np.mean(shift**2))) if len(shift) else None,
        n_positions=len(kl),
        n_failed=n_failed,
    )


@dataclass(frozen=True)
class Flips:
    """Changed most likely tokens over the usable positions; intervals are 95%, by clusters.

    See docs/metrics/distributions.md#flips.

    Attributes:
        top1_ci: of the share that did not change.
        confident_flips: share that changed although the reference's margin is :data:`CONFIDENT_FLIP` or more; None
            where a margin is not known.
        confident_flips_ci: its interval.
    """

    top1_ci: Interval | None = None
    confident_flips: float | None = None
    confident_flips_ci: Interval | None = None


def summarise_flips(rows: RowComparison, clusters: NDArray[Any], *, identical: bool = False) -> Flips:
    """Summarise the flips of rows that belong to ``clusters [n]`` (documents). See docs/metrics/distributions.md#flips.

    A confident flip is a flip, so the upper end of its share is at most that of flips.  ``identical``: the
    output equals the reference's bit by bit.
    """
    usable = ~rows.failed & np.isfinite(rows.kl)
    if not usable.any():
        return Flips()
    agree, margin, clusters = rows.top1[usable], rows.margin[usable], clusters[usable]
    same = RatioItems.of(agree, 1.0, clusters)
    flips = Flips(event_interval(same, identical=identical))
    if np.isnan(margin).any():
        return flips
    real = RatioItems.of(~agree & (margin >= CONFIDENT_FLIP), 1.0, clusters)
    ends = event_interval(real, identical=identical)
    if ends is not None and flips.top1_ci is not None:
        ends = ends[0], max(ends[0], min(ends[1], 1 - flips.top1_ci[0]))
    return replace(flips, confident_flips=float(real.num.mean()), confident_flips_ci=ends)


@dataclass(frozen=True)
class Divergences:
    """Means over the usable positions, each with its 95% interval by clusters; None if unknown or infinite.

    See docs/metrics/distributions.md#other-divergences.

    Attributes:
        reverse_kl, jsd, tv, overlap: means of the columns of :class:`RowComparison`.
        k3: mean of r − 1 − log r with r = P/Q of the actual tokens, nats (Schulman, Approximating KL Divergence, 2020).
        chi2: mean of χ²(P‖Q).
        rollout: tokens of a response of the arm at which the effective sample size of importance weights P/Q has
            fallen to one half, log 2 / mean log(1 + χ²); None where the distributions are equal.
    """

    reverse_kl: Estimate = (None, None)
    jsd: Estimate = (None, None)
    tv: Estimate = (None, None)
    overlap: Estimate = (None, None)
    k3: Estimate = (None, None)
    chi2: Estimate = (None, None)
    rollout: Estimate = (None, None)


def summarise_divergences(rows: RowComparison, clusters: NDArray[Any], seed: int = 0) -> Divergences:
    """Average rows that belong to ``clusters [n]``. See docs/metrics/distributions.md#other-divergences."""
    usable = ~rows.failed & np.isfinite(rows.kl)

    def mean(values: Floats, known: Bools = usable, most: float = math.inf) -> Estimate:
        if not known.any() or not (np.abs(values[known]) < _MAX_STATISTIC).all():
            return None, None
        items = RatioItems.of(values[known], 1.0, clusters[known])
        return ratio_estimate(items), ratio_interval(items, seed, bounds=(0.0, most))

    log_ratio = rows.nll_test - rows.nll_ref  # log P/Q of the actual token
    with np.errstate(over="ignore"):
        k3 = np.expm1(log_ratio) - log_ratio
    rate, ends = mean(np.log1p(rows.chi2))
    return Divergences(
        reverse_kl=mean(rows.reverse_kl),
        jsd=mean(rows.jsd, most=math.log(2)),
        tv=mean(rows.tv, most=1.0),
        overlap=mean(rows.overlap, most=1.0),
        k3=mean(k3, usable & np.isfinite(log_ratio)),
        chi2=mean(rows.chi2),
        rollout=(
            _half_life(rate),
            None if ends is None or ends[0] == 0.0 else (_half_life(ends[1]) or 0.0, _half_life(ends[0]) or 0.0),
        ),
    )


def _half_life(rate: float | None) -> float | None:
    return math.log(2) / rate if rate else None


def kld_score(mean: float) -> float:
    """Return axis B's score ``100·exp(−mean KL)``, which is 100 at 0 nats.

    See docs/metrics/distributions.md#mean-kl-divergence.
    """
    return 100.0 * math.exp(-mean)


@dataclass(frozen=True)
class BinnedMeans:
    """Mean KL (nats) of the usable positions per bin.

    ``edges`` has one entry more than ``means`` and ``counts``; bins are half open, the last one closed.  A
    bin without usable positions has the mean None and the count 0.
    See docs/metrics/distributions.md#mean-kl-divergence.
    """

    edges: tuple[float, ...]
    means: tuple[float | None, ...]
    counts: tuple[int, ...]


def kl_by_position(positions: NDArray[Any], kl: Floats, n_bins: int = 32) -> BinnedMeans:
    """Return the mean KL in ``n_bins`` equal spans of the scored window positions ``[n]``.

    The edges come from all positions, failed ones (KL NaN) included, so that candidates share them.  Without
    any position there are no bins.  See docs/metrics/distributions.md#mean-kl-divergence.
    """
    if not len(positions):
        return BinnedMeans((), (), ())
    return _binned(np.linspace(positions.min(), positions.max() + 1, n_bins + 1), positions, kl)


def parting(kl: Floats, allowed: float, span: int = 16) -> int | None:
    """Find the first row from which KL (nats, ``[windows, rows]``, NaN if failed) stays above ``allowed``.

    It is above in at least half of the windows there, and so are at least half of the rows of all windows in the
    ``span`` rows that begin with it (in all rows where there are fewer).  Neither a single row nor noise that is mostly
    below ``allowed`` meets this. With fewer rows left before the end, as many rows as elsewhere must be above, or three
    quarters of the rows left and at least eight.  See docs/metrics/distributions.md#paths.
    """
    windows, rows = kl.shape
    if np.isinf(allowed) or not rows:
        return None
    span = min(span, rows)
    above = (~(kl <= allowed)).sum(axis=0)
    total = np.concatenate([[0], np.cumsum(above), np.full(span - 1, above.sum())])  # of the rows before each
    ahead = total[span : span + rows] - total[:rows]
    half, left = span * windows / 2, windows * np.arange(rows, 0, -1)
    found = (above >= windows / 2) & (ahead >= np.minimum(half, np.maximum(_MIN_WINDOW_END_ROWS, 0.75 * left)))
    return int(np.argmax(found)) if found.any() else None


def kl_by_confidence(confidence: Floats, kl: Floats) -> BinnedMeans:
    """Return the mean KL in ten equal spans of the reference's top-1 probability ``[n]``, 0…1.

    See docs/metrics/distributions.md#mean-kl-divergence.
    """
    return _binned(np.linspace(0.0, 1.0, 11), confidence, kl)


def _binned(edges: Floats, keys: NDArray[Any], kl: Floats) -> BinnedMeans:
    usable = np.isfinite(kl) & np.isfinite(keys)
    n_bins = len(edges) - 1
    bins = np.clip(np.searchsorted(edges, keys[usable], side="right") - 1, 0, n_bins - 1)
    counts = np.bincount(bins, minlength=n_bins)
    sums = np.bincount(bins, weights=kl[usable], minlength=n_bins)
    means = tuple(float(s / c) if c else None for s, c in zip(sums, counts, strict=True))
    return BinnedMeans(tuple(edges.tolist()), means, tuple(counts.tolist()))
