"""Ablation: planted effects are named for what they are, by shifts and intervals that hold together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fidelab.metrics.ablation import (
    AblationGrid,
    Effect,
    Findings,
    JointLoss,
    common_levels,
    estimate_effects,
    estimate_joint_losses,
)
from fidelab.metrics.intervals import binomial_interval

Floats = NDArray[np.float64]

FACTORS: Mapping[str, tuple[str, ...]] = {"attention": ("sdpa", "eager", "fidelab"), "kv": ("bf16", "int8", "int4")}
ROWS = 7  # of a cluster


def grid(
    planted: Mapping[Any, float],
    *,
    factors: Mapping[str, tuple[str, ...]] = FACTORS,
    n_clusters: int = 24,
    noise: float = 0.001,
    without: tuple[tuple[str, ...], ...] = (),
    seed: int = 0,
) -> AblationGrid:
    """Cells whose mean is what is planted (0 elsewhere), on a common background, with noise of each cell's own."""
    random = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(n_clusters), ROWS)
    background = random.gamma(2.0, 0.01, size=len(clusters))
    cells = {}
    for key in product(*factors.values()):
        own = random.normal(scale=noise, size=len(clusters))
        if key not in without:
            cells[key] = background + own + planted.get(key, 0.0)
    return AblationGrid(factors, cells, clusters)


def effect(found: Findings, factor: str) -> Effect:
    return next(effect for effect in found.effects if effect.factor == factor)


def everywhere(factor: str, level: str, size: float) -> dict[tuple[str, ...], float]:
    place = list(FACTORS).index(factor)
    return {key: size for key in product(*FACTORS.values()) if key[place] == level}


def test_a_main_effect_is_named_with_its_levels_and_moves_everywhere() -> None:
    found = estimate_effects(grid(everywhere("kv", "int4", 0.01)))
    kv = effect(found, "kv")
    assert (kv.reach, kv.depends) == ("everywhere", False)
    assert kv.mean is not None
    assert kv.mean.high == "int4"
    assert kv.mean.estimate == pytest.approx(0.01, abs=5e-4)
    assert kv.mean.interval is not None
    low, high = kv.mean.interval
    assert 0 < low < 0.01 < high
    assert len(kv.where) == 3
    attention = effect(found, "attention")
    assert attention.reach == "none"
    assert attention.most is not None
    assert attention.most < 0.002


def test_a_pure_interaction_is_named_as_the_pair_of_levels_and_as_no_main_effect() -> None:
    found = estimate_effects(grid({("fidelab", "int8"): 0.01}))
    attention, kv = effect(found, "attention"), effect(found, "kv")
    assert (attention.reach, attention.only) == ("some", {"kv": ("int8",)})
    assert (kv.reach, kv.only) == ("some", {"attention": ("fidelab",)})
    assert (attention.shifts[0].high, kv.shifts[0].high) == ("fidelab", "int8")
    assert attention.depends
    assert kv.depends
    [seen] = attention.where
    assert seen.estimate == pytest.approx(0.01, abs=1e-3)


def test_an_interaction_on_top_of_a_main_effect_leaves_both_names() -> None:
    planted = everywhere("kv", "int8", 0.02) | {("fidelab", "int8"): 0.05}
    found = estimate_effects(grid(planted))
    assert effect(found, "attention").only == {"kv": ("int8",)}
    kv = effect(found, "kv")
    assert (kv.reach, kv.depends) == ("everywhere", True)
    assert kv.where[0].context == {"attention": "fidelab"}


def test_opposite_shifts_are_not_averaged_away() -> None:
    factors = {"attention": ("sdpa", "fidelab"), "kv": ("bf16", "int8")}
    found = estimate_effects(grid({("fidelab", "int8"): 0.01, ("fidelab", "bf16"): -0.01}, factors=factors))
    attention = effect(found, "attention")
    assert attention.reach == "opposed"
    assert sorted(round(shift.estimate, 2) for shift in attention.shifts) == [-0.01, 0.01]


TWO = {"attention": ("sdpa", "fidelab"), "kv": ("bf16", "int8")}


