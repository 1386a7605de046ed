"""How often 95% intervals miss on either side, from simulated units; nominal is 2.5% per side.

python benchmarks/coverage.py [--samples 2000] [--only cost share ...]

Every sample goes through the package's own functions.  Beside them stand Student's t and the percentiles of the
bootstrap, for comparison.  A cell reads "estimate above / below", in % of samples: the truth lies below the lower end /
above the upper end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fidelab.axes.base import AxisScore
from fidelab.metrics.composite import composite, harmonic_mean
from fidelab.metrics.divergence import kld_score
from fidelab.metrics.intervals import (
    RatioItems,
    event_interval,
    paired_difference,
    ratio_interval,
    resample_weights,
)

Floats = NDArray[np.float64]
Rng = np.random.Generator
Interval = tuple[float, float]
Methods = dict[str, Interval]

GOALS = {0.2: 4.0, 0.5: 4.0, 1.0: 7.0}  # % of upper ends of a cost that may lie too low, by σ
UNITS = (2, 3, 4, 5, 6, 8, 10, 12, 19, 20, 40, 100, 200)
DRAWS = 200_000  # for truths without a closed form


@dataclass(frozen=True)
class Case:
    """One line of the table: a sampler of n units, and the truth."""

    group: str
    name: str
    n: int
    truth: float
    draw: Callable[[Rng], Methods]
    goal: float | None = None
    upper: bool = False  # also print the median upper end


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000, help="per line")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    args = parser.parse_args()
    began, lines, beyond = time.perf_counter(), list[dict[str, object]](), 0
    for group in args.only:
        print(f"\n### {group}: {GROUPS[group].__doc__}\n")
        for number, case in enumerate(GROUPS[group]()):
            missed = _missed(case, args.samples)
            if number == 0:
                print("| units | n | " + " | ".join(missed) + " |\n|---|---" + "|---" * len(missed) + "|")
            cells = [_cell(above, below, args.samples) for above, below, _ in missed.values()]
            if case.upper:
                cells = [f"{cell} ({100 * m[2]:.2g}%)" for cell, m in zip(cells, missed.values(), strict=True)]
            over = case.goal is not None and missed["fidelab"][1] > case.goal + _noise(case, args.samples)
            over |= case.group == "events" and (case.truth, case.n) == (0.001, 13) and missed["fidelab"][2] > MEDIAN_END
            beyond += over
            print(f"| {case.name} | {case.n} | {' | '.join(cells)} |{' beyond the goal' if over else ''}", flush=True)
            lines.append({"group": group, "units": case.name, "n": case.n, "missed": missed})
    seconds = time.perf_counter() - began
    print(f"\n{args.samples} samples per line; {beyond} lines beyond the goal; {seconds:.0f} s\n")
    print(json.dumps({"benchmark": "coverage", "samples": args.samples, "lines": lines}))


def _noise(case: Case, samples: int) -> float:
    """Two standard errors of a rate at the goal, %; only events' goals allow for it."""
    goal = case.goal or 0.0
    return 2 * math.sqrt(goal * (100 - goal) / samples) if case.group == "events" else 0.0


def _cell(above: float, below: float, samples: int) -> str:
    """Both rates, %, each with twice its standard error; of a rate that was not seen by the rule of three."""

    def error(rate: float) -> float:
        return 2 * math.sqrt(rate * (100 - rate) / samples) if 0 < rate < 100 else 300 / samples

    return f"{above:.1f} ± {error(above):.1f} / {below:.1f} ± {error(below):.1f}"


def _missed(case: Case, samples: int) -> dict[str, tuple[float, float, float]]:
    """By method: % of samples whose interval lies above the truth, and below it; the median upper end."""
    rng = np.random.default_rng(20260301)
    found = [case.draw(rng) for _ in range(samples)]
    slack = 1e-9 * abs(case.truth)
    return {
        method: (
            100 * float(np.mean([methods[method][0] > case.truth + slack for methods in found])),
            100 * float(np.mean([methods[method][1] < case.truth - slack for methods in found])),
            float(np.median([methods[method][1] for methods in found])),
        )
        for method in found[0]
    }


# ------------------------------------------------------------------------------------------------ costs


def cost() -> Iterator[Case]:
    """mean of a cost, log-normal units of σ; goal: below ≤ 4% for σ ≤ 0.5, ≤ 7% for σ = 1."""
    for sizes in ("equal sizes", "unequal sizes"):
        for sigma, goal in GOALS.items():
            for n in UNITS:
                draw = partial(_cost, n=n, sigma=sigma, unequal=sizes.startswith("un"))
                yield Case("cost", f"σ {sigma}, {sizes}", n, 1.0, draw, goal)


def _cost(rng: Rng, n: int, sigma: float, unequal: bool) -> Methods:
    items = _costs(rng, n, sigma, _sizes(rng, n) if unequal else np.ones(n))
    return _methods(items, (0.0, math.inf))


