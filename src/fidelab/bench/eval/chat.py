"""Chat requests to a server, and its answers with everything that checks look at.

Servers are not trusted: every field is checked before it is used.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fidelab.engines.openai.dialects import mapping
from fidelab.engines.openai.http import Client, Refused
from fidelab.inputs.questions.question import Call, Reply
from fidelab.inputs.reasoning import REASONING, after_reasoning

REASONING_TOKENS = 4096
"""Tokens that a model with reasoning may have beyond those of an answer."""

NO_CHAT = (404, 405, 501)
"""Statuses of servers that do not know an address."""

_NOT_TAKEN = (400, 422)  # statuses of servers that do not take a field of a request
_OPTIONAL = ("seed", "stream_options", "temperature")  # fields without which a request still asks the same
_TOP = 5  # alternatives per position: the most that OpenAI's own models give without a special request
_MAX_TOKENS = 1 << 24  # tokens of any request: larger counts are damaged
_NO_TEMPLATE = "chat template"


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        messages: chat messages; contents are text, or parts in OpenAI's form.
        max_tokens: tokens of the answer, reasoning excluded.
        stop: texts before which the answer ends.
        tools: functions that are offered.
        stream: whether the answer comes in pieces.
        logprobs: whether log-probabilities are requested.
        exact: ``max_tokens`` includes reasoning.
    """

    messages: Sequence[Mapping[str, Any]]
    max_tokens: int
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    stream: bool = False
    logprobs: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Usage:
    """Tokens as the server counts them."""

    prompt: int
    completion: int
    total: int


@dataclass(frozen=True)
class Position:
    """Log-probability of one generated token, and the most likely ones at its place."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class ChatAnswer:
    """One answer.

    Attributes:
        whole: text as it came, with reasoning in it.
        apart: reasoning that came in a field of its own.
        calls: calls of tools.
        finish: the server's word for why the answer ended; empty if it gave none.
        usage: counted tokens; ``None`` if the server counts none.
        positions: log-probabilities; ``None`` without any.
        seconds: time from the request to the last byte.
    """

    whole: str
    apart: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = ""
    usage: Usage | None = None
    positions: tuple[Position, ...] | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The text without reasoning."""
        return after_reasoning(self.whole).strip() if self.reasons else self.whole

    @property
    def reasons(self) -> bool:
        """Whether the model wrote reasoning."""
        return bool(self.apart) or any(mark in self.whole for pair in REASONING for mark in pair)

    @property
    def written(self) -> str:
        """All that the model wrote, reasoning first."""
        return self.apart + self.whole

    @property
    def reply(self) -> Reply:
        """The answer as graders read it."""
        return Reply(self.text, self.calls)

    @property
    def tokens(self) -> int:
        """Generated tokens as the server counts them; 0 if it does not."""
        return self.usage.completion if self.usage else 0


class Chat:
    """A model on a server.  Threads may share it.

    Attributes:
        refused: fields that the server refused and that are no longer sent.
        plain: the server has no chat template: messages are sent as text to ``/completions``.
        reasons: an answer had reasoning, so answers get :data:`REASONING_TOKENS` more.
        generated: tokens that were generated so far.
    """

    def __init__(self, client: Client, model: str, seed: int) -> None:
        self.client = client
        self.refused: set[str] = set()
        self.plain = False
        self.reasons = False
        self.generated = 0
        self.model = model
        self._seed = seed
        self._limit = "max_tokens"
        self._lock = threading.Lock()

    def ask(self, ask: Ask, seconds: float) -> ChatAnswer:
        """Return one greedy answer, complete within ``seconds``.

        Raises:
            Refused: If this request has no usable answer.
            EngineError: If the server is gone, denies access, or the answer breaks off.
        """
        while True:
            body = self._body(ask)
            try:
                answer = self._answer(ask, body, seconds)
            except Refused as error:
                if not self._adapt(error, body):
                    raise
                continue
            with self._lock:
                self.generated += answer.tokens
                self.reasons |= answer.reasons
            return answer

    def _body(self, ask: Ask) -> dict[str, Any]:
        n = ask.max_tokens + (REASONING_TOKENS if self.reasons and not ask.exact else 0)
        prompt: dict[str, Any] = {"messages": [dict(message) for message in ask.messages]}
        if self.plain:
            prompt = {"prompt": "\n\n".join(str(message["content"]) for message in ask.messages) + "\n\n"}
        body = {
            "model": self.model,
            **prompt,
            self._limit if not self.plain else "max_tokens": n,
            "temperature": 0.0,
            "seed": self._seed,
            "stream": ask.stream,
            **({"stream_options": {"include_usage": True}} if ask.stream else {}),
            **({"stop": list(ask.stop)} if ask.stop else {}),
            **({"tools": [dict(tool) for tool in ask.tools], "tool_choice": "auto"} if ask.tools else {}),
        }
        if ask.logprobs:
            body |= {"logprobs": _TOP} if self.plain else {"logprobs": True, "top_logprobs": _TOP}
        return {key: value for key, value in body.items() if key not in self.refused}

    def _adapt(self, error: Refused, body: Mapping[str, Any]) -> bool:
        """Change further requests as a refusal asks for; return whether anything changed."""
        text = str(error)
        with self._lock:
            if not self.plain and (
                (error.status in _NOT_TAKEN and _NO_TEMPLATE in text.lower()) or error.status in NO_CHAT
            ):
                self.plain = "messages" in body and not body.get("tools")
                return self.plain
            if error.status not in _NOT_TAKEN:
                return False
            if "max_completion_tokens" in text and self._limit in body and self._limit == "max_tokens":
                self._limit = "max_completion_tokens"
                return True
            named = {name for name in _OPTIONAL if name in text and name in body} - self.refused
            self.refused |= named
            return bool(named)

    def _answer(self, ask: Ask, body: Mapping[str, Any], seconds: float) -> ChatAnswer:
        path = "/completions" if self.plain else "/chat/completions"
        began = time.monotonic()
        if ask.stream:
            found = _joined([event for _, event in self.client.stream(path, body, seconds=seconds)])
        else:
            found = self.client.post(path, body, seconds=seconds)
        return _read(found, time.monotonic() - began)


