"""Options of an arm (``--engine-arg key=value``): the options of an engine, and their valid values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from fidelab.core import Arm, plain_json
from fidelab.core.errors import MAX_LISTED, UsageError

TRUST = "trust-remote-code"  # the option of engines that can run code of a checkpoint
Value = tuple[Callable[[str], bool], str]  # the check of a value, and the description of valid values


OWN_FLAGS: Mapping[str, str] = {
    "host": "pass --host",
    "port": "pass --port",
    "uds": "servers listen on --host and --port",
    **dict.fromkeys(("model", "model-path", "model-tag"), "write model: NAME"),
    **dict.fromkeys(("served-model-name", "alias"), "a server is named after its model"),
    "dtype": "write dtype: TYPE",
    "kv-cache-dtype": "write kv: FORMAT",
}
"""Flag of a server's command that fidelab itself writes → what to write in a preset instead; engines add theirs."""


def own_flag(name: str, own: Iterable[str], *, shortened: bool) -> str | None:
    """Return the flag of ``own`` that a server takes an option's name for; ``None`` if it is another option.

    ``shortened``: its parser, as argparse does, takes the beginning of a flag for the whole.
    """
    return next((flag for flag in own if flag == name or (shortened and flag.startswith(name))), None)


def _is_object(text: str) -> bool:
    try:
        return isinstance(plain_json(text), dict)
    except ValueError:
        return False


def is_count(text: str) -> bool:
    """Return whether a text is a whole number above 0."""
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def one_of(*words: str) -> Value:
    """Return the check for one of some words, and its description."""
    return words.__contains__, " or ".join(words)


NUMBER: Value = (is_count, "a whole number above 0")
TOKENS: Value = (is_count, "a number of tokens")
SHARE: Value = (_is_share, "a share between 0 and 1")
NAME: Value = (bool, "a name")
OBJECT: Value = (_is_object, "a JSON object")
SWITCH: Value = (lambda text: switched(text) is not None, "on or off")
YES_NO: Value = (lambda text: switched(text) is not None, "yes or no")


def check_options(engine: str, options: Iterable[tuple[str, str]], known: Mapping[str, Value]) -> None:
    """Reject unknown options and invalid values.

    Raises:
        UsageError: If an option is unknown or a value is invalid. The message names the options that exist, or the
            valid values.
    """
    for key, _ in other_options(engine, options, known):
        raise unknown_option(engine, key, known)


def other_options(
    engine: str,
    options: Iterable[tuple[str, str]],
    known: Mapping[str, Value],
    controlled: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[str, str]]:
    """Reject invalid values of options that fidelab knows, and options that it controls. Returns all other options.

    ``controlled``: option → fidelab's use of it, and what to write instead.

    Raises:
        UsageError: If a value is invalid, or an option cannot be set. The message names the valid values or the reason.
    """
    others = []
    for key, value in options:
        if key in controlled:
            raise UsageError(f"engine {engine}: {key} cannot be set here: {controlled[key]}")
        if key not in known:
            others.append((key, value))
            continue
        good, what = known[key]
        if not good(value):
            raise UsageError(f"engine {engine}: {key}={value!r} is not {what}")
    return others


def unknown_option(
    engine: str, key: str, names: Iterable[str], help_text: str = "see --help of its own command line"
) -> UsageError:
    """Error for an unknown option of an engine, with the nearest options and the engines that have it.

    ``help_text``: where options are listed that are too many for a line.
    """
    from fidelab.engines import ENGINES

    names = sorted({*names})
    near = get_close_matches(key, names, n=3)
    owners = [other for other in ENGINES.names() if other != engine and key in ENGINES.load(other).options]
    elsewhere = f"; engine {' and '.join(owners)} has" if owners else ""
    few = f"; it has: {', '.join(names)}" if len(names) <= MAX_LISTED else f"; {help_text}"
    meant = f"; did you mean {' or '.join(near)}?" if near else "" if owners else few
    return UsageError(f"engine {engine} has no option {key!r}{elsewhere}{meant}")