def test_a_shift_whose_other_context_is_lost_in_noise_is_unclear() -> None:
    clean = grid({("fidelab", "bf16"): 0.01}, factors=TWO)
    noise = np.random.default_rng(1).normal(scale=0.3, size=len(clean.clusters))
    noisy = dict(clean.cells) | {("fidelab", "int8"): clean.cells["fidelab", "int8"] + noise}
    attention = effect(estimate_effects(AblationGrid(TWO, noisy, clean.clusters)), "attention")
    assert (attention.reach, attention.depends) == ("unclear", False)
    assert [shift.context for shift in attention.where] == [{"kv": "bf16"}]


def test_a_deviation_is_from_the_mean_of_the_other_contexts() -> None:
    """0.03 here and 0 there deviate by 0.03, which a floor of 0.02 does not hide."""
    attention = effect(estimate_effects(grid({("fidelab", "int8"): 0.03}, factors=TWO), floor=0.02), "attention")
    assert (attention.reach, attention.depends) == ("some", True)


def test_where_nothing_is_planted_nothing_moves_in_nineteen_grids_of_twenty() -> None:
    """Family-wise: any factor that moves in a grid of noise is a false alarm."""
    for n_clusters in (4, 8, 24):
        alarms = [
            any(
                e.reach != "none"
                for e in estimate_effects(grid({}, n_clusters=n_clusters, seed=seed), seed=seed).effects
            )
            for seed in range(60)
        ]
        assert sum(alarms) <= 7  # binomial(60, 0.05) exceeds it once in a hundred times


def test_what_is_not_beyond_the_floor_does_not_move() -> None:
    planted = grid(everywhere("kv", "int4", 0.01))
    assert effect(estimate_effects(planted, floor=0.005), "kv").reach == "everywhere"
    assert effect(estimate_effects(planted, floor=0.02), "kv").reach == "none"


def test_a_missing_cell_leaves_the_contexts_that_have_both_levels() -> None:
    planted = {("fidelab", "int8"): 0.01}
    found = estimate_effects(grid(planted, without=(("sdpa", "int8"), ("eager", "int4"))))
    attention = effect(found, "attention")
    assert attention.shifts[0].low == "eager"  # only eager and fidelab were both measured with int8
    assert [shift.context for shift in attention.shifts] == [{"kv": "bf16"}, {"kv": "int8"}]
    assert attention.only == {"kv": ("int8",)}


def test_a_factor_without_two_comparable_cells_is_unmeasured() -> None:
    factors = {"attention": ("sdpa", "fidelab"), "kv": ("bf16", "int8")}
    found = estimate_effects(grid({}, factors=factors, without=(("sdpa", "int8"), ("fidelab", "bf16"))))
    assert [e.reach for e in found.effects] == ["unmeasured", "unmeasured"]
    assert found.contrasts == 0


def test_a_grid_without_a_measured_cell_says_nothing() -> None:
    found = estimate_effects(AblationGrid(FACTORS, {}, np.zeros(0)))
    assert [e.reach for e in found.effects] == ["unmeasured", "unmeasured"]


def test_shifts_are_the_plain_means_of_the_paired_differences() -> None:
    """Brute force over cells and contexts."""
    planted = {key: 0.01 * n for n, key in enumerate(product(*FACTORS.values()))}
    cells = grid(planted, noise=0.003, without=(("eager", "bf16"),))
    for place, factor in enumerate(FACTORS):
        found = effect(estimate_effects(cells), factor)
        assert found.mean is not None
        expected = {}
        for a, b in product(FACTORS[factor], repeat=2):
            per_context = {}
            for key, values in cells.cells.items():
                other = (*key[:place], b, *key[place + 1 :])
                if key[place] == a and a != b and other in cells.cells:
                    per_context[key[1 - place]] = float(np.mean(cells.cells[other] - values))
            expected[a, b] = per_context
        mine = expected[found.mean.low, found.mean.high]
        other_factor = list(FACTORS)[1 - place]
        shown = {shift.context[other_factor]: shift.estimate for shift in found.shifts if shift.context is not None}
        assert shown == pytest.approx(mine)
        assert found.mean.estimate == pytest.approx(np.mean(list(mine.values())))
        largest = max(abs(x) for contexts in expected.values() for x in contexts.values())
        assert found.size == pytest.approx(largest)


