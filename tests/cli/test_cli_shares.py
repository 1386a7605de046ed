"""Shares on the command line, in files and in policies: one message, and the limits of one reader stay theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from fidelab.config.schema import Limits
from fidelab.core.share import LIMIT, Increase, Share, ShareBounds, WholeShare
from fidelab.results.check import Rule
from fidelab.results.diff_record import Thresholds
from tests.cli.test_cli_check import write_runs
from tests.run.harness import Done, cli, compare, refused

LIMITS = ("--max-flips", "--max-accuracy-loss", "--min-saving", "--margin")
BAD = {
    "1": "1 is not a share: write 1% or 0.01",
    "97": "97 is not a share: write 97% or 0.97",
    "1.5": "1.5 is not a share: write 1.5% or 0.015",
    "250": "250 is not a share: write 1% or 0.01",
    "-0.1": "-0.1 is not a share: write 1% or 0.01",
    "-1%": "-1% is not a share: write 1% or 0.01",
    "nan": "'nan' is not a share: write 1% or 0.01",
    "nan%": "'nan%' is not a share: write 1% or 0.01",
    "inf": "'inf' is not a share: write 1% or 0.01",
    "140%": "140% is not a share up to 100%: write 1% or 0.01",
    "much": "'much' is not a share: write 1% or 0.01",
    "": "'' is not a share: write 1% or 0.01",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return compare(tmp_path_factory.mktemp("shares"), "tilt[q=0.6]", windows=8, limit=2)


@pytest.mark.parametrize("flag", LIMITS)
@pytest.mark.parametrize(("text", "said"), BAD.items())
def test_every_limit_refuses_what_is_not_a_share_in_the_same_words(
    flag: str, text: str, said: str, tmp_path: Path
) -> None:
    line = refused(cli("compare", "fake", "--kv", "int4", f"{flag}={text}", cwd=tmp_path))
    assert line.endswith(f"{flag.removeprefix('--').replace('-', '_')}: {said}"), line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", LIMITS[:3])
def test_a_report_is_not_answered_under_a_limit_of_a_bare_1(flag: str, run: Done) -> None:
    before = files(run)
    assert "1 is not a share: write 1% or 0.01" in refused(cli("report", run.folder, flag, 1, cwd=run.cwd))
    assert files(run) == before


@pytest.mark.parametrize(("text", "said"), BAD.items())
def test_the_share_of_equal_tokens_is_refused_in_the_same_words(text: str, said: str, tmp_path: Path) -> None:
    write_runs(tmp_path)
    line = refused(cli("check", "runs/before", f"--min-same-top={text}", cwd=tmp_path))
    assert line == f"fidelab: --min-same-top: {said}"


def test_all_equal_tokens_can_be_asked_for_as_100_percent(tmp_path: Path) -> None:
    write_runs(tmp_path)
    done = cli("check", "runs/before", "--min-same-top", "100%", cwd=tmp_path)
    assert (done.code in (1, 3), done.err) == (True, "")
    assert "min 100%" in done.out


@pytest.mark.parametrize("limit", [1, 97, -0.1, "-1%", "140%"])
@pytest.mark.parametrize("side", ["min", "max"])
def test_a_rule_of_a_policy_refuses_it_for_metrics_that_are_shares(limit: Any, side: str, tmp_path: Path) -> None:
    write_runs(tmp_path)
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"rules": [{"metric": "kld.top1", side: limit}]}))
    line = refused(cli("check", "runs/before", "--policy", "policy.yaml", cwd=tmp_path))
    assert line.startswith(f"fidelab: kld.top1: {limit} is not a share")


@pytest.mark.parametrize("limit", [".nan", ".inf", "nan%", "much", "true"])
def test_a_limit_of_a_policy_is_a_number_or_a_percentage(limit: str, tmp_path: Path) -> None:
    write_runs(tmp_path)
    (tmp_path / "policy.yaml").write_text(f"rules: [{{metric: kld.top1, min: {limit}}}]")
    assert "policy.yaml: rules.0.min" in refused(cli("check", "runs/before", "--policy", "policy.yaml", cwd=tmp_path))


@pytest.mark.parametrize("name", ["slowdown", "memory_increase", "kld_increase"])
def test_an_allowance_may_be_0_or_beyond_100_percent_and_not_a_bare_1(name: str, tmp_path: Path) -> None:
    for text, share in (("0%", 0), (0, 0), ("150%", 1.5), (0.2, 0.2)):
        assert getattr(Thresholds.model_validate({name: text}), name) == share
    write_runs(tmp_path)
    for text in (1, 10, -0.1, "x"):
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"baseline": {name: text}}))
        words = ("check", "runs/again", "--baseline", "runs/before", "--policy", "policy.yaml")
        line = refused(cli(*words, cwd=tmp_path))
        assert f"policy.yaml: baseline.{name}: " in line
        assert " is not a share: write " in line


def test_points_and_other_units_are_no_shares() -> None:
    assert Rule(metric="kld.score", min=97).limits("points")[0] == 97
    assert Rule(metric="kld.score", min="97%").limits("points")[0] == 97
    assert Rule(metric="benches.decode.isolated", min=40).limits("tok/s")[0] == 40
    assert Rule(metric="trajectory.over_control", min=-0.02).limits("share")[0] == -0.02


def test_what_is_parsed_is_written_so_that_it_reads_as_the_same() -> None:
    class Shares(BaseModel):
        some: Share = 0.5
        whole: WholeShare = 0.5
        rise: Increase = 0.5

    found = Shares.model_validate({"some": "1%", "whole": "100%", "rise": "150%"})
    assert (found.some, found.whole, found.rise) == (0.01, 1.0, 1.5)
    assert Shares.model_validate_json(found.model_dump_json()) == found
    assert Shares.model_validate_json(Shares(rise="110%").model_dump_json()).rise == 1.1  # type: ignore[arg-type]
    limits = Limits.model_validate({"max_flips": "100%", "margin": "0.5%"})
    assert Limits.model_validate(limits.model_dump(mode="json")) == limits
    with pytest.raises(ValidationError, match="True is not a share"):
        Shares.model_validate({"some": True})


def test_the_ends_of_a_range_are_those_that_it_names() -> None:
    ends = ("0%", "100%")
    for bounds, allowed in ((ShareBounds(), ()), (ShareBounds(whole=True), ("100%",)), (LIMIT, ends)):
        for text in ends:
            if text in allowed:
                assert bounds.parse(text) == float(text.removesuffix("%")) / 100
            else:
                with pytest.raises(ValueError, match=rf"{text} is not a share (above 0%|below 100%): write 1% or 0.01"):
                    bounds.parse(text)


# ------------------------------------------------------------------------------------------- limits of one reader


def files(run: Done) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.folder.glob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-kld", 0.5),
        ("--max-flips", "100%"),
        ("--max-accuracy-loss", "50%"),
        ("--min-saving", "1%"),
        ("--min-tokens-per-s", 1),
        ("--max-kld", 0.5, "--json"),
        ("--max-kld", 0.5, "--markdown"),
    ],
)
def test_limits_of_a_reader_print_an_answer_and_write_nothing(flags: tuple[object, ...], run: Done) -> None:
    before = files(run)
    run.folder.joinpath("report.html").write_bytes(before["report.html"])
    done = cli("report", run.folder, *flags, cwd=run.cwd)
    assert (done.code, bool(done.out)) == (0, True)
    assert files(run) == before


def test_without_limits_the_page_is_written_from_the_report(run: Done) -> None:
    before = files(run)
    run.folder.joinpath("report.html").write_text("another page")
    assert cli("report", run.folder, cwd=run.cwd).code == 0
    assert files(run) == before


@pytest.mark.parametrize("flag", ["--max-kld", "--max-flips", "--max-accuracy-loss", "--min-saving"])
def test_scores_are_not_computed_again_under_the_limits_of_a_reader(flag: str, run: Done) -> None:
    before = files(run)
    line = refused(cli("report", run.folder, "--rescore", flag, "0.5", "--margin", "1%", cwd=run.cwd))
    assert line == f"fidelab: --rescore writes the run's report with the run's own limits: leave out {flag}"
    assert files(run) == before


def test_a_margin_is_for_all_readers_and_page_and_report_agree(run: Done) -> None:
    assert cli("report", run.folder, "--rescore", "--margin", "2%", cwd=run.cwd).code == 0
    assert run.report["settings"]["limits"]["margin"] == 0.02
    after = files(run)
    run.folder.joinpath("report.html").write_text("another page")
    assert cli("report", run.folder, cwd=run.cwd).code == 0
    assert files(run) == after


def test_the_limits_of_a_run_are_kept_when_it_is_scored_again(tmp_path: Path) -> None:
    flags = ("--max-kld", 0.5, "--max-flips", "100%")
    done = compare(tmp_path, "tilt[q=0.6]", windows=8, limit=2, flags=flags)
    limits = done.report["recommendation"]["limits"]
    assert limits == {"max_kld": 0.5, "max_flips": 1.0}
    assert cli("report", done.folder, "--rescore", cwd=tmp_path).code == 0
    assert done.report["recommendation"]["limits"] == limits
