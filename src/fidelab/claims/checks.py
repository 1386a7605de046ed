"""One check per kind of claim: pure arithmetic over the figures of a claim, in words and numbers.

``cannot be right``: figures contradict each other or a bound, or the conclusion does not follow from them whatever
was measured.  ``underpowered``: they are too few to tell.  ``holds``: nothing here contradicts it; a rate below its
bound was possible, which does not say that it was measured well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from numpy.typing import NDArray

from fidelab.claims import schema
from fidelab.config.load import read_yaml, validate_as
from fidelab.core import KVSpec
from fidelab.errors import ConfigError, FidelabError, InputError, nearest_first
from fidelab.metrics.consistency import TOLERANCE, agree, token_rate
from fidelab.metrics.intervals import discordant_interval, mcnemar_exact, wilson_interval
from fidelab.physics.devices import find_device
from fidelab.physics.fits import impossible_rate, impossible_speedup
from fidelab.physics.geometry import Geometry
from fidelab.physics.traffic import Model

__all__ = ["KINDS", "Judged", "Verdict", "judge", "read_claims", "shipped_claims"]

Floats = NDArray[np.float64]
_ALPHA, _Z, _Z_POWER = 0.05, 1.959964, 0.841621  # two-sided 5%; power 0.8
_LEAST_DISCORDANT = 6  # all one way: fewer never reach 5%
_ROWS, _VOCABULARY, _HEAD, _EXPONENT = 256, 4096, 48, 1.65  # of the distributions that top-k scores are computed on
_SYMBOLS = 1024  # of the source whose perplexity by chunk is known exactly
_EXCESS = 3.0  # a rounding error may exceed the simulated one by so much: inputs differ


class Verdict(StrEnum):
    """What becomes of a claim."""

    HOLDS = "holds"
    UNDERPOWERED = "underpowered"
    CANNOT = "cannot be right"


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict; ``arithmetic``: sentences, ``figures``: the numbers in them by name."""

    claim: schema.Claim
    verdict: Verdict
    arithmetic: tuple[str, ...]
    figures: Mapping[str, float]


Finding = tuple[Verdict, tuple[str, ...], dict[str, float]]


def _cannot_if(wrong: bool) -> Verdict:
    return Verdict.CANNOT if wrong else Verdict.HOLDS


# ----------------------------------------------------------------------------------------------------- speed


def _rate(claim: schema.Rate) -> Finding:
    device = find_device(claim.device)
    bound = claim.batch * claim.devices * device.bandwidth / (claim.read_gb * 1e9)
    many = f"{claim.devices} × {device.name}" if claim.devices > 1 else device.name
    said = (
        f"{many} read {claim.devices * device.bandwidth / 1e9:,.0f} GB/s; {claim.read_gb:g} GB per step at batch "
        f"{claim.batch} allow {bound:,.1f} tokens/s; {claim.tok_s:,.1f} is {claim.tok_s / bound:.0%} of that"
    )
    wrong = impossible_rate(claim.tok_s, bound) is not None
    return _cannot_if(wrong), (said,), {"bound_tok_s": bound, "share": claim.tok_s / bound}


def _speedup(claim: schema.Speedup) -> Finding:
    geometry = Geometry.of_sizes(claim.layers, claim.kv_heads, claim.head_dim, claim.params)
    model = Model(geometry, claim.weight_bits)
    kv, reference = KVSpec.parse(claim.kv), KVSpec.parse(claim.reference)
    limit = model.limit(kv, reference)
    ceiling = limit if claim.context is None else model.ceiling(kv, reference, claim.context, claim.batch)
    said = [f"{model.token_bytes(reference):,} bytes per token over {model.token_bytes(kv):,} are {limit:.3f}×"]
    if claim.context is not None:
        said.append(f"with the weights, at {claim.context:,} tokens and batch {claim.batch}: {ceiling:.3f}×")
    why = impossible_speedup(claim.speedup, ceiling)
    said.append(why or f"{claim.speedup:.3g}× is below the ceiling")
    return _cannot_if(why is not None), tuple(said), {"limit": limit, "ceiling": ceiling}


