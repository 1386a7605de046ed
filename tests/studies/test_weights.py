"""``fidelab diagnose sensitivity`` end to end, on a tiny model in a worker process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.models.tiny import make_tiny
from fidelab.results.study import Study
from tests.present import present
from tests.run.harness import Done, cli, refused

LAYERS = 3
KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SIZES = ("--threads", 1, "--windows", 8, "--n-ctx", 32, "--dtype", "float32")
FORMATS = ("--weights", "int4[group=16]", "--weights", "int8[group=16]")


def sensitivity(room: Path, *words: object) -> Done:
    return cli("diagnose", "sensitivity", "./tiny", *SIZES, *words, cwd=room)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sensitivity")
    make_tiny(folder / "tiny", layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def done(room: Path) -> Done:
    return sensitivity(room, *FORMATS, "--budget", "6bpw", "--json")


@pytest.fixture(scope="module")
def found(done: Done) -> Study:
    assert done.code == 0, done.err
    return Study.model_validate_json(done.out)


def losses(study: Study) -> dict[tuple[str, str], float]:
    """(group, format) → mean KL."""
    return {(str(row.at["group"]), str(row.at["format"])): row.value("kld") or 0.0 for row in study.rows}


def test_every_weight_is_measured_by_itself_in_every_format_and_the_costliest_is_first(found: Study) -> None:
    assert len(found.rows) == 2 * LAYERS * len(KINDS)
    assert {row.at["kind"] for row in found.rows} == KINDS
    assert {row.at["layer"] for row in found.rows} == set(range(LAYERS))
    values = [*losses(found).values()]
    assert min(values) > 0
    assert values == sorted(values, reverse=True)
    sums = {str(one.cell["format"]): one.value or 0.0 for one in found.findings}
    assert sums["int8[group=16]"] < sums["int4[group=16]"] / 10


def test_a_row_is_what_a_comparison_says_of_an_arm_with_these_weights(found: Study, room: Path) -> None:
    row = next(row for row in found.rows if row.at["format"] == "int4[group=16]")
    candidate = f"weights=int4[group=16,only={row.at['group']}]"
    words = (*SIZES[:2], *SIZES[4:], "--axes", "kld", "--windows", 8, "--control", "none", "--no-floor")
    arm = cli("compare", "./tiny", *words, "--candidate", candidate, "--json", cwd=room)
    [record] = json.loads(arm.out)["candidates"]
    whole = next(m["value"] for m in record["axes"]["kld"]["metrics"] if m["name"] == "mean")
    assert row.value("kld") == pytest.approx(whole, rel=0.5)  # every second of the same windows


def test_the_plan_keeps_its_budget_and_is_measured_beside_the_best_single_format(found: Study) -> None:
    plan = present(found.plan)
    assert plan.uniform_measured is not None
    assert plan.size <= plan.budget == int(6 * found.facts["parameters"] / 8)
    assert set(plan.formats) == {row.at["group"] for row in found.rows}
    assert plan.uniform == "int5[group=16]"  # 6 bits per weight
    assert plan.uniform_size == plan.budget
    ours, theirs = (one.value("kld") or 0.0 for one in (plan.measured, plan.uniform_measured))
    assert present(plan.difference).value == pytest.approx(ours - theirs)
    predicted = sum(losses(found).get(pair, 0.0) for pair in plan.formats.items())
    assert plan.predicted == pytest.approx(predicted)
    assert plan.measured_there.value("kld") == pytest.approx(predicted, rel=0.5)


def test_the_plan_runs_as_an_arm(found: Study, room: Path) -> None:
    words = (*SIZES[:2], *SIZES[4:], "--axes", "kld", "--windows", 1, "--control", "none", "--no-floor")
    assert found.plan is not None
    arm = cli("compare", "./tiny", *words, "--candidate", f"weights={found.plan.option}", "--json", cwd=room)
    assert arm.code == 0, arm.err


def test_the_same_command_again_computes_nothing(found: Study, room: Path) -> None:
    captures = {path: path.stat().st_mtime_ns for path in room.glob("runs/captures/*/*/manifest.json")}
    again = sensitivity(room, *FORMATS, "--budget", "6bpw", "--json")
    assert {path: path.stat().st_mtime_ns for path in room.glob("runs/captures/*/sens*/manifest.json")}.items() <= (
        captures.items()
    )
    same = Study.model_validate_json(again.out)
    assert (same.rows, same.plan) == (found.rows, found.plan)


def test_the_files_are_the_record_and_a_page_and_the_plan_says_which_groups_get_what(done: Done, found: Study) -> None:
    folder = done.cwd / "runs" / found.run_id
    assert (folder / "study.json").read_text() == done.out
    page = (folder / "report.html").read_text()
    assert found.plan is not None
    for text in ("down_proj", "mean KL of each group", found.plan.option, found.sample):
        assert text in page
    assert found.plan is not None
    for name in set(found.plan.formats.values()):
        kinds = {group.rpartition(".")[2] for group, chosen in found.plan.formats.items() if chosen == name}
        [line] = [line for line in found.sentences if line.startswith(f"{name}: ")]
        assert all(kind in line for kind in (*kinds, "layer"))


@pytest.mark.parametrize(("by", "groups"), [("layer", LAYERS), ("kind", len(KINDS))])
def test_groups_may_be_layers_or_kinds(by: str, groups: int, room: Path) -> None:
    done = sensitivity(room, "--weights", "int4[group=16]", "--by", by)
    assert done.code == 0, done.err
    study = Study.model_validate_json((done.folder / "study.json").read_text())
    assert len(study.rows) == groups
    assert "Losses of all" in done.out
    assert f"rows of {study.documents} document" in done.out


def test_a_plan_of_formats_that_llama_cpp_has_is_held_against_its_largest_that_fits(room: Path) -> None:
    words = ("--weights", "q4_0", "--weights", "q8_0", "--by", "layer", "--budget", "7bpw")
    done = sensitivity(room, *words)
    assert done.code == 0, done.err
    plan = present(Study.model_validate_json((done.folder / "study.json").read_text()).plan)
    assert plan.uniform == "q5_1"  # the largest that fits
    more = f"{((plan.uniform_size or 0) - plan.size) / 1024:,.0f} KiB more than the plan"
    assert more in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "int44"), "did you mean 'int4'"),
        (("--weights", "int4[only=3]"), "name one format"),
        (("--weights", "int8", "--weights", "int8"), "there twice"),
        (("--weights", "int8", "--by", "head"), "--by head"),
        (("--weights", "int4[group=16]", "--budget", "2bpw"), "the smallest of these formats takes"),
        (("--weights", "int8", "--budget", "some"), "some"),
        (
            ("--weights", "int8", "--budget", "10"),
            "--budget 10 has no unit: write 4.5bpw (bits per weight), 80MB, or a",
        ),
        (("--weights", "int8", "--engine", "fake"), "cannot round single weights"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words: tuple[str, ...], said: str, room: Path) -> None:
    before = set(room.glob("runs/*"))
    assert said in refused(sensitivity(room, *words))
    assert set(room.glob("runs/*")) == before
