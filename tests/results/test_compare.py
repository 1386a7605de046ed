"""A run against a baseline: what is compared, what makes a change certain, and what is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from fidelab.core import Estimator, Status
from fidelab.results.axis_record import OtherAxis
from fidelab.results.bench_record import Benches
from fidelab.results.compare import compare
from fidelab.results.diff_record import Diff
from fidelab.results.flatten import flatten
from fidelab.results.record import Floor, Report
from tests.report.sample import broken, kld_axis, trajectory_axis
from tests.results.diff_sample import benches, decode, latency, load_cell, one, outcome, run, serving, spread, with_axes

MIRROR = {"regressed": "improved", "improved": "regressed", "lost": "new", "new": "lost"}


def test_a_report_against_itself_is_unchanged_throughout() -> None:
    report = run(benches())
    diff = compare(report, report)
    assert {change.outcome for change in diff.changes} == {"unchanged"}
    assert (diff.refused, diff.beside, diff.faults()) == ((), (), [])


def test_swapping_two_reports_swaps_every_outcome() -> None:
    slow = benches(decode=benches()["prefill"], memory={"status": "ok", "peak_host_bytes": 30000})
    was, now = run(benches()), run(slow)
    forth, back = (
        {(c.role, c.arm, c.group, c.cell, c.metric): c.outcome for c in compare(*pair).changes}
        for pair in ((was, now), (now, was))
    )
    assert {place: MIRROR.get(word, word) for place, word in forth.items()} == back
    assert {"lost", "new", "regressed"} <= set(forth.values())


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a record, with the name of its field."""
    if isinstance(tree, Mapping):
        if "repeats" in tree and "median" in tree:
            yield name, tree["median"]
            return
        for key, value in tree.items():
            yield from leaves(value, key)
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for value in tree:
            yield from leaves(value, name)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield name, tree


def test_every_figure_of_a_bench_is_a_metric() -> None:
    shape = {"tokens", "batch", "n", "warmups", "context", "output", "concurrency", "request_rate", "workers"}
    counts = {"n_requests", "n_completed", "input_tokens", "output_tokens", "samples", "drafted", "accepted"}
    others = {"load_seconds", "seconds", "gain", "threshold"}  # of the captures; of the saturation
    tree = Benches.model_validate(benches()).model_dump(mode="json")
    tree["serving"]["cells"][0]["goodput"]["targets"] = {}
    tree["serving"]["cells"][1]["goodput"]["targets"] = {}
    wanted = {value for name, value in leaves(tree) if name not in shape | counts | others}
    got = {metric.value for key, metric in flatten(run(benches())).metrics.items() if key.group.startswith("benches.")}
    assert wanted - got == set()


def test_every_figure_of_an_axis_is_a_metric() -> None:
    report = with_axes(kld=kld_axis(0.03, 0.01, control=0.01), trajectory=trajectory_axis(61, 7))
    axes = report.candidates[0].axes.model_dump(mode="json")
    seen = {"by_position", "by_confidence", "survival", "divergences"}  # what is to be looked at
    aside = {"stderr", "n_positions", "n_units", "n_items", "n_predict", "ci", "mean_ci"}
    aside |= {"top1_ci", "real_flips_ci", "tokens_to_flip_ci", "n_ctx", "n_documents"}
    kept = [{k: v for k, v in axis.items() if k not in seen} for axis in axes.values()]
    wanted = {value for axis in kept for name, value in leaves(axis) if name not in aside}
    assert wanted - {metric.value for metric in flatten(report).metrics.values()} == set()


@pytest.mark.parametrize(
    ("now", "verdict", "basis"),
    [
        ((100.1, 100.4, 99.7), "unchanged", "repeats"),
        ((80.1, 80.4, 79.7), "regressed", "repeats"),
        ((125.1, 125.4, 124.7), "improved", "repeats"),
        ((70.0, 95.0, 110.0), "cannot tell", "repeats"),
        ((100.0,), "unchanged", "single"),
        ((85.0,), "cannot tell", "single"),
        ((80.0,), "regressed", "single"),
        ((0.0, 0.0), "regressed", "single"),
    ],
)
def test_repeats_decide_where_both_sides_have_them(now: tuple[float, ...], verdict: str, basis: str) -> None:
    change = one(compare(decode(100.0, 101.0, 99.0), decode(*now)), "benches.decode", "isolated")
    assert (change.outcome, change.basis) == (verdict, basis)
    assert (change.doubt == "no repeats") == (basis == "single")


