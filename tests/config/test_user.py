"""The user's own defaults: what they reach, what precedes them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fidelab.config.user import USER_OPTIONS, user_defaults
from fidelab.core.errors import ConfigError
from tests.run.harness import cli, fake_file, refused, write_inputs

SMALL = ("--text", "text.txt", "--prompts", "prompts.txt", "--windows", 4, "--n-ctx", 16)
COMPARE = ("compare", "fake", "--kv", "tilt", "--reference", "exact", *SMALL, "--quick")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which is not written yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "fidelab" / "config.yaml"
    path.parent.mkdir(parents=True)
    write_inputs(tmp_path)
    return path


def test_defaults_reach_a_run_its_settings_and_its_recorded_command(config: Path, tmp_path: Path) -> None:
    config.write_text("engine: fake\nthreads: 1\noutput-dir: mine\n")
    done = cli(*COMPARE, cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"fidelab: from {config}: --engine fake --threads 1" in done.err
    [report] = [json.loads(path.read_text()) for path in (tmp_path / "mine").glob("2*/report.json")]
    assert report["settings"]["engine"] == "fake"
    assert report["settings"]["threads"] == 1
    assert report["command"].endswith(" --engine fake --threads 1")
    assert cli("runs", "show", "latest", cwd=tmp_path).code == 0


def test_a_flag_and_an_experiment_file_precede_defaults(config: Path, tmp_path: Path) -> None:
    config.write_text("engine: vllm\n")
    done = cli(*COMPARE, "--engine", "fake", cwd=tmp_path)
    assert (done.code, "from " in done.err) == (0, False)
    file = fake_file(tmp_path, axes={"kld": {"windows": 4, "n_ctx": 16}}, candidates=["tilt"], control="none")
    assert cli("compare", "-f", file, cwd=tmp_path).code == 0


def test_a_file_without_a_folder_of_runs_uses_the_users(config: Path, tmp_path: Path) -> None:
    config.write_text("output-dir: mine\n")
    axes = {"kld": {"windows": 4, "n_ctx": 16}}
    file = fake_file(tmp_path, axes=axes, candidates=["tilt"], control="none")
    assert cli("compare", "-f", file, cwd=tmp_path).code == 0
    assert len([*(tmp_path / "mine").glob("2*/report.json")]) == 1
    file = fake_file(tmp_path, axes=axes, candidates=["tilt"], control="none", output_dir="its-own")
    assert cli("compare", "-f", file, cwd=tmp_path).code == 0
    assert len([*(tmp_path / "its-own").glob("2*/report.json")]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("enginee: vllm", "unknown key 'enginee'; did you mean 'engine'?"),
        ("kv: q8_0", "unknown key 'kv'"),
        ("engine: [vllm]", "engine: write one text or number"),
        ("- vllm", "write options and their defaults"),
        ("engine: 'vllm", "is not YAML"),
    ],
)
def test_a_faulty_file_is_one_line_with_its_path_and_help_works(
    text: str, said: str, config: Path, tmp_path: Path
) -> None:
    config.write_text(text)
    line = refused(cli(*COMPARE, cwd=tmp_path))
    assert str(config) in line
    assert said in line
    assert cli("compare", "--help", cwd=tmp_path).code == 0


def test_values_are_checked_as_flags_are(config: Path, tmp_path: Path) -> None:
    config.write_text("context: long\nengine: fake")
    assert "--context 'long' is not a length" in refused(cli(*COMPARE, cwd=tmp_path))


def test_each_option_is_one_that_commands_have(config: Path) -> None:
    config.write_text(yaml.safe_dump(dict.fromkeys(USER_OPTIONS, "1")))
    assert user_defaults() == dict.fromkeys(USER_OPTIONS, "1")
    config.write_text("")
    assert user_defaults() == {}
    config.write_text("engine:\n")
    with pytest.raises(ConfigError, match="write one text or number"):
        user_defaults()
