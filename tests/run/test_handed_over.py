"""Rules that one module hands to another: what limits make of a score, whose captures count, who may drop rows."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

from fidelab.axes.base import AxisScore
from fidelab.captures.pair import comparability_key
from fidelab.captures.reader import Capture
from fidelab.captures.store import Readers
from fidelab.config.experiment import load
from fidelab.config.schema import Experiment, Limits
from fidelab.core import Arm, KVSpec, Status
from fidelab.core.errors import MismatchError
from fidelab.metrics.equivalence import KL_MARGIN, LOOK_ALPHAS, MARGIN, Loss, certify
from fidelab.results.measurement import DECIDING, Measurement, Metric
from fidelab.results.plots import Texts
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import RunFolder
from fidelab.run import attribution, looks, pairing, pipeline, scoring
from fidelab.run.benches import benched_roles
from fidelab.run.pairing import ArmResult, Measured, Scorer, engaged, select_runtime_info
from fidelab.run.pipeline import read_outcomes
from fidelab.run.scoring import RunFacts, losses_of
from tests.present import present
from tests.run.harness import Done, run_fake

ROWS = 12


def score(**more: Any) -> AxisScore:
    """A KLD score: every column is known, and of six documents."""
    ones, right = np.ones(ROWS), np.ones(ROWS)
    right[0] = 0
    fields: dict[str, Any] = {
        "right": (ones, right),
        "probability_loss": np.full(ROWS, 0.001),
        "positions": {"top1_agrees": right},
        "found": Measurement(status=Status.OK, cluster="document", facts={"n_ctx": 128}),
    }
    return AxisScore(0.001 * ones, ones, np.arange(ROWS) // 2, ones > 0, **{**fields, **more})


def margins(name: str, whole: AxisScore, **limits: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for loss in losses_of(name, whole, Limits(**limits)):
        found.setdefault(loss.key, []).append(loss.margin)
    return found


def test_without_limits_kl_and_probability_have_their_usual_margins_and_nothing_else_is_claimed() -> None:
    assert margins(DECIDING, score()) == {"mean_kl": [KL_MARGIN], "probability_loss": [MARGIN]}


def test_each_limit_is_the_margin_of_its_own_claim() -> None:
    limits = {"max_kld": 0.007, "max_flips": 0.02, "max_accuracy_loss": 0.005, "margin": 0.03}
    found = margins(DECIDING, score(), **limits)
    wanted = {"mean_kl": [0.007], "flips": [0.02], "probability_loss": [0.03], "accuracy_loss": [0.005]}
    assert found == wanted


def test_perplexity_has_the_limit_of_kl_and_other_axes_that_of_accuracy() -> None:
    ones = np.ones(ROWS)
    nll = AxisScore(0.001 * ones, ones, np.arange(ROWS), ones > 0, nll_difference=True)
    assert margins("ppl", nll, max_kld=0.004, margin=0.03) == {"log_perplexity": [0.004]}
    assert margins("ppl", nll) == {"log_perplexity": [KL_MARGIN]}
    assert margins("retrieval", score(), margin=0.03, max_kld=0.004) == {"accuracy_loss": [0.03]}


def test_flips_are_those_of_usable_rows() -> None:
    usable = np.ones(ROWS, bool)
    usable[0] = False  # the only row that changed
    [flips] = [loss for loss in losses_of(DECIDING, score(), Limits(max_flips=0.1)) if loss.key == "flips"]
    [none] = [
        loss
        for loss in losses_of(DECIDING, replace(score(), usable=usable), Limits(max_flips=0.1))
        if loss.key == "flips"
    ]
    assert flips.estimate == pytest.approx(1 / ROWS)
    assert none.estimate == 0


def test_each_context_has_a_claim_on_kl_and_one_text_has_one_on_accuracy() -> None:
    parts = {"128": score(), "512": score()}
    whole = replace(score(), parts=parts, part="512")
    assert margins(DECIDING, whole, max_accuracy_loss=0.02) == {
        "mean_kl": [KL_MARGIN] * 2,
        "probability_loss": [MARGIN],
        "accuracy_loss": [0.02],
    }
    [accuracy] = [one for one in losses_of(DECIDING, whole, Limits(max_accuracy_loss=0.02)) if one.key[0] == "a"]
    assert len(accuracy.items.num) == 2 * ROWS


@pytest.mark.parametrize(
    "lacking", [{"right": None}, {"bound": True}, {"not_measurable": "no text"}], ids=["unknown", "bounds", "no-text"]
)
def test_nothing_is_claimed_of_what_is_not_known(lacking: dict[str, Any]) -> None:
    assert losses_of(DECIDING, score(**lacking), Limits(max_flips=0.1)) == []


def test_that_the_output_is_the_references_is_handed_on_to_every_claim() -> None:
    found = losses_of(DECIDING, score(identical=True), Limits(max_flips=0.1))
    assert len(found) == 3
    assert all(loss.identical for loss in found)
    assert not any(loss.identical for loss in losses_of(DECIDING, score(), Limits(max_flips=0.1)))


# ------------------------------------------------------------------------------------------------- the composite


def composed(*failed: str, kind: Status = Status.FAILED, **more: Any) -> Any:
    """The composite of an arm with scores on all axes of the composite but those that failed."""
    names = ("kld", "trajectory", "rniah")
    found = Measurement(
        status=Status.OK, metrics=(Metric(key="score", name="score", unit="points", about="", value=90),)
    )
    scores = {name: score(found=found, **more) for name in names if name not in failed}
    arm = mock.Mock(scores=scores, failures=dict.fromkeys(failed, (kind, "the engine crashed")))
    summary = mock.Mock(experiment=mock.Mock(bands="fidelab"))
    with mock.patch.object(scoring, "_composed", return_value=list(names)):
        return scoring._Summary._composite(summary, arm)


def test_the_composite_is_of_all_axes_and_an_axis_that_failed_leaves_none() -> None:
    whole = composed()
    assert (whole.value, whole.axes) == (pytest.approx(90), ("kld", "trajectory", "rniah"))
    assert composed("rniah") is None  # the mean of the others would overstate it
    left = composed("rniah", kind=Status.NOT_MEASURABLE)  # of every arm of this model
    assert left.axes == ("kld", "trajectory")
    assert composed("kld", "trajectory", "rniah") is None


def test_lower_bounds_are_no_part_of_the_composite() -> None:
    assert composed(bound=True) is None


# ------------------------------------------------------------------------------------------------- captures


CLEAR, NEAR, VARIES, PARTS = "tilt[q=0.6]", "tilt[q=0.52]", "tilt[q=0.6,every=3]", "fork[at=5]"
CONTROL = "tilt[q=0.55]"


def kl(q: float) -> float:
    """KL of the fake engine's ``exact`` (p = 0.5) from ``tilt[q]``, nats."""
    return 0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    axes = {"kld": {"windows": 12, "n_ctx": 16}, "trajectory": {"limit": 2, "n_predict": 8}}
    more = {"control": CONTROL, "keep_rows": True, "limits": {"max_flips": 0.9}}
    found = run_fake(tmp_path_factory.mktemp("handed"), axes, [CLEAR, NEAR, VARIES, PARTS], **more)
    assert found.code == 0, found.err
    return found


