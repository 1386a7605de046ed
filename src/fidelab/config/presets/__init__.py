"""Presets: arms by name, for comparisons, benches and servers.  Some come with the package, others are the user's own.

A preset is a YAML file with the keys of an arm (``engine``, ``model``, ``kv``, ``dtype``, ``engine_args``, ``env``), a
description in one line (``about``), the device that it needs (``device``), and ``serve``: options for its server only
(chat template, parsers).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.config.arms import arm_fields
from fidelab.config.grid import cell_fields, levels_of
from fidelab.config.load import read_yaml, validate_as
from fidelab.config.schema import ArmConfig, EngineConfig, Experiment, Preset, merged_fields
from fidelab.config.serve import variable_settings
from fidelab.core.errors import ConfigError, FidelabError, UnknownNameError, UsageError
from fidelab.core.paths import expand
from fidelab.engines import ENGINES
from fidelab.engines.options import own_flag

Check = Callable[[Preset, Mapping[str, Any], Path], None]
"""Refuses a preset, its file's content and the file; :func:`fidelab.config.trust.check_trust` is one."""

_PRESET_DIR = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class PresetFile:
    """A preset's file.  ``own``: whether it comes with the package or from the user's own folder."""

    name: str
    path: Path
    own: bool = True


def user_folder() -> Path:
    """Return the folder of the user's presets: ``fidelab/presets`` in ``$XDG_CONFIG_HOME``, else in ``~/.config``."""
    return expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "fidelab" / "presets"


def listing() -> dict[str, PresetFile]:
    """Return all presets that have a name, sorted by name.

    The user's own presets take precedence over those of the package.
    """
    found: dict[str, PresetFile] = {}
    for folder in (_PRESET_DIR, user_folder()):
        files = (path for suffix in _SUFFIXES for path in folder.glob(f"*{suffix}"))
        found |= {path.stem: PresetFile(path.stem, path) for path in files if path.is_file()}
    return dict(sorted(found.items()))


def find_preset(name: str, engine: str | None = None) -> PresetFile:
    """Return a preset by its name, or by the path of its file.

    ``NAME`` may omit the engine if presets ``NAME-ENGINE`` exist.  Without a requested engine, the first of them
    counts.

    Raises:
        ConfigError: If the file does not exist.
        UnknownNameError: If no preset has this name, or not for this engine.  The message lists those that exist.
    """
    if os.sep in name or name.endswith(_SUFFIXES):
        path = expand(name)
        if not path.exists():
            raise ConfigError(f"{name} does not exist; name a preset (fidelab serve presets) or the file of one")
        return PresetFile(path.stem, path, own=False)
    known = listing()
    if name in known:
        return known[name]
    family = [one for one in known if one.startswith(f"{name}-") and "-" not in one.removeprefix(f"{name}-")]
    engines = {one: validate(known[one], read_yaml(known[one].path)).engine_name for one in family}
    family = [one for one, key in sorted(engines.items()) if one == f"{name}-{key}" and engine in (None, key)]
    if not family:
        raise UnknownNameError("preset", name if engine is None else f"{name} of engine {engine}", known)
    return known[family[0]]


def load_preset(found: PresetFile, changes: Mapping[str, Any] | None = None) -> Preset:
    """Return the preset in a file, with other values for some of an arm's fields.

    Raises:
        ConfigError: If the file is not YAML, or has an unknown key or a wrong type, or sets what fidelab itself
            writes into a server's command.  The message names the place.
    """
    return validate(found, merged_fields(read_yaml(found.path), changes or {}))


def validate(found: PresetFile, data: Mapping[str, Any]) -> Preset:
    """Turn plain data into a preset; raises as :func:`load_preset`.

    The preset is named after its file unless it has a name.
    """
    preset = validate_as(Preset, {"name": found.name, **_without_variables(data, str(found.path))}, str(found.path))
    if preset.engine_name in ENGINES.names():
        engine = ENGINES.load(preset.engine_name)
        for name in (*preset.engine_args, *preset.serve):
            if flag := own_flag(name, engine.own_flags, shortened=engine.shortened_flags):
                raise ConfigError(f"{found.path}: a preset cannot set {name}: {engine.own_flags[flag]}")
    return preset