def _time_rate(claim: schema.TimeRate) -> Finding:
    rates = [(row, token_rate(claim.tokens, row.seconds)) for row in claim.rows]
    # decoding alone is faster than the whole, never slower
    wrong = [r for r, rate in rates if not agree(r.tok_s, rate) and not (claim.rate == "decode" and r.tok_s > rate)]
    tokens = [row.seconds * row.tok_s for row in claim.rows]
    said = [
        f"{len(wrong)} of {len(claim.rows)} rows differ by more than {TOLERANCE:.0%} from {claim.tokens} tokens over "
        "their time",
        f"time × rate gives {min(tokens):,.0f} to {max(tokens):,.0f} tokens",
    ]
    if wrong:
        row = max(wrong, key=lambda one: abs(math.log(one.seconds * one.tok_s / claim.tokens)))
        said.append(
            f"the farthest, {row.at}: {claim.tokens} / {row.seconds:g} s = {claim.tokens / row.seconds:.3g} tokens/s, "
            f"not {row.tok_s:g}"
        )
    figures = {"wrong_rows": float(len(wrong)), "fewest_tokens": min(tokens), "most_tokens": max(tokens)}
    return _cannot_if(bool(wrong)), tuple(said), figures


def _two_rates(claim: schema.TwoRates) -> Finding:
    low, high = min(claim.rates, key=claim.rates.__getitem__), max(claim.rates, key=claim.rates.__getitem__)
    ratio = claim.rates[high] / claim.rates[low]
    said = (
        f"{high} has {claim.rates[high]:g} tokens/s, {low} {claim.rates[low]:g}: {ratio:.2f} times as much, where "
        f"one load allows {1 + TOLERANCE:.2f}"
    )
    return _cannot_if(not agree(claim.rates[high], claim.rates[low])), (said,), {"ratio": ratio}


# ----------------------------------------------------------------------------------------------------- counts


def _proportions(claim: schema.Proportions) -> Finding:
    if claim.lost is not None and claim.gained is not None:
        return _paired(claim, claim.lost, claim.gained)
    from scipy.stats import fisher_exact

    n = claim.n
    pairs = list(combinations(claim.counts, 2))
    level = _ALPHA / len(pairs)
    said, figures, verdicts = [], {}, []
    for a, b in pairs:
        x, y = claim.counts[a], claim.counts[b]
        p = float(fisher_exact(np.array([[x, n - x], [y, n - y]]))[1])
        low, high = _newcombe(x, y, n)
        said.append(
            f"{a} {x} against {b} {y} of {n}: {100 * (x - y) / n:+.2f} points "
            f"({100 * low:+.2f} to {100 * high:+.2f}), Fisher's exact p = {p:.2g}"
        )
        figures[f"p {a}/{b}"] = p
        verdicts.append(_decided(claim, p < level, low, high))
    if len(pairs) > 1:
        said.append(f"{len(pairs)} comparisons: p has to be below {level:.3g}")
    base = min(claim.counts.values()) / n
    reach = _detectable(base, n)
    figures["detectable"] = reach
    said.append(
        f"{n} items detect {100 * reach:.1f} points or more from {base:.1%} (two-sided 5%, power 0.8, normal "
        "approximation)"
    )
    x, y = min(claim.counts.values()), max(claim.counts.values())
    if x != y and Verdict.UNDERPOWERED in verdicts and claim.claimed == "differ":
        needed = _items_for(x / n, y / n)
        figures["items_needed"] = float(needed)
        said.append(f"the largest difference here takes about {needed:,} items per arm")
    for verdict in (Verdict.CANNOT, Verdict.UNDERPOWERED):
        if verdict in verdicts:
            return verdict, tuple(said), figures
    return Verdict.HOLDS, tuple(said), figures


def _decided(claim: schema.Proportions, significant: bool, low: float, high: float) -> Verdict:
    if claim.claimed == "differ":
        return Verdict.HOLDS if significant else Verdict.UNDERPOWERED
    margin = claim.margin or 0.0
    if -margin < low and high < margin:
        return Verdict.HOLDS
    return Verdict.CANNOT if low >= margin or high <= -margin else Verdict.UNDERPOWERED


def _paired(claim: schema.Proportions, lost: int, gained: int) -> Finding:
    """McNemar's exact test and the interval of gained − lost."""
    n, discordant = claim.n, lost + gained
    p = mcnemar_exact(lost, gained)
    share, shift = discordant / n, (gained - lost) / n
    low, high = discordant_interval(lost, gained, n, 1 - _ALPHA)
    reach = min(1.0, max(_LEAST_DISCORDANT / n, (_Z + _Z_POWER) * math.sqrt(share / n)))
    said = (
        f"{lost} lost and {gained} gained of {n}: {100 * shift:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
        f"McNemar's exact p = {p:.2g}",
        f"with {share:.1%} of items discordant, {n} detect about {100 * reach:.1f} points (two-sided 5%, power 0.8)",
    )
    return _decided(claim, p < _ALPHA, low, high), said, {"p": p, "detectable": reach, "low": low, "high": high}