@pytest.fixture(scope="module")
def experiment(done: Done) -> Experiment:
    return load(RunFolder.open(done.folder).config)


@pytest.fixture(scope="module")
def results(done: Done) -> dict[str, ArmResult]:
    found, _, _ = read_outcomes(RunFolder.open(done.folder))
    return {one.role: one for one in found}


FACTS = RunFacts("run", "2026-01-01T00:00:00Z", "fidelab compare", {})


def scored(experiment: Experiment, *results: ArmResult, facts: RunFacts = FACTS, **settings: Any) -> Report:
    """The report on these results; ``settings`` replace those of the run."""
    return scoring.score_run(experiment.model_copy(update=settings), facts, results).report


def named(report: Report, name: str) -> ArmRecord:
    return next(one for one in report.candidates if one.name == name)


def candidate(results: dict[str, ArmResult]) -> ArmResult:
    return next(one for role, one in results.items() if role.startswith("candidate:"))


def test_an_arms_own_captures_are_taken(results: dict[str, ArmResult]) -> None:
    for one in results.values():
        one.check_captures()


def test_a_capture_of_another_axis_is_refused_and_named(results: dict[str, ArmResult]) -> None:
    own = candidate(results)
    kld = next(path for axis, path in own.captures.items() if axis.startswith("kld"))
    other = next(axis for axis in own.captures if not axis.startswith("kld"))
    with pytest.raises(MismatchError, match=f"holds axis kld.*, not {other} of {re.escape(own.role)}"):
        replace(own, captures={other: kld}).check_captures()


