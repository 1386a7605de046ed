"""Rules that one module hands to another: what limits make of a score, whose captures count, who may drop rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fidelab.axes.base import AxisScore
from fidelab.captures.store import Readers
from fidelab.config.schema import Limits
from fidelab.core import Arm, KVSpec, Status
from fidelab.metrics.equivalence import KL_MARGIN, MARGIN
from fidelab.plan import looks
from fidelab.plan.benches import benched_roles
from fidelab.results.engagement import engaged, select_runtime_info
from fidelab.results.measurement import DECIDING, Measurement, Metric
from fidelab.results.outcomes import ArmResult
from fidelab.scoring import attribution
from fidelab.scoring import score as scoring
from fidelab.scoring.pairing import ArmScores, Scorer
from fidelab.scoring.score import losses_of
from tests.present import present

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


# ------------------------------------------------------------------------------------------------- controls


def measured(role: str, attention: str | None = None, score: AxisScore | None = None) -> ArmScores:
    """An arm with a KLD, on an attention of engine hf."""
    kv = KVSpec.parse("bf16")
    options = () if attention is None else (("attention", attention),)
    arm = Arm(role, "hf", "m", "m", "w", kv, "float32", "cpu", 1, options)
    result = ArmResult(role, arm, Status.OK)
    return ArmScores(result, Status.OK, None, {} if score is None else {DECIDING: score}, {})


def test_the_control_of_an_arm_is_that_of_its_attention_else_the_runs() -> None:
    arms = {
        "control": measured("control"),
        "control:sdpa": measured("control:sdpa", "sdpa"),
        "control:eager": measured("control:eager", "eager"),
    }

    def role_of(arm: ArmScores) -> str | None:
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


@pytest.mark.parametrize("side", ["arm", "reference"])
@pytest.mark.parametrize(("equal", "refuted"), [(66, False), (130, True)])
def test_rows_that_read_only_tokens_kept_exact_on_either_side_refute_no_format(
    side: str, equal: int, refuted: bool
) -> None:
    """Of windows of 256 tokens the first rows equal the reference's: as many as 64 exact tokens allow, or more."""
    sinks, none = (KVSpec.parse(text) for text in ("int4[sinks=64]", "int8"))
    of_arm, of_reference = (sinks, none) if side == "arm" else (none, sinks)
    arm, reference = (
        ArmResult(role, Arm(role, "hf", "m", "m", "w", kv, "float32", "cpu", 1), Status.OK)
        for role, kv in (("candidate:a", of_arm), ("reference", of_reference))
    )
    position = np.tile(np.arange(256), 2)
    kl = np.where(position < equal, 0.0, 0.01)
    columns = {"kl": kl, "position": position, "window": np.repeat([0, 1], 256), "n_ctx": np.full(512, 256)}
    ones = np.ones(512)
    whole = AxisScore(kl, ones, columns["window"], ones > 0, positions=columns)
    scorer = mock.Mock(axes={DECIDING: mock.Mock(distributions=True)}, by_role={"reference": reference})
    scorer._role = "reference"
    assert (Scorer._unmoved(scorer, arm, {DECIDING: whole}) is not None) is refuted


def test_benches_measure_the_arms_whose_format_ran() -> None:
    good, bad = ran(), replace(ran(v_format="bf16"), role="candidate:b")
    control, noise = replace(good, role="control"), replace(good, role="floor")
    assert benched_roles([good, bad, control, noise]) == [good, control]


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
