"""Interpreter of an engine: this one, one that the user names, or that of an installed environment."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelab.core import Arm, digest, plain_json, write_atomically
from fidelab.core.errors import EngineError, InputError, UsageError
from fidelab.core.paths import expand
from fidelab.engines import ENGINES
from fidelab.engines.installed import is_installed
from fidelab.engines.k16v8 import K16V8, missing
from fidelab.environments.container import Container, Image, existing_paths, find_image, link_targets, new_name
from fidelab.environments.host import machine
from fidelab.environments.recipes import RECIPES, data_path, install_command, recipe_command, variants
from fidelab.models.cache import build_once, cache_dir

if TYPE_CHECKING:
    from fidelab.engines.base import Engine

MARKER = "fidelab-environment.json"  # in the folder of an environment that fidelab made
_PLUGINS = ("vllm.general_plugins", "sglang.srt.plugins")  # groups of entry points


@dataclass(frozen=True)
class Environment:
    """Environment in which one engine runs.

    ``pythonpath`` are the user's shim folders, which the engine's environment sees before its own packages. ``image``:
    the image of the container in which it runs.
    """

    engine: str
    python: str
    pythonpath: tuple[str, ...] = ()
    image: Image | None = None

    @property
    def is_current(self) -> bool:
        """Whether this is the environment of the running interpreter."""
        return not self.pythonpath and self.image is None and self._here

    @property
    def interpreter(self) -> str:
        """The interpreter's command, for messages."""
        return shlex.quote(self.python) + (f" in image {self.image.name}" if self.image else "")

    @property
    def _here(self) -> bool:
        python, current = Path(self.python), Path(sys.executable)
        # Not by link targets: environments share a base interpreter.
        return python.parent.resolve() == current.parent.resolve() and python.resolve() == current.resolve()

    @property
    def folder(self) -> Path | None:
        """Folder of an environment that fidelab made and completed; ``None`` for all others."""
        if self.image is not None:
            return None
        folder = Path(self.python).parents[1]
        return folder if read_marker(folder) else None

    def failing(self, versions: Mapping[str, str]) -> Mapping[str, str]:
        """Return the KV formats that failed their trial with these versions on this machine, and why."""
        marker = read_marker(self.folder) if self.folder else None
        trial = (marker or {}).get("trials", {}).get(machine(), {})
        return trial["failing"] if trial.get("versions") == dict(versions) else {}

    def remember(self, versions: Mapping[str, str], tried: Mapping[str, str | None]) -> None:
        """Store the results of trials (KV format → why it does not run, else ``None``) in fidelab's environment.

        Raises:
            OutputError: If the file cannot be written.
        """
        if (folder := self.folder) is None:
            return
        marker, known = read_marker(folder) or {}, self.failing(versions)
        failing = {name: why for name, why in {**known, **tried}.items() if why is not None}
        trials = {**marker.get("trials", {}), machine(): {"versions": dict(versions), "failing": failing}}
        write_marker(folder, {**marker, "trials": trials})

    def container(
        self,
        arm: Arm | None = None,
        store: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        files: Sequence[str] = (),
    ) -> Container | None:
        """Create a container for one process; ``None`` if the engine does not run in an image.

        Args:
            arm: the arm of the process, which sees the model, files in options, and the GPUs if it runs on one.
                ``None``: the process answers questions about the engine and has the GPUs.
            store: the folder of captures, which is writable.
            env: variables of the arm's process.
            files: further paths that it sees.

        Raises:
            OutputError: If the link folder cannot be made.
        """
        if self.image is None:
            return None
        link = link_folder()
        code = [str(link), *(str(package.resolve()) for package in link.iterdir() if package.is_symlink())]
        named = [arm.path, *filter(None, [arm.draft])] if arm else []
        named += existing_paths(value for _, value in (*arm.options, *arm.env)) if arm else []
        there = [path for path in (*named, *files, *self.pythonpath) if Path(path).exists()]
        seen = [file for path in there for file in link_targets(path)]
        if store is not None:
            store.mkdir(parents=True, exist_ok=True)
        return Container(
            self.image,
            new_name(),
            env={
                **(env or {}),
                "PYTHONSAFEPATH": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.pathsep.join([str(link), *self.pythonpath]),
            },
            reads=tuple(dict.fromkeys([*code, *seen])),
            writes=() if store is None else (str(store),),
            devices=arm is None or arm.device.startswith("cuda"),
            network=ENGINES.load(self.engine).is_server,
        )

    def command(self, module: str, container: Container | None = None) -> list[str]:
        """Return the command line that runs a module there; ``container``: the result of :meth:`container`."""
        return container.command(self.python, module) if container else [self.python, "-m", module]

    def variables(self) -> dict[str, str]:
        """Return the variables to set in addition to this process' own; none for an image, whose container has its own.

        Raises:
            OutputError: If the link folder cannot be made.
        """
        if self.image is not None:
            return {}
        safe = {"PYTHONSAFEPATH": "1"}  # files in the user's folder are not modules
        if self.is_current:
            return safe
        link = [] if self._here else [str(link_folder())]
        inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        return {**safe, "PYTHONPATH": os.pathsep.join([*link, *self.pythonpath, *inherited])}


