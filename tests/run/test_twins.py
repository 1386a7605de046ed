"""Twins: what last bits alone move each candidate by, planned, measured, and kept apart from the candidates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax

from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.config.experiment import validate
from fidelab.config.schema import Experiment
from fidelab.models.tiny import make_tiny
from fidelab.plan.build import PlannedJob
from fidelab.plan.prepare import prepare
from fidelab.results.outcomes import ArmResult, RunFacts
from fidelab.results.record import Report
from fidelab.scoring.score import score_run
from tests.present import present
from tests.run.harness import Done, cli, compare, write_inputs

FACTS = RunFacts("run", "2026-01-01T00:00:00Z", "fidelab compare", {})
SIZES = ("--axes", "kld", "--windows", 8, "--n-ctx", 32, "--threads", 1, "--dtype", "bfloat16", "--text", "text.txt")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    make_tiny(folder / "tiny")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def done(room: Path) -> Done:
    """Two arms of one family, and one whose twin is the only one of its own."""
    kv = ("--reference", "bf16", "--kv", "int4", "--kv", "int4[group=16]", "--kv", "bf16/fp8_e4m3")
    return cli("compare", "./tiny", *kv, *SIZES, cwd=room)


def twins(room: Path, *candidates: Any, **change: Any) -> list[PlannedJob]:
    data = {"model": str(room / "tiny"), "reference": "f32", "dtype": "float32", "text": str(room / "text.txt")}
    axes = {"kld": {"windows": 8, "n_ctx": 32}, "perplexity": {"contexts": [32], "windows": 4}}
    rest = {"output_dir": str(room / "plans"), "candidates": list(candidates), "axes": axes, **change}
    jobs = prepare(validate({**data, **rest}, "test")).plan.jobs
    return [job for job in jobs if job.role.startswith("twin:")]


def test_each_family_has_one_twin_which_is_its_first_arm_with_other_last_bits(room: Path) -> None:
    found = twins(room, "int4", "int4[group=16]", "q8_0", {"kv": "int4", "dtype": "bfloat16", "name": "16 bits"})
    assert [job.role for job in found] == ["twin:int4", "twin:q8_0", "twin:16 bits"]
    assert [dict(job.arm.options) for job in found] == [{"jitter": "1"}] * 3
    assert [job.arm.kv.label for job in found] == ["int4", "q8_0", "int4"]
    for job in found:  # a quarter of the kld windows and nothing else
        assert [(capture.axis, len(capture.request.items())) for capture in job.captures] == [("kld", 2)]


def test_there_is_no_twin_where_none_is_wanted_or_would_be_asked_nor_of_an_arm_that_cannot_run(room: Path) -> None:
    for change in ({"twins": 0}, {"axes": {"perplexity": {"contexts": [32], "windows": 4}}}):
        assert twins(room, "int4", **change) == []
    assert twins(room, {"kv": "int4[skip-layers=99]", "name": "beyond"}, "q8_0")[0].role == "twin:q8_0"


def test_the_dry_run_names_twins_and_counts_their_tokens(room: Path) -> None:
    plan = json.loads(cli("compare", "./tiny", "--kv", "int4", *SIZES, "--dry-run", "--json", cwd=room).out)
    by_role = {job["role"]: job["tokens"] for job in plan["jobs"]}
    assert by_role["twin:int4"] == by_role["floor"] == 2 * 32


def rows(capture: Capture, item: int) -> NDArray[np.float64]:
    """Log-probabilities [rows, V] in float64, from the states and the head."""
    assert capture.head is not None
    weight = capture.head.load()[0].astype(np.float64)
    states = capture.array_shape(item, "hidden")[0]
    return np.asarray(log_softmax(capture.floats(item, "hidden", 0, states).astype(np.float64) @ weight.T, axis=-1))


def floors(done: Done) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm["floor"] for arm in done.report["candidates"]}


def test_a_floor_is_the_mean_kl_of_the_candidate_from_its_twin(done: Done) -> None:
    arms = {arm["role"]: arm for arm in json.loads((done.folder / "outcomes.json").read_text())["arms"]}
    folders = [arms[role]["captures"]["kld"] for role in ("candidate:int4", "twin:int4")]
    mine, its = (Capture((done.folder / folder).resolve()) for folder in folders)
    kls = []
    for r, t in Pair.match(mine, its, subset=True).items:
        p, q = rows(mine, r), rows(its, t)
        kls += (np.exp(p) * (p - q)).sum(-1).tolist()
    floor = floors(done)["int4"]
    assert floor["mean"] == pytest.approx(np.mean(kls), rel=1e-3)
    assert floor["mean"] > 0
    assert floor["n_positions"] == len(kls) == 2 * 15
    assert floor["reason"] is None


def test_arms_of_one_family_have_one_floor_and_it_says_whose(done: Done) -> None:
    found = floors(done)
    assert found["int4[group=16]"] == found["int4"]
    assert (found["int4"]["of"], found["bf16/fp8_e4m3"]["of"]) == ("int4", "bf16/fp8_e4m3")
    assert found["bf16/fp8_e4m3"]["mean"] != found["int4"]["mean"]


def test_twins_are_no_candidates_and_what_ran_tells_them_apart(done: Done) -> None:
    assert [arm["name"] for arm in done.report["candidates"]] == ["int4", "int4[group=16]", "bf16/fp8_e4m3"]
    arms = {arm["role"]: arm for arm in json.loads((done.folder / "outcomes.json").read_text())["arms"]}
    assert arms["twin:int4"]["ran"]["jittered_weights"] > 0
    assert arms["twin:int4"]["ran"]["k_format"] == arms["candidate:int4"]["ran"]["k_format"]
    assert done.report["reference"]["floor"] is None


def test_scoring_again_gives_the_same_floors(done: Done) -> None:
    before = floors(done)
    assert cli("report", "--rescore", done.folder, cwd=done.cwd).code == 0
    assert floors(done) == before


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Done:
    flags = ["--control", "none", "--no-floor", "--keep-rows"]
    return compare(tmp_path_factory.mktemp("known"), "tilt[q=0.6]", "tilt[q=0.52]", flags=flags, windows=8)


def scored(done: Done, twin: dict[str, Any], **settings: Any) -> Report:
    """Of tilt[q=0.6] alone, with the arm tilt[q=0.52] for its twin."""
    arms = {arm["role"]: arm for arm in json.loads((done.folder / "outcomes.json").read_text())["arms"]}
    own = [arms["reference"], arms["candidate:tilt[q=0.6]"]]
    other = {**arms["candidate:tilt[q=0.52]"], "role": "twin:tilt[q=0.6]", **twin}
    experiment = Experiment.model_validate({**done.report["settings"], "twins": 0.25, **settings})
    results = [ArmResult.from_record(arm, done.folder) for arm in [*own, other]]
    return score_run(experiment, FACTS, results).report


def test_the_floor_of_a_known_pair_is_its_closed_form_and_the_noise_of_what_is_in_nats(known: Done) -> None:
    [arm] = scored(known, {}).candidates
    floor = present(arm.floor)
    assert floor.mean == pytest.approx(0.6 * math.log(0.6 / 0.52) + 0.4 * math.log(0.4 / 0.48), rel=1e-4)
    assert floor.ci is not None
    kl = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    assert arm.axes["kld"].value("mean") == pytest.approx(kl, rel=1e-4)
    assert {metric.noise for metric in arm.axes["kld"].metrics if metric.unit == "nats"} == {floor.mean}
    assert {metric.noise for metric in arm.axes["kld"].metrics if metric.unit != "nats"} == {0.0}


@pytest.mark.parametrize("status", ["failed", "not_supported"])
def test_a_twin_that_fails_leaves_its_reason_and_takes_nothing_down(known: Done, status: str) -> None:
    fields = {"status": status, "reason": "out of memory", "captures": {}, "failures": {"kld": "out of memory"}}
    report = scored(known, fields)
    [arm] = report.candidates
    assert (present(arm.floor).mean, present(arm.floor).reason) == (None, "out of memory")
    [bare] = scored(known, {}, twins=0).candidates
    assert bare.floor is None
    assert (arm.status, arm.axes, arm.verdict) == (bare.status, bare.axes, bare.verdict)


def test_an_engine_without_jitter_says_so(known: Done) -> None:
    experiment = {**known.report["settings"], "twins": 0.25}
    arms = json.loads((known.folder / "outcomes.json").read_text())["arms"]
    results = [ArmResult.from_record(arm, known.folder) for arm in arms]
    floors = [arm.floor for arm in score_run(Experiment.model_validate(experiment), FACTS, results).report.candidates]
    assert [floor and floor.reason for floor in floors] == ["not measured: engine fake has no jitter"] * 2