def test_the_change_of_repeats_is_that_of_their_geometric_means() -> None:
    change = one(compare(decode(100, 100, 100.001), decode(80, 80, 80.001)), "benches.decode", "isolated")
    assert change.relative
    assert change.change == pytest.approx(-0.2, abs=1e-4)
    assert change.ci == pytest.approx((-0.2, -0.2), abs=1e-4)


def test_isolated_and_by_subtraction_stand_apart() -> None:
    was = decode(100, 101, 99, by_subtraction=spread(100, 101, 99))
    now = decode(100, 101, 99, by_subtraction=spread(50, 51, 49))
    assert outcome(was, now, "benches.decode", "isolated") == "unchanged"
    assert outcome(was, now, "benches.decode", "by subtraction") == "regressed"


def test_a_rate_by_subtraction_that_noise_swallowed_is_no_loss() -> None:
    diff = compare(decode(100, 101, by_subtraction=spread(90, 91)), decode(100, 101))
    assert one(diff, "benches.decode", "by subtraction").outcome == "lost"
    assert diff.faults() == []


def test_depths_and_concurrencies_are_metrics_of_their_own() -> None:
    slow = benches()
    slow["decode"]["cells"][2]["rate"] = spread(40, 41, 42)
    slow["serving"]["cells"][1] = load_cell(concurrency=8, output_rate=300.5)
    bad = [c for c in compare(run(benches()), run(slow)).changes if c.outcome == "regressed"]
    assert sorted((c.cell, c.metric) for c in bad) == [
        ("1024→64 tokens, closed, C = 8", "output rate"),
        ("depth 1024 × 1", "isolated"),
    ]


def test_the_worst_stands_first() -> None:
    slow = benches()
    for cell, factor in zip(slow["decode"]["cells"], (1.0, 0.5, 0.3, 0.6), strict=True):
        cell["rate"] = spread(*(factor * repeat for repeat in cell["rate"]["repeats"]))
    changes = compare(run(benches()), run(slow)).changes
    assert [c.cell for c in changes[:3]] == ["depth 1024 × 1", "depth 0 × 4", "depth 1024 × 4"]
    assert {c.outcome for c in changes[3:]} == {"unchanged"}


@pytest.mark.parametrize(("metric", "field"), [("output rate", "output_rate"), ("ttft p50", "ttft.p50")])
def test_repeats_of_a_load_find_their_metric(metric: str, field: str) -> None:
    was = serving(repeats={field: [100.0, 100.5, 99.5]})
    now = serving(repeats={field: [100.1, 100.4, 99.6]})
    change = one(compare(was, now), "benches.serving", metric)
    assert (change.outcome, change.basis) == ("unchanged", "repeats")


def test_percentiles_with_few_values_beyond_prove_nothing() -> None:
    was, now = serving(), serving(ttft=latency(190, 51.5, p50=101, p95=161, p99=241))
    found = {name: one(compare(was, now), "benches.serving", f"ttft {name}") for name in ("p50", "p95", "p99")}
    assert {name: change.outcome for name, change in found.items()} == {
        **dict.fromkeys(("p95", "p99"), "cannot tell"),
        "p50": "regressed",
    }
    assert found["p99"].doubt == "1.9 of 190 beyond"


def test_an_invalid_load_is_lost_and_says_why() -> None:
    flags = [{"kind": "depth", "text": "the server counted 512 tokens"}]
    diff = compare(serving(), serving(valid=False, flags=flags))
    lost = [change for change in diff.changes if change.outcome == "lost"]
    assert {change.group for change in lost} == {"benches.serving"}
    assert {change.doubt for change in lost} == {"the cell is invalid: the server counted 512 tokens"}
    assert len(diff.faults()) == 1


def test_one_more_byte_of_cache_counts_beyond_the_allowance_exactly() -> None:
    def held(size: int) -> Report:
        return run({"memory": {"status": "ok", "kv_bytes_per_token": size, "peak_host_bytes": size}})

    place = ("benches.memory", "KV bytes per token")
    assert outcome(held(1000), held(1050), *place) == "unchanged"
    assert outcome(held(1000), held(1051), *place) == "regressed"
    assert outcome(held(1000), held(1051), "benches.memory", "peak host") == "cannot tell"


