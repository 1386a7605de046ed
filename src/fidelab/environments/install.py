"""Make and remove an engine's environment.

An environment cannot be moved, so it is built in place.  Its marker file calls it unfinished until the engine has run
in it (:mod:`fidelab.environments.trial`).  Failed or interrupted installations are removed.  The environment to be
replaced is kept in another folder until then, and restored on failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from fidelab.core import digest
from fidelab.core.errors import EngineError, OutputError, UsageError
from fidelab.core.locks import lock
from fidelab.core.paths import expand
from fidelab.engines import ENGINES
from fidelab.environments.environment import MARKER, Environment, read_marker, write_marker
from fidelab.environments.listing import listing
from fidelab.environments.queries import ask
from fidelab.environments.recipes import Recipe, data_path
from fidelab.environments.trial import try_out
from fidelab.models.cache import cache_dir

Say = Callable[[str], None]

_MAKE_SECONDS = 5.0  # for an empty environment
_START_SECONDS = 10.0  # for an interpreter

_PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off", "PYTHONNOUSERSITE": "1"}
_UNREACHABLE = re.compile(
    r"connection broken by|Max retries exceeded|NewConnectionError|ConnectTimeoutError|ReadTimeoutError"
    r"|ProxyError|Network is unreachable|[Nn]ame resolution|Name or service not known"
)
_REQUIREMENT = re.compile(
    r"satisfies the requirement (\S+)|No matching distribution found for (\S+)|url: /\S*?/([^/\s]+)/? "
)


@dataclass(frozen=True)
class Stage:
    """One step of an installation.

    Attributes:
        recipe: name of the recipe.
        number, total: 3 of 5.
        kind: ``environment``, ``packages``, ``build`` or ``trial``.
        text: the packages or formats installed or tried.
        expected: typical seconds of this step.
        after: typical seconds of all later steps.
    """

    recipe: str
    number: int
    total: int
    kind: str
    text: str
    expected: float
    after: float

    def remaining_seconds(self, seconds: float) -> float:
        """Expected seconds until the end, given the seconds of this step so far."""
        return max(0.0, self.expected - seconds) + self.after


def install(
    recipe: Recipe,
    folder: Path,
    say: Say,
    *,
    python: str = sys.executable,
    again: bool = False,
    watch: Callable[[Stage], None] = lambda stage: None,
) -> Environment:
    """Install the environment of a recipe in ``folder``, unless it is complete and of the same recipe.

    It is complete when the engine has prefilled and decoded in it with its native KV format.  If that does not run, it
    is built once more with the recipe's fallback.  Other KV formats are tried when an arm first asks for them.

    Args:
        recipe: recipe of its packages.
        folder: an absent or empty folder, or one that was made here before.
        say: receives a line for each fact.
        python: the interpreter that makes it.
        again: rebuild it in any case.
        watch: called at the beginning of each step.

    Raises:
        UsageError: If the folder holds something else.
        OutputError: If the folder cannot be written.
        EngineError: If a step fails, or the engine does not run.  The output is kept in a file that the message names.
            A previous environment is restored.
    """
    folder = expand(folder)
    shims = tuple(str(data_path(name)) for name in recipe.shims)
    environment = Environment(recipe.engine, str(folder / "bin" / "python"), pythonpath=shims)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder).open("a") as held:
            lock(held)  # until it is closed
            _restore(folder)  # of an installation that was killed
            marker = read_marker(folder)
            if marker and not again:
                if marker.get("recipe_sha256") != recipe.sha256:
                    say(f"{recipe.name} was installed from another recipe: installing it again")
                elif _starts(environment.python):
                    say(f"{recipe.name} is already installed in {folder}")
                    return environment
                else:
                    say(f"{recipe.name} in {folder} does not start: installing it again")
            _set_aside(folder)
            try:
                _build(recipe, folder, environment, say, _Stages(recipe, watch), python)
            except BaseException:  # whole or not at all, Ctrl-C included
                shutil.rmtree(folder, ignore_errors=True)
                _restore(folder)
                raise
            shutil.rmtree(_aside(folder), ignore_errors=True)
    except OSError as error:
        where = error.filename or folder
        raise OutputError(f"cannot write {where} ({error.strerror or error}); pass another --path") from error
    if not recipe.imports:
        listing([recipe.engine])  # its answers are cached, so that nobody waits for them later
    return environment


def remove(folder: Path, *, dry_run: bool = False) -> None:
    """Remove an environment that :func:`install` made, finished or not.

    With ``dry_run``, only check that it is one.

    Raises:
        UsageError: If the folder is not such an environment.
        OutputError: If it cannot be removed.
    """
    if not (folder / MARKER).is_file():
        why = "was not made by fidelab setup install" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {why}; nothing was removed")
    if dry_run:
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"cannot remove {folder} ({error.strerror or error})") from error
    _log(folder).unlink(missing_ok=True)


def _starts(python: str) -> bool:
    """Return whether an interpreter runs; the base interpreter that it was made with may be gone."""
    try:
        done = subprocess.run(
            [python, "-c", ""], stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _aside(folder: Path) -> Path:
    """Return the folder of the environment that is being replaced."""
    return folder.with_name(f".{folder.name}.replaced")


def _set_aside(folder: Path) -> None:
    if read_marker(folder) is not None:
        folder.rename(_aside(folder))
    elif (folder / MARKER).exists():
        shutil.rmtree(folder)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty and was not made by fidelab setup install: pass another --path")


def _restore(folder: Path) -> None:
    """Restore the old environment, unless its replacement was completed."""
    aside = _aside(folder)
    if not aside.is_dir():
        return
    if read_marker(folder) is not None:
        shutil.rmtree(aside, ignore_errors=True)
        return
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


class _Stages:
    """The steps of an installation with the seconds that they typically take."""

    def __init__(self, recipe: Recipe, watch: Callable[[Stage], None]) -> None:
        self._recipe, self._watch = recipe, watch
        self._rows = [("environment", f"for {recipe.variant}", _MAKE_SECONDS)]
        for step in recipe.steps:
            requirements = step.requirements()
            more = f" and {len(requirements) - 3} more" if len(requirements) > 3 else ""
            text = ", ".join(requirements[:3]) + more
            self._rows.append(("build" if step.compiled else "packages", text, step.seconds))
        trial = "its imports" if recipe.imports else "a prefill and a decode"
        self._rows.append(("trial", trial, recipe.trial_seconds))
        self._n = 0

    def next(self) -> None:
        """Begin the next step."""
        kind, text, expected = self._rows[self._n]
        self._n += 1
        after = sum(seconds for *_, seconds in self._rows[self._n :])
        self._watch(Stage(self._recipe.name, self._n, len(self._rows), kind, text, expected, after))


def _build(recipe: Recipe, folder: Path, environment: Environment, say: Say, stages: _Stages, python: str) -> None:
    about = {"recipe": recipe.name, "recipe_sha256": recipe.sha256}
    folder.mkdir(exist_ok=True)
    write_marker(folder, about)
    with _log(folder).open("wb") as log:
        say(f"{recipe.name} in {folder} ({recipe.about})")
        stages.next()
        _make(python, folder, log)
        for step in recipe.steps:
            stages.next()
            _pip(recipe, environment, ["install", *step.flags(), *step.requirements()], log)
        if recipe.absent:
            _pip(recipe, environment, ["uninstall", "--yes", *recipe.absent], log)
        stages.next()
        if recipe.imports:
            versions, fault = _imported(recipe, environment, log), ""
        else:
            versions, fault = _check(recipe, environment), _fault(recipe, environment)
        if fault and recipe.fallback and not any(name in os.environ for name in recipe.fallback):
            say(f"{fault}; building it again for any CPU")
            for step in recipe.steps:
                if step.compiled:
                    words = ["install", "--force-reinstall", "--no-deps", "--no-cache-dir", *step.requirements()]
                    _pip(recipe, environment, words, log, conservative=True)
            versions, fault = _check(recipe, environment), _fault(recipe, environment)
    if fault:
        raise EngineError(f"{recipe.name} is not installed: {fault}")
    shims = {"shims": list(recipe.shims)} if recipe.shims else {}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_marker(folder, {**about, "versions": versions, "created": created, **shims})
    _log(folder).unlink(missing_ok=True)
    say(", ".join(f"{package} {version}" for package, version in versions.items()))


def _fault(recipe: Recipe, environment: Environment) -> str:
    """Return why the engine's native KV format does not run in the new environment; empty if it does."""
    native = ENGINES.load(recipe.engine).native_kv
    trial = try_out(environment, cache_dir() / "logs", names=[native]).get(native)
    reason = trial.reason if trial else f"{recipe.engine} does not support it on this machine"
    return f"KV format {native} does not run: {reason}" if reason else ""


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


