"""A run's recommendation and certificates: limits on the command line, what is first in every face, refused limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.results.record import Report
from tests.present import present
from tests.run.harness import Done, cli, compare


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    # a reference that predicts the text, and candidates of different cost over many documents
    flags = ("--engine-arg", "family=geometric", "--engine-arg", "predicts=on")
    return compare(tmp_path_factory.mktemp("run"), "decay[b=0.51]", "decay[b=0.7]", windows=24, flags=flags)


def test_the_terminal_begins_with_the_recommendation_of_the_report(run: Done) -> None:
    found = present(Report.from_json(run.folder / "report.json").recommendation)
    head = found.text.partition(": ")[0] if found.arm else found.text
    assert " ".join(run.out.splitlines()[2].split()).startswith(head[:40])  # below the header line


def test_every_candidate_has_a_certificate_with_its_claims(run: Done) -> None:
    for arm in Report.from_json(run.folder / "report.json").candidates:
        claims = arm.certificates["kld"].claims
        assert {claim.key for claim in claims} >= {"mean_kl", "probability_loss"}
        assert all(claim.clusters > 0 for claim in claims)


def test_limits_are_what_the_recommendation_rests_on(run: Done) -> None:
    costs = {
        arm.name: arm.axes["kld"].value("mean") or 0.0
        for arm in Report.from_json(run.folder / "report.json").candidates
    }
    limit = (min(costs.values()) * max(costs.values())) ** 0.5
    done = cli("report", run.folder, "--max-kld", limit, "--max-flips", "100%", "--json", cwd=run.cwd)
    assert done.code == 0, done.err
    found = present(Report.model_validate(json.loads(done.out)).recommendation)
    assert (found.arm, found.kind) == (min(costs, key=lambda name: costs[name]), "safe")  # none of them saves anything
    assert any(f"mean KLD at most {limit:.4g} nats" in line for line in found.evidence)
    reasons = json.loads(done.out)["recommendation"]
    assert max(costs, key=lambda name: costs[name]) in json.dumps(reasons)


def test_a_reference_that_knows_nothing_is_said_first_and_passes_no_gate(tmp_path: Path) -> None:
    done = compare(tmp_path, "tilt[q=0.51]", windows=24)  # both halves of the vocabulary are equally likely
    found = present(Report.from_json(done.folder / "report.json").recommendation)
    assert (found.kind, found.arm) == ("reference", None)
    first = " ".join(" ".join(done.out.splitlines()[2:5]).split())
    assert first.startswith("The reference is unusable: it predicts this text no better than token")
    gate = cli("check", done.folder, "--max-kld", "0.5", cwd=tmp_path)
    assert gate.code == 3
    assert "the reference is unusable" in " ".join(gate.out.split())


def test_a_variable_that_nobody_reads_is_not_recommended_and_passes_no_gate(tmp_path: Path) -> None:
    flags = ("--engine-arg", "family=geometric", "--engine-arg", "predicts=on")
    done = compare(tmp_path, "exact", windows=24, flags=flags)
    found = present(Report.from_json(done.folder / "report.json").recommendation)
    assert found.text == "exact: nothing changed: is it read at all?"
    gate = cli("check", done.folder, "--max-kld", "0.5", cwd=tmp_path)
    assert gate.code == 3
    assert "nothing changed: is it read at all?" in " ".join(gate.out.split())


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-kld", "-1"),
        ("--max-kld", "nan"),
        ("--max-flips", "x"),
        ("--max-flips", "140%"),
        ("--min-saving", "140%"),
        ("--max-accuracy-loss", "140%"),
        ("--max-accuracy-loss", "2%", "--max-flips", "1%"),
        ("--min-tokens-per-s", "0"),
        ("--margin", "0"),
    ],
)
def test_a_limit_that_cannot_be_is_one_line_and_no_run(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = cli("compare", "smollm2-135m", "--kv", "int4", *flags, cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert flags[0].removeprefix("--").replace("-", "_") in done.err.replace("-", "_")
    assert not (tmp_path / "runs").exists()


def test_the_report_knows_what_every_test_covers_and_that_there_was_a_second_run(tmp_path: Path) -> None:
    flags = ("--engine-arg", "family=geometric", "--engine-arg", "predicts=on", "--runs", 2)
    done = compare(tmp_path, "decay[b=0.51]", windows=24, flags=flags)
    assert done.code == 0, done.err
    [path] = (tmp_path / "runs").glob("2*/report.json")
    report = Report.from_json(path)
    assert (report.covers["rniah"], report.covers["benches.decode"]) == ("retrieval", "speed")
    assert "trajectory" not in report.covers
    found = present(report.recommendation)
    assert any(line.startswith("2 runs: KLD ") for line in found.evidence)
    assert "retrieval" in found.untested
