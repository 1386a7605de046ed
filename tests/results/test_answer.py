"""The first line claims no more than was measured: nothing changed, saved or known, and tests that disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fidelab.core import KVSpec, Status
from fidelab.metrics.equivalence import Loss, certify
from fidelab.metrics.intervals import RatioItems, paired_difference
from fidelab.results.check import Policy, Rule, check
from fidelab.results.choice import kl_difference
from fidelab.results.coverage import KINDS, untested
from fidelab.results.decision_record import Certificate, DocumentSums, FlipRecord
from fidelab.results.measurement import DOMAIN, Definition, Measurement, Metric
from fidelab.results.recommend import recommend
from fidelab.results.record import ArmRecord, NoiseFloor, Report, RuntimeRecord, Verdict
from fidelab.results.verdict import judged
from tests import sizes
from tests.present import present
from tests.results.test_recommend import BIG, CANDIDATES, SMALL, TINY, advice, arm, failing, generated, rated, report


def with_axis(one: ArmRecord, name: str, *metrics: Metric, **fields: Any) -> ArmRecord:
    """The arm with another measured axis."""
    axis = Measurement.model_validate({"status": Status.OK, "metrics": metrics, **fields})
    return one.model_copy(update={"axes": {**one.axes, name: axis}})


def identical(name: str, size: float = 500, **ran: Any) -> ArmRecord:
    """An arm whose output is the reference's bit by bit; ``ran``: what its engine reports besides the cache's bytes."""
    facts = {"k_dtype": "bf16", "v_dtype": "bf16", "cache_bytes_per_token": size, **ran}
    one = arm(name, size, 0.0)
    return one.model_copy(update={"status": Status.IDENTICAL, "ran": RuntimeRecord.model_validate(facts)})


def against_bf16(*arms: ArmRecord, **ran: Any) -> Report:
    """A report whose reference reports these facts of its run."""
    facts = {"k_dtype": "bf16", "v_dtype": "bf16", "cache_bytes_per_token": 1000.0, **ran}
    whole = report(*arms)
    reference = whole.reference.model_copy(
        update={"ran": RuntimeRecord.model_validate(facts), "kv": KVSpec.parse("bf16")}
    )
    return whole.model_copy(
        update={"reference": reference, "covers": {"rniah": "retrieval", "benches.decode": "speed"}}
    )


# --------------------------------------------------------------------------------------------------- nothing changed


def test_an_identical_candidate_of_which_nothing_shows_an_effect_is_not_recommended_and_never_go() -> None:
    same = identical("FOO=1", size=1000)
    whole = against_bf16(same)
    found = present(recommend(whole))
    assert (found.arm, found.kind) == (None, "none")
    assert found.text == "FOO=1: nothing changed: is it read at all?"
    decided = check(whole, Policy(rules=(Rule(metric="kld.mean", max=0.01),)), [same])
    assert decided.decision == "INCONCLUSIVE"
    assert decided.results[0].reason == "nothing changed: is it read at all?"


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({"attention": "sdpa"}, "attention sdpa"),
        ({"graphs": "FULL"}, "graphs FULL"),
        ({"prefix_caching": True}, "prefix caching on"),
        ({"chunked_prefill": 512}, "chunked prefill 512"),
        ({"versions": {"vllm": "0.33"}}, "vllm 0.33"),
    ],
)
def test_an_identical_candidate_whose_change_the_engine_reports_is_in_effect_and_go(
    shown: dict[str, Any], said: str
) -> None:
    base = {"attention": "eager", "graphs": "NONE", "prefix_caching": False, "chunked_prefill": 64}
    same = identical("changed", size=1000, **{**base, "versions": {"vllm": "0.32"}, **shown})
    whole = against_bf16(same, **base, versions={"vllm": "0.32"})
    found = present(recommend(whole))
    assert (found.arm, found.kind) == ("changed", "safe")
    assert any(f"in effect: {said}" in line for line in found.evidence)
    assert check(whole, Policy(rules=(Rule(metric="kld.mean", max=0.01),)), [same]).decision == "GO"


@pytest.mark.parametrize("ran", [{"peak_host_bytes": 9e9}, {"variables": {"FOO": "1"}}, {"cache_tokens": 1010}])
def test_what_differs_between_two_starts_or_repeats_the_request_shows_no_effect(ran: dict[str, Any]) -> None:
    whole = against_bf16(identical("same", size=1000, **ran), peak_host_bytes=1e9, variables={}, cache_tokens=1000)
    assert present(recommend(whole)).kind == "none"


def test_an_unproven_format_is_not_evidence_of_an_effect_and_a_proven_one_is() -> None:
    for stored, kind in (("open: a server shows nothing", "none"), ("shown", "safe")):
        proof = {"stored": stored}
        other = identical("f16", size=1000, k_format="f16", proof=proof)
        assert present(recommend(against_bf16(other, k_format="bf16", proof=proof))).kind == kind


# ------------------------------------------------------------------------------------------------------ nothing saved


def test_a_larger_cache_is_safe_to_use_and_never_more() -> None:
    found = present(recommend(against_bf16(arm("f32", 2000, 0.0004))))
    assert (found.kind, found.arm) == ("safe", "f32")
    assert found.text == "f32 is safe to use: 100% larger KV cache than bf16"
    assert "no candidate saves anything, keep bf16" in found.evidence


def test_an_equally_large_cache_saves_nothing() -> None:
    found = present(
        recommend(against_bf16(identical("f16", size=1000, k_format="f16", proof={"stored": "shown"}), k_format="bf16"))
    )
    assert found.text == "f16 is safe to use: saves nothing"


def test_a_candidate_that_saves_is_preferred_to_a_safer_one_that_does_not() -> None:
    found = present(recommend(against_bf16(arm("f32", 2000, 0.00001), TINY)))
    assert (found.kind, found.arm) == ("use", "tiny")


def test_a_candidate_that_saves_nothing_and_was_measured_faster_is_used_for_its_speed() -> None:
    whole = against_bf16(rated(arm("graphs", 1000, 0.0004), 135.0))
    whole = whole.model_copy(update={"reference": rated(whole.reference, 100.0)})
    found = present(recommend(whole))
    assert (found.kind, found.text) == ("use", "Use graphs: 1.35× the reference's rate in decode")


# ------------------------------------------------------------------------------------------------------ nothing known


def test_a_reference_that_knows_nothing_is_said_first_and_confirms_nothing() -> None:
    fault = "its NLL is 11.2 nats per token, that of a unigram model of the text 7.9"
    kld = SMALL.axes["kld"].model_copy(update={"reference_faults": (fault,)})
    broken = SMALL.model_copy(update={"axes": {"kld": kld}})
    whole = against_bf16(broken, TINY)
    found = present(recommend(whole))
    assert (found.kind, found.arm, found.confidence) == ("reference", None, None)
    assert found.text == f"The reference is unusable: {fault}"
    decided = check(whole, Policy(rules=(Rule(metric="kld.mean", max=0.01),)), [broken])
    assert (decided.decision, fault in decided.results[0].reason) == ("INCONCLUSIVE", True)


# ---------------------------------------------------------------------------------------------------- nothing decided


def test_two_documents_are_not_decided_and_the_answer_says_how_many_would_decide() -> None:
    wide = failing(arm("fp8", 500, [0.003, 0.007]), band=None)
    found = advice(wide)
    assert found.kind == "undecided"
    assert found.text.startswith("Not decided: fp8 (2 documents, about ")
    assert found.text.endswith(" needed)")


def test_one_document_is_not_decided() -> None:
    found = advice(failing(arm("fp8", 500, [0.0003]), band=None))
    assert found.text == "Not decided: fp8 (1 document, at least 10 needed)"


def test_that_no_candidate_is_safe_is_said_only_where_each_is_shown_to_be_unsafe() -> None:
    bad = arm("bad", 100, 0.2, 0.02)
    wide = failing(arm("wide", 500, [0.0001] * 10 + [0.9]), band=None)
    assert advice(bad).text.startswith("No candidate is safe")
    assert advice(bad, wide).text.startswith("Not decided: wide (11 documents")


def test_what_saves_enough_and_is_not_safe_is_named() -> None:
    found = advice(SMALL, failing(arm("int4", 280, 0.06), band="DEGRADED"), min_saving=0.6)
    assert found.text == "No safe candidate saves 60%. int4 does, but is DEGRADED"
    assert "small: saving 50%" in found.others


@settings(deadline=None, max_examples=sizes.size(20, 60))
@given(candidates=CANDIDATES, documents=st.integers(1, 14), least=st.sampled_from([None, 0.3, 0.6, 0.9]))
def test_every_candidate_has_a_choice_or_a_reason(candidates: list[Any], documents: int, least: float | None) -> None:
    arms = generated(candidates, documents)
    found = advice(*arms, **({} if least is None else {"min_saving": least}))
    reasons = {line.partition(": ")[0]: line.partition(": ")[2] for line in found.others}
    for one in arms:
        assert one.name == found.arm or reasons.get(one.name)


# -------------------------------------------------------------------------------------------------- all tests count


def loses(one: ArmRecord) -> ArmRecord:
    """R-NIAH −23 points (−42 to −4), 30 trials."""
    ref, test = np.array([1.0] * 25 + [0.0] * 5), np.array([0.0] * 8 + [1.0] * 17 + [1.0] + [0.0] * 4)
    judged = certify([Loss.of_accuracy(ref, test, np.arange(30))])
    worse = Definition("accuracy_difference", "points", "higher")(-23.0, (-42.0, -4.0))
    lost = with_axis(one, "rniah", worse, summary="lost 8 of 25")
    flips = FlipRecord.of(ref, test, np.arange(30))
    certificates = {**one.certificates, "rniah": Certificate.of(judged, (), [flips])}
    return lost.model_copy(update={"certificates": certificates})


def test_a_loss_beyond_the_margin_on_another_test_excludes() -> None:
    found = advice(loses(SMALL))
    assert found.arm is None
    assert found.others == ("small: a loss beyond the margin is shown on rniah",)


def test_a_test_that_is_shown_worse_within_its_margin_is_a_line_and_confirms_the_kld_only() -> None:
    worse = Definition("accuracy_difference", "points", "higher")(-0.6, (-1.1, -0.1))
    found = advice(with_axis(SMALL, "exam", worse, summary="lost 6 of 900"))
    assert found.confidence == "confirmed for KLD only"
    assert found.against == ("exam is worse: lost 6 of 900, accuracy difference −0.6 points (−1.1 to −0.1)",)
    assert f"but: {found.against[0]}" in found.evidence
    assert any(line.startswith("confirmed for KLD only: KLD below 0.01") for line in found.evidence)


@pytest.mark.parametrize(
    ("metric", "adverse"),
    [
        (Definition("difference", "points", "higher")(-0.1, (-2.0, 1.8)), False),
        (Definition("score", "points", "higher")(40.0, (30.0, 50.0)), False),
        (Definition("excess", "share", "lower")(0.05, (0.01, 0.09)), True),
        (Definition("own", "share", "lower", null_value=None)(0.05, (0.01, 0.09)), False),
        (Definition("length", "ratio", "lower", null_value=1.0)(1.2, (1.1, 1.3)), True),
        (Definition("length", "ratio", "lower", null_value=1.0)(1.0, (0.9, 1.1)), False),
        (Definition("mean_kl", "nats", "lower")(0.02, (0.012, 0.03)), True),
        (Definition("mean_kl", "nats", "lower")(0.002, (0.001, 0.003)), False),
        (Definition("mean_kl", "nats", "lower")(0.2, None), False),
    ],
)
def test_a_metric_of_any_axis_speaks_against_a_candidate_if_its_whole_interval_is_worse(
    metric: Metric, adverse: bool
) -> None:
    assert bool(advice(with_axis(SMALL, "somebodys", metric)).against) is adverse


def test_a_kind_of_text_in_a_worse_band_is_a_line_and_confirms_the_kld_only() -> None:
    kld = SMALL.axes["kld"]
    kind = Definition("mean", "nats", "lower")(0.31, (0.2, 0.45), cell={DOMAIN: "tool calls"})
    fine = Definition("mean", "nats", "lower")(0.0002, (0.0001, 0.0003), cell={DOMAIN: "prose"})
    told = SMALL.model_copy(update={"axes": {"kld": kld.model_copy(update={"metrics": (*kld.metrics, kind, fine)})}})
    found = advice(told)
    assert (found.confidence, found.against) == (
        "confirmed for KLD only",
        ("tool calls is fail: KLD 0.310 (0.20–0.45)",),
    )


FORCED = Definition("mean_kl", "nats", "lower", banded=True)


def forced(one: ArmRecord, mean: float, ci: tuple[float, float], prompts: int = 16) -> ArmRecord:
    """The arm with a teacher-forced KLD and the verdict of a report with it."""
    told = with_axis(one, "forced", FORCED(mean, ci), n_clusters=prompts, cluster="prompt")
    return present(judged(report(told))).candidates[0]


def test_a_teacher_forced_kld_of_fail_makes_the_verdict_and_no_limit_goes_over_it() -> None:
    broken = forced(SMALL, 1.2, (0.9, 1.6))
    assert broken.verdict is not None
    assert (broken.verdict.band, broken.verdict.by_kld) == ("FAIL", False)
    assert advice(broken).text.startswith("No candidate is safe")
    assert advice(broken, max_kld=0.5).arm is None


def test_a_teacher_forced_kld_of_pass_puts_the_candidate_behind_excellent_ones() -> None:
    fair = forced(SMALL, 0.02, (0.015, 0.03))
    assert fair.verdict is not None
    assert (fair.verdict.band, fair.verdict.by_kld) == ("PASS", True)
    assert advice(fair).arm == "small"
    assert advice(fair, BIG).arm == "big"


def test_a_teacher_forced_kld_of_few_prompts_leaves_the_verdict_open() -> None:
    wide = forced(SMALL, 0.004, (0.0005, 0.3), prompts=4)
    assert wide.verdict is not None
    assert (wide.verdict.band, wide.verdict.at_best, wide.verdict.at_worst) == (None, "EXCELLENT", "FAIL")
    found = advice(wide)
    assert (found.kind, found.others) == ("undecided", ("small: not decided, forced KLD up to 0.30 nats",))


@pytest.mark.parametrize(("low", "band"), [(0.005, "EXCELLENT"), (0.02, "PASS"), (0.3, "PASS")])
def test_a_perplexity_whose_interval_lies_beyond_what_the_band_allows_lowers_the_verdict(low: float, band: str) -> None:
    ratio = Definition("ln_ratio", "nats", "lower")(low + 0.01, (low, low + 0.02), cell={"context": 512})
    told = present(judged(report(with_axis(SMALL, "perplexity", ratio)))).candidates[0]
    assert told.verdict is not None
    assert told.verdict.band == band
    assert any("perplexity rises by at least" in line for line in told.verdict.because) is (band != "EXCELLENT")


def encoded(one: ArmRecord, share: float, context: int | None = 960) -> ArmRecord:
    kld = one.axes["kld"]
    facts = {**kld.facts, "encoded_share": share, **({"encoded_90_at": context} if context else {})}
    return one.model_copy(update={"axes": {"kld": kld.model_copy(update={"facts": facts})}})


def test_below_ninety_percent_of_encoded_tokens_nothing_is_confirmed_and_the_context_that_would_do_is_named() -> None:
    found = advice(encoded(SMALL, 0.72))
    assert found.confidence == "likely"
    assert "encoded: 72% of the tokens that attention read, 90% from 960 tokens" in found.evidence
    assert "likely, not confirmed: too few tokens were encoded" in found.evidence
    assert advice(encoded(SMALL, 0.9)).confidence == "confirmed"


def test_below_half_of_encoded_tokens_there_is_no_verdict_and_no_choice() -> None:
    told = present(judged(report(encoded(SMALL, 0.2)))).candidates[0]
    assert told.verdict is not None
    assert told.verdict.band is None
    found = advice(told)
    assert found.text == "Not decided: small (only 20% of its tokens were encoded)"
    assert found.others == ("small: only 20% of the tokens that attention read were encoded",)


def test_another_run_in_a_worse_band_is_a_line_and_the_number_of_runs_is_said() -> None:
    def run_again(*means: float) -> ArmRecord:
        kld = SMALL.axes["kld"]
        metrics = tuple(m.model_copy(update={"repeats": means}) if m.key == "mean" else m for m in kld.metrics)
        return SMALL.model_copy(update={"axes": {"kld": kld.model_copy(update={"metrics": metrics})}})

    found = advice(run_again(0.0006, 0.0007))
    assert (found.against, "2 runs: KLD 0.000600 to 0.000700" in found.evidence) == ((), True)
    assert advice(run_again(0.0006, 0.3)).against == ("another run is fail: KLD 0.300",)


def test_a_failed_test_is_named() -> None:
    failed = with_axis(SMALL, "gsm8k", status=Status.FAILED, reason="out of memory")
    found = advice(failed)
    assert (found.confidence, found.against) == ("confirmed for KLD only", ("gsm8k failed: out of memory",))


@pytest.mark.parametrize(("rate", "slower"), [(12.0, True), (94.0, True), (96.0, False)])
def test_a_rate_more_than_five_percent_below_the_references_is_in_the_answer(rate: float, slower: bool) -> None:
    whole = against_bf16(rated(SMALL, rate))
    whole = whole.model_copy(update={"reference": rated(whole.reference, 100.0)})
    found = present(recommend(whole))
    assert found.confidence == "confirmed"  # of what it answers
    shown = (f"slower: {rate / 100:.2f}× the reference in decode ({rate:.1f} of 100 tok/s)",) if slower else ()
    assert found.against == shown


def test_rounding_noise_above_the_loss_is_a_line_under_the_answer() -> None:
    found = advice(SMALL.model_copy(update={"floor": NoiseFloor(of="small", mean=0.03)}))
    assert found.against == ("rounding noise is larger than the loss: last bits of weights alone move 0.0300 nats",)
    assert advice(SMALL.model_copy(update={"floor": NoiseFloor(of="small", mean=0.0003)})).against == ()


def test_confirmed_names_the_other_tests_that_rule_a_loss_out() -> None:
    right = np.ones(2000)
    held = Certificate.of(certify([Loss.of_accuracy(right, right, np.arange(2000))]), (), [])
    found = advice(SMALL.model_copy(update={"certificates": {**SMALL.certificates, "gsm8k": held}}))
    assert any("gsm8k accuracy loss below 1 point" in line for line in found.evidence)


LEFT = ("more than 512 tokens", "other kinds of text")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (("logs", "chat"), "other kinds of text (logs, chat)"),
        (("code", "logs", "chat"), "other kinds of text (code, logs, chat)"),
        (tuple(KINDS[1:]), "other kinds of text"),
    ],
)
def test_not_tested_names_the_few_kinds_that_a_text_of_kinds_lacks(lacks: tuple[str, ...], said: str) -> None:
    define = Definition("mean", "nats", "lower")
    kinds = [kind for kind in KINDS if kind not in lacks]
    kld = SMALL.axes["kld"]
    more = tuple(define(0.001, (0.0, 0.002), cell={"domain": kind}) for kind in kinds)
    read = SMALL.model_copy(update={"axes": {"kld": kld.model_copy(update={"metrics": (*kld.metrics, *more)})}})
    assert untested({}, [read]) == ("more than 512 tokens", said)


def test_kinds_that_were_read_without_figures_count_as_read() -> None:
    kld = SMALL.axes["kld"]
    bound = kld.model_copy(update={"facts": {**kld.facts, "kinds": list(KINDS)}})
    assert untested({}, [SMALL.model_copy(update={"axes": {"kld": bound}})]) == ("more than 512 tokens",)


def test_not_tested_is_what_axes_and_benches_cover_less_what_ran() -> None:
    whole = against_bf16(SMALL)
    assert present(recommend(whole)).untested == (*LEFT, "retrieval", "speed")
    ran = rated(with_axis(SMALL, "rniah"), 100.0)
    assert present(recommend(whole.model_copy(update={"candidates": (ran,)}))).untested == LEFT
    startup = Measurement(status=Status.OK, metrics=(Definition("start", "s", "lower")(1.0),))
    started = SMALL.model_copy(update={"benches": {"startup": startup}})
    assert "speed" in present(recommend(whole.model_copy(update={"candidates": (started,)}))).untested


# ------------------------------------------------------------------------------------------- rules that are handed over


def sums(kl: Sequence[float]) -> DocumentSums:
    n = len(kl)
    return DocumentSums(
        context=512, documents=tuple(range(n)), positions=(50,) * n, kl=tuple(kl), probability_loss=(0.0,) * n
    )


def test_a_paired_difference_near_zero_is_moved_by_its_monte_carlo_error_to_the_safe_side() -> None:
    rng = np.random.default_rng(53)
    base = rng.lognormal(0, 0.5, 13)
    own = base * 1.06 + rng.normal(0, 0.12, 13)
    estimate, (low, high) = present(kl_difference(sums(own.tolist()), sums(base.tolist()), 0))

    def ends(seed: int) -> tuple[float, float]:
        first, second = (RatioItems.of(kl, [50] * 13, np.arange(13)) for kl in (own, base))
        return present(paired_difference(first, second, seed, level=0.99).interval)

    drawn = np.array([ends(1_000_003 * batch) for batch in range(10)])
    width = drawn[0, 1] - drawn[0, 0]
    assert abs(drawn[0]).min() <= 0.1 * width  # near zero, so that the error counts
    error = 2 * drawn.std(axis=0, ddof=1) / np.sqrt(10)
    assert low == pytest.approx(drawn[:, 0].mean() - error[0])
    assert high == pytest.approx(drawn[:, 1].mean() + error[1])
    assert low < estimate < high


def test_the_verdict_that_excludes_is_the_records_own() -> None:
    told = failing(SMALL, band="DEGRADED", by_kld=False, because=("lost 9 of 36",))
    assert advice(told).text.startswith("No candidate is safe")
    assert told.verdict == Verdict(band="DEGRADED", by_kld=False, because=("lost 9 of 36",), sentence="s")
    assert KVSpec.parse("fp8") == told.kv


def test_a_larger_candidate_whose_verdict_is_open_ends_the_confirmation_of_smaller_ones() -> None:
    wide = arm("wide", 750, [0.0001] * 10 + [0.9])
    open_ = failing(wide, band=None, at_best="EXCELLENT", at_worst="FAIL")
    assert advice(open_, SMALL).confidence == "likely"
    assert advice(failing(wide, band="FAIL"), SMALL).confidence == "confirmed"


def test_an_open_verdict_that_another_test_lowered_excludes() -> None:
    told = failing(SMALL, band=None, at_best="PASS", at_worst="FAIL", by_kld=False, because=("lost 9 of 36",))
    assert advice(told, BIG).arm == "big"
    assert "small: verdict open, lost 9 of 36" in advice(told, BIG).others
