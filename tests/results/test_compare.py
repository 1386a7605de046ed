"""A run against a baseline: what is compared, what makes a change certain, and what is lost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from fidelab.core import Status
from fidelab.results.compare import compare
from fidelab.results.decision_record import DocumentSums
from fidelab.results.diff_record import Basis, ChangeOutcome, Diff, DiffSide, MetricChange, Thresholds
from fidelab.results.measurement import Definition, Measurement, label, walk
from fidelab.results.record import Report
from fidelab.results.table import tabulate
from tests.report.sample import broken, kld_axis, trajectory_axis
from tests.results.diff_sample import (
    ISOLATED,
    OUTPUT,
    PEAK,
    STORED,
    benches,
    decode,
    decoded,
    joined,
    load,
    measured,
    one,
    outcome,
    run,
    serving,
    with_axes,
)

MIRROR = {"regressed": "improved", "improved": "regressed", "lost": "new", "new": "lost"}


def test_a_report_against_itself_is_unchanged_throughout() -> None:
    report = run(benches())
    diff = compare(report, report)
    assert {change.outcome for change in diff.changes} == {"unchanged"}
    assert (diff.refused, diff.beside, diff.faults()) == ((), (), [])


def test_swapping_two_reports_swaps_every_outcome() -> None:
    slow = benches(decode=benches()["prefill"], memory=measured(PEAK(60000)))
    was, now = run(benches()), run(slow)
    forth, back = (
        {(c.role, c.arm, c.group, c.cell, c.metric): c.outcome for c in compare(*pair).changes}
        for pair in ((was, now), (now, was))
    )
    assert {place: MIRROR.get(word, word) for place, word in forth.items()} == back
    assert {"lost", "new", "regressed"} <= set(forth.values())


def test_every_metric_with_a_value_is_in_the_table_and_failed_items_are_counted() -> None:
    [arm] = run(benches()).candidates
    wanted = {(name, metric.key, label(metric.cell)) for name, _, metric in walk(arm.axes) if metric.value is not None}
    wanted |= {(f"benches.{name}", metric.key, label(metric.cell)) for name, _, metric in walk(arm.benches)}
    wanted |= {(name, "failed_items", "") for name in arm.axes}
    wanted |= {("cache", "bytes_per_token", ""), ("composite", "value", "")}
    table = tabulate(run(benches()))
    assert {(key.group, key.metric, key.cell) for key in table.metrics if key.role == "candidate"} == wanted


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


def test_isolated_and_by_subtraction_stand_apart_and_one_that_noise_swallowed_is_not_a_loss() -> None:
    was = decode(100, 101, 99, by_subtraction=(100, 101, 99))
    now = decode(100, 101, 99, by_subtraction=(50, 51, 49))
    assert outcome(was, now, "benches.decode", "isolated") == "unchanged"
    assert outcome(was, now, "benches.decode", "by_subtraction") == "regressed"
    diff = compare(was, decode(100, 101, 99))
    assert one(diff, "benches.decode", "by_subtraction").outcome == "lost"
    assert diff.faults() == []


def test_depths_and_concurrencies_are_metrics_of_their_own() -> None:
    slow = benches(decode=decoded({(1024, 1): 0.45}), serving=joined(load(4, 400.5), load(8, 300.5)))
    bad = [c for c in compare(run(benches()), run(slow)).changes if c.outcome == "regressed"]
    assert sorted((c.cell, c.metric) for c in bad) == [
        ("context 1024, output 64, arrival closed, concurrency 8", "output_rate"),
        ("depth 1024, batch 1", "isolated"),
    ]


def test_the_worst_stands_first() -> None:
    slow = benches(decode=decoded({(0, 4): 0.5, (1024, 1): 0.3, (1024, 4): 0.6}))
    changes = compare(run(benches()), run(slow)).changes
    assert [c.cell for c in changes[:3]] == ["depth 1024, batch 1", "depth 0, batch 4", "depth 1024, batch 4"]
    assert {c.outcome for c in changes[3:]} == {"unchanged"}


def test_repeats_of_a_load_are_judged_by_their_interval() -> None:
    was, now = (serving(output=OUTPUT.repeated(rates)) for rates in ((100.0, 100.5, 99.5), (100.1, 100.4, 99.6)))
    change = one(compare(was, now), "benches.serving", "output_rate")
    assert (change.outcome, change.basis) == ("unchanged", "repeats")


def test_a_metric_with_a_caveat_proves_nothing_by_its_value_alone() -> None:
    sure, few = (Definition(f"ttft_{name}", "ms", "lower", name=f"TTFT {name}") for name in ("p50", "p99"))
    was, now = (serving(TTFT=sure(value), tail=few(2 * value, caveat="1.9 of 190 beyond")) for value in (50.5, 101))
    found = {name: one(compare(was, now), "benches.serving", f"ttft_{name}") for name in ("p50", "p99")}
    assert {name: change.outcome for name, change in found.items()} == {"p50": "regressed", "p99": "cannot tell"}
    assert found["p99"].doubt == "1.9 of 190 beyond"


def test_an_invalid_load_is_lost_and_says_why() -> None:
    diff = compare(serving(), serving(valid=False))
    lost = [change for change in diff.changes if change.outcome == "lost"]
    assert {change.group for change in lost} == {"benches.serving"}
    assert {change.doubt for change in lost} == {"the cell is invalid: the server counted 512 tokens"}
    assert diff.faults() == []
    assert len(diff.undecided()) == 1


def test_one_more_byte_of_cache_counts_beyond_the_allowance_exactly() -> None:
    def held(size: int) -> Report:
        return run({"memory": measured(STORED(size), PEAK(size))})

    place = ("benches.memory", "kv_bytes_per_token")
    assert outcome(held(1000), held(1050), *place) == "unchanged"
    assert outcome(held(1000), held(1051), *place) == "regressed"
    assert outcome(held(1000), held(1051), "benches.memory", "peak_host") == "cannot tell"


def test_a_smaller_pool_is_not_a_gain() -> None:
    was, now = (run({"memory": measured(Definition("pool", "bytes")(size))}) for size in (2000, 1000))
    change = one(compare(was, now), "benches.memory", "pool")
    assert (change.outcome, change.counts, change.doubt) == ("cannot tell", False, "neither side is better")


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


def test_metrics_of_an_axis_without_interval_prove_nothing() -> None:
    mean, p99 = Definition("mean", "nats", "lower"), Definition("p99", "nats", "lower")
    was, now = (
        with_axes(kld=measured(mean(value, (0.9 * value, 1.1 * value)), p99(9 * value))) for value in (0.01, 0.05)
    )
    assert outcome(was, now, "kld", "mean") == "regressed"
    found = one(compare(was, now), "kld", "p99")
    assert (found.outcome, found.doubt) == ("cannot tell", "no interval")


def test_a_score_may_drop_by_so_many_points() -> None:
    was, now = (with_axes(trajectory=trajectory_axis(score, 0.5)) for score in (80, 76))
    assert outcome(was, now, "trajectory", "score") == "regressed"
    assert outcome(was, now, "trajectory", "score", score_drop=5) == "unchanged"
    assert outcome(now, was, "trajectory", "score") == "improved"


def test_one_more_failed_item_is_a_regression() -> None:
    was, now = (with_axes(kld=kld_axis(0.01, 0.001, n_failed=n)) for n in (0, 1))
    change = one(compare(was, now), "kld", "failed_items")
    assert (change.outcome, change.basis, change.doubt) == ("regressed", "exact", "")


def test_lower_bounds_are_not_judged() -> None:
    was, now = (with_axes(kld=kld_axis(mean, 1e-6, bound=True)) for mean in (0.01, 0.09))
    change = one(compare(was, now), "kld", "mean")
    assert (change.outcome, change.doubt, change.counts) == ("cannot tell", "a lower bound", False)


def test_an_axis_that_fails_now_loses_its_metrics_and_says_why() -> None:
    failed = Measurement(status=Status.FAILED, reason="time-out after 60 s")
    found = measured(Definition("score", "points", "higher")(90))
    diff = compare(with_axes(kld=kld_axis(0.01, 0.001), rniah=found), with_axes(rniah=failed))
    assert one(diff, "rniah", "score").doubt == "time-out after 60 s"
    assert {change.outcome for change in diff.changes if change.group in ("kld", "rniah")} >= {"lost"}


def test_an_arm_that_fails_now_loses_all_its_metrics_and_says_why() -> None:
    was = run(benches())
    now = run(candidates=(broken("fp8_e4m3", Status.FAILED, "out of memory"),))
    diff = compare(was, now)
    lost = [change for change in diff.changes if change.outcome == "lost"]
    assert len(lost) == len([key for key in tabulate(was).metrics if key.role == "candidate"])
    assert {change.doubt for change in lost} == {"out of memory"}
    assert diff.faults() == []
    assert len(diff.undecided()) == 1
    assert compare(was, now, Thresholds(allow_missing=True)).undecided() == []


def test_what_neither_side_measured_is_said() -> None:
    report = run(candidates=(broken("q8_0", Status.FAILED, "out of memory"),))
    assert compare(report, report).unmeasured == ("q8_0: out of memory",)


@pytest.mark.parametrize(("a", "b"), [(5e-324, 1e308), (0.0, 1e308), (0.0, 0.0)])
def test_numbers_that_no_ratio_holds_are_written_as_json(a: float, b: float) -> None:
    def extreme(value: float) -> Report:
        return run({"memory": measured(STORED(value), PEAK(value)), "decode": measured(ISOLATED.repeated([value] * 3))})

    for diff in (compare(extreme(a), extreme(b)), compare(extreme(b), extreme(a))):
        assert Diff.model_validate_json(diff.model_dump_json(), strict=True) == diff


def test_a_change_of_top1_agreement_is_judged_by_intervals() -> None:
    was, now = (
        with_axes(
            kld=measured(Definition("top1", "share", "higher", name="same top token")(top1, (top1 - 0.01, top1 + 0.01)))
        )
        for top1 in (0.97, 0.8)
    )
    found = next(change for change in compare(was, now).changes if change.metric == "top1")
    assert (found.basis, found.outcome) == ("intervals", "regressed")


def shaken(mean: float, floor: float | None, processor: str = "one") -> Report:
    """A run whose candidate's last bits move it by so much, on some processor."""
    found = kld_axis(mean, 0.0001, control=0.001)
    metrics = [m.model_copy(update={"noise": floor or 0.0}) if m.unit == "nats" else m for m in found.metrics]
    report = with_axes(kld=found.model_copy(update={"metrics": tuple(metrics)}))
    return report.model_copy(update={"environment": {**report.environment, "processor": processor}})


