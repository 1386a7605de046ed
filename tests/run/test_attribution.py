"""Format loss told from kernel loss: three KLs over references of their own, on the same rows."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from fidelab.config.schema import Experiment
from fidelab.report.html import render_html
from fidelab.report.text import render_text
from fidelab.results.compare import compare
from fidelab.results.outcomes import ArmResult, RunFacts
from fidelab.results.record import Report
from fidelab.scoring.score import score_run
from tests.present import present
from tests.run.harness import Done, run_fake

FACTS = RunFacts("run", "2026-01-01T00:00:00Z", "fidelab compare", {})


def kl(q: float) -> float:
    """KL of the two-level family's reference (p = 0.5) from tilt[q]."""
    return 0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    candidates, axes = ["tilt[q=0.6]", "tilt[q=0.52]", "decay[b=0.6]"], {"kld": {"windows": 40, "n_ctx": 16}}
    room = tmp_path_factory.mktemp("attribution")
    return run_fake(room, axes, candidates, control="tilt[q=0.55]", floor=0.0, keep_rows=True)


def relabelled(done: Done, roles: dict[str, str], **changed: dict[str, Any]) -> Report:
    """The run's captures scored again, some of them under the roles of diagnostic arms.

    ``changed``: fields of the arm and of what ran, in the arms whose roles begin so.
    """
    record = json.loads((done.folder / "outcomes.json").read_text())
    by_role = {arm["role"]: arm for arm in record["arms"]}
    arms: list[dict[str, Any]] = [by_role[role] for role in ("reference", "control", "candidate:tilt[q=0.6]")]
    arms += [{**by_role[source], "role": role} for role, source in roles.items()]
    for index, arm in enumerate(arms):
        for role, fields in changed.items():
            if arm["role"].startswith(role):
                arms[index] = {
                    **arm,
                    "arm": {**arm["arm"], **{name: fields[name] for name in fields.keys() & arm["arm"].keys()}},
                    "ran": {**arm["ran"], **{name: fields[name] for name in fields.keys() & arm["ran"].keys()}},
                }
    experiment = Experiment.model_validate(json.loads((done.folder / "report.json").read_text())["settings"])
    return score_run(experiment, FACTS, [ArmResult.from_record(arm, done.folder) for arm in arms]).report


def part_means(report: Report) -> tuple[float | None, float | None, float | None]:
    """Mean KL of the one attribution's three parts: here, of the kernel alone, of the format alone."""
    [found] = report.attribution
    assert found.format is not None
    return present(found.here).mean, present(found.kernel).mean, found.format.mean


def test_each_part_is_the_kl_over_its_own_reference(done: Done) -> None:
    report = relabelled(done, {"exact": "candidate:tilt[q=0.52]", "exact:tilt[q=0.6]": "reference"})
    here, kernel, form = part_means(report)
    assert here == pytest.approx(kl(0.6), rel=1e-5)
    assert kernel == pytest.approx(kl(0.55), rel=1e-5)
    # the two-level reference seen from tilt[q=0.52]: KL(0.52 ‖ 0.5)
    assert form == pytest.approx(0.52 * math.log(0.52 / 0.5) + 0.48 * math.log(0.48 / 0.5), rel=1e-4)


def test_the_differences_are_paired_and_carry_intervals(done: Done) -> None:
    report = relabelled(done, {"exact": "reference", "exact:tilt[q=0.6]": "candidate:tilt[q=0.52]"})
    [found] = report.attribution
    assert found.here_minus_kernel is not None
    assert found.here_minus_kernel.mean == pytest.approx(kl(0.6) - kl(0.55), rel=1e-4)
    assert present(found.here_minus_format).mean == pytest.approx(kl(0.6) - kl(0.52), rel=1e-4)
    assert present(found.format_minus_kernel).mean == pytest.approx(kl(0.52) - kl(0.55), rel=1e-4)
    assert found.here_minus_kernel.ci is not None
    low, high = found.here_minus_kernel.ci
    assert low <= found.here_minus_kernel.mean <= high


