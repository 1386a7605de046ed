"""Reads calls of tools from the text that a model writes, or says why there is none.

Forms are those of chat templates.  Nothing that is read is run: JSON, tags and calls that look like Python are parsed,
and only constants are taken from them.  See docs/metrics/generated-text.md#tool-calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fidelab.core import strict_json
from fidelab.inputs.reasoning import after_reasoning
from fidelab.inputs.toolcalls.bare import bare_object
from fidelab.inputs.toolcalls.pythonic import python_calls
from fidelab.inputs.toolcalls.unreadable import UnreadableError

MAX_CHARS = 20_000
"""Longer answers are not read."""
MAX_CALLS = 16

_NAME = r"[\w.-]{1,64}"
_HARMONY = re.compile(
    rf"to=functions\.({_NAME})[^{{]{{0,200}}?<\|message\|>(.*?)(?:<\|(?:call|end|return|start)\|>|\Z)", re.DOTALL
)
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(rf"<function=({_NAME})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(rf"<parameter=({_NAME})>\n?(.*?)\n?</parameter>", re.DOTALL)
_INVOKE = re.compile(
    rf'<(?:\w{{1,32}}:)?(?:invoke|function) name="({_NAME})">(.*?)(?:</(?:\w{{1,32}}:)?(?:invoke|function)>|\Z)',
    re.DOTALL,
)
_NAMED_PARAMETER = re.compile(
    rf'<(?:\w{{1,32}}:)?param(?:eter)? name="({_NAME})"[^>\n]{{0,80}}>(.*?)</(?:\w{{1,32}}:)?param(?:eter)?>', re.DOTALL
)
_HEADED = re.compile(rf"(?:>>>)?({_NAME})\n(?=\{{)")
_SOLAR = re.compile(rf"<\|tool_call:name\|>({_NAME})<\|tool_call:args\|>(.*?)(?:<\|tool_call:end\|>|\Z)", re.DOTALL)
_IN_TAGS = re.compile("｜DSML｜|:opensource(?=>)")  # in every tag of DeepSeek since version 3.2, of Hunyuan 3
_KEY_VALUE = re.compile(rf"<arg_key>\s*({_NAME})\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_BARE = re.compile(rf"(?:<start_function_call>|<\|tool_call>)\s*call:\s*({_NAME})\s*(?=\{{)")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_KIMI = re.compile(
    rf"<\|tool_call_begin\|>\s*(?:functions\.)?({_NAME})(?::\d+)?\s*<\|tool_call_argument_begin\|>"
    r"(.*?)(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(rf"\s*({_NAME})\s*(?:\[CALL_ID\]\s*\w{{1,64}}\s*)?(?:\[ARGS\])?\s*(?=\{{)")
_MARKED = (
    ("<|python_tag|>", "<|eom_id|>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("functools[", ""),
)
_FENCE = re.compile(r"```([\w+-]*)[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_OPENING = re.compile(r'\{\s*"(?:name|function|type|tool_calls|tool_name|arguments|parameters)"\s*:')
_PYTHON_CALL = re.compile(r"\[?\s*(?:print\()?[A-Za-z_][\w.]{0,128}\(.*\)\s*\]?", re.DOTALL)
_CODE = ("tool_code", "python", "py")


@dataclass(frozen=True)
class Call:
    """A call that was read.

    ``texts``: the form writes every argument as text without a type; the schema says which type is meant.
    """

    name: str
    arguments: Mapping[str, Any]
    texts: bool = False


@dataclass(frozen=True)
class Reading:
    """The calls of an answer, or why there are none."""

    calls: tuple[Call, ...] = ()
    fault: str = ""


def read_calls(text: str, prompt: str = "") -> Reading:
    """Return the calls in an answer, or why none can be read.

    Reasoning before the calls is left out; ``prompt``: the end of the prompt, which may open it.  The first form whose
    marker is in the text counts: gpt-oss, DeepSeek, Kimi, Gemma, Qwen and Hermes, GLM, MiniMax, Mistral, Llama and
    others, then JSON and calls like Python's, in code fences or bare.
    """
    if len(text) > MAX_CHARS:
        return Reading(fault=f"the answer has more than {MAX_CHARS:,} characters")
    try:
        calls = tuple(islice(_calls(text, prompt), MAX_CALLS + 1))
    except UnreadableError as why:
        return Reading(fault=str(why))
    if len(calls) > MAX_CALLS:
        return Reading(fault=f"more than {MAX_CALLS} calls")
    return Reading(calls) if calls else Reading(fault="a marker of calls without a call")


def _calls(text: str, prompt: str) -> Iterator[Call]:
    if "to=functions." in text:  # its reasoning ends where the call begins
        yield from _harmony(text)
        return
    rest = _IN_TAGS.sub("", after_reasoning(text, prompt)).strip()
    if not rest:
        raise UnreadableError("only reasoning" if text.strip() else "the answer is empty")
    for marker, read in _FORMS:
        if marker in rest:
            yield from read(rest)
            return
    if _INVOKE.search(rest):
        yield from _invocations(rest)
        return
    for marker, end in _MARKED:
        _, found, body = rest.partition(marker)
        if found:
            body = f"[{body}" if marker.endswith("[") else body
            yield from _body(body.partition(end)[0] if end else body)
            return
    yield from _plain(rest)


# -------------------------------------------------------------------------------------------------------------- forms


def _harmony(text: str) -> Iterator[Call]:
    found = False
    for match in _HARMONY.finditer(text):
        found = True
        yield Call(match[1], _arguments(match[2]))
    if not found:
        raise UnreadableError("a call without a message")


def _deepseek(text: str) -> Iterator[Call]:
    for match in _DEEPSEEK.finditer(text):
        first, second = match[1].strip(), match[2].strip()
        if first == "function":  # the name, then JSON in a fence
            name, _, second = second.partition("\n")
            fence = _FENCE.search(second)
            first, second = name.strip(), fence[2] if fence else second
        yield Call(_named(first), _arguments(second))


def _kimi(text: str) -> Iterator[Call]:
    for match in _KIMI.finditer(text):
        yield Call(match[1], _arguments(match[2]))


def _solar(text: str) -> Iterator[Call]:
    for match in _SOLAR.finditer(text):
        yield Call(match[1], _arguments(match[2]))


def _apertus(text: str) -> Iterator[Call]:
    """``[{"name": {…}}]``"""
    value, _ = _value(text.partition("<|tools_prefix|>")[2].strip(), 0)
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or len(item) != 1:
            raise UnreadableError("JSON that is not a call")
        [(name, arguments)] = item.items()
        yield from _call({"name": name, "arguments": arguments})


def _bare(text: str) -> Iterator[Call]:
    for match in _BARE.finditer(text):
        yield Call(match[1], bare_object(text, match.end()))


def _blocks(text: str) -> Iterator[Call]:
    for match in _BLOCK.finditer(text):
        body = match[1].strip()
        if "<function=" in body:
            yield from _functions(body)
        elif "<arg_key>" in body:
            name, _, _ = body.partition("<arg_key>")
            name = name.replace("<tool_sep>", "").strip()
            yield Call(_named(name), _pairs(_KEY_VALUE, body, "<arg_key>"), texts=True)
        elif re.fullmatch(_NAME, body):
            yield Call(body, {}, texts=True)
        else:
            fence = _FENCE.search(body)
            yield from _objects(fence[2] if fence else body)


def _functions(text: str) -> Iterator[Call]:
    for match in _FUNCTION.finditer(text):
        if match[2].strip().startswith("{"):
            yield Call(match[1], _arguments(match[2]))
        else:
            yield Call(match[1], _pairs(_PARAMETER, match[2], "<parameter="), texts=True)


def _invocations(text: str) -> Iterator[Call]:
    for match in _INVOKE.finditer(text):
        yield Call(match[1], _pairs(_NAMED_PARAMETER, match[2], " name="), texts=True)


def _mistral(text: str) -> Iterator[Call]:
    """``[{…}, {…}]``, or since version 11 of its tokenizer ``name[ARGS]{…}``."""
    for part in text.split(_MISTRAL)[1:]:
        if (named := _MISTRAL_NAMED.match(part)) is None:
            yield from _objects(part.strip())
        else:
            yield Call(named[1], _arguments(part[named.end() :]))


_FORMS: tuple[tuple[str, Callable[[str], Iterator[Call]]], ...] = (
    ("<｜tool▁call▁begin｜>", _deepseek),
    ("<|tool_call_begin|>", _kimi),
    ("<|tool_call:name|>", _solar),
    ("<|tools_prefix|>", _apertus),
    ("<start_function_call>", _bare),
    ("<|tool_call>", _bare),
    ("<tool_call>", _blocks),
    ("<function=", _functions),
    (_MISTRAL, _mistral),
)


def _plain(text: str) -> Iterator[Call]:
    """Calls without a marker: in code fences, or bare."""
    fences = list(_FENCE.finditer(text))
    for fence in fences:
        if fence[1] in _CODE:
            yield from (Call(*one) for one in python_calls(fence[2]))
        else:
            yield from _body(fence[2])
    if fences:
        return
    if headed := _HEADED.match(text):
        yield Call(headed[1], _arguments(text[headed.end() :]))
    elif text.startswith(("{", "[")) or _PYTHON_CALL.fullmatch(text):
        yield from _body(text)
    elif opening := _OPENING.search(text):
        yield from _objects(text[opening.start() :])
    else:
        raise UnreadableError("no call, only text")


def _body(text: str) -> Iterator[Call]:
    """JSON, or calls as Python writes them."""
    text = text.strip()
    if text.startswith("{") or re.match(r"\[\s*[\[{\]\d\"]", text):
        yield from _objects(text)
    elif _PYTHON_CALL.fullmatch(text):
        yield from (Call(*one) for one in python_calls(text))
    elif not text:
        raise UnreadableError("a marker of calls without a call")
    elif text.startswith("["):
        yield from _objects(text)
    else:
        raise UnreadableError("neither JSON nor a call")


# --------------------------------------------------------------------------------------------------------------- JSON


def _objects(text: str) -> Iterator[Call]:
    """Calls among JSON values that follow each other, separated by space, commas or semicolons."""
    at, found = 0, False
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,;"))
        if found and (at >= len(text) or text[at] not in "{["):
            return
        value, at = _value(text, at)
        found = True
        for item in value if isinstance(value, list) else [value]:
            yield from _call(item)


def _call(value: Any) -> Iterator[Call]:
    if not isinstance(value, dict):
        raise UnreadableError("JSON that is not a call")
    if isinstance(several := value.get("tool_calls"), list):
        for one in several:
            yield from _call({"name": None} if isinstance(one, dict) and "tool_calls" in one else one)
        return
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = next((value[key] for key in ("name", "tool_name", "function") if key in value), None)
    arguments = next((value[key] for key in ("arguments", "parameters", "args") if key in value), None)
    if not isinstance(name, str) and arguments is None:
        raise UnreadableError("JSON that is not a call")
    if not isinstance(name, str) or not name:
        raise UnreadableError("the call has no name")
    if arguments is None:
        raise UnreadableError("the call has no arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    if not isinstance(arguments, dict):
        raise UnreadableError("the arguments are not an object")
    yield Call(name, arguments)


def _arguments(text: str) -> dict[str, Any]:
    """The object that a text holds; what follows it does not count."""
    text = text.strip()
    if not text:
        raise UnreadableError("the call has no arguments")
    value, _ = _value(text, 0)
    if not isinstance(value, dict):
        raise UnreadableError("the arguments are not an object")
    return value


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        _, end = json.JSONDecoder(object_pairs_hook=_once).raw_decode(text, at)
        return strict_json(text[at:end]), end
    except json.JSONDecodeError as error:
        early = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        raise UnreadableError("the JSON ends early" if early else f"not JSON: {error.msg}") from None
    except RecursionError:
        raise UnreadableError("the JSON is nested too deep") from None
    except UnreadableError:
        raise
    except ValueError as error:
        raise UnreadableError(f"not JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableError("a key is there twice")
    return found


# --------------------------------------------------------------------------------------------------------------- tags


def _pairs(pattern: re.Pattern[str], text: str, opening: str) -> dict[str, str]:
    pairs = [(match[1], match[2]) for match in pattern.finditer(text)]
    if len(pairs) != text.count(opening):
        raise UnreadableError("an argument is not closed")
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableError("a key is there twice")
    return found


def _named(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise UnreadableError("the call has no name")
    return name
