"""``fidelab diagnose layers`` end to end, on tiny models: what it refuses, writes and says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from fidelab.metrics.layers import LayerCurve
from fidelab.models.tiny import make_tiny
from fidelab.report.study import render_study
from fidelab.results.study import Study
from fidelab.studies.layers import findings
from tests.run.harness import Done, cli, refused

LAYERS, FAULTY = 4, 2
SKIP_OTHERS = "0,1,3"
SIZES = ("--threads", 1, "--windows", 2, "--n-ctx", 32, "--dtype", "float32", "--reference", "f32")


def bisect(room: Path, *words: object) -> Done:
    return cli("diagnose", "layers", "./tiny", *SIZES, *words, cwd=room)


def record(done: Done) -> Study:
    return Study.model_validate_json((done.folder / "study.json").read_text())


def column(study: Study, name: str) -> list[float | None]:
    """A metric, layer by layer, after what enters the first."""
    return [row.value(name) for row in study.rows]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of four layers, and one of another shape."""
    folder = tmp_path_factory.mktemp("layers")
    make_tiny(folder / "tiny", layers=LAYERS)
    make_tiny(folder / "other", layers=LAYERS - 1)
    return folder


@pytest.fixture(scope="module")
def done(room: Path) -> Done:
    """int4 in one layer alone, with a floor."""
    return bisect(room, "--kv", f"int4[skip-layers={SKIP_OTHERS}]", "--json")


def test_a_format_in_one_layer_alone_is_found_there(done: Done) -> None:
    assert done.code == 0, done.err
    found = Study.model_validate_json(done.out)
    assert found.facts == {"first": FAULTY, "begins": FAULTY}
    assert [row.at["layer"] for row in found.rows if row.flags] == [FAULTY]
    assert column(found, "error_rms")[: FAULTY + 1] == [0.0] * (FAULTY + 1)  # the input among them
    row = found.row(layer=FAULTY)
    assert row is not None
    assert row.value("error") == row.value("added") != 0  # nothing came in
    assert row.value("error_p90") == row.value("added_p90")
    assert (found.windows, found.n_rows) == (2, 2 * 30)


def test_the_floor_is_a_second_reference_and_the_twin_the_candidate_with_other_last_bits(done: Done) -> None:
    found = Study.model_validate_json(done.out)
    assert found.arms["floor"].status == "ok"
    assert set(column(found, "floor_error_rms")) == {0.0}
    folders = sorted(path.name[-3:] for path in (done.cwd / "runs" / "captures").glob("*f32*/layers-*"))
    assert folders == ["-r0", "-r1"]
    found = Study.model_validate_json(done.out)
    assert found.arms["twin"].status == "ok"
    assert all(0 < (value or 0) < 1e-2 for value in column(found, "twin_error_rms")[1:])


def test_a_layer_that_adds_less_than_last_bits_do_begins_nothing() -> None:
    curve, small, large = (LayerCurve(x, x, x) for x in (np.array([0.0, 0.2, 0.2]), np.full(3, 0.1), np.full(3, 0.3)))
    assert [findings(curve, None, twin)["facts"]["begins"] for twin in (None, small, large)] == [0, 0, None]
    assert findings(curve, small)["facts"]["begins"] is None  # three times the floor


def test_a_layers_row_is_of_the_states_behind_it() -> None:
    curve, floor = (LayerCurve(x, 2 * x, 3 * x) for x in (np.array([0.1, 0.2, 0.4]), np.array([0.0, 0.01, 0.02])))
    rows = findings(curve, floor)["rows"]
    assert [(row.at["layer"], row.value("error"), row.value("error_rms")) for row in rows] == [
        ("input", 0.1, pytest.approx(0.3)),
        (0, 0.2, pytest.approx(0.6)),
        (1, 0.4, pytest.approx(1.2)),
    ]
    assert [row.value("floor_error_p90") for row in rows] == [0.0, 0.02, 0.04]


def test_json_is_the_record_in_the_run_folder_whose_settings_are_not_taken_for_a_comparison(done: Done) -> None:
    assert record(done) == Study.model_validate_json(done.out)
    settings = yaml.safe_load((done.folder / "config.resolved.yaml").read_text())
    assert (settings["kind"], settings["reference"]["kv"]) == ("layers", "f32")
    assert not list(done.folder.glob(".*"))
    assert "kind: 'layers'" in refused(cli("compare", "-f", done.folder / "config.resolved.yaml", cwd=done.cwd))


