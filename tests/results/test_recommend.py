"""The recommendation follows from the record: eligibility, dominance, class, limits, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fidelab.core import KVSpec, Status
from fidelab.metrics.composite import kl_band
from fidelab.metrics.equivalence import Loss, certify
from fidelab.metrics.intervals import RatioItems, paired_difference, ratio_interval
from fidelab.results.choice import settled
from fidelab.results.decision_record import Certificate, DocumentSums, FlipRecord, Recommendation
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.recommend import recommend, stability
from fidelab.results.record import ArmRecord, Report, RuntimeRecord, Verdict
from tests import sizes
from tests.present import present
from tests.report.sample import kld_axis
from tests.report.sample import sample_report as whole_report

POSITIONS = 50  # per document
LEVELS = 1 + np.random.default_rng(0).gamma(4, 0.1, 40)  # how costly each document is


def arm(
    name: str, size: float, kl: Sequence[float] | float, loss: Sequence[float] | float = 0.0, documents: int = 24
) -> ArmRecord:
    """A candidate with its mean KL (nats) and loss of probability per document; one number: about the same in all."""
    n = documents if isinstance(kl, float) else len(kl)
    means = kl * LEVELS[:n] if isinstance(kl, float) else np.asarray(kl)
    lost = loss * LEVELS[:n] if isinstance(loss, float) else np.asarray(loss)
    items = RatioItems.of(POSITIONS * means, POSITIONS, np.arange(n))
    mean, ci = float(means.mean()), ratio_interval(items, bounds=(0.0, np.inf))
    certificate = certify([Loss.of_kl(items), Loss.of_probability(lost, np.arange(n))])
    flips = FlipRecord(n=n, harmful=2, beneficial=1, p=1.0, mid_p=1.0, p_clusters=1.0, ci=(-0.001, 0.004))
    kld = kld_axis(mean, mean / 10)
    metrics = tuple(m.model_copy(update={"ci": ci}) if m.key == "mean" else m for m in kld.metrics)
    band = None if ci is None else kl_band(ci[1])
    counted = {"n_clusters": n, "n_failed": 0, "cluster": "document"}
    sums: dict[str, Any] = {
        "kl": tuple((POSITIONS * means).tolist()),
        "probability_loss": tuple((POSITIONS * lost).tolist()),
    }
    documents_ = DocumentSums(context=512, documents=tuple(range(n)), positions=(POSITIONS,) * n, **sums)
    return ArmRecord(
        status=Status.OK,
        name=name,
        engine="vllm",
        model="m",
        kv=KVSpec.parse("fp8"),
        serve_command=f"vllm serve m --kv-cache-dtype {name}",
        ran=RuntimeRecord(k_dtype=name, v_dtype=name, cache_bytes_per_token=size),
        axes={"kld": kld.model_copy(update={"metrics": metrics, **counted})},
        verdict=Verdict.model_validate({"band": band and band.value, "sentence": "s"}),
        certificates={"kld": Certificate.of(certificate, [512], [flips])},
        documents=(documents_,),
    )


def report(*arms: ArmRecord) -> Report:
    reference = arm("bf16", 1000, 0.0).model_copy(update={"axes": {}, "verdict": None, "certificates": {}})
    none = {"control": None, "controls": (), "comparisons": (), "attribution": ()}
    return whole_report().model_copy(update={"reference": reference, "candidates": arms, **none})


def advice(*arms: ArmRecord, **limits: float) -> Recommendation:
    return present(recommend(report(*arms), **limits))


def chosen(*arms: ArmRecord, **limits: float) -> str | None:
    return advice(*arms, **limits).arm


def failing(one: ArmRecord, **verdict: Any) -> ArmRecord:
    assert one.verdict is not None
    return one.model_copy(update={"verdict": one.verdict.model_copy(update=verdict)})


BIG, SMALL, TINY = (arm(*sizes) for sizes in (("big", 750, 0.0004), ("small", 500, 0.0006), ("tiny", 250, 0.02)))
BAD = arm("bad", 100, 0.2, 0.02)


def test_the_smallest_arm_of_the_best_class_is_recommended_with_its_command() -> None:
    found = advice(BIG, SMALL, TINY, BAD)
    assert (found.arm, found.saving, found.confidence) == ("small", 0.5, "confirmed")
    assert found.command == "vllm serve m --kv-cache-dtype small"
    assert found.stability == 1.0
    assert found.alternative is None


def test_of_the_next_class_one_is_recommended_only_where_the_best_has_none() -> None:
    assert chosen(TINY, BAD) == "tiny"


def test_where_none_is_safe_it_says_which_comes_nearest() -> None:
    found = advice(BAD, arm("worse", 200, 0.3))
    assert (found.arm, found.command) == (None, None)
    assert found.text.startswith("No candidate is safe. Nearest: bad (KLD 0.2")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_kld": 0.05}, "tiny"),
        ({"max_kld": 0.001}, "small"),
        ({"max_kld": 0.0007}, "big"),
        ({"max_kld": 0.0001}, None),
        ({"max_flips": 0.002}, "small"),
        ({"max_accuracy_loss": 0.005}, "tiny"),
        ({"max_accuracy_loss": 0.003}, None),
        ({"min_saving": 0.6}, "tiny"),
        ({"min_saving": 0.8}, None),
        ({"max_kld": 0.05, "min_saving": 0.6}, "tiny"),
    ],
)
def test_limits_choose_the_smallest_arm_that_meets_them(limits: dict[str, float], expected: str | None) -> None:
    assert chosen(BIG, SMALL, TINY, **limits) == expected
    found = advice(BIG, SMALL, TINY, **limits)
    assert set(found.limits) == set(limits)


def test_a_limit_on_a_figure_that_was_not_measured_says_so() -> None:
    found = advice(SMALL, min_tokens_per_s=10.0)
    assert found.arm is None
    assert found.others == ("small: tokens per second not measured, so --min-tokens-per-s cannot be met",)


def test_limits_on_a_run_without_a_kld_say_that_none_was_measured() -> None:
    bare = SMALL.model_copy(update={"axes": {}})
    assert recommend(report(bare)) is None
    found = advice(bare, max_kld=0.1)
    assert found.text == (
        "No candidate is shown to be within the limits (mean KLD at most 0.1 nats), no KLD was measured"
    )


def rated(one: ArmRecord, rate: float) -> ArmRecord:
    decode = Measurement(status=Status.OK, metrics=(Definition("isolated", "tok/s", "higher")(rate),))
    return one.model_copy(update={"benches": {"decode": decode}})


def test_a_candidate_is_struck_by_one_that_is_no_larger_no_slower_and_shown_to_be_closer() -> None:
    worse = arm("worse", 750, 0.0012)
    found = advice(worse, SMALL)
    assert [(one.arm, one.by) for one in found.dominated] == [("worse", "small")]
    assert found.others == ("worse: small is smaller and closer",)
    slow = advice(rated(worse, 100.0), rated(SMALL, 80.0))
    assert slow.dominated == ()


@pytest.mark.parametrize(("least", "expected"), [(50.0, "small"), (90.0, "big"), (200.0, None)])
def test_a_limit_on_speed_holds_for_what_was_measured(least: float, expected: str | None) -> None:
    assert chosen(rated(BIG, 100.0), rated(SMALL, 80.0), min_tokens_per_s=least) == expected


@pytest.mark.parametrize(("size", "expected"), [(545, "closer"), (555, "small")])
def test_one_up_to_a_tenth_larger_replaces_the_smallest_if_shown_to_be_twice_as_close(size: int, expected: str) -> None:
    assert chosen(SMALL, arm("closer", size, 0.00025)) == expected
    assert chosen(SMALL, arm("closer", size, 0.0004)) == "small"


def test_of_candidates_that_cannot_be_told_apart_the_smaller_one_is_kept() -> None:
    noisy = [0.0006 * (1 + 0.3 * (-1) ** n) for n in range(24)]
    found = advice(arm("same", 750, noisy), SMALL)
    assert (found.arm, found.dominated) == ("small", ())


def test_an_emulated_format_is_ranked_by_what_it_would_take_packed() -> None:
    bits = {"cache_bytes_per_token": 1000.0, "emulated": True, "packed_bytes_per_token": 400.0}
    ran = RuntimeRecord.model_validate(bits)
    int3 = SMALL.model_copy(update={"name": "int3", "ran": ran, "serve_command": None})
    assert (found := recommend(report(BIG, int3, SMALL))) is not None
    assert (found.arm, found.saving) == ("int3", 0.6)
    assert any("no engine stores it" in risk for risk in found.risks)
    assert found.command is None
    assert found.command_note == (
        "No command of a supported server is known for this configuration. The best format that one can serve is small."
    )


def test_a_verdict_that_other_axes_lowered_is_not_recommended() -> None:
    found = advice(BIG, failing(SMALL, band="PASS", by_kld=False, because=("lost 9 of 36",)))
    assert found.arm == "big"
    assert "small: verdict PASS, lost 9 of 36" in found.others


@pytest.mark.parametrize("limit", [{"max_kld": 0.5}, {"max_flips": 0.5}])
def test_a_limit_goes_over_the_klds_band_and_over_no_failed_position_or_garbage(limit: dict[str, float]) -> None:
    assert chosen(BAD, **limit) == "bad"
    for band in ("FAIL", "DEGRADED", "PASS"):
        assert chosen(failing(BAD, band=band, by_kld=False, because=("garbage",)), **limit) is None
    kld = BAD.axes["kld"].model_copy(update={"n_failed": 3})
    assert chosen(BAD.model_copy(update={"axes": {"kld": kld}}), **limit) is None


def test_a_shown_loss_of_probability_excludes_and_an_undecided_one_does_not() -> None:
    assert chosen(BIG, arm("lossy", 500, 0.0006, 0.03)) == "big"
    unsteady = [0.05 * (-1) ** n + 0.002 for n in range(24)]
    found = advice(BIG, arm("unsteady", 500, 0.0006, unsteady))
    assert (found.arm, found.confidence) == ("unsteady", "likely")


@pytest.mark.parametrize(("documents", "expected"), [(9, "preliminary"), (10, "confirmed")])
def test_fewer_than_ten_documents_are_preliminary(documents: int, expected: str) -> None:
    found = advice(arm("small", 500, 0.0006, documents=documents))
    assert (found.arm, found.confidence) == ("small", expected)


@pytest.mark.parametrize(("documents", "expected"), [(9, "preliminary"), (10, "confirmed")])
def test_under_a_limit_of_ones_own_ten_documents_confirm_too(documents: int, expected: str) -> None:
    found = advice(arm("small", 500, 0.0006, documents=documents), max_kld=0.005)
    assert (found.arm, found.confidence) == ("small", expected)
    said = f"preliminary: {documents} documents, at least 10 are needed to confirm"
    assert (said in found.model_dump_json()) is (expected == "preliminary")


@pytest.mark.parametrize(("flips", "expected"), [(0.0, True), (0.01, False), (1.0, False)])
def test_only_at_near_ties_is_said_where_no_confident_flip_was_seen(flips: float, expected: bool) -> None:
    kld = SMALL.axes["kld"]
    metrics = tuple(m.model_copy(update={"value": flips}) if m.key == "confident_flips" else m for m in kld.metrics)
    found = advice(SMALL.model_copy(update={"axes": {"kld": kld.model_copy(update={"metrics": metrics})}}))
    assert ("only at near ties" in found.model_dump_json()) is expected


def test_where_no_server_implements_any_format_none_is_named_instead() -> None:
    found = advice(SMALL.model_copy(update={"serve_command": None}))
    assert (found.arm, found.command) == ("small", None)
    assert "The best format that one can serve" not in found.model_dump_json()


def test_a_larger_candidate_that_is_undecided_ends_the_confirmation_and_one_shown_to_lose_does_not() -> None:
    unsteady = [0.05 * (-1) ** n + 0.002 for n in range(24)]
    for kl, loss, expected in ((0.0006, unsteady, "likely"), (0.03, 0.0, "confirmed"), (0.3, 0.05, "confirmed")):
        first = arm("big", 750, kl, loss)
        found = advice(first, SMALL)
        assert (found.arm, found.confidence) == ("small", expected)


def test_a_choice_that_resamples_do_not_repeat_is_too_close_to_call() -> None:
    near = arm("near", 500, [0.0002] * 12 + [0.0133] * 12)  # upper end close to the edge of its class
    found = advice(BIG, near)
    assert found.stability is not None
    assert found.stability < 0.8
    assert {found.arm, found.alternative} == {"big", "near"}
    assert f"too close to call: {found.arm} or {found.alternative}" in found.evidence


@pytest.mark.parametrize(
    ("same", "none", "expected"), [(80, 0, (0.8, None)), (79, 0, (0.79, 2)), (79, 21, (0.79, None)), (50, 30, (0.5, 2))]
)
def test_below_80_percent_of_resamples_the_second_choice_is_named(
    same: int, none: int, expected: tuple[float, int | None]
) -> None:
    other = [2] * (100 - same - none)
    assert stability(np.array([1, *[1] * same, *[-1] * none, *other])) == expected


def test_reports_without_sums_by_document_get_an_answer_without_its_stability() -> None:
    found = advice(*(one.model_copy(update={"documents": ()}) for one in (BIG, SMALL)))
    assert (found.arm, found.stability) == ("small", None)


@pytest.mark.parametrize(("end", "expected"), [(0.1, "not decided, KLD up to 0.10 nats"), (0.0999, None)])
def test_an_upper_end_of_exactly_a_tenth_nat_excludes(end: float, expected: str | None) -> None:
    kld = TINY.axes["kld"]
    metrics = tuple(m.model_copy(update={"ci": (0.01, end)}) if m.key == "mean" else m for m in kld.metrics)
    edge = TINY.model_copy(update={"axes": {"kld": kld.model_copy(update={"metrics": metrics})}})
    found = advice(BIG, edge)
    assert (f"tiny: {expected}" in found.others) is (expected is not None)


def test_risks_name_what_other_tests_lost_and_what_they_cannot_detect() -> None:
    judged = certify([Loss.of_accuracy([1.0] * 12 + [0.0], [1.0] * 11 + [0.0, 1.0], np.arange(13))])
    flips = FlipRecord.of(np.array([1.0] * 12 + [0.0]), np.array([1.0] * 11 + [0.0, 1.0]), np.arange(13))
    [claim] = judged.claims
    assert judged.state == "underpowered"
    assert claim.detectable == pytest.approx(0.30, abs=0.005)
    certificates = {**SMALL.certificates, "rniah": Certificate.of(judged, (), [flips])}
    found = advice(SMALL.model_copy(update={"certificates": certificates}))
    assert "correct answers of rniah: 1 lost, 1 gained of 13" in found.risks
    assert "rniah: sample too small, only losses above 30 points are detectable" in found.risks


CANDIDATES = st.lists(
    st.tuples(
        st.sampled_from([250, 500, 525, 750]),
        st.sampled_from([1e-4, 3e-4, 1e-3, 5e-3, 0.02, 0.06, 0.2]),
        st.sampled_from([0.0, 0.004, 0.02]),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=5,
)


def generated(candidates: Sequence[tuple[int, float, float, int]], documents: int) -> list[ArmRecord]:
    arms = []
    for n, (size, mean, loss, seed) in enumerate(candidates):
        rng = np.random.default_rng(seed)
        kl = mean * rng.gamma(2.0, 0.5, documents)
        arms.append(arm(f"arm{n}", size, kl.tolist(), rng.normal(loss, loss / 2 + 1e-3, documents).tolist()))
    return arms


@settings(deadline=None, max_examples=sizes.size(20, 60))
@given(candidates=CANDIDATES, documents=st.integers(2, 14))
def test_no_recommended_configuration_is_dominated(candidates: list[Any], documents: int) -> None:
    arms = generated(candidates, documents)
    found = advice(*arms)
    best = next((one for one in arms if one.name == found.arm), None)
    for other in arms if best is not None else ():
        assert best is not None
        shown = [claim.state for claim in other.certificates["kld"].claims if claim.unit == "share"]
        if other is best or other.verdict is None or other.verdict.band == "FAIL" or "exceeded" in shown:
            continue
        assert best.ran is not None
        assert other.ran is not None
        sizes = [one.ran.cache_bytes_per_token for one in (other, best) if one.ran and one.ran.cache_bytes_per_token]
        own, theirs = (
            RatioItems.of(one.documents[0].kl, one.documents[0].positions, one.documents[0].documents)
            for one in (best, other)
        )
        interval = paired_difference(own, theirs, level=0.9999).interval  # clearly, whatever the resamples
        assert interval is None or sizes[0] > sizes[1] or interval[0] <= 0


@settings(deadline=None, max_examples=sizes.size(20, 60))
@given(candidates=CANDIDATES, size=st.sampled_from([100, 500, 900]), at=st.integers(0, 5))
def test_a_candidate_whose_verdict_is_fail_never_changes_the_choice(candidates: list[Any], size: int, at: int) -> None:
    arms = generated(candidates, 12)
    hopeless = failing(arm("hopeless", size, 0.3, 0.05, documents=12), band="FAIL")
    before = recommend(report(*arms))
    after = recommend(report(*arms[:at], hopeless, *arms[at:]))
    assert before is not None
    assert after is not None
    named = ("arm", "confidence", "stability", "alternative", "saving")
    assert [getattr(before, name) for name in named] == [getattr(after, name) for name in named]


def looked(name: str, size: float, kl: float, *looks: int) -> ArmRecord:
    """A candidate that was asked so many documents after each look, two windows to a document."""
    *before, last = (arm(name, size, kl, documents=n) for n in looks)
    sums = [
        one.model_copy(update={"windows": len(one.documents) // 2})
        for each in (*before, last)
        for one in each.documents
    ]
    return last.model_copy(update={"documents": tuple(sums)})


def test_candidates_that_were_asked_different_amounts_are_compared_over_what_both_read() -> None:
    found = advice(looked("large", 900, 0.004, 12, 24), looked("small", 500, 0.001, 12))
    [dominance] = found.dominated
    a, b = arm("large", 900, 0.004, documents=12), arm("small", 500, 0.001, documents=12)
    assert (dominance.arm, dominance.by) == ("large", "small")
    first, second = (RatioItems.of(one.documents[0].kl, POSITIONS, np.arange(12)) for one in (a, b))
    assert dominance.difference == pytest.approx(paired_difference(first, second).estimate)


def test_a_candidate_is_settled_by_what_more_windows_cannot_change() -> None:
    undecided = arm("undecided", 700, 0.007)
    every = report(SMALL, TINY, BAD, undecided, arm("large", 900, 0.007))
    assert settled(every, min_saving=0.2) == {"small", "tiny", "bad", "large"}
    # the upper end of the share of changed tokens falls with every window
    assert settled(report(SMALL), max_flips=1e-6) == set()
    # while a beaten one is undecided, no smaller one is confirmed
    assert settled(report(arm("beaten", 750, 0.007), SMALL)) == {"small"}


def test_a_verdict_is_a_risk_where_it_is_below_the_best() -> None:
    def verdicts(found: Recommendation) -> list[str]:
        return [risk for risk in found.risks if risk.startswith("verdict ")]

    assert verdicts(advice(SMALL)) == []
    assert [risk[:12] for risk in verdicts(advice(TINY))] == ["verdict PASS"]
