"""Rules that records hand to recommendation, verdict, gate and comparison: which of two figures counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.core import Status
from fidelab.metrics.composite import kl_band
from fidelab.results.check import Policy, check
from fidelab.results.choice import Field, document_sums, settled
from fidelab.results.compare import compare
from fidelab.results.decision_record import CertificateClaim, DocumentSums
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.recommend import recommend
from fidelab.results.record import ArmRecord, Borrowed, MachineDifference, Report, RuntimeRecord
from fidelab.results.verdict import judged
from tests.present import present
from tests.report.sample import MEAN
from tests.results.diff_sample import one, outcome, with_axes
from tests.results.test_recommend import POSITIONS, SMALL, TINY, arm, report

ISOLATED = Definition("isolated", "tok/s", "higher")


def sums(context: int, windows: int, means: NDArray[np.float64]) -> DocumentSums:
    """Sums by document whose mean KL per position is that of each document's ``means``."""
    kl = tuple((POSITIONS * means).tolist())
    zeros = (0.0,) * len(means)
    return DocumentSums(
        context=context,
        windows=windows,
        documents=tuple(range(len(means))),
        positions=(POSITIONS,) * len(means),
        kl=kl,
        probability_loss=zeros,
    )


def rated(candidate: ArmRecord, rates: Mapping[int, float]) -> ArmRecord:
    """A candidate whose bench measured a rate at each batch size."""
    metrics = tuple(ISOLATED(rate, cell={"batch": batch}) for batch, rate in rates.items())
    return candidate.model_copy(update={"benches": {"decode": Measurement(status=Status.OK, metrics=metrics)}})


# ------------------------------------------------------------------------------------------------- the recommendation


def test_candidates_are_compared_at_the_longest_context_over_all_windows_that_both_read() -> None:
    own = arm("worse", 750, 0.0012)
    other = arm("better", 500, 0.0006)
    differences = {(128, 8): 0.0040, (128, 16): 0.0030, (512, 8): 0.0020, (512, 16): 0.0010}
    base = np.linspace(0.0004, 0.0006, 24)
    worse = own.model_copy(update={"documents": tuple(sums(*at, base + gap) for at, gap in differences.items())})
    better = other.model_copy(update={"documents": tuple(sums(*at, base) for at in differences)})
    [struck] = present(recommend(report(worse, better))).dominated
    assert (struck.arm, struck.by) == ("worse", "better")
    assert struck.difference == pytest.approx(0.0010)
    assert present(document_sums(worse)).windows == 16


def test_windows_that_one_candidate_alone_read_are_left_out_of_the_difference() -> None:
    base = np.linspace(0.0004, 0.0006, 24)
    worse = arm("worse", 750, 0.0012).model_copy(
        update={"documents": (sums(512, 8, base[:12] + 0.002), sums(512, 16, base + 0.001))}
    )
    better = arm("better", 500, 0.0006).model_copy(update={"documents": (sums(512, 8, base[:12]),)})
    [struck] = present(recommend(report(worse, better))).dominated
    assert struck.difference == pytest.approx(0.002)


@pytest.mark.parametrize(("least", "expected"), [(39.0, "small"), (41.0, None), (99.0, None)])
def test_a_limit_on_speed_holds_in_the_slowest_shape_of_work(least: float, expected: str | None) -> None:
    found = present(recommend(report(rated(SMALL, {1: 40.0, 8: 100.0})), min_tokens_per_s=least))
    assert found.arm == expected


@pytest.mark.parametrize(
    ("rates", "strikes"), [((100.0, 80.0), False), ((80.0, 100.0), True), ((100.0, 96.0), True), ((100.0, 94.0), False)]
)
def test_a_rival_that_was_measured_slower_strikes_nobody(rates: tuple[float, float], strikes: bool) -> None:
    worse, better = rated(arm("worse", 750, 0.0012), {1: rates[0]}), rated(SMALL, {1: rates[1]})
    assert bool(present(recommend(report(worse, better))).dominated) is strikes


def claim(key: str, unit: str, margin: float, ci: tuple[float, float], state: str) -> CertificateClaim:
    fields = {"key": key, "unit": unit, "margin": margin, "ci": ci, "state": state, "clusters": 24}
    return CertificateClaim.model_validate(fields)


@pytest.mark.parametrize(
    ("limits", "confirmed"),
    [
        ({"max_kld": 0.05}, False),
        ({"max_flips": 0.02}, False),
        ({"max_accuracy_loss": 0.03}, False),
        ({"max_flips": 0.02, "max_accuracy_loss": 0.03}, True),
        ({"max_flips": 0.03, "max_accuracy_loss": 0.02}, False),
    ],
)
def test_a_limit_confirms_the_claim_on_its_own_loss_alone(limits: dict[str, float], confirmed: bool) -> None:
    """Flips up to 1% and accuracy losses up to 2.5%, both open at the margin of half a point."""
    claims = (
        claim("mean_kl", "nats", 0.01, (0.0005, 0.0008), "holds"),
        claim("flips", "share", 0.005, (0.001, 0.01), "undecided"),
        claim("accuracy_loss", "share", 0.005, (0.001, 0.025), "undecided"),
    )
    certificate = SMALL.certificates["kld"].model_copy(update={"claims": claims, "state": "undecided"})
    open_ = SMALL.model_copy(update={"certificates": {"kld": certificate}})
    assert Field.of(report(open_), limits).confirmed == ({"small"} if confirmed else set())