def test_a_smaller_pool_is_no_gain() -> None:
    was, now = (run({"memory": {"status": "ok", "reserved_bytes": size}}) for size in (2000, 1000))
    change = one(compare(was, now), "benches.memory", "pool")
    assert (change.outcome, change.counts, change.doubt) == ("cannot tell", False, "neither side is better")


# ---------------------------------------------------------------------------------------------------------- axes


@pytest.mark.parametrize(
    ("now", "half", "limits", "verdict"),
    [
        (0.0312, 0.006, {}, "cannot tell"),
        (0.09, 0.01, {}, "regressed"),
        (0.04, 0.001, {}, "regressed"),
        (0.04, 0.001, {"kld_increase": 0.5}, "unchanged"),
        (0.04, 0.001, {"kld_increase": 0, "kld_increase_nats": 0.02}, "unchanged"),
        (0.01, 0.001, {}, "improved"),
        (0.034, 0.01, {}, "cannot tell"),
    ],
)
def test_a_mean_kl_is_judged_by_both_intervals(now: float, half: float, limits: dict[str, float], verdict: str) -> None:
    was, is_ = with_axes(kld=kld_axis(0.0312, 0.001)), with_axes(kld=kld_axis(now, half))
    assert outcome(was, is_, "kld", "mean", **limits) == verdict


def test_figures_of_an_axis_without_interval_prove_nothing() -> None:
    was, now = with_axes(kld=kld_axis(0.01, 0.001)), with_axes(kld=kld_axis(0.05, 0.001))
    assert outcome(was, now, "kld", "mean") == "regressed"
    p99 = one(compare(was, now), "kld", "p99")
    assert (p99.outcome, p99.doubt) == ("cannot tell", "no interval")


def test_a_score_may_drop_by_so_many_points() -> None:
    was, now = (with_axes(trajectory=trajectory_axis(score, 0.5)) for score in (80, 76))
    assert outcome(was, now, "trajectory", "score") == "regressed"
    assert outcome(was, now, "trajectory", "score", score_drop=5) == "unchanged"
    assert outcome(now, was, "trajectory", "score") == "improved"


def test_one_more_failed_item_is_a_regression() -> None:
    was, now = (with_axes(kld=kld_axis(0.01, 0.001, n_failed=n)) for n in (0, 1))
    change = one(compare(was, now), "kld", "failed items")
    assert (change.outcome, change.basis, change.doubt) == ("regressed", "exact", "")


def test_lower_bounds_are_not_judged() -> None:
    was, now = (
        with_axes(kld=kld_axis(mean, 1e-6, estimator=Estimator.TOPK, score=None, ci=None)) for mean in (0.01, 0.09)
    )
    change = one(compare(was, now), "kld", "mean")
    assert (change.outcome, change.doubt, change.counts) == ("cannot tell", "a lower bound", False)


def test_figures_know_their_better_side_with_their_context() -> None:
    def perplexity(value: float) -> Report:
        figures = [
            {"name": "ln ratio 512", "value": value, "ci": (value - 0.001, value + 0.001), "unit": "nats"},
            {"name": "PPL 512", "value": value},
        ]
        return with_axes(perplexity={"status": "ok", "figures": figures})

    assert outcome(perplexity(-0.01), perplexity(0.01), "perplexity", "ln ratio 512") == "regressed"
    assert not one(compare(perplexity(0), perplexity(1)), "perplexity", "PPL 512").counts


def test_an_axis_that_fails_now_loses_its_metrics_and_says_why() -> None:
    failed = OtherAxis(status=Status.FAILED, reason="time-out after 60 s")
    diff = compare(with_axes(kld=kld_axis(0.01, 0.001), rniah={"status": "ok", "score": 90}), with_axes(rniah=failed))
    assert one(diff, "rniah", "score").doubt == "time-out after 60 s"
    assert {change.outcome for change in diff.changes if change.group in ("kld", "rniah")} >= {"lost"}