# ----------------------------------------------------------------------------------------------- answers


@dataclass
class _Pieces:
    """Pieces of a streamed answer."""

    text: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    positions: list[Any] = field(default_factory=list)
    finish: str = ""
    usage: Any = None


def _joined(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a streamed answer in the form of a whole one."""
    pieces = _Pieces()
    for event in events:
        if isinstance(event.get("usage"), dict):
            pieces.usage = event["usage"]
        for choice in _choices(event):
            delta = mapping(choice, "delta")
            pieces.text.append(_text(delta.get("content")) or _text(choice.get("text")))
            pieces.apart.append(_text(delta.get("reasoning_content")) or _text(delta.get("reasoning")))
            pieces.finish = _text(choice.get("finish_reason")) or pieces.finish
            pieces.positions += _list(mapping(choice, "logprobs").get("content"))
            for call in _list(delta.get("tool_calls")):
                if isinstance(call, dict):
                    _add_call(pieces.calls, call)
    message = {
        "content": "".join(pieces.text),
        "reasoning_content": "".join(pieces.apart),
        "tool_calls": [{"function": call} for _, call in sorted(pieces.calls.items())],
    }
    choice = {"message": message, "finish_reason": pieces.finish}
    if pieces.positions:
        choice["logprobs"] = {"content": pieces.positions}
    return {"choices": [choice], "usage": pieces.usage}


def _add_call(calls: dict[int, dict[str, str]], piece: Mapping[str, Any]) -> None:
    index = piece.get("index")
    call = calls.setdefault(index if isinstance(index, int) else len(calls), {"name": "", "arguments": ""})
    function = mapping(piece, "function")
    for key in call:
        call[key] += _text(function.get(key))


def _read(found: Mapping[str, Any], seconds: float) -> ChatAnswer:
    choices = _choices(found)
    if not choices:
        raise Refused("the server answers without a choice")
    choice = choices[0]
    message = mapping(choice, "message")
    calls = [mapping(call, "function") for call in _list(message.get("tool_calls")) if isinstance(call, dict)]
    return ChatAnswer(
        whole=_text(message.get("content")) or _text(choice.get("text")),
        apart=_text(message.get("reasoning_content")) or _text(message.get("reasoning")),
        calls=tuple(Call(_text(call.get("name")), _text(call.get("arguments"))) for call in calls),
        finish=_text(choice.get("finish_reason")),
        usage=_usage(mapping(found, "usage")),
        positions=_positions(mapping(choice, "logprobs")),
        seconds=seconds,
    )


def _choices(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [choice for choice in _list(found.get("choices")) if isinstance(choice, dict)]


def _usage(found: Mapping[str, Any]) -> Usage | None:
    counts = [found.get(f"{name}_tokens") for name in ("prompt", "completion", "total")]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _MAX_TOKENS for n in counts):
        return None
    return Usage(*(int(n) for n in counts if n is not None))


def _positions(logprobs: Mapping[str, Any]) -> tuple[Position, ...] | None:
    """Log-probabilities in the form of chat; those of ``/completions`` have lists of their own."""
    listed = _list(logprobs.get("content"))
    if not listed and isinstance(tokens := logprobs.get("tokens"), list):
        return _old_positions(tokens, logprobs)
    found = []
    for entry in listed:
        if not isinstance(entry, dict) or not _is_number(entry.get("logprob")):
            return None
        top = tuple(
            (_token(one), float(one["logprob"]))
            for one in _list(entry.get("top_logprobs"))
            if isinstance(one, dict) and _is_number(one.get("logprob"))
        )
        found.append(Position(_token(entry), float(entry["logprob"]), top))
    return tuple(found) or None


def _old_positions(tokens: Sequence[Any], logprobs: Mapping[str, Any]) -> tuple[Position, ...] | None:
    values, tops = _list(logprobs.get("token_logprobs")), _list(logprobs.get("top_logprobs"))
    if len(values) != len(tokens) or not all(map(_is_number, values)):
        return None
    positions = []
    for n, (token, value) in enumerate(zip(tokens, values, strict=True)):
        top = tops[n] if n < len(tops) and isinstance(tops[n], dict) else {}
        likely = tuple((name.encode("utf-8", "replace"), float(p)) for name, p in top.items() if _is_number(p))
        positions.append(Position(_text(token).encode("utf-8", "replace"), float(value), likely))
    return tuple(positions) or None


def _token(entry: Mapping[str, Any]) -> bytes:
    """The token's bytes where they are given, since a text cannot hold a part of a character."""
    numbers = entry.get("bytes")
    if isinstance(numbers, list) and all(type(n) is int and 0 <= n < 256 for n in numbers):
        return bytes(numbers)
    return _text(entry.get("token")).encode("utf-8", "replace")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
