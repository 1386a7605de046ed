"""Any running server with an OpenAI-compatible API: vLLM, SGLang, llama.cpp's two, others.

Engine options (``--engine-arg``): ``base-url`` (http://HOST:PORT, needed), ``model`` (the served name; the only one
by default), ``api-key-env`` (the name of the environment variable that holds the key; OPENAI_API_KEY for a server
on this machine), ``concurrency`` (requests at a time; the request's batch, at most 8), ``timeout`` (seconds per
request, 600), ``logprobs`` (tokens per position; 20, or 5 where the server gives no more), ``prompts`` (ids or text;
ids where the server takes them).

- **The KV format is the server's.**  ``as-served`` claims nothing; any other name must be the one that the server
  reports, else the arm is not engaged.  Only vLLM (/metrics) and SGLang (/server_info) report one.
- **The estimator is** ``topk``: KL has a lower bound, perplexity the actual tokens' log-probabilities, both only where
  the server gives log-probabilities of prompts.  Entries whose text fits several tokens are left out:
  the bound stays valid.
- **Text instead of ids**: a server that takes or returns only text has it tokenized again; ``ran`` records it, and such
  generated ids are not compared with a server's own.
- **Forced requests** are one prefill: the API cannot feed single tokens.  ``facts`` records it.
- **Windows as the server computes them**, as far as a client can bring it about: alone through an empty cache, after a
  prefix that it remembers, in a batch.  Its own counts of the tokens that it did not compute prove a hit; no server
  reports a batch, so it counts if all requests were sent before the first was answered.
- Otherwise, whether a prefix came from the server's cache is not controlled; the server's report about it is in
  ``facts``.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array
from fidelab.captures.reader import why_no_distribution
from fidelab.captures.requests import (
    CUT_SHORT,
    Forced,
    Generate,
    Prefill,
    Request,
    Served,
    Timed,
    Tokens,
)
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines import CLIENT
from fidelab.engines.base import Answer, Engine, Sink, Support, add_sequence, engines, unmeasurable
from fidelab.engines.harmless import Harmless
from fidelab.engines.openai.completions import Completions
from fidelab.engines.openai.dialects import Completion, Dialect, Top
from fidelab.engines.openai.harmless import HARMLESS
from fidelab.engines.openai.http import Client, Refused, read_key, split_url
from fidelab.engines.openai.named import misnamed
from fidelab.engines.openai.server import identify, other_models
from fidelab.engines.openai.sglang import SGLangGenerate
from fidelab.engines.openai.words import Words
from fidelab.engines.options import NAME, TOKENS, Value, check_options, is_count, one_of
from fidelab.engines.served import other_prompt
from fidelab.engines.timing import groups

Result = TypeVar("Result")

_AS_SERVED = "as-served"
_CONCURRENCY = 8
_REACH_SECONDS = 2.0  # in which a server has to answer anything at all, for a plan
_TIMEOUT = 600.0
_TOO_LONG = (400, 413, 422)  # with which servers refuse a prompt beyond their context
_NAMED, _NAME_LENGTH = 3, 100  # models and characters of a name that the proof lists: a server writes what it likes
_TOPS = (20, 5)  # the most that vLLM and OpenAI return
_IDS = 1 << 31  # token ids are stored in 32 bits


def _seconds(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


_OPTIONS: Mapping[str, Value] = {
    "base-url": (bool, "an address"),
    "model": NAME,
    "api-key-env": (str.isidentifier, "the name of an environment variable"),
    "concurrency": (is_count, "a number of requests"),
    "timeout": (_seconds, "a number of seconds"),
    "logprobs": TOKENS,
    "prompts": one_of("ids", "text"),
}


class OpenAIEngine(Engine):
    """Engine adapter of a server with an OpenAI-compatible API."""

    name: ClassVar[str] = CLIENT
    title: ClassVar[str] = "OpenAI-compatible server"
    harmless: ClassVar[Mapping[str, Harmless]] = HARMLESS
    estimator: ClassVar[Estimator] = Estimator.TOPK
    native_kv: ClassVar[str] = _AS_SERVED
    separate_kv: ClassVar[bool] = False
    is_server: ClassVar[bool] = True
    own_flags: ClassVar[Mapping[str, str]] = {}  # no server is started
    start_seconds: ClassVar[float] = 2.0
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"served"}
    ways: ClassVar[frozenset[str]] = frozenset(("cold", "prefix", "prefix-partial", "prefix-other", "batch"))

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return the version of this client. The server's version is known once the arm is opened."""
        return {"openai": "1"}

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        """Return what servers of the engines that fidelab knows may say of their cache."""
        tables = (cls.cache_formats for cls in engines() if not cls.emulates)
        names = (name for table in tables for name, row in table.items() if not row.instead)
        return list(dict.fromkeys((_AS_SERVED, *names)))

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        if not kv.same or kv.k.options or kv.skipped:
            raise UsageError(
                f"KV format {kv.label!r}: a server's cache is what it was started with; "
                f"write {_AS_SERVED}, or the one name that it reports"
            )

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        for key, value in arm.options:  # values may be secrets and are not shown
            if "key" in key.lower() and key not in _OPTIONS:
                raise UsageError(
                    "engine openai takes no key: put it into an environment variable, named by api-key-env=NAME"
                )
            if key == "api-key-env" and not value.isidentifier():
                raise UsageError("engine openai: the value is not the name of an environment variable (api-key-env)")
        check_options(cls.name, arm.options, _OPTIONS)
        options = dict(arm.options)
        if "base-url" not in options:
            raise UsageError(
                "engine openai needs the address of a server: --engine-arg base-url=http://127.0.0.1:8000/v1"
            )
        split_url(options["base-url"])
        read_key(options["base-url"], options.get("api-key-env"))
        return Support(True)

    @classmethod
    def unreachable(cls, arm: Arm) -> str:
        options = dict(arm.options)
        key = read_key(options["base-url"], options.get("api-key-env"))
        return Client(options["base-url"], key, _REACH_SECONDS).unreachable()

    def open(self, arm: Arm) -> None:
        self._arm = arm
        self._options = dict(arm.options)
        key = read_key(self._options["base-url"], self._options.get("api-key-env"))
        self._client = Client(self._options["base-url"], key, float(self._options.get("timeout", _TIMEOUT)))
        self._server = identify(self._client, self._options.get("model"))
        self._words = Words(arm.path, arm.model)
        self._dialect = self._understood(self._find_dialect)
        self._tokenizer = "local"

    def _find_dialect(self) -> Dialect:
        number = self._options.get("logprobs")
        tops = (int(number),) if number else _TOPS
        if self._server.kind == "sglang" and self._options.get("prompts") != "text":
            return SGLangGenerate(self._client, self._words, tops)
        return Completions(self._client, self._server.model, self._words, self._options.get("prompts"), tops)

    def _understood(self, ask: Callable[[], Result]) -> Result:
        """Result of ``ask``, which reads a server's answers of any form.

        Raises:
            Refused: If the form is not the one that the API prescribes.
        """
        try:
            return ask()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            what = self._client.clean(f"{type(error).__name__}: {error}")
            raise Refused(f"{self._client.root} answers in another form than its API has ({what})") from error

    def tokenize(self, text: str) -> list[int]:
        """Return token ids from the server's tokenizer if it has an endpoint for it, else from the model's."""
        common = {"model": self._server.model, "add_special_tokens": False}
        forms: dict[str, dict[str, Any]] = {
            "/tokenize": common | {"prompt": text, "content": text, "add_special": False},
            "/extras/tokenize": {"model": self._server.model, "input": text},
        }
        for path, body in forms.items():
            try:
                ids = self._client.post(path, body, api=False).get("tokens")
            except EngineError:
                continue
            if isinstance(ids, list) and all(isinstance(token, int) and 0 <= token < _IDS for token in ids):
                self._tokenizer = "server"
                return ids[1:] if path != "/tokenize" and ids[:1] == [self._words.bos] else ids
        return self._words.encode(text)

    def answer(self, request: Request, sink: Sink) -> Answer:
        return self.answer_by_kind(request, sink, Estimator.TOPK)

    def runtime_info(self) -> RuntimeInfo:
        server, dialect, kv_name = self._server, self._dialect, self._arm.kv.k.name
        k, v = (_AS_SERVED, _AS_SERVED) if kv_name == _AS_SERVED else server.kv or (None, None)
        shifted = isinstance(dialect, Completions) and dialect.shifted
        others = other_models(self._client, server)
        return RuntimeInfo(
            versions={
                **self.versions(),
                **({server.kind: server.version} if server.version else {}),
                "python": platform.python_version(),
            },
            device=f"server {self._client.root}",
            attention=server.facts.get("attention_backend"),
            k_format=k,
            v_format=v,
            more={
                "proof": dict.fromkeys(("received", "stored", "named"), f"open: {self._unproven(others)}"),
                "server": server.kind,
                "served_kv": None if server.kv is None else "/".join(dict.fromkeys(server.kv)),
                "prompts": dialect.sends,
                "ids": "returned" if dialect.returns == "ids" else "retokenized",
                "top_logprobs": dialect.top,
                "tokenizer": self._tokenizer,
                "remarks": [misnamed(name, server.model) for name in others],
                **({"echo_shifted": True} if shifted else {}),
                **{key: value for key, value in server.facts.items() if key != "attention_backend"},
            },
        )

    @staticmethod
    def _unproven(others: Sequence[str]) -> str:
        """Why nothing is proven: the models that answered in place of the requested one, or a server's silence."""
        if not others:
            return "a server shows nothing of its cache"
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        return f"answered by {', '.join(name[:_NAME_LENGTH] for name in others[:_NAMED])}{more}"

    # ---------------------------------------------------------------------------------------------- requests

    def _prefill(self, request: Prefill, sink: Sink) -> dict[str, Any]:
        if not self._dialect.top:
            return unmeasurable(request, sink, f"{self._client.root} {self._dialect.why_not}")

        cut: dict[str, int] = {}

        def rows(index: int) -> dict[str, Array]:
            if request.positions:
                found, kept = self._depths(request.windows[index], request.positions[index])
                cut.update({} if kept == len(request.positions[index]) else {str(index): kept})
                return found
            return _rows(_checked(self._dialect.score(request.windows[index])[request.first : request.last + 1]))

        for index, arrays in self._send_all(len(request.windows), rows, sink, self._width()):
            sink.add(index, arrays)
            sink.progress(len(request.windows[index]))
        return {"tokens": sum(map(len, request.windows)), **({CUT_SHORT: cut} if cut else {})}

    def _depths(self, window: Tokens, positions: Tokens) -> tuple[dict[str, Array], int]:
        """Rows at some positions, and how many of them count: a window that the server refuses is cut to its half.

        Raises:
            Refused: If the server also refuses what is left.
        """
        most = positions[-1] + 2  # the last row and the token that it predicts
        while True:
            kept = [position for position in positions if position < most - 1]
            try:
                tops = self._dialect.score(window[:most])
            except Refused as error:
                most //= 2
                if error.status not in _TOO_LONG or positions[0] >= most - 1:
                    raise
                continue
            lost: list[Top] = [{}] * (len(positions) - len(kept))
            return _rows([*_checked([tops[position] for position in kept]), *lost]), len(kept)

    def _forced(self, request: Forced, sink: Sink) -> dict[str, Any]:
        if not self._dialect.top:
            return unmeasurable(request, sink, f"{self._client.root} {self._dialect.why_not}")

        def score(index: int) -> Sequence[Top]:
            prompt = request.prompts[index]
            return self._dialect.score((*prompt, *request.continuations[index]))[len(prompt) - 1 : -1]

        def rows(index: int) -> dict[str, Array]:
            return _rows(_checked(score(index))) if request.continuations[index] else {}

        read = request.items()

        for index, arrays in self._send_all(len(request.prompts), rows, sink, self._width()):
            add_sequence(sink, index, request.continuations[index], arrays, None if arrays else "empty continuation")
            sink.progress(len(read[index]))
        return {"tokens": sum(map(len, read)), "one_prefill": True}

    def _generate(self, request: Generate, sink: Sink) -> dict[str, Any]:
        produced = cached = reread = 0

        def sequence(index: int) -> tuple[Completion, dict[str, Array]]:
            done = self._dialect.complete(request.prompts[index], request.max_tokens, request.stop, request.rows)
            if any(not 0 <= token < _IDS for token in done.ids):
                raise Refused("the server returns token ids that are none")
            if self._client.key and self._client.holds_key(self._words.decode(done.ids)):
                raise Refused("the server answers with the key that it was given")
            tops = _checked(done.tops or [])
            return done, {} if not tops or not done.ids else _rows(tops)

        for index, (done, rows) in self._send_all(len(request.prompts), sequence, sink, self._width(request.batch)):
            prompt = request.prompts[index]
            other = done.read not in (None, len(prompt))
            if other and self._dialect.sends == "ids":
                sink.fail(index, f"the server read {done.read} tokens of a prompt that has {len(prompt)}")
                continue
            add_sequence(sink, index, done.ids, rows)
            sink.progress(len(prompt) + len(done.ids), decoded=len(done.ids))
            produced, cached, reread = produced + len(done.ids), cached + done.cached, reread + other
        tokens = sum(map(len, request.prompts)) + produced
        return {
            "tokens": tokens,
            "generated": produced,
            "cached_prompt_tokens": cached,
            **({"prompts_read_otherwise": reread} if self._dialect.sends == "text" else {}),
        }

    def _served(self, request: Served, sink: Sink) -> dict[str, Any]:
        return self._understood(partial(self._serve, request, sink))

    def _serve(self, request: Served, sink: Sink) -> dict[str, Any]:
        if not self._dialect.top:
            raise NotSupportedError(f"{self._client.root} {self._dialect.why_not}")
        faults: list[str] = []
        counts: list[int] = []
        for index, window in enumerate(request.windows):
            tops, count, fault = self._score_window(request, window)
            sink.add(index, _rows(_checked(tops[request.first : request.last + 1])))
            sink.progress(len(window))
            counts.append(count)
            faults += [fault] if fault else []
        if faults:
            return {"not_engaged": faults[0]}
        name = "hit tokens" if request.way.startswith("prefix") else "sent at once"
        return {"tokens": sum(map(len, request.windows)), "engaged": {name: min(counts)}}

    def _score_window(self, request: Served, window: Tokens) -> tuple[Sequence[Top], int, str]:
        """Report on a window, the count that proves the serving mode, and why it does not (empty if it does)."""
        way, size, salt = request.way, request.size, uuid.uuid4().hex
        crowd = request.others if way == "batch" else ()
        self._dialect.forget()
        if way.startswith("prefix"):
            before = other_prompt(request, window) if way == "prefix-other" else window[:size]
            self._dialect.scored(before, len(before) - 1, salt)
        sent, answered = [], []

        def ask(prompt: Tokens) -> tuple[Sequence[Top], int | None]:
            sent.append(time.monotonic())
            found = self._dialect.scored(prompt, request.first if prompt is window else len(prompt) - 1, salt)
            answered.append(time.monotonic())
            return found

        with ThreadPoolExecutor(1 + len(crowd)) as pool:
            tops, cached = next(iter(list(pool.map(ask, (window, *crowd)))))
        if not way.startswith("prefix"):
            fault = f"the server found {cached} tokens of the window in its prefix cache" if cached else ""
            if max(sent) > min(answered):
                fault = f"the first of {len(sent)} requests was answered before all were sent"
            return tops, len(sent), fault
        return tops, cached or 0, _no_hit(way, size, cached, self._server.facts.get("block_size"))

    def _timed(self, request: Timed, sink: Sink) -> dict[str, Any]:
        prompt_groups = groups(request)

        def seconds(index: int) -> NDArray[np.float64]:
            each = [_times(events, 1 + request.n) for events in self._streamed(prompt_groups[index], 1 + request.n)]
            return np.asarray(np.max(each, axis=0), dtype=np.float64)

        for index, times in self._send_all(len(prompt_groups), seconds, sink, 1):
            sink.add(index, {"seconds": times})
            decoded = request.n * len(prompt_groups[index])
            sink.progress(sum(map(len, prompt_groups[index])) + decoded, decoded=decoded)
        generated = request.n * len(request.prompts)
        return {"tokens": sum(map(len, request.prompts)) + generated, "generated": generated}

    def _streamed(self, group: Sequence[Tokens], n: int) -> list[list[tuple[float, int]]]:
        """Events of prompts that are sent at once: per prompt (seconds since the first was sent, tokens)."""
        self._dialect.forget()
        began = time.perf_counter()

        def events(prompt: Tokens) -> list[tuple[float, int]]:
            late = time.perf_counter() - began
            return [(late + seconds, tokens) for seconds, tokens in self._dialect.stream(prompt, n)]

        with ThreadPoolExecutor(len(group)) as pool:
            return list(pool.map(events, group))

    def _width(self, batch: int = _CONCURRENCY) -> int:
        """Requests at a time."""
        return int(self._options.get("concurrency", min(batch, _CONCURRENCY)))

    def _send_all(self, n: int, ask: Callable[[int], Result], sink: Sink, width: int) -> Iterator[tuple[int, Result]]:
        """Answers in order, ``width`` requests at a time; refused items are marked failed.

        Raises:
            EngineError: If the server is gone, or it refused every item.
        """
        width = min(n, width) or 1
        waiting: deque[tuple[int, Future[Result]]] = deque()
        refused: list[str] = []
        with ThreadPoolExecutor(width) as pool:
            try:
                for index in range(n + width):
                    if index < n:
                        waiting.append((index, pool.submit(self._understood, partial(ask, index))))
                    if index >= width - 1 and waiting:
                        item, future = waiting.popleft()
                        try:
                            yield item, future.result()
                        except Refused as error:
                            refused.append(str(error))
                            sink.fail(item, str(error))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        if refused and len(refused) == n:
            raise EngineError(f"none of {n} items was answered, first: {refused[0]}")