def _costs(rng: Rng, n: int, sigma: float, sizes: Floats) -> RatioItems:
    """Costs with mean 1."""
    return RatioItems.of(sizes * rng.lognormal(-(sigma**2) / 2, sigma, n), sizes, np.arange(n))


def _sizes(rng: Rng, n: int) -> Floats:
    """Sizes of documents: the largest of ten is about five times the smallest."""
    return rng.lognormal(0.0, 0.6, n)


def excess() -> Iterator[Case]:
    """paired difference of two costs: the control's own cost, and 30% more with noise of its own."""
    for sigma in GOALS:
        for n in UNITS:
            yield Case("excess", f"σ {sigma}", n, 0.3, partial(_excess, n=n, sigma=sigma))


def _excess(rng: Rng, n: int, sigma: float) -> Methods:
    control = _costs(rng, n, sigma, _sizes(rng, n))
    more = _costs(rng, n, sigma, control.den)
    a = RatioItems(control.num + 0.3 * more.num, control.den, control.clusters)
    found = paired_difference(a, control, resample_weights_of(n), bounds=(0.0, math.inf)).interval
    return {"fidelab": known(found), **_plain(0.3 * more.num, more.den)}


# ----------------------------------------------------------------------------------------------- shares


def share() -> Iterator[Case]:
    """share, one item per unit: answers right or wrong, and greedy texts that fork at a constant rate."""
    for p in (0.8, 0.95):
        for n in (2, 4, *range(6, 20), 20, 40, 100, 200):
            yield Case("share", f"accuracy {p}", n, p, partial(_accuracy, n=n, p=p))
    for rate in (0.1, 0.5, 2.0):
        truth = _forked(np.random.default_rng(1), rate, DRAWS)
        mean = float(truth.num.sum() / truth.den.sum())
        for n in UNITS:
            yield Case("share", f"trajectory {mean:.2f}", n, mean, partial(_trajectory, n=n, rate=rate))


def _accuracy(rng: Rng, n: int, p: float) -> Methods:
    return _methods(RatioItems.of(rng.random(n) < p, 1.0, np.arange(n)), (0.0, 1.0))


def _trajectory(rng: Rng, n: int, rate: float) -> Methods:
    return _methods(_forked(rng, rate, n), (0.0, 1.0))


def _forked(rng: Rng, rate: float, n: int) -> RatioItems:
    """Tokens before the fork of texts of 16 to 64 tokens; ``rate``: forks per 64 tokens."""
    length = rng.integers(16, 65, n).astype(np.float64)
    return RatioItems.of(np.minimum(np.floor(rng.exponential(64 / rate, n)), length), length, np.arange(n))


def agreement() -> Iterator[Case]:
    """top-1 agreement by documents of 255 to 1,020 positions, flip rates log-normal between documents (σ 0.3)."""
    for flips in (0.001, 0.01, 0.05):
        for n in UNITS:
            yield Case("agreement", f"top-1 {1 - flips:g}", n, 1 - flips, partial(_agreement, n=n, flips=flips))


def _agreement(rng: Rng, n: int, flips: float) -> Methods:
    windows = rng.integers(1, 5, n)
    rates = np.repeat(flips * rng.lognormal(-0.045, 0.3, n), windows)
    agree = 255.0 - rng.binomial(255, np.minimum(rates, 1.0))
    clusters = np.repeat(np.arange(n), 255 * windows)
    marks = np.less(np.arange(255), agree[:, None]).ravel()
    sums = RatioItems.of(agree, 255.0, np.repeat(np.arange(n), windows)).by_cluster()
    return {"fidelab": known(event_interval(RatioItems.of(marks, 1.0, clusters))), **_plain(sums.num, sums.den)}


def pair() -> Iterator[Case]:
    """paired difference of 0/1 items: so many lost and gained in 100."""
    for lost, gained in ((0.05, 0.05), (0.2, 0.2), (0.2, 0.05), (0.5, 0.0)):
        for n in UNITS[1:]:
            yield Case(
                "pair",
                f"{100 * lost:g} lost, {100 * gained:g} gained",
                n,
                gained - lost,
                partial(_pair, n=n, lost=lost, gained=gained),
            )


def _pair(rng: Rng, n: int, lost: float, gained: float) -> Methods:
    chance = rng.random(n)
    a, b = chance >= lost, chance < 1 - gained
    test, ref = (RatioItems.of(side, 1.0, np.arange(n)) for side in (a, b))
    found = paired_difference(test, ref, resample_weights_of(n), bounds=(0.0, 1.0), proportion=True).interval
    return {"fidelab": known(found), **_plain(a.astype(float) - b, np.ones(n))}


# -------------------------------------------------------------------------------------------- composite


