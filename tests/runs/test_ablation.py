"""an ablation from the command line to the report's faces, with faults planted in the fake engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fidelab.api import compare
from fidelab.inputs.texts import load_text
from fidelab.models import Model
from fidelab.report.html import render_html
from fidelab.report.markdown import render_markdown
from fidelab.results.record import Report
from fidelab.runs.conduct import rescore
from tests.runs.harness import SMALL, Done, axis_of, cli, write_inputs

SIZES = ("--windows", 40, "--n-ctx", 16, "--control", "none")

EXACT = ({"attention": "sdpa", "kv": "bf16"}, {"attention": "eager", "kv": "bf16"})


def kl(log_odds: float) -> float:
    """KL of the two-level family's reference (p = 0.5) from log-odds of its first half."""
    q = 1 / (1 + math.exp(-log_odds))
    return 0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q))


def vary(cwd: Path, *levels: str, axes: str = "kld", flags: tuple[object, ...] = (), code: int = 0) -> Done:
    write_inputs(cwd)
    words = [word for level in levels for word in ("--vary", level)]
    done = cli("compare", "fake", *SMALL, *SIZES, "--axes", axes, *words, *flags, cwd=cwd)
    assert done.code == code, done.err
    return done


def outcome(done: Done, name: str = "kld") -> dict[str, Any]:
    return next(dict(found) for found in done.report["ablation"]["outcomes"] if found["name"] == name)


def effect(done: Done, factor: str, name: str = "kld") -> dict[str, Any]:
    return next(dict(found) for found in outcome(done, name)["effects"] if found["factor"] == factor)


