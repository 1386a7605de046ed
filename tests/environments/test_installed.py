"""Installations: stock or changed, for which device, and what stands before them on PYTHONPATH."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fidelab
from fidelab.core import Arm, KVSpec
from fidelab.engines import installed
from fidelab.engines.checkpoint import unknown_architecture
from tests.environments.conftest import add_distribution

NAME = "stock-engine-of-a-test"
FILES = {"stockengine/__init__.py": "x = 1\n", "stockengine/models/a.py": "y = 2\n", "stockengine/data.txt": "z"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    add_distribution(folder, NAME, FILES)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def label() -> str:
    return installed.provenance([NAME])[NAME]


def test_a_package_as_it_was_published_is_stock(site: Path) -> None:
    (site / "stockengine" / "data.txt").write_text("not code")
    (site / "stockengine" / "__pycache__").mkdir()
    assert label() == "stock"


def test_a_package_that_is_not_here_has_no_label(site: Path) -> None:
    assert installed.provenance(["no-such-engine"]) == {}


def test_a_changed_a_missing_and_an_added_file_make_it_modified(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: Any = metadata.Distribution.files
    present = property(lambda self: [file for file in listed.fget(self) or () if Path(file.locate()).exists()])
    monkeypatch.setattr(metadata.Distribution, "files", present)  # as since Python 3.12
    (site / "stockengine" / "models" / "a.py").write_text("y = 3\n")
    assert label() == "modified: 1 file differs from the package, first stockengine/models/a.py"
    (site / "stockengine" / "__init__.py").unlink()
    assert label() == "modified: 2 files differ from the package, first stockengine/__init__.py"
    (site / "stockengine" / "__init__.py").write_text(FILES["stockengine/__init__.py"])
    (site / "stockengine" / "models" / "a.py").write_text(FILES["stockengine/models/a.py"])
    assert label() == "stock"
    (site / "stockengine" / "models" / "new.py").touch()
    assert label() == "modified: 1 file differs from the package, first stockengine/models/new.py"


@pytest.mark.parametrize(
    ("direct", "said"),
    [
        ({"url": "file:///src/engine", "dir_info": {"editable": True}}, "built from /src/engine"),
        (
            {"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}},
            f"built from https://host/x@{'a' * 12}",
        ),
    ],
)
def test_a_package_that_comes_from_sources_says_which(direct: dict[str, object], said: str, site: Path) -> None:
    (site / f"{NAME.replace('-', '_')}-1.dist-info" / "direct_url.json").write_text(json.dumps(direct))
    assert label() == said


def test_folders_on_pythonpath_are_told_apart_by_their_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim, twin = tmp_path / "shim", tmp_path / "twin"
    (shim / "sgl_kernel").mkdir(parents=True)
    (shim / "sgl_kernel" / "__init__.py").write_text("a = 1\n")
    shutil.copytree(shim, twin)
    (twin / "notes.txt").touch()
    (twin / ".venv").mkdir()
    (twin / ".venv" / "x.py").touch()
    ours = Path(fidelab.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{ours}:{shim}:{twin}:{shim}:{tmp_path / 'absent'}:")
    first, second = installed.shims()
    assert (first["folder"], second["folder"]) == (str(shim), str(twin))
    assert first["sha256"] == second["sha256"]
    (twin / "sgl_kernel" / "__init__.py").write_text("a = 2\n")
    assert installed.shims()[1]["sha256"] != first["sha256"]


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.2'\n", "hip"),
        ("cuda = '13.0'\nhip = None\n", "cuda"),
    ],
)
def test_what_torch_is_built_for_is_read_from_its_version_file(
    text: str, built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path)
    assert installed.build(["vllm"]) == built


def test_a_build_for_cpus_is_known_by_its_name_whatever_its_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text("cuda = '13.0'\n")
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path)
    add_distribution(tmp_path, "some-engine-cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed.build(["some-engine", "some-engine-cpu"]) == "cpu"


@pytest.mark.parametrize(("library", "built"), [("libggml-cuda.so", "cuda"), ("libggml-hip.so", "hip"), ("x", "cpu")])
def test_what_llama_cpp_is_built_for_is_seen_by_its_libraries_or_those_of_an_own_build(
    library: str, built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / library).touch()
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    assert installed.build(["llama-cpp-python"]) == built
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "empty"))
    assert installed.build(["llama-cpp-python"]) == "cpu"


def test_a_build_for_gpus_runs_on_the_cpu_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_GPU_FILES", {"cuda": (str(tmp_path / "gpu"),), "hip": ()})
    assert installed.device("cuda") == "cpu"
    (tmp_path / "gpu").touch()
    assert [installed.device(built) for built in ("cuda", "hip", "cpu", None)] == ["cuda", "cpu", "cpu", "cpu"]


def test_a_model_type_is_unknown_unless_transformers_or_the_engine_names_it(site: Path, tmp_path: Path) -> None:
    arm = Arm("bf16", "hf", "m", str(tmp_path), "0" * 64, KVSpec.parse("bf16"), "float32", "cpu", 1)

    def unknown(kind: object, *own: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        return unknown_architecture(arm, *own)

    (site / "stockengine" / "models" / "a.py").write_text('CONFIGS = {"their_model": 1, **dict(other_one=2)}\n')
    assert unknown("llama") == unknown("qwen2_5_vl") == unknown(None) == ""
    assert "unknown to transformers" in unknown("their_model")
    assert unknown("their_model", "stockengine/models") == unknown("other_one", "stockengine/models") == ""
    assert "model_type 'lama'" in unknown("lama", "stockengine/models")


def test_the_state_changes_with_whatever_answers_depend_on_and_with_nothing_else(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "stockengine" / "lib.so").write_text("1")
    record = next(site.glob("*.dist-info/RECORD"))
    record.write_text(record.read_text() + "stockengine/lib.so,,\n")
    seen = [installed.state([NAME], {})]

    def changed() -> bool:
        seen.append(installed.state([NAME], {}))
        return seen[-1] != seen[-2]

    assert not changed()
    (site / "stockengine" / "__pycache__").mkdir()
    (site / "stockengine" / "__pycache__" / "a.pyc").touch()
    assert not changed()
    for name, text in (("models/a.py", "y = 3, 4\n"), ("models/new.py", ""), ("lib.so", "12")):
        (site / "stockengine" / name).write_text(text)
        assert changed(), name
    (site / "new-1.dist-info").mkdir()
    assert changed()
    monkeypatch.setattr(installed, "_BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("another start of the machine")
    assert changed()
    assert installed.state([NAME], {"OMP_X": "1"}) != seen[-1]
    assert not changed()


def test_a_distribution_that_is_built_from_sources_has_no_state(site: Path) -> None:
    next(site.glob("*.dist-info/RECORD")).with_name("direct_url.json").write_text('{"url": "file:///src/engine"}')
    assert installed.state([NAME], {}) is None