@pytest.mark.parametrize(
    ("floors", "processor", "expected"),
    [
        ((0.01, 0.01), "two", "unchanged"),
        ((None, 0.01), "two", "unchanged"),
        ((0.01, None), "two", "unchanged"),
        ((0.001, 0.001), "two", "regressed"),
        ((None, None), "two", "cannot tell"),
        ((0.01, 0.01), "one", "regressed"),
    ],
    ids=["both", "now", "baseline", "below the change", "not measured", "the same machine"],
)
@pytest.mark.parametrize("metric", ["mean", "over_control"])
def test_on_another_machine_what_last_bits_can_do_is_not_a_change(
    floors: tuple[float | None, float | None], processor: str, expected: str, metric: str
) -> None:
    was, now = shaken(0.03, floors[0]), shaken(0.036, floors[1], processor)
    limits = {"kld_increase": 0.0, "kld_increase_nats": 0.0}
    assert outcome(was, now, "kld", metric, **limits) == expected


def test_without_measured_noise_a_kld_that_doubles_is_a_change_and_a_smaller_one_names_the_flag() -> None:
    limits = Thresholds(kld_increase=0.0, kld_increase_nats=0.0)
    small = one(compare(shaken(0.03, None), shaken(0.036, None, "two"), limits), "kld", "mean")
    assert (small.outcome, small.doubt) == (
        "cannot tell",
        "rounding noise was not measured: run again with --floor",
    )
    large = one(compare(shaken(0.03, None), shaken(0.061, None, "two"), limits), "kld", "mean")
    assert large.outcome == "regressed"