def test_bootstrap_intervals_hold_together_as_often_as_they_say() -> None:
    """All contrasts of the grid at once cover what was planted, in 95% of samples."""
    planted = everywhere("kv", "int4", 0.01) | {("fidelab", "int8"): 0.02}
    missed = 0
    for seed in range(100):
        found = estimate_effects(grid(planted, noise=0.01, seed=seed), seed=seed)
        for place, factor in enumerate(FACTORS):
            for shift in effect(found, factor).shifts:
                assert shift.context is not None
                [other] = shift.context.values()
                ends = [(level, other) if place == 0 else (other, level) for level in (shift.low, shift.high)]
                truth = planted.get(ends[1], 0.0) - planted.get(ends[0], 0.0)
                assert shift.interval is not None
                if not shift.interval[0] <= truth <= shift.interval[1]:
                    missed += 1
                    break
            else:
                continue
            break
    assert missed <= 11  # binomial(100, 0.05) exceeds it once in a hundred times


def differing(n: int, differ: int) -> tuple[float, float]:
    """The interval of a shift that is 1 in some clusters and 0 in all others."""
    shift = np.where(np.arange(n) < differ, 1.0, 0.0)
    found = estimate_effects(
        AblationGrid({"kv": ("a", "b")}, {("a",): np.zeros(n), ("b",): shift}, np.arange(n)), seed=2
    )
    [kv] = found.effects
    assert kv.mean is not None
    assert kv.mean.estimate == pytest.approx(differ / n)
    assert kv.mean.interval is not None
    return kv.mean.interval


def test_where_resamples_often_lack_all_clusters_that_differ_the_interval_is_students() -> None:
    """(1 − 1/8)⁸ = 34% of the resamples err by 1/8 and have no spread: the quantile of |error| / spread is infinite."""
    assert differing(8, 1) == pytest.approx((1 / 8 - stats.t.ppf(0.975, 7) / 8, 1 / 8 + stats.t.ppf(0.975, 7) / 8))


@pytest.mark.parametrize(("n", "differ"), [(8, 3), (40, 4)])
def test_the_few_resamples_without_a_spread_count_as_the_largest_errors(n: int, differ: int) -> None:
    """Of the clusters that differ a resample draws a binomial number k; it errs by |k − m|/n, its spread is known."""
    drawn = np.arange(n + 1)
    spread = np.sqrt(drawn * (n - drawn) / (n * n * (n - 1)))
    t = np.divide(abs(drawn - differ) / n, spread, out=np.full(n + 1, np.inf), where=spread > 0)
    order = np.argsort(t)
    quantile = t[order][np.searchsorted(stats.binom.pmf(drawn, n, differ / n)[order].cumsum(), 0.95)]
    half = quantile * spread[differ]
    assert differing(n, differ) == pytest.approx((differ / n - half, differ / n + half))


def test_a_single_unit_moves_nothing() -> None:
    found = estimate_effects(grid(everywhere("kv", "int4", 1.0), n_clusters=1))
    kv = effect(found, "kv")
    assert (kv.reach, kv.most) == ("none", None)
    assert kv.mean is not None
    assert kv.mean.interval is None


def test_cells_that_do_not_differ_have_an_interval_of_no_width() -> None:
    cells = grid(everywhere("kv", "int4", 0.01), noise=0.0)
    found = estimate_effects(cells)
    assert effect(found, "attention").most == 0.0
    kv = effect(found, "kv")
    assert kv.mean is not None
    assert kv.mean.interval == pytest.approx((0.01, 0.01))


def test_a_bounded_outcome_on_which_all_clusters_agree_has_the_exact_bound() -> None:
    n, pairs = 8, 2
    factors = {"attention": ("sdpa", "fidelab"), "kv": ("bf16", "int8")}
    zero, full = np.zeros(n), np.full(n, 100.0)
    cells: dict[tuple[str, ...], Floats] = {}
    cells |= {("sdpa", "bf16"): zero, ("fidelab", "bf16"): zero, ("sdpa", "int8"): full, ("fidelab", "int8"): full}
    found = estimate_effects(AblationGrid(factors, cells, np.arange(n), width=100.0))
    kv, attention = effect(found, "kv"), effect(found, "attention")
    share = binomial_interval(n, n, 1 - 0.05 / pairs)[0]
    assert kv.mean is not None
    assert kv.mean.interval == pytest.approx((100 * (2 * share - 1), 100.0))
    assert kv.reach == "everywhere"
    assert attention.most == pytest.approx(100 * (1 - share))
    few = AblationGrid(factors, {key: values[:4] for key, values in cells.items()}, np.arange(4), width=100.0)
    assert effect(estimate_effects(few), "kv").reach == "none"  # four prompts that agree are no proof


