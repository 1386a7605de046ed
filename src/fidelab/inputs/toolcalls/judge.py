"""Whether a call is the right one, and what is wrong with it otherwise.

See docs/metrics/generated-text.md#tool-calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fidelab.core import canonical_json, strict_json
from fidelab.inputs.json_values import same_value
from fidelab.inputs.toolcalls.pythonic import constant
from fidelab.inputs.toolcalls.read import Call, Reading

KINDS = ("no call", "several calls", "wrong function", "invalid arguments", "wrong arguments", "right")
"""What becomes of an answer, from the worst to the best."""
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Wanted:
    """The one right call, the schema of its arguments, and the names of all functions that are offered."""

    name: str
    arguments: Mapping[str, Any]
    schema: Mapping[str, Any]
    tools: Sequence[str]


@dataclass(frozen=True)
class Judgement:
    """``kind``: one of :data:`KINDS`; ``fault``: in a few words what is wrong."""

    kind: str
    fault: str = ""


def judge(reading: Reading, wanted: Wanted) -> Judgement:
    """Return what becomes of an answer.

    The order of arguments does not matter, nor does an optional argument that has the default of its schema.  Texts
    are equal but for case and space around them; numbers are equal by value, and 1 is not ``true``.
    """
    if not reading.calls:
        return Judgement("no call", reading.fault)
    if len(reading.calls) > 1:
        return Judgement("several calls", f"{len(reading.calls)} calls, expected 1")
    [call] = reading.calls
    if call.name != wanted.name:
        offered = "" if call.name in wanted.tools else ", which is not offered"
        return Judgement("wrong function", f"{_shown(call.name)} called{offered}, expected {wanted.name}")
    arguments = _typed(call, wanted.schema)
    if fault := violation(wanted.schema, arguments):
        return Judgement("invalid arguments", fault)
    found, right = (_explicit(side, wanted.schema) for side in (arguments, wanted.arguments))
    for key in [*right, *found]:
        if key not in found:
            return Judgement("wrong arguments", f"{_shown(key)} is missing")
        if key not in right:
            return Judgement("wrong arguments", f"{_shown(key)} was not asked for")
        if not same_value(found[key], right[key]):
            values = f"{_shown(canonical_json(found[key]))}, expected {_shown(canonical_json(right[key]))}"
            return Judgement("wrong arguments", f"{_shown(key)} is {values}")
    return Judgement("right")


def violation(schema: Mapping[str, Any], value: Any) -> str:
    """Return the first fault of a value by a JSON schema; empty where the schema accepts it."""
    from jsonschema import Draft202012Validator

    error = next(iter(Draft202012Validator(schema).iter_errors(value)), None)
    if error is None:
        return ""
    return _shown(f"at {error.json_path}: {error.message}" if error.absolute_path else str(error.message), 160)


def _typed(call: Call, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments; of a form that writes texts alone, those as JSON that the schema does not take as texts."""
    if not call.texts:
        return call.arguments
    properties = schema.get("properties", {})
    return {key: _read(text, properties.get(key, {})) for key, text in call.arguments.items()}


def _read(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    for read in (strict_json, constant):  # templates write lists and objects in either notation
        with suppress(ValueError):
            return read(text)
    return text


def _explicit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that have their default."""
    properties = schema.get("properties", {})
    return {
        key: value
        for key, value in arguments.items()
        if "default" not in (own := properties.get(key, {})) or not same_value(value, own["default"])
    }


def _shown(text: str, most: int = _SHOWN_CHARS) -> str:
    text = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())  # no half of a surrogate pair
    return text if len(text) <= most else f"{text[: most - 1]}…"
