"""Installing: an environment is there whole or not at all, and nothing of the user's is touched."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from fidelab.config.experiment import validate
from fidelab.core.errors import EngineError, OutputError, UsageError
from fidelab.engines import ENGINES
from fidelab.environments import environment, recipes
from fidelab.environments import install as module
from fidelab.environments import listing as listing_module
from fidelab.environments.environment import MARKER, Environment, locate, read_marker, write_marker
from fidelab.environments.install import Stage, install, remove
from fidelab.environments.listing import listing
from fidelab.environments.queries import ask
from fidelab.environments.recipes import RECIPES, Recipe, Step
from fidelab.environments.trial import try_out
from fidelab.models.cache import cache_dir
from fidelab.models.tiny import make_tiny
from fidelab.plan.resolve import resolve_experiment
from tests.environments.agreement import RUNS, UNKNOWN, check_agreement
from tests.environments.conftest import ROOT, Second, add_distribution, add_numpy
from tests.processes import alive, until
from tests.run.harness import cli
from tests.sizes import first

TARGET = "tests.environments.odd:Odd"


@pytest.fixture(autouse=True)
def alone(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No package index; engine ``odd`` is known here and, through PYTHONPATH, in every environment."""
    shims = tmp_path / "shims"
    shims.mkdir()
    add_numpy(shims)
    add_distribution(shims, "odd-plugin")
    (shims / "odd_plugin-1.dist-info" / "entry_points.txt").write_text(f"[fidelab.engines]\nodd = {TARGET}\n")
    monkeypatch.setenv("PYTHONPATH", f"{shims}:{ROOT}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setitem(ENGINES._table, "odd", TARGET)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The distribution that brings engine ``odd``."""
    add_distribution(tmp_path / "wheel", "odd-engine", {"odd_native.py": ""})
    path = tmp_path / "odd_engine-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for part in sorted((tmp_path / "wheel").rglob("*")):
            if part.is_file():
                file.write(part, part.relative_to(tmp_path / "wheel"))
        info = "odd_engine-1.dist-info"
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    return path


@pytest.fixture
def native() -> dict[str, str]:
    """What engine ``odd`` of a new environment does wrong, by KV format: to be filled by a test."""
    return {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, native: dict[str, str]) -> None:
    """Environments with a link to this interpreter's pip are made in no time; they come with engine ``odd``."""
    pip = Path(pytest.importorskip("pip").__file__).parent

    def make(python: str, folder: Path, log: object) -> None:
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        module._run([python, "-m", "venv", "--without-pip", str(folder)], log)  # type: ignore[arg-type]
        (site / "pip").symlink_to(pip)
        add_distribution(site, "odd-engine", {"odd_native.py": f"FAULTS = {native}"})

    monkeypatch.setattr(module, "_make", make)


@pytest.fixture
def untried(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``quick``, and the engine is not started: for tests of the folder, or of what is asked later.

    Three processes less for each installation.  Tests of the trial itself, and one of a whole installation, start them.
    """
    monkeypatch.setattr(module, "_check", lambda recipe, found: {"odd-engine": "1"})
    monkeypatch.setattr(module, "_fault", lambda recipe, found: "")
    monkeypatch.setattr(module, "listing", lambda engines: [])


def recipe(*steps: Step, **changes: str) -> Recipe:
    return Recipe("odd-cpu", "odd", "cpu", steps, "small", **changes)  # type: ignore[arg-type]


def sleeps_when_idle(line: str) -> None:
    pass


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_an_environment_is_made_found_asked_and_removed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = environment.engines_dir() / "odd"
    said: list[str] = []
    stages: list[Stage] = []
    found = install(recipe(Step((str(wheel),), alone=True)), folder, said.append, watch=stages.append)
    assert locate("odd") == found
    assert [(stage.number, stage.total, stage.kind, stage.text) for stage in stages] == [
        (1, 3, "environment", "for cpu"),
        (2, 3, "packages", str(wheel)),
        (3, 3, "trial", "a prefill and a decode"),
    ]
    marker = read_marker(folder)
    assert marker is not None
    assert (marker["recipe"], marker["versions"]) == ("odd-cpu", {"odd-engine": "1"})
    with ask(found) as asked:
        assert asked.versions() == {"odd-engine": "1"}
        assert asked.about.provenance["odd-engine"].startswith("built from ")
    assert beside(folder) == ["odd"]
    remove(folder)
    assert beside(folder) == []
    with pytest.raises(EngineError, match="not installed"):
        locate("odd")


def test_a_step_that_fails_leaves_its_log_and_nothing_else(tmp_path: Path, quick: None) -> None:
    folder = tmp_path / "engines" / "odd"
    with pytest.raises(EngineError) as error:
        install(recipe(Step(("no-such-package==1",)), hint="mind the gap"), folder, sleeps_when_idle)
    assert re.fullmatch(
        r"odd-cpu cannot be installed: Could not find a version that satisfies the requirement no-such-package==1 "
        rf"\(from versions: none\); mind the gap; log: {folder}\.log",
        str(error.value),
    )
    assert beside(folder) == ["odd.log"]
    assert "no-such-package" in (tmp_path / "engines" / "odd.log").read_text()


def test_without_a_network_one_line_names_the_package_and_nothing_is_left(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    folder = environment.engines_dir() / "odd"
    with pytest.raises(EngineError) as error:
        install(recipe(Step(("no-such-package==1",))), folder, sleeps_when_idle)
    assert str(error.value) == (
        "odd-cpu is not installed: the package index could not be reached for no-such-package==1: "
        f"check the network and pip's settings (pip config list); log: {folder}.log"
    )
    assert beside(folder) == ["odd.log"]
    with pytest.raises(EngineError, match="engine odd is not installed"):
        locate("odd")


def test_where_python_lacks_ensurepip_the_pip_that_is_here_takes_its_place(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ensurepip

    monkeypatch.setenv("PIP_FIND_LINKS", str(Path(ensurepip.__file__).parent / "_bundled"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\n[ "$2 $#" = "venv 3" ] && exit 1\nexec {sys.executable} "$@"\n')
    bare.chmod(0o755)
    found = install(recipe(Step((str(wheel),))), tmp_path / "odd", sleeps_when_idle, python=str(bare))
    assert locate("odd", python=found.python) == found
    assert read_marker(tmp_path / "odd") is not None


def test_a_complete_environment_stays_and_one_of_another_recipe_is_made_anew(
    tmp_path: Path, untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "engines" / "odd"
    said: list[str] = []
    install(recipe(), folder, sleeps_when_idle)
    created = (folder / MARKER).stat().st_mtime_ns
    install(recipe(hint="another word"), folder, said.append)
    assert said == [f"odd-cpu is already installed in {folder}"]
    assert (folder / MARKER).stat().st_mtime_ns == created
    monkeypatch.setattr(module, "_pip", lambda *words, **more: None)
    install(recipe(Step(("x",))), folder, said.append)
    assert said[1] == "odd-cpu was installed from another recipe: installing it again"
    assert (folder / MARKER).stat().st_mtime_ns != created
    assert beside(folder) == ["odd"]


def test_an_environment_is_made_again_on_request_or_where_its_interpreter_is_gone(
    tmp_path: Path, untried: None
) -> None:
    folder = tmp_path / "engines" / "odd"
    said: list[str] = []
    install(recipe(), folder, sleeps_when_idle)
    created = (folder / MARKER).stat().st_mtime_ns
    install(recipe(), folder, said.append, again=True)
    assert (folder / MARKER).stat().st_mtime_ns != created
    for python in (folder / "bin").glob("python*"):
        python.unlink()
    install(recipe(), folder, said.append)
    assert f"odd-cpu in {folder} does not start: installing it again" in said
    assert os.access(folder / "bin" / "python", os.X_OK)
    assert beside(folder) == ["odd"]


@pytest.mark.parametrize("killed", [False, True], ids=["failed", "killed"])
def test_an_environment_that_could_not_be_replaced_is_there_again(killed: bool, tmp_path: Path, untried: None) -> None:
    folder = tmp_path / "engines" / "odd"
    install(recipe(), folder, sleeps_when_idle)
    before = read_marker(folder)
    if killed:
        folder.rename(module._aside(folder))
        folder.mkdir()
        write_marker(folder, {"recipe": "odd-cpu"})
        said: list[str] = []
        install(recipe(), folder, said.append)
        assert said == [f"odd-cpu is already installed in {folder}"]
    else:
        with pytest.raises(EngineError, match="cannot be installed"):
            install(recipe(Step(("no-such-package==1",))), folder, sleeps_when_idle)
    assert read_marker(folder) == before
    assert os.access(folder / "bin" / "python", os.X_OK)
    assert not module._aside(folder).exists()


def test_an_environment_of_another_recipe_is_named_in_the_list_and_by_doctor(
    untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fidelab.doctor import parts

    known = {**RECIPES, "odd-cpu": recipe()}
    monkeypatch.setattr(environment, "RECIPES", known)
    install(recipe(), environment.engines_dir() / "odd", sleeps_when_idle)
    [place] = listing(["odd"])
    assert place.update is None
    known["odd-cpu"] = recipe(Step(("x",)))
    [place] = listing(["odd"])
    assert (place.problem, place.update) == (None, "fidelab setup install odd --cpu")
    check, _ = parts._brought("odd", [place], None)
    assert check.detail.endswith(", installed from another recipe: fidelab setup install odd --cpu")


def test_a_complete_environment_that_is_broken_is_made_again_by_its_remedy(
    untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_module, "install_command", lambda engine, *flags: " ".join([engine, *flags]))
    made("raise OSError('broken')")
    [place] = listing(["odd"])
    assert (place.problem, place.remedy) == ("OSError: broken", "odd --reinstall")


def test_a_recipe_is_known_by_what_it_installs_and_not_by_its_words() -> None:
    plain = recipe(Step(("x",)))
    assert plain.sha256 == recipe(Step(("x",), seconds=9.0), hint="another word").sha256
    others = [
        recipe(Step(("y",))),
        recipe(Step(("x",), alone=True)),
        replace(plain, variables={"CMAKE_ARGS": "-fast"}),
        replace(plain, cmake="llamacpp.cmake"),
        replace(plain, shims=("standins",)),
    ]
    assert len({plain.sha256, *(other.sha256 for other in others)}) == 1 + len(others)


def test_the_time_left_is_that_of_the_step_and_those_after_it(
    tmp_path: Path, untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(recipe(Step(("x",), seconds=1000.0)), trial_seconds=500.0)
    stages: list[Stage] = []
    monkeypatch.setattr(module, "_pip", lambda *words, **more: None)
    install(found, tmp_path / "odd", sleeps_when_idle, watch=stages.append)
    assert [stage.remaining_seconds(0.0) for stage in stages] == [1505.0, 1500.0, 500.0]
    assert stages[1].remaining_seconds(300.0) == 1200.0
    assert stages[1].remaining_seconds(2000.0) == 500.0


def test_an_unfinished_environment_is_made_anew(tmp_path: Path, untried: None) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "rest").touch()
    write_marker(folder, {"recipe": "odd-cpu"})
    install(recipe(), folder, sleeps_when_idle)
    assert read_marker(folder) is not None
    assert not (folder / "rest").exists()


def test_ctrl_c_leaves_nothing(tmp_path: Path, untried: None) -> None:
    folder = tmp_path / "odd"

    def stop(stage: Stage) -> None:
        if stage.kind == "packages":
            assert read_marker(folder) is None
            assert (folder / MARKER).exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(recipe(Step(("x",))), folder, sleeps_when_idle, watch=stop)
    assert not folder.exists()


def test_an_environment_whose_engine_does_not_answer_or_is_built_for_another_device_is_not_kept(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"^odd-cpu: what pip found is built for None, not for hip: set an index$"):
        install(recipe(build="hip", hint="set an index"), tmp_path / "odd", sleeps_when_idle)
    assert not (tmp_path / "odd").exists()
    monkeypatch.delenv("PYTHONPATH")  # and with it numpy
    with pytest.raises(EngineError, match="has no numpy"):
        install(recipe(), tmp_path / "odd", sleeps_when_idle)
    assert not (tmp_path / "odd").exists()


def rebuilt(monkeypatch: pytest.MonkeyPatch, native: dict[str, str]) -> list[tuple[list[str], str]]:
    """Calls of pip (words, CMAKE_ARGS) from now on; a forced installation brings an engine with these faults."""
    calls: list[tuple[list[str], str]] = []

    def pip(recipe: Recipe, found: Environment, words: list[str], log: object, conservative: bool = False) -> None:
        calls.append((words, recipe.build_variables(conservative=conservative).get("CMAKE_ARGS", "")))
        if "--force-reinstall" in words:
            [file] = Path(found.python).parents[1].glob("lib/python*/site-packages/odd_native.py")
            file.write_text(f"FAULTS = {native}")

    monkeypatch.setattr(module, "_pip", pip)
    return calls


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "crash",
            r"the worker was ended by SIGSEGV in .*string_at \(ctypes/__init__\.py, line \d+\) — the engine's build",
        ),
        ("raise", "no kernel for this format"),
        ("nan", "(prefill|decode) gave logprobs that are not finite"),
        ("short", "it answered decode, prefill, with less than was asked"),
        ("shape", "no kernel for a head dimension of 128"),
    ],
)
def test_an_engine_whose_native_format_does_not_run_is_not_installed(
    fault: str, said: str, tmp_path: Path, quick: None, native: dict[str, str]
) -> None:
    native |= {"any": fault}
    with pytest.raises(EngineError) as error:
        install(recipe(), tmp_path / "odd", sleeps_when_idle)
    found = re.match(
        rf"odd-cpu is not installed: KV format any does not run: {said}.*; log: (?P<log>\S+)$", str(error.value)
    )
    assert found is not None, str(error.value)
    assert "a harmless warning" not in str(error.value)
    assert ("Fatal Python error" in Path(found["log"]).read_text()) == (fault == "crash")
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize("safe", [True, False], ids=["the conservative one runs", "it crashes, too"])
def test_a_build_that_crashes_is_replaced_by_the_conservative_one(
    safe: bool, tmp_path: Path, quick: None, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native |= {"any": "crash", "some": "crash"}
    calls = rebuilt(monkeypatch, {} if safe else native)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    steps = (Step(("needed",)), Step(("x",), compiled=True))
    found = replace(recipe(*steps), variables={"CMAKE_ARGS": "-fast"}, fallback={"CMAKE_ARGS": "-safe"})
    failed = "odd-cpu is not installed: KV format any does not run: the worker was ended"
    with nullcontext() if safe else pytest.raises(EngineError, match=failed):
        install(found, tmp_path / "odd", sleeps_when_idle)
    assert calls == [
        (["install", "needed"], "-fast"),
        (["install", "x"], "-fast"),
        (["install", "--force-reinstall", "--no-deps", "--no-cache-dir", "x"], "-safe"),
    ]
    assert (tmp_path / "odd").exists() == safe
    assert (read_marker(tmp_path / "odd") is not None) == safe


def test_a_build_that_the_user_chose_is_not_replaced(
    tmp_path: Path, quick: None, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native |= {"any": "crash"}
    calls = rebuilt(monkeypatch, {})
    monkeypatch.setenv("CMAKE_ARGS", "-mine")
    with pytest.raises(EngineError, match="is not installed"):
        install(replace(recipe(Step(("x",))), fallback={"CMAKE_ARGS": "-safe"}), tmp_path / "odd", sleeps_when_idle)
    assert [words for words, _ in calls] == [["install", "x"]]


def starts(folder: Path) -> list[str]:
    """KV format of each process that opened engine ``odd`` of an environment."""
    [file] = folder.glob("lib/python*/site-packages/odd_starts")
    return file.read_text().split()


def test_an_installation_starts_the_engine_once_with_its_native_format(
    tmp_path: Path, quick: None, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native |= {"some": "crash"}
    calls = rebuilt(monkeypatch, {})
    found = replace(recipe(Step(("x",), compiled=True)), fallback={"CMAKE_ARGS": "-safe"})
    install(found, tmp_path / "odd", sleeps_when_idle)
    assert [words for words, _ in calls] == [["install", "x"]]
    assert starts(tmp_path / "odd") == ["any"]


def test_an_engine_that_does_not_support_its_native_format_here_is_not_installed(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENGINES.load("odd"), "native_kv", "every")
    with pytest.raises(EngineError, match="KV format every does not run: odd does not support it on this machine"):
        install(recipe(), tmp_path / "odd", sleeps_when_idle)
    assert not (tmp_path / "odd").exists()


def test_a_format_that_does_not_run_is_listed_and_doctor_tries_all_again(untried: None, native: dict[str, str]) -> None:
    from fidelab.doctor import parts

    native |= {"some": "raise"}
    folder = environment.engines_dir() / "odd"
    found = install(recipe(), folder, sleeps_when_idle)
    try_out(found, cache_dir() / "logs", names=["some"])
    [place] = listing(["odd"])
    assert place.refused["some"].startswith("it did not run in its trial: no kernel for this format; log: ")
    assert [(check.name, check.status) for check in parts._brought("odd", [place], None)[1]] == [
        ("any", "ok"),
        ("some", "missing"),
        ("every", "missing"),
    ]
    [file] = folder.glob("lib/python*/site-packages/odd_native.py")
    file.write_text("FAULTS = {'any': 'crash'}")
    trials: list[str] = []
    tried = {check.name: (check.status, check.remedy) for check in parts._brought("odd", [place], trials.append)[1]}
    assert trials == ["odd: trying any", "odd: trying some"]
    assert tried == {
        "any": ("broken", "install it again: install its package"),
        "some": ("ok", None),
        "every": ("missing", None),
    }
    [place] = listing(["odd"])  # what the new trial found holds from now on
    assert {name: why.partition(":")[0] for name, why in place.refused.items()} == {
        "any": "it did not run in its trial",
        "every": "every is odd on cpu",
    }


def test_a_refusal_of_the_trial_models_shape_is_not_stored_as_a_fault_of_the_format(
    untried: None, native: dict[str, str]
) -> None:
    from fidelab.doctor import parts

    native |= {"some": "shape"}
    folder = environment.engines_dir() / "odd"
    install(recipe(), folder, sleeps_when_idle)
    [place] = listing(["odd"])
    checks = {check.name: check for check in parts._brought("odd", [place], lambda line: None)[1]}
    assert checks["some"].status == "missing"
    assert checks["some"].detail.startswith("not tried out: no kernel for a head dimension of 128; log: ")
    [place] = listing(["odd"])
    assert list(place.refused) == ["every"]


@pytest.mark.parametrize("changed", ["versions", "machine"])
def test_a_trial_counts_for_the_versions_and_the_machine_it_ran_on(
    changed: str, untried: None, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native |= {"some": "raise"}
    found = install(recipe(), environment.engines_dir() / "odd", sleeps_when_idle)
    try_out(found, cache_dir() / "logs", names=["some"])
    assert list(found.failing({"odd-engine": "1"})) == ["some"]
    if changed == "machine":
        monkeypatch.setattr(environment, "machine", lambda: "another one")
    assert not found.failing({"odd-engine": "2" if changed == "versions" else "1"})


def test_the_first_arm_that_fails_has_its_format_tried_and_the_next_plan_refuses_it(
    quick: None, native: dict[str, str], tmp_path: Path
) -> None:
    native |= {"some": "raise"}
    folder = environment.engines_dir() / "odd"
    install(recipe(), folder, sleeps_when_idle)
    file = tmp_path / "experiment.yaml"
    model = str(make_tiny(tmp_path / "model"))
    candidates = [{"engine": "odd", "kv": "some"}, {"engine": "odd", "kv": "any"}]
    axes = {"kld": {"windows": 4, "n_ctx": 16}}
    written = {"model": model, "candidates": candidates, "control": "none", "axes": axes}
    file.write_text(json.dumps(written))
    report = cli("compare", "-f", file, cwd=tmp_path).report
    reasons = {arm["name"]: arm["reason"] for arm in report["candidates"]}
    assert "some fails with a small model, too: no kernel for this format; log: " in reasons["odd some"]
    assert "small model" not in reasons["odd any"]
    assert starts(folder) == ["any", "some", "some", "any", "any"]
    settings = resolve_experiment(validate(written, "test"))
    assert settings.unsupported["odd some"].startswith("it did not run in its trial: no kernel for this format")


def test_compare_refuses_what_did_not_run_in_its_trial_unless_it_is_forced(
    quick: None, native: dict[str, str], make_folder: Callable[[Path], Path], tmp_path: Path
) -> None:
    native |= {"some": "raise"}
    found = install(recipe(), environment.engines_dir() / "odd", sleeps_when_idle)
    try_out(found, cache_dir() / "logs", names=["some"])
    model = str(make_folder(tmp_path / "model"))
    verdicts = check_agreement(("odd", "hf"), model, tmp_path)
    assert {name: text for (engine, name), text in verdicts.items() if engine == "odd" and text != UNKNOWN} == {
        "any": RUNS,
        "some": verdicts["odd", "some"],
        "every": "every is odd on cpu",
    }
    assert verdicts["odd", "some"].startswith("it did not run in its trial: no kernel for this format")
    assert verdicts["hf", "k16v8"] == verdicts["hf", "int4"] == RUNS
    written = {"model": model, "engine": "odd", "candidates": ["some", "every"], "control": "none", "force": True}
    settings = resolve_experiment(validate({**written, "axes": {"kld": {}}, "output_dir": str(tmp_path)}, "test"))
    assert settings.unsupported == {"every": "every is odd on cpu"}


@pytest.mark.full
def test_doctor_tries_out_the_engine_of_this_interpreter_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fidelab.doctor import parts
    from fidelab.engines.hf.adapter import HFEngine

    monkeypatch.setattr(HFEngine, "kv_names", classmethod(lambda cls: ["bf16", "int8"]))
    [engine, *formats] = [
        c for c in parts.engines_and_formats((), list, lambda line: None) if "hf" in (c.name, c.group[12:-1])
    ]
    assert engine.status == "ok"
    assert [(check.name, check.status, check.detail) for check in formats] == [
        ("bf16", "ok", "runs"),
        ("int8", "ok", "runs"),
    ]


def test_the_shims_of_a_recipe_take_part_in_the_trial_and_in_every_run(
    tmp_path: Path, quick: None, native: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native |= {"any": "crash"}
    shim, other = tmp_path / "shim", tmp_path / "other"
    shim.mkdir()
    other.mkdir()
    (shim / "odd_native.py").write_text("")
    for user in (module, environment):
        monkeypatch.setattr(user, "data_path", lambda name: tmp_path / name)
    found = install(replace(recipe(), shims=("shim",)), environment.engines_dir() / "odd", sleeps_when_idle)
    assert found == locate("odd")
    assert found.pythonpath == (str(shim),)
    [place] = listing(["odd"])
    assert place.environment == found
    assert locate("odd", pythonpath=[str(other)]).pythonpath == (str(other), str(shim))
    assert locate("odd", python=found.python).pythonpath == (str(shim),)
    shutil.rmtree(shim)
    with pytest.raises(EngineError, match=r"^odd was installed with shim, which this fidelab does not have"):
        locate("odd")
    [place] = listing(["odd"])
    assert place.environment is None
    assert "install it again" in (place.problem or "")


def test_stand_ins_of_sglang_are_part_of_its_recipe_and_answer_imports_only() -> None:
    assert RECIPES["sglang-cpu"].shims == ("standins",)
    assert RECIPES["sglang"].shims == ()
    code = """
import sgl_kernel, torchvision, torchvision.transforms.functional as functional
sgl_kernel.a.B, functional.resize
try:
    sgl_kernel.silu(1)
except RuntimeError as error:
    print(error)
"""
    standins = str(recipes.data_path("standins"))
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": standins}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "sgl_kernel.silu is an import stand-in: it must not be called\n"


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_not_ours_is_neither_filled_nor_removed(what: str, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    if what == "folder":
        target.mkdir()
        (target / "thesis.txt").touch()
    else:
        target.touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="not empty and was not made by"):
        install(recipe(), target, sleeps_when_idle)
    with pytest.raises(UsageError, match=r"was not made by .*; nothing was removed$"):
        remove(target)
    with pytest.raises(UsageError, match=r"does not exist; nothing was removed$"):
        remove(tmp_path / "absent")
    assert [path for path in before if not path.exists()] == []


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*pass another --path"):
        install(recipe(), tmp_path / "file" / "odd", sleeps_when_idle)


def test_an_engine_is_listed_with_what_runs_and_why_the_rest_does_not(untried: None) -> None:
    [absent] = listing(["odd"])
    assert (absent.environment, absent.problem) == (None, "not installed")
    install(recipe(), environment.engines_dir() / "odd", sleeps_when_idle)
    [place] = listing(["odd"])
    assert (place.problem, place.versions, place.kv_names) == (None, {"odd-engine": "1"}, ["any", "some", "every"])
    assert place.refused == {"every": "every is odd on cpu"}
    assert (place.label, place.build) == ("environment odd", "stock")


def test_a_broken_environment_is_listed_with_its_problem_and_an_unfinished_one_too(second: Second) -> None:
    folder = environment.engines_dir() / "odd"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(second.python)
    [place] = listing(["odd"])
    assert place.environment is not None
    assert place.problem == "engine odd needs odd-engine: pip install odd-engine"
    write_marker(folder, {"recipe": "odd-cpu"})
    [place] = listing(["odd"])
    assert place.problem == f"{folder} is unfinished"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_brings_a_package_of_its_engine_and_nothing_that_breaks_it(name: str) -> None:
    found = RECIPES[name]
    packages = {package.lower() for package in found.imports or ENGINES.load(found.engine).packages}
    wanted = [line for step in found.steps for line in step.requirements()]
    names = {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in wanted}
    assert packages & names
    assert not names & set(found.absent)
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?((==|>=|<=|<|>)[\w.]+,?)*", line) for line in wanted), wanted


def test_what_is_built_for_gpus_comes_neither_from_nor_into_pips_cache(
    tmp_path: Path, untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(module, "_pip", lambda recipe, found, words, log: asked.append(list(words)))
    install(recipe(Step(("a",)), Step(("b",), alone=True, fresh=True)), tmp_path / "odd", sleeps_when_idle)
    assert asked == [["install", "a"], ["install", "--no-deps", "--no-cache-dir", "b"]]
    compiled = [found for found in RECIPES.values() if found.variables]
    assert compiled
    for found in compiled:
        assert [(step.fresh, step.compiled) for step in found.steps] == [(True, True)] * len(found.steps)
        assert found.build


def test_llama_cpp_is_built_as_a_library_alone_whatever_flags_the_user_has() -> None:
    for found in RECIPES.values():
        if found.engine == "llamacpp":
            assert "-U__AMX_INT8__" in found.variables["CMAKE_ARGS"]
            for conservative in (False, True):
                variables = found.build_variables(conservative=conservative)
                name, _, path = variables["SKBUILD_CMAKE_DEFINE"].partition("=")
                assert name == "CMAKE_PROJECT_llama_cpp_INCLUDE"
                text = Path(path).read_text()
                assert "set(LLAMA_BUILD_COMMON OFF)" in text
                assert "set(LLAVA_BUILD OFF)" in text


def test_a_tool_that_is_not_an_engine_is_installed_when_its_packages_can_be_imported(
    tmp_path: Path, quick: None
) -> None:
    tool = Recipe("tool-cpu", "tool", "cpu", (), "small", imports=("json",))
    install(tool, tmp_path / "tool", lambda line: None)
    assert (read_marker(tmp_path / "tool") or {})["versions"] == {"json": import_module("json").__version__}
    broken = Recipe("tool-cpu", "tool", "cpu", (), "small", imports=("no_such_package",))
    with pytest.raises(EngineError, match="tool-cpu is not installed: its packages cannot be imported"):
        install(broken, tmp_path / "broken", lambda line: None)
    assert not (tmp_path / "broken").exists()


def test_an_unknown_recipe_names_those_that_there_are() -> None:
    for arguments, said in (
        (("hf", "cpu"), "vllm, sglang, llamacpp, llm-compressor"),
        (("sglang", "rocm"), "cuda, cpu"),
    ):
        with pytest.raises(UsageError, match=f"no recipe .*there are: {said}$"):
            recipes.recipe(*arguments)


@pytest.mark.parametrize(("device", "command"), [("cuda", "vllm"), ("hip", "vllm --rocm"), ("cpu", "vllm --cpu")])
def test_the_command_that_installs_an_engine_is_for_this_machine(
    device: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Callable[[str], str] = lambda built: built if built == device else "cpu"  # noqa: E731
    monkeypatch.setattr(recipes, "device", seen)
    assert recipes.install_command("vllm") == f"fidelab setup install {command}"


def made(native: str) -> Path:
    """The file that is imported when engine ``odd`` of an installed environment is asked for its formats."""
    install(recipe(), environment.engines_dir() / "odd", sleeps_when_idle)
    [file] = (environment.engines_dir() / "odd").glob("lib/python*/site-packages/odd_native.py")
    file.write_text(native)
    return file


def imports(counted: Path) -> int:
    """How often the engine was imported for a list that is as it should be."""
    counted.unlink(missing_ok=True)
    [place] = listing(["odd"])
    assert (place.problem, place.refused) == (None, {"every": "every is odd on cpu"})
    return len(counted.read_text()) if counted.exists() else 0


@pytest.mark.full
def test_what_an_engine_said_is_kept_until_something_changes(
    untried: None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip compiles what it installs, so that importing changes no folder
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    counted = tmp_path / "imports"
    native = f"open({str(counted)!r}, 'a').write('x')"
    file = made(native)
    assert (imports(counted), imports(counted)) == (1, 0)
    monkeypatch.setenv("ODD_MODE", "new")  # a variable of this engine's
    assert (imports(counted), imports(counted)) == (1, 0)
    (file.parent / "another-1.dist-info").mkdir()  # something was installed
    assert (imports(counted), imports(counted)) == (1, 0)
    file.write_text(native + "\n")  # the package itself is another one
    assert (imports(counted), imports(counted)) == (1, 0)
    [kept] = (cache / "answers").iterdir()
    for damaged in ("", "[]", '{"state": 1}', kept.read_text()[:-9]):
        kept.write_text(damaged)
        assert (imports(counted), imports(counted)) == (1, 0)


def test_an_engine_that_cannot_be_imported_is_asked_anew_every_time(untried: None) -> None:
    file = made("raise OSError('libodd.so: cannot open shared object file')")
    [place] = listing(["odd"])
    assert place.problem == "OSError: libodd.so: cannot open shared object file"
    file.write_text("")
    assert listing(["odd"])[0].problem is None


@pytest.mark.parametrize("words", first(["setup engines", "setup formats", "doctor"]))
def test_a_terminal_shows_life_while_engines_are_asked_and_ctrl_c_ends_them_at_once(
    words: str, untried: None, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    made(f"import os, pathlib, time\npathlib.Path({str(asked)!r}).write_text(str(os.getpid()))\ntime.sleep(600)")
    terminal, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fidelab", *words.split()], cwd=tmp_path, stdout=subprocess.PIPE, stderr=follower
    ) as process:
        os.close(follower)
        assert until(lambda: asked.exists() and asked.read_text() != "", 60)
        pid = int(asked.read_text())
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"")
    assert until(lambda: not alive(pid), 60)
    shown = os.read(terminal, 1 << 20).decode()
    os.close(terminal)
    assert ("examining this machine" if words == "doctor" else "asking the engines") in shown
    assert "Traceback" not in shown
