"""One running SGLang: requests in, token ids and captured rows out.

``sglang.Engine`` computes in separate scheduler processes.  :mod:`fidelab.engines.sglang.capture` runs there and
exchanges instructions and rows with this module through files in one folder.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.container import Array
from fidelab.captures.requests import Tokens
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.core.scratch import scratch
from fidelab.engines.base import one_line
from fidelab.engines.capture_files import read_head, read_nan, read_rows, read_states, typed
from fidelab.engines.sglang.capture import FOLDER, LOGPROBS, PREFIX, SERVING
from fidelab.engines.speculation import Drafts

_INSTRUCTIONS = ("first", "picked", "live", "force", "about", "layers", "counted", "chunk", "squeeze")
_COLOCATED_VARIABLE = "SGLANG_ENABLE_COLOCATED_BATCH_GEN"  # prompts that are sent together are scheduled together


@dataclass(frozen=True)
class SGLangRequest:
    """A prompt and its instructions; from ``first`` on, the fields of the plug-in.

    ``salt``: requests of one salt share the prefix cache; a request without a salt shares nothing.
    """

    prompt: Tokens
    max_tokens: int = 1
    stop: Tokens = ()
    first: int | None = None
    picked: Tokens = ()
    live: int = 0
    force: Tokens = ()
    about: bool = False
    layers: bool = False
    counted: bool = False
    chunk: int = 0
    squeeze: bool = False
    salt: str = ""

    @property
    def instructions(self) -> dict[str, Any]:
        """Instructions for the plug-in."""
        return {key: getattr(self, key) for key in _INSTRUCTIONS} | {"tokens": len(self.prompt)}


@dataclass(frozen=True)
class Response:
    """``rows`` [n, d] states or [n, V] log-probabilities; ``live`` [m, V] float32 logits of the first sampled rows;
    ``states`` [1 + layers, n, d].

    ``cached``: tokens that SGLang found in its prefix cache.  If counting was requested: ``steps`` as of
    :class:`~fidelab.engines.served.Counted`, and the ``places`` of the tokens in the cache.
    """

    ids: list[int]
    rows: Array | None
    live: Array | None
    failed: str | None
    states: Array | None = None
    cached: int = 0
    steps: tuple[tuple[int, int, int], ...] = ()
    places: frozenset[int] = frozenset()


class SGLangSession:
    """Starts SGLang; ``mark`` is called at the end of each start-up phase.  ``serving``: it has a prefix cache.

    Raises:
        EngineError: If it does not start, or the plug-in is not active in it.
    """

    def __init__(
        self, arguments: Mapping[str, Any], mark: Callable[..., None], *, logprobs: bool, serving: bool = False
    ) -> None:
        self._mark = mark
        self._scratch = ExitStack()
        self._folder = self._scratch.enter_context(scratch("sglang"))
        self._logprobs = logprobs
        self._serving = serving
        self._sent = self._salts = 0
        self.drafts = Drafts()  # as SGLang counts them of each request
        self._engine: Any = None
        os.environ[FOLDER] = str(self._folder)
        os.environ.update({LOGPROBS: "1"} if logprobs else {})
        os.environ.update({SERVING: "1", _COLOCATED_VARIABLE: "1"} if serving else {})
        try:
            self._engine = self._start(arguments)
        except BaseException:
            self.close()
            raise
        manager = self._engine.tokenizer_manager
        self._ended = False
        manager.signal_handler_class = self._stopping(manager.signal_handler_class)
        self.stops = frozenset(manager.model_config.hf_eos_token_id or ())
        self.arguments = self._engine.server_args
        self._width = 0
        self._vocabulary = 0
        self._dtype = "float32"

    def _start(self, arguments: Mapping[str, Any]) -> Any:
        try:
            from sglang.srt.entrypoints.engine import Engine
        except Exception as error:
            raise EngineError(f"SGLang cannot be imported: {one_line(error)}") from error
        self._mark("import")
        began = time.monotonic()
        try:
            engine = Engine(**arguments, custom_sigquit_handler=_child_failed)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(_cause(self._folder) or f"SGLang does not start: {one_line(error)}") from error
        self._mark("warm-up", **_startup_seconds(engine, time.monotonic() - began))
        return engine

    def describe(self) -> tuple[dict[str, Any], Response]:
        """Run two tokens. Returns the plug-in's description of model and cache, and the response."""
        response = self._send([SGLangRequest((0, 1), first=1, live=1, about=True)])
        path = self._folder / "about.json"
        if not path.exists():
            raise EngineError(
                f"the capture plug-in is not at work in SGLang {version('sglang')}: this version hooks in another way "
                "(the log says what was missing)"
            )
        about = json.loads(path.read_text("utf-8"))
        self._dtype = "float16" if self._logprobs else about["compute_dtype"]
        self._vocabulary = about["vocabulary"]
        self._width = self._vocabulary if self._logprobs else about["head"].get("width", 0)
        return about, self._collect(*response)[0] if self._width else Response([], None, None, None)

    def head(self, about: Mapping[str, Any], ranks: int) -> dict[str, Array]:
        """Return the weight [V, d] and perhaps bias [V] without padding. The files are removed."""
        return read_head(self._folder, [about["head"]] * ranks, self._vocabulary)

    def ask(self, requests: Sequence[SGLangRequest]) -> list[Response]:
        """Answer some requests together.

        Raises:
            EngineError: If SGLang refuses one of them, or ends.
            NotSupportedError: If its layers cannot be read.
        """
        return self._collect(*self._send(requests))

    def stream(self, group: Sequence[Tokens], n: int) -> Iterator[list[int]]:
        """Yield ``n`` greedy tokens after each prompt, each as soon as all prompts have it; stop tokens are ignored.

        Work starts when the first is requested.
        """
        parameters = {**_GREEDY, "max_new_tokens": n, "ignore_eos": True}
        prompts: Any = [list(prompt) for prompt in group] if len(group) > 1 else list(group[0])
        ids: list[list[int]] = [[] for _ in group]
        n_yielded = 0
        salts: Any = [self._unique_salt() for _ in group] if len(group) > 1 else self._unique_salt()
        try:
            for chunk in self._alive().generate(
                input_ids=prompts, sampling_params=parameters, stream=True, **self._salted(salts)
            ):
                ids[chunk.get("index", 0)] = chunk["output_ids"]
                if chunk["meta_info"].get("finish_reason"):
                    self.drafts += _counted(chunk["meta_info"])
                n_known = min(map(len, ids))
                yield from ([tokens[i] for tokens in ids] for i in range(n_yielded, n_known))
                n_yielded = n_known
        except Exception as error:
            raise self._failed(error) from error

    def forget(self) -> None:
        """Empty the prefix cache once the scheduler is idle."""
        engine = self._alive()
        emptied = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=_IDLE))
        if not emptied.success:
            raise EngineError("SGLang does not empty its prefix cache")

    def close(self) -> None:
        """End the processes and remove the folder."""
        with self._scratch:
            if self._engine is not None:
                self._engine.shutdown()

    def _stopping(self, base: type) -> type:
        """SGLang's signal handler for the time after the start, which stops waiting instead of ending this process."""
        session = self

        class Handler(base):  # type: ignore[misc]
            def running_phase_sigquit_handler(self, signum: int = signal.SIGQUIT, frame: Any = None) -> None:
                session._ended = True
                session._engine.loop.stop()

        return Handler

    def _alive(self) -> Any:
        """The engine; raises where its schedulers have ended."""
        if self._ended:
            raise self._failed(None)
        return self._engine

    def _failed(self, error: Exception | None) -> EngineError:
        """Error for an exception of SGLang, or for the end of its schedulers."""
        if cause := _cause(self._folder):
            return EngineError(cause)
        if self._ended or error is None:
            return EngineError("SGLang's scheduler has ended: see the log")
        return error if isinstance(error, EngineError) else EngineError(f"SGLang refuses: {one_line(error)}")

    def _send(self, requests: Sequence[SGLangRequest]) -> tuple[Sequence[SGLangRequest], list[str], list[Any]]:
        names = [f"{PREFIX}{self._sent + i}" for i in range(len(requests))]
        self._sent += len(requests)
        for name, request in zip(names, requests, strict=True):
            if request.first is not None or request.counted or request.force:
                (self._folder / f"{name}.json").write_text(json.dumps(request.instructions), "utf-8")
        try:
            answers = self._alive().generate(
                input_ids=[list(request.prompt) for request in requests],
                sampling_params=[self._parameters(request) for request in requests],
                rid=names,
                **self._salted([request.salt or self._unique_salt() for request in requests]),
            )
        except Exception as error:
            raise self._failed(error) from error
        self.drafts = sum((_counted(answer["meta_info"]) for answer in answers), self.drafts)
        return requests, names, answers

    def _salted(self, salts: str | list[str]) -> dict[str, Any]:
        return {"cache_salt": salts} if self._serving else {}

    def _unique_salt(self) -> str:
        self._salts += 1
        return f"alone-{self._salts}"

    def _parameters(self, request: SGLangRequest) -> dict[str, Any]:
        """Sampling parameters; SGLang also stops at the model's stop tokens unless it ignores all."""
        stops_at_all = bool(request.stop) and self.stops <= set(request.stop)
        stop = {"stop_token_ids": list(request.stop)} if stops_at_all else {"ignore_eos": True}
        return {**_GREEDY, "max_new_tokens": request.max_tokens, **stop}

    def _collect(
        self, requests: Sequence[SGLangRequest], names: Sequence[str], answers: Sequence[Any]
    ) -> list[Response]:
        return [
            replace(
                self._response(request, name, list(answer["output_ids"])),
                cached=int(answer["meta_info"].get("cached_tokens") or 0),
                **(self._counted(name) if request.counted else {}),
            )
            for request, name, answer in zip(requests, names, answers, strict=True)
        ]

    def _counted(self, name: str) -> dict[str, Any]:
        """Steps and places of a request that has ended."""
        steps, places = self._folder / f"{name}.steps", self._folder / f"{name}.places"
        return {
            "steps": tuple(tuple(map(int, line.split())) for line in steps.read_text().splitlines()),
            "places": frozenset(np.fromfile(places, dtype=np.int64).tolist()),
        }

    def _response(self, request: SGLangRequest, name: str, ids: list[int]) -> Response:
        if request.force and tuple(ids) != request.force:
            raise EngineError("SGLang did not take the tokens that were forced on it")
        end = next((i for i, token in enumerate(ids) if token in request.stop), len(ids))
        ids = ids[: end + 1]  # up to the first stop token, included
        if request.first is None:
            (self._folder / f"{name}.json").unlink(missing_ok=True)
            return Response(ids, None, None, None)
        kept = len(request.prompt) + len(ids) - 1
        rows = read_rows(self._folder / f"{name}.rows", self._dtype, self._width)
        live = read_rows(self._folder / f"{name}.live", "float32", self._vocabulary)
        n_rows, n_wanted = 0 if rows is None else len(rows), len(request.picked) or kept - request.first
        if n_rows < n_wanted or (n_rows > n_wanted and not request.stop):
            raise EngineError(f"SGLang handed over {n_rows} rows of {n_wanted}")
        failed = None
        if (step := read_nan(self._folder / f"{name}.nan")) is not None and step < len(ids):
            failed = f"NaN logits at generated token {step}"
        (self._folder / f"{name}.json").unlink()
        if failed is None and len(ids) < request.max_tokens and not {*ids[-1:]} & {*request.stop}:
            raise EngineError(f"SGLang ended an answer after {len(ids)} of {request.max_tokens} tokens")
        if (path := self._folder / f"{name}.stateless").exists():
            raise NotSupportedError(f"SGLang's layers cannot be read: {path.read_text('utf-8')}")
        states = read_states(self._folder / f"{name}.states") if request.layers else None
        kept_rows = None if rows is None else typed(rows[:n_wanted], self._dtype)
        return Response(ids, kept_rows, None if live is None else live[: request.live], failed, states)


