"""Advice: what is measured and what predicted, the ranking, and its commands."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.core import KVSpec, Status
from fidelab.core.errors import InputError, UsageError
from fidelab.models.tiny import make_tiny
from fidelab.physics.devices import find_device
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model
from fidelab.results.record import ArmRecord, Report, RuntimeRecord
from fidelab.results.study import Study, StudyRow
from fidelab.studies.advice import Loss, Measured, Option, Pair, advise, loss_of, ranked, read_runs
from tests.report.sample import kld_axis
from tests.report.sample import sample_report as whole_report
from tests.run.harness import cli

SHAPE = Geometry.of_sizes(28, 4, 128, 7.6e9)
H200 = find_device("H200")
BASE = Pair("native", "bf16", "bf16")


def pair(weights: str = "native", kv: str = "bf16") -> Pair:
    spec = KVSpec.parse(kv)
    return Pair(weights, str(spec.k), str(spec.v))


def measured(**losses: float) -> dict[Pair, Measured]:
    """``w_k_v`` → mean, with intervals of ± 10%; ``n`` stands for what is native."""
    found = {}
    for text, mean in losses.items():
        weights, k, v = (None if part == "n" else part for part in text.split("_"))
        one = Pair(weights or "native", k or "bf16", v or "bf16")
        found[one] = Measured(mean, (0.9 * mean, 1.1 * mean), text)
    return found


# ------------------------------------------------------------------------------------------------ losses


def test_what_no_arm_ran_is_the_sum_of_its_parts() -> None:
    found = loss_of(pair("int4", "int8/int2"), measured(int4_n_n=0.03, n_int8_n=0.002, n_n_int2=0.01))
    assert (found.source, len(found.parts)) == ("predicted", 3)
    assert found.mean == pytest.approx(0.042)


def test_what_an_arm_ran_is_its_figure_and_not_the_sum() -> None:
    found = loss_of(pair("int4", "int8"), measured(int4_n_n=0.03, n_int8_int8=0.002, int4_int8_int8=0.05))
    assert (found.source, found.mean, found.low, found.high) == ("measured", 0.05, 0.9 * 0.05, 1.1 * 0.05)


def test_the_fewest_parts_are_added() -> None:
    losses = measured(int4_n_n=0.03, n_int8_n=0.002, n_n_int2=0.01, n_int8_int2=0.5)
    assert loss_of(pair("int4", "int8/int2"), losses).mean == pytest.approx(0.53)


def test_a_part_that_was_never_measured_leaves_the_loss_unknown() -> None:
    found = loss_of(pair("int4", "int8"), measured(int4_n_n=0.03, n_int8_n=0.002))
    assert (found.source, found.mean, found.high) == ("unknown", math.inf, math.inf)


def test_weights_that_were_measured_with_a_32_bit_cache_are_a_prediction_with_a_16_bit_one() -> None:
    found = loss_of(pair("int4"), {Pair("int4", "f32", "f32"): Measured(0.03, (0.02, 0.04))})
    assert (found.source, found.mean) == ("predicted", 0.03)
    assert (found.low, found.high) == pytest.approx((0.02, 0.04))


def test_skipped_layers_are_never_taken_from_a_format_without_them() -> None:
    losses = measured(int4_n_n=0.03, n_int8_int8=0.002)
    assert loss_of(Pair("int4", "int8", "int8", (0,)), losses).source == "unknown"
    whole = {**losses, Pair("native", "int8", "int8", (0,)): Measured(0.001, (0.0, 0.002))}
    assert loss_of(Pair("int4", "int8", "int8", (0,)), whole).mean == pytest.approx(0.031)
    assert Pair("int4", "int8", "bf16", (0, 3)).spec.skip_layers == (0, 3)


def test_the_interval_of_a_prediction_is_that_of_every_angle_between_the_errors() -> None:
    """KL is a squared length of errors, to second order: no sum of errors of these lengths lies outside."""
    rng = np.random.default_rng(0)
    lengths = [math.sqrt(0.03), math.sqrt(0.002), math.sqrt(0.01)]
    found = loss_of(
        pair("int4", "int8/int2"),
        {
            pair("int4"): Measured(0.03, (0.03, 0.03)),
            pair("native", "int8/bf16"): Measured(0.002, (0.002, 0.002)),
            pair("native", "bf16/int2"): Measured(0.01, (0.01, 0.01)),
        },
    )
    errors = rng.normal(size=(20_000, 3, 2))
    errors *= np.array(lengths)[:, None] / np.linalg.norm(errors, axis=2, keepdims=True)
    joint = (errors.sum(axis=1) ** 2).sum(axis=1)
    assert found.low <= joint.min() <= 1.2 * found.low + 1e-4
    assert 0.98 * found.high <= joint.max() <= found.high * (1 + 1e-9)


# ---------------------------------------------------------------------------------------------- choosing


def options(seed: int, n: int = 40) -> list[Option]:
    """Sizes that occur several times, and losses of all kinds."""
    rng = random.Random(seed)
    found = []
    for index in range(n):
        size, mean = float(rng.randrange(1, 12)), rng.uniform(0.001, 0.1)
        source: Any = rng.choice(["measured", "predicted"])
        loss = Loss(mean, mean / rng.uniform(1, 3), mean * rng.uniform(1, 3), source)
        found.append(Option(pair(f"w{index}"), size, 12 / size, loss))
    return found


def test_of_equal_bytes_the_least_loss_is_first() -> None:
    same = [Option(pair(f"w{n}"), 10.0, 1.0, Loss(loss, loss, loss, "measured")) for n, loss in enumerate((3, 1, 2))]
    found, is_shown = ranked(same, 10.0)
    assert ([one.pair.weights for one in found], is_shown) == (["w1", "w2", "w0"], True)


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_is_first_whose_interval_ends_below_the_limit(seed: int) -> None:
    cells, limit, memory = options(seed), 0.03, 9.0
    found, is_shown = ranked(cells, memory, limit)
    able = [one for one in cells if one.bytes <= memory and one.loss.high <= limit]
    assert is_shown
    assert found[0] in able
    assert found[0].speedup == max(one.speedup for one in able)
    assert all(one.bytes > memory for one in found[sum(one.bytes <= memory for one in cells) :])
    assert not ranked(cells, memory, 1e-9)[1]


# ------------------------------------------------------------------------------------------------ advice


def arm(
    name: str, mean: float | None, kv: str = "bf16", weights: str = "", size: int = 15_200_000_000, **changes: Any
) -> ArmRecord:
    spec = KVSpec.parse(kv)
    ran: dict[str, Any] = {"k_dtype": "x", "v_dtype": "x", "cache_bytes_per_token": 1.0, "weight_bytes": 15_200_000_000}
    if weights:
        ran |= {"simulated_weight_bytes": size, "weights_option": weights, "simulated_weights": {}}
    return ArmRecord(
        status=Status.OK,
        name=name,
        engine="hf",
        model="m",
        kv=spec,
        ran=RuntimeRecord.model_validate(ran),
        axes={} if mean is None else {"kld": kld_axis(mean, mean / 10)},
        **changes,
    )


def report(*arms: ArmRecord, model: str = "m") -> Report:
    empty: Mapping[str, Any] = {
        "control": None,
        "controls": (),
        "comparisons": (),
        "attribution": (),
        "recommendation": None,
        "settings": {"dtype": "auto", "reference": {"kv": "bf16"}},
    }
    reference = arm("bf16", None).model_copy(update={"model": model})
    same = tuple(one.model_copy(update={"model": model}) for one in arms)
    return whole_report().model_copy(update={**empty, "reference": reference, "candidates": same})


ARMS = (
    arm("int8 cache", 0.002, "int8", serve_command="serve --kv int8"),
    arm("int4 cache", 0.03, "int4"),
    arm("int8 weights", 0.001, weights="int8", size=8_000_000_000),
    arm("int4 weights", 0.02, weights="int4", size=4_500_000_000),
)


def advised(folder: Path, *arms: ArmRecord, **asked: Any) -> Study:
    (folder / "run").mkdir(exist_ok=True)
    file = folder / "run" / "report.json"
    file.write_text(report(*arms).to_json())
    asked = {"context": 4096, "batch": 8, **asked}
    return advise("m", SHAPE, H200, asked.pop("context"), asked.pop("batch"), read_runs("m", [file]), **asked)


def pairs(found: Study) -> dict[tuple[str, str], StudyRow]:
    """(weights, cache) → the row of the pair."""
    return {(str(row.at["weights"]), str(row.at["kv"])): row for row in found.rows}


def recommended(found: Study) -> StudyRow:
    return pairs(found)[found.facts["recommended"]["weights"], found.facts["recommended"]["kv"]]


def test_bytes_and_ceilings_are_those_of_physics_and_every_pair_says_where_its_loss_is_from(tmp_path: Path) -> None:
    found = pairs(advised(tmp_path, *ARMS))
    assert len(found) == 9
    bits = {"native": 16.0, "int8": 64 / 7.6, "int4": 36 / 7.6}
    for (weights, cache), row in found.items():
        model = Model(SHAPE, bits[weights])
        kv = KVSpec.parse(cache)
        assert row.value("bytes") == pytest.approx(model.device_bytes(kv, 4096, 8))
        moved = [
            one.step_seconds(spec, 4096, 8, H200)[0]
            for one, spec in ((Model(SHAPE), KVSpec.parse("bf16")), (model, kv))
        ]
        assert row.value("speedup") == pytest.approx(moved[0] / moved[1])
        assert row.facts["source"] == ("predicted" if weights != "native" and cache != "bf16" else "measured")
    both = found["int4", "int8"]
    assert both.value("kld") == pytest.approx(0.022)
    assert set(both.facts["parts"]) == {"int4 weights", "int8 cache"}
    assert both.facts["loss is"] == "predicted (2)"


def test_within_a_limit_the_fastest_pair_is_recommended_with_the_command_of_its_arm(tmp_path: Path) -> None:
    tight = advised(tmp_path, *ARMS, max_kld=0.0024, context=32_768, batch=32)
    assert tight.facts["recommended"] == {"weights": "native", "kv": "int8"}
    assert tight.commands["run"] == "serve --kv int8"
    loose = advised(tmp_path, *ARMS, max_kld=0.2)
    assert loose.facts["recommended"] == {"weights": "int4", "kv": "int4"}
    assert recommended(loose).facts["source"] == "predicted"
    [command] = [line for what, line in loose.commands.items() if "its loss is predicted" in what]
    assert command.startswith("fidelab compare m --axes kld --engine hf")
    none = advised(tmp_path, *ARMS[:2], max_kld=0.0001, memory=16e9, context=64, batch=1)
    assert recommended(none).value("kld") == 0


def test_memory_alone_decides_where_no_limit_is_given(tmp_path: Path) -> None:
    whole = pairs(advised(tmp_path, *ARMS))
    room = whole["int8", "int8"].value("bytes") or 0.0
    found = advised(tmp_path, *ARMS, memory=room)
    losses = [row.value("kld") for row in whole.values() if (row.value("bytes") or 0.0) <= room]
    assert recommended(found).value("kld") == min(loss for loss in losses if loss is not None)


def test_bytes_that_a_simulation_left_in_32_bits_count_as_16(tmp_path: Path) -> None:
    one = arm("int8 weights", 0.001, weights="int8", size=8_000)
    assert one.ran is not None
    left = {"native": {"weights": 1, "parameters": 1_000, "bytes": 4_000}, "int8": {"bytes": 4_000}}
    ran = RuntimeRecord.model_validate({**one.ran.model_dump(), "simulated_weights": left})
    file = tmp_path / "report.json"
    file.write_text(report(one.model_copy(update={"ran": ran})).to_json())
    assert read_runs("m", [file]).weight_bytes["int8"] == 6_000


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory": 1e9}, "no pair fits into 1.00 GB at 4,096 tokens × 8: the smallest, int4 with cache int4, takes "),
        ({"batch": 0}, "--batch must be at least 1, not 0"),
        ({"context": -4}, "--context must be at least 1, not -4"),
        ({"max_kld": -0.1}, "--max-kld must be a mean KL above 0"),
        ({"max_kld": math.nan}, "--max-kld must be a mean KL above 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        advised(tmp_path, *ARMS, **asked)
    assert message in str(error.value)


def test_a_context_beyond_what_was_measured_is_said(tmp_path: Path) -> None:
    assert any("not at 1,048,576" in note for note in advised(tmp_path, *ARMS, context=1 << 20).sentences)


def test_a_report_of_another_model_is_refused_by_name_and_left_out_of_a_folder(tmp_path: Path) -> None:
    for name, model in (("a", "m"), ("b", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(report(*ARMS, model=model).to_json())
        (tmp_path / name / "config.resolved.yaml").write_text("model: m\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "report.json").write_text("{")
    (tmp_path / "c" / "config.resolved.yaml").write_text("model: m\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "report.json").write_text("{}")
    (tmp_path / "d" / "config.resolved.yaml").write_text("kind: sensitivity\n")
    with pytest.raises(InputError, match="is of model other, not m: leave it out"):
        read_runs("m", [tmp_path / "b"])
    found = read_runs("m", (), tmp_path)
    assert [path.name for path in found.reports] == ["a"]
    assert len(found.notes) == 1
    assert "c" in found.notes[0]


def test_a_run_whose_reference_is_quantized_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    spoiled = report(*ARMS).model_copy(update={"reference": arm("int8", None, "int8")})
    file.write_text(spoiled.to_json())
    found = read_runs("m", [file])
    assert not found.losses
    assert "its reference" in found.notes[0] or "the reference of" in found.notes[0]


# --------------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a run of it."""
    folder = tmp_path_factory.mktemp("advise")
    make_tiny(folder / "model")
    flags = ["--axes", "kld", "--windows", "8", "--n-ctx", "32", "--control", "none", "--no-floor"]
    arms = ["--kv", "int8", "--kv", "int4/bf16", "--kv", "bf16/int4"]
    arms += ["--candidate", "weights=int8", "--candidate", "weights=int4[group=32]"]
    done = cli("compare", "./model", *flags, *arms, cwd=folder)
    assert done.code == 0, done.err
    return folder


