"""fidelab where the package k16v8 is not installed: everything else works, and what needs it says so in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fidelab.models.tiny import make_tiny

INSTALL = "pip install k16v8"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("without") / "tiny", positions=128)


def fidelab(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The command in a process that cannot import k16v8, nor can those that it starts."""
    hook = folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text("import sys\nsys.modules['k16v8'] = None\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(hook),
        "OMP_NUM_THREADS": "1",
        "FIDELAB_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "fidelab", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("fidelab: ")
    assert done.stderr.endswith(f"{INSTALL}\n")


def test_help_is_there(tmp_path: Path) -> None:
    done = fidelab(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_tells_that_it_is_missing_and_what_to_do(tmp_path: Path) -> None:
    record = json.loads(fidelab(tmp_path, "doctor", "--json").stdout)
    [check] = [check for check in record["checks"] if (check["name"], check["group"]) == ("k16v8", "packages")]
    assert (check["status"], check["remedy"]) == ("missing", INSTALL)
    assert not any("k16v8" in reason for reason in record["reasons"])


@pytest.mark.full
def test_a_comparison_on_transformers_runs(model: Path, tmp_path: Path) -> None:
    sizes = ("--axes", "kld", "--windows", "2", "--n-ctx", "32", "--no-floor", "--threads", "1", "--device", "cpu")
    formats = ("--dtype", "float32", "--reference", "f32", "--kv", "fp8_e4m3")
    done = fidelab(tmp_path, "compare", model, *formats, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [arm["status"] for arm in report["candidates"]] == ["ok"]


def test_an_arm_that_asks_for_its_attention_is_one_line(model: Path, tmp_path: Path) -> None:
    words = ("compare", model, "--kv", "k16v8", "--engine-arg", "attention=k16v8", "--device", "cpu")
    assert_one_line(fidelab(tmp_path, *words))


def test_the_study_of_attention_is_one_line(model: Path, tmp_path: Path) -> None:
    assert_one_line(fidelab(tmp_path, "diagnose", "attention", model))
