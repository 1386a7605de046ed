"""Reading experiments: short forms, overrides, and one line that names the place of what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.config.experiment import load, validate
from fidelab.config.load import apply_overrides, dump
from fidelab.core import KVSpec
from fidelab.core.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": "m", "reference": "f32", "candidates": ["int4"]}


def _write(folder: Path, text: str | bytes) -> Path:
    path = folder / "experiment.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_kv_format_is_read_once_where_it_is_written_and_stored_as_it_was_written() -> None:
    text = "int4[group=32]/fp8_e4m3[skip-layers=0-2]"
    experiment = validate({**MINIMAL, "candidates": [text]}, "x")
    assert experiment.candidates[0].kv == KVSpec.parse(text)
    assert experiment.model_dump(mode="json")["candidates"][0]["kv"] == text
    assert validate(experiment.model_dump(mode="json"), "x") == experiment


@pytest.mark.parametrize("text", ["a/b/c", "int4[group", "int4[skip-layers=5-2]", 4])
def test_a_kv_format_that_cannot_be_read_is_refused_in_one_line_that_names_its_place(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^x: candidates\.0\.kv: .*") as refused:
        validate({**MINIMAL, "candidates": [{"kv": text}]}, "x")
    assert "\n" not in str(refused.value)


def test_a_name_alone_and_fields_are_arms_names_alone_are_axes_and_two_words_are_controls() -> None:
    arm = {"kv": "int4", "name": "coarse", "engine_args": {"attention": "eager"}}
    experiment = validate({**MINIMAL, "candidates": ["int4", arm], "axes": ["kld"]}, "x")
    assert experiment.candidates[0].kv == KVSpec.parse("int4")
    assert (experiment.candidates[1].name, experiment.candidates[1].engine_args) == ("coarse", {"attention": "eager"})
    assert experiment.axes == {"kld": {}}
    assert [validate({**MINIMAL, "control": word}, "x").control for word in ("auto", "none")] == ["auto", "none"]


def test_what_is_dumped_reads_back_the_same(tmp_path: Path) -> None:
    experiment = validate({**MINIMAL, "axes": {"kld": {"windows": 3}}, "control": "bf16"}, "x")
    assert load(_write(tmp_path, dump(experiment, {"command": "fidelab compare"}))) == experiment


def test_the_dump_spells_every_default_out() -> None:
    written = yaml.safe_load(dump(validate(MINIMAL, "x")))
    assert set(written) == set(type(validate(MINIMAL, "x")).model_fields)


def test_an_override_reaches_a_nested_setting() -> None:
    data: dict[str, Any] = {"axes": {"kld": {"windows": 32}}}
    apply_overrides(data, ["axes.kld.windows=64", "seed=7"])
    assert data == {"axes": {"kld": {"windows": 64}}, "seed": 7}


@pytest.mark.parametrize("text", ["windows", "=3", "seed.x=1"])
def test_an_override_without_a_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides({"seed": 1}, [text])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"refrence": "f32"}, "unknown key 'refrence'; did you mean 'reference'"),
        ({"seed": "many"}, "seed: Input should be a valid integer"),
        ({"floor": 2}, "floor: Input should be less than or equal to 1"),
        ({"candidates": []}, "candidates: name at least one"),
        ({"candidates": [{"kv": "int4", "nmae": "x"}]}, "unknown key 'candidates.0.nmae'; did you mean 'name'"),
        ({"bands": "loose"}, "bands: Input should be 'fidelab' or 'refract'"),
        ({"axes": {}}, "axes: name at least one"),
        ({"model": None}, "'model' is missing"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate({key: value for key, value in {**MINIMAL, **change}.items() if value is not None}, "x.yaml")
    assert "\n" not in str(error.value)
    assert expected in str(error.value)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "aliases make more than 100,000 values of it"),
        ("model: &m [*m]", "nested deeper than 40 levels"),
        ("model: " + "[" * 50_000, "nested deeper than 40 levels"),
        *((text, "expected keys") for text in ("", "- a\n- b\n", "just words")),
        ("model: m\n  seed: [1\n", "experiment.yaml:2:7 is not YAML"),
        (b"model: \xff\n", "not UTF-8 (byte 7)"),
        ("model: 2026-99-99", "is not YAML: month must be in 1..12"),
        ("model: a\x00b", "is not YAML"),
        ("model: x\n" * 200_000, "cannot be read: more than 1,048,576 bytes"),
    ],
    ids=["alias-bomb", "alias-in-itself", "nest", "empty", "list", "words", "broken", "bytes", "date", "zero", "long"],
)
def test_settings_that_are_broken_or_meant_to_harm_are_one_line(text: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(_write(tmp_path, text))
    assert said in str(refused.value)


def test_aliases_and_merge_keys_may_be_used(tmp_path: Path) -> None:
    text = "model: m\nreference: f32\ncandidates: [&first {kv: int4, dtype: float32}, {<<: *first, kv: int8}]\n"
    arms = load(_write(tmp_path, text)).candidates
    assert [(str(arm.kv.k) if arm.kv else None, arm.dtype) for arm in arms] == [
        ("int4", "float32"),
        ("int8", "float32"),
    ]


def test_a_folder_a_pipe_or_a_device_is_not_a_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    strange = "a pipe or a device, where a regular file is expected"
    for path, said in ((tmp_path / "pipe", strange), (Path("/dev/zero"), strange), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=said):
            load(path)


def test_speed_is_measured_on_one_machine_alone() -> None:
    assert validate({**MINIMAL, "speed": True}, "x").speed
    with pytest.raises(ConfigError, match="speed: timings are compared on one machine"):
        validate({**MINIMAL, "speed": True, "executor": {"name": "ray"}}, "x")
