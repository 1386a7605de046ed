"""The user's defaults (:mod:`fidelab.config.user`) as typer reads them, and which of them a command used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_USED: dict[str, str] = {}
"""Options that the running command has from the user's file, without the folder of runs."""


def default_map(root: Any) -> dict[str, Any]:
    """Return the defaults of all commands: word → word → parameter → value.

    Raises:
        ConfigError: If the user's file is invalid; ``--help`` and ``fidelab doctor`` work all the same.
    """
    from fidelab.config.user import USER_OPTIONS, config_file, user_defaults
    from fidelab.core.errors import ConfigError

    _USED.clear()
    if not config_file().is_file():
        return {}
    try:
        given = user_defaults()
    except ConfigError:
        if {"-h", "--help", "--help-all", "doctor"} & {*sys.argv[1:]}:
            return {}
        raise
    found: dict[str, Any] = {}
    for words, command in _commands(root, ()):
        own = {parameter.name for parameter in command.params}
        for key, value in given.items():
            option = USER_OPTIONS[key]
            if option.parameter in own and (not option.commands or " ".join(words) in option.commands):
                place = found
                for word in words:
                    place = place.setdefault(word, {})
                place[option.parameter] = value
    return found


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*words, name))
        else:
            yield (*words, name), command


def use_defaults(context: Any) -> str:
    """Keep for the record which of the user's defaults the command has, and return a line about them, or nothing."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "DEFAULT_MAP" and parameter.name != "output_dir":
            _USED[parameter.opts[0]] = str(context.default_map[parameter.name])
    if not _USED:
        return ""
    from fidelab.config.user import config_file

    return f"fidelab: from {config_file()}: {' '.join(f'{flag} {value}' for flag, value in _USED.items())}"


def words_of_defaults() -> list[str]:
    """Return the used defaults as words of a command line, so that the recorded command repeats the run."""
    return [word for pair in _USED.items() for word in pair]
