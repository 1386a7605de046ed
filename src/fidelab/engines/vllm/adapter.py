"""vLLM in-process: its scheduler, kernels and cache; hidden states are read where the sampler reads them.

Engine options (``--engine-arg``): ``enforce-eager`` (yes, no; default yes on a CPU, where compilation takes a minute,
and for states of layers), ``quick-start`` (yes: a GPU compiles nothing and records no graphs either; default of
``--quick`` where only prompts are read; the printed command of the server leaves it out), ``async-scheduling`` (yes,
no), ``kv-cache-memory`` (bytes, or 512M, 4G; of each rank), ``max-model-len``, ``max-num-seqs`` (16),
``chunked-prefill`` (yes, no), ``max-num-batched-tokens``, ``tp`` (tensor parallel ranks), ``block-size``,
``attention-backend``, ``quantization``, ``gpu-memory-utilization``, ``speculative-config`` (JSON:
``{"method":"ngram","num_speculative_tokens":3}``), ``estimator`` (hidden, logprobs), ``model-runner`` (v1, v2; default:
vLLM's own choice), ``force`` (yes: run a cache format that the attention backend says it cannot read), and all options
that ``vllm serve --help`` names, checked by vLLM's own parser.

- **States** are copied in the worker before each sampling (``capture.py``), also of prompts in chunks and with several
  ranks; prefix caching is off.
- **On a GPU** an arm runs as vLLM serves it: Model Runner V2, graphs, asynchronous scheduling.  ``model-runner=v1``
  brings the old runner with synchronous scheduling.  Differences to vLLM's defaults are remarked in the record.
- **Windows run one at a time**, so that a window's states cannot depend on the rest of the batch; generated and
  forced sequences are batched.
- **Forced** continuations go through the decode path: each sampled token is replaced by the given one.
- **Speculation**: captures leave out rows of drafts and of rejected tokens.  Forced continuations reject all
  drafts.  A prefill and a timed request run as they are.
- **Windows as a server computes them** (``ways.py``): such an arm is launched with a prefix cache, which no other
  request reads.
- **Timed groups** are in the engine at once, scheduled as vLLM does: where one exceeds ``max-num-batched-tokens``, the
  prompts that were read first decode while the rest is read.
- **Pairs** (``bf16/int8``, ``int8/int4[skip-layers=0]``, k16v8, …) are a backend of the package k16v8, as are ``int8``
  and ``int4`` for both sides, with a scale for each token and head; ``fp8_e4m3`` for both is vLLM's own.
- **Stored and written numbers are compared**: the keys and values of one layer for a few tokens, as sorted
  numbers, against the blocks of the cache.  Where they differ, or the backend does not list the format, none is
  claimed: on CPUs vLLM takes formats whose blocks its kernel misreads.  (Formats with scales of their own inside the
  blocks are not decoded; they rest on the backend's list.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fidelab.captures.requests import WAYS, Forced, Generate, Layerwise, Prefill, Request, Served, Timed
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.base import Answer, Engine, Shallow, Sink, Support, add_sequence, continuations
from fidelab.engines.cache_formats import CacheFormat
from fidelab.engines.checkpoint import loading_refusal
from fidelab.engines.dialect import Dialect
from fidelab.engines.harmless import Harmless
from fidelab.engines.k16v8 import K16V8, SIDES, check_pair, is_pair
from fidelab.engines.options import Value, with_default
from fidelab.engines.server_metrics import MetricNames
from fidelab.engines.storage import LayerFormats, Stored
from fidelab.engines.timing import time_prompts
from fidelab.engines.vllm import launch
from fidelab.engines.vllm.cache_formats import CACHE_FORMATS, format_of
from fidelab.engines.vllm.dialect import DIALECT, PAGE_NAMES
from fidelab.engines.vllm.harmless import HARMLESS
from fidelab.engines.vllm.model import SEQUENCES, VLLMModel, VLLMRequest
from fidelab.engines.vllm.options import ASYNC, CONTROLLED, OPTIONS, QUICK_START
from fidelab.engines.vllm.read_back import runtime_info
from fidelab.engines.vllm.ways import answer_served

# Without its cache: 39 s of compilation and graphs for 8B (vllm-project/vllm#11005), 145 s for 70B (#19824).
_COMPILE_SECONDS = 70.0
_FP8 = ("fp8", "fp8_e4m3")  # caches with which vLLM may quantize queries
_FLOAT8 = ("fp8_e4m3", "fp8_e5m2")  # that vLLM itself stores as Transformers rounds them
_PER_TOKEN_HEAD = ("int8", "int4")  # of the package k16v8
_SHARED_SIDES = ("bf16", "f16", "fp8_e4m3", "fp8_e4m3fnuz")
"""Formats that mean the same in fidelab and in pairs here; ``int4`` and ``int8`` have other scales."""


class VLLMEngine(Engine):
    """Engine adapter of vLLM."""

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    dialect: ClassVar[Dialect] = DIALECT
    server_metrics: ClassVar[MetricNames] = PAGE_NAMES
    layer_formats: ClassVar[LayerFormats] = LayerFormats(
        formats=(*_FLOAT8, *_PER_TOKEN_HEAD), per_token_head=_PER_TOKEN_HEAD
    )
    harmless: ClassVar[Mapping[str, Harmless]] = HARMLESS
    packages: ClassVar[tuple[str, ...]] = launch.PACKAGES
    native_kv: ClassVar[str] = "auto"
    separate_kv: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Value]] = OPTIONS
    cache_formats: ClassVar[Mapping[str, CacheFormat]] = CACHE_FORMATS
    controlled: ClassVar[Mapping[str, str]] = CONTROLLED
    samples: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {
        "tensor-parallel-size": "tp",
        "enable-chunked-prefill": "chunked-prefill",
        "kv-cache-memory-bytes": "kv-cache-memory",
    }
    preload: ClassVar[tuple[str, ...]] = ("fidelab.engines.vllm.preload",)
    imported_ahead: ClassVar[tuple[str, ...]] = preload
    start_seconds: ClassVar[float] = 20.0
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"layerwise", "served"}
    ways: ClassVar[frozenset[str]] = frozenset(WAYS)

    versions = staticmethod(launch.installed)
    serve_command = staticmethod(launch.serve_command)
    serve_variables = staticmethod(launch.serve_variables)
    speculation = staticmethod(launch.speculation_of)

    @classmethod
    def environment_command(cls, arm: Arm, host: str, port: int) -> list[str]:
        return ["python", "-m", "fidelab.engines.vllm.serve", *cls.serve_command(arm, host, port)[1:]]

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return tuple(dict.fromkeys((*launch.cache_formats(), *SIDES, K16V8)))

    @classmethod
    def stores(cls, kv: KVSpec, *, emulated: bool) -> Stored:
        return "plug-in" if is_pair(kv) else "native"

    @classmethod
    def holds_alike(cls, kv: KVSpec) -> str | None:
        native = kv.same and kv.k.name in _FLOAT8
        if not native and not (is_pair(kv) and {kv.k.name, kv.v.name} <= {*_SHARED_SIDES}):
            return None
        return K16V8 if kv.k.name in ("bf16", "f16") and kv.v.name == "fp8_e4m3" else kv.text

    cache_format = staticmethod(format_of)

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        check_pair(kv, cls.name)

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        launch.engine_options(arm)
        launch.check_speculation(arm)
        if reason := loading_refusal(arm, "vllm/transformers_utils"):
            return Support(False, reason)
        if arm.device == "cpu" and dict(arm.options).get(ASYNC) == "yes":
            return Support(False, f"vLLM schedules synchronously on CPUs: remove {ASYNC}")
        if reason := launch.quick_start_refusal(arm):
            return Support(False, reason)
        if dict(arm.options).get("force") == "yes":
            return Support(True)
        backend = launch.backend_for(arm)
        if backend.platform == "cpu" and arm.device != "cpu":
            return Support(False, "this vLLM runs only on the CPU: pass --device cpu")
        return Support(not backend.reason, backend.reason)

    @classmethod
    def quick_start(cls, arm: Arm) -> Arm | None:
        skipped = launch.compiles(arm) and not launch.COMPILES & {key for key, _ in arm.options}
        return with_default(arm, QUICK_START, "yes") if skipped else None

    @classmethod
    def compile_seconds(cls, arm: Arm) -> float:
        """Of a GPU, unless an option leaves compilation and graphs out."""
        left_out = {(name, "yes") for name in ("enforce-eager", QUICK_START)} & set(arm.options)
        return 0.0 if arm.device == "cpu" or left_out else _COMPILE_SECONDS

    @classmethod
    def as_deployed(cls, arm: Arm) -> Arm:
        """The arm without the quick start, which no server has."""
        return replace(arm, options=tuple(option for option in arm.options if option[0] != QUICK_START))

    @classmethod
    def native_query_options(cls, arm: Arm) -> Mapping[str, str]:
        """FlashInfer options without quantization of queries; vLLM's other FP8 kernels on CUDA also quantize them."""
        asked = {name for name, _ in arm.options if name.startswith("attention-")}
        if arm.device == "cpu" or asked or not arm.kv.same or arm.kv.k.options or arm.kv.k.name not in _FP8:
            return {}
        return {"attention-config": json.dumps({"backend": "FLASHINFER", "disable_flashinfer_q_quantization": True})}

    def open(self, arm: Arm) -> None:
        self._arm = arm
        launch.prepare(arm)
        self._backend = launch.backend_for(arm)
        kinds = self.foreseen
        self._model = VLLMModel(arm, self.mark, serving="served" in kinds, layerwise="layerwise" in kinds)
        requested, running = dict(arm.options).get("attention-backend"), self.runtime_info().attention
        if requested and running != requested:
            raise EngineError(f"attention-backend={requested} was asked for, vLLM runs {running}")

    def tokenize(self, text: str) -> list[int]:
        return self._model.tokenize(text)

    def answer(self, request: Request, sink: Sink) -> Answer:
        model, estimator = self._model, self.estimator_for(self._arm)
        return self.answer_by_kind(request, sink, estimator, model.head, model.speculation, model.drafts)

    def runtime_info(self) -> RuntimeInfo:
        return runtime_info(self._model, self._arm, self._backend, self.versions())

    def peak_device_bytes(self) -> int | None:
        """Peak device memory in bytes of a single rank, which runs in this process; several ranks run in others."""
        import torch

        return torch.cuda.max_memory_allocated() if self._counts_memory else None

    def reset_peak(self) -> None:
        import torch

        if self._counts_memory:
            torch.cuda.reset_peak_memory_stats()

    @property
    def _counts_memory(self) -> bool:
        import torch

        return torch.cuda.is_available() and dict(self._arm.options).get("tp", "1") == "1"

    def close(self) -> None:
        self._model.close()

    # ------------------------------------------------------------------------------------------ requests

    def _prefill(self, request: Prefill, sink: Sink) -> dict[str, Any]:
        shallow = Shallow(request)
        request = shallow.fit(self._model.longest)
        ends = (0, len(request.windows) - 1)
        for index, window in enumerate(request.windows):
            # Tokens after the last row cannot change it, and there must be room for the generated one.
            own = request.rows_of(index)
            picked = request.positions[index] if request.positions else ()
            prompt = window[: own[-1] + 1]
            alone = VLLMRequest(prompt, 1, own[0], own[-1], sentinel=index in ends, picked=picked)
            [(_, _, key)] = self._model.run([alone])
            sink.add(index, shallow.whole(index, self._model.rows(key, len(own))))
            sink.progress(len(window))
        return {"tokens": sum(map(len, request.windows)), **shallow.facts}

    def _served(self, request: Served, sink: Sink) -> dict[str, Any]:
        return answer_served(self._model, request, sink)

    def _timed(self, request: Timed, sink: Sink) -> dict[str, Any]:
        return time_prompts(request, sink, lambda group: self._model.tokens(group, 1 + request.n))

    def _layerwise(self, request: Layerwise, sink: Sink) -> dict[str, Any]:
        if request.tensors != "states":
            raise NotSupportedError("engine vllm captures hidden states only; use engine hf to capture q, k and v")
        windows = request.windows
        for index, states in enumerate(self._model.layer_states(windows, request.first, request.last)):
            sink.add(index, {"states": states})
            sink.progress(len(windows[index]))
        return {"tokens": sum(map(len, windows)), "layers": self._model.layers}

    def _generate(self, request: Generate, sink: Sink) -> dict[str, Any]:
        produced = 0
        requests = [
            VLLMRequest(
                prompt,
                request.max_tokens,
                len(prompt) - 1 if request.rows else None,
                sentinel=index == 0,
                sampling=request.sampling,
            )
            for index, prompt in enumerate(request.prompts)
        ]
        for index, ids, key in self._model.run(requests, request.batch, request.stop, sink.progress):
            failed = None
            nan = self._model.nan_at(key)
            if nan is not None and nan < len(ids):  # a step may have been scheduled beyond the end
                ids, failed = ids[:nan], f"NaN logits at generated token {nan}"
            rows = self._model.rows(key, len(ids)) if request.rows else {}
            add_sequence(sink, index, ids, rows if ids else {}, failed)
            produced += len(ids)
        return {"tokens": sum(map(len, request.prompts)) + produced, "generated": produced}

    def _forced(self, request: Forced, sink: Sink) -> dict[str, Any]:
        items = list(continuations(request, sink))
        requests = [
            VLLMRequest(prompt, len(given), len(prompt) - 1, sentinel=at == 0, force=given)
            for at, (_, prompt, given) in enumerate(items)
        ]
        for at, ids, key in self._model.run(requests, SEQUENCES, progress=sink.progress):
            index, _, continuation = items[at]
            if ids != list(continuation):
                raise EngineError("vLLM decoded other tokens than the given ones")
            add_sequence(sink, index, ids, self._model.rows(key, len(ids)))
        return {"tokens": sum(map(len, request.items())), "forced": "token by token through the cache"}