@pytest.mark.full
def test_a_real_run_is_found_and_joined(tiny: Path) -> None:
    done = cli(
        "estimate", "advise", "./model", "--device", "H100", "--context", "4k", "--batch", "2", "--json", cwd=tiny
    )
    assert done.code == 0, done.err
    found = Study.model_validate_json(done.out)
    by = pairs(found)
    caches = {"bf16", "int8", "int4/bf16", "bf16/int4", "int4"}
    assert set(by) == set(product(("native", "int8", "int4[group=32]"), caches))
    assert by["native", "int8"].facts["source"] == "measured"
    sides = [by["native", name].value("kld") or 0.0 for name in ("int4/bf16", "bf16/int4")]
    assert by["native", "int4"].value("kld") == pytest.approx(sum(sides))
    assert found.facts["recommended"]["kv"] == "bf16"


def test_people_get_a_table_that_says_what_is_predicted(tiny: Path) -> None:
    flags = ["--device", "h100", "--context", "4k", "--batch", "64", "--max-kld", "0.5"]
    done = cli("estimate", "advise", "./model", *flags, cwd=tiny)
    assert done.code == 0, done.err
    assert "predicted (2)" in done.out
    assert "measured" in done.out
    assert "run " in done.out


def test_a_model_that_was_never_measured_gets_the_command_that_measures(tiny: Path) -> None:
    done = cli("estimate", "advise", "./model", "--device", "H100", "--output-dir", "nowhere", cwd=tiny)
    assert done.code == 2
    assert "no run measured a format of ./model: first fidelab compare ./model --kv q8_0" in done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "H300"], "unknown device 'H300'; known: "),
        (["--device", "H100", "--context", "1m"], "takes at most 40,960 tokens"),
        (["--device", "H100", "--context", "2k,4k"], "one context at a time"),
        (["--device", "H100", "--context", "-1"], "write whole numbers above 0"),
        (["--device", "H100", "--batch", "-2"], "--batch must be at least 1"),
        (["--device", "H100", "--memory", "-3G"], "is not a size"),
        (["--device", "H100", "--memory", "1k"], "no pair fits into"),
        (["--device", "H100", "--from", "absent"], "absent"),
    ],
)
def test_what_cannot_be_asked_gets_one_line(tiny: Path, flags: list[str], message: str) -> None:
    done = cli("estimate", "advise", "./model", *flags, cwd=tiny)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
