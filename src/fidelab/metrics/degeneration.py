"""Degeneration onset of a long generation: the first index from which all the rest is degenerate.

Three kinds are seen in token ids alone; what counts is always the *rest* of the text, so a refrain or a table in the
middle is none of them:

- *loop*: the rest repeats exactly, with any period, at least three times and over at least one window.
- *repetition*: every window of 64 tokens from here on, over at least two windows' length, has a distinct-token ratio
  below a floor: half of what the most repetitive text of the reference has (its median window), so that code, lists
  and tables do not alarm.  This sees loops in which something counts on.
- *noise*: words without connection.  Two descriptions of the text compete: "tokens drawn evenly from the vocabulary"
  against a language model that knows nothing but the prompt and what was written before: bigrams backed off to
  unigrams backed off to the vocabulary, by Witten and Bell's estimate, which has no parameters (I. H. Witten and
  T. C. Bell, 1991, method C).  The onset is where the summed log-likelihood ratio of the rest is largest (the
  maximum-likelihood change-point, as in Page's CUSUM, 1954), if it exceeds 30 nats.  Natural text repeats itself:
  each token seen before costs noise several nats, each new one wins it about one.

A rest may be of several kinds in turn, noise that ends in a loop: found pieces are taken off the end until none is
left.  A gradual drift into noise has its onset about where half of the tokens are noise.  Common words in a random
order are not seen: their tokens are as familiar as a text's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_Kind = Literal["loop", "repetition", "noise"]

WINDOW = 64  # tokens
EARLIER = 32  # tokens: a smaller difference does not count
_CYCLES = 3  # a line that comes twice is not a loop
_FLOOR_SHARE = 0.5  # of a reference text's median distinct-token ratio
_NOISE_NATS = 30.0  # a text that follows the language model gets there once in e^30 / length
# Of the medians after and before, of the one after, of Pettitt's test.
_JUMP_RATIO, _JUMP_NATS, _JUMP_P = 10.0, 0.1, 1e-3


@dataclass(frozen=True)
class Onset:
    """The first token (0-based) of the degenerate rest, and how it begins.

    See docs/metrics/generated-text.md#degeneration.
    """

    at: int
    kind: _Kind


def degeneration_onset(ids: Sequence[int], context: Sequence[int], vocab: int, floor: float) -> Onset | None:
    """Find where the rest of a generation is degenerate; None for a clean one.

    See docs/metrics/generated-text.md#degeneration.

    Args:
        ids: the generated tokens, without the one that ended the sequence.
        context: the prompt's tokens, which make words known.
        vocab: size of the vocabulary.
        floor: lowest distinct-token ratio of a window, of :func:`distinct_floor`.
    """
    onset: Onset | None = None
    end = len(ids)
    while end:
        left = ids[:end]
        pieces: dict[_Kind, int | None] = {
            "loop": loop_onset(left),
            "repetition": repetition_onset(left, floor),
            "noise": noise_onset(left, context, vocab),
        }
        starts = {kind: at for kind, at in pieces.items() if at is not None}
        if not starts:
            break
        kind = min(starts, key=starts.__getitem__)
        if starts.get("loop", math.inf) - starts[kind] <= EARLIER:
            kind = "loop"  # windows see a loop before it begins; its own onset is exact
        end = starts[kind]
        onset = Onset(end, kind)
    return onset


def is_earlier(this: Onset | None, other: Onset | None) -> bool:
    """Whether ``this`` degenerates and ``other`` does not, or only more than 32 tokens later.

    See docs/metrics/generated-text.md#degeneration.
    """
    return this is not None and (other is None or this.at < other.at - EARLIER)


def still_clean(onsets: Sequence[Onset | None], lengths: Iterable[int]) -> Floats:
    """Return, for each number of tokens, the share (0…1) of generations whose onset is not before it.

    See docs/metrics/generated-text.md#degeneration.
    """
    first = np.array([math.inf if onset is None else onset.at for onset in onsets])
    return np.array([float((first >= n).mean()) for n in lengths])


# ------------------------------------------------------------------------------------------------ kinds


def loop_onset(ids: Sequence[int]) -> int | None:
    """Return the first index from which one period repeats to the end, at least 3 times and over 64 tokens; else None.

    If several periods qualify, the loop that begins first counts.  See docs/metrics/generated-text.md#degeneration.
    """
    x = np.asarray(ids, dtype=np.int64)
    n = len(x)
    best = n
    for period in range(1, n // _CYCLES + 1):
        broken = np.flatnonzero(x[:-period] != x[period:])
        start = int(broken[-1]) + 1 if len(broken) else 0
        if n - start >= max(WINDOW, _CYCLES * period):
            best = min(best, start)
    return best if best < n else None


def distinct_ratios(ids: Sequence[int]) -> Floats:
    """Return distinct tokens / 64 of each window of 64 tokens: ``[n − 63]``, empty for a shorter text.

    See docs/metrics/generated-text.md#degeneration.
    """
    n = len(ids) - WINDOW + 1
    if n <= 0:
        return np.zeros(0)
    counts = Counter(ids[:WINDOW])
    ratios = np.empty(n)
    ratios[0] = len(counts)
    for i in range(1, n):
        gone = ids[i - 1]
        counts[gone] -= 1
        if not counts[gone]:
            del counts[gone]
        counts[ids[i + WINDOW - 1]] += 1
        ratios[i] = len(counts)
    return ratios / WINDOW


def distinct_floor(texts: Iterable[Sequence[int]]) -> float:
    """Return half the median distinct-token ratio of the reference's most repetitive text; 0 without texts.

    Texts of fewer than 128 tokens are ignored, since they cannot count as repetitive either. See
    docs/metrics/generated-text.md#degeneration.
    """
    medians = [float(np.median(distinct_ratios(text))) for text in texts if len(text) >= 2 * WINDOW]
    return _FLOOR_SHARE * min(medians, default=0.0)


def repetition_onset(ids: Sequence[int], floor: float) -> int | None:
    """Return the first index from which every 64-token window, over at least 128 tokens, is below ``floor``; else None.

    See docs/metrics/generated-text.md#degeneration.
    """
    rich = np.flatnonzero(distinct_ratios(ids) >= floor)
    start = int(rich[-1]) + 1 if len(rich) else 0
    return start if len(ids) - start >= 2 * WINDOW else None


def noise_onset(ids: Sequence[int], context: Sequence[int], vocab: int) -> int | None:
    """Return the index from which the tokens look uniform over ``vocab``, or None.

    See docs/metrics/generated-text.md#degeneration.
    """
    if not ids:
        return None
    rest = np.cumsum(_noise_scores(ids, context, vocab)[::-1])[::-1]
    at = int(rest.argmax())
    return at if rest[at] > _NOISE_NATS else None


def _noise_scores(ids: Sequence[int], context: Sequence[int], vocab: int) -> Floats:
    """Per token ``log(1/vocab) − log P(token | all before)``, nats ``[n]``, with P by Witten and Bell's method C.

    With c(h) tokens seen after h, T(h) different ones among them: ``P(x|h) = (c(h,x) + T(h)·P(x)) / (c(h) + T(h))``,
    and likewise P(x) from counts without a history, backed off to 1/vocab.
    """
    unigrams: Counter[int] = Counter()
    bigrams: defaultdict[int, Counter[int]] = defaultdict(Counter)
    totals: Counter[int] = Counter()
    scores = np.empty(len(ids))
    before: int | None = None
    for n, token in enumerate((*context, *ids)):
        kinds = max(len(unigrams), 1)
        p = (unigrams[token] + kinds / vocab) / (n + kinds)
        if before is not None and totals[before]:
            followers = bigrams[before]
            p = (followers[token] + len(followers) * p) / (totals[before] + len(followers))
        if n >= len(context):
            scores[n - len(context)] = -math.log(vocab * p)
        unigrams[token] += 1
        if before is not None:
            bigrams[before][token] += 1
            totals[before] += 1
        before = token
    return scores


# ------------------------------------------------------------------------------------------- from the KL


def change_point(kl: ArrayLike) -> int | None:
    """Return the first position from which forced-decode KL (nats, ``[n]``) is permanently larger; else None.

    Pettitt's test (A. N. Pettitt, 1979): with ranks r, ``U_t = 2·Σ_{i<t} r_i − t(n+1)``; the change is at the t where U
    is lowest (KL rises), with ``p ≈ exp(−6U²/(n³+n²))``.  The test requires p < 0.001, and a later median of at least
    0.1 nats (the limit of FAIL) and ten times the earlier one.  Positions with NaN are left out. See
    docs/metrics/distributions.md#forced-decode-kld.
    """
    from scipy.stats import rankdata  # imports all of scipy.stats: a second

    values = np.asarray(kl, dtype=np.float64)
    where = np.flatnonzero(np.isfinite(values))
    n = len(where)
    if n < 2:
        return None
    good = values[where]
    u = 2 * np.cumsum(rankdata(good))[:-1] - np.arange(1, n) * (n + 1)
    t = int(u.argmin()) + 1
    before, after = float(np.median(good[:t])), float(np.median(good[t:]))
    if u[t - 1] >= 0 or -6 * u[t - 1] ** 2 / (n**3 + n**2) > math.log(_JUMP_P):
        return None
    return int(where[t]) if after >= max(_JUMP_NATS, _JUMP_RATIO * before) else None
