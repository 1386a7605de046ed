"""How often `fidelab check --baseline` finds a rise of the mean KL, and how often it calls noise one, from simulations.

python benchmarks/changes.py [--runs 1000]

Both runs read the same documents, whose levels are log-normal and shared.  Each run has noise of its own per document.
The package's own functions judge each pair: by sums by document (*paired*), and by both intervals as if independent.
Rates are % with two Monte Carlo standard errors.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter

import numpy as np

from fidelab.metrics.change import Allowance, Estimate, judge_intervals, judge_paired
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.results.diff_record import Thresholds

POSITIONS = 255  # per document
LEVEL = 0.003  # nats
FOUND, FALSE = 90.0, 5.0  # goals, %: rises of 1.3 at 13 even documents; "regressed" without a rise beyond the allowance
OUTCOMES = ("regressed", "cannot tell", "unchanged", "improved")


def simulate(documents: int, spread: float, noise: float, rise: float, runs: int) -> tuple[Counter[str], Counter[str]]:
    """Count the outcomes of pairs of runs, paired and by intervals.

    ``spread``: σ of the log-normal levels of documents; ``noise``: of each run's own factor per document; ``rise``: of
    the mean from the first to the second run.
    """
    allowance = Allowance(relative=Thresholds().kld_increase)
    paired, independent = Counter[str](), Counter[str]()
    for number in range(runs):
        rng = np.random.default_rng([11, documents, number])
        levels = LEVEL * rng.lognormal(-(spread**2) / 2, spread, documents)
        means = [levels * change * rng.lognormal(-(noise**2) / 2, noise, documents) for change in (1.0, rise)]
        was, now = (RatioItems.of(POSITIONS * kl, float(POSITIONS), np.arange(documents)) for kl in means)
        judged = judge_paired(was, now, allowance)
        assert judged is not None
        paired[judged[0]] += 1
        sides = []
        for items in (was, now):
            ends = ratio_interval(items, bounds=(0.0, math.inf))
            assert ends is not None
            sides.append(Estimate(float(items.num.sum() / items.den.sum()), ends))
        independent[judge_intervals(sides[0], sides[1], allowance)] += 1
    return paired, independent


def shown(counts: Counter[str], outcome: str, runs: int) -> str:
    """Return a rate with its Monte Carlo error: ``94.2 ± 1.5``."""
    share = counts[outcome] / runs
    return f"{100 * share:.1f} ± {200 * math.sqrt(share * (1 - share) / runs):.1f}"


def main() -> None:
    """Simulate and print; exit with 1 where a rate misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="per line")
    runs, began, missed = parser.parse_args().runs, time.perf_counter(), 0
    print(f"| documents | σ | noise | rise | {' | '.join(OUTCOMES)} | by intervals: regressed | unchanged |")
    print(f"|--:|--:|--:|--:|{'--:|' * (len(OUTCOMES) + 2)}")
    for documents, spread, noise in (
        *((n, 0.5, 0.05) for n in (6, 13, 30)),
        *((n, 1.0, 0.05) for n in (13, 30)),
        *((n, 0.5, 0.2) for n in (13, 30)),
    ):
        for rise in (1.0, 1.1, 1.3):
            paired, independent = simulate(documents, spread, noise, rise, runs)
            figures = [shown(paired, outcome, runs) for outcome in OUTCOMES]
            figures += [shown(independent, outcome, runs) for outcome in ("regressed", "unchanged")]
            rate, slack = 100 * paired["regressed"] / runs, 200 * math.sqrt(FALSE * (100 - FALSE) / 1e4 / runs)
            bad = rise <= 1.1 and rate > FALSE + slack
            if (documents, spread, noise) == (13, 0.5, 0.05):
                bad |= rise == 1.3 and rate < FOUND
                bad |= rise == 1.0 and paired["unchanged"] <= runs / 2
            missed += bad
            row = f"{documents} | {spread:g} | {100 * noise:g}% | × {rise:g} | {' | '.join(figures)}"
            print(f"| {row} |{' !' if bad else ''}", flush=True)
    print(f"\n{missed} of the rates miss their goal; {time.perf_counter() - began:.0f} s")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
