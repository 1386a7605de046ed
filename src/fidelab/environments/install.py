"""Make and remove an engine's environment.

An environment cannot be moved, so it is built in place: the marker file says that it is unfinished until the engine has
been tried out in it (:mod:`fidelab.environments.trial`), and what failed or was interrupted is removed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from fidelab.core import canonical_json, digest
from fidelab.engines import ENGINES
from fidelab.environments.answers import ask
from fidelab.environments.environment import MARKER, Environment, read_marker, write_marker
from fidelab.environments.listing import listing
from fidelab.environments.recipes import Recipe
from fidelab.environments.trial import try_out
from fidelab.errors import EngineError, OutputError, UsageError
from fidelab.models.cache import cache_dir

__all__ = ["install", "remove"]

Say = Callable[[str], None]

_ALL = "all"  # stands for a name where no KV format runs

_PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off", "PYTHONNOUSERSITE": "1"}


def install(
    recipe: Recipe, folder: Path, say: Say, *, python: str = sys.executable, pythonpath: Sequence[str] = ()
) -> Environment:
    """The environment of a recipe in ``folder``; one that is complete and of the same recipe stays as it is.

    It is complete when the engine has prefilled and decoded in it.  Where it does not, it is built once more with the
    recipe's fallback; KV formats other than the native one may fail, which is said and kept in the marker.

    Args:
        recipe: what goes into it.
        folder: where; absent, empty, or one that was made here before.
        say: gets a line for each step.
        python: the interpreter to make it with.
        pythonpath: shim folders that the engine needs in order to run.

    Raises:
        UsageError: the folder holds something else.
        OutputError: it cannot be written.
        EngineError: a step failed, or the engine does not run; the output is kept in a file that the message names.
    """
    folder = folder.expanduser().absolute()
    environment = Environment(recipe.engine, str(folder / "bin" / "python"), pythonpath=tuple(pythonpath))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            marker = read_marker(folder) or {}
            if marker.get("recipe_sha256") == _digest(recipe) and "failing" in marker:
                say(f"{recipe.name} is already in {folder}")
                if pythonpath:  # what it needs may have moved
                    write_marker(folder, {**marker, "pythonpath": list(pythonpath)})
                return environment
            _clear(folder)
            _build(recipe, folder, environment, say, python)
    except OSError as error:
        where = error.filename or folder
        raise OutputError(f"cannot write {where} ({error.strerror or error}); pass another --path") from error
    if not recipe.imports:
        listing([recipe.engine])  # what it says is kept, so that nobody waits for it later
    return environment


def remove(folder: Path) -> None:
    """Remove an environment that :func:`install` made, finished or not.

    Raises:
        UsageError: it is none of these.
        OutputError: it cannot be removed.
    """
    if not (folder / MARKER).is_file():
        why = "was not made by fidelab engines install" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {why}; nothing was removed")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"cannot remove {folder} ({error.strerror or error})") from error
    _log(folder).unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    if (folder / MARKER).exists():
        shutil.rmtree(folder)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty and was not made by fidelab engines install: pass another --path")


def _build(recipe: Recipe, folder: Path, environment: Environment, say: Say, python: str) -> None:
    about = {"recipe": recipe.name, "recipe_sha256": _digest(recipe)}
    try:
        folder.mkdir(exist_ok=True)
        write_marker(folder, about)
        with _log(folder).open("wb") as log:
            say(f"{recipe.name} in {folder} ({recipe.about})")
            _make(python, folder, log)
            for number, step in enumerate(recipe.steps, 1):
                say(f"step {number} of {len(recipe.steps)}: {_summary(step.requirements())}")
                _pip(recipe, environment, ["install", *step.flags(), *step.requirements()], log)
            if recipe.absent:
                _pip(recipe, environment, ["uninstall", "--yes", *recipe.absent], log)
            if recipe.imports:
                versions, failing = _imported(recipe, environment, log), {}
            else:
                versions, failing = _check(recipe, environment), _failing(recipe, environment, say)
            if failing and recipe.fallback and not any(name in os.environ for name in recipe.fallback):
                say(f"{_first(failing)}; building it again for any CPU")
                _rebuild(recipe, environment, log)
                versions, failing = _check(recipe, environment), _failing(recipe, environment, say)
        if failing and (_ALL in failing or ENGINES.load(recipe.engine).native_kv in failing):
            raise EngineError(f"{recipe.name} is not installed: {_first(failing)}")
        shims = {"pythonpath": list(environment.pythonpath)} if environment.pythonpath else {}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        write_marker(folder, {**about, "versions": versions, "created": created, "failing": failing, **shims})
    except BaseException:  # whole or not at all, Ctrl-C included
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _log(folder).unlink(missing_ok=True)
    for name, why in failing.items():
        say(f"KV format {name} does not run: {why}")
    say(", ".join(f"{package} {version}" for package, version in versions.items()))


def _failing(recipe: Recipe, environment: Environment, say: Say) -> dict[str, str]:
    """KV formats that do not run in the new environment, and why; with :data:`_ALL` first where none runs."""
    tried = try_out(environment, cache_dir() / "logs", say)
    failing = {name: why for name, why in tried.items() if why is not None}
    if len(failing) == len(tried):
        first = next(iter(failing.values()), "the engine can run none of its KV formats on this machine")
        return {_ALL: first, **failing}
    return failing


def _first(failing: Mapping[str, str]) -> str:
    name, why = next(iter(failing.items()))
    return f"KV format {name} does not run: {why}" if name != _ALL else f"the engine does not run: {why}"


def _rebuild(recipe: Recipe, environment: Environment, log: IO[bytes]) -> None:
    """Build the recipe's own packages once more, with the variables of its fallback."""
    again = replace(recipe, variables=recipe.fallback)
    for step in recipe.steps:
        _pip(
            again,
            environment,
            ["install", "--force-reinstall", "--no-deps", "--no-cache-dir", *step.requirements()],
            log,
        )