class _Refused(Exception):
    pass


def parse_options(
    engine: str, parser: argparse.ArgumentParser, options: Iterable[tuple[str, str]], known: Iterable[str] = ()
) -> dict[str, Any]:
    """Parse options as the engine's own command line does, and return argument name → value.

    Switches are ``yes`` or ``no`` (``true``, ``on``, … too), several values a JSON list or separated by spaces.

    Args:
        parser: the engine's own; its ``error`` is replaced.
        known: names besides the parser's, for the error.

    Raises:
        UsageError: If there is no such option, or the engine refuses the value. The text is the engine's own.
    """

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    parser.error = refuse  # type: ignore[method-assign]
    for each in parser._actions:
        each.required = False  # such as the model, which no option names
    actions = {name[2:]: a for a in parser._actions for name in a.option_strings if name.startswith("--")}
    values: dict[str, Any] = {}
    for key, value in options:
        if (action := actions.get(key)) is None:
            raise unknown_option(engine, key, [*known, *actions])
        if (positive := key.removeprefix("no-")) != key and positive in actions:  # one name, one meaning
            raise UsageError(f"engine {engine}: write {positive}=yes or {positive}=no, not {key}")
        words = [f"--{key}={value}"]
        if action.nargs == 0:
            if (on := switched(value)) is None:
                raise UsageError(f"engine {engine}: {key}={value!r} is not yes or no")
            words = [f"--{key}"] if on else [f"--no-{key}"] if f"no-{key}" in actions else []
        elif action.nargs is not None and action.nargs != "?":
            words = [f"--{key}", *_several(value)]
        try:
            values[action.dest] = getattr(parser.parse_args(words), action.dest)
        except (_Refused, ValueError, SystemExit) as error:  # a type of the parser may raise whatever it likes
            raise UsageError(f"engine {engine}: {key}={value!r}: {' '.join(str(error).split())[:300]}") from None
    return values


def _several(text: str) -> list[str]:
    with suppress(ValueError):
        if isinstance(values := plain_json(text), list):
            return [value if isinstance(value, str) else json.dumps(value) for value in values]
    return text.split()


def switched(value: str) -> bool | None:
    """Return whether a value switches an option on or off; ``None`` for another kind of value."""
    return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}.get(value.lower())


Arguments = Mapping[str, tuple[str, Callable[[str], Any]]]  # option → argument of a constructor, and its type


def passed(options: Iterable[tuple[str, str]], arguments: Arguments) -> dict[str, Any]:
    """Return the options of an arm that are arguments of the engine's constructor."""
    return {arguments[key][0]: arguments[key][1](value) for key, value in options if key in arguments}


def with_default(arm: Arm, key: str, value: str) -> Arm:
    """Return the arm with a default for an option that it may have left open."""
    return arm if key in dict(arm.options) else replace(arm, options=tuple(sorted((*arm.options, (key, value)))))


def trusts_code(arm: Arm) -> bool:
    """Return whether the arm's checkpoint may run its own code, which the user must allow explicitly."""
    return switched(dict(arm.options).get(TRUST, "no")) is True


def flags(
    options: Iterable[tuple[str, str]],
    renamed: Mapping[str, str] = MappingProxyType({}),
    valued: Collection[str] = (),
    *,
    negates: bool = True,
) -> list[str]:
    """Return options of an arm as words of a command line: ``--NAME VALUE``; switches ``--NAME`` or ``--no-NAME``.

    Args:
        options: name and value, in their order.
        renamed: option → its other name on the command line; an empty name if it has none.
        valued: options that take words such as ``on`` and ``auto``, so they are not switches.
        negates: whether the parser knows ``--no-NAME``; without it, switches that are off are omitted.
    """
    words: list[str] = []
    for key, value in options:
        name, on = renamed.get(key, key), None if key in valued else switched(value)
        if not name:
            continue
        if on is None:
            words += [f"--{name}", *(_several(value) if value.startswith("[") else [value])]
        elif on:
            words.append(f"--{name}")
        elif negates:
            words.append(f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}")
    return words