def test_a_single_factor_has_one_context() -> None:
    found = estimate_effects(grid({("int4",): 0.01}, factors={"kv": ("bf16", "int8", "int4")}))
    [kv] = found.effects
    assert (kv.reach, len(kv.shifts), kv.depends) == ("everywhere", 1, False)


def test_a_three_way_fault_is_named_by_all_its_levels() -> None:
    factors = {"attention": ("sdpa", "fidelab"), "dequant": ("fused", "unpack"), "kv": ("bf16", "int8")}
    found = estimate_effects(grid({("fidelab", "fused", "int8"): 0.01}, factors=factors))
    assert effect(found, "attention").only == {"dequant": ("fused",), "kv": ("int8",)}
    assert effect(found, "dequant").only == {"attention": ("fidelab",), "kv": ("int8",)}


def test_levels_name_contexts_only_where_they_name_exactly_these() -> None:
    every = [{"a": a, "b": b} for a in "12" for b in "xyz"]
    assert common_levels([{"a": "1", "b": b} for b in "xyz"], every) == {"a": ("1",)}
    assert common_levels([{"a": a, "b": b} for a in "12" for b in "xy"], every) == {"b": ("x", "y")}
    assert common_levels([{"a": "1", "b": "x"}], every) == {"a": ("1",), "b": ("x",)}
    assert common_levels([{"a": "1", "b": "x"}, {"a": "2", "b": "y"}], every) is None
    assert common_levels(every, every) == {}


def test_cells_with_other_items_are_refused() -> None:
    with pytest.raises(ValueError, match="finite outcome of every item"):
        estimate_effects(
            AblationGrid({"kv": ("a", "b")}, {("a",): np.zeros(3), ("b",): np.array([0.0, np.nan, 0.0])}, np.arange(3))
        )


# ----------------------------------------------------------------------------------------- whether losses add

MIXED: Mapping[str, tuple[str, ...]] = {"weights": ("native", "int4"), "kv": ("bf16", "int8")}


def joint(extra: float, *, noise: float = 0.0005, n_clusters: int = 24, seed: int = 0) -> JointLoss:
    planted = {("int4", "bf16"): 0.03, ("native", "int8"): 0.02, ("int4", "int8"): 0.05 + extra}
    cells = grid(planted, factors=MIXED, noise=noise, n_clusters=n_clusters, seed=seed)
    [loss] = estimate_joint_losses(cells, 0.001)
    return loss


def test_losses_that_add_are_said_to_add_with_an_interval_around_their_excess() -> None:
    loss = joint(0.0)
    assert loss.adds == "sum"
    assert loss.levels == {"weights": "int4", "kv": "int8"}
    assert loss.alone == pytest.approx({"weights": 0.03, "kv": 0.02}, abs=5e-4)
    assert loss.together - sum(loss.alone.values()) == pytest.approx(loss.excess)
    assert loss.interval is not None
    assert loss.interval[0] < 0 < loss.interval[1]


@pytest.mark.parametrize(("extra", "adds"), [(0.02, "more"), (-0.02, "less")])
def test_losses_that_do_not_add_are_said_not_to(extra: float, adds: str) -> None:
    loss = joint(extra)
    assert loss.adds == adds
    assert loss.excess == pytest.approx(extra, abs=1e-3)


def test_with_too_much_noise_or_one_cluster_it_is_left_open_whether_losses_add() -> None:
    assert joint(0.0, noise=0.05).adds == "unclear"
    alone = joint(0.0, n_clusters=1)
    assert (alone.adds, alone.interval) == ("unclear", None)


def test_the_interval_of_the_excess_covers_it_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        interval = joint(0.004, noise=0.004, seed=seed).interval
        assert interval is not None
        held += interval[0] <= 0.004 <= interval[1]
    assert stats.binomtest(held, 200, 0.95).pvalue > 1e-3


def test_of_a_cell_that_is_missing_nothing_is_said_about_its_sum() -> None:
    cells = grid({("int4", "bf16"): 0.03}, factors=MIXED, without=(("int4", "int8"),))
    assert estimate_joint_losses(cells) == ()


def test_every_pair_of_levels_besides_those_of_the_best_cell_has_its_joint_loss() -> None:
    assert len(estimate_joint_losses(grid(everywhere("kv", "int4", 0.01)))) == 4