def test_the_truth_is_measured_over_the_reference(done: Done) -> None:
    report = relabelled(done, {"truth": "candidate:tilt[q=0.52]"})
    assert present(report.truth).axes["kld"].value("mean") == pytest.approx(kl(0.52), rel=1e-4)
    [found] = report.attribution
    assert found.format is None
    assert found.here_minus_format is None


def test_an_arm_with_native_queries_is_measured_over_the_reference(done: Done) -> None:
    report = relabelled(done, {"queries:tilt[q=0.6]": "candidate:tilt[q=0.52]"})
    [found] = report.attribution
    assert present(found.native_queries).mean == pytest.approx(kl(0.52), rel=1e-4)
    assert present(found.here_minus_native_queries).mean == pytest.approx(kl(0.6) - kl(0.52), rel=1e-4)
    assert [arm.name for arm in report.candidates] == ["tilt[q=0.6]"]
    out = io.StringIO()
    render_text(report, Console(file=out, width=160), details=True)
    assert "16-bit queries" in out.getvalue()


def test_witnesses_are_no_candidates(done: Done) -> None:
    report = relabelled(done, {"exact": "reference", "exact:tilt[q=0.6]": "candidate:tilt[q=0.52]"})
    assert [arm.name for arm in report.candidates] == ["tilt[q=0.6]"]


def test_a_run_without_witnesses_attributes_nothing(done: Done) -> None:
    assert done.report["attribution"] == []
    assert "kernel loss" not in done.out


def test_the_page_and_the_terminal_show_the_three_and_their_differences(done: Done) -> None:
    report = relabelled(done, {"exact": "reference", "exact:tilt[q=0.6]": "candidate:tilt[q=0.52]", "truth": "control"})
    page = render_html(report)
    assert "not additive" in page
    assert "32-bit twin of the reference (tilt[q=0.55]): 0.00503" in page
    out = io.StringIO()
    render_text(report, Console(file=out, width=120), details=True)
    for word in ("format and", "kernel alone", "not additive", "32-bit twin"):
        assert word in out.getvalue()


PATHS: dict[str, dict[str, Any]] = {
    "reference": {"engine": "hf", "attention": "sdpa"},
    "control": {"engine": "hf", "attention": "sdpa"},
    "control:": {"engine": "hf", "attention": "eager", "options": {"attention": "eager"}},
    "candidate": {"engine": "hf", "attention": "eager", "options": {"attention": "eager"}},
}


def test_an_excess_is_over_the_control_that_took_the_same_kernel_path(done: Done) -> None:
    report = relabelled(done, {"control:eager": "candidate:tilt[q=0.52]"}, **PATHS)
    [arm] = report.candidates
    assert arm.axes["kld"].value("over_control") == pytest.approx(kl(0.6) - kl(0.52), rel=1e-4)
    assert (arm.control, [control.name for control in report.controls]) == ("tilt[q=0.52]", ["tilt[q=0.52]"])
    assert present(report.control).name == "tilt[q=0.55]"
    assert not any("attention" in fact for fact in present(arm.verdict).because)


def test_the_kernel_part_is_the_control_of_the_same_kernel_path(done: Done) -> None:
    roles = {"control:eager": "candidate:tilt[q=0.52]", "exact": "reference"}
    [found] = relabelled(done, roles, **PATHS).attribution
    assert present(found.kernel).mean == pytest.approx(kl(0.52), rel=1e-5)


def test_a_candidate_that_ran_another_kernel_without_a_control_says_so(done: Done) -> None:
    ran = {"reference": {"engine": "hf", "attention": "fidelab"}, "control": {"engine": "hf", "attention": "fidelab"}}
    report = relabelled(done, {}, **ran, candidate={"engine": "hf", "attention": "sdpa"})
    [arm] = report.candidates
    assert "attention is sdpa here and fidelab in the reference" in present(arm.verdict).because[-1]


def test_an_excess_over_another_control_is_not_compared_with_one_over_the_run_s(done: Done) -> None:
    there = relabelled(done, {"control:eager": "candidate:tilt[q=0.52]"}, **PATHS)
    here = relabelled(done, {}, **PATHS)
    refused = {refusal.field: (refusal.baseline, refusal.now) for refusal in compare(here, there).refused}
    assert refused["control.kv"][0] != refused["control.kv"][1]