def test_an_arm_that_fails_now_loses_all_its_metrics_and_says_why() -> None:
    was = run(benches())
    diff = compare(was, run(candidates=(broken("fp8_e4m3", Status.FAILED, "out of memory"),)))
    lost = [change for change in diff.changes if change.outcome == "lost"]
    assert len(lost) == len([key for key in flatten(was).metrics if key.role == "candidate"])
    assert {change.doubt for change in lost} == {"out of memory"}
    assert len(diff.faults()) == 1
    assert diff.faults(allow_missing=True) == []


def test_what_neither_side_measured_is_said() -> None:
    report = run(candidates=(broken("q8_0", Status.FAILED, "out of memory"),))
    assert compare(report, report).unmeasured == ("q8_0: out of memory",)


# ---------------------------------------------------------------------------------------------------- robustness


@pytest.mark.parametrize(("a", "b"), [(5e-324, 1e308), (0.0, 1e308), (0.0, 0.0)])
def test_numbers_that_no_ratio_holds_are_written_as_json(a: float, b: float) -> None:
    def extreme(value: float) -> Report:
        memory = {"status": "ok", "peak_host_bytes": value, "kv_bytes_per_token": value}
        return run({"memory": memory, "decode": decode(value, value, value).candidates[0].benches.decode})

    for diff in (compare(extreme(a), extreme(b)), compare(extreme(b), extreme(a))):
        assert Diff.model_validate_json(diff.to_json(), strict=True) == diff


def test_two_cells_of_one_shape_are_both_kept() -> None:
    cell = {"status": "ok", "tokens": 8, "rate": spread(1.0)}
    metrics = flatten(run({"decode": {"status": "ok", "cells": [cell, cell]}})).metrics
    assert [key.metric for key in metrics if key.group == "benches.decode"] == ["isolated", "isolated #2"]


def test_a_change_of_top1_agreement_is_judged_by_intervals() -> None:
    was, now = (
        with_axes(kld=kld_axis(0.03, 0.001, top1=top1, top1_ci=(top1 - 0.01, top1 + 0.01))) for top1 in (0.97, 0.8)
    )
    found = next(change for change in compare(was, now).changes if change.metric == "top-1")
    assert (found.basis, found.outcome) == ("intervals", "regressed")


# ------------------------------------------------------------------------------------------- last bits


def shaken(mean: float, floor: float | None, processor: str = "one") -> Report:
    """A run whose candidate's last bits move it by so much, on some processor."""
    report = with_axes(kld=kld_axis(mean, 0.0001, control=0.001))
    [arm] = report.candidates
    held = arm.model_copy(update={"floor": None if floor is None else Floor(of=arm.name, mean=floor)})
    place = {**report.environment, "processor": processor}
    return report.model_copy(update={"candidates": (held,), "environment": place})


@pytest.mark.parametrize(
    ("floors", "processor", "expected"),
    [
        ((0.01, 0.01), "two", "unchanged"),
        ((None, 0.01), "two", "unchanged"),
        ((0.01, None), "two", "unchanged"),
        ((0.001, 0.001), "two", "regressed"),
        ((None, None), "two", "regressed"),
        ((0.01, 0.01), "one", "regressed"),
    ],
    ids=["both", "now", "baseline", "below the change", "not measured", "the same machine"],
)
@pytest.mark.parametrize("metric", ["mean", "over control"])
def test_on_another_machine_what_last_bits_can_do_is_no_change(
    floors: tuple[float | None, float | None], processor: str, expected: str, metric: str
) -> None:
    was, now = shaken(0.03, floors[0]), shaken(0.036, floors[1], processor)
    limits = {"kld_increase": 0.0, "kld_increase_nats": 0.0}
    assert outcome(was, now, "kld", metric, **limits) == expected


def test_another_version_of_what_computes_is_another_place() -> None:
    was, now = shaken(0.03, 0.01), shaken(0.036, 0.01)
    [arm] = now.candidates
    assert arm.ran is not None
    ran = arm.ran.model_copy(update={"versions": {**arm.ran.versions, "torch": "99"}})
    later = now.model_copy(update={"candidates": (arm.model_copy(update={"ran": ran}),)})
    limits = {"kld_increase": 0.0, "kld_increase_nats": 0.0}
    assert outcome(was, later, "kld", "mean", **limits) == "unchanged"