def test_another_version_of_what_computes_is_another_place() -> None:
    was, now = shaken(0.03, 0.01), shaken(0.036, 0.01)
    [arm] = now.candidates
    assert arm.ran is not None
    ran = arm.ran.model_copy(update={"versions": {**arm.ran.versions, "torch": "99"}})
    later = now.model_copy(update={"candidates": (arm.model_copy(update={"ran": ran}),)})
    limits = {"kld_increase": 0.0, "kld_increase_nats": 0.0}
    assert outcome(was, later, "kld", "mean", **limits) == "unchanged"


LEVELS = 0.003 * np.random.default_rng(1).lognormal(0, 0.5, 13)  # of documents, nats


def with_sums(means: Any, *, context: int = 512, positions: int = 255, first: int = 0, **changes: Any) -> Report:
    """A run of one candidate with these mean KLs by document, all with as many positions."""
    mean, n = float(np.mean(means)), len(means)
    ends = (mean * 0.7, mean * 1.5) if n > 1 else None
    found = Definition("mean", "nats", "lower")(mean, ends)
    kld = measured(found, facts={"n_ctx": 512}, n_clusters=n, **changes)
    sums = DocumentSums(
        context=context,
        windows=8,
        documents=tuple(range(first, first + n)),
        positions=(positions,) * n,
        kl=tuple((positions * np.asarray(means)).tolist()),
        probability_loss=(0.0,) * n,
    )
    [arm] = with_axes(kld=kld).candidates
    return run(candidates=(arm.model_copy(update={"documents": (sums,)}),))


