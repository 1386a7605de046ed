"""The user's own traffic: a log of conversations, as text with one document per conversation, and as prompts.

See docs/guide.md#your-own-traffic.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fidelab.core import strict_json
from fidelab.core.errors import InputError
from fidelab.inputs.files import numbered_lines
from fidelab.inputs.prompts import Prompt
from fidelab.inputs.texts import Text, load_text
from fidelab.inputs.tokens import Tokenizer

_KIND = "traffic file"
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_MAX_LISTED = 3  # places of bad records that a message lists
_MAX_DOMAIN_CHARS = 40  # characters of a domain's name


@dataclass(frozen=True)
class Conversation:
    """One conversation: messages as a chat template takes them, and the tools that the model was offered.

    ``id``: the record's id, or its line. ``domain``: the record's domain, or a guess from its content. ``text``: the
    text as the model's chat template writes it.  Plain text has no messages.
    """

    id: str
    domain: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    text: str


@dataclass(frozen=True)
class Traffic:
    """A log of conversations.

    ``bad``: why records were left out, each with its place.  ``text``: a log of plain text, without conversations.
    """

    name: str
    conversations: tuple[Conversation, ...] = ()
    bad: tuple[str, ...] = ()
    text: Text | None = None


@dataclass(frozen=True)
class Response:
    """One recorded answer of the assistant: the ids before it and its own, as the chat template writes them."""

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


# ---------------------------------------------------------------------------------------------- reading


def load_traffic(path: Path, tokenizer: Tokenizer, *, skip_bad: bool = False) -> Traffic:
    """Read a log of requests, each as the model's chat template writes it.

    ``.jsonl``: one object per line with ``messages`` and perhaps ``tools`` (OpenAI's chat requests and fine-tuning
    files), or with these in its ``body`` (batch files), or with plain ``text``; ``id`` or ``custom_id``, and ``domain``
    are kept.  ``.txt`` and ``.md``: plain text (:func:`~fidelab.inputs.texts.load_text`).  A record with an image, or
    another part without text, is bad.

    Raises:
        InputError: If the file cannot be read, holds no conversation, or has bad records without ``skip_bad`` (the
            message has their number, and the first with their places).
    """
    if path.suffix in (".txt", ".md"):
        return Traffic(str(path), text=load_text(path))
    if path.suffix != ".jsonl":
        raise InputError(f"{_KIND} {path}: the name should end in .jsonl, .txt or .md")
    lines = list(numbered_lines(path, _KIND))
    conversations, bad = list[Conversation](), list[str]()
    seen: set[str] = set()
    for number, line in lines:
        try:
            one = _conversation(strict_json(line, not_finite=float), str(number), tokenizer)
            if one.id in seen:
                raise _Bad(f"the id {one.id!r} is there twice")
        except (ValueError, InputError) as error:
            bad.append(f"line {number}: {error}")
            continue
        seen.add(one.id)
        conversations.append(one)
    if bad and not skip_bad:
        more = f", and {len(bad) - _MAX_LISTED} more" if len(bad) > _MAX_LISTED else ""
        raise InputError(
            f"{_KIND} {path} has {len(bad)} bad of {len(lines)} records: {'; '.join(bad[:_MAX_LISTED])}{more}; "
            "fix them, or pass --skip-bad"
        )
    if not conversations:
        raise InputError(": ".join([f"{_KIND} {path} has no conversation in it", *bad[:1]]))
    return Traffic(str(path), tuple(conversations), tuple(bad))


class _Bad(ValueError):
    """Fault of a record."""


def _conversation(outer: Any, number: str, tokenizer: Tokenizer) -> Conversation:
    """Return the conversation of one record; ``number``: its place, for a record without an id."""
    if not isinstance(outer, dict):
        raise _Bad("expected an object with 'messages' or 'text'")
    inner = outer["body"] if isinstance(outer.get("body"), dict) else outer
    tools, plain = _tools(inner.get("tools")), inner.get("text")
    if isinstance(plain, str) and plain.strip():
        messages: tuple[dict[str, Any], ...] = ()
    elif isinstance(inner.get("messages"), list):
        messages = tuple(_message(i, message) for i, message in enumerate(inner["messages"], 1))
    else:
        raise _Bad("expected a list as 'messages', or a 'text'")
    if not messages and not plain:
        raise _Bad("the list of messages is empty")
    text = tokenizer.render(messages, tools=tools, private=True) if messages else str(plain)
    named = outer.get("domain", inner.get("domain"))
    return Conversation(
        id=str(outer.get("id") or outer.get("custom_id") or number),
        domain=str(named)[:_MAX_DOMAIN_CHARS] if named else domain_of(messages or ({"content": text},), tools),
        messages=messages,
        tools=tools,
        text=text,
    )


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _Bad(f"message {number} is not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _Bad(f"message {number} has the role {str(role)[:40]!r}; known are {', '.join(sorted(_ROLES))}")
    content = _content(number, message.get("content"))
    kept: dict[str, Any] = {"role": role, "content": content}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if isinstance(message.get(name), str):
            kept[name] = message[name]
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = _calls(number, calls)
    if not content and not calls:
        raise _Bad(f"message {number} has no content")
    return kept


def _content(number: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _Bad(f"message {number}: the content is neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _Bad(f"message {number} has a part of type {str(kind)[:40]!r}: only text is measured")
        if not isinstance(part.get("text"), str):
            raise _Bad(f"message {number}: a part of type text has none")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(number: int, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as chat templates expect."""
    kept = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Bad(f"message {number}: a tool call has no function with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = strict_json(arguments or "{}", not_finite=float)
            except ValueError as error:
                raise _Bad(f"message {number}: the arguments of {function['name']} are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise _Bad(f"message {number}: the arguments of {function['name']} are not an object")
        kept.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
        if isinstance(call.get("id"), str):
            kept[-1]["id"] = call["id"]
    return kept


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools in OpenAI's form.

    Raises:
        _Bad: If a tool has no name.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise _Bad("'tools' is not a list")
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _Bad(f"tool {number} has no function with a name")
    return tuple(tools)


# ---------------------------------------------------------------------------------------------- domains


_CODE = re.compile(
    r"```[a-z+]+\n|^\s*(def |class |import |from \w+ import|#include|func |fn |public |SELECT )", re.MULTILINE
)
_JSON = re.compile(r"^\s*[\[{][\s\S]*\"[\s\S]*[\]}]\s*$")
_MATHEMATICS = re.compile(r"\\(frac|sum|int|sqrt|begin|cdot|times)|\$[^$\n]+[=^][^$\n]*\$|\b(theorem|lemma|equation)\b")
_LONG_CHARS = 8_000  # characters
_OTHER_SCRIPT_SHARE = 0.3  # share of letters


def domain_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the domain of a conversation by its content, the first that applies.

    ``tool calls``: tools are offered or called.  ``non-Latin``: 30% or more of its letters are of other scripts.
    ``code``, ``JSON``, ``mathematics``: patterns in some message.  ``long document``: a message of 8,000 characters or
    more.  ``chat``: anything else.
    """
    if tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
        return "tool calls"
    contents = [str(message.get("content") or "") for message in messages]
    letters = [char for char in "".join(contents)[:20_000] if char.isalpha()]
    foreign = sum(not char.isascii() and not unicodedata.name(char, "").startswith("LATIN") for char in letters)
    if letters and foreign / len(letters) >= _OTHER_SCRIPT_SHARE:
        return "non-Latin"
    for domain, pattern in (("code", _CODE), ("JSON", _JSON), ("mathematics", _MATHEMATICS)):
        if any(pattern.search(content) for content in contents):
            return domain
    return "long document" if max(map(len, contents), default=0) >= _LONG_CHARS else "chat"


# -------------------------------------------------------------------------------------------- rendering


def traffic_text(traffic: Traffic) -> Text:
    """Return the log as a text with a document per conversation."""
    if traffic.text is not None:
        return traffic.text
    parts = [f"{conversation.text}\n" for conversation in traffic.conversations]
    starts, content = [0, *accumulate(map(len, parts))][:-1], "".join(parts)
    several = len(parts) > 1
    return Text(
        traffic.name,
        content,
        tuple(starts) if several else (),
        hashlib.sha256(content.encode()).hexdigest(),
        domains=tuple(conversation.domain for conversation in traffic.conversations) if several else (),
    )


def traffic_prompts(traffic: Traffic) -> tuple[Prompt, ...]:
    """Return every conversation up to its last message that is not the assistant's, with its tools.

    A log of plain text has no conversations.
    """
    prompts = []
    for conversation in traffic.conversations:
        messages = conversation.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if any(message["role"] in ("user", "tool") for message in messages):
            prompts.append(Prompt(conversation.id, conversation.domain, messages, conversation.tools))
    return tuple(prompts)


def traffic_remarks(tokenizer: Tokenizer, traffic: Traffic) -> tuple[str, ...]:
    """Return a summary of used and skipped records of the log, a line each."""
    if traffic.text is not None:
        return (f"{traffic.name} is plain text: windows are cut from it, prompts are the package's own",)
    counts = Counter(conversation.domain for conversation in traffic.conversations)
    kinds = ", ".join(f"{count:,} {domain}" for domain, count in counts.most_common())
    lines = [f"{traffic.name}: conversations: {len(traffic.conversations):,} ({kinds})"]
    if traffic.bad:
        lines.append(f"bad records left out: {len(traffic.bad):,} ({'; '.join(traffic.bad[:_MAX_LISTED])})")
    tooled = next((conversation for conversation in traffic.conversations if conversation.tools), None)
    if tooled is not None and tooled.text == tokenizer.render(tooled.messages, private=True):
        lines.append(f"the chat template of {tokenizer.model.name} leaves tools out")
    return tuple(lines)


def recorded(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> tuple[list[Response], int]:
    """Return the recorded answers, each after its history, and how many the template later renders differently.

    The input is what a server's cache would have held when the answer was sampled.  A template may drop the reasoning
    of earlier turns, or close a turn differently, so an answer counts only where the text with it begins with the text
    before it.
    """
    responses, lost = list[Response](), 0
    for conversation in conversations:
        turns, tools = conversation.messages, conversation.tools
        for index, message in enumerate(turns):
            if message["role"] != "assistant" or not index:
                continue
            try:
                before = tokenizer.render(turns[:index], tools=tools, generation=True, private=True)
                whole = tokenizer.render(turns[: index + 1], tools=tools, private=True)
            except InputError:  # a template that accepts only whole conversations
                before, whole = "", ""
            answer = whole[len(before) :].rstrip("\n")
            if not answer or not whole.startswith(before):
                lost += 1
                continue
            ids = tokenizer.encode(before), tokenizer.encode(answer)
            responses.append(Response(f"{conversation.id}/{index}", *ids))
    return responses, lost