def _without_variables(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a preset's data with variables that its server reads as flags replaced by the settings that they mean.

    Raises:
        ConfigError: If a variable is unknown, or the preset also has another value for its setting.
    """
    engine, env = data.get("engine"), data.get("env")
    engine = engine.get("name") if isinstance(engine, Mapping) else engine
    if not isinstance(env, Mapping) or engine not in ENGINES.names():
        return data
    try:
        settings, others = variable_settings(engine, {name: str(value) for name, value in env.items()}, where)
    except UsageError as error:
        raise ConfigError(str(error)) from None
    fields = {**data, "env": others}
    for key, meant in settings.items():
        own = data.get(key) or ({} if isinstance(meant, Mapping) else meant)
        pairs = (
            {(key, own, meant)}
            if not isinstance(meant, Mapping)
            else {(f"{key}.{name}", str(own.get(name, value)), value) for name, value in meant.items()}
        )
        for place, written, value in sorted(pairs):
            if written != value:
                raise ConfigError(
                    f"{where}: {place} is {written}, and a variable in env says {value}: keep one of them"
                )
        fields[key] = {**meant, **own} if isinstance(meant, Mapping) else meant
    return fields


def expand_presets(data: Mapping[str, Any], where: str, check: Check) -> dict[str, Any]:
    """Return the plain data of an experiment, with each preset that an arm names replaced by its content.

    Args:
        data: data of an experiment; an arm may also be a text.
        where: name of the data in messages.
        check: refuses files that the user does not trust.

    Raises:
        ConfigError: If a preset cannot be found or read, or is not trusted.  The message names the arm.
    """

    def expanded(value: Any, place: str) -> Any:
        try:
            fields = arm_fields(value) if isinstance(value, str) else value
        except ValueError:
            return value
        if not isinstance(fields, Mapping) or "preset" not in fields:
            return value
        try:
            return arm_of(fields, check)
        except FidelabError as error:
            raise ConfigError(f"{where}: {place}: {error}") from None

    arms = {key: expanded(data[key], key) for key in ("reference", "control") if key in data}
    candidates = data.get("candidates")
    if isinstance(candidates, list):
        arms["candidates"] = [expanded(value, f"candidates.{n}") for n, value in enumerate(candidates)]
    return {**data, **arms}


def cells_of(experiment: Experiment, check: Check | None = None) -> list[ArmConfig]:
    """Return the arms of the grid that ``vary`` spans, named by their levels.

    Raises as :func:`arm_of`, which receives ``check``.
    """
    cells = map(cell_fields, levels_of(experiment.vary))
    return [
        validate_as(ArmConfig, arm_of(fields, check) if "preset" in fields else fields, fields["name"])
        for fields in cells
    ]


def arm_of(fields: Mapping[str, Any], check: Check | None = None) -> dict[str, Any]:
    """Return the fields of an arm that names a ``preset``: the preset's, overridden by the arm's.

    Raises as :func:`find_preset` and :func:`load_preset`, and as ``check`` for a foreign file.
    """
    own = {key: value for key, value in fields.items() if key != "preset"}
    engine = None
    if "engine" in own:
        named = own["engine"] if isinstance(own["engine"], Mapping) else {"name": own["engine"]}
        engine = validate_as(EngineConfig, named, "engine")
    found = find_preset(str(fields["preset"]), None if engine is None else engine.name)
    preset = load_preset(found)
    if not found.own and check is not None:
        check(preset, read_yaml(found.path), found.path)
    changes = [str(own[key]) for key in ("kv", "dtype", "model") if key in own]
    for table in (own.get("engine_args"), own.get("env")):
        if isinstance(table, Mapping):
            changes += [f"{key}={value}" for key, value in table.items()]
    name = own.get("name") or " ".join([str(preset.name), *changes])
    if engine is not None:
        if engine.name != preset.engine_name:  # options and formats belong to that engine
            raise ConfigError(f"preset {preset.name} is of engine {preset.engine_name}, not {engine.name}")
        # the preset's environment is the default
        given = {key: value for key, value in engine.all_fields().items() if value}
        own["engine"] = {**preset.engine.all_fields(), **given}
    return merged_fields({**preset.arm_fields(), "name": name}, own)


def experiment_of(preset: Preset) -> dict[str, Any]:
    """Return the fields of an experiment whose arms all begin from a preset, with the preset itself as reference."""
    fields = preset.arm_fields()
    reference = {key: fields.pop(key) for key in ("name", "kv") if key in fields}
    return {**fields, "reference": reference}