def _newcombe(x: int, y: int, n: int) -> tuple[float, float]:
    """95% interval of x/n − y/n from Wilson's (R. G. Newcombe, 1998, method 10)."""
    (l1, u1), (l2, u2), p, q = wilson_interval(x, n), wilson_interval(y, n), x / n, y / n
    return p - q - math.hypot(p - l1, u2 - q), p - q + math.hypot(u1 - p, q - l2)


def _items_for(p: float, q: float) -> int:
    """Items per arm for a two-proportion z-test, pooled under no difference."""
    mean = (p + q) / 2
    spread = _Z * math.sqrt(2 * mean * (1 - mean)) + _Z_POWER * math.sqrt(p * (1 - p) + q * (1 - q))
    return math.ceil((spread / (p - q)) ** 2)


def _detectable(p: float, n: int) -> float:
    """The smallest rise from ``p`` (fall, where there is no room above) that n items per arm detect."""
    up = p <= 0.5
    low, high = 0.0, 1 - p if up else p
    if _items_for(p, p + high if up else p - high) > n:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = middle > 0 and _items_for(p, p + middle if up else p - middle) <= n
        low, high = (low, middle) if enough else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------ distributions


def top_k_score(ref: Floats, test: Floats, k: int, floor: float) -> float:
    """``Σ P·(log P − log Q)`` over the union of both sides' top k; a token that a side lacks has ``floor`` there.

    Args:
        ref, test: log-probabilities ``[vocabulary]``.
    """
    mine, others = (np.argpartition(-side, k - 1)[:k] for side in (ref, test))
    union = np.union1d(mine, others)
    p = np.where(np.isin(union, mine), ref[union], floor)
    q = np.where(np.isin(union, others), test[union], floor)
    return float(np.sum(np.exp(p) * (p - q)))


def _constructed(kl: float) -> list[tuple[Floats, Floats]]:
    """Pairs of log-probabilities [vocabulary] of mean KL ``kl``: a power law of 48 likely tokens, and it with noise."""
    noise = np.random.default_rng(0).standard_normal((_ROWS, _VOCABULARY))
    ranks = np.arange(1, _VOCABULARY + 1)
    ref = -_EXPONENT * np.log(ranks) - np.where(ranks > _HEAD, 14.0, 0.0)
    ref -= np.log(np.exp(ref).sum())

    def disturbed(scale: float) -> Floats:
        test = ref + scale * noise
        return np.asarray(test - np.log(np.exp(test).sum(axis=1, keepdims=True)))

    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        if float((np.exp(ref) * (ref - disturbed(middle))).sum(axis=1).mean()) > kl:
            high = middle
        else:
            low = middle
    return [(ref, row) for row in disturbed((low + high) / 2)]


def _top_k(claim: schema.TopK) -> Finding:
    true = min(claim.kl)
    pairs = _constructed(true)
    scores = [float(np.mean([top_k_score(*pair, k, claim.floor) for pair in pairs])) for k in claim.k]
    said = (
        f"a power law of {_HEAD} likely and {_VOCABULARY - _HEAD:,} rare tokens, disturbed until its KL over all of "
        f"them is {true:.3g} nats ({_ROWS} draws), scores {scores[0]:.3g} with K = {claim.k[0]} and {scores[1]:.3g} "
        f"with K = {claim.k[1]}",
        f"a token that one side lacks is charged {claim.floor:g}: a swap at rank K costs P·(log P + {-claim.floor:g})",
    )
    figures = {"true": true, "score_0": scores[0], "score_1": scores[1]}
    difference, alone = claim.kl[0] - claim.kl[1], scores[0] - scores[1]
    if claim.k[0] == claim.k[1] or abs(difference) > 2 * abs(alone) or difference * alone <= 0:
        return Verdict.HOLDS, (*said, "the choice of K does not explain the difference"), figures
    return Verdict.CANNOT, (*said, "the choice of K alone makes a difference of the published size"), figures