@pytest.fixture(scope="module")
def main_effect(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The format costs something, the margin of generated tokens nothing."""
    return vary(tmp_path_factory.mktemp("main"), "margin=1.0,1.2", "kv=exact,tilt[q=0.6]")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A path that bends distributions of one format, which alone costs nothing."""
    return vary(tmp_path_factory.mktemp("pair"), "bend=0,fork:0.5", "kv=exact,fork,refused")


def test_a_main_effect_is_told_in_nats_and_the_other_factor_is_cleared(main_effect: Done) -> None:
    kv = effect(main_effect, "kv")
    assert (kv["reach"], kv["mean"]["low"], kv["mean"]["high"]) == ("everywhere", "exact", "tilt[q=0.6]")
    assert kv["mean"]["mean"] == pytest.approx(kl(math.log(1.5)), rel=1e-5)
    assert effect(main_effect, "margin")["reach"] == "none"
    said = outcome(main_effect)["sentence"]
    assert said.startswith("kv moves KLD: exact → tilt[q=0.6] +0.0204 nats (95%: +0.0204 to +0.0204), everywhere")
    assert "margin does not: at most 0" in said


def test_a_fault_of_two_levels_together_is_named_as_the_pair(pair: Done) -> None:
    bend, kv = effect(pair, "bend"), effect(pair, "kv")
    assert (bend["reach"], bend["only"]) == ("some", {"kv": ["fork"]})
    assert (kv["reach"], kv["only"]) == ("some", {"bend": ["fork:0.5"]})
    assert outcome(pair)["sentence"].startswith("bend=fork:0.5 with kv=fork moves KLD: +0.0309 nats")
    assert "none of them alone" in outcome(pair)["sentence"]
    assert kl(0.5) == pytest.approx(0.0309, abs=5e-5)


def test_cells_that_the_engine_refuses_stay_in_the_grid_with_their_reason(pair: Done) -> None:
    cells = {cell["arm"]: cell for cell in outcome(pair)["cells"]}
    assert len(cells) == 6
    refused = cells["bend=0, kv=refused"]
    assert refused["value"] is None
    assert "refuses this format" in refused["reason"]
    assert pair.arm("bend=0, kv=refused")["status"] == "not_supported"


def test_the_cell_that_is_the_reference_is_the_zero(main_effect: Done, tmp_path: Path) -> None:
    done = vary(tmp_path, "kv=exact,tilt[q=0.6]")
    [zero, _] = outcome(done)["cells"]
    assert (zero["arm"], zero["value"]) == ("kv=exact", 0.0)
    assert done.arm("kv=exact")["status"] == "identical"
    assert {cell["value"] for cell in outcome(main_effect)["cells"][::2]} == {0.0}


def test_the_terminal_shows_the_grid_and_the_sentence(main_effect: Done) -> None:
    assert "Ablation: mean KLD, nats" in main_effect.out
    lines = [" ".join(line.split()) for line in main_effect.out.splitlines()]
    assert "margin, kv → exact tilt[q=0.6]" in lines
    assert "1.0 0 0.0204" in lines
    assert "kv moves KLD: exact → tilt[q=0.6] +0.0204 nats" in main_effect.out


def test_page_and_card_show_the_same(main_effect: Done) -> None:
    report = Report.from_json(main_effect.folder / "report.json")
    page, card = render_html(report), render_markdown(report)
    for text in (page, card):
        assert "Ablation: mean KLD, nats" in text
        assert "margin does not: at most 0" in text
    assert 'id="ablation"' in page
    assert "| margin, kv → | exact | tilt\\[q=0.6\\] |" in card


def test_rescoring_gives_the_same_matrix(pair: Done) -> None:
    before = Report.from_json(pair.folder / "report.json").ablation
    report, _ = rescore(pair.folder)
    assert before is not None
    assert report.ablation == before


def test_a_run_without_a_grid_has_no_matrix(tmp_path: Path) -> None:
    done = vary(tmp_path, flags=("--kv", "tilt"))
    assert done.report["ablation"] is None
    assert "Ablation" not in done.out


def test_three_factors_are_listed_cell_by_cell(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "mask=off,on", "kv=exact,tilt", flags=("--windows", 8))
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "margin mask kv KLD" in lines
    assert len(outcome(done)["cells"]) == 8


def test_ordinary_candidates_run_beside_the_grid_and_stay_out_of_it(tmp_path: Path) -> None:
    done = vary(tmp_path, "kv=exact,tilt", flags=("--kv", "decay"))
    assert [arm["name"] for arm in done.report["candidates"]] == ["decay", "kv=exact", "kv=tilt"]
    assert [cell["arm"] for cell in outcome(done)["cells"]] == ["kv=exact", "kv=tilt"]


def test_the_onset_of_degeneration_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    """Clean answers of 200 tokens; one format leaves them at token 100 for three tokens without end."""
    prose = load_text("default").content.encode("ascii", "ignore").decode()
    answers = [(f"prompt {i}", prose[i * 3000 : i * 3000 + 200]) for i in range(8)]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    flags = ("--engine-arg", f"answers={tmp_path / 'answers.json'}", "--set", "axes.degeneration.n_predict=400")
    done = vary(tmp_path, "margin=1,2", "kv=exact,fork[at=100]", axes="kld,degeneration", flags=flags)
    cells = {cell["arm"]: cell["value"] for cell in outcome(done, "degeneration")["cells"]}
    lost = cells["margin=1, kv=fork[at=100]"]
    assert cells["margin=1, kv=exact"] == cells["margin=2, kv=exact"] == 0
    assert lost == pytest.approx(300, abs=2)
    kv = effect(done, "kv", "degeneration")
    assert (kv["reach"], kv["mean"]["mean"]) == ("everywhere", pytest.approx(lost))
    said = outcome(done, "degeneration")["sentence"]
    assert said.startswith(f"kv moves the onset of degeneration: exact → fork[at=100] {lost:.0f} tokens earlier")
    assert "no factor moves KLD beyond the floor" in outcome(done)["sentence"]


def test_a_cell_of_failed_rows_is_no_zero(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "kv=exact,nan-row[item=0]", flags=("--windows", 8))
    cell = outcome(done)["cells"][1]
    assert cell["value"] is None
    assert "2% of its items failed" in cell["reason"]


def test_a_row_that_failed_in_one_cell_is_left_out_of_all(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "kv=tilt,nan-row[item=0]", flags=("--windows", 120, "--n-ctx", 8))
    assert [axis_of(arm, "kld").n_failed for arm in done.report["candidates"]] == [0, 1, 0, 1]
    assert None not in {cell["value"] for cell in outcome(done)["cells"]}
    assert outcome(done)["n_items"] == done.report["candidates"][0]["axes"]["kld"]["n_items"] - 1


def test_what_the_control_costs_is_below_the_floor(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "kv=exact,tilt[q=0.6]", flags=("--control", "tilt[q=0.7]"))
    assert outcome(done)["floor_from"] == "the control"
    assert outcome(done)["floor"] == pytest.approx(kl(math.log(7 / 3)), rel=1e-5)
    assert effect(done, "kv")["reach"] == "none"


def test_a_failed_reference_leaves_every_cell_without_a_value(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "kv=tilt,decay", flags=("--engine-arg", "crash=exact:0"), code=1)
    assert {cell["value"] for cell in outcome(done)["cells"]} == {None}
    assert all("no answer" in cell["reason"] for cell in outcome(done)["cells"])
    assert outcome(done)["sentence"].startswith("nothing can be said about KLD")


def test_a_dry_run_counts_the_cells_and_runs_none(tmp_path: Path) -> None:
    done = vary(tmp_path, "margin=1,2", "kv=exact,tilt,refused", flags=("--dry-run", "--json"))
    found = json.loads(done.out)
    assert sum(job["role"].startswith("candidate:margin=") for job in found["jobs"]) == 4
    assert len(found["not_supported"]) == 2
    assert not (tmp_path / "runs").exists()


def test_the_grid_can_be_written_in_an_experiment_file(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    experiment = {
        "model": "fake",
        "engine": "fake",
        "reference": "exact",
        "vary": {"kv": ["exact", "tilt"]},
        "axes": {"kld": {"windows": 8, "n_ctx": 16}},
        "text": "text.txt",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(experiment))
    done = cli("run", "run.yaml", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [cell["arm"] for cell in outcome(done)["cells"]] == ["kv=exact", "kv=tilt"]


# ------------------------------------------------------------------------------------------ the real model


@pytest.mark.long
@pytest.mark.model
def test_on_a_real_model_the_format_moves_kld_and_the_attention_does_not(smollm2: Model, tmp_path: Path) -> None:
    """Two exact attentions differ by rounding; four bits of cache cost far more, with either."""
    (tmp_path / "text.txt").write_text(load_text("default").content[:12_000])
    report = compare(
        "smollm2-135m",
        candidates=[],
        vary={"attention": ["sdpa", "eager"], "kv": ["bf16", "int4"]},
        axes={"kld": {"windows": 40, "n_ctx": 32}},  # 13 clusters
        text=str(tmp_path / "text.txt"),
        floor=0.0,
        threads=1,
        output_dir=str(tmp_path / "runs"),
    )
    assert report.ablation is not None
    [kld] = report.ablation.outcomes
    attention, kv = kld.effects
    assert (kv.reach, attention.reach) == ("everywhere", "none")
    assert kv.mean is not None
    assert (kv.mean.low, kv.mean.high) == ("bf16", "int4")
    assert kv.mean.mean > 0.05
    assert kld.sentence.startswith("kv moves KLD: bf16 → int4")
    zero, exact = (next(cell.value for cell in kld.cells if cell.levels == levels) for levels in EXACT)
    assert zero == 0.0
    assert exact is not None
    assert 0 < exact < 2e-3  # what rounding in bfloat16 costs: a replay is allowed 1e-3
