"""Presets: arms by name, for comparisons, benches and servers.  Some come with the package, others are the user's own.

A preset is a YAML file with the keys of an arm (``engine``, ``model``, ``kv``, ``dtype``, ``engine_args``, ``env``),
one line that says what it is (``about``), and ``serve``: options that its server alone gets (chat template, parsers).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.config.load import read_yaml, validate_as
from fidelab.config.schema import EngineConfig, Preset, merged_fields
from fidelab.errors import ConfigError, UnknownNameError

__all__ = ["Found", "arm_of", "experiment_of", "find_preset", "listing", "load_preset", "own_folder"]

_HERE = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Found:
    """A preset's file.  ``own``: the package's, or from the user's own folder; else anybody's."""

    name: str
    path: Path
    own: bool = True


def own_folder() -> Path:
    """Where users keep presets of their own: ``fidelab/presets`` in ``$XDG_CONFIG_HOME``, else in ``~/.config``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "fidelab" / "presets"


def listing() -> dict[str, Found]:
    """All presets that have a name, sorted by it; the user's own hide those of the package."""
    found: dict[str, Found] = {}
    for folder in (_HERE, own_folder()):
        files = (path for suffix in _SUFFIXES for path in folder.glob(f"*{suffix}"))
        found |= {path.stem: Found(path.stem, path) for path in files if path.is_file()}
    return dict(sorted(found.items()))


def find_preset(name: str, engine: str | None = None) -> Found:
    """A preset by its name, or by the path of its file.

    ``NAME`` may leave the engine away where presets ``NAME-ENGINE`` exist; the first of them is meant where none is
    asked for.

    Raises:
        ConfigError: there is no such file.
        UnknownNameError: no preset has this name, or not for this engine; lists what exists.
    """
    if os.sep in name or name.endswith(_SUFFIXES):
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigError(f"{name} does not exist; name a preset (fidelab presets list) or the file of one")
        return Found(path.stem, path, own=False)
    known = listing()
    if name in known:
        return known[name]
    family = [one for one in known if one.startswith(f"{name}-") and "-" not in one.removeprefix(f"{name}-")]
    engines = {one: validate(known[one], read_yaml(known[one].path)).engine_name for one in family}
    family = [one for one, key in sorted(engines.items()) if one == f"{name}-{key}" and engine in (None, key)]
    if not family:
        raise UnknownNameError("preset", name if engine is None else f"{name} of engine {engine}", known)
    return known[family[0]]


def load_preset(found: Found, changes: Mapping[str, Any] | None = None) -> Preset:
    """The preset in a file, with other values for some of an arm's fields.

    Raises:
        ConfigError: not YAML, an unknown key or a wrong type; the message names the place.
    """
    return validate(found, merged_fields(read_yaml(found.path), changes or {}))


def validate(found: Found, data: Mapping[str, Any]) -> Preset:
    """Plain data → preset, named after its file unless it has a name; raises as :func:`load_preset`."""
    return validate_as(Preset, {"name": found.name, **data}, str(found.path))


def arm_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an arm that names a ``preset``: the preset's, with those that are given beside it.

    Raises as :func:`find_preset` and :func:`load_preset`.
    """
    own = {key: value for key, value in fields.items() if key != "preset"}
    engine = EngineConfig.model_validate(own["engine"]).name if "engine" in own else None
    found = find_preset(str(fields["preset"]), engine)
    preset = load_preset(found)
    if not found.own:
        from fidelab.config.trust import check_trust  # which reads presets

        check_trust(preset, read_yaml(found.path), found.path)
    if "engine" in own and engine != preset.engine_name:  # its options and its formats are that engine's
        raise ConfigError(f"preset {preset.name} is of engine {preset.engine_name}, not {engine}")
    name = own.get("name") or " ".join([str(preset.name), *_differences(own)])
    base = preset.arm_fields()
    if "engine" in own:  # its environment stays the preset's where nothing else is said
        given = {key: value for key, value in EngineConfig.model_validate(own["engine"]).all_fields().items() if value}
        own["engine"] = {**preset.engine.all_fields(), **given}
    return merged_fields({**base, "name": name}, own)


def _differences(own: Mapping[str, Any]) -> list[str]:
    """What an arm differs in from its preset, in words."""
    plain = [str(own[key]) for key in ("kv", "dtype", "model") if key in own]
    return [*plain, *(f"{key}={own[part][key]}" for part in ("engine_args", "env") for key in own.get(part, {}))]


def experiment_of(preset: Preset) -> dict[str, Any]:
    """The fields of an experiment whose arms all begin from a preset, with the preset itself as reference."""
    fields = preset.arm_fields()
    reference = {key: fields.pop(key) for key in ("name", "kv") if key in fields}
    return {**fields, "reference": reference}
