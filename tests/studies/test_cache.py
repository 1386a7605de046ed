"""``fidelab diagnose sensitivity --bits`` end to end, on a tiny model and on one with outliers in its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.models.tiny import make_tiny
from fidelab.results.study import Study
from fidelab_checkpoints.fragile import make_fragile
from tests.present import present
from tests.run.harness import Done, cli
from tests.sizes import first

LAYERS = 3
SIZES = ("--threads", 1, "--windows", 6, "--n-ctx", 64, "--dtype", "float32")
GRID = ("--bits", "8,4,2", "--group", 16)


def sensitivity(room: Path, model: str, *words: object) -> Done:
    return cli("diagnose", "sensitivity", f"./{model}", *SIZES, *words, cwd=room)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv-sensitivity")
    make_tiny(folder / "tiny", layers=LAYERS)
    make_fragile(folder / "tiny", folder / "fragile")
    return folder


@pytest.fixture(scope="module")
def done(room: Path) -> Done:
    return sensitivity(room, "tiny", *GRID, "--by", "layer", "--budget", "6bpv", "--json")


@pytest.fixture(scope="module")
def found(done: Done) -> Study:
    return read(done)


def read(done: Done) -> Study:
    assert done.code == 0, done.err
    return Study.model_validate_json(done.out)


def losses(study: Study, place: str) -> dict[tuple[str, str], float]:
    """(side, format) → mean KL."""
    rows = [row for row in study.rows if row.at["place"] == place]
    return {(str(row.at["side"]), str(row.at["format"])): row.value("kld") or 0.0 for row in rows}


def test_keys_values_and_both_are_measured_at_every_width_and_in_every_layer(found: Study) -> None:
    whole = losses(found, "all")
    for side in ("keys", "values", "both"):
        widths = [whole[side, f"int{bits}[group=16]"] for bits in (8, 4, 2)]
        assert widths == sorted(widths)
        assert widths[0] > 0
    for layer in range(LAYERS):
        assert set(losses(found, str(layer))) == {
            (s, f"int{b}[group=16]") for s in ("keys", "values") for b in (8, 4, 2)
        }


@pytest.mark.parametrize(
    ("side", "fmt", "kv"),
    first(
        [
            ("keys", "int4[group=16]", "int4[group=16]/f32"),
            ("both", "int2[group=16]", "int2[group=16]"),
            ("values", "fp8_e4m3[scale=per-token-head]", "f32/fp8_e4m3[scale=per-token-head]"),
        ]
    ),
)
def test_a_cell_is_what_a_comparison_says_of_an_arm_with_that_cache(
    side: str, fmt: str, kv: str, room: Path, found: Study
) -> None:
    words = ("--windows", 6, "--n-ctx", 64, "--threads", 1, "--dtype", "float32", "--reference", "f32")
    arm = cli("compare", "./tiny", *words, "--kv", kv, "--axes", "kld", "--control", "none", "--json", cwd=room)
    [record] = json.loads(arm.out)["candidates"]
    whole = next(m["value"] for m in record["axes"]["kld"]["metrics"] if m["name"] == "mean")
    grid = sensitivity(room, "tiny", *GRID, "--json")
    assert losses(read(grid), "all")[side, fmt] == pytest.approx(whole, rel=1e-4)


def test_the_plan_keeps_its_budget_and_is_measured_beside_pairs_that_fit(found: Study) -> None:
    plan = present(found.plan)
    assert plan.uniform_measured is not None
    assert plan.size <= plan.budget == 6.0
    assert len(plan.option.split(";")) == LAYERS
    predicted = 0.0
    for group, name in plan.formats.items():
        layer, _, side = group.partition(".")
        predicted += 0.0 if name == "native" else losses(found, layer)[side, name]
    assert plan.predicted == pytest.approx(predicted)
    assert (plan.uniform_size or 9) <= 6.0
    ours, theirs = (one.value("kld") or 0.0 for one in (plan.measured, plan.uniform_measured))
    assert present(plan.difference).value == pytest.approx(ours - theirs)


def test_repeating_the_command_asks_nothing_again(room: Path, found: Study) -> None:
    again = sensitivity(room, "tiny", *GRID, "--by", "layer", "--budget", "6bpv", "--json")
    assert read(again).rows == found.rows
    assert "found in an earlier run" in again.err
    assert "model loaded" not in again.err


def test_heads_are_measured_one_by_one(room: Path) -> None:
    study = read(sensitivity(room, "tiny", "--bits", "4", "--group", 16, "--by", "head", "--json"))
    heads = {str(row.at["place"]) for row in study.rows} - {"all"}
    assert {place.split(".")[0] for place in heads} == {str(layer) for layer in range(LAYERS)}
    per_layer = len(heads) // LAYERS
    assert {place.split(".")[1] for place in heads} == {str(head) for head in range(per_layer)}
    assert all((row.value("kld") or 0) > 0 for row in study.rows)


def test_fragile_keys_break_in_fp8_and_in_four_bits_and_values_do_not(room: Path) -> None:
    done = sensitivity(room, "fragile", "--bits", "8,4", "--group", 16, "--json")
    cells = losses(read(done), "all")
    plain = losses(read(sensitivity(room, "tiny", "--bits", "8,4", "--group", 16, "--json")), "all")
    assert cells["keys", "fp8_e4m3"] > 30 * plain["keys", "fp8_e4m3"]
    assert cells["values", "fp8_e4m3"] == pytest.approx(plain["values", "fp8_e4m3"], rel=1e-3)
    assert cells["keys", "int4[group=16]"] > 5 * plain["keys", "int4[group=16]"]
    assert cells["values", "int4[group=16]"] == pytest.approx(plain["values", "int4[group=16]"], rel=1e-3)
    recovered = "fp8_e4m3[scale=per-token-head]"
    assert cells["keys", recovered] < cells["keys", "fp8_e4m3"] / 10


def test_terminal_and_page_say_cliffs_and_the_plan(room: Path, done: Done) -> None:
    told = sensitivity(room, "tiny", *GRID, "--by", "layer", "--budget", "6bpv")
    text = " ".join(told.out.split())
    assert "Cliff, where one more bit costs 0.1 nats per token or more: keys " in text
    assert "Plan of " in text
    assert "all are in the files" in text  # of single layers
    page = (told.folder / "report.html").read_text("utf-8")
    assert "Sensitivity of keys and values" in page
    assert Study.model_validate_json((told.folder / "study.json").read_text()).kind == "kv-sensitivity"


def test_a_plan_of_named_formats_is_refined_and_written_for_an_engine(room: Path) -> None:
    formats = ("--kv", "q8_0", "--kv", "q4_0", "--by", "layer", "--budget", "6bits")
    done = sensitivity(room, "tiny", *formats, "--export", "plan", "--export-format", "modelopt", "--json")
    study = Study.model_validate_json(done.out)
    plan = present(study.plan)
    assert {row.at["format"] for row in study.rows} == {"q8_0", "q4_0"}
    assert set(plan.formats.values()) <= {"native", "q8_0", "q4_0"}
    assert plan.size <= 6.0
    assert (plan.measured_there.value("kld") or 9) <= (plan.unrefined or 0)
    assert study.sentences[0].startswith(("Better than q", "No better than q", "Worse than q"))
    assert (done.code, done.err.splitlines()[-1].partition(", not ")[0]) == (
        2,
        "fidelab: --export: Model-Optimizer has FP8, NVFP4 and FP8/NVFP4",
    )


def test_a_plan_for_vllm_is_one_format_next_to_native_layers(room: Path) -> None:
    words = ("--kv", "fp8_e4m3", "--kv", "int4", "--by", "layer", "--budget", "18bits", "--engine", "vllm")
    study = read(sensitivity(room, "fragile", *words, "--export", "plan.kv", "--json"))
    assert study.plan is not None
    assert study.plan.kv == (room / "plan.kv").read_text().strip()
    assert len({*study.plan.formats.values()} - {"native"}) == 1
    assert {row.at["side"] for row in study.rows} == {"both"}
    assert len(study.plan.formats) == LAYERS
    asked = "--engine vllm --reference auto --control none --dtype float32 --axes kld --windows 6 --n-ctx 64"
    assert [*study.commands.values()] == [
        f"fidelab compare {room / 'fragile'} {asked} --kv {study.plan.uniform} --kv '{study.plan.kv}'"
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--kv", "q8"), "unknown KV format 'q8'; did you mean 'q8_0'?"),
        (("--kv", "q8_0/q4_0"), "the plan chooses keys and values apart"),
        (("--kv", "int4[skip-layers=0]"), "the plan chooses the layers"),
        (("--kv", "bf16"), "16 and 32 bits are the compute type"),
        (("--kv", "q8_0", "--kv", "q8_0"), "name each format once"),
        (("--kv", "q8_0", "--by", "layer", "--budget", "1bpv"), "the smallest of these formats takes 8.5"),
        (("--kv", "q8_0", "--by", "layer", "--engine", "llamacpp"), "Nearest that works: compare single formats"),
        (("--kv", "q8_0", "--by", "layer", "--engine", "vllm"), "a plan for vLLM is made of fp8_e4m3, fp8_e5m2, int8"),
        (("--kv", "q8_0", "--export", "x.json"), "--export needs a plan"),
        (("--bits", "9"), "9 is not one of 8, 7, 6, 5, 4, 3, 2"),
        (("--bits", "4,4"), "name each width once"),
        (("--bits", "four"), "'four' is not a width"),
        (("--bits", "4", "--weights", "int4"), "name formats of weights"),
        ((), "name formats of weights"),
        (("--bits", "4", "--by", "module"), "write cache, layer or head"),
        (("--bits", "4", "--group", 7), "group"),
        (("--bits", "4", "--budget", "6bpv"), "add --by layer"),
        (("--bits", "4", "--by", "layer", "--budget", "80MB"), "bits per value"),
        (("--bits", "4", "--by", "layer", "--budget", "1bits"), "the smallest of these formats takes"),
        (("--bits", "4", "--by", "layer", "--budget", "10"), "--budget 10: with --bits and --kv write bits per value"),
    ],
)
def test_bad_input_is_one_line(words: tuple[object, ...], says: str, room: Path) -> None:
    done = sensitivity(room, "tiny", *words)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