def without_sums(report: Report) -> Report:
    [arm] = report.candidates
    return report.model_copy(update={"candidates": (arm.model_copy(update={"documents": ()}),)})


def mean_change(was: Report, now: Report, **limits: Any) -> MetricChange:
    return one(compare(was, now, Thresholds.model_validate(limits)), "kld", "mean")


def test_a_rise_of_the_mean_kl_is_found_by_the_sums_of_documents_and_hidden_by_independent_intervals() -> None:
    was, now = with_sums(LEVELS), with_sums(1.3 * LEVELS)
    found = mean_change(was, now)
    assert (found.basis, found.outcome, found.doubt) == ("paired", "regressed", "")
    assert found.change == pytest.approx(0.3 * LEVELS.mean())
    assert mean_change(now, was).outcome == "improved"
    alone = mean_change(without_sums(was), without_sums(now))
    assert (alone.basis, alone.outcome) == ("intervals", "cannot tell")


def test_noise_by_document_within_the_allowance_is_unchanged() -> None:
    noisy = LEVELS * np.random.default_rng(2).lognormal(0, 0.05, 13)
    found = mean_change(with_sums(LEVELS), with_sums(noisy))
    assert (found.basis, found.outcome) == ("paired", "unchanged")
    strict = mean_change(with_sums(LEVELS), with_sums(1.3 * LEVELS), kld_increase="50%")
    assert strict.outcome == "unchanged"
    assert mean_change(with_sums(LEVELS), with_sums(1.3 * LEVELS), kld_increase_nats=0.01).outcome == "unchanged"


def test_a_paired_change_that_cannot_be_told_leaves_the_gate_open() -> None:
    diff = compare(with_sums(LEVELS), with_sums(LEVELS * np.random.default_rng(3).lognormal(0, 0.6, 13)))
    found = one(diff, "kld", "mean")
    assert (found.basis, found.outcome) == ("paired", "cannot tell")
    assert any("may be worse than allowed" in line for line in diff.undecided())


