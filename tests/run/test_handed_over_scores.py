"""Rules that runs hand to scores and records: whose captures count, which side is subtracted, what limits do."""

from __future__ import annotations

import math
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fidelab.captures.pair import comparability_key
from fidelab.captures.reader import Capture
from fidelab.config.experiment import load
from fidelab.config.schema import Experiment, Limits
from fidelab.core import Status
from fidelab.core.errors import MismatchError
from fidelab.metrics.equivalence import LOOK_ALPHAS, Loss, certify
from fidelab.results.measurement import DECIDING, Measurement, Metric
from fidelab.results.outcomes import ArmResult, RunFacts, read_outcomes
from fidelab.results.plots import Texts
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import RunFolder
from fidelab.run import pipeline
from fidelab.scoring import dropping
from fidelab.scoring import score as scoring
from fidelab.scoring.pairing import Scorer
from tests.present import present
from tests.run.harness import Done, run_fake

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
    with pytest.raises(MismatchError, match=f"holds test kld.*, not {other} of {re.escape(own.role)}"):
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
    assert (honest.status, {*honest.scores}) == (Status.OK, {"kld", "trajectory"})


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
    with (
        mock.patch.object(dropping, "drop_where_compared") as drop,
        mock.patch.object(dropping, "_were_compared", return_value=True),
    ):
        dropping.drop_reference_rows({}, [results["reference"], *arms], roles, readers)
    assert [call.args[1].role for call in drop.call_args_list] == (["reference"] if dropped else [])