def test_a_capture_of_another_arm_is_refused_and_named(results: dict[str, ArmResult]) -> None:
    own = candidate(results)
    with pytest.raises(MismatchError, match=f"of exact .*not kld.* of {re.escape(own.role)}"):
        replace(own, captures=results["reference"].captures).check_captures()


def test_a_capture_under_another_key_is_refused(results: dict[str, ArmResult], tmp_path: Path) -> None:
    own = candidate(results)
    axis, path = next(iter(own.captures.items()))
    moved = tmp_path / f"{path.name[:-15]}{'0' * 12}-r0"
    shutil.copytree(path, moved)
    with pytest.raises(MismatchError, match="holds what belongs into"):
        replace(own, captures={axis: moved}).check_captures()


# ------------------------------------------------------------------------------------------------- the record


def test_the_runs_limits_are_those_of_its_recommendation(experiment: Experiment, results: dict[str, ArmResult]) -> None:
    for limits in ({}, {"max_kld": 0.02}, {"max_flips": 0.1, "min_saving": 0.25}):
        advice = scored(experiment, *results.values(), limits=Limits(**limits)).recommendation
        assert present(advice).limits == limits


def test_limits_of_a_new_score_replace_those_of_the_run_one_by_one(done: Done) -> None:
    folder = RunFolder.open(done.folder)
    found = [pipeline._recompute(folder, limits).report.recommendation for limits in ({}, {"max_kld": 0.3})]
    assert [present(one).limits for one in found] == [{"max_flips": 0.9}, {"max_kld": 0.3, "max_flips": 0.9}]


