"""Composite, bands, verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fidelab.metrics.composite import BANDS, Band, composite, costs_equivalent, harmonic_mean, kl_band, lower, verdict

NAN = math.nan
AXES = ("trajectory", "kld", "rniah", "plad")


def four(*values: float | None) -> dict[str, float | None]:
    return dict(zip(AXES, values, strict=True))


def point(value: float) -> tuple[float, float]:
    return value, value


@pytest.mark.parametrize(
    ("scores", "value"),
    [
        *(([90.0, 30.0], 45.0), ([80.0, 99.0, 70.0, 90.0], 83.3371), ([77.0], 77.0)),
        *(([100.0, 100.0, 0.0], 0.0), ([100.0, -3.0], 0.0)),
    ],
)
def test_harmonic_mean_cases_of_metrics(scores: list[float], value: float) -> None:
    assert harmonic_mean(scores) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize(
    ("scores", "value", "band"),
    [
        ((69.62, 99.75, 100.0, 96.54), 89.39, Band.PASS),
        ((67.71, 97.95, 100.0, 90.77), 86.97, Band.PASS),
        ((62.40, 96.35, 100.0, 90.58), 84.31, Band.DEGRADED),
    ],
)
def test_the_papers_rows(scores: tuple[float, ...], value: float, band: Band) -> None:
    got = composite(four(*scores))
    assert got.value == pytest.approx(value, abs=6e-3)
    assert got.band is band


@pytest.mark.parametrize(
    ("table", "scores"),
    [("fidelab", (95.0, 94.99, 85.0, 84.99, 70.0, 69.99)), ("refract", (90.0, 89.99, 80.0, 79.99, 60.0, 59.99))],
)
def test_band_edges(table: str, scores: tuple[float, ...]) -> None:
    bands = [Band.EXCELLENT, Band.PASS, Band.PASS, Band.DEGRADED, Band.DEGRADED, Band.FAIL]
    assert [BANDS[table].band(score) for score in (*scores, NAN)] == [*bands, Band.FAIL]
    # the harmonic mean of equal scores is the score, up to rounding at the edge
    assert [composite(four(*[score + 1e-9] * 4), bands=table).band for score in scores] == bands


def test_a_composite_of_fewer_than_four_axes_has_no_band() -> None:
    got = composite(four(96.0, 99.0, None, 98.0))
    assert got.value == pytest.approx(3 / (1 / 96 + 1 / 99 + 1 / 98))
    assert (got.band, got.too_close_to_call, got.missing) == (None, False, ("rniah",))


@pytest.mark.parametrize("scores", [{}, four(None, None, None, None)])
def test_a_composite_of_no_axis_is_none(scores: dict[str, float | None]) -> None:
    got = composite(scores)
    assert (got.value, got.interval, got.band, got.missing) == (None, None, None, tuple(scores))


def test_a_nan_axis_fails_the_composite() -> None:
    got = composite(four(99.0, NAN, 99.0, 99.0), {axis: point(99.0) for axis in AXES})
    assert got.band is Band.FAIL
    assert got.value is not None
    assert math.isnan(got.value)
    assert got.interval is None


def test_fixed_axes_give_an_interval_of_no_width_and_one_without_an_interval_none() -> None:
    for n, interval in ((4, pytest.approx((90.0, 90.0))), (3, None)):
        got = composite(four(90.0, 90.0, 90.0, 90.0), {axis: point(90.0) for axis in AXES[:n]})
        assert (got.interval, got.too_close_to_call) == (interval, False)


@pytest.mark.parametrize(("score", "close"), [(90.0, False), (86.0, True), (94.0, True)])
def test_an_interval_across_a_band_edge_is_too_close_to_call(score: float, close: bool) -> None:
    intervals = dict.fromkeys(AXES, (score - 4, score + 4))
    assert composite(four(*[score] * 4), intervals).too_close_to_call is close


def test_an_interval_is_that_of_independent_errors_and_stays_on_the_scale() -> None:
    # close to the mean of narrow intervals, errors average out: the simulated quantiles are an independent route
    scores, half = np.array([80.0, 90.0, 95.0, 85.0]), np.array([2.0, 1.0, 0.5, 3.0])
    drawn = np.random.default_rng(0).normal(scores, half / 1.959964, (200_000, 4))
    expected = np.quantile(4 / (1 / drawn).sum(axis=1), [0.025, 0.975])
    ends = {axis: (s - h, s + h) for axis, s, h in zip(AXES, scores.tolist(), half.tolist(), strict=True)}
    assert composite(four(*scores.tolist()), ends).interval == pytest.approx(expected, abs=0.05)
    ends = {axis: point(90.0) for axis in AXES} | {"rniah": (0.0, 90.0)}
    assert composite(four(90.0, 90.0, 45.0, 90.0), ends).interval == pytest.approx((0.0, 90.0), abs=1e-12)
    got = composite(four(99.9, 100.0, 100.0, 50.0), dict.fromkeys(AXES, (20.0, 100.0)))
    assert got.interval is not None
    assert got.value is not None
    assert 0.0 <= got.interval[0] <= got.value <= got.interval[1] <= 100.0


@pytest.mark.parametrize(
    ("uppers", "band"),
    zip([(0.0, 0.00999), (0.01, 0.0499), (0.05, 0.0999), (0.1, NAN)], Band, strict=True),
)
def test_kl_bands_of_metrics(uppers: tuple[float, float], band: Band) -> None:
    for upper in uppers:
        assert kl_band(upper) is verdict(upper, 0, 100).band is band


def test_lower_goes_one_band_down_and_stops_at_fail() -> None:
    assert [lower(band) for band in Band] == [Band.PASS, Band.DEGRADED, Band.FAIL, Band.FAIL]


@pytest.mark.parametrize(
    ("upper", "n_failed", "band"),
    [
        (0.001, 1, Band.DEGRADED),
        (0.02, 1, Band.DEGRADED),
        (0.2, 1, Band.FAIL),
        (0.001, 10, Band.DEGRADED),  # exactly 1%
        (0.001, 11, Band.FAIL),
    ],
)
def test_failed_positions_cap_the_verdict(upper: float, n_failed: int, band: Band) -> None:
    got = verdict(upper, n_failed, 1000)
    assert got.band is band
    assert f"{n_failed} of 1000 positions failed" in got.because


@pytest.mark.parametrize("reasons", [["R-NIAH"], ["R-NIAH", "degeneration"]])
def test_reasons_to_lower_cost_one_band_together_and_are_told(reasons: list[str]) -> None:
    got = verdict(0.001, 0, 1000, reasons)
    assert got.band is Band.PASS
    assert set(reasons) <= set(got.because)


def test_garbage_and_rows_that_all_failed_fail_and_without_a_kld_there_is_no_verdict() -> None:
    got = verdict(0.001, 0, 1000, failed_because=["garbage from token 410"])
    assert (got.band, got.label) == (Band.FAIL, "FAIL")
    assert "garbage from token 410" in got.because
    assert verdict(None, 500, 500).band is Band.FAIL
    got = verdict(None, 0, 0)
    assert (got.band, got.label) == (None, "no verdict")
    assert "full vocabulary" in got.because[0]


@pytest.mark.parametrize(
    ("least", "band", "at_best"),
    [
        *((0.0, None, None), (0.00999, None, None), (None, None, None), (0.01, None, Band.PASS)),
        *((0.05, None, Band.DEGRADED), (0.0999, None, Band.DEGRADED), (0.1, Band.FAIL, None), (3.47, Band.FAIL, None)),
    ],
)
def test_without_an_upper_bound_the_mean_rules_bands_out(
    least: float | None, band: Band | None, at_best: Band | None
) -> None:
    got = verdict(None, 0, 1000, kld_least=least)
    assert (got.band, got.at_best) == (band, at_best)


def test_no_upper_bound_lies_below_the_mean_and_a_harm_lowers_both_ends_of_an_interval() -> None:
    assert verdict(0.001, 0, 1000, kld_least=0.2).band is Band.FAIL
    assert verdict(0.06, 0, 1000, kld_least=0.02) == verdict(0.06, 0, 1000)
    assert verdict(0.04, 0, 100, ["a loss"], kld_lower=0.02).at_best is None
    assert verdict(0.04, 0, 100, ["a loss"], kld_lower=0.002).at_best is Band.PASS


@pytest.mark.parametrize(
    ("least", "n_failed", "harms", "band", "at_best"),
    [
        (0.001, 0, ["R-NIAH"], None, Band.PASS),
        (0.001, 3, [], None, Band.DEGRADED),
        (None, 3, [], None, Band.DEGRADED),
        (0.06, 0, ["R-NIAH"], Band.FAIL, None),
        (0.02, 3, ["R-NIAH"], None, Band.DEGRADED),
    ],
)
def test_harms_and_failed_positions_lower_what_is_still_possible(
    least: float | None, n_failed: int, harms: list[str], band: Band | None, at_best: Band | None
) -> None:
    got = verdict(None, n_failed, 1000, harms, kld_least=least)
    assert (got.band, got.at_best) == (band, at_best)
    assert set(harms) <= set(got.because)


@pytest.mark.parametrize(
    ("difference", "larger", "alike"),
    [
        ((-0.001, 0.001), 0.01, True),  # at the margin, 10%
        ((-0.001, 0.0011), 0.01, False),
        ((-0.0011, 0.001), 0.01, False),
        ((0.0002, 0.0005), 0.01, True),  # certain, and small
        ((-0.001, 0.001), 0.002, False),  # the same difference of smaller costs
        ((0.0, 0.0), 0.0, True),
        (None, 0.01, False),  # nothing is known of the difference
    ],
)
def test_costs_are_alike_where_the_difference_certainly_is_small(
    difference: tuple[float, float] | None, larger: float, alike: bool
) -> None:
    assert costs_equivalent(difference, larger) is alike


def test_a_band_that_the_kld_alone_gave_is_told_from_others() -> None:
    assert verdict(0.2, 0, 1000).by_kld
    assert verdict(None, 0, 1000, kld_least=0.2).by_kld
    others = (verdict(0.2, 1, 1000), verdict(0.2, 900, 1000), verdict(0.2, 0, 1000, ["R-NIAH"]))
    assert not any(one.by_kld for one in (*others, verdict(0.2, 0, 1000, failed_because=["garbage"])))


@pytest.mark.parametrize(("n_clusters", "early"), [(2, True), (5, True), (6, False), (31, False), (None, False)])
def test_a_verdict_over_fewer_than_six_units_is_preliminary(n_clusters: int | None, early: bool) -> None:
    ruling = verdict(0.04, 0, 100, kld_lower=0.03, n_clusters=n_clusters)
    assert (ruling.band, ruling.preliminary) == (Band.PASS, early)
    assert any("preliminary" in fact for fact in ruling.because) == early


@pytest.mark.parametrize(
    ("low", "mean", "upper", "at_best"),
    [
        (0.001, 0.003, 0.3, Band.EXCELLENT),
        (0.02, 0.0999, 0.1, Band.PASS),
        (0.06, 0.08, 5.0, Band.DEGRADED),
        (None, 0.06, 0.3, Band.DEGRADED),
        (0.004, None, 0.3, Band.EXCELLENT),
        (0.0, 0.0004, math.inf, Band.EXCELLENT),
    ],
)
def test_a_wide_interval_alone_is_not_a_fail_and_leaves_open_what_is_possible(
    low: float | None, mean: float | None, upper: float, at_best: Band
) -> None:
    ruling = verdict(upper, 0, 1000, kld_least=mean, kld_lower=low, n_clusters=13)
    assert (ruling.band, ruling.at_best, ruling.at_worst) == (None, at_best, Band.FAIL)
    assert (ruling.label, ruling.preliminary, ruling.by_kld) == ("cannot tell", False, True)


@pytest.mark.parametrize(
    ("low", "mean", "upper"), [(0.02, 0.1, 0.3), (0.1, None, 0.3), (None, 0.1, 0.2), (0.0, 0.5, 9.0), (None, 0.1, None)]
)
def test_a_mean_or_a_lower_end_in_fail_is_fail(low: float | None, mean: float | None, upper: float | None) -> None:
    ruling = verdict(upper, 0, 1000, kld_least=mean, kld_lower=low, n_clusters=13)
    assert (ruling.band, ruling.at_worst) == (Band.FAIL, None)


def test_a_harm_and_failed_positions_still_fail_what_a_wide_interval_leaves_open() -> None:
    # lowered by a band: a mean of DEGRADED is FAIL, one of PASS is not
    assert verdict(0.09, 0, 1000, ["a loss"], kld_least=0.06, kld_lower=0.04).band is Band.FAIL
    open_ = verdict(0.09, 0, 1000, ["a loss"], kld_least=0.03, kld_lower=0.004)
    assert (open_.band, open_.at_best, open_.at_worst, open_.by_kld) == (None, Band.PASS, Band.FAIL, False)
    assert verdict(0.3, 11, 1000, kld_least=0.003, kld_lower=0.001).band is Band.FAIL
    assert verdict(0.3, 1, 1000, kld_least=0.003, kld_lower=0.001).at_best is Band.DEGRADED
    few = verdict(0.3, 0, 1000, kld_least=0.003, kld_lower=0.001, n_clusters=4)
    assert (few.band, few.preliminary) == (None, True)
    assert any("preliminary" in fact for fact in few.because)


def test_a_cost_of_exactly_nothing_is_preliminary_over_no_number_of_units() -> None:
    assert not verdict(0.0, 0, 100, kld_lower=0.0, n_clusters=2).preliminary


@pytest.mark.parametrize(
    ("low", "upper", "band", "at_best"),
    [
        (0.02, 0.04, Band.PASS, None),
        (0.009, 0.04, Band.PASS, Band.EXCELLENT),
        (0.009, 0.0999, Band.DEGRADED, Band.EXCELLENT),
        (0.1, 0.3, Band.FAIL, None),
    ],
)
def test_an_interval_that_crosses_a_band_says_the_best_one(
    low: float, upper: float, band: Band, at_best: Band | None
) -> None:
    ruling = verdict(upper, 0, 100, kld_lower=low, n_clusters=31)
    assert (ruling.band, ruling.at_best) == (band, at_best)
    assert any("at best" in fact for fact in ruling.because) == (at_best is not None)