def _make(python: str, folder: Path, log: IO[bytes]) -> None:
    """Make an environment with pip; where Python lacks ensurepip (bare Debian), with this interpreter's pip."""
    if _run([python, "-m", "venv", str(folder)], log) == 0:
        return
    bare = [python, "-m", "venv", "--without-pip", "--clear", str(folder)]
    target = str(folder / "bin" / "python")
    marker = (folder / MARKER).read_bytes()
    if _run(bare, log) == 0 and _run([python, "-m", "pip", "--python", target, "install", "pip"], log) == 0:
        (folder / MARKER).write_bytes(marker)
        return
    raise EngineError(
        f"{python} cannot make virtual environments (on Debian: apt install python3-venv); log: {_log(folder)}"
    )


def _pip(recipe: Recipe, environment: Environment, arguments: Sequence[str], log: IO[bytes]) -> None:
    log.flush()
    before = log.tell()
    if _run([environment.python, "-m", "pip", *arguments], log, recipe.variables) == 0:
        return
    path = _log(Path(environment.python).parents[1])
    with path.open("rb") as file:
        file.seek(before)
        lines = file.read().decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("ERROR: ").strip() for line in lines if line.startswith("ERROR: ")]
    why = (errors[0] if errors else next((line.strip() for line in reversed(lines) if line.strip()), ""))[:300]
    hint = f"; {recipe.hint}" if recipe.hint else ""
    raise EngineError(f"{recipe.name} cannot be installed: {why}{hint}; log: {path}")


def _run(command: Sequence[str], log: IO[bytes], variables: Mapping[str, str] | None = None) -> int:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    log.write(f"$ {' '.join(command)}\n".encode())
    log.flush()
    env = {**(variables or {}), **inherited, **_PIP}
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, check=False).returncode


def _check(recipe: Recipe, environment: Environment) -> dict[str, str]:
    """Versions of the installed engine, after a check that its build is for the recipe's device."""
    with ask(environment) as asked:
        versions, built = asked.versions(), asked.about.build
    if recipe.build and built != recipe.build:
        hint = f": {recipe.hint}" if recipe.hint else ""
        raise EngineError(f"{recipe.name}: what pip found is built for {built}, not for {recipe.build}{hint}")
    return versions


def _imported(recipe: Recipe, environment: Environment, log: IO[bytes]) -> dict[str, str]:
    """Versions of a tool's packages, after importing them.

    Raises:
        EngineError: one cannot be imported.
    """
    code = "import importlib, json, sys; print(json.dumps({n: importlib.import_module(n).__version__ for n in %r}))"
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [environment.python, "-c", code % (recipe.imports,)], stdout=subprocess.PIPE, stderr=log, env=inherited
    )
    if done.returncode:
        raise EngineError(f"{recipe.name} is not installed: its packages cannot be imported; log: {log.name!s}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    versions: dict[str, str] = json.loads(lines[-1])
    return versions


def _summary(requirements: Sequence[str]) -> str:
    first = ", ".join(requirements[:3])
    return first if len(requirements) <= 3 else f"{first} and {len(requirements) - 3} more"


def _digest(recipe: Recipe) -> str:
    """Hash of the fields that determine the environment's content; other texts do not make it rebuilt."""
    steps = [[*step.flags(), *step.requirements()] for step in recipe.steps]
    return digest(canonical_json([steps, recipe.absent, recipe.build, recipe.variables, recipe.fallback]))


def _lock(folder: Path) -> Path:
    """Lock file of the builder of an environment, in the cache, so that it does not stay beside the environment."""
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return locks / digest(str(folder))[:16]


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")
