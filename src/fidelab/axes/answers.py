"""Parsing of answers: the tool calls in a text, and the text without its reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

REASONING = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, SmolLM3, Kimi K2
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|channel|>analysis", "<|channel|>final<|message|>"),  # gpt-oss
)
"""Markers around the reasoning that models write before they answer."""

_BEGINS, _ENDS = ("|".join(map(re.escape, side)) for side in zip(*REASONING, strict=True))
_BLOCK = re.compile("|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in REASONING), re.DOTALL)
_END, _OPENED = re.compile(_ENDS), re.compile(rf"(?:{_BEGINS})\s*\Z")
_BRACKET, _ATTEMPTS = re.compile(r"[{\[]"), 100  # the limit of attempts keeps nested brackets from taking long
_XML_CALL = re.compile(r"<function=([^>\s]{1,200})>")
_NAMED_CALL = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]{1,200})\s*(?:\[CALL_ID\]\s*\w{1,100}\s*)?\[ARGS\]")
_XML_ARGUMENT = re.compile(r"<parameter=([^>\s]{1,200})>")


def tool_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and arguments of every call in a text, in order.

    The forms that models write are: tags for the name and each argument (Qwen3-Coder), ``[TOOL_CALLS]name[ARGS]{…}``
    (Mistral since 2025), and JSON objects with ``name`` and ``arguments`` or ``parameters``.  The objects may be
    single, in a list, between tags, or after ``function``.
    """
    if tagged := list(_XML_CALL.finditer(text)):
        bodies = (text[match.end() :].partition("</function>")[0] for match in tagged)
        return [(match[1], dict(_xml_arguments(body))) for match, body in zip(tagged, bodies, strict=True)]
    if named := list(_NAMED_CALL.finditer(text)):
        found = ((match[1], _first_json(text[match.end() :])) for match in named)
        return [(name, arguments) for name, arguments in found if isinstance(arguments, dict)]
    calls = []
    for value in _json_values(text):
        for record in value if isinstance(value, list) else [value]:
            if isinstance(record, dict) and isinstance(record.get("function"), dict):
                record = record["function"]
            if not isinstance(record, dict) or not isinstance(record.get("name"), str):
                continue
            arguments = record.get("arguments", record.get("parameters"))
            if isinstance(arguments, str):
                arguments = _first_json(arguments)
            calls.append((record["name"], arguments if isinstance(arguments, dict) else {}))
    return calls


def after_reasoning(text: str, prompt: str = "") -> str:
    """Return an answer without the reasoning in it (:data:`REASONING`).

    A block without an end takes all the rest, so the result may be empty.  Text before a lone end marker is reasoning
    too, because its beginning is in the prompt or was not written.  ``prompt``: end of the prompt.  If it opens a block
    of reasoning that the answer does not end, the whole answer is reasoning.
    """
    opened = _OPENED.search(prompt)
    rest = _BLOCK.sub("", opened[0] + text if opened else text)
    ends = [match.end() for match in _END.finditer(rest)]
    return rest[ends[-1] :] if ends else rest


def _xml_arguments(body: str) -> Iterator[tuple[str, str]]:
    at = 0
    while (match := _XML_ARGUMENT.search(body, at)) and (end := body.find("</parameter>", match.end())) >= 0:
        yield match[1], body[match.end() : end].strip()
        at = end


def _first_json(text: str) -> Any:
    return next(iter(_json_values(text)), None)


def _json_values(text: str) -> list[Any]:
    values, at, decoder = [], 0, json.JSONDecoder()
    for _ in range(_ATTEMPTS):
        match = _BRACKET.search(text, at)
        if match is None:
            break
        try:
            value, at = decoder.raw_decode(text, match.start())
            values.append(value)
        except (ValueError, RecursionError):
            at = match.end()
    return values