def chunk_perplexity(symbols: int, chunk: int) -> float:
    """The perplexity of Laplace's rule, the ideal predictor, on texts of a source with unknown frequencies.

    Frequencies are uniform on the simplex, so that a chunk's probability is ``Π n_i! · (V−1)! / (c+V−1)!`` and each
    count is beta-binomial: exact, and the same text and predictor for every length of chunk.
    """
    from scipy.special import gammaln
    from scipy.stats import betabinom

    counts = np.arange(chunk + 1)
    expected = symbols * float(betabinom.pmf(counts, chunk, 1, symbols - 1) @ gammaln(counts + 1))
    total = float(gammaln(chunk + symbols) - gammaln(symbols)) - expected
    return math.exp(total / chunk)


def _perplexity(claim: schema.Perplexity) -> Finding:
    chunks = {name: window.chunk for name, window in claim.arms.items()}
    if len(set(chunks.values())) == 1:
        chunk = next(iter(chunks.values()))
        return _cannot_if(not claim.comparable), (f"all arms have chunks of {chunk:,}: these do not part them",), {}
    by_length = sorted(claim.arms.values(), key=lambda window: window.chunk)
    short, long = by_length[0], by_length[-1]
    alone = chunk_perplexity(_SYMBOLS, short.chunk) / chunk_perplexity(_SYMBOLS, long.chunk) - 1
    between = short.ppl / long.ppl - 1
    said = (
        f"a token of a chunk of {short.chunk:,} has {(short.chunk - 1) / 2:,.0f} tokens before it on average, of "
        f"{long.chunk:,} {(long.chunk - 1) / 2:,.0f}",
        f"the ideal predictor of a source of {_SYMBOLS:,} symbols with unknown frequencies has {alone:+.1%} perplexity "
        f"from that alone; the arms differ by {between:+.1%}",
    )
    return _cannot_if(claim.comparable), said, {"chunk_alone": alone, "published": between}


def _vocabulary(claim: schema.Vocabulary) -> Finding:
    left = claim.vocabulary - claim.kept
    if left < 0:
        raise InputError(f"kept is {claim.kept:,}, more than the vocabulary of {claim.vocabulary:,}")
    padding = claim.padding * claim.tp - 1
    said = [
        f"{left:,} of {claim.vocabulary:,} columns ({left / claim.vocabulary:.0%}) are left out; padding to multiples "
        f"of {claim.padding} on {claim.tp} devices is at most {padding:,}"
    ]
    p, q = claim.outside
    missing = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    figures = {"left_out": float(left), "most_padding": float(padding), "missing_nats": missing}
    if left > padding:
        said.append(
            f"where tokens left out have {p:g} of the mass under the reference and {q:g} under the candidate, KL over "
            f"the rest, normalized again, misses {missing:.3g} nats and all differences among them"
        )
    return _cannot_if(left > padding), tuple(said), figures


# ----------------------------------------------------------------------------------------------------- rounding


def _rounded(values: Any, bits: int) -> Floats:
    """To ``bits`` significant bits, ties to even, without bounds of the exponent."""
    fraction, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits))


def attention_error(tokens: int, head_dim: int, bits: int) -> tuple[float, float]:
    """‖o − r‖/‖r‖ of attention over N(0, 1): weights and values rounded; and every product and sum as well.

    Means over 8 queries against float64, one key after the other.
    """
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((n, head_dim)) for n in (8, tokens, tokens))
    scores = q @ k.T / math.sqrt(head_dim)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    exact, short = weights @ v, _rounded(weights, bits)
    once = short @ _rounded(v, bits)
    out = np.zeros_like(exact)
    for place in range(tokens):
        out = _rounded(out + _rounded(short[:, place, None] * _rounded(v[place], bits), bits), bits)

    def error(found: Floats) -> float:
        return float((np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)).mean())

    return error(once), error(out)


def _kernel_error(claim: schema.KernelError) -> Finding:
    once, everywhere = attention_error(claim.tokens, claim.head_dim, claim.bits)
    unit = 2.0**-claim.bits
    said = (
        f"{claim.bits} significant bits round by at most {unit:.2%}; weights and values rounded, sums in 32 bits, err "
        f"by at most {(1 + unit) ** 2 - 1:.2%} of Σ|p·v|",
        f"simulated at {claim.tokens:,} tokens: {once:.2%} so, and {everywhere:.2%} with every product and every sum "
        f"rounded, too; published: {claim.error:.2%}, {claim.error / everywhere:.0f} times that",
    )
    figures = {"unit_roundoff": unit, "rounded_inputs": once, "rounded_everywhere": everywhere}
    return _cannot_if(claim.error > _EXCESS * everywhere), said, figures


