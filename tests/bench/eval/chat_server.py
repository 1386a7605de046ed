"""A scripted server on loopback that speaks OpenAI's chat protocol like vLLM 0.32, right or with one planted fault.

Its model is a function of the conversation; see :mod:`tests.bench.eval.chat_model`.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from typing import Any, Literal, Self

from fidelab.inputs.questions.calls import read_reply
from fidelab.inputs.questions.question import Call, Question, Reply
from tests.bench.eval.chat_model import (
    END,
    Generated,
    Message,
    Tool,
    continued,
    cut_to,
    images_of,
    improvise,
    logprob_entry,
    looped,
    prompt_tokens,
    prose,
    renamed,
    rephrased,
    text_of,
    tokenize,
    until,
    users_of,
)

FAULTS: Mapping[str, str] = {
    "template": "answers carry markers of the chat template and continue the conversation",
    "looping": "long answers repeat one sentence until max_tokens",
    "ignored-stop": "stop sequences are ignored",
    "mixed-parallel": "requests in flight at the same time get each other's answers",
    "dropped-images": "images are ignored",
    "usage": "completion tokens are estimated from characters",
    "tool-arguments": "every argument of a tool call has another name",
    "context-4k": "the start of prompts beyond 4,096 tokens is dropped",
    "lossy-stream": "a stream lacks a chunk in its middle",
    "forgets-turns": "only the last user message is seen",
    "not-greedy": "answers at temperature 0 vary",
    "other-logprobs": "log-probabilities belong to other tokens",
}

Answers = Callable[[Sequence[Message], Sequence[Tool]], Reply | None]

_WINDOW = 4096
_NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)


class Refused(Exception):
    """An error that the server returns: status, message and the parameter it is about."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