def test_candidates_are_confirmed_from_the_largest_on_and_an_open_one_ends_it() -> None:
    unsteady = [0.05 * (-1) ** n + 0.002 for n in range(24)]
    open_, holds = arm("open", 500, 0.0006, unsteady), {size: arm("holds", size, 0.0006) for size in (250, 750)}
    assert Field.of(report(open_, holds[750]), {}).confirmed == {"holds"}
    assert Field.of(report(open_, holds[250]), {}).confirmed == set()


def test_one_that_is_shown_to_exceed_its_margin_or_limit_is_asked_no_more() -> None:
    assert settled(report(TINY)) == {"tiny"}
    wide = [0.0085 * (1 + 0.9 * (-1) ** n) for n in range(24)]  # of a mean of 0.0085, open at the margin of 0.01
    assert settled(report(arm("open", 500, wide))) == set()
    assert settled(report(arm("open", 500, wide)), max_kld=0.05) == {"open"}
    assert settled(report(arm("open", 500, wide)), max_kld=0.0005) == {"open"}


def test_the_best_one_that_a_server_stores_is_chosen_under_the_users_limits() -> None:
    unserved = arm("int2", 200, 0.01).model_copy(update={"serve_command": None})
    found = present(recommend(report(unserved, SMALL, TINY), max_kld=0.05))
    assert (found.arm, found.command) == ("int2", None)
    assert present(found.command_note).endswith("The best format that one can serve is tiny.")


def test_savings_refer_to_the_controls_16_bit_cache_where_the_reference_has_none() -> None:
    eight = RuntimeRecord(k_dtype="fp8", v_dtype="fp8", cache_bytes_per_token=500)
    whole = report(arm("small", 250, 0.0006))
    narrow = whole.model_copy(update={"reference": whole.reference.model_copy(update={"ran": eight})})
    control = arm("bf16 control", 1000, 0.0).model_copy(
        update={"ran": RuntimeRecord(k_dtype="bf16", v_dtype="bf16", cache_bytes_per_token=1000)}
    )
    assert present(recommend(narrow)).saving == pytest.approx(0.5)
    assert present(recommend(narrow.model_copy(update={"control": control}))).saving == pytest.approx(0.75)


def with_faulty_reference(whole: Report) -> Report:
    """An axis of the first candidate saw that the reference is unusable."""
    first, *others = whole.candidates
    axis = Measurement(status=Status.OK, reference_faults=("it answers nothing but newlines",))
    spoiled = first.model_copy(update={"axes": {**first.axes, "trajectory": axis}})
    return whole.model_copy(update={"candidates": (spoiled, *others)})


def test_with_a_reference_that_an_axis_found_unusable_nothing_is_recommended_and_nothing_passes() -> None:
    policy = Policy.model_validate({"rules": [{"metric": "kld.mean", "max": 1.0}]})
    sound, faulty = report(SMALL), with_faulty_reference(report(SMALL))
    assert present(recommend(sound)).kind == "use"
    assert present(recommend(faulty)).kind == "reference"
    decisions = [check(whole, policy, whole.candidates, groups=("kld",)).decision for whole in (sound, faulty)]
    assert decisions == ["GO", "INCONCLUSIVE"]


# ------------------------------------------------------------------------------------------------- the verdict


def test_the_distance_between_a_packs_machines_widens_the_interval_of_the_verdict() -> None:
    """√KL is a distance: the upper end becomes (√upper + √difference)²."""
    upper = present(present(SMALL.axes["kld"].metric("mean", {})).interval)[1]
    bands = []
    for difference in (1e-7, 0.01):
        machines = MachineDifference(mean=difference, machines=("a", "b"))
        pack = Borrowed(place="pack", sha256="0" * 64, machine="a", difference=machines)
        [candidate] = judged(report(SMALL).model_copy(update={"borrowed": pack})).candidates
        bands.append(present(candidate.verdict).band)
        assert bands[-1] == kl_band((upper**0.5 + difference**0.5) ** 2).value
    assert bands == ["EXCELLENT", "PASS"]


def test_what_another_axis_lost_lowers_the_band_of_the_kld() -> None:
    axis = Measurement(status=Status.OK, downgrades=("lost 9 of 36",))
    lossy = SMALL.model_copy(update={"axes": {**SMALL.axes, "rniah": axis}})
    bands = [present(judged(report(each)).candidates[0].verdict).band for each in (SMALL, lossy)]
    assert bands == ["EXCELLENT", "PASS"]