def _pip(
    recipe: Recipe, environment: Environment, arguments: Sequence[str], log: IO[bytes], *, conservative: bool = False
) -> None:
    log.flush()
    before = log.tell()
    variables = recipe.build_variables(conservative=conservative)
    if _run([environment.python, "-m", "pip", *arguments], log, variables) == 0:
        return
    path = _log(Path(environment.python).parents[1])
    with path.open("rb") as file:
        file.seek(before)
        text = file.read().decode("utf-8", "replace")
    if _UNREACHABLE.search(text):
        named = [next(filter(None, match)) for match in _REQUIREMENT.findall(text)]
        package = named[-1] if named else arguments[-1]
        raise EngineError(
            f"{recipe.name} is not installed: the package index could not be reached for {package}: "
            f"check the network and pip's settings (pip config list); log: {path}"
        )
    lines = text.splitlines()
    errors = [line.removeprefix("ERROR: ").strip() for line in lines if line.startswith("ERROR: ")]
    why = (errors[0] if errors else next((line.strip() for line in reversed(lines) if line.strip()), ""))[:300]
    hint = f"; {recipe.hint}" if recipe.hint else ""
    raise EngineError(f"{recipe.name} cannot be installed: {why}{hint}; log: {path}")


def _run(command: Sequence[str], log: IO[bytes], variables: Mapping[str, str] | None = None) -> int:
    log.write(f"$ {' '.join(command)}\n".encode())
    log.flush()
    env = {**(variables or {}), **_inherited(), **_PIP}
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, check=False).returncode


def _inherited() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def _check(recipe: Recipe, environment: Environment) -> dict[str, str]:
    """Return the versions of the installed engine, after a check that its build is for the recipe's device."""
    with ask(environment) as asked:
        versions, built = asked.versions(), asked.about.build
    if recipe.build and built != recipe.build:
        hint = f": {recipe.hint}" if recipe.hint else ""
        raise EngineError(f"{recipe.name}: what pip found is built for {built}, not for {recipe.build}{hint}")
    return versions


def _imported(recipe: Recipe, environment: Environment, log: IO[bytes]) -> dict[str, str]:
    """Import a tool's packages, and return their versions.

    Raises:
        EngineError: If a package cannot be imported.
    """
    code = "import importlib, json, sys; print(json.dumps({n: importlib.import_module(n).__version__ for n in %r}))"
    words = [environment.python, "-c", code % (recipe.imports,)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, env=_inherited())
    if done.returncode:
        raise EngineError(f"{recipe.name} is not installed: its packages cannot be imported; log: {log.name!s}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    versions: dict[str, str] = json.loads(lines[-1])
    return versions


def _lock(folder: Path) -> Path:
    """Return the lock file of an environment's builder, which is in the cache, not next to the environment."""
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return locks / digest(str(folder))[:16]


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")
