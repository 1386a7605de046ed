"""A gate on a report: what an interval decides, which sample size would, and how tiers count."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fidelab.core import Status
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.metrics.equivalence import POWER
from fidelab.metrics.intervals import RatioItems, critical_value
from fidelab.metrics.sample_size import clusters_to_agree, clusters_to_certify, ratio_spread
from fidelab.results.check import Check, Policy, Rule, RuleResult, check
from fidelab.results.decision_record import DocumentSums
from fidelab.results.measurement import Definition, Measurement, Metric
from fidelab.results.record import Report
from tests.report.sample import MEAN, TOP1, broken, candidate, kld_axis, sample_report
from tests.results.diff_sample import ISOLATED, STORED, measured, run

SCORE = Definition("score", "points", "higher")


def decide(report: Report, *rules: dict[str, Any]) -> Check:
    policy = Policy.model_validate({"rules": rules})
    return check(report, policy, report.candidates, groups=("kld", "rniah", "benches.decode"))


def one(report: Report, **rule: Any) -> RuleResult:
    [result] = decide(report, rule).results
    return result


def with_axis(*metrics: Metric, **fields: Any) -> Report:
    axis = Measurement(**{"status": Status.OK, "metrics": metrics, **fields})
    return sample_report(candidates=(candidate("int8", 0.1, "PASS", 1, "safe", axes={"kld": axis}),))


def with_bench(*metrics: Metric) -> Report:
    return run({"decode": measured(*metrics)})


@pytest.mark.parametrize(
    ("limits", "decision"),
    [
        ({"max": 0.013}, "GO"),
        ({"max": 0.012}, "GO"),
        ({"max": 0.0119}, "INCONCLUSIVE"),
        ({"max": 0.01}, "INCONCLUSIVE"),
        ({"max": 0.008}, "INCONCLUSIVE"),
        ({"max": 0.0079}, "NO-GO"),
        ({"min": 0.008}, "GO"),
        ({"min": 0.0121}, "NO-GO"),
        ({"min": 0.01}, "INCONCLUSIVE"),
        ({"min": 0.001, "max": 0.02}, "GO"),
        ({"min": 0.011, "max": 0.02}, "INCONCLUSIVE"),
    ],
)
def test_the_whole_interval_decides_and_the_figure_alone_never_does(limits: dict[str, float], decision: str) -> None:
    assert one(with_axis(MEAN(0.01, (0.008, 0.012))), metric="kld.mean", **limits).decision == decision


@pytest.mark.parametrize("limit", ["97%", "0.97", 0.97])
def test_a_limit_on_a_share_is_a_percentage_or_a_share(limit: float | str) -> None:
    result = one(with_axis(TOP1(0.98, (0.975, 0.985))), metric="kld.top1", min=limit)
    assert (result.min, result.decision) == (0.97, "GO")
    assert one(with_axis(SCORE(98, (97.5, 98.5))), metric="kld.score", min="97%").min == 97  # points


@pytest.mark.parametrize(
    ("metric", "limit", "decision"),
    [
        (ISOLATED.repeated((100, 101, 99)), {"min": 90}, "GO"),
        (ISOLATED.repeated((100, 101, 99)), {"min": 110}, "NO-GO"),
        (ISOLATED.repeated((100, 101, 99)), {"min": 99.9}, "INCONCLUSIVE"),
        (ISOLATED(100), {"min": 10}, "INCONCLUSIVE"),
    ],
)
def test_repeats_make_the_interval_of_a_bench(metric: Metric, limit: dict[str, float], decision: str) -> None:
    result = one(with_bench(metric), metric="benches.decode.isolated", **limit)
    assert result.decision == decision
    assert (result.ci is None) == (not metric.repeats)


@pytest.mark.parametrize(("limit", "decision"), [(100, "GO"), (99, "NO-GO")])
def test_an_exact_figure_decides_by_itself(limit: float, decision: str) -> None:
    result = one(with_bench(STORED(100)), metric="benches.decode.kv_bytes_per_token", max=limit)
    assert result.decision == decision


def test_a_lower_bound_can_only_fail() -> None:
    report = with_axis(MEAN(0.01, (0.008, 0.012), bound=True))
    assert one(report, metric="kld.mean", max=0.007).decision == "NO-GO"
    found = one(report, metric="kld.mean", max=1)
    assert (found.decision, found.reason) == ("INCONCLUSIVE", "only a lower bound is known")


def test_an_output_equal_to_the_references_has_nothing_to_estimate() -> None:
    report = with_axis(TOP1(1.0, (0.5, 1.0)), status=Status.IDENTICAL)
    assert one(report, metric="kld.top1", min="99%").decision == "GO"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n_failed": 1, "n_items": 8}, "1 of 8 items gave no figure"),
        ({"fails": ("garbage",)}, "garbage"),
        ({"downgrades": ("loses 4 of 36 needles",)}, "loses 4 of 36 needles"),
    ],
)
def test_figures_that_leave_something_out_do_not_pass(fields: dict[str, Any], said: str) -> None:
    report = with_axis(MEAN(0.01, (0.008, 0.012)), **fields)
    found = one(report, metric="kld.mean", max=1)
    assert (found.decision, found.reason) == ("INCONCLUSIVE", said)
    assert one(report, metric="kld.mean", max=0.001).decision == "NO-GO"


def test_a_format_that_was_not_applied_does_not_pass() -> None:
    kld = Measurement(status=Status.OK, metrics=(MEAN(0.01, (0.008, 0.012)),))
    arm = candidate(
        "int8", 0.1, "FAIL", 1, "no", axes={"kld": kld}, status=Status.NOT_ENGAGED, reason="stored bf16", forced=True
    )
    found = one(sample_report(candidates=(arm,)), metric="kld.mean", max=1)
    assert (found.decision, found.reason) == ("INCONCLUSIVE", "stored bf16")


def test_the_sample_size_finds_the_distance_to_the_limit_with_the_power_of_certificates() -> None:
    n = 16
    half = critical_value(n) * 0.02 / math.sqrt(n)
    report = with_axis(TOP1(0.98, (0.98 - half, 0.98 + half)), n_clusters=n, cluster="document")
    found = one(report, metric="kld.top1", min="97.5%")
    needed = clusters_to_certify(0.02, 0.005, 0.025, POWER)
    assert found.needed == pytest.approx(needed, abs=1)
    assert found.reason == f"about {found.needed} documents would decide (now 16)"


def test_of_the_mean_kl_it_rests_on_the_sums_by_document() -> None:
    kl, positions = (1.0, 3.0, 2.0, 6.0, 1.5, 2.5, 4.0), (100,) * 7
    sums = DocumentSums(context=512, documents=tuple(range(7)), positions=positions, kl=kl, probability_loss=(0.0,) * 7)
    axis = kld_axis(sum(kl) / 700, 0.02, n_clusters=7, cluster="document")
    arm = candidate("int8", 0.1, "PASS", 1, "safe", axes={"kld": axis}, documents=(sums,))
    found = one(sample_report(candidates=(arm,)), metric="kld.mean", max=0.035)
    spread = ratio_spread(RatioItems.of(kl, positions, range(7)))
    assert spread is not None
    assert found.needed == clusters_to_certify(spread.sd, 0.035 - sum(kl) / 700, 0.025, POWER, cost=True)


def test_where_all_items_agree_it_is_that_of_the_binomial_bound() -> None:
    report = with_axis(TOP1(1.0, (0.6, 1.0)), n_clusters=4, cluster="document")
    assert one(report, metric="kld.top1", min="97%").needed == clusters_to_agree(0.03)


def test_of_repeats_it_is_a_number_of_repeats() -> None:
    found = one(with_bench(ISOLATED.repeated((90, 100, 110, 100))), metric="benches.decode.isolated", min=95)
    assert found.needed is not None
    assert found.needed > 4
    assert "repeats would decide (now 4)" in found.reason


@pytest.mark.parametrize(
    ("report", "rule"),
    [
        (with_axis(TOP1(0.97, (0.95, 0.99)), n_clusters=16), {"metric": "kld.top1", "min": "97%"}),
        (with_axis(TOP1(1.0, (0.6, 1.0)), n_clusters=16), {"metric": "kld.top1", "min": 1 - 1e-12}),
        (with_axis(MEAN(0.01, (0, 1e300)), n_clusters=16), {"metric": "kld.mean", "max": 0.02}),
        (with_bench(ISOLATED.repeated((1e-300, 1e300, 1))), {"metric": "benches.decode.isolated", "min": 1.5}),
    ],
)
def test_where_no_practical_sample_decides_that_is_said(report: Report, rule: dict[str, Any]) -> None:
    found = one(report, **rule)
    assert (found.decision, found.needed) == ("INCONCLUSIVE", None)
    assert found.reason == "no sample of a practical size would decide"


GO, NO_GO, OPEN = {"max": 1}, {"max": 0.001}, {"max": 0.01}


@pytest.mark.parametrize(
    ("rules", "decision"),
    [
        (((GO, "critical"),), "GO"),
        (((GO, "critical"), (OPEN, "critical")), "INCONCLUSIVE"),
        (((GO, "critical"), (OPEN, "critical"), (NO_GO, "critical")), "NO-GO"),
        (((GO, "critical"), (NO_GO, "supporting")), "INCONCLUSIVE"),
        (((GO, "critical"), (OPEN, "supporting")), "GO"),
        (((NO_GO, "critical"), (NO_GO, "supporting")), "NO-GO"),
        (((GO, "critical"), (NO_GO, "advisory"), (OPEN, "advisory")), "GO"),
    ],
)
def test_tiers_say_what_counts(rules: tuple[tuple[dict[str, float], str], ...], decision: str) -> None:
    report = with_axis(MEAN(0.01, (0.008, 0.012)))
    asked = [{"metric": "kld.mean", "tier": tier, **limit} for limit, tier in rules]
    assert decide(report, *asked).decision == decision


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (sample_report(candidates=(broken("int4", Status.FAILED, "out of memory"),)), "not measured: out of memory"),
        (with_axis(MEAN(0.01, (0.008, 0.012))), "not measured: the run has no rniah.score"),
    ],
)
def test_a_figure_that_a_critical_rule_lacks_is_inconclusive_and_named(report: Report, said: str) -> None:
    found = decide(report, {"metric": "rniah.score", "min": 1})
    assert (found.decision, [result.reason for result in found.results]) == ("INCONCLUSIVE", [said])


def test_the_figure_over_all_contexts_is_checked_unless_one_is_named() -> None:
    report = with_axis(MEAN(0.01, (0.008, 0.012)), MEAN(0.1, (0.08, 0.12), cell={"context": 2048}))
    assert one(report, metric="kld.mean", max=0.05).decision == "GO"
    found = one(report, metric="kld.mean", max=0.05, cell={"context": 2048})
    assert (found.decision, found.cell) == ("NO-GO", "context 2048")


def test_of_a_bench_every_shape_of_work_is_checked() -> None:
    cells = [ISOLATED.repeated((100, 101, 99), cell={"batch": batch}) for batch in (1, 4)]
    found = decide(with_bench(*cells), {"metric": "benches.decode.isolated", "min": 50})
    assert [result.cell for result in found.results] == ["batch 1", "batch 4"]


def test_a_rule_of_one_configuration_is_not_applied_to_others() -> None:
    arms = tuple(candidate(kv, 0.01, "PASS", 1, "safe") for kv in ("int8", "int4"))
    found = decide(sample_report(candidates=arms), {"metric": "kld.mean", "max": 1, "arm": "int4"})
    assert [result.arm for result in found.results] == ["int4"]


def test_an_unknown_metric_is_refused_unless_another_run_could_have_it() -> None:
    report = with_axis(MEAN(0.01, (0.008, 0.012)))
    assert one(report, metric="kld.over_control", max=1).decision == "INCONCLUSIVE"
    with pytest.raises(UnknownNameError, match=r"did you mean 'kld.mean'"):
        decide(report, {"metric": "kld.meen", "max": 1})


def test_a_limit_that_is_not_a_number_and_a_least_value_above_the_largest_are_refused() -> None:
    for limit in (math.nan, math.inf, "nan%", "inf%", True, "soon"):
        with pytest.raises(ValueError, match="max"):
            Rule.model_validate({"metric": "kld.mean", "max": limit})
    with pytest.raises(UsageError, match=r"kld.top1: min 99% is above max 0.5"):
        decide(with_axis(TOP1(0.97, (0.95, 0.99))), {"metric": "kld.top1", "min": "99%", "max": 0.5})
