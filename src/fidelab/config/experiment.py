"""Turn plain data into an experiment: read presets, check that they are trusted, and validate the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fidelab.config.load import read_yaml, validate_as
from fidelab.config.presets import cells_of, expand_presets
from fidelab.config.schema import Experiment
from fidelab.config.trust import Trust, check_trust
from fidelab.core.errors import ConfigError, FidelabError


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file and apply ``a.b=c`` overrides.

    Raises:
        ConfigError: If the file is missing, is not UTF-8 or YAML, or has an unknown key or a wrong type.  The message
            names the place.
    """
    return validate(read_yaml(path, overrides), str(path))


def validate(data: Mapping[str, Any], where: str, trust: Trust | None = None) -> Experiment:
    """Turn plain data into an experiment, with the presets that its arms name.

    ``trust``: permissions given to preset files.

    Raises:
        ConfigError: If the data are invalid, or a preset's file is not trusted.  The message is one line about the
            first error, with its place in ``where``.
    """
    check = partial(check_trust, trust=trust)
    experiment = validate_as(Experiment, expand_presets(data, where, check), where)
    if "preset" in experiment.vary:
        try:
            cells_of(experiment, check)
        except FidelabError as error:
            raise ConfigError(f"{where}: vary: {error}") from None
    return experiment