def _no_hit(way: str, size: int, cached: int | None, block: Any) -> str:
    """Reason why a server's count of cached tokens does not prove a hit of ``size``; empty if it does."""
    if cached is None:
        return "the server does not report a prefix cache hit, or recomputes the tokens that it scores"
    if way == "prefix-partial" and isinstance(block, int) and size % block == 0:
        return f"a hit of {size} tokens ends with a whole block of {block}"
    if not 0 < cached <= size or (way == "prefix-partial" and cached != size):
        return f"the server found {cached} of {size} tokens in its prefix cache"
    return ""


def _times(events: Sequence[tuple[float, int]], n: int) -> list[float]:
    """Seconds of each of the n tokens.

    Raises:
        Refused: If they are not known.
    """
    if any(tokens != 1 for _, tokens in events):
        raise Refused("the server puts several tokens into one event: their times are not known")
    if len(events) != n:
        raise Refused(f"the server ended after {len(events)} of {n} tokens: it heeds no ignore_eos")
    return [seconds for seconds, _ in events]


def _checked(tops: Sequence[Top]) -> Sequence[Top]:
    """Log-probabilities as a server reported them.

    Raises:
        Refused: If they are not those of a distribution, or a token is not valid.
    """
    for top in tops:
        if fault := why_no_distribution(np.array([list(top.values())], dtype=np.float64)):
            raise Refused(f"the server's answer {fault}")
        if not all(0 <= token < _IDS for token in top):
            raise Refused("the server's answer names a token id that none can be")
    return tops


def _rows(tops: Sequence[Top]) -> dict[str, Array]:
    """Arrays [rows, K] of ids and log-probabilities, the most likely first; shorter rows are padded with id -1."""
    ordered = [sorted(top.items(), key=lambda pair: (-pair[1], pair[0])) for top in tops]
    width = max(1, max(map(len, ordered), default=1))
    ids = np.full((len(tops), width), -1, dtype=np.int32)
    logprobs = np.full((len(tops), width), -np.inf, dtype=np.float32)
    for row, pairs in enumerate(ordered):
        if pairs:
            ids[row, : len(pairs)], logprobs[row, : len(pairs)] = zip(*pairs, strict=True)
    return {"topk_ids": ids, "topk_logprobs": logprobs}