@dataclass(eq=False)
class Job:
    """A request in flight, and another one that was in flight at the same time."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    other: Job | None = None


@dataclass
class ChatServer:
    """What the server can do, what is wrong with it, and what it was asked.

    Attributes:
        answers: the reply to a conversation; the model improvises where it returns none.
        fault: one of :data:`FAULTS`; it strikes each ``every``-th request.
        chat: ``no-template`` and ``missing`` refuse chat with 400 and 404.
        completes: whether ``/completions`` answers plain text.
        scores: whether answers have log-probabilities.
        reasoning: ``reasoning`` (vLLM's field), ``content`` (``reasoning_content``, the older field), or ``think``
            (markers in the content).
        counts_end: whether the end token counts as a token and has log-probabilities, as in vLLM.
        trouble: statuses of the next chats, or ``drop``, ``garbage`` or ``break`` (half of the response).
    """

    answers: Answers = lambda messages, tools: None
    fault: str = ""
    every: int = 1
    models: Sequence[str] = ("tiny-chat",)
    max_model_len: int = 32768
    takes_images: bool = True
    takes_tools: bool = True
    tokenizes: bool = True
    chat: Literal["served", "no-template", "missing"] = "served"
    completes: bool = True
    scores: bool = True
    reasoning: Literal["", "reasoning", "content", "think"] = ""
    reasoning_tokens: int = 40
    counts_end: bool = True
    key: str | None = None
    delay: float = 0.0
    trouble: list[int | str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_parallel: int = 0
    port: int = 0
    _asked: int = 0
    _jobs: list[Job] = field(default_factory=list)
    _times: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        assert self.fault in ("", *FAULTS), self.fault

    @classmethod
    def of(
        cls, questions: Iterable[Question], image_url: Callable[[Question], str] | None = None, **settings: Any
    ) -> Self:
        """Return a server that knows the answers of questions."""
        known: dict[tuple[tuple[str, ...], tuple[str, ...]], Question] = {}
        for question in questions:
            texts = tuple(text_of(message).strip() for message in users_of(question.messages))
            known[texts, (image_url(question),) if question.image and image_url else ()] = question
            if not question.image:  # as plain text
                known[("\n\n".join(text_of(message).strip() for message in question.messages),), ()] = question

        def answers(messages: Sequence[Message], tools: Sequence[Tool]) -> Reply | None:
            users = users_of(messages)
            if not users or messages[-1]["role"] == "tool":
                return None
            texts, images = tuple(text_of(message).strip() for message in users), images_of(users[-1])
            question = known.get((texts, images)) or known.get((texts[-1:], images))
            return _reply_of(question, bool(tools)) if question else None

        return cls(answers, **settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths that answer."""
        chat = ("/v1/chat/completions",) if self.chat != "missing" else ()
        return (*chat, "/v1/completions") if self.completes else chat

    def respond(self, body: Mapping[str, Any]) -> tuple[Generated, int, str]:
        """Return the answer to a chat request, its prompt tokens, and the fault that struck."""
        with self._lock:
            self._asked += 1
            fault = self.fault if self._asked % self.every == 0 else ""
        messages, tools = list(body["messages"]), body.get("tools") or ()
        self._validate(body, messages)
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if fault == "forgets-turns":
            messages = users_of(messages)[-1:]
        elif fault == "dropped-images":
            messages = [{**message, "content": text_of(message)} for message in messages]
        elif fault == "context-4k":
            messages = cut_to(messages, _WINDOW - min(asked or 256, 1024) - prompt_tokens([], tools))
        size = prompt_tokens(messages, tools)
        room = self.max_model_len - (asked or 1)
        if size > room:
            raise Refused(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{asked or 0} output tokens and your prompt contains at least {room + 1} input tokens, for a total of "
                f"at least {room + 1 + (asked or 0)} tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens.",
                "input_tokens",
            )
        job = Job(messages, () if body.get("tool_choice") == "none" else tools)
        with self._in_flight(job):
            time.sleep(max(self.delay, 0.05 if self.fault == "mixed-parallel" else 0.0))
        if fault == "mixed-parallel" and job.other:
            job = job.other
        return self._generate(body, job, asked or self.max_model_len - size, fault), size, fault

    @contextmanager
    def _in_flight(self, job: Job) -> Iterator[None]:
        with self._lock:
            for other in self._jobs:
                if other.messages != job.messages:
                    other.other, job.other = other.other or job, other
            self._jobs.append(job)
            self.most_parallel = max(self.most_parallel, len(self._jobs))
        try:
            yield
        finally:
            with self._lock:
                self._jobs.remove(job)

    def _validate(self, body: Mapping[str, Any], messages: Sequence[Message]) -> None:
        model, top = body.get("model"), body.get("top_logprobs") or 0
        if model is not None and model not in self.models:
            raise Refused(404, f"The model `{model}` does not exist.", "model")
        if self.chat == "no-template" and "prompt" not in body:
            raise Refused(400, _NO_TEMPLATE)
        if not self.takes_images and any(images_of(message) for message in messages):
            raise Refused(400, f"{self.models[0]} is not a multimodal model")
        if not self.takes_tools and body.get("tools") and body.get("tool_choice", "auto") == "auto":
            raise Refused(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        if top and not body.get("logprobs"):
            raise Refused(400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if top > 20:
            raise Refused(400, f"Requested sample logprobs of {top}, which is greater than max allowed: 20")
        for name in ("max_tokens", "max_completion_tokens"):
            if (given := body.get(name)) is not None and given < 1:
                raise Refused(400, f"max_tokens must be at least 1, got {given}.", "max_tokens")
        if _temperature(body) < 0:
            raise Refused(400, f"temperature must be non-negative, got {_temperature(body)}.", "temperature")
        if body.get("n") not in (None, 1):
            raise Refused(400, "the scripted server returns one choice", "n")

    def _generate(self, body: Mapping[str, Any], job: Job, limit: int, fault: str) -> Generated:
        seed = conversation = json.dumps(job.messages, sort_keys=True)
        with self._lock:
            self._times[conversation] += 1
            times = self._times[conversation]
        greedy = _temperature(body) == 0
        if not greedy:
            seed += f" {body.get('seed', times)}"
        elif fault == "not-greedy":
            seed += f" {times}"
        reply = self._reply(body, job, limit, seed, fault)
        if fault == "not-greedy" and greedy and not reply.calls:
            reply = Reply(rephrased(reply.text, times))
        elif fault == "looping" and len(tokenize(reply.text)) > 60:
            reply = Reply(looped(reply.text, limit), reply.calls)
        elif fault == "template" and not reply.calls:
            reply = Reply(continued(reply.text, seed, limit))
        elif fault == "tool-arguments":
            reply = replace(reply, calls=tuple(Call(call.name, renamed(call.arguments)) for call in reply.calls))
        thinks = self.reasoning and (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        before = f"<think>\n{prose('thought ' + seed, self.reasoning_tokens)}\n</think>\n\n" if thinks else ""
        calls = [f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in reply.calls]
        written = before + reply.text + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        whole = tokenize(written)
        tokens, ended = whole[:limit], len(whole) < limit
        complete = len(whole) <= limit
        text, stop = "".join(tokens), None
        if (stops := _stops(body)) and fault != "ignored-stop":
            matches = [(text.find(each) + len(each), each) for each in stops if each in text]
            if matches:
                end, stop = min(matches)
                tokens, ended, complete = until(tokens, end), False, False
                text = text[: end - len(stop)]
        finish = "stop" if ended or stop else "length"
        called = reply.calls if complete else ()
        if called and not isinstance(body.get("tool_choice"), dict):  # vLLM reports "stop" where a function is named
            finish = "tool_calls" if ended else finish
        name = {"reasoning": "reasoning", "content": "reasoning_content"}.get(self.reasoning, "") if thinks else ""
        return Generated(tokens, text, finish, stop, ended, called, name, len(before + reply.text))

    def _reply(self, body: Mapping[str, Any], job: Job, limit: int, seed: str, fault: str) -> Reply:
        reply = self.answers(job.messages, job.tools)
        if fault == "context-4k" and job.messages != body["messages"]:
            reply = self._guessed(body["messages"], job)
        elif fault == "dropped-images" and any(images_of(message) for message in body["messages"]):
            reply = Reply("It shows a house.")
        reply = reply or Reply(improvise(job.messages, limit, seed))
        choice = body.get("tool_choice")
        if job.tools and not reply.calls and (choice == "required" or isinstance(choice, dict)):
            named = choice["function"] if isinstance(choice, dict) else job.tools[0]["function"]
            reply = Reply("", (Call(named["name"], "{}"),))
        return reply

    def _guessed(self, whole: Sequence[Message], job: Job) -> Reply | None:
        """Return the right answer if the text that was kept states it, otherwise a wrong number; none for prose."""
        right = self.answers(whole, job.tools) or Reply(improvise(whole, 60, ""))
        if right.calls or len(tokenize(right.text)) > 60:
            return right if right.calls else None
        kept = " ".join(map(text_of, job.messages))
        facts = re.findall(r"[\w-]*\d(?:[\w.,-]*\w)?", right.text) or [right.text.strip(" .")]
        if all(re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", kept) for fact in facts):
            return right
        return Reply(str(zlib.crc32(right.text.encode()) % 9000 + 1000))


@contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    """Run the server as long as the block lasts."""
    handler = type("Handler", (_Handler,), {"server_": server})
    with _Listener(("127.0.0.1", 0), handler) as listener:
        server.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


def _reply_of(question: Question, tools: bool) -> Reply:
    return read_reply(question.answer) if question.kind == "tools" and tools else Reply(question.answer)


def _old_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return log-probabilities in the form of ``/completions``."""
    tops = [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries]
    tokens, values = ([entry[key] for entry in entries] for key in ("token", "logprob"))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}


def _temperature(body: Mapping[str, Any]) -> float:
    given = body.get("temperature")
    return 1.0 if given is None else float(given)


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_: ChatServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server_
        if self.path == "/v1/models" and self._let_in():
            card = {"object": "model", "created": 1, "owned_by": "vllm", "max_model_len": server.max_model_len}
            data = [{"id": name, "root": name, "parent": None, **card} for name in server.models]
            self._json({"object": "list", "data": data})
        elif self.path == "/version":
            self._json({"version": "0.32.0"})
        elif self.path == "/health":
            self._send(b"", "text/plain")
        elif self.path != "/v1/models":
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        server = self.server_
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and server.tokenizes:
            tokens = tokenize(body["prompt"]) if "prompt" in body else [""] * prompt_tokens(body["messages"])
            ids = [zlib.crc32(token.encode()) % 150_000 for token in tokens]
            self._json({"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids, "token_strs": None})
        elif self.path not in server.paths:
            self._json({"detail": "Not Found"}, 404)
        elif self._let_in():
            server.requests.append(body)
            if "prompt" in body:
                body = {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
            trouble = server.trouble.pop(0) if server.trouble else None
            if isinstance(trouble, int):
                self._error(Refused(trouble, f"trouble {trouble}"))
            elif trouble == "drop":
                self.close_connection = True
            elif trouble == "garbage":
                self._send(b"<html>It works!</html>", "text/html")
            else:
                try:
                    self._chat(body, breaks=trouble == "break")
                except Refused as refused:
                    self._error(refused)

    def _chat(self, body: Mapping[str, Any], breaks: bool) -> None:
        server = self.server_
        generated, size, fault = server.respond(body)
        shown = [*generated.tokens, END] if generated.ended and server.counts_end else generated.tokens
        usage: dict[str, Any] = {
            "prompt_tokens": size,
            "completion_tokens": len(shown),
            "total_tokens": size + len(shown),
        }
        if fault == "usage":
            estimate = len(generated.text) // 4 + 3
            usage |= {"completion_tokens": estimate, "total_tokens": size + estimate}
        if generated.thinking:
            thoughts = sum(generated.thinking in delta for delta in generated.deltas())
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        entries: list[Any] = [None] * len(shown)
        if server.scores and body.get("logprobs"):
            top = body["logprobs"] if "prompt" in body else body.get("top_logprobs") or 0
            others = cycle(tokenize(prose("other", len(shown))))
            named = list(islice(others, len(shown))) if fault == "other-logprobs" else shown
            entries = [logprob_entry(token, at, top) for at, token in enumerate(named)]
        head = {"id": f"chatcmpl-{len(server.requests):032x}", "created": int(time.time())}
        head |= {"model": body.get("model") or server.models[0]}
        end = {"finish_reason": generated.finish, "stop_reason": generated.stop}
        if not body.get("stream"):
            said: dict[str, Any] = {"message": generated.message()}
            logprobs: Any = {"content": entries} if entries and entries[0] else None
            if "prompt" in body:
                said, logprobs = {"text": generated.text}, _old_logprobs(entries) if logprobs else None
            choice = {"index": 0, **said, "logprobs": logprobs, **end}
            kind = "text_completion" if "prompt" in body else "chat.completion"
            whole = {**head, "object": kind, "choices": [choice], "usage": usage}
            self._json({**whole, "prompt_logprobs": None}, breaks=breaks)
            return
        deltas = generated.deltas()
        spoken = [at for at, delta in enumerate(deltas) if delta.get("content")]
        if fault == "lossy-stream" and len(spoken) > 8:
            deltas[spoken[len(spoken) // 2]] = {}
        if generated.ended:
            deltas.append({"content": ""})
            entries += [None] * (len(deltas) - len(entries))
        choices: list[dict[str, Any]] = [
            {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        for delta, entry in zip(deltas, entries, strict=True):
            if delta or entry or delta is deltas[-1]:
                scores = {"content": [entry]} if entry else None
                choices.append({"delta": delta, "logprobs": scores, "finish_reason": None})
        choices[-1] |= end
        if "prompt" in body:
            choices = [{**choice, "text": choice["delta"].get("content", ""), "delta": {}} for choice in choices]
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, **choice}]} for choice in choices]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage})
        events = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
        self._events(events[: len(events) // 2] if breaks else [*events, "[DONE]"], breaks)

    def _events(self, events: Sequence[str], breaks: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if not breaks:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = breaks

    def _let_in(self) -> bool:
        key = self.server_.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._json({"error": "Unauthorized"}, 401)
        return False

    def _error(self, refused: Refused) -> None:
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(refused.status, "InternalServerError")
        error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.status}
        self._json({"error": error}, refused.status)

    def _json(self, value: Any, status: int = 200, breaks: bool = False) -> None:
        self._send(json.dumps(value).encode(), "application/json", status, breaks)

    def _send(self, data: bytes, kind: str, status: int = 200, breaks: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if breaks else data)
        self.close_connection = self.close_connection or breaks
