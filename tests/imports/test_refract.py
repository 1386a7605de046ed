"""REFRACT's reports come in recomputed, with nothing invented."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fidelab.core import KVSpec, Status
from fidelab.core.errors import InputError
from fidelab.imports.refract import import_refract
from fidelab.imports.write_run import ImportedArm
from fidelab.metrics.intervals import binomial_interval
from fidelab.results.plots import Curve, Heatmap, TablePlot
from fidelab.results.record import ArmRecord, Report
from tests.imports.sample import (
    DIVERGED,
    DRIFTS,
    PLAD_SCORE,
    TEN,
    cell,
    drift,
    prompt,
    refract_report,
    with_axis,
    write,
)
from tests.present import present
from tests.run.harness import cli, refused

EXAMPLES = Path(__file__).parents[3] / "shared" / "data" / "refract"


def imported(folder: Path, report: Any, **more: Any) -> ImportedArm:
    return import_refract(write(folder, report), folder / "runs", **more)


def candidate(folder: Path, report: Any) -> ArmRecord:
    return imported(folder, report).report.candidates[0]


def compared(arm: ArmRecord) -> dict[str, tuple[Any, ...]]:
    """Figure → (in the file, by REFRACT's definition, by ours, agrees)."""
    panel = arm.axes["refract"].plots[0]
    assert isinstance(panel, TablePlot)
    return {str(name): tuple(rest) for name, *rest in panel.rows}


def test_a_candidate_that_stops_early_scores_62_5_by_their_definition_and_50_by_ours(tmp_path: Path) -> None:
    arm = candidate(tmp_path, refract_report())
    lengths = candidate(tmp_path, with_axis("gtm", per_prompt=[prompt(10, 8, 5)])).axes["trajectory"]
    for axis in (arm.axes["trajectory"], lengths):
        assert (axis.value("score_refract"), axis.value("score")) == (62.5, 50.0)
    assert compared(arm)["trajectory score"] == (62.5, 62.5, 50.0, "yes")
    assert lengths.value("median_first_divergence") == 5.0
    assert lengths.value("positional_agreement") is None  # what matches after the fork is not in the lengths
    axis = candidate(tmp_path, with_axis("gtm", per_prompt=[prompt([1, 2, 3, 4], [1, 2, 9, 4])])).axes["trajectory"]
    assert axis.value("positional_agreement") == 0.75
    assert isinstance(axis.plots[0], Curve)
    assert axis.plots[0].y == (1.0, 1.0, 1.0, 0.0, 0.0)


def test_prompts_are_the_clusters_of_the_trajectory_interval(tmp_path: Path) -> None:
    equal = candidate(tmp_path, with_axis("gtm", per_prompt=[prompt(TEN, TEN)] * 30)).axes["trajectory"]
    single = candidate(tmp_path, refract_report()).axes["trajectory"]
    assert equal.ci("score") == pytest.approx((100 * binomial_interval(30, 30)[0], 100.0))
    assert single.ci("score") is None


def test_a_prompt_without_any_token_is_counted_as_failed(tmp_path: Path) -> None:
    axis = candidate(tmp_path, with_axis("gtm", per_prompt=[prompt(TEN, DIVERGED), prompt([], [])])).axes["trajectory"]
    assert (axis.value("score"), axis.n_items, axis.n_failed) == (50.0, 2, 1)


def test_the_axis_is_found_under_its_new_name_too(tmp_path: Path) -> None:
    report = refract_report(composite_detail={})
    report["axes"]["trajectory"] = report["axes"].pop("gtm")
    axis = candidate(tmp_path, report).axes["trajectory"]
    assert axis.value("score") == 50.0


def test_without_per_prompt_data_no_trajectory_score_is_taken_over(tmp_path: Path) -> None:
    arm = candidate(tmp_path, with_axis("gtm", per_prompt=None))
    axis = arm.axes["trajectory"]
    assert (axis.status, axis.value("score")) == (Status.NOT_MEASURABLE, None)
    assert compared(arm)["trajectory score"] == (62.5, None, None, "")
    assert compared(arm)["composite"][1] is None  # theirs needs all its axes
    assert present(arm.composite).band is None


def test_kld_keeps_what_the_file_has_and_no_more(tmp_path: Path) -> None:
    axis = candidate(tmp_path, refract_report()).axes["kld"]
    assert axis.value("score") == pytest.approx(49.6585, abs=1e-4)
    assert (axis.value("mean"), axis.value("top1"), axis.value("rms_dp")) == (0.7, 0.8, None)
    assert (axis.ci("mean"), axis.ci("score"), axis.n_items) == (None, None, None)
    assert (axis.value("stderr"), axis.value("p99")) == (None, None)


def test_rniah_counts_cells_in_which_the_reference_finds_the_needle(tmp_path: Path) -> None:
    arm = candidate(tmp_path, refract_report())
    stated, again, ours, agrees = compared(arm)["R-NIAH score"]
    assert (stated, again, ours, agrees) == (pytest.approx(200 / 3), pytest.approx(200 / 3), 50.0, "yes")
    panel = arm.axes["rniah"].plots[0]
    assert isinstance(panel, Heatmap)
    assert [grid.values for grid in panel.grids] == [((1, 1, 0),), ((1, 0, 0),), ((0, -1, 0),)]


def test_trials_of_all_informative_cells_bound_the_retrieval_score(tmp_path: Path) -> None:
    cells = [cell(1, 1) | {"n_trials": 3}, cell(1, 1, 8192) | {"n_trials": 3}, cell(0, 0, 16384) | {"n_trials": 3}]
    axis = candidate(tmp_path, with_axis("rniah", cells=cells)).axes["rniah"]
    assert axis.ci("score") == pytest.approx((100 * binomial_interval(6, 6)[0], 100.0))
    unknown = [{key: value for key, value in one.items() if key != "n_trials"} for one in cells]
    assert candidate(tmp_path, with_axis("rniah", cells=unknown)).axes["rniah"].ci("score") is None
    axis = candidate(tmp_path, with_axis("rniah", cells=[cell(0, 0), cell(0, 1, 8192)])).axes["rniah"]
    assert (axis.status, axis.value("score")) == (Status.NOT_MEASURABLE, None)


def test_plad_follows_the_cases_and_shows_the_signed_excess_beside(tmp_path: Path) -> None:
    axis = candidate(tmp_path, refract_report()).axes["plad"]
    assert axis.value("score") == pytest.approx(PLAD_SCORE, abs=1e-4)
    assert axis.value("excess_drift") == pytest.approx(sum(cand - ref for ref, cand in DRIFTS) / 4)
    assert axis.value("sign_test") == pytest.approx(2 * (1 + 4) / 16)  # three of four prompts drift further
    entries = [drift(0.1, 0.3, n // 4, kind) for n, kind in enumerate(("typo", "case", "punct", "paraphrase") * 2)]
    axis = candidate(tmp_path, with_axis("plad", per_prompt=entries)).axes["plad"]
    assert (axis.n_items, axis.value("sign_test")) == (8, 0.5)  # two prompts, both worse
    axis = candidate(tmp_path, with_axis("plad", per_prompt=[drift(0.5, 0.2), drift(math.nan, 0.2)])).axes["plad"]
    assert (axis.n_items, axis.n_failed, axis.value("score")) == (2, 1, 100.0)  # a drift that is not a number


def of_scores(trajectory: float, kld: float, rniah: float, plad: float) -> dict[str, Any]:
    """A report whose data give these scores by both definitions."""
    tokens, excess = 10_000, -math.log(plad / 100) / 5
    report = refract_report(composite_detail={}, composite=None, band=None)
    report["axes"]["gtm"] = {"per_prompt": [prompt(tokens, tokens, round(trajectory * 100))]}
    report["axes"]["kld"] = {"mean_kld": -math.log(kld / 100)}
    report["axes"]["rniah"] = {"cells": [cell(1, rniah / 100)]}
    report["axes"]["plad"] = {"per_prompt": [drift(0, excess)]}
    return report


@pytest.mark.parametrize(
    ("scores", "value", "ours", "refract"),
    [
        ((69.62, 99.75, 100, 96.54), 89.39, "PASS", "PASS"),
        ((67.71, 97.95, 100, 90.77), 86.97, "PASS", "PASS"),
        ((62.40, 96.35, 100, 90.58), 84.31, "DEGRADED", "PASS"),
    ],
)
def test_the_papers_rows_get_their_composite_and_both_bands(
    scores: tuple[float, float, float, float], value: float, ours: str, refract: str, tmp_path: Path
) -> None:
    arm = candidate(tmp_path, of_scores(*scores))
    assert present(arm.composite).value == pytest.approx(value, abs=0.005)
    assert present(arm.composite).band == ours
    lines = compared(arm)
    assert lines["band, fidelab 95/85/70"][1:3] == (ours, ours)
    assert lines["band, refract 90/80/60"][1:3] == (refract, refract)


@pytest.mark.parametrize(("mean", "at_best"), [(0.0001, None), (0.02, "PASS"), (0.0999, "DEGRADED"), (2.0, "FAIL")])
def test_a_mean_kl_without_an_interval_gives_no_verdict_however_good_and_fails_where_large(
    mean: float, at_best: str | None, tmp_path: Path
) -> None:
    verdict = present(candidate(tmp_path, with_axis("kld", mean_kld=mean)).verdict)
    if at_best == "FAIL":
        assert (verdict.band, "KLD 2.00 (no interval)" in verdict.sentence) == ("FAIL", True)
        return
    assert (verdict.band, verdict.at_best) == (None, at_best)
    best = f", at best {at_best}" if at_best else ""
    assert verdict.sentence.startswith(f"no verdict{best}: the file holds a mean KL")


@pytest.mark.parametrize(
    ("mean", "band"), [(0.0099, "EXCELLENT"), (0.01, "PASS"), (0.051, "DEGRADED"), (0.099, "DEGRADED"), (0.101, "FAIL")]
)
def test_chunks_give_an_interval_and_its_upper_end_the_verdict(mean: float, band: str, tmp_path: Path) -> None:
    arm = candidate(tmp_path, with_axis("kld", mean_kld=mean, per_chunk=[mean] * 40))
    assert arm.axes["kld"].ci("mean") == pytest.approx((mean, mean))
    assert present(arm.verdict).band == band


def test_chunks_count_by_their_positions(tmp_path: Path) -> None:
    chunks = [{"mean_kld": 0.1, "n_positions": 1}, {"mean_kld": 0.3, "n_positions": 3}] * 4
    axis = candidate(tmp_path, with_axis("kld", mean_kld=0.25, per_chunk=chunks)).axes["kld"]
    assert axis.ci("mean") == pytest.approx((0.25, 0.25))  # without the weights the chunks would contradict the mean
    assert axis.facts["n_clusters"] == 4  # blocks of two adjacent chunks, each alike


def test_chunks_that_contradict_the_mean_make_no_interval(tmp_path: Path) -> None:
    result = imported(tmp_path, with_axis("kld", mean_kld=0.7, per_chunk=[0.1] * 40))
    assert result.report.candidates[0].axes["kld"].ci("mean") is None
    assert any("no interval" in note for note in result.notes)


def test_top_k_backends_give_no_kld_no_band_and_no_verdict(tmp_path: Path) -> None:
    for backend in ("vllm", "sglang"):
        arm = candidate(tmp_path, refract_report(environment={"backend": backend}))
        assert (arm.axes["kld"].status, arm.axes["kld"].value("mean")) == (Status.NOT_MEASURABLE, None)
        assert present(arm.composite).band is None
        assert present(arm.verdict).band is None
        assert "full vocabulary" in present(arm.verdict).sentence


def test_a_skipped_axis_is_not_measured_and_leaves_no_band(tmp_path: Path) -> None:
    report = refract_report()
    report["composite_detail"]["gtm_score"] = None
    result = imported(tmp_path, report)
    arm = result.report.candidates[0]
    assert "trajectory" not in arm.axes
    assert present(arm.composite).band is None
    assert any(note.startswith("not measured: trajectory") for note in result.notes)


def test_a_score_that_its_own_data_do_not_give_is_named(tmp_path: Path) -> None:
    report = refract_report(composite=91.0, band="EXCELLENT")
    report["composite_detail"]["gtm_score"] = 99.0
    result = imported(tmp_path, report)
    assert "trajectory score: the file says 99, its own data give 62.5" in result.notes
    assert any(note.startswith("composite: the file says 91") for note in result.notes)
    assert "band, refract 90/80/60: the file says EXCELLENT, its own data give FAIL" in result.notes
    assert imported(tmp_path, refract_report()).notes == (
        "1 NaN or infinite value in the file (not valid JSON) read as absent",
    )


def test_lengths_beside_token_ids_must_be_theirs(tmp_path: Path) -> None:
    lying = prompt(TEN, DIVERGED, 9, id="fact-7")
    assert any("fact-7" in note for note in imported(tmp_path, with_axis("gtm", per_prompt=[lying])).notes)


def test_the_report_says_what_it_was_imported_from(tmp_path: Path) -> None:
    result = imported(tmp_path, refract_report())
    facts = result.report.environment["imported"]
    assert (facts["file"], facts["schema"], facts["REFRACT"]) == ("report.json", "refract.report.v0.3.1", "0.3.2")
    assert (facts["model"], facts["backend"]) == ("tiny.gguf", "llamacpp")
    assert (facts["reference"], facts["candidate"]) == ("ctk=f16,ctv=f16", "ctk=q8_0,ctv=q4_0")
    assert len(facts["sha256"]) == 64
    arm = result.report.candidates[0]
    assert (arm.name, arm.kv) == ("q8_0/q4_0", KVSpec.parse("q8_0/q4_0"))
    assert (arm.engine, arm.model) == ("llamacpp", "tiny.gguf")


def test_nan_and_infinities_are_read_as_absent_and_counted(tmp_path: Path) -> None:
    text = json.dumps(refract_report(extras={"a": math.inf, "b": -math.inf})).replace('"diagnosis"', '"c": 1e999, "d"')
    (tmp_path / "report.json").write_text(text)
    result = import_refract(tmp_path / "report.json", tmp_path / "runs")
    assert "4 NaN or infinite values in the file (not valid JSON) read as absent" in result.notes
    assert Report.from_json(result.folder / "report.json") == result.report  # which takes strict JSON alone


def test_what_comes_in_is_a_run_that_the_report_command_shows(tmp_path: Path) -> None:
    done = cli("import", "refract", write(tmp_path, refract_report()), cwd=tmp_path)
    assert done.code == 0
    cost = " 0.700 "
    for shown in ("trajectory score", "62.5000", "50.0000", "90/80/60", "95/85/70", cost):
        assert shown in done.out
    again = cli("report", done.folder, "--json", cwd=tmp_path)
    assert again.code == 0
    assert json.loads(again.out) == done.report
    assert Report.from_json(done.folder / "report.json").candidates[0].name == "q8_0/q4_0"


def test_a_lone_surrogate_does_not_stop_the_import(tmp_path: Path) -> None:
    report = refract_report(model="broken \ud800 name")
    assert candidate(tmp_path, report).model == "broken ? name"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (refract_report(schema="refract.report.v0.1.3"), "'refract.report.v0.1.3'; read are refract.report.v0.2.*"),
        (refract_report(schema="refract.report.v0.31"), "'refract.report.v0.31'; read are"),
        (refract_report(schema=None), "names no schema"),
        ([1, 2], "names no schema"),
        (refract_report(axes={}), "has no test"),
        (refract_report(axes=None), "has no test"),
        (refract_report(axes={"other": {}}), "has no measured test"),
        (with_axis("gtm", per_prompt={"a": 1}), "axes.gtm.per_prompt: expected a list, found {'a': 1}"),
        (with_axis("gtm", per_prompt=[prompt([1], ["x"])]), "per_prompt[0].cand_token_ids: expected a list of token"),  # type: ignore[list-item]
        (with_axis("gtm", per_prompt=[prompt(4, 3, 4)]), "prefix_agreement_length: expected at most 3"),
        (with_axis("gtm", per_prompt=[prompt(10**12, 10**12, 3)]), "ref_length: expected a whole number"),
        (with_axis("kld", mean_kld=-0.1), "axes.kld.mean_kld: expected a number in 0 … inf, found -0.1"),
        (with_axis("kld", mean_kld="0.1"), "axes.kld.mean_kld: expected a number"),
        (with_axis("rniah", cells=[cell(1, 1.5)]), "axes.rniah.cells[0].cand_acc: expected a number in 0 … 1"),
        (refract_report(model=["x"]), "model: expected a text"),
    ],
)
def test_bad_input_is_one_line_that_names_the_place(report: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        imported(tmp_path, report)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1, column 1"),
        (b'{"schema": ', "line 1"),
        (b"\xff\xfe{}", "not UTF-8 text (byte 0)"),
        (b"[" * 100_000, "report.json: "),
        (b'{"a": ' + b"9" * 5000 + b"}", "report.json: "),
        (None, "report.json: cannot read the report"),
    ],
)
def test_what_is_not_json_is_refused_in_one_line(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content)
    assert said in refused(cli("import", "refract", "report.json", cwd=tmp_path))


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="REFRACT's example reports are not beside this checkout")
@pytest.mark.parametrize(
    "name", ["catastrophic-symturbo", "clean-q8q8-mistral24b", "degraded-qwen7b", "distribution-broken-gemma26b"]
)
def test_their_definitions_give_their_numbers_on_their_own_examples(name: str, tmp_path: Path) -> None:
    result = import_refract(EXAMPLES / f"{name}.json", tmp_path)
    lines = compared(result.report.candidates[0])
    assert len(lines) >= 11
    for figure, (stated, again, _, agrees) in lines.items():
        assert agrees == "yes", figure
        assert stated == (again if isinstance(again, str) else pytest.approx(again, rel=1e-9))
    theirs = json.loads((EXAMPLES / f"{name}.json").read_text())
    assert lines["composite"][1] == pytest.approx(theirs["composite"], rel=1e-9)
    assert lines["trajectory score"][1] == pytest.approx(theirs["axes"]["gtm"]["score"], rel=1e-9)
