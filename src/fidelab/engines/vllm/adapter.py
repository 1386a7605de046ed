"""vLLM in-process: its scheduler, kernels and cache; hidden states are read where the sampler reads them.

Engine options (``--engine-arg``): ``enforce-eager`` (yes, no; yes: compilation takes a minute), ``kv-cache-memory``
(bytes, or 512M, 4G; of each rank), ``max-model-len``, ``max-num-seqs`` (16), ``chunked-prefill`` (yes, no),
``max-num-batched-tokens``, ``tp`` (tensor parallel ranks), ``block-size``, ``attention-backend``, ``quantization``,
``gpu-memory-utilization``, ``estimator`` (hidden, logprobs), ``force`` (yes: run a cache format that the attention
backend says it cannot read).

- **States** are copied in the worker before each sampling (``capture.py``), also of prompts in chunks and with several
  ranks; prefix caching and asynchronous scheduling are off.
- **Windows run one at a time**, so that a window's states cannot depend on what else is in the batch; generated and
  forced sequences are batched.
- **Forced** continuations go through the decode path: each sampled token is replaced by the given one.
- **Windows as a server computes them** (``ways.py``): an arm that is asked so is launched with a prefix cache, which no
  other request reads.
- **Timed groups** are in the engine at once, scheduled as vLLM does: where one exceeds ``max-num-batched-tokens``, the
  prompts that were read first decode while the rest is read.
- **k16v8** is a backend of the package of that name: keys in the model's 16-bit type, values e4m3.
- **What is stored is compared with what was written**: the keys and values of one layer for a few tokens, as sorted
  numbers, against the blocks of the cache.  Where they differ, or the backend does not list the format, none is
  claimed: on CPUs vLLM takes formats whose blocks its kernel misreads.  (Formats with scales of their own inside the
  blocks are not decoded; they rest on the backend's list.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fidelab.captures.requests import WAYS, Forced, Generate, Prefill, Request, Served, Timed
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.engines.base import Answer, Engine, RuntimeInfo, Sink, Support, add_sequence, answer_with_head
from fidelab.engines.installed import unknown_architecture
from fidelab.engines.options import SHARE, TOKENS, YES_NO, Value, check_options, is_count, one_of
from fidelab.engines.timing import time_prompts
from fidelab.engines.vllm.launch import K16V8, PACKAGES, backend_for, cache_formats, installed, k16v8_of, prepare
from fidelab.engines.vllm.model import SEQUENCES, VLLMModel, VLLMRequest, size_in_bytes
from fidelab.engines.vllm.read_back import ran
from fidelab.engines.vllm.ways import answer_served
from fidelab.errors import EngineError, UsageError

__all__ = ["VLLMEngine"]

_DTYPES = ("float32", "bfloat16", "float16")


def _size(text: str) -> bool:
    try:
        return size_in_bytes(text) > 0
    except (ValueError, IndexError):
        return False


_OPTIONS: Mapping[str, Value] = {
    "enforce-eager": YES_NO,
    "kv-cache-memory": (_size, "a number of bytes, as 512M or 4G"),
    "max-model-len": TOKENS,
    "max-num-seqs": (is_count, "a number of sequences"),
    "chunked-prefill": YES_NO,
    "max-num-batched-tokens": TOKENS,
    "tp": (is_count, "a number of ranks"),
    "block-size": TOKENS,
    "attention-backend": (str.isidentifier, "the name of one of vLLM's attention backends"),
    "quantization": (bool, "the name of one of vLLM's quantization methods"),
    "gpu-memory-utilization": SHARE,
    "estimator": one_of("hidden", "logprobs"),
    "force": YES_NO,
}


class VLLMEngine(Engine):
    """vLLM behind the engine contract."""

    name: ClassVar[str] = "vllm"
    packages: ClassVar[tuple[str, ...]] = PACKAGES
    native_kv: ClassVar[str] = "auto"
    separate_kv: ClassVar[bool] = False
    start_seconds: ClassVar[float] = 20.0
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"served"}
    ways: ClassVar[frozenset[str]] = frozenset(WAYS)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed()

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return (*cache_formats(), K16V8)

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        is_k16v8 = k16v8_of(kv) is not None
        if (kv.k.options and not is_k16v8) or kv.skip_layers:
            raise UsageError(f"KV format {kv.label!r}: formats of engine vllm take no options")

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        check_options(cls.name, arm.options, _OPTIONS)
        if arm.dtype not in _DTYPES:
            return Support(False, f"dtype {arm.dtype!r} is not one of {', '.join(_DTYPES)}")
        if unknown := unknown_architecture(arm, "vllm/transformers_utils"):
            return Support(False, unknown)
        if dict(arm.options).get("force") == "yes":
            return Support(True)
        backend = backend_for(arm)
        if backend.platform == "cpu" and arm.device != "cpu":
            return Support(False, "this vLLM runs on the CPU alone: pass --device cpu")
        return Support(backend.ok, backend.reason)

    def open(self, arm: Arm) -> None:
        self._arm = arm
        self._hidden = dict(arm.options).get("estimator") != "logprobs"
        prepare(arm)
        self._backend = backend_for(arm)
        self._model = VLLMModel(arm, self.mark, serving="served" in self.foreseen)
        requested, running = dict(arm.options).get("attention-backend"), self.ran().attention
        if requested and running != requested:
            raise EngineError(f"attention-backend={requested} was asked for, vLLM runs {running}")

    def tokenize(self, text: str) -> list[int]:
        return self._model.tokenize(text)

    def answer(self, request: Request, sink: Sink) -> Answer:
        began = time.monotonic()
        head = self._model.head
        if head is not None:
            head.sentinels.clear()
        match request:
            case Prefill():
                facts = self._prefill(request, sink)
            case Generate():
                facts = self._generate(request, sink)
            case Forced():
                facts = self._forced(request, sink)
            case Served():
                facts = answer_served(self._model, request, sink)
            case Timed():
                facts = time_prompts(request, sink, lambda group: self._model.tokens(group, 1 + request.n))
        estimator = Estimator.HIDDEN if self._hidden else Estimator.LOGPROBS
        return answer_with_head(request, estimator, facts, began, head)

    def ran(self) -> RuntimeInfo:
        return ran(self._model, self._arm, self._backend, self.versions())

    def peak_device_bytes(self) -> int | None:
        """As the contract says, for a single rank, which runs in this process; several run in others."""
        import torch

        here = torch.cuda.is_available() and dict(self._arm.options).get("tp", "1") == "1"
        return torch.cuda.max_memory_allocated() if here else None

    def close(self) -> None:
        self._model.close()

    # ------------------------------------------------------------------------------------------ requests

    def _prefill(self, request: Prefill, sink: Sink) -> dict[str, Any]:
        ends = (0, len(request.windows) - 1)
        for index, window in enumerate(request.windows):
            # Tokens behind the last row cannot change it, and there must be room for the one that is generated.
            alone = VLLMRequest(window[: request.last + 1], 1, request.first, request.last, sentinel=index in ends)
            [(_, _, key)] = self._model.run([alone])
            sink.add(index, self._model.rows(key, request.n_rows))
            sink.progress(len(window))
        return {"tokens": sum(map(len, request.windows))}

    def _generate(self, request: Generate, sink: Sink) -> dict[str, Any]:
        produced = 0
        requests = [
            VLLMRequest(prompt, request.max_tokens, len(prompt) - 1 if request.rows else None, sentinel=index == 0)
            for index, prompt in enumerate(request.prompts)
        ]
        for index, ids, key in self._model.run(requests, request.batch, request.stop, sink.progress):
            failed = None
            if (nan := self._model.nan_at(key)) is not None:
                ids, failed = ids[:nan], f"NaN logits at generated token {nan}"
            rows = self._model.rows(key, len(ids)) if request.rows else {}
            add_sequence(sink, index, ids, rows if ids else {}, failed)
            produced += len(ids)
        return {"tokens": sum(map(len, request.prompts)) + produced, "generated": produced}

    def _forced(self, request: Forced, sink: Sink) -> dict[str, Any]:
        places: list[int] = []
        requests: list[VLLMRequest] = []
        for index, (prompt, continuation) in enumerate(zip(request.prompts, request.continuations, strict=True)):
            if not continuation:
                add_sequence(sink, index, (), failed="empty continuation")
                continue
            n = len(continuation)
            requests.append(VLLMRequest(prompt, n, len(prompt) - 1, sentinel=not requests, force=continuation))
            places.append(index)
        for at, ids, key in self._model.run(requests, SEQUENCES, progress=sink.progress):
            index, continuation = places[at], request.continuations[places[at]]
            if ids != list(continuation):
                raise EngineError("vLLM decoded other tokens than the given ones")
            add_sequence(sink, index, ids, self._model.rows(key, len(ids)))
        return {"tokens": sum(map(len, request.items())), "forced": "token by token through the cache"}
