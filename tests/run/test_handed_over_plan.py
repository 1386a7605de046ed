"""Rules that settings hand to arms, jobs and workers: whose option counts, and who is asked what again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fidelab.captures.manifest import capture_key
from fidelab.config.command import serve_command
from fidelab.config.experiment import validate
from fidelab.config.load import dump
from fidelab.config.schema import ArmConfig, EngineConfig, Experiment
from fidelab.config.trust import Trust
from fidelab.core import Arm, KVSpec, Status
from fidelab.core.errors import CaptureError, UsageError
from fidelab.core.roles import base_of
from fidelab.models import Model, resolve
from fidelab.plan import looks
from fidelab.plan.arms import inherited_kv, resolve_arm
from fidelab.plan.build import Plan, PlannedCapture
from fidelab.plan.prepare import PreparedRun, prepare
from fidelab.results.outcomes import ArmResult
from fidelab.results.store import RunFolder
from fidelab.run import pipeline, runner
from fidelab.run.runner import JobRunner, Silent, needs_of
from fidelab.scoring import looks as scored_looks
from tests.captures import sample
from tests.present import present
from tests.results.test_recommend import arm as candidate
from tests.results.test_recommend import report

FAKE: dict[str, Any] = {
    "model": "fake",
    "engine": "fake",
    "reference": "exact",
    "control": "none",
    "candidates": ["tilt"],
    "axes": {"kld": {"windows": 8, "n_ctx": 32}},
}


def experiment(**changes: Any) -> Experiment:
    return validate({**FAKE, **changes}, "test")


def prepared(tmp_path: Path, **changes: Any) -> PreparedRun:
    return prepare(experiment(output_dir=str(tmp_path), **changes))


def plan(tmp_path: Path, **changes: Any) -> Plan:
    return prepared(tmp_path, **changes).plan


@pytest.fixture(scope="module")
def model() -> Model:
    return resolve("fake")


# ------------------------------------------------------------------------------------------------- settings → an arm


def test_an_arms_own_options_and_variables_go_over_those_of_the_experiment(model: Model) -> None:
    shared = experiment(engine_args={"vocab": "256", "noise": "0.1"}, env={"A": "all", "B": "all"})
    own = ArmConfig(engine_args={"noise": "0.2"}, env={"B": "own"})
    arm = resolve_arm(shared, own, model)
    assert dict(arm.options) == {"vocab": "256", "noise": "0.2"}
    assert dict(arm.env) == {"A": "all", "B": "own"}
    assert dict(resolve_arm(shared, ArmConfig(without=("noise",)), model).options) == {"vocab": "256"}


def test_options_of_the_experiment_are_for_arms_of_its_own_engine(model: Model) -> None:
    shared = experiment(engine_args={"vocab": "256"})
    other = ArmConfig(engine=EngineConfig(name="hf"), engine_args={"attention": "eager"})
    assert dict(resolve_arm(shared, other, model).options) == {"attention": "eager"}
    assert dict(resolve_arm(shared, ArmConfig(), model).options) == {"vocab": "256"}


def test_a_compute_type_is_the_arms_own_else_the_experiments_else_the_models(model: Model) -> None:
    own = ArmConfig(dtype="float16")
    found = [resolve_arm(experiment(), *one, dtype).dtype for one, dtype in (((own, model), "float32"),)]
    found += [resolve_arm(experiment(), ArmConfig(), model, dtype).dtype for dtype in ("float32", "auto")]
    assert found[:2] == ["float16", "float32"]
    assert found[2] == {"bf16": "bfloat16", "f16": "float16"}[model.native]


def test_an_arm_without_a_format_has_the_references_on_its_engine_and_the_native_one_elsewhere() -> None:
    reference, whole = ArmConfig(kv=KVSpec.parse("tilt")), experiment()
    assert inherited_kv(ArmConfig(), reference, whole).label == "tilt"
    assert inherited_kv(ArmConfig(engine=EngineConfig(name="fake")), reference, whole).label == "tilt"
    assert inherited_kv(ArmConfig(engine=EngineConfig(name="hf")), reference, whole).label != "tilt"
    assert inherited_kv(ArmConfig(), ArmConfig(), whole).label == "exact"


@pytest.mark.parametrize(("name", "revision"), [("owner/m@v1", ["--revision", "v1"]), ("owner/m", [])])
def test_the_server_of_an_arm_loads_the_revision_that_was_measured(name: str, revision: list[str]) -> None:
    path = "/cache/models--owner--m/snapshots/0123"
    words = present(serve_command(None, replace(on_gpus(1), model=name, path=path))).split()
    assert "owner/m" in words
    assert [word for at, word in enumerate(words) if "--revision" in words[max(0, at - 1) : at + 1]] == revision


# ------------------------------------------------------------------------------------------------- arms → jobs


@pytest.mark.parametrize(
    ("role", "base"),
    [
        ("reference", ""),
        ("control", "reference"),
        ("control:sdpa", "reference"),
        ("candidate:a", "reference"),
        ("floor", "reference"),
        ("truth", "reference"),
        ("queries:a", "reference"),
        ("twin:a", "candidate:a"),
        ("exact", ""),
        ("exact:a", "exact"),
    ],
)
def test_each_role_is_compared_with_its_own_base(role: str, base: str) -> None:
    assert base_of(role) == base


def test_run_to_run_noise_asks_its_own_share_of_the_items(tmp_path: Path) -> None:
    for share in (0.25, 0.5):
        job = plan(tmp_path, floor=share, twins=1.0).job("floor")
        assert job is not None
        assert [len(capture.request.items()) for capture in job.captures] == [round(8 * share)]


def test_what_computes_the_same_as_the_reference_is_answered_again(tmp_path: Path) -> None:
    jobs = {job.role: job for job in plan(tmp_path, candidates=["exact", "tilt"], floor=0.5).jobs}
    numbers = {role: job.replicate for role, job in jobs.items()}
    assert numbers == {"reference": 0, "candidate:exact": 2, "candidate:tilt": 0, "floor": 1}
    folders = [capture.folder for job in jobs.values() for capture in job.captures]
    assert len(folders) == len({*folders})


@pytest.mark.parametrize("keep", [False, True])
def test_rows_are_compared_as_they_come_unless_they_are_to_be_kept(tmp_path: Path, keep: bool) -> None:
    jobs = {job.role: job for job in plan(tmp_path, keep_rows=keep, floor=0.0).jobs}
    [asked], [base] = jobs["candidate:tilt"].captures, jobs["reference"].captures
    assert base.against == ""
    assert bool(asked.against) is not keep
    assert asked.base == (None if keep else base.folder)


def test_a_look_asks_its_own_windows_and_those_before(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text\n" for i in range(200)))
    axes = {"kld": {"windows": 24, "n_ctx": 32, "looks": [8, 16]}}
    whole = plan(tmp_path, axes=axes, text=str(text), floor=0.0)

    def windows(look: int) -> list[list[int]]:
        jobs = whole.at_look({"reference", "candidate:tilt"}, look)
        return [[len(capture.request.items()) for capture in job.captures] for job in jobs]

    assert [windows(look) for look in (0, 1, 2)] == [[[8]] * 2, [[8, 8]] * 2, [[8, 8, 8]] * 2]


# ------------------------------------------------------------------------------------------------- jobs → workers


def test_a_worker_gets_its_arms_threads_and_variables_and_the_runs_deadline(tmp_path: Path) -> None:
    arm = {"name": "own", "kv": "tilt", "env": {"FAKE_B": "own"}}
    found = prepared(tmp_path, candidates=[arm], env={"FAKE_A": "all"}, deadline=77, threads=3)
    [job] = [job for job in found.plan.jobs if job.role == "candidate:own"]
    process = JobRunner(found, Silent(), lambda *_, **__: None)._process(job, tmp_path / "log")
    assert process["deadline"] == 77
    assert process["env"].items() >= {"FAKE_A": "all", "FAKE_B": "own", "OMP_NUM_THREADS": "3"}.items()


def on_gpus(tp: int, device: str = "cuda") -> Arm:
    kv = KVSpec.parse("bf16")
    return Arm("a", "vllm", "m", "m", "w", kv, "bfloat16", device, 4, (("tp", str(tp)),))


def test_on_a_cluster_an_arm_gets_as_many_gpus_as_it_has_ranks_or_the_users_share_of_one() -> None:
    assert [needs_of(on_gpus(tp), None).gpus for tp in (1, 2, 4)] == [1, 2, 4]
    assert needs_of(on_gpus(1), 0.5).gpus == 0.5
    assert needs_of(on_gpus(2, "cpu"), None).gpus == 0
    with pytest.raises(UsageError, match="tp=2"):
        needs_of(on_gpus(2), 1)


def test_an_answer_to_another_request_is_refused(tmp_path: Path) -> None:
    folder = sample.write(tmp_path)
    own = capture_key(sample.ARM, sample.WINDOWS, {"fake": "1"}, 0)
    planned = PlannedCapture("kld", sample.WINDOWS, own, folder)
    assert runner._answer(planned).folder == folder
    for other in ({"probe": "0" * 64}, {"replicate": 1}, {"versions": {"fake": "2"}}):
        with pytest.raises(CaptureError, match="the answer to another request"):
            runner._answer(replace(planned, key={**own, **other}))


# ------------------------------------------------------------------------------------------------- looks, resuming


class Stop(Exception):
    """Ends a command where it has handed over what a test asks for."""


def asked_of_prepare(call: Callable[[], object]) -> dict[str, Any]:
    with mock.patch.object(pipeline, "prepare", side_effect=Stop) as prepared_, pytest.raises(Stop):
        call()
    return dict(prepared_.call_args.kwargs)


def test_a_resumed_repeat_asks_under_its_own_number_and_the_time_of_its_start(tmp_path: Path) -> None:
    head = {"command": "fidelab compare", "created": "2026-01-02T03:04:05+00:00", "replicate": "30"}
    folder = RunFolder.create(tmp_path, "fake", dump(experiment(output_dir=str(tmp_path)), head))
    found = asked_of_prepare(lambda: pipeline.resume(folder.path, trust=Trust([folder.config])))
    assert (found["replicate"], found["created"]) == (30, "2026-01-02T03:04:05+00:00")


def test_a_further_look_replaces_an_arms_answers_and_adds_to_its_time() -> None:
    kv = KVSpec.parse("tilt")
    arm = Arm("tilt", "fake", "fake", "fake", "w", kv, "float32", "cpu", 1)
    one = ArmResult("candidate:tilt", arm, Status.OK, captures={"kld": Path("a")}, timing={"seconds": 2.0})
    two = replace(one, captures={"kld": Path("a"), "kld.+1": Path("b")}, timing={"seconds": 3.0, "load_seconds": None})
    other = replace(one, role="candidate:other")
    results = [one, other]
    with mock.patch.object(pipeline, "_store_outcomes") as stored:
        pipeline._keep([two], results, mock.Mock(), mock.Mock(), mock.Mock())
    assert [result.role for result in results] == ["candidate:tilt", "candidate:other"]
    assert results[0].captures == two.captures
    assert results[0].timing["seconds"] == 5.0
    assert results[1] == other
    assert stored.call_count == 1


def undecided(budget_kld: float | None) -> list[str]:
    """The roles to be asked more, of a candidate whose mean KL is about the usual margin."""
    wide = [0.0085 * (1 + 0.9 * (-1) ** n) for n in range(24)]
    limits = {} if budget_kld is None else {"max_kld": budget_kld}
    asked = experiment(axes={"kld": {"windows": 24, "n_ctx": 32, "looks": [8, 16]}}, limits=limits)
    kv = KVSpec.parse("tilt")
    arms = [Arm(name, "fake", "fake", "fake", "w", kv, "float32", "cpu", 1) for name in ("bf16", "open")]
    roles = ("reference", "candidate:open")
    results = [ArmResult(role, arm, Status.OK) for role, arm in zip(roles, arms, strict=True)]
    scored = mock.Mock(report=report(candidate("open", 500, wide)))
    with mock.patch.object(scored_looks, "score_run", return_value=scored):
        return scored_looks.undecided(asked, mock.Mock(), results, {})


def test_the_users_limits_decide_when_a_candidate_needs_no_further_look() -> None:
    assert undecided(None) == ["candidate:open"]
    assert undecided(0.05) == []  # shown to be below
    assert undecided(0.0005) == []  # shown to be above


def test_a_budget_that_the_first_look_itself_goes_beyond_is_refused() -> None:
    for seconds, refused in ((60.0, False), (60.1, True)):
        found = mock.Mock(settings=mock.Mock(experiment=mock.Mock(budget=60.0), axes={}))
        found.estimate.return_value = mock.Mock(seconds=seconds)
        if refused:
            with pytest.raises(UsageError, match="--budget 60s: the run takes about 60 s"):
                looks.check_budget(found)
        else:
            looks.check_budget(found)
