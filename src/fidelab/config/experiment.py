"""Turn plain data into an experiment: read presets, check that they are trusted, and validate the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fidelab.config.cross import KIND, CrossEngine
from fidelab.config.files import expand_files
from fidelab.config.load import read_yaml, validate_as
from fidelab.config.presets import cells_of, expand_presets
from fidelab.config.schema import Experiment
from fidelab.config.trust import NAMES_OF, OUTPUT_KEYS, Trust, check_trust
from fidelab.core.errors import ConfigError, FidelabError
from fidelab.core.paths import expand, expand_existing


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file and apply ``a.b=c`` overrides.

    Raises:
        ConfigError: If the file is missing, is not UTF-8 or YAML, or has an unknown key or a wrong type.  The message
            names the place.
    """
    return validate(read_yaml(path, overrides), str(path))


def validate(data: Mapping[str, Any], where: str, trust: Trust | None = None) -> Experiment:
    """Turn plain data into an experiment that nothing has to complete from other files.

    Presets that its arms and its grid name are read, and paths hold from any folder.  ``trust``: permissions given to
    preset files.

    Raises:
        ConfigError: If the data are invalid, or a preset's file is not trusted.  The message is one line about the
            first error, with its place in ``where``.
    """
    check = partial(check_trust, trust=trust)
    data, left_out = expand_files(data, where)
    experiment = placed(validate_as(Experiment, expand_presets(data, where, check), where))
    experiment._left_out = left_out
    if "preset" in experiment.vary:
        try:
            experiment._cells = tuple(cells_of(experiment, check))
        except FidelabError as error:
            raise ConfigError(f"{where}: vary: {error}") from None
    return experiment


def validate_cross(data: Mapping[str, Any], where: str) -> CrossEngine:
    """Turn plain data into a cross-engine experiment, with absolute paths; raises as :func:`validate`."""
    return placed(validate_as(CrossEngine, data, where))


def read_settings(data: Mapping[str, Any], where: str) -> Experiment | CrossEngine:
    """Turn plain data into an experiment of either kind.

    Raises:
        ConfigError: If the kind is unknown, or as :func:`validate`.
    """
    if "kind" not in data:
        return validate(data, where)
    if data["kind"] != KIND:
        raise ConfigError(f"{where}: kind: {data['kind']!r} is not a runnable kind: use {KIND} or omit `kind`")
    return validate_cross(data, where)


Placed = TypeVar("Placed", Experiment, CrossEngine)


def placed(experiment: Placed) -> Placed:
    """Return the experiment with paths that hold from any folder. A name, such as a hub id, stays as it is."""
    from fidelab.models.embedded import NAMES

    names = {**NAMES_OF, "model": ("fake", *NAMES)}
    updates: dict[str, Any] = {
        key: expand_existing(value, names[key])
        for key in names
        if isinstance(value := getattr(experiment, key, None), str)
    }
    folders = ((key, getattr(experiment, key, None)) for key in OUTPUT_KEYS)
    updates |= {key: str(expand(folder)) for key, folder in folders if folder is not None}
    if isinstance(experiment, CrossEngine):
        updates["engines"] = [
            line.model_copy(update={"model": line.model and expand_existing(line.model, names["model"])})
            for line in experiment.engines
        ]
    return experiment.model_copy(update=updates)
