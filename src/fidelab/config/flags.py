"""The one reader of a command line's settings: flags, a preset and a pasted server command become an experiment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fidelab.config.experiment import validate
from fidelab.config.load import apply_overrides, read_yaml
from fidelab.config.presets import experiment_of, find_preset, load_preset
from fidelab.config.schema import Experiment
from fidelab.config.serve import program_python, read_change, read_served
from fidelab.config.trust import Trust, check_pasted, check_trust
from fidelab.core.errors import UsageError
from fidelab.engines import ENGINES


class StartingPoint(NamedTuple):
    """Starting point of the settings that flags give.

    ``command`` and ``changes``: a server's command line as the reference, and changed flags of it as candidates.
    ``preset``: a preset whose fields all configurations have.  ``given``: names of settings that flags name, and which
    therefore precede the preset's.
    """

    command: str | None = None
    changes: Sequence[str] = ()
    preset: str | None = None
    given: Collection[str] = ()


def read_flags(
    data: Mapping[str, Any],
    where: str,
    *,
    overrides: Sequence[str] = (),
    trusted: Sequence[Path] = (),
    begun: StartingPoint | None = None,
) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment that flags describe, and secrets of a pasted command, which the record must not hold.

    Args:
        data: settings of the flags, as an experiment file has them.
        where: name of the command in messages.
        overrides: texts ``a.b=c``, which precede everything.
        trusted: files that may ask for programs, variables and other files.
        begun: the starting point of the settings.

    Raises:
        UsageError: If a command cannot be read, or a preset is of another engine.
        ConfigError: If the settings are invalid, or a file that is not trusted asks for an action.
    """
    begun, secrets = begun or StartingPoint(), tuple[str, ...]()
    read = dict(data)
    if begun.command is not None:
        read, secrets = _from_command(begun.command, begun.changes, read, trusted)
    elif begun.preset is not None:
        read = _from_preset(begun.preset, begun.given, read, trusted)
    apply_overrides(read, overrides)
    return validate(read, where, Trust(trusted)), secrets


def _from_command(
    command: str, changes: Sequence[str], data: Mapping[str, Any], trusted: Sequence[Path]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings with a pasted command as the reference, which flags precede, and its secrets."""

    def controlled(name: str) -> Mapping[str, str]:
        return dict(getattr(ENGINES.load(name), "controlled", {}))

    served = read_served(command, controlled)
    if served.file is not None:
        check_pasted(served.settings(), served.file, Trust(trusted))
    own, place = served.settings(), dict(data["engine"])
    if place["image"] is None:
        place["python"] = place["python"] or program_python(served)
    return {
        **own,
        **{key: value for key, value in data.items() if value not in (None, "auto")},
        "engine": {**place, "image": place["image"] or served.image, "name": served.engine},
        "engine_args": {**own["engine_args"], **data["engine_args"]},
        "env": {**own["env"], **data["env"]},
        "candidates": [*(read_change(text, served, controlled) for text in changes), *data["candidates"]],
    }, served.secrets


def _from_preset(name: str, given: Collection[str], data: Mapping[str, Any], trusted: Sequence[Path]) -> dict[str, Any]:
    """Return the settings with a preset's where flags name none."""
    engine = data["engine"]["name"] if "engine" in given else None
    found = find_preset(name, engine)
    preset = load_preset(found)
    if not found.own:
        check_trust(preset, read_yaml(found.path), found.path, Trust(trusted))
    if engine not in (None, preset.engine_name):
        raise UsageError(f"--engine {engine}: preset {preset.name} is of engine {preset.engine_name}")
    base = experiment_of(preset)
    place = preset.engine.model_dump(mode="json")
    place = {"name": place} if isinstance(place, str) else place
    return {
        **data,
        "model": data["model"] or base["model"],
        "engine": {**data["engine"], **place, **{key: x for key, x in data["engine"].items() if x and key != "name"}},
        "engine_args": {**base.get("engine_args", {}), **data["engine_args"]},
        "env": {**base.get("env", {}), **data.get("env", {})},
        "dtype": data["dtype"] if "dtype" in given else base.get("dtype", data["dtype"]),
        "device": data["device"] if "device" in given else preset.device or data["device"],
        "reference": data.get("reference", base["reference"]),
    }
