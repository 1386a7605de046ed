"""``fidelab sensitivity`` end to end, on a tiny model in a worker process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.checkpoints.recipe import read_recipe
from fidelab.models.tiny import make_tiny
from fidelab.results.sensitivity_record import SensitivityReport
from tests.runs.harness import Done, cli

LAYERS = 3
KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SIZES = ("--threads", 1, "--windows", 8, "--n-ctx", 32, "--dtype", "float32")
FORMATS = ("--weights", "int4[group=16]", "--weights", "int8[group=16]")


def sensitivity(room: Path, *words: object) -> Done:
    return cli("sensitivity", "./tiny", *SIZES, *words, cwd=room)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sensitivity")
    make_tiny(folder / "tiny", layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def done(room: Path) -> Done:
    return sensitivity(room, *FORMATS, "--budget", "6bpw", "--json")


@pytest.fixture(scope="module")
def found(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def test_every_weight_is_measured_by_itself_in_every_format(found: dict[str, Any]) -> None:
    assert len(found["cells"]) == 2 * LAYERS * len(KINDS)
    assert {cell["kind"] for cell in found["cells"]} == KINDS
    assert {cell["layer"] for cell in found["cells"]} == set(range(LAYERS))
    assert all(cell["status"] == "ok" and cell["loss"]["kld"] > 0 for cell in found["cells"])
    sums = {
        name: sum(c["loss"]["kld"] for c in found["cells"] if c["format"].startswith(name)) for name in ("int4", "int8")
    }
    assert sums["int8"] < sums["int4"] / 10


def test_a_cell_is_what_a_comparison_says_of_an_arm_with_these_weights(found: dict[str, Any], room: Path) -> None:
    cell = next(c for c in found["cells"] if c["format"].startswith("int4"))
    candidate = f"weights=int4[group=16,only={cell['group']}]"
    words = (*SIZES[:2], *SIZES[4:], "--axes", "kld", "--windows", 8, "--control", "none", "--no-floor")
    arm = cli("compare", "./tiny", *words, "--candidate", candidate, "--json", cwd=room)
    [candidate_record] = json.loads(arm.out)["candidates"]
    whole = next(m["value"] for m in candidate_record["axes"]["kld"]["metrics"] if m["name"] == "mean")
    assert cell["loss"]["kld"] == pytest.approx(whole, rel=0.5)  # every second of the same windows


def test_the_plan_keeps_its_budget_and_is_measured_beside_the_best_single_format(found: dict[str, Any]) -> None:
    plan = found["plan"]
    assert plan["bytes"] <= plan["budget"] == int(6 * found["parameters"] / 8)
    assert set(plan["formats"]) == {cell["group"] for cell in found["cells"]}
    assert plan["uniform"] == "int5[group=16]"  # 6 bits per weight
    assert plan["uniform_bytes"] == plan["budget"]
    assert plan["difference"] == pytest.approx(plan["measured"]["kld"] - plan["uniform_loss"]["kld"])
    losses = {(cell["group"], cell["format"]): cell["loss"]["kld"] for cell in found["cells"]}
    predicted = sum(losses.get(pair, 0.0) for pair in plan["formats"].items())
    assert plan["predicted"] == pytest.approx(predicted)
    assert plan["measured_there"]["kld"] == pytest.approx(predicted, rel=0.5)


def test_the_plan_runs_as_an_arm(found: dict[str, Any], room: Path) -> None:
    words = (*SIZES[:2], *SIZES[4:], "--axes", "kld", "--windows", 1, "--control", "none", "--no-floor")
    arm = cli("compare", "./tiny", *words, "--candidate", f"weights={found['plan']['weights']}", "--json", cwd=room)
    assert arm.code == 0, arm.err


def test_the_same_command_again_computes_nothing(done: Done, found: dict[str, Any], room: Path) -> None:
    captures = {path: path.stat().st_mtime_ns for path in room.glob("runs/captures/*/*/manifest.json")}
    again = sensitivity(room, *FORMATS, "--budget", "6bpw", "--json")
    assert {path: path.stat().st_mtime_ns for path in room.glob("runs/captures/*/sens*/manifest.json")}.items() <= (
        captures.items()
    )
    same = json.loads(again.out)
    assert same["cells"] == found["cells"]
    assert same["plan"] == found["plan"]


def test_the_files_are_a_record_and_a_page(done: Done, found: dict[str, Any]) -> None:
    report = SensitivityReport.model_validate_json((done.folder / "sensitivity.json").read_text())
    assert report.plan is not None
    page = (done.folder / "report.html").read_text()
    for text in ("down_proj", "mean KL of each group", "The plan as an arm"):
        assert text in page


def test_the_plan_says_which_groups_get_which_format(done: Done, found: dict[str, Any]) -> None:
    page = (done.folder / "report.html").read_text()
    for name in set(found["plan"]["formats"].values()):
        groups = [group for group, chosen in found["plan"]["formats"].items() if chosen == name]
        kinds = {group.rpartition(".")[2] for group in groups}
        [line] = [line for line in page.splitlines() if f"{name}: " in line and all(kind in line for kind in kinds)]
        assert "layer" in line


def test_intervals_say_over_how_many_documents_they_are(done: Done) -> None:
    report = SensitivityReport.model_validate_json((done.folder / "sensitivity.json").read_text())
    said = f"{report.windows} windows, {report.rows:,} rows of {report.documents} documents"
    early = report.documents < 6
    page = (done.folder / "report.html").read_text()
    assert said in page
    assert ("intervals over fewer than 6 documents are preliminary" in page) == early


@pytest.mark.parametrize(("by", "groups"), [("layer", LAYERS), ("kind", len(KINDS))])
def test_groups_may_be_layers_or_kinds(by: str, groups: int, room: Path) -> None:
    done = sensitivity(room, "--weights", "int4[group=16]", "--by", by)
    assert done.code == 0, done.err
    record = json.loads((done.folder / "sensitivity.json").read_text())
    assert len(record["cells"]) == groups
    assert "Losses of all" in done.out
    assert f"rows of {record['documents']} document" in done.out


def test_a_plan_of_formats_that_llama_cpp_has_is_exported_for_llama_quantize(room: Path) -> None:
    words = ("--weights", "q4_0", "--weights", "q8_0", "--by", "layer", "--budget", "7bpw", "--export", "types.txt")
    done = sensitivity(room, *words)
    assert done.code == 0, done.err
    lines = (room / "types.txt").read_text().splitlines()
    assert len(lines) == LAYERS * len(KINDS)
    assert all(line.startswith(r"--tensor-type blk\.") for line in lines)
    assert any(line.endswith("attn_q=q8_0") for line in lines)
    plan = json.loads((done.folder / "sensitivity.json").read_text())["plan"]
    assert plan["uniform"] == "q5_1"  # the largest that fits
    more = f"{(plan['uniform_bytes'] - plan['bytes']) / 1024:,.0f} KiB more than the plan"
    assert more in " ".join(done.out.split())


def test_a_plan_of_one_format_is_exported_as_a_recipe(room: Path) -> None:
    done = sensitivity(room, "--weights", "int4[group=16]", "--budget", "8bpw", "--export", "recipe.yaml")
    assert done.code == 0, done.err
    recipe = read_recipe(room / "recipe.yaml")
    assert (recipe.method, recipe.scheme.format, recipe.scheme.group) == ("rtn", "W4A16", 16)
    found = json.loads((done.folder / "sensitivity.json").read_text())["plan"]["formats"]
    assert (
        {rule.pattern for rule in recipe.keep} == {group for group, name in found.items() if name == "native"} != set()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "int44"), "did you mean 'int4'"),
        (("--weights", "int4[only=3]"), "name one format"),
        (("--weights", "int8", "--weights", "int8"), "there twice"),
        (("--weights", "int8", "--by", "head"), "--by head"),
        (("--weights", "int4[group=16]", "--budget", "2bpw"), "the smallest of these formats takes"),
        (("--weights", "int8", "--budget", "some"), "some"),
        (("--weights", "int8", "--export", "x"), "--budget"),
        (("--weights", "int8", "--budget", "int8", "--export", "x"), "llama-quantize has no int8"),
        (("--weights", "int8", "--budget", "int8", "--by", "layer", "--export", "x.yaml"), "leave out --by"),
        (("--weights", "nvfp4", "--budget", "nvfp4", "--export", "x.yaml"), "single --weights of int4 or int8"),
        (("--weights", "int8", "--engine", "fake"), "cannot round single weights"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words: tuple[str, ...], said: str, room: Path) -> None:
    before = set(room.glob("runs/*"))
    done = sensitivity(room, *words)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert set(room.glob("runs/*")) == before
