"""Dialogues in which every next call is known: their parts, their messages, and how schemas are written.

See docs/metrics/generated-text.md#tool-calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


@dataclass(frozen=True)
class Step:
    """One turn: what the user asks, the one right call, the tool's result, and what the assistant says then."""

    user: str
    name: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any]
    answer: str


@dataclass(frozen=True)
class Dialogue:
    """Turns over one set of functions, which are in OpenAI's form."""

    id: str
    tools: tuple[Mapping[str, Any], ...]
    steps: tuple[Step, ...]

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a function's arguments."""
        found: Mapping[str, Any] = next(
            tool["function"]["parameters"] for tool in self.tools if tool["function"]["name"] == name
        )
        return found

    def before(self, step: int, *, texts: bool = False) -> list[dict[str, Any]]:
        """Return the messages up to what the user asks in a turn; earlier calls are the right ones.

        ``texts``: arguments are JSON texts, as of OpenAI's API, and not objects.
        """
        messages: list[dict[str, Any]] = []
        for number, one in enumerate(self.steps[:step]):
            messages += [{"role": "user", "content": one.user}, self.call(number, texts=texts)]
            content = json.dumps(one.result)
            messages.append(
                {"role": "tool", "name": one.name, "tool_call_id": _call_id(number), "content": content},
            )
            messages.append({"role": "assistant", "content": one.answer})
        return [*messages, {"role": "user", "content": self.steps[step].user}]

    def call(self, step: int, *, texts: bool = False) -> dict[str, Any]:
        """Return the message with the right call of a turn."""
        one = self.steps[step]
        arguments = json.dumps(one.arguments) if texts else dict(one.arguments)
        function = {"name": one.name, "arguments": arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _call_id(step), "type": "function", "function": function}],
        }


def _call_id(step: int) -> str:
    return f"call{step:05}"  # Mistral's templates want nine letters and digits


# ------------------------------------------------------------------------------------------------------------ schemas


def one_of(*names: str, default: str | None = None) -> Schema:
    """Return the schema of one of some words."""
    return {"type": "string", "enum": list(names), **({} if default is None else {"default": default})}


def array_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def object_of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object without other keys."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def described(schema: Schema, about: str) -> Schema:
    """Return a schema with a description."""
    return {**schema, "description": about}


def tool(
    name: str, about: str, required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None
) -> dict[str, Any]:
    """Return a function in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": object_of(required, optional)},
    }


def listed(words: Sequence[str]) -> str:
    """Return words as people list them: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