def locate(
    engine: str, *, python: str | None = None, pythonpath: Sequence[str] = (), image: str | None = None
) -> Environment:
    """Find the environment of an engine: the named interpreter, else this one, else an installed one.

    Args:
        engine: a name of the registry.
        python: an interpreter, by its path or its name on PATH.
        pythonpath: the user's shim folders; those of an environment's recipe come after them.
        image: a container image that has the engine, with ``python`` as it is called there.

    Raises:
        UnknownNameError: If there is no such engine.
        UsageError: If the interpreter does not exist.
        InputError: If a shim folder does not exist.
        EngineError: If the engine is not installed, or the shim folders of its recipe or the image are missing.
    """
    cls: type[Engine] = ENGINES.load(engine)
    shims = tuple(shim(folder) for folder in pythonpath)
    if image is not None:
        return Environment(engine, python or "python3", shims, image=find_image(image))
    if python is not None:
        named = interpreter(python)
        return Environment(engine, named, pythonpath=(*shims, *recipe_shims(Path(named).parents[1])))
    if provided_here(cls):
        return Environment(engine, sys.executable, pythonpath=shims)
    for folder in (engines_dir() / name for name in variants(engine)):
        executable = folder / "bin" / "python"
        if os.access(executable, os.X_OK) and (not (folder / MARKER).exists() or read_marker(folder) is not None):
            return Environment(engine, str(executable), pythonpath=(*shims, *recipe_shims(folder)))
    raise EngineError(f"engine {engine} is not installed: {install_command(engine)} (or name its Python with --python)")


def provided_here(cls: type[Engine]) -> bool:
    """Return whether this interpreter has the engine: it needs no package, or its package is installed."""
    return not cls.packages or any(map(is_installed, cls.packages))


def interpreter(python: str) -> str:
    """Return the absolute path of an interpreter.

    Raises:
        UsageError: If the interpreter does not exist.
    """
    path = shutil.which(expand(python)) if python.startswith("~") else shutil.which(python)
    if path is None:
        where = "is not a program" if os.sep in python else "is not on PATH"
        raise UsageError(f"--python {python}: {where}; name the interpreter of the engine's environment (…/bin/python)")
    return str(Path(path).absolute())


def recipe_shims(folder: Path) -> tuple[str, ...]:
    """Return the shim folders of the recipe by which an environment was installed; they come with fidelab.

    Raises:
        EngineError: If this fidelab does not have one of them.
    """
    paths = [data_path(str(name)) for name in (read_marker(folder) or {}).get("shims", [])]
    for path in paths:
        if not path.is_dir():
            raise EngineError(
                f"{folder.name} was installed with {path.name}, which this fidelab does not have: install it again"
            )
    return tuple(map(str, paths))


def update_command(folder: Path) -> str | None:
    """Return the command that replaces an environment whose recipe has changed since; ``None`` if it has not."""
    marker = read_marker(folder) or {}
    recipe = RECIPES.get(str(marker.get("recipe")))
    changed = recipe is not None and marker.get("recipe_sha256") != recipe.sha256
    return recipe_command(recipe) if recipe is not None and changed else None


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Return the marker of a completed environment; ``None`` for an unfinished or foreign one.

    Keys: ``recipe``, ``recipe_sha256``, ``versions``, ``created``, ``shims`` of the recipe if it has some, and
    ``trials``: machine → ``versions``, and ``failing`` (KV formats that did not run in their trial, and why).

    The file proves that fidelab made the environment, by which recipe, and whether it was completed.
    """
    try:
        content = plain_json((folder / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("versions") else None


def write_marker(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the marker.  Without ``versions``, it means that the environment is being built."""
    write_atomically(folder / MARKER, json.dumps(content, indent=2) + "\n")


def link_folder(*more: str) -> Path:
    """Return the folder on PYTHONPATH through which an engine's environment sees only fidelab and k16v8.

    It holds a link to each package (to k16v8 if it is installed next to fidelab) and metadata with its entry points, by
    which vLLM and SGLang find plug-ins.  It is made at first use, one for each place and version of the packages.

    Args:
        more: further packages of this environment to link.

    Raises:
        OutputError: If the cache cannot be written.
    """
    packages = [_about(name) for name in ("fidelab", *([] if missing() else [K16V8]), *more)]

    def build(scratch: Path) -> Path:
        folder = scratch / "link"
        for name, version, place, entries in packages:
            info = folder / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (folder / name).symlink_to(place, target_is_directory=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (info / "entry_points.txt").write_text(entries)
        return folder

    return build_once(cache_dir() / "link" / digest(*(part for about in packages for part in about))[:16], build)


def _about(name: str) -> tuple[str, str, str, str]:
    """Return name, version, folder and entry points of a package; no entry points if it runs from source."""
    package = import_module(name)
    points = metadata.distribution(name).entry_points if is_installed(name) else ()
    lines = []
    for group in _PLUGINS:
        rows = sorted(f"{point.name} = {point.value}" for point in points if point.group == group)
        lines += [f"[{group}]", *rows] if rows else []
    folder = str(Path(str(package.__file__)).resolve().parent)
    return name, package.__version__, folder, "".join(f"{line}\n" for line in lines)


def engines_dir() -> Path:
    """Return the default folder of environments made by ``fidelab setup install``."""
    return cache_dir() / "engines"


def shim(folder: str) -> str:
    """Return the absolute path of a user's shim folder.

    Raises:
        InputError: If the folder does not exist.
    """
    path = expand(folder)
    if not path.is_dir():
        raise InputError(f"shim folder {folder}: {'not a folder' if path.exists() else 'does not exist'}")
    return str(path)
