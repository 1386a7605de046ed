"""Rules that a settings file is read by: whose permission counts, and which demand belongs to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.config.experiment import load, validate
from fidelab.config.load import dump
from fidelab.config.presets import cells_of
from fidelab.config.schema import Experiment
from fidelab.config.trust import Trust, check_trust, demands, load_trusted, remember
from fidelab.core.errors import ConfigError

BASE: dict[str, Any] = {"model": "fake", "engine": "fake", "reference": "exact", "candidates": ["tilt"]}


@pytest.fixture(autouse=True)
def nothing_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def program(place: str) -> dict[str, Any]:
    """Settings of which one arm, or all, run on an interpreter of the file's choice."""
    engine = {"name": "fake", "python": "./python"}
    arm = {"kv": "tilt", "engine": engine}
    places: dict[str, dict[str, Any]] = {
        "all": {"engine": engine},
        "reference": {"reference": {**arm, "kv": "exact"}},
        "control": {"control": arm},
        "candidate": {"candidates": ["tilt[q=0.7]", arm]},
    }
    return places[place]


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}))
    return path


@pytest.mark.parametrize("place", ["all", "reference", "control", "candidate"])
def test_a_program_needs_permission_whichever_arm_names_it(place: str, tmp_path: Path) -> None:
    file = write(tmp_path, **program(place))
    settings = load(file)
    assert ("python", "./python") in {(one.key, one.value) for one in demands(settings)}
    written = yaml.safe_load(file.read_text())
    with pytest.raises(ConfigError, match=r"python './python' is a program that would be started"):
        check_trust(settings, written, file)
    check_trust(settings, written, file, Trust(words={("python", "./python")}))
    with pytest.raises(ConfigError):
        check_trust(settings, written, file, Trust(words={("python", "./other")}))


def read(file: Path, *overrides: str, files: tuple[Path, ...] = ()) -> Experiment:
    return load_trusted(file, overrides, files, validate)


def test_what_the_user_types_needs_no_permission_and_what_the_file_says_does(tmp_path: Path) -> None:
    mine = "{name: fake, python: ./mine}"
    assert read(write(tmp_path), f"engine={mine}").engine.python == "./mine"
    with pytest.raises(ConfigError, match=r"python '\./python'"):
        read(write(tmp_path, **program("candidate")), f"engine={mine}")


def test_permission_for_one_file_is_none_for_another(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, **program("all")) for name in ("one", "other"))
    with pytest.raises(ConfigError):
        read(one, files=(other,))
    assert read(one, files=(one,)).engine.python == "./python"
    assert read(one).engine.python == "./python"  # it is remembered
    changed = write(tmp_path / "one", **program("all"), seed=7)
    with pytest.raises(ConfigError):
        read(changed)  # another content


def test_a_file_that_fidelab_wrote_itself_is_trusted_as_it_was_written(tmp_path: Path) -> None:
    settings = validate({**BASE, **program("all")}, "flags")
    text = dump(settings, {"command": "fidelab compare"})
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read(file)
    remember(settings, text, file)
    assert read(file) == settings
    file.write_text(text.replace("./python", "./other"))
    with pytest.raises(ConfigError):
        read(file)


def preset(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"engine": {"name": "vllm", "python": "./python"}, "model": "owner/m"}))
    return path


@pytest.mark.parametrize("place", ["candidates", "vary"])
def test_a_presets_file_of_somebody_else_needs_permission_where_an_arm_names_it(place: str, tmp_path: Path) -> None:
    path = preset(tmp_path / "other")
    data = {"model": "smollm2-135m", "candidates": ["x"]}
    named = {"candidates": [f"preset={path}"]} if place == "candidates" else {"vary": [f"preset={path}", "kv=a,b"]}
    with pytest.raises(ConfigError, match="is a program that would be started"):
        validate({**data, **named}, "test")
    trusted = validate({**data, **named}, "test", Trust([path]))
    arms = trusted.candidates if place == "candidates" else cells_of(trusted)
    assert {arm.engine and arm.engine.python for arm in arms} == {"./python"}


def test_each_cell_of_a_grid_has_one_value_of_every_key_and_all_combinations_are_there() -> None:
    cells = cells_of(validate({**BASE, "vary": ["noise=0.1,0.2", "kv=tilt,exact", "env.A=1"]}, "test"))
    found = [(cell.engine_args, cell.kv and cell.kv.label, cell.env) for cell in cells]
    assert found == [({"noise": noise}, kv, {"A": "1"}) for noise in ("0.1", "0.2") for kv in ("tilt", "exact")]
    assert [cell.name for cell in cells][:2] == ["noise=0.1, kv=tilt, env.A=1", "noise=0.1, kv=exact, env.A=1"]
