"""Rules that one module hands to another: what limits make of a score, whose captures count, who may drop rows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

from fidelab.axes.base import AxisScore
from fidelab.captures.store import Readers
from fidelab.config.schema import Limits
from fidelab.core import Status
from fidelab.core.errors import MismatchError
from fidelab.metrics.equivalence import KL_MARGIN, MARGIN
from fidelab.plan import looks
from fidelab.results.measurement import DECIDING, Measurement, Metric
from fidelab.results.outcomes import ArmResult
from fidelab.scoring import score as scoring
from fidelab.scoring.score import losses_of
from tests.run.harness import compare

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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ArmResult]:
    done = compare(tmp_path_factory.mktemp("handed"), "tilt", windows=4, limit=2, flags=("--axes", "kld,trajectory"))
    assert done.code == 0, done.err
    arms = json.loads((done.folder / "outcomes.json").read_text())["arms"]
    found = [ArmResult.from_record(arm, done.folder) for arm in arms]
    return {one.role: one for one in found}


def candidate(results: dict[str, ArmResult]) -> ArmResult:
    return next(one for role, one in results.items() if role.startswith("candidate:"))


def test_an_arms_own_captures_are_taken(results: dict[str, ArmResult]) -> None:
    for one in results.values():
        one.check_captures()


def test_a_capture_of_another_axis_is_refused_and_named(results: dict[str, ArmResult]) -> None:
    own = candidate(results)
    kld = next(path for axis, path in own.captures.items() if axis.startswith("kld"))
    other = next(axis for axis in own.captures if not axis.startswith("kld"))
    with pytest.raises(MismatchError, match=f"holds axis kld.*, not {other} of {own.role}"):
        replace(own, captures={other: kld}).check_captures()


def test_a_capture_of_another_arm_is_refused_and_named(results: dict[str, ArmResult]) -> None:
    own = candidate(results)
    with pytest.raises(MismatchError, match=f"of exact .*not kld.* of {own.role}"):
        replace(own, captures=results["reference"].captures).check_captures()


def test_a_capture_under_another_key_is_refused(results: dict[str, ArmResult], tmp_path: Path) -> None:
    own = candidate(results)
    axis, path = next(iter(own.captures.items()))
    moved = tmp_path / f"{path.name[:-15]}{'0' * 12}-r0"
    shutil.copytree(path, moved)
    with pytest.raises(MismatchError, match="holds what belongs into"):
        replace(own, captures={axis: moved}).check_captures()


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


# ------------------------------------------------------------------------------------------------- looks


class Plan:
    """What :func:`fidelab.plan.looks.planned` asks of a prepared run."""

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