def dequantization_errors(code_bits: int, smallest: float, largest: float) -> tuple[float, float]:
    """Mean relative error of (code − zero)·scale in FP16 and in BF16, over all differences and 1,024 scales.

    Scales are float16, as checkpoints store them: FP16 rounds the product, BF16 the scale and the product.
    """
    scales = np.geomspace(smallest, largest, 1024).astype(np.float16).astype(np.float64)
    codes = np.arange(1, 2**code_bits, dtype=np.float64)  # the sign changes no error
    exact = codes[:, None] * scales
    with np.errstate(over="ignore"):
        fp16 = exact.astype(np.float16).astype(np.float64)
    bf16 = _rounded(codes[:, None] * _rounded(scales, 8), 8)
    return float(np.mean(np.abs(fp16 / exact - 1))), float(np.mean(np.abs(bf16 / exact - 1)))


def _dequantization(claim: schema.Dequantization) -> Finding:
    if claim.smallest_scale > claim.largest_scale:
        raise InputError("smallest_scale is above largest_scale")
    fp16, bf16 = dequantization_errors(claim.code_bits, claim.smallest_scale, claim.largest_scale)
    closer, ratio = ("fp16", bf16 / fp16) if fp16 < bf16 else ("bf16", fp16 / bf16)
    said = (
        f"all {2**claim.code_bits} codes × 1,024 scales from {claim.smallest_scale:g} to {claim.largest_scale:g}: mean "
        f"relative error {fp16:.2e} in FP16, {bf16:.2e} in BF16",
        f"{closer.upper()} is {ratio:.1f} times closer: 11 significant bits against 8, and a float16 scale is rounded "
        "again on its way to BF16",
    )
    return _cannot_if(closer != claim.claimed), said, {"fp16": fp16, "bf16": bf16, "ratio": ratio}


# -------------------------------------------------------------------------------------------------------- table

_CHECKS: Final[Mapping[str, tuple[type[schema.Claim], Callable[[Any], Finding]]]] = {
    "rate": (schema.Rate, _rate),
    "speedup": (schema.Speedup, _speedup),
    "time_rate": (schema.TimeRate, _time_rate),
    "two_rates": (schema.TwoRates, _two_rates),
    "proportions": (schema.Proportions, _proportions),
    "top_k": (schema.TopK, _top_k),
    "perplexity": (schema.Perplexity, _perplexity),
    "vocabulary": (schema.Vocabulary, _vocabulary),
    "kernel_error": (schema.KernelError, _kernel_error),
    "dequantization": (schema.Dequantization, _dequantization),
}
KINDS = tuple(_CHECKS)


def judge(claim: schema.Claim) -> Judged:
    """The verdict on one claim.

    Raises:
        InputError: an unknown device or format, or fields that do not belong together; names the claim.
    """
    try:
        return Judged(claim, *_CHECKS[claim.kind][1](claim))
    except FidelabError as error:
        raise InputError(f"claim {claim.name!r}: {error}") from None


def read_claims(path: Path) -> tuple[schema.Claim, ...]:
    """The claims of a file.

    Raises:
        ConfigError: no such file, not YAML, an unknown kind or key, a value that is none; names the place.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a claims file, or none for those that come with fidelab")
    return _claims(read_yaml(path, keys="'claims:'"), str(path))


def shipped_claims() -> tuple[schema.Claim, ...]:
    """The claims that come with fidelab."""
    return _claims(yaml.safe_load(files("fidelab.claims").joinpath("shipped.yaml").read_text("utf-8")), "shipped.yaml")


def _claims(data: Mapping[str, Any], where: str) -> tuple[schema.Claim, ...]:
    entries = data.get("claims")
    if set(data) != {"claims"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: expected the key 'claims' alone, with a list of claims")
    claims = []
    for number, entry in enumerate(entries):
        place = f"claims.{number}"
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or kind not in _CHECKS:
            known = ", ".join(nearest_first(str(kind), KINDS))
            raise ConfigError(f"{where}: {place}: unknown kind {kind!r:.80}; known: {known}")
        claims.append(validate_as(_CHECKS[kind][0], entry, where, place))
    for first, second in pairwise(sorted(claim.name for claim in claims)):
        if first == second:
            raise ConfigError(f"{where}: two claims are named {first!r}")
    return tuple(claims)
