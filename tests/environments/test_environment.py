"""Environments: which interpreter an engine gets, and what it sees there."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fidelab
from fidelab.core.errors import EngineError, InputError, UsageError
from fidelab.engines import ENGINES
from fidelab.environments.environment import MARKER, Environment, link_folder, locate, write_marker
from tests.environments.conftest import Second

NEEDY = "tests.environments.odd:Odd"  # needs a distribution that is not here


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIDELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setitem(ENGINES._table, "vllm", NEEDY)
    return tmp_path / "cache"


def made(cache: Path, name: str) -> Path:
    """A folder with an interpreter."""
    folder = cache / "engines" / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


def test_an_engine_that_needs_no_package_runs_in_this_interpreter() -> None:
    found = locate("fake")
    assert found.is_current
    assert found.command("a.b") == [sys.executable, "-m", "a.b"]
    assert found.variables() == {"PYTHONSAFEPATH": "1"}  # it keeps its PYTHONPATH


def test_the_interpreter_that_is_named_is_taken_even_where_this_one_would_do(second: Second) -> None:
    found = locate("fake", python=second.python)
    assert (found.python, found.is_current) == (second.python, False)


def test_an_environment_with_the_same_base_interpreter_is_not_this_one(second: Second) -> None:
    assert Path(second.python).resolve() == Path(sys.executable).resolve()
    assert not Environment("fake", second.python).is_current
    assert Environment("fake", str(Path(sys.executable).with_name("python"))).is_current


def test_an_interpreter_is_found_by_its_name_on_path(second: Second, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(second.python).parent))
    assert locate("fake", python="python").python == second.python


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "~/no/such/python", __file__, "/"])
def test_an_interpreter_that_cannot_be_run_is_refused(python: str) -> None:
    with pytest.raises(UsageError, match=r"--python .*(is not a program|is not on PATH)"):
        locate("fake", python=python)


def test_an_engine_that_is_installed_nowhere_names_the_command_that_installs_it() -> None:
    with pytest.raises(EngineError, match=r"^engine vllm is not installed: fidelab setup install vllm"):
        locate("vllm")


def test_an_installed_environment_is_found_and_the_one_for_gpus_comes_first(cache: Path) -> None:
    cpu = made(cache, "vllm-cpu")
    assert locate("vllm").python == str(cpu / "bin" / "python")
    gpu = made(cache, "vllm")
    write_marker(gpu, {"recipe": "vllm", "versions": {"vllm": "1"}})
    assert locate("vllm").python == str(gpu / "bin" / "python")


def test_an_environment_that_was_not_completed_is_passed_over(cache: Path) -> None:
    folder = made(cache, "vllm-cpu")
    write_marker(folder, {"recipe": "vllm-cpu"})
    with pytest.raises(EngineError, match="not installed"):
        locate("vllm")
    (folder / MARKER).unlink()  # one that the user made
    assert locate("vllm").python == str(folder / "bin" / "python")


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_shim_folder_must_be_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"shim folder .*{name}"):
        locate("fake", pythonpath=[str(tmp_path / name)])


def test_shims_come_before_what_the_user_has_on_pythonpath_and_behind_fidelab(
    second: Second, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    shims = [str(tmp_path), str(second.site)]
    there = locate("fake", python=second.python, pythonpath=shims).variables()
    assert there["PYTHONPATH"].split(":") == [str(link_folder()), *shims, "/a", "/b"]
    here = locate("fake", pythonpath=shims)
    assert not here.is_current
    assert here.variables()["PYTHONPATH"].split(":") == [*shims, "/a", "/b"]


def test_an_environment_sees_fidelab_and_none_of_the_packages_that_it_needs(second: Second) -> None:
    script = """
import importlib.util, json, fidelab, fidelab.workers.child
print(json.dumps([fidelab.__version__, [n for n in ("torch", "pydantic", "pytest") if importlib.util.find_spec(n)]]))
"""
    said = second.run(script, **locate("fake", python=second.python).variables())
    assert json.loads(said) == [fidelab.__version__, []]


def test_an_environment_finds_our_plugins_by_their_entry_points(second: Second) -> None:
    groups = ("vllm.general_plugins", "sglang.srt.plugins")
    script = f"""
from importlib.metadata import entry_points, version
print(version("fidelab"), sorted((p.group, p.name, p.value) for g in {groups} for p in entry_points(group=g)))
"""
    ours = sorted(
        (point.group, point.name, point.value)
        for package in ("fidelab", "k16v8")
        for point in metadata.distribution(package).entry_points
        if point.group in groups
    )
    assert {(group, name) for group, name, _ in ours} == {
        (group, name) for group in groups for name in ("fidelab_capture", "k16v8")
    }
    said = second.run(script, PYTHONPATH=str(link_folder()))
    assert said == f"{fidelab.__version__} {ours}"


def test_an_environment_sees_k16v8_where_it_is_installed_beside_fidelab(
    second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from importlib.util import find_spec; print(getattr(find_spec('k16v8'), 'origin', None) is not None)"
    assert second.run(script, PYTHONPATH=str(link_folder())) == "True"
    monkeypatch.setitem(sys.modules, "k16v8", None)
    assert second.run(script, PYTHONPATH=str(link_folder())) == "False"


def test_an_environment_sees_a_further_package_only_where_it_is_asked_for(second: Second) -> None:
    script = "from importlib.util import find_spec; print(find_spec('fidelab_checkpoints') is not None)"
    assert second.run(script, PYTHONPATH=str(link_folder())) == "False"
    assert second.run(script, PYTHONPATH=str(link_folder("fidelab_checkpoints"))) == "True"


def test_the_link_folder_is_made_once_and_another_version_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first = link_folder()
    inode = first.stat().st_ino
    assert link_folder() == first
    assert first.stat().st_ino == inode
    monkeypatch.setattr(fidelab, "__version__", "99")
    assert link_folder() != first