def test_captures_are_found_again_and_the_sentence_names_the_layer(done: Done) -> None:
    again = bisect(done.cwd, "--kv", f"int4[skip-layers={SKIP_OTHERS}]", "--no-floor")
    assert again.err.count("found in an earlier run") == 2
    assert f"Layer {FAULTY} stands out: it adds a relative error of" in again.out
    printed = " ".join(again.out.split())
    assert f"The configurations diverge in layer {FAULTY}: before it their states are the same." in printed
    assert "floor" not in again.out
    assert "<- stands out" in next(line for line in again.out.splitlines() if line.strip().startswith(f"{FAULTY} "))


def test_arms_that_differ_in_nothing_measurable_are_identical(room: Path) -> None:
    """A 32-bit cache with an option that skips every layer but one computes what the reference does."""
    done = bisect(room, "--kv", "f32[skip-layers=0]", "--no-floor")
    found = record(done)
    assert (done.code, found.arms["candidate"].status, found.facts) == (0, "identical", {"first": None, "begins": None})
    assert "No layer differs" in done.out


def test_models_of_another_shape_are_a_mismatch_in_one_line(room: Path) -> None:
    done = bisect(room, "--candidate", "model=./other", "--no-floor")
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "fidelab: other has 3 layers of width 64, the reference 4 of 64: their states cannot be compared"
    )


def test_an_arm_that_fails_ends_with_1_and_its_reason(room: Path) -> None:
    done = bisect(room, "--kv", "transformers_fp8")
    assert done.code == 1, done.err
    assert "transformers_fp8" in done.err
    found = record(done)
    assert (found.arms["candidate"].status, "floor" in found.arms, found.rows) == ("failed", False, ())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name one candidate (--kv FORMAT or --candidate KEY=VALUE,…), not 0"),
        (("--kv", "int8", "--kv", "int4"), "name one candidate"),
        (("--kv", "int8", "--candidate", "kv=int4"), "not 2"),
        (("--kv", "f32"), "candidate 'f32' computes the same as the reference"),
        (("--kv", "int8", "--engine", "llamacpp"), "engine llamacpp does not tell what passes through its layers"),
        (("--candidate", "kv=q8_0,engine=openai"), "engine openai does not tell what passes through its layers"),
        (("--kv", "int8", "--engine", "hff"), "unknown engine 'hff'; did you mean 'hf'?"),
        (("--kv", "int9"), "unknown KV format of engine hf 'int9'"),
        (("--kv", "int8", "--n-ctx", 50_000), "n_ctx 50000 is beyond the limit"),
        (("--kv", "int8", "--n-ctx", 4), "n_ctx: write tokens per window, at least 8"),
        (("--kv", "int8", "--windows", 0), "windows: Input should be greater than or equal to 1"),
        (("--kv", "int8", "--text", "nowhere.txt"), "no text 'nowhere.txt'"),
        (("--kv", "k16v8", "--candidate-x"), "no option --candidate-x"),
        (("--kv", "q4_0", "--engine-arg", "attention=k16v8"), "candidate 'q4_0' cannot run on engine hf"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(words: tuple[object, ...], said: str, room: Path) -> None:
    before = sorted((room / "runs").glob("2*")) if (room / "runs").exists() else []
    done = bisect(room, *words)
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert said in line
    assert before == (sorted((room / "runs").glob("2*")) if (room / "runs").exists() else [])


def _rendered(study: Study) -> str:
    out = io.StringIO()
    render_study(study, Console(file=out, width=100))
    return out.getvalue()


def test_report_and_page_have_a_row_per_layer_and_the_page_a_sentence_and_a_chart(done: Done) -> None:
    lines = [line.split() for line in _rendered(Study.model_validate_json(done.out)).splitlines() if line.strip()]
    assert [words[0] for words in lines if words[0] in "0123"] == ["0", "1", "2", "3"]
    page = (done.cwd / "runs" / json.loads(done.out)["run_id"] / "report.html").read_text("utf-8")
    assert "stands out" in page
    assert page.count('class="chart') == 2  # for wide and for narrow screens
    assert page.count('<th scope="row">') == LAYERS + 1  # and what enters the first


def test_states_that_are_not_finite_are_said_so(done: Done) -> None:
    x = np.array([0.0, 0.0, 0.0, np.inf, np.inf])
    study = Study.model_validate(json.loads(done.out) | findings(LayerCurve(x, x, x), None))
    assert study.sentences[0] == "Layer 2 stands out: states after it are not finite."
    assert "stands out, not finite" in _rendered(study)
