"""Read a systemd unit as a script: its variables, and the command of ``ExecStart=``."""

from __future__ import annotations

import re
import shlex

from fidelab.config.pasted.notes import Notes
from fidelab.core.errors import UsageError

IS_UNIT = re.compile(r"(?m)^[ \t]*ExecStart[ \t]*=")
_LINE = re.compile(r"(\w+)[ \t]*=[ \t]*(.*)", re.DOTALL)
_PREFIXES = "@-:+!|"  # of ExecStart=: how failures and rights are treated
_SPECIFIER = re.compile(r"%(.)")


def script_of_unit(text: str, where: str, notes: Notes) -> str:
    """Return the shell script that a unit stands for.

    ``Environment=A=b`` and ``ExecStart=/usr/bin/vllm serve m`` are ``export A=b`` and the command.  The other lines are
    noted.

    Raises:
        UsageError: If a value has a specifier of systemd, such as ``%h``.
    """
    exports: list[str] = []
    commands: list[str] = []
    joined = re.sub(r"\\[ \t]*\n(?:[ \t]*[#;][^\n]*\n)*", " ", text)
    for line in joined.split("\n"):
        match = _LINE.fullmatch(line.strip())
        if match is None or line.strip().startswith(("#", ";")):
            continue
        key, value = match.groups()
        if key == "Environment":
            try:
                words = shlex.split(value)
            except ValueError as error:
                raise UsageError(f"{where}: Environment={value}: {str(error).lower()}") from None
            for word in words:
                name, _, setting = word.partition("=")
                if not name.isidentifier():
                    raise UsageError(f"{where}: Environment={word} is not NAME=value")
                exports.append(f"export {name}={shlex.quote(_plain(setting, where))}")
        elif key == "ExecStart":  # an empty one removes those before
            commands = [*commands, _plain(value.lstrip(_PREFIXES), where)] if value else []
        elif key == "EnvironmentFile":
            notes.ignored[line.strip()] = "a file of variables, which is not read; write those that matter"
        elif key.startswith("Exec"):
            notes.ignored[f"{key}=…"] = "not run: only the server's command is read"
        elif key == "WorkingDirectory":
            notes.ignored[line.strip()] = "paths are read from the current folder"
        else:
            notes.ignored[f"{key}=…"] = "concerns the service"
    notes.translated["systemd unit"] = "the command of ExecStart="
    return "\n".join([*exports, *(command.replace("$$", r"\$") for command in commands)])


def _plain(value: str, where: str) -> str:
    """Return a value with ``%%`` as ``%``.

    Raises:
        UsageError: If it has another specifier, which only systemd can fill in.
    """

    def sign(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        raise UsageError(f"{where}: {match[0]} is a specifier of systemd; write its value (%% for a percent sign)")

    return _SPECIFIER.sub(sign, value)