def test_candidates_are_compared_as_the_worse_minus_the_better(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    arms = [results[role] for role in ("reference", f"candidate:{CLEAR}", f"candidate:{NEAR}")]
    [found] = scored(experiment, *arms).comparisons
    assert (found.better, found.worse) == (NEAR, CLEAR)
    assert found.difference == pytest.approx(kl(0.6) - kl(0.52), rel=1e-4)


def test_the_excess_of_a_candidate_is_its_kl_minus_the_controls(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    report = scored(experiment, *results.values())
    for name, q in ((CLEAR, 0.6), (NEAR, 0.52)):
        excess = named(report, name).axes[DECIDING].value("over_control")
        assert excess == pytest.approx(kl(q) - kl(0.55), rel=1e-3)


def test_rounding_noise_is_the_kl_of_a_candidate_from_its_own_twin_and_stands_with_its_figures(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    """As the twin of ``tilt[q=0.6]`` serves the reference: two levels of 0.6 seen from two of 0.5."""
    clear = results[f"candidate:{CLEAR}"]
    twin = replace(results["reference"], role=f"twin:{CLEAR}", arm=clear.arm, ran=clear.ran)
    floor = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    arm = named(scored(experiment, results["reference"], clear, twin, twins=0.5), CLEAR)
    assert present(arm.floor).mean == pytest.approx(floor, rel=1e-3)
    noises = {metric.key: metric.noise for metric in arm.axes[DECIDING].metrics}
    assert noises["mean"] == present(arm.floor).mean
    assert noises["top1"] == 0.0


def test_the_noise_of_a_borrowed_reference_stands_in_the_report_as_that_of_its_own_would(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    noise = Measurement(status=Status.OK, metrics=(Metric(key="mean", name="mean", unit="nats", value=0.0002),))
    pack = {"place": "pack", "sha256": "0" * 64, "machine": "a", "noise": {DECIDING: noise.model_dump(mode="json")}}
    alone = [results[role] for role in ("reference", f"candidate:{CLEAR}")]
    report = scored(experiment, *alone, facts=replace(FACTS, borrowed=pack))
    assert report.floor[DECIDING].value("mean") == 0.0002
    assert present(report.borrowed).machine == "a"


def test_claims_are_tested_at_the_level_of_the_look_at_which_the_arm_was_decided(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    arms = [results[role] for role in ("reference", f"candidate:{VARIES}")]
    score = present(Scorer(experiment, arms, {}).measure(arms[1]).deciding)
    loss = Loss.of_kl(score.items())
    early = {**experiment.axes[DECIDING], "windows": 24, "looks": (12,)}
    for axis, alpha in ((experiment.axes[DECIDING], 0.05), (early, LOOK_ALPHAS[0])):
        record = named(scored(experiment, *arms, axes={DECIDING: axis}), VARIES)
        [claim] = [one for one in record.certificates[DECIDING].claims if one.key == "mean_kl"]
        wanted = certify([replace(loss, alpha=alpha)], experiment.seed).claims[0].interval
        assert claim.ci == pytest.approx(present(wanted))


def test_sums_by_document_of_a_look_are_over_its_own_windows() -> None:
    """Four windows of three rows, two of them in the first look; documents change after each two rows."""
    values = np.arange(ROWS) / 1000
    whole = replace(score(), num=values, looks=(2, 4), probability_loss=2 * values)
    first, last = scoring._sums(whole)
    assert (first.windows, last.windows) == (2, 4)
    assert (first.documents, last.documents) == ((0, 1, 2), (0, 1, 2, 3, 4, 5))
    assert first.kl == pytest.approx((0.001, 0.005, 0.009))
    assert last.kl == pytest.approx((0.001, 0.005, 0.009, 0.013, 0.017, 0.021))
    assert last.probability_loss == pytest.approx([2 * one for one in last.kl])
    assert last.positions == (2,) * 6


@pytest.mark.parametrize(("traffic", "keep", "shown"), [(None, False, True), ("l", False, False), ("l", True, True)])
def test_words_of_a_users_log_stay_out_of_the_record_unless_they_are_to_be_kept(
    experiment: Experiment, results: dict[str, ArmResult], traffic: str | None, keep: bool, shown: bool
) -> None:
    report = scored(experiment, *results.values(), traffic=traffic, keep_text=keep)
    plots = [plot for arm in report.candidates for axis in arm.axes.values() for plot in axis.plots]
    assert any(isinstance(plot, Texts) for plot in plots) is shown


def test_speeds_are_of_one_key_where_work_weights_and_machine_are_the_same(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    arm, ran = results["reference"].arm, {"device": "cpu"}
    facts = replace(FACTS, environment={"processor": "one", "usable_cores": 2, "python": "3.11"})
    benched = experiment.model_copy(update={"benches": {"decode": {"repeats": 3, "n": 8}}})

    def key(
        facts: RunFacts = facts, ran: dict[str, Any] = ran, experiment: Experiment = benched, **changes: Any
    ) -> Any:
        one = replace(results["reference"], arm=replace(arm, **changes), ran=ran)
        return scoring._bench_keys(experiment, facts, one)

    others = [
        key(weights="other"),
        key(dtype="float16"),
        key(threads=arm.threads + 1),
        key(ran={"device": "cuda"}),
        key(facts=replace(facts, environment={**facts.environment, "processor": "two"})),
        key(experiment=benched.model_copy(update={"benches": {"decode": {"repeats": 3, "n": 9}}})),
    ]
    assert all(other != key() for other in others)
    assert key(name="another", facts=replace(facts, environment={**facts.environment, "python": "3.12"})) == key()


# ------------------------------------------------------------------------------------------------- controls


def measured(role: str, attention: str | None = None, score: AxisScore | None = None) -> Measured:
    """An arm with a KLD, on an attention of engine hf."""
    kv = KVSpec.parse("bf16")
    options = () if attention is None else (("attention", attention),)
    arm = Arm(role, "hf", "m", "m", "w", kv, "float32", "cpu", 1, options)
    result = ArmResult(role, arm, Status.OK)
    return Measured(result, Status.OK, None, {} if score is None else {DECIDING: score}, {})


def test_the_control_of_an_arm_is_that_of_its_attention_else_the_runs() -> None:
    arms = {
        "control": measured("control"),
        "control:sdpa": measured("control:sdpa", "sdpa"),
        "control:eager": measured("control:eager", "eager"),
    }

    def role_of(arm: Measured) -> str | None:
        control = attribution.control_of(arm, arms)
        return None if control is None else control.result.role

    assert role_of(measured("candidate:a")) == "control"
    assert role_of(measured("candidate:a", "eager")) == "control:eager"
    assert role_of(measured("candidate:a", "sdpa")) == "control:sdpa"
    assert role_of(measured("candidate:a", "flash")) == "control"
    assert role_of(arms["control:eager"]) is None


def at(n_ctx: str, means: dict[str, float]) -> AxisScore:
    """A KLD over several contexts; its own figures are those of ``n_ctx``."""

    def one(mean: float) -> AxisScore:
        metric = Metric(key="mean", name="mean", unit="nats", value=mean)
        return replace(score(), num=mean * np.ones(ROWS), found=Measurement(status=Status.OK, metrics=(metric,)))

    parts = {part: replace(one(mean), part=part) for part, mean in means.items()}
    return replace(parts[n_ctx], parts=parts)


def test_a_loss_is_attributed_at_the_context_in_which_the_candidate_is_worst() -> None:
    candidate = measured("candidate:a", score=at("512", {"128": 0.01, "512": 0.05}))
    control = measured("control", score=at("128", {"128": 0.004, "512": 0.001}))  # worst at another context
    found = attribution._attribution(candidate, control, {}, None, 0)
    assert (present(found.here).mean, present(found.kernel).mean) == (0.05, 0.001)
    assert present(found.here_minus_kernel).mean == pytest.approx(0.049)


# ------------------------------------------------------------------------------------------------- proof


def ran(**facts: Any) -> ArmResult:
    """An arm of which K = int8 and V = int4 are asked, and what its engine says."""
    kv = KVSpec.parse("int8/int4")
    arm = Arm("a", "hf", "m", "m", "w", kv, "float32", "cpu", 1)
    return ArmResult("candidate:a", arm, Status.OK, ran={"k_format": "int8", "v_format": "int4", **facts})


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({}, Status.OK),
        ({"k_format": "bf16"}, Status.NOT_ENGAGED),
        ({"v_format": "int8"}, Status.NOT_ENGAGED),
        ({"v_format": None}, Status.NOT_ENGAGED),
        ({"cache_bytes_per_token": 100.0, "expected_bytes_per_token": 100.0}, Status.OK),
        ({"cache_bytes_per_token": 200.0, "expected_bytes_per_token": 100.0}, Status.NOT_ENGAGED),
        ({"cache_bytes_per_token": 50.0, "expected_bytes_per_token": 100.0}, Status.NOT_ENGAGED),
        ({"proof": {"stored": "shown", "received": "refuted: nobody read it"}}, Status.NOT_ENGAGED),
    ],
)
def test_a_format_ran_where_keys_values_bytes_and_attention_show_it(facts: dict[str, Any], status: Status) -> None:
    assert engaged(ran(**facts))[0] is status


def test_of_several_processes_the_one_that_refutes_the_format_judges_whichever_was_last() -> None:
    arm = ran().arm
    good = {"k_format": "int8", "v_format": "int4", "k_changed": 0.5}
    bad = {"k_format": "int8", "v_format": "bf16", "k_changed": 0.5}
    plain = {"k_format": "int8", "v_format": "int4"}
    assert select_runtime_info(arm, [good, bad]) == bad
    assert select_runtime_info(arm, [bad, good]) == bad
    assert select_runtime_info(arm, [good, plain]) == good
    assert select_runtime_info(arm, [plain]) == plain
    assert select_runtime_info(arm, []) is None


def test_an_arm_whose_format_did_not_run_has_no_score_and_its_reason_on_every_axis(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    own = results[f"candidate:{CLEAR}"]
    liar = replace(own, ran={**present(own.ran), "k_format": "exact"})
    found = Scorer(experiment, [results["reference"], liar], {}).measure(liar)
    assert (found.status, dict(found.scores)) == (Status.NOT_ENGAGED, {})
    why = (Status.NOT_ENGAGED, f"asked for K = {CLEAR}, the engine stored exact")
    assert found.failures == {"kld": why, "trajectory": why}
    honest = Scorer(experiment, [results["reference"], own], {}).measure(own)
    assert (honest.status, honest.scores.keys()) == (Status.OK, {"kld", "trajectory"})


def test_benches_measure_the_arms_whose_format_ran() -> None:
    good, bad = ran(), replace(ran(v_format="bf16"), role="candidate:b")
    control, noise = replace(good, role="control"), replace(good, role="floor")
    assert benched_roles([good, bad, control, noise]) == [good, control]


def test_runs_share_their_questions_whatever_later_looks_ask(
    experiment: Experiment, results: dict[str, ArmResult]
) -> None:
    """How many looks follow is a matter of the candidates."""
    reference = results["reference"]
    [kld] = [path for part, path in reference.captures.items() if part.startswith(DECIDING)]
    looking = {"windows": 24, "n_ctx": 16, "looks": (12,)}
    asked = experiment.model_copy(update={"axes": {DECIDING: looking}})
    [first] = [part for part in reference.captures if part.startswith(DECIDING)]
    once, twice = (
        Scorer(asked, [replace(reference, captures=captures)], {}).comparability()
        for captures in ({first: kld}, {first: kld, f"{first}.+1": kld})
    )
    assert once == twice
    assert once[first] == comparability_key(Capture(kld))


# ------------------------------------------------------------------------------------------------- readers of rows

READS = """
import sys
from pathlib import Path
from fidelab.captures.store import Readers
store, arm = map(Path, sys.argv[1:])
readers = Readers(store, [arm])
print("reading", flush=True)
sys.stdin.readline()
with readers.alone(arm) as alone:
    print(alone, flush=True)
sys.stdin.readline()
"""


class Other:
    """Another process that reads an arm's captures."""

    def __init__(self, store: Path, arm: Path) -> None:
        words = [sys.executable, "-c", READS, str(store), str(arm)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.said() == "reading"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def alone(readers: Readers, arm: Path) -> bool:
    with readers.alone(arm) as found:
        return found


def test_rows_that_another_process_reads_are_not_dropped_and_others_are(tmp_path: Path) -> None:
    arm, free = tmp_path / "arm", tmp_path / "free"
    readers = Readers(tmp_path, [arm, free])
    assert alone(readers, arm)
    other = Other(tmp_path, arm)
    try:
        assert not alone(readers, arm)
        assert alone(readers, free)
        other.go_on()
        assert other.said() == "False"  # we read it still, also after we were alone
        readers.close()
        with Other(tmp_path, free).process as second:
            second.kill()
        readers = Readers(tmp_path, [free])
        assert alone(readers, free)  # locks end with their process
    finally:
        other.process.kill()
        other.process.wait()
        readers.close()


@pytest.mark.parametrize(
    ("statuses", "dropped"),
    [((Status.OK, Status.OK), True), ((Status.OK, Status.FAILED), False), ((Status.OK, None), False)],
    ids=["all", "one-failed", "one-missing"],
)
def test_rows_of_the_reference_go_once_every_planned_arm_was_compared(
    results: dict[str, ArmResult], statuses: tuple[Status | None, ...], dropped: bool
) -> None:
    """Arms that failed, or that were not run yet, may be asked again."""
    roles = ["reference", f"candidate:{CLEAR}", f"candidate:{NEAR}"]
    ended = zip(roles[1:], statuses, strict=True)
    arms = [replace(results[role], status=status) for role, status in ended if status is not None]
    readers = mock.Mock()
    readers.alone.return_value = nullcontext(True)
    with mock.patch.object(pairing, "_drop") as drop, mock.patch.object(pairing, "_were_compared", return_value=True):
        pairing.drop_reference_rows({}, [results["reference"], *arms], roles, readers)
    assert [call.args[1].role for call in drop.call_args_list] == (["reference"] if dropped else [])


# ------------------------------------------------------------------------------------------------- looks


class Plan:
    """What :func:`fidelab.run.looks.planned` asks of a prepared run."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.plan, self.settings = name, name, mock.Mock(axes={})
        self.seconds = seconds

    def estimate(self) -> Any:
        return mock.Mock(seconds=self.seconds)


def chosen(budget: float | None, whole_seconds: float, *, saves: bool, windows: Sequence[int] = (8, 32)) -> str:
    """Which of both plans is taken: with looks, or the one that asks everything at once."""
    several, whole = Plan("looks", 10), Plan("whole", whole_seconds)
    experiment = mock.Mock(axes={"kld": {"looks": 3}}, budget=budget)
    experiment.model_copy.side_effect = lambda update: mock.Mock(axes=update["axes"], budget=budget)

    def prepare(asked: Any, **how: Any) -> Any:
        return whole if asked.axes["kld"]["looks"] == () else several

    with (
        mock.patch.object(looks, "prepare", prepare),
        mock.patch.object(looks, "n_looks", return_value=3),
        mock.patch.object(looks, "windows_of", return_value=tuple(windows)),
        mock.patch.object(looks, "looks_save_time", return_value=saves),
    ):
        return looks.planned(experiment).name  # type: ignore[attr-defined, no-any-return]


def test_looks_are_given_up_where_they_save_no_time_and_the_budget_has_room_for_all_windows() -> None:
    assert chosen(None, 60, saves=True) == "looks"
    assert chosen(None, 60, saves=False) == "whole"
    assert chosen(60, 60, saves=False) == "whole"
    assert chosen(59, 60, saves=False) == "looks"
    assert chosen(None, 60, saves=False, windows=(8, 8)) == "looks"  # whose text ends with the first look


LISTED = yaml.safe_load((Path(__file__).parents[1] / "handed_over.yaml").read_text("utf-8"))


@pytest.mark.parametrize("fault", LISTED, ids=[one["name"] for one in LISTED])
def test_each_listed_fault_can_be_planted(fault: dict[str, str]) -> None:
    root = Path(__file__).parents[2]
    assert (root / "src" / "fidelab" / fault["file"]).read_text("utf-8").count(fault["was"]) == 1
    assert (root / fault["tests"]).is_file()
    assert fault["is"] != fault["was"]
