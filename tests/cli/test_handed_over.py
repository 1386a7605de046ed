"""Rules that records hand to commands: which outcomes are failures, and which exit code a decision has."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml

from fidelab.cli.output import exit_on, failures
from fidelab.core import Status
from fidelab.core.errors import UsageError
from fidelab.report.exports import choose_arm
from fidelab.results.decision_record import Recommendation
from fidelab.results.measurement import Flag, Measurement
from fidelab.results.record import ArmRecord, Report
from tests.present import present
from tests.report.sample import MEAN, candidate, sample_report
from tests.results.diff_sample import COMPOSITE
from tests.run.harness import cli


def arm(name: str, mean: float = 0.01, **fields: object) -> ArmRecord:
    """A candidate with a KLD of ±10%."""
    kld = Measurement(
        status=Status.OK, metrics=(MEAN(mean, (0.9 * mean, 1.1 * mean)),), n_clusters=24, cluster="document"
    )
    one = candidate(name, mean, "PASS", 1, "safe", axes={"kld": kld}, composite=COMPOSITE)
    return one.model_copy(update=fields)


def report(*arms: ArmRecord, advised: str | None = None) -> Report:
    advice = None if advised is None else Recommendation(kind="use", arm=advised, text=f"Use {advised}")
    return sample_report(candidates=arms).model_copy(
        update={"recommendation": advice, "reference": arm("bf16"), "control": None}
    )


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("status", "fails"),
    [
        (Status.OK, False),
        (Status.IDENTICAL, False),
        (Status.FAILED, True),
        (Status.NOT_ENGAGED, True),
        (Status.NOT_SUPPORTED, False),
    ],
)
def test_an_arm_that_failed_or_whose_format_did_not_run_fails_the_command(status: Status, fails: bool) -> None:
    found = failures(report(arm("a"), arm("b", status=status, reason="why not")))
    assert found == (["b failed: why not"] if fails else [])


def test_failures_of_the_reference_of_benches_and_lost_items_are_failures_of_the_run() -> None:
    whole = report(arm("a"))
    lost = Measurement(status=Status.OK, flags=(Flag(kind="lost", text="2 items were lost"),))
    slow = Measurement(status=Status.FAILED, reason="it hung")
    faulty = arm("a", benches={"decode": slow}, axes={"trajectory": lost})
    assert failures(report(faulty)) == ["a: decode failed: it hung", "a: 2 items were lost"]
    reference = arm("bf16", status=Status.FAILED, reason="it crashed")
    assert failures(whole.model_copy(update={"reference": reference})) == ["bf16 failed: it crashed"]


@pytest.mark.parametrize(
    ("faults", "undecided", "code"), [([], [], None), (["a"], [], 1), ([], ["b"], 3), (["a"], ["b"], 1)]
)
def test_a_failure_ends_with_1_and_what_is_only_undecided_with_3(
    faults: list[str], undecided: list[str], code: int | None
) -> None:
    if code is None:
        exit_on(faults, undecided)
        return
    with pytest.raises(typer.Exit) as ended:
        exit_on(faults, undecided)
    assert ended.value.exit_code == code


# ------------------------------------------------------------------------------------------------- the gate


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """Two runs: the second is half worse, of one configuration; and one that recommends the second of two."""
    for name, whole in (
        ("before", report(arm("a", 0.010))),
        ("after", report(arm("a", 0.015))),
        ("two", report(arm("a", 0.5), arm("b", 0.001), advised="b")),
    ):
        whole.model_copy(update={"run_id": name}).write(tmp_path / "runs" / name / "report.json")
    return tmp_path


@pytest.mark.parametrize(("limit", "code"), [(0.02, 0), (0.005, 1), (0.010, 3)])
def test_go_is_0_no_go_is_1_and_inconclusive_is_3(room: Path, limit: float, code: int) -> None:
    assert cli("check", "runs/before", "--max-kld", limit, cwd=room).code == code


@pytest.mark.parametrize(("allowed", "code"), [(0.1, 1), (0.9, 0)])
def test_a_policys_allowance_holds_for_the_change_against_the_baseline(room: Path, allowed: float, code: int) -> None:
    (room / "policy.yaml").write_text(yaml.safe_dump({"baseline": {"kld_increase": allowed, "allow_missing": True}}))
    words = ("check", "runs/after", "--policy", "policy.yaml", "--baseline", "runs/before")
    assert cli(*words, cwd=room).code == code


def test_the_recommended_configuration_is_checked_unless_another_is_named(room: Path) -> None:
    words = ("check", "runs/two", "--max-kld", 0.01)
    assert [cli(*words, *more, cwd=room).code for more in ((), ("--configuration", "a"), ("--all",))] == [0, 1, 1]
    two = report(arm("a"), arm("b"), advised="b")
    assert present(choose_arm(two)).name == "b"
    assert choose_arm(two, "a").name == "a"
    assert choose_arm(report(arm("a"))).name == "a"
    with pytest.raises(UsageError, match="no configuration is recommended"):
        choose_arm(report(arm("a"), arm("b")))
