"""How often an equivalence certificate is wrong, and how often a true twin gets one, from simulated runs.

python benchmarks/certificate.py [--runs 2000] [--only items documents arms twins]

The runs go through the package's own functions.  A certificate is false where it holds although the planted loss of
accuracy is the margin or more.  Nominal: 5% of the runs at most, for any of their arms.  True twins flip as many items
in either direction; their runs have the size that ``clusters_to_certify`` gives, which reports name beside a claim that
is not shown.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fidelab.metrics.equivalence import ALPHA, POWER, Loss, certify
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.metrics.sample_size import clusters_to_certify

Floats = NDArray[np.float64]
Rng = np.random.Generator
Pair = tuple[Floats, Floats, NDArray[np.int64]]

LOSSES = (0.003, 0.01, 0.02)
FLIPS = 0.02  # share of items that flip either way besides the planted loss
WORST = 5.0  # % of runs with a false certificate
LEAST = 80.0  # % of twins certified


def main() -> None:
    """Simulate and print; exit with 1 where a rate misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="per line")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    args = parser.parse_args()
    began, missed = time.perf_counter(), 0
    for name in args.only:
        print(f"\n### {name}: {GROUPS[name].__doc__}\n")
        missed += GROUPS[name](args.runs)
    print(f"\n{missed} of the rates miss their goal; {time.perf_counter() - began:.0f} s")
    sys.exit(missed > 0)


def draw(rng: Rng, clusters: int, per_cluster: int, loss: float, flips: float = FLIPS, spread: float = 0.0) -> Pair:
    """Right answers of both sides: of each item lost with probability flips/2 + loss, won with flips/2.

    ``spread``: the clusters' own rates are beta-distributed with this intra-cluster correlation.
    """
    n = clusters * per_cluster
    ids = np.repeat(np.arange(clusters), per_cluster)

    def rate(mean: float) -> Floats:
        if not spread or not mean:
            return np.full(n, mean)
        total = 1 / spread - 1
        return np.repeat(rng.beta(mean * total, (1 - mean) * total, clusters), per_cluster)

    lost, won = rate(flips / 2 + loss), rate(flips / 2)
    right = rng.random(n) < rate(0.5)
    toss = rng.random(n)
    # an item that is right can be lost, one that is wrong can be won: at rates that keep the planted shares
    test = np.where(right, toss >= np.minimum(lost / 0.5, 1.0), toss < np.minimum(won / 0.5, 1.0))
    return right.astype(np.float64), test.astype(np.float64), ids


def _rates(runs: int, one: Callable[[Rng], bool]) -> float:
    return 100 * sum(one(np.random.default_rng([7, number])) for number in range(runs)) / runs


def _false(clusters: int, per_cluster: int, spread: float, runs: int, arms: int = 1) -> int:
    missed = 0
    print("| planted loss | margin | true | certified | goal |\n|--:|--:|:--|--:|--:|")
    for loss in LOSSES:
        for margin in LOSSES:

            def one(rng: Rng, loss: float = loss, margin: float = margin) -> bool:
                pairs = [draw(rng, clusters, per_cluster, loss, spread=spread) for _ in range(arms)]
                judged = certify({n: [Loss.of_accuracy(*pair, margin)] for n, pair in enumerate(pairs)})
                return any(found.state == "holds" for found in judged.values())

            rate, wrong = _rates(runs, one), loss >= margin
            bad = wrong and rate > WORST + _noise(WORST, runs)
            missed += bad
            goal = f"≤ {WORST:g}%" if wrong else "–"
            said = "loss" if wrong else "below the margin"
            print(
                f"| {100 * loss:g} | {100 * margin:g} | {said} | {rate:.1f}%{' !' if bad else ''} | {goal} |",
                flush=True,
            )
    return missed


def _noise(rate: float, runs: int) -> float:
    """Two standard errors of a simulated rate, %."""
    return 2 * math.sqrt(rate * (100 - rate) / runs)


def items(runs: int) -> int:
    """1,000 questions, each by itself (points)"""
    return _false(1000, 1, 0.0, runs)


def documents(runs: int) -> int:
    """20 documents of 250 positions, intra-cluster correlation 0.01 (points)"""
    return _false(20, 250, 0.01, runs)


def few(runs: int) -> int:
    """6 documents of 500 positions, intra-cluster correlation 0.01 (points)"""
    return _false(6, 500, 0.01, runs)


def arms(runs: int) -> int:
    """five arms of 500 questions each, all with the planted loss; any certificate counts (points)"""
    return _false(500, 1, 0.0, runs, arms=5)


def twins(runs: int) -> int:
    """true twins at the size that reports name (flips in either direction)"""
    missed = 0
    print("| unit | flips | margin | clusters | certified | goal |\n|:--|--:|--:|--:|--:|--:|")
    for unit, per_cluster, spread in (("question", 1, 0.0), ("document of 250", 250, 0.01)):
        for flips, margin in ((0.02, 0.01), (0.05, 0.01), (0.02, 0.003)):
            twin = partial(draw, per_cluster=per_cluster, loss=0.0, flips=flips, spread=spread)
            pilot = Loss.of_accuracy(*twin(np.random.default_rng(3), 4000), margin)
            size = pilot.spread
            assert size is not None
            n = max(clusters_to_certify(size.sd, margin, ALPHA, POWER, cost=pilot.cautious), MIN_STUDENTIZED_CLUSTERS)

            def one(rng: Rng, n: int = n, margin: float = margin, twin: Callable[..., Pair] = twin) -> bool:
                return certify({0: [Loss.of_accuracy(*twin(rng, n), margin)]})[0].state == "holds"

            rate = _rates(runs, one)
            bad = rate < LEAST - _noise(LEAST, runs)
            missed += bad
            print(
                f"| {unit} | {100 * flips:g}% | {100 * margin:g} | {n:,} | {rate:.1f}%{' !' if bad else ''} "
                f"| ≥ {LEAST:g}% |",
                flush=True,
            )
    return missed


GROUPS = {"items": items, "documents": documents, "few": few, "arms": arms, "twins": twins}


if __name__ == "__main__":
    main()
