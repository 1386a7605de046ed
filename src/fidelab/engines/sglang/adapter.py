"""SGLang, its schedulers in processes of their own; keys and values in the types that SGLang has, one for both,
or as a pair (``k16v8``, ``int8/int4``, …) by a backend of the package k16v8.

Engine options (``--engine-arg``), named as SGLang's own: ``tp``, ``attention-backend``, ``sampling-backend``,
``mem-fraction-static``, ``max-total-tokens``, ``context-length``, ``page-size``, ``quantization``,
``chunked-prefill-size``, ``cuda-graph`` (on, off; default off), ``estimator`` (hidden, logprobs), and all options that
``sglang.launch_server --help`` names, checked by SGLang's own parser.

- **States** are those after the final norm, kept by a hook inside the schedulers (``engines/sglang/capture.py``); the
  head is the loaded one.  A few rows of every request are compared with the engine's own logits.
- **The cache's type is fixed at launch**, so an arm is a launch.  The prefix cache is off, and so are overlapped
  scheduling (it samples while the next step runs) and, unless requested, chunked prefill and CUDA graphs.
- **A prefill in one piece need not read the cache**: backends on CUDA may compute it from the keys and values at hand.
  ``chunked-prefill-size`` makes later pieces read the cache.  ``torch_native``, on CPUs, reads the cache.
- **Windows as a server computes them** (``ways.py``): such an arm is launched with a prefix cache, of which every
  other request has a separate part.
- **Forced** continuations go token by token through the cache: the hook replaces the sampled tokens.
- **Speculation** (``speculative-algorithm`` and SGLang's further options of that name): a verification computes rows
  for a tree of drafts, of which none is kept, so generated text has no rows and forced text is not measurable.
- Engine ``openai`` is for a server that runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fidelab.captures.container import Array, BFloat16
from fidelab.captures.requests import WAYS, Forced, Generate, Layerwise, Prefill, Request, Served, Timed, Tokens
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.base import Answer, Engine, Shallow, Sink, Support, add_sequence, continuations, unmeasurable
from fidelab.engines.cache_formats import CacheFormat
from fidelab.engines.checkpoint import loading_refusal
from fidelab.engines.dialect import Dialect
from fidelab.engines.harmless import Harmless
from fidelab.engines.installed import versions_of
from fidelab.engines.k16v8 import K16V8, SIDES, check_pair, is_pair
from fidelab.engines.options import OWN_FLAGS, Value, switched, trusts_code, with_default
from fidelab.engines.server_metrics import MetricNames
from fidelab.engines.sglang import launch
from fidelab.engines.sglang.cache_formats import CACHE_FORMATS, format_of
from fidelab.engines.sglang.dialect import DIALECT, PAGE_NAMES
from fidelab.engines.sglang.harmless import HARMLESS
from fidelab.engines.sglang.read_back import runtime_info
from fidelab.engines.sglang.session import Response, SGLangRequest, SGLangSession
from fidelab.engines.sglang.ways import answer_served
from fidelab.engines.speculation import speculation_record
from fidelab.engines.storage import Stored
from fidelab.engines.timing import time_prompts

if TYPE_CHECKING:
    from fidelab.engines.hf.head import ReplayedHead

_PREFILL_TOKENS = {"cpu": 4096, "cuda": 16_384}  # tokens that are prefilled before rows are handed over
_SENTINEL_ROWS = 8
_FORCED = 16  # continuations that are forced together
_UNFORCED = "SGLang cannot force tokens while it speculates: take the same configuration without speculation"


class SGLangEngine(Engine):
    """Engine adapter of SGLang."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"
    dialect: ClassVar[Dialect] = DIALECT
    server_metrics: ClassVar[MetricNames] = PAGE_NAMES
    harmless: ClassVar[Mapping[str, Harmless]] = HARMLESS
    own_flags: ClassVar[Mapping[str, str]] = {**OWN_FLAGS, "device": "pass --device"}
    packages: ClassVar[tuple[str, ...]] = ("sglang", "sglang-cpu")
    native_kv: ClassVar[str] = "auto"
    separate_kv: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Value]] = launch.OPTIONS
    cache_formats: ClassVar[Mapping[str, CacheFormat]] = CACHE_FORMATS
    controlled: ClassVar[Mapping[str, str]] = launch.CONTROLLED
    aliases: ClassVar[Mapping[str, str]] = {"tp-size": "tp", "tensor-parallel-size": "tp"}
    preload: ClassVar[tuple[str, ...]] = ("fidelab.engines.sglang.preload",)
    imported_ahead: ClassVar[tuple[str, ...]] = ("sglang.srt.entrypoints.engine",)
    start_seconds: ClassVar[float] = 20.0
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"layerwise", "served"}
    ways: ClassVar[frozenset[str]] = frozenset(WAYS)

    @classmethod
    def versions(cls) -> dict[str, str]:
        versions = versions_of(*cls.packages, "sglang-kernel", "torch")
        if not set(cls.packages) & set(versions):
            raise EngineError("engine sglang needs sglang: fidelab setup install sglang")
        return versions

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return tuple(dict.fromkeys((*launch.kv_choices(), *SIDES, K16V8)))

    @classmethod
    def stores(cls, kv: KVSpec, *, emulated: bool) -> Stored:
        return "plug-in" if is_pair(kv) else "native"

    cache_format = staticmethod(format_of)

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        check_pair(kv, cls.name)

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        launch.engine_options(arm)
        cls.speculation(dict(arm.options))
        reason = loading_refusal(arm, "sglang/srt/configs")
        if not reason and is_pair(arm.kv):
            reason = launch.k16v8_cannot(arm)
        elif not reason and arm.device == "cpu":
            reason = launch.cpu_refusal(arm)
        return Support(not reason, reason)

    speculation = staticmethod(launch.speculation_of)
    serve_command = staticmethod(launch.serve_command)
    serve_variables = staticmethod(launch.serve_variables)

    @classmethod
    def as_deployed(cls, arm: Arm) -> Arm:
        """The arm with graphs on a GPU, except for pairs of formats, whose plug-in refuses them."""
        return arm if arm.device == "cpu" or is_pair(arm.kv) else with_default(arm, "cuda-graph", "on")

    def open(self, arm: Arm) -> None:
        self._arm = arm
        self._options = dict(arm.options)
        self._speculation = self.speculation(self._options)
        self._head: ReplayedHead | None = None
        ranks = int(self._options.get("tp", "1"))
        launch.prepare(arm, ranks)
        self._context = launch.context(arm)
        serving = "served" in self.foreseen
        passed = {**launch.arguments(arm, serving=serving), "context_length": self._context + launch.RESERVED_TOKENS}
        logprobs = self._estimator is Estimator.LOGPROBS
        self._session = SGLangSession(passed, self.mark, logprobs=logprobs, serving=serving)
        try:
            self._try_out(ranks)
        except BaseException:
            self._session.close()
            raise

    def _try_out(self, ranks: int) -> None:
        """Run two tokens: check the loaded model, read the cache back, and check that the head replays the logits."""
        self._about, first = self._session.describe()
        unfilled = self._about["unfilled_parameters"]
        if unfilled:
            raise EngineError(f"{len(unfilled)} parameters were filled by no checkpoint tensor, first {unfilled[0]}")
        if not self._about["cache"]["kv_layers"]:
            raise NotSupportedError(f"{self._arm.model} keeps no keys and values in SGLang")
        if self._estimator is Estimator.HIDDEN:
            if "why" in self._about["head"]:
                raise EngineError(f"{self._about['head']['why']}: pass --engine-arg estimator=logprobs")
            from fidelab.engines.hf.head import head_of

            assert first.rows is not None
            assert first.live is not None
            arrays = self._session.head(self._about, ranks)
            self._head = head_of(arrays, self._about, self._about["compute_dtype"], first.rows, first.live)

    def tokenize(self, text: str) -> list[int]:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        tokenizer = get_tokenizer(self._arm.path, trust_remote_code=trusts_code(self._arm))
        return list(tokenizer.encode(text, add_special_tokens=False))

    def answer(self, request: Request, sink: Sink) -> Answer:
        return self.answer_by_kind(
            request, sink, self._estimator, self._head, self._speculation, lambda: self._session.drafts
        )

    def runtime_info(self) -> RuntimeInfo:
        info = runtime_info(self._arm, self._about, self._session.arguments, self.versions())
        if self._speculation is not None:
            info.more["speculation"] = speculation_record(self._speculation, self._session.drafts)
        return info

    def close(self) -> None:
        self._session.close()

    # ------------------------------------------------------------------------------------------- requests

    def _prefill(self, request: Prefill, sink: Sink) -> dict[str, Any]:
        shallow = Shallow(request)
        request = shallow.fit(min(self._room, self._context))
        # no row of later tokens is requested
        prompts = [window[: request.last_of(i) + 1] for i, window in enumerate(request.windows)]
        picked = request.positions or ((),) * len(prompts)
        for batch in self._batches([(len(window), 1) for window in prompts], _PREFILL_TOKENS[self._kind]):
            requests = [
                SGLangRequest(prompts[i], first=request.rows_of(i)[0], picked=picked[i], live=self._sentinel(i))
                for i in batch
            ]
            for index, response in zip(batch, self._ask(requests), strict=True):
                sink.add(index, shallow.whole(index, self._stored(response.rows, len(request.rows_of(index)))))
                sink.progress(len(prompts[index]))
        return {"tokens": sum(map(len, prompts)), **shallow.facts}

    def _timed(self, request: Timed, sink: Sink) -> dict[str, Any]:
        for group in request.groups():
            self._check_group(group, 1 + request.n)
        return time_prompts(request, sink, lambda group: self._session.stream(group, 1 + request.n))

    def _layerwise(self, request: Layerwise, sink: Sink) -> dict[str, Any]:
        if request.tensors != "states":
            raise NotSupportedError("engine sglang captures hidden states only; use engine hf to capture q, k and v")
        if switched(self._options.get("cuda-graph", "off")):
            raise NotSupportedError("SGLang's layers can be seen where they run one by one: remove cuda-graph")
        for index, window in enumerate(request.windows):
            prompt = window[: request.last + 1]
            self._check_length(len(prompt), 1)
            [response] = self._ask([SGLangRequest(prompt, first=request.first, layers=True)])
            assert response.states is not None
            sink.add(index, {"states": response.states})
            sink.progress(len(window))
        return {"tokens": sum(map(len, request.windows)), "layers": self._about["layers"]}

    def _generate(self, request: Generate, sink: Sink) -> dict[str, Any]:
        produced = 0
        sizes = [(len(prompt), request.max_tokens) for prompt in request.prompts]
        for batch in self._batches(sizes, self._room, request.batch):
            requests = [
                SGLangRequest(p, request.max_tokens, request.stop, first=len(p) - 1, live=self._sentinel(i))
                if self._speculation is None
                else SGLangRequest(p, request.max_tokens, request.stop)
                for i, p in ((i, request.prompts[i]) for i in batch)
            ]
            for index, response in zip(batch, self._ask(requests), strict=True):
                ids, failed = response.ids, response.failed
                if failed:
                    ids = ids[: int(failed.rsplit(" ", 1)[1])]
                rows = (
                    self._stored(response.rows, len(ids)) if request.rows and ids and response.rows is not None else {}
                )
                add_sequence(sink, index, ids, rows, failed)
                sink.progress(len(request.prompts[index]) + len(ids), decoded=len(ids))
                produced += len(ids)
        return {"tokens": sum(map(len, request.prompts)) + produced, "generated": produced}

    def _forced(self, request: Forced, sink: Sink) -> dict[str, Any]:
        if self._speculation is not None:
            return unmeasurable(request, sink, _UNFORCED)
        items = list(continuations(request, sink))
        for batch in self._batches([(len(prompt), len(given)) for _, prompt, given in items], self._room, _FORCED):
            group = [items[at] for at in batch]
            requests = [
                SGLangRequest(prompt, len(given), first=len(prompt) - 1, live=self._sentinel(index), force=given)
                for index, prompt, given in group
            ]
            for (index, prompt, given), response in zip(group, self._ask(requests), strict=True):
                add_sequence(sink, index, given, self._stored(response.rows, len(given)))
                sink.progress(len(prompt) + len(given), decoded=len(given))
        return {"tokens": sum(map(len, request.items())), "token_by_token": True}

    def _served(self, request: Served, sink: Sink) -> dict[str, Any]:
        if self._speculation is not None and request.n_stepped:
            raise NotSupportedError(_UNFORCED)

        def ask(requests: Sequence[SGLangRequest]) -> list[Response]:
            self._check_group([one.prompt for one in requests], max(one.max_tokens for one in requests))
            sink.progress(
                sum(len(one.prompt) + one.max_tokens - 1 for one in requests), decoded=requests[0].max_tokens - 1
            )
            return self._ask(requests)

        def add(index: int, response: Response) -> None:
            sink.add(index, self._stored(response.rows, request.n_rows))

        return answer_served(request, ask, self._session.forget, add, int(self._about["page_size"]))

    def _batches(self, sizes: Sequence[tuple[int, int]], tokens: int, most: int = 1 << 20) -> Iterator[list[int]]:
        """Split items of (prompt, new) tokens into batches that fit the cache, so that SGLang retracts none."""
        batch: list[int] = []
        room = min(tokens, self._room)
        page = self._about["page_size"]
        tokens_held = 0
        for index, (prompt, new) in enumerate(sizes):
            self._check_length(prompt, new)
            needed = prompt + new + page
            if batch and (len(batch) >= most or tokens_held + needed > room):
                yield batch
                batch, tokens_held = [], 0
            batch.append(index)
            tokens_held += needed
        if batch:
            yield batch

    def _check_ids(self, tokens: Tokens) -> None:
        """Refuse ids outside the vocabulary, which SGLang does not check and which end its scheduler."""
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self._about["vocabulary"]:
            raise EngineError(
                f"token ids {min(tokens)} … {max(tokens)} are not all in the vocabulary of {self._about['vocabulary']}"
                if tokens
                else "SGLang answers no empty prompt"
            )

    def _check_length(self, prompt: int, new: int) -> None:
        if prompt + new > self._room:
            raise EngineError(
                f"{prompt} + {new} tokens do not fit the cache of {self._room}: pass --engine-arg max-total-tokens=N"
            )
        if prompt + new > self._context:
            raise EngineError(
                f"{prompt} + {new} tokens exceed the context of {self._context}: use shorter texts, or pass "
                "--engine-arg context-length=N where the model can do more"
            )

    def _check_group(self, group: Sequence[Tokens], new: int) -> None:
        """Refuse prompts that could not be answered at the same time."""
        for prompt in group:
            self._check_ids(prompt)
            self._check_length(len(prompt), new)
        needed = sum(len(prompt) + new + int(self._about["page_size"]) for prompt in group[1:]) + len(group[0]) + new
        if needed > self._room:
            raise EngineError(
                f"{len(group)} prompts of {needed} tokens in all do not fit the cache of {self._room} together: "
                "pass --engine-arg max-total-tokens=N"
            )

    @property
    def _room(self) -> int:
        """Tokens of the cache that are available to requests."""
        return int(self._about["cache_tokens"]) - launch.RESERVED_TOKENS - int(self._about["page_size"])

    # ---------------------------------------------------------------------------------------- distributions

    @property
    def _estimator(self) -> Estimator:
        return Estimator(self._options.get("estimator", "hidden"))

    @property
    def _kind(self) -> str:
        return "cpu" if self._arm.device == "cpu" else "cuda"

    def _sentinel(self, index: int) -> int:
        return int(self._estimator is Estimator.HIDDEN and index < _SENTINEL_ROWS)

    def _ask(self, requests: Sequence[SGLangRequest]) -> list[Response]:
        """Responses to some requests; their live logits are compared with the stored head's for the same rows.

        Live logits are those of the last row of a window, or of the first row that was sampled.
        """
        for request in requests:
            self._check_ids((*request.prompt, *request.force))
        responses = self._session.ask(requests) if requests else []
        if self._head is None:
            return responses
        from fidelab.engines.hf.head import to_tensor

        pairs = [
            (rows[-1:] if len(response.ids) == 1 else rows[:1], to_tensor(response.live))
            for response in responses
            if response.live is not None and response.rows is not None
            for rows in [to_tensor(response.rows)]
        ]
        if pairs:
            import torch

            states, live = zip(*pairs, strict=True)
            self._head.check(torch.cat(states), torch.cat(live))
        return responses

    def _stored(self, rows: Array | None, n: int) -> Mapping[str, Array]:
        assert rows is not None
        name = "hidden" if self._estimator is Estimator.HIDDEN else "logprobs"
        return {name: BFloat16(rows.bits[:n]) if isinstance(rows, BFloat16) else rows[:n]}