@pytest.mark.parametrize(
    ("was", "now", "doubt"),
    [
        (without_sums(with_sums(LEVELS)), with_sums(1.3 * LEVELS), "the baseline has no sums by document"),
        (with_sums(LEVELS), without_sums(with_sums(1.3 * LEVELS)), "the run has no sums by document"),
        (with_sums(LEVELS), with_sums(1.3 * LEVELS, context=2048), "the run has no sums by document"),
        (with_sums(LEVELS), with_sums(1.3 * LEVELS, positions=254), "of other documents or positions"),
        (with_sums(LEVELS), with_sums(1.3 * LEVELS, first=1), "of other documents or positions"),
        (with_sums(LEVELS), with_sums(1.3 * LEVELS[:12]), "of other documents or positions"),
    ],
)
def test_sums_that_do_not_match_fall_back_and_say_so(was: Report, now: Report, doubt: str) -> None:
    found = mean_change(was, now)
    assert (found.basis, found.outcome) == ("intervals", "cannot tell")
    assert found.doubt.startswith("not paired: ")
    assert doubt in found.doubt


def test_sums_of_another_figure_are_not_paired() -> None:
    now = with_sums(1.3 * LEVELS)
    [arm] = now.candidates
    doubled = tuple(2 * x for x in arm.documents[0].kl)
    sums = arm.documents[0].model_copy(update={"kl": doubled})
    other = now.model_copy(update={"candidates": (arm.model_copy(update={"documents": (sums,)}),)})
    assert mean_change(with_sums(LEVELS), other).doubt == "not paired: the sums by document are not those of the figure"


def test_one_document_has_no_interval_and_says_so() -> None:
    found = mean_change(with_sums([0.003]), with_sums([0.004]))
    assert (found.basis, found.outcome) == ("single", "cannot tell")
    assert found.doubt == "one document: a change has no interval"


def test_between_machines_rounding_noise_is_the_least_allowance_of_a_paired_change_too() -> None:
    def on(processor: str, means: Any) -> Report:
        report = with_sums(means)
        [arm] = report.candidates
        metrics = tuple(m.model_copy(update={"noise": 0.01}) for m in arm.axes["kld"].metrics)
        axes = {"kld": arm.axes["kld"].model_copy(update={"metrics": metrics})}
        arms = (arm.model_copy(update={"axes": axes}),)
        return report.model_copy(update={"candidates": arms, "environment": {"processor": processor}})

    assert mean_change(on("one", LEVELS), on("two", 1.3 * LEVELS)).outcome == "unchanged"
    assert mean_change(on("one", LEVELS), on("one", 1.3 * LEVELS)).outcome == "regressed"


def test_figures_whose_pairs_are_not_recorded_leave_the_gate_alone_where_the_mean_was_paired() -> None:
    def change(metric: str, basis: Basis, outcome: ChangeOutcome, group: str = "kld") -> MetricChange:
        place = {"role": "candidate", "arm": "q8_0", "group": group, "cell": "", "metric": metric, "name": metric}
        return MetricChange.model_validate(
            {**place, "unit": "nats", "better": "lower", "basis": basis, "outcome": outcome}
        )

    def gate(*changes: MetricChange) -> list[str]:
        side = DiffSide(run_id="run", created=datetime(2026, 1, 1, tzinfo=UTC))
        return Diff(baseline=side, now=side, thresholds=Thresholds(), changes=changes).undecided()

    mean, wide = change("mean", "paired", "unchanged"), change("reverse_kl", "intervals", "cannot tell")
    assert gate(mean, wide) == []
    assert len(gate(wide)) == 1
    assert len(gate(change("mean", "paired", "cannot tell"), wide)) == 1
    assert len(gate(mean, change("difference", "intervals", "cannot tell", group="gsm8k"))) == 1