def test_a_mean_kl_of_another_axis_that_bands_judge_sets_the_band_where_it_is_worse() -> None:
    def judge_with(mean: float) -> str | None:
        metric = MEAN(mean, (0.9 * mean, 1.1 * mean)).model_copy(update={"banded": True})
        axis = Measurement(status=Status.OK, metrics=(metric,), n_clusters=24, cluster="document")
        other = SMALL.model_copy(update={"axes": {**SMALL.axes, "paths": axis}})
        return present(judged(report(other)).candidates[0].verdict).band

    assert [judge_with(mean) for mean in (0.0001, 0.03, 0.5)] == ["EXCELLENT", "PASS", "FAIL"]


# ------------------------------------------------------------------------------------------------- the gate


def kld(mean: float) -> Measurement:
    """A KLD with an interval of ±1%."""
    metric = MEAN(mean, (0.99 * mean, 1.01 * mean))
    return Measurement(status=Status.OK, metrics=(metric,), n_clusters=24, cluster="document")


def two(first: float, second: float) -> Report:
    """Two candidates with tight intervals."""
    means = {"first": first, "second": second}
    return report(*(SMALL.model_copy(update={"name": name, "axes": {"kld": kld(means[name])}}) for name in means))


def test_a_rule_with_a_configuration_is_decided_by_that_one_whichever_are_checked() -> None:
    whole = two(0.001, 0.5)
    rule = {"metric": "kld.mean", "max": 0.01}
    first = whole.candidates[:1]

    def decision(arm_name: str | None) -> str:
        policy = Policy.model_validate({"rules": [{**rule, **({"arm": arm_name} if arm_name else {})}]})
        return check(whole, policy, first, groups=("kld",)).decision

    assert [decision(name) for name in (None, "first", "second")] == ["GO", "GO", "NO-GO"]


@pytest.mark.parametrize(("now", "expected"), [(0.001, "GO"), (0.5, "NO-GO")])
def test_a_change_against_the_baseline_decides_as_a_critical_rule_does(now: float, expected: str) -> None:
    was, is_ = (with_axes(kld=kld(mean)) for mean in (0.001, now))
    rules = {"rules": [{"metric": "kld.mean", "max": 10.0}]}
    found = check(is_, Policy.model_validate(rules), is_.candidates, groups=("kld",), diff=compare(was, is_))
    assert (found.decision, found.baseline_decision) == (expected, expected)


@pytest.mark.parametrize(
    ("tier", "expected"), [("critical", "NO-GO"), ("supporting", "INCONCLUSIVE"), ("advisory", "GO")]
)
def test_the_tier_of_a_rule_weighs_its_decision(tier: str, expected: str) -> None:
    rules = [{"metric": "kld.mean", "max": 10.0}, {"metric": "kld.mean", "max": 0.0001, "tier": tier}]
    whole = two(0.001, 0.001)
    policy = Policy.model_validate({"rules": rules})
    assert check(whole, policy, whole.candidates, groups=("kld",)).decision == expected


# ------------------------------------------------------------------------------------------------- the comparison


def noisy(mean: float, noise: float, processor: str) -> Report:
    """A report from a processor, on which last bits alone make a KLD of ``noise``."""
    metric = MEAN(mean, (0.999 * mean, 1.001 * mean)).model_copy(update={"noise": noise})
    axis = Measurement(status=Status.OK, metrics=(metric,), n_clusters=24, cluster="document")
    return with_axes(kld=axis).model_copy(update={"environment": {"processor": processor}})


@pytest.mark.parametrize("side", [0, 1], ids=["baseline", "run"])
def test_between_two_machines_a_change_within_the_noise_of_either_side_is_none(side: int) -> None:
    def changed(noise: float, processor: str) -> str:
        noises = [0.0, 0.0]
        noises[side] = noise
        return outcome(noisy(0.010, noises[0], "one"), noisy(0.016, noises[1], processor), "kld", "mean")

    assert changed(0.0, "other") == "cannot tell"  # nobody measured the noise
    assert changed(0.0001, "other") == "regressed"
    assert changed(0.008, "other") == "unchanged"
    assert changed(0.008, "one") == "regressed"


@pytest.mark.parametrize(("was", "now"), [(0.010, 0.016), (0.016, 0.010)], ids=["worse", "better"])
def test_a_change_and_its_interval_are_the_run_minus_the_baseline(was: float, now: float) -> None:
    """Independent intervals of ±1%: their half-widths add up by their squares."""
    found = one(compare(with_axes(kld=kld(was)), with_axes(kld=kld(now))), "kld", "mean")
    half = 0.01 * (was**2 + now**2) ** 0.5
    assert found.change == pytest.approx(now - was)
    assert found.ci == pytest.approx((now - was - half, now - was + half), rel=1e-6)
