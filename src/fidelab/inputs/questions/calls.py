"""Calls of tools in the raw text of an answer, as chat templates teach models to write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fidelab.inputs.questions.question import Call, Reply
from fidelab.inputs.toolcalls.read import Call as ReadCall
from fidelab.inputs.toolcalls.read import read_calls

MAX_CHARS = 20_000  # of an answer that are read
_MAX_CALLS = 16
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?(?:\[ARGS\])?\s*(?=\{)")
_LLAMA = "<|python_tag|>"
_FENCE = re.compile(r"```(?:[\w+-]*[ \t]*\n)?(.*?)(?:```|\Z)", re.DOTALL)


def bounded_text(text: str) -> str:
    """Return a text that graders can read: both ends of a long one, and no half of a surrogate pair."""
    if len(text) > MAX_CHARS:
        text = f"{text[: MAX_CHARS // 2]}\n…\n{text[-MAX_CHARS // 2 :]}"
    return text.encode("utf-8", "replace").decode("utf-8")


def unfenced(text: str) -> str:
    """Return the content of the first code fence, or the text where there is none."""
    fence = _FENCE.search(text)
    return fence[1] if fence else text


def read_reply(text: str) -> Reply:
    """Return an answer with the calls of tools that its text has.

    The forms are those of Hermes and Qwen (``<tool_call>{…}</tool_call>``), Mistral (``[TOOL_CALLS]``), Llama 3 (a bare
    object, also after ``<|python_tag|>``), an object in a code fence, and all that
    :func:`~fidelab.inputs.toolcalls.read.read_calls` knows.  An object has ``name``, and ``arguments`` or
    ``parameters``.  A marker that no readable call follows is a call without a name.
    """
    text = bounded_text(text)
    reply = _in_json(text)
    if all(call.name for call in reply.calls) and reply.calls:
        return reply
    found = read_calls(text).calls
    return Reply("", tuple(Call(one.name, _text(_typed(one))) for one in found)) if found else reply


def _typed(call: ReadCall) -> dict[str, Any]:
    """The arguments of a call; those of a form that writes all as text are read as JSON where they are JSON."""
    if not call.texts:
        return dict(call.arguments)
    values = {name: (value, *_value(value, 0)) for name, value in call.arguments.items()}
    return {name: read if end == len(value) else value for name, (value, read, end) in values.items()}


def _in_json(text: str) -> Reply:
    """An answer with the calls that it writes as JSON objects."""
    if found := [(match.span(), match[1]) for match in _HERMES.finditer(text)]:
        calls = [call for _, body in found[:_MAX_CALLS] for call in (*_objects(body),) or (Call("", body.strip()),)]
        rest = _HERMES.sub("", text)
        return Reply(rest.strip(), tuple(calls[:_MAX_CALLS]))
    before, marker, body = text.partition(_MISTRAL)
    if marker:
        return Reply(before.strip(), (*_mistral(body),)[:_MAX_CALLS] or (Call("", body.strip()),))
    before, marker, body = text.partition(_LLAMA)
    if marker:
        return Reply(before.strip(), (*_objects(body),)[:_MAX_CALLS] or (Call("", body.strip()),))
    bare = unfenced(text).strip()
    calls = list(_objects(bare)) if bare.startswith(("{", "[")) else []
    return Reply("" if calls and "```" not in text else text, tuple(calls[:_MAX_CALLS]))


def _mistral(body: str) -> Iterator[Call]:
    """``[{…}, {…}]``, or since version 11 of its tokenizer ``name[ARGS]{…}``."""
    named = _MISTRAL_NAMED.match(body)
    if named is None:
        yield from _objects(body)
        return
    for part in body.split(_MISTRAL)[:_MAX_CALLS]:
        if head := _MISTRAL_NAMED.match(part):
            value, _ = _value(part, head.end())
            yield Call(head[1], _text(value) if isinstance(value, dict) else part[head.end() :].strip())


def _objects(text: str) -> Iterator[Call]:
    """The calls among JSON values that follow each other, separated by space, commas or semicolons."""
    at = 0
    for _ in range(_MAX_CALLS):
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,;"))
        value, end = _value(text, at)
        if end is None:
            return
        at = end
        for item in value if isinstance(value, list) else [value]:
            if (call := _call(item)) is not None:
                yield call


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict | str):
        return None
    return Call(value["name"], arguments if isinstance(arguments, str) else _text(arguments))


def _value(text: str, at: int) -> tuple[Any, int | None]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""
