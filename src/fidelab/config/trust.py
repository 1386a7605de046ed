"""Actions of a settings file that need permission: start a program, send a key, read files in other folders.

The user of a file need not be its author.  The requests of such a file are listed, and refused unless the user gives
the same words as flags or names the file by ``--trust FILE``.  A file that was trusted once, and every file that
fidelab writes for a run of this user, is remembered by a hash of its content and of the paths that it leads to from the
current folder.  The content of programs and shims is not part of it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fidelab.config.arms import arm_fields
from fidelab.config.cross import CrossEngine
from fidelab.config.load import apply_overrides, read_yaml
from fidelab.config.schema import ArmConfig, EngineConfig, Experiment, Preset
from fidelab.core import digest, shell_line, state_dir
from fidelab.core.errors import ConfigError, InputError, UsageError
from fidelab.core.names import PROMPTS, TEXTS
from fidelab.core.paths import expand, expand_existing
from fidelab.engines import ENGINES
from fidelab.engines.harmless import Anything, Beside

Settings = TypeVar("Settings", Experiment, CrossEngine, Experiment | CrossEngine)
Asking = Experiment | CrossEngine | Preset

_TRUST_FILE = "trusted-files"  # in the user's state: a hash and its file per line
_COMMANDS = ("python", "image", "pythonpath", "bin")
_KEY, _ADDRESS = "api-key-env", "base-url"
_HUB_CODE = ("attention", "attn-implementation")  # of engine hf: ``owner/name`` is a kernel of the hub
OUTPUT_KEYS = ("output_dir", "captures_dir")
_SHORT = 60  # characters of a description that still fits a message
NAMES_OF: Mapping[str, tuple[str, ...]] = {"text": TEXTS, "prompts": PROMPTS, "traffic": (), "reference_from": ()}
"""Settings whose values are paths of files → names that are none."""


@dataclass(frozen=True)
class Demand:
    """One action that a file asks for.

    ``key`` and ``value``: as in files and flags.  ``what``: the consequence, in words.  ``target``: the path or host,
    if the value does not name it.
    """

    key: str
    value: str
    what: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.key} {self.value!r} {self.what}"


@dataclass(frozen=True)
class Trust:
    """Permissions given on the command line.

    ``files``: trusted files, or their folders.  ``words``: keys and values that a file may also ask for.  With
    ``exact``, a word that the file does not ask for is an error.
    """

    files: Sequence[Path] = ()
    words: Collection[tuple[str, str]] = ()
    exact: bool = False


def check_trust(settings: Asking, written: Mapping[str, Any], file: Path, trust: Trust | None = None) -> None:
    """Refuse a file that asks for actions without permission, before anything of it is run or read.

    Args:
        settings: the settings as they would run, with overrides of the command line.
        written: the file's own content.
        file: the path of the file; other files in its folder may also be read.

    Raises:
        ConfigError: If it asks for something and is not trusted.  The message lists everything.
        UsageError: If a flag names something that this file does not ask for (``trust.exact``).
    """
    trust = trust or Trust()
    words = {(key, _as_read(key, value)): value for key, value in trust.words}
    asked = [demand for demand in demands(settings) if (demand.key, demand.value) not in words]
    if trust.exact:
        there = {(demand.key, demand.value) for demand in demands(settings)}
        for key, value in ((word[0], typed) for word, typed in words.items() if word not in there):
            raise UsageError(f"--{key} {value}: {file} does not ask for it; leave it out")
    _refuse(asked, written, file, trust)


def _as_read(key: str, value: str) -> str:
    """Return the value of a flag as settings have it: paths hold from any folder there."""
    if key in OUTPUT_KEYS:
        return str(expand(value))
    return expand_existing(value, NAMES_OF[key]) if key in NAMES_OF else value


def check_pasted(pasted: Mapping[str, Any], file: Path, trust: Trust) -> None:
    """Refuse a server's command in a file if it asks for actions without permission.

    ``pasted``: the settings made from the command.

    Its words appear in the report's commands. They need no permission, since the user named the file as a command.

    Raises:
        ConfigError: As :func:`check_trust`.
    """
    named = pasted["engine"]
    engine = EngineConfig.model_validate(named if isinstance(named, Mapping) else {"name": named})
    asked = [
        *_programs(engine),
        *(Demand(f"env.{name}", value, "is a variable that would be set") for name, value in pasted["env"].items()),
        *(demand for key, value in pasted["engine_args"].items() for demand in _option(engine.name, key, str(value))),
    ]
    _refuse(asked, pasted, file, trust)


def _refuse(asked: Sequence[Demand], written: Mapping[str, Any], file: Path, trust: Trust) -> None:
    left = "; ".join(
        str(demand)
        for demand in asked
        if demand.key in (*_COMMANDS, *_HUB_CODE, _KEY)
        or not Path(demand.target).is_relative_to(_place(file.parent))  # files in its own folder need no permission
    )
    if left:
        fault = f"asks for actions that need permission: {left}. Nothing was run or read"
        _check_known(_hash(written, asked), file, trust.files, fault, ", or give the same flags")


def _check_known(known: str, file: Path, files: Sequence[Path], fault: str, remedy: str = "") -> None:
    """Refuse a file unless its hash is remembered, or it or its folder is named in ``files``, which is remembered."""
    if known not in _trusted_digests() and not {_place(file), _place(file.parent)} & {*map(_place, files)}:
        raise ConfigError(f"{file} {fault}; if you trust it, add {shell_line('--trust', file)}{remedy}")
    _note(known, file)


def load_trusted(
    file: Path, overrides: Sequence[str], files: Sequence[Path], read: Callable[[dict[str, Any], str], Settings]
) -> Settings:
    """Read a settings file with ``a.b=c`` overrides and check that it is trusted.

    ``files``: the files named by ``--trust``.  ``read``: turns plain data into settings, given their place.

    Raises:
        ConfigError: As :func:`~fidelab.config.experiment.load` and :func:`check_trust`.
    """
    written = read_yaml(file)
    data = deepcopy(written)
    apply_overrides(data, overrides)
    settings = read(data, str(file))
    check_trust(settings, written, file, Trust(files, _override_pairs(overrides)))
    return settings


def remember(settings: Experiment | CrossEngine, written: str | Mapping[str, Any], file: Path) -> None:
    """Trust a file that fidelab itself wrote for this user; ``written``: its content, as text or as data."""
    asked = demands(settings)
    if asked:
        _note(_hash(yaml.safe_load(written) if isinstance(written, str) else written, asked), file)


def check_trusted(file: Path, content: bytes, what: str, files: Sequence[Path]) -> None:
    """Refuse a file that fidelab did not write for this user; ``what``: its possible actions, in words.

    Args:
        content: content of the file, as it will be used.
        files: the files named by ``--trust``, or their folders.

    Raises:
        ConfigError: If the file is neither remembered (:func:`trust_content`) nor trusted.
    """
    _check_known(
        digest(content), file, files, f"{what}, and was not written by fidelab for you on this machine. Nothing was run"
    )


def trust_content(file: Path, content: bytes) -> None:
    """Trust this content, which fidelab itself writes to ``file`` for this user."""
    _note(digest(content), file)


def _override_pairs(overrides: Sequence[str]) -> set[tuple[str, str]]:
    """Return key and value of every ``a.b=c`` override, including those of arms in one line."""
    pairs: set[tuple[str, str]] = set()
    for text in overrides:
        place, _, value = text.partition("=")
        parent, _, name = place.rpartition(".")
        is_variable = parent.rpartition(".")[2] == "env"
        pairs.update(_leaves(f"env.{name}" if is_variable else name, yaml.safe_load(value)))
    return pairs


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"env.{name}" if key == "env" else str(name), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(key, inner)
    elif isinstance(value, int | float) and key.startswith("env."):
        yield key, str(value)
    elif isinstance(value, str):
        yield key, value
        with contextlib.suppress(ValueError):
            if "=" in value and key in ("reference", "control", "candidates"):
                yield from _leaves(key, {k: v for k, v in arm_fields(value).items() if k != "kv"})


# ----------------------------------------------------------------------------------------- what a file asks for


def demands(settings: Asking) -> list[Demand]:
    """Return each program, shim, hub code, key and file that these settings name, once; also in a preset's
    variables.
    """
    found: list[Demand] = []
    if isinstance(settings, Preset):
        for key, value in settings.serve.items():
            found += _option(settings.engine_name, key, value)
    for engine, options, env in _arms(settings):
        found += _programs(engine)
        found += (Demand(f"env.{name}", value, "is a variable that would be set") for name, value in env.items())
        for key, value in options.items():
            found += _option(engine.name, key, value)
        if _KEY in options:
            host = options.get(_ADDRESS, "no address")
            found.append(Demand(_KEY, options[_KEY], f"is a variable whose content would be sent to {host!r}", host))
    for key, names in NAMES_OF.items():
        path = getattr(settings, key, None)
        if path and path not in names:
            found += _file(key, path)
    for values in ((getattr(settings, "axes", None) or {}).values(), getattr(settings, "benches", {}).values()):
        for key, value in (leaf for owner in values for leaf in _leaves("", owner)):
            found += _file(key, value, Path.is_file)
    for key in OUTPUT_KEYS:
        place = getattr(settings, key, None)
        if place is not None and not (there := _place(Path(place))).is_relative_to(Path.cwd().resolve()):
            found.append(Demand(key, str(place), "is a folder elsewhere that would be written to", str(there)))
    executor = settings.executor if isinstance(settings, Experiment) else None
    if executor is not None and executor.name != "local" and executor.address != "local":
        address = executor.address or "auto"
        found.append(Demand("address", address, "is a cluster that would run configurations", address))
    serve = settings.serve if isinstance(settings, Experiment) else None
    if serve is not None:
        words = shell_line(*serve.wrapper, *serve.program, *serve.words)
        found.append(Demand("serve", words, "would appear in the commands of the report"))
    return list(dict.fromkeys(found))


def _option(engine: str, key: str, value: str) -> Iterator[Demand]:
    if key == _KEY:  # reported with the host that would get it
        return
    owner = ENGINES.load(engine)
    try:
        harmless = owner.harmless[owner.aliases.get(key, key)]
    except KeyError:
        harmless = None
    if key in _HUB_CODE and ("/" in value or ":" in value):
        yield Demand(key, value, "is code of a hub that would be run")
    elif harmless is None:
        yield Demand(key, value, "is an option that may load code or files, or reach other machines")
    elif isinstance(harmless.values, Beside | Anything) and (files := list(_file(key, value, Path.is_file))):
        yield from files
    elif not harmless.values.allows(value):
        said = harmless.values.said
        known = f" (harmless is {said})" if len(said) < _SHORT else ""
        yield Demand(key, value, f"is a value that may load code or files, or reach other machines{known}")


def _arms(settings: Asking) -> Iterator[tuple[EngineConfig, Mapping[str, str], Mapping[str, str]]]:
    """Yield engine, options and variables of every arm."""
    if isinstance(settings, CrossEngine):
        yield from ((line.engine, line.engine_args, {}) for line in settings.engines)
        return
    if isinstance(settings, Preset):
        yield settings.engine, settings.engine_args, settings.env
        return
    for arm in (ArmConfig(), *settings.arms):
        engine = arm.engine or settings.engine
        shared = settings.engine_args if engine.name == settings.engine.name else {}
        yield engine, {**shared, **arm.engine_args}, {**settings.env, **arm.env}


def _programs(engine: EngineConfig) -> Iterator[Demand]:
    if engine.image:
        yield Demand("image", engine.image, "is an image whose programs would be run")
    if engine.python:
        there = "" if engine.image else str(expand(shutil.which(engine.python) or engine.python))
        yield Demand("python", engine.python, "is a program that would be started", there)
    if engine.bin:
        yield Demand("bin", engine.bin, "is a folder of programs that would be started", str(expand(engine.bin)))
    for folder in engine.pythonpath:
        yield Demand("pythonpath", folder, "is a folder of code that would be run", str(expand(folder)))


def _file(key: str, value: str, exists: Callable[[Path], bool] = Path.exists) -> Iterator[Demand]:
    with contextlib.suppress(OSError, ValueError, InputError):  # not a path
        path = expand(value)
        if exists(path):
            where = "" if str(path.resolve()) == value else f" ({str(path.resolve())!r})"
            yield Demand(key, value, f"is a file in another folder that would be read{where}", str(path.resolve()))


def _place(path: Path) -> Path:
    """Return the target of a path, without links and dots."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError):  # a loop of links; the home of a user who does not exist
        return path.absolute()


# ------------------------------------------------------------------------------------------------- the memory


def _hash(written: Mapping[str, Any], asked: Sequence[Demand]) -> str:
    """Return the hash of a file's content and of the targets of its words, which depend on the working folder."""
    led = (f"{one.key} {one.value} {one.target}" for one in asked if one.key not in OUTPUT_KEYS)
    return digest(repr(dict(written)), *sorted(led))


def _memory() -> Path:
    return state_dir() / _TRUST_FILE


def _trusted_digests() -> set[str]:
    with contextlib.suppress(OSError, RuntimeError):
        lines = _memory().read_text("utf-8", errors="replace").splitlines()
        return {line.partition(" ")[0] for line in lines}
    return set()


def _note(known: str, file: Path) -> None:
    """Append a hash; if that fails, the user is asked again next time."""
    if known in _trusted_digests():
        return
    with contextlib.suppress(OSError, RuntimeError):
        _memory().parent.mkdir(parents=True, exist_ok=True)
        with _memory().open("a", encoding="utf-8", errors="replace") as memory:
            memory.write(f"{known} {str(file.absolute())!r}\n")