_DRAFT_COUNTERS = ("verify_ct", "num_proposed_drafts", "num_correct_drafts")
_IDLE = 10.0  # seconds after its last answer, at most
_GREEDY: Mapping[str, Any] = {"temperature": 0.0}


def _counted(meta: Mapping[str, Any]) -> Drafts:
    """SGLang's counts of one request's drafts."""
    return Drafts(*(int(meta.get(f"spec_{name}") or 0) for name in _DRAFT_COUNTERS))


def _startup_seconds(engine: Any, seconds: float) -> dict[str, float]:
    """Seconds of import and of loading within SGLang's start, from its own count if it has one.

    The schedulers count from the end of their imports.
    """
    counted = getattr(engine.tokenizer_manager, "startup_time", None)
    if not counted:
        return {}
    return {"import": seconds - counted["scheduler_e2e"], "weights": counted["load_weight"]}


def _cause(folder: Path) -> str | None:
    """Return the failure of a scheduler that the plug-in recorded."""
    path = folder / "failure.txt"
    return f"SGLang's scheduler ended: {path.read_text('utf-8')}" if path.exists() else None


def _child_failed(_signal: int, _frame: Any) -> None:
    """Handler for the SIGQUIT that failing schedulers send, which would otherwise end this process too."""
    raise EngineError(_cause(Path(os.environ[FOLDER])) or "SGLang's scheduler ended while it started: see the log")