def combined() -> Iterator[Case]:
    """composite of a KLD score (σ 0.5), a trajectory, and two shares of right answers, n units each."""
    rates = np.random.default_rng(1)
    texts = _forked(rates, 0.5, DRAWS)
    truth = harmonic_mean([kld_score(0.05), 100 * float(texts.num.sum() / texts.den.sum()), 95.0, 90.0])
    for n in (3, 5, 10, 20, 40):
        yield Case("combined", "four axes", n, truth or math.nan, partial(_combined, n=n))


def _combined(rng: Rng, n: int) -> Methods:
    kl = _costs(rng, n, 0.5, _sizes(rng, n))
    axes = {
        "kld": _axis(RatioItems(0.05 * kl.num, kl.den, kl.clusters), kld_score, (0.0, math.inf)),
        "trajectory": _axis(_forked(rng, 0.5, n)),
        "rniah": _axis(RatioItems.of(rng.random(n) < 0.95, 1.0, np.arange(n))),
        "plad": _axis(RatioItems.of(rng.random(n) < 0.9, 1.0, np.arange(n))),
    }
    scores = {name: axis.score(0) for name, axis in axes.items()}
    ends = {name: known(score.interval) for name, score in scores.items()}
    return {"fidelab": known(composite({name: score.value for name, score in scores.items()}, ends).interval)}


def _axis(
    items: RatioItems,
    transform: Callable[[float], float] = lambda share: 100.0 * share,
    bounds: Interval = (0.0, 1.0),
) -> AxisScore:
    return AxisScore(
        num=items.num,
        den=items.den,
        clusters=items.clusters,
        usable=np.ones(len(items.num), dtype=bool),
        transform=transform,
        bounds=bounds,
        identical=False,
        proportion=bounds == (0.0, 1.0),
    )


EVENT_GOAL = 5.0  # % of upper ends of a rare share that may lie too low
MEDIAN_END = 0.007  # of a share of 0.1% over 13 documents


def events() -> Iterator[Case]:
    """share of events (changed tokens) of positions, about 157 per document; goal: below ≤ 5%; median upper ends."""
    for lengths in ("equal", "unequal"):
        for rate in (0.001, 0.002, 0.005, 0.01, 0.02):
            for correlation in (0.002, 0.01, 0.05):
                for n in (6, 13, 26):
                    draw = partial(_marked, n=n, rate=rate, correlation=correlation, unequal=lengths == "unequal")
                    goal = EVENT_GOAL if n >= 13 and correlation <= 0.01 else None
                    name = f"{100 * rate:g}%, correlation {correlation:g}, {lengths}"
                    yield Case("events", name, n, rate, draw, goal, upper=True)


def _marked(rng: Rng, n: int, rate: float, correlation: float, unequal: bool) -> Methods:
    sizes = np.full(n, 157)
    if unequal:
        sizes = np.maximum(np.rint(157 * rng.lognormal(-0.18, 0.6, n)), 8).astype(int)
    total = 1 / correlation - 1
    counts = rng.binomial(sizes, rng.beta(rate * total, (1 - rate) * total, n))
    marks = np.concatenate([np.arange(size) < count for size, count in zip(sizes, counts, strict=True)])
    items = RatioItems.of(marks, 1.0, np.repeat(np.arange(n), sizes))
    return {
        "fidelab": known(event_interval(items)),
        "design effect from 1": known(event_interval(items, design_effect=1.0)),
        "by documents": known(ratio_interval(items, resample_weights_of(n), bounds=(0.0, 1.0), proportion=True)),
    }


GROUPS = {found.__name__: found for found in (cost, excess, share, agreement, pair, combined, events)}

# ---------------------------------------------------------------------------------------------- methods

_WEIGHTS: dict[int, Floats] = {}


def resample_weights_of(n: int) -> Floats:
    """Made once per n."""
    if n not in _WEIGHTS:
        _WEIGHTS[n] = resample_weights(n)
    return _WEIGHTS[n]


def known(interval: Interval | None) -> Interval:
    """The interval, which two units or more always have."""
    if interval is None:
        raise ValueError("no interval of two units or more")
    return interval


def _methods(items: RatioItems, bounds: Interval) -> Methods:
    proportion = math.isfinite(bounds[1])
    found = ratio_interval(items, resample_weights_of(len(items.num)), bounds=bounds, proportion=proportion)
    return {"fidelab": known(found), **_plain(items.num, items.den)}


def _plain(num: Floats, den: Floats) -> Methods:
    """Student's t on the linearised standard error, and the percentiles of the bootstrap."""
    n, total = len(num), den.sum()
    ratio = num.sum() / total
    error = math.sqrt(n / (n - 1) * float(np.sum((num - ratio * den) ** 2))) / total
    reach = float(special.stdtrit(n - 1, 0.975)) * error
    weights = resample_weights_of(n)
    low, high = np.quantile((weights @ num) / (weights @ den), [0.025, 0.975]).tolist()
    return {"Student's t": (ratio - reach, ratio + reach), "percentiles": (low, high)}


if __name__ == "__main__":
    main()
