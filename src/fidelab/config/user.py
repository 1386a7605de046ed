"""The user's own defaults for options of the command line: ``~/.config/fidelab/config.yaml``.

A flag, a preset and an experiment file precede them.  The file is looked for in ``$XDG_CONFIG_HOME`` if that is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fidelab.core.errors import ConfigError, listed, nearest_first
from fidelab.core.paths import expand


class UserOption(NamedTuple):
    """An option that may have a default of the user's.

    ``parameter``: its name in commands.  ``commands``: those that take the default, by their words; empty: all that
    have the option.
    """

    parameter: str
    meaning: str
    commands: tuple[str, ...] = ("compare", "bench offline")


USER_OPTIONS: Mapping[str, UserOption] = {
    "engine": UserOption("engine", "engine that runs all configurations"),
    "device": UserOption("device", "cpu, cuda, cuda:0 …"),
    "threads": UserOption("threads", "CPU threads per worker"),
    "output-dir": UserOption("output_dir", "folder of runs, where latest is looked for, too", ()),
    "context": UserOption("sequence", "context for which memory is reported, such as 32k", ("compare",)),
    "fit": UserOption("fit", "memory in which users must fit: 24GiB or RTX-4090", ("compare",)),
}
"""Key of the file → the option."""


def config_file() -> Path:
    """Return the path of the user's file; it may not exist."""
    return expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "fidelab" / "config.yaml"


def user_defaults() -> dict[str, str]:
    """Return the user's defaults: option without dashes → text as on a command line; empty without a file.

    Raises:
        ConfigError: If the file is not YAML, has an unknown key, or a value that is not a text or a number.
    """
    path = config_file()
    if not path.is_file():
        return {}
    from fidelab.config.load import parse_yaml, read_text

    data: Any = parse_yaml(read_text(path), path, texts=True)
    if data is None or data == "":
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: write options and their defaults, such as engine: vllm")
    found: dict[str, str] = {}
    for key, value in data.items():
        name = str(key).replace("_", "-")
        if name not in USER_OPTIONS:
            known = nearest_first(name, USER_OPTIONS)
            raise ConfigError(f"{path}: unknown key {key!r}; did you mean {known[0]!r}? {listed(known)}")
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{path}: {name}: write one text or number")
        text = value.strip()
        found[name] = str(expand(text)) if name == "output-dir" and text.startswith("~") else text
    return found


def runs_folder() -> Path:
    """Return the folder of runs where a command line names none.

    Raises:
        ConfigError: As :func:`user_defaults`.
    """
    return Path(user_defaults().get("output-dir", "runs"))
