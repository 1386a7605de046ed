"""llama.cpp in-process, through llama-cpp-python: GGUF models, every KV format of ggml, keys and values apart.

Engine options (``--engine-arg``): ``flash-attn`` (on, off, auto; default on: V formats of less than 16 bits need it),
``n-gpu-layers`` (all on a GPU, none on a CPU), ``n-batch`` and ``n-ubatch`` (tokens per call and per graph, 512),
placement as llama-server has it (:mod:`.placement`), and the numbers and switches of ``llama_context_params`` and
``llama_model_params`` by their names, with dashes.  A build without a GPU ignores ``n-gpu-layers``, as llama-server's.
``LLAMA_CPP_LIB_PATH`` names a folder with another build of libllama.

- **Estimator**: on CPUs ``hidden``, with states rounded as the live head rounds them (:mod:`.head`).  The state itself
  would give other logits (SmolLM2-135M, Q8_0 head: KL 6e-4) and hide an error that users of llama.cpp get.  On GPUs
  and on macOS, whose kernels round in other ways: ``logprobs``, float16 rows of the live logits.
- **The kernel path costs more than the format** on CPUs: f32 and f16 caches take another one than all others, so the
  control of a 16-bit reference is ``bf16``.
- **Rotation**: builds of 2026 multiply keys and values by a Hadamard matrix before they quantize them;
  ``LLAMA_ATTN_ROT_DISABLE=1`` turns that off.  The runtime info has ``k_rotated`` and ``v_rotated``.
- On CUDA, unequal formats of K and V need a build with all flash-attention kernels, else attention runs on the CPU;
  ``graph_splits`` shows it.
- The compute types are the file's: ``dtype`` is not passed on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array
from fidelab.captures.requests import WAYS, Forced, Generate, Prefill, Request, Served, Timed, Tokens
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.core.runtime import Observed, RuntimeInfo
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.core.serial import to_json
from fidelab.engines.base import Answer, Engine, Shallow, Sink, Support, add_sequence, continuations
from fidelab.engines.cache_formats import CacheFormat
from fidelab.engines.dialect import Dialect
from fidelab.engines.harmless import Harmless
from fidelab.engines.installed import versions_of
from fidelab.engines.llamacpp import placement, serve
from fidelab.engines.llamacpp.cache_formats import CACHE_FORMATS, format_of
from fidelab.engines.llamacpp.dialect import DIALECT, PAGE_NAMES
from fidelab.engines.llamacpp.flags import DRAFTS, FLAGS, flash_attention
from fidelab.engines.llamacpp.harmless import HARMLESS
from fidelab.engines.llamacpp.head import LlamaHead
from fidelab.engines.llamacpp.library import (
    GGML_TYPES,
    PAGE_CELLS,
    USE_LOGPROBS,
    Floats,
    GraphReads,
    LlamaContext,
    LlamaModel,
    SeenCache,
    States,
    build,
    can_offload,
    native,
    parameters,
)
from fidelab.engines.llamacpp.proof import proof, read_recurrent, read_state
from fidelab.engines.options import OWN_FLAGS, TOKENS, Value, is_count, one_of, switched
from fidelab.engines.sampling import draw
from fidelab.engines.served import Counted
from fidelab.engines.served import proof as proof_of_way
from fidelab.engines.server_metrics import MetricNames
from fidelab.engines.timing import time_prompts

_PACKAGE = "llama-cpp-python"
_LIBRARY = "LLAMA_CPP_LIB_PATH"
_UNROTATED = "LLAMA_ATTN_ROT_DISABLE"
_BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_ALL_LAYERS = 0x7FFFFFFF
_CHUNK = 512  # llama.cpp's own n_ubatch
_MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_TRIAL_TOKENS = 4  # tokens that a cache and the head are tried with
_SENTINEL_ROWS = 8
_ONE_GPU = 0  # LLAMA_SPLIT_MODE_NONE


_OPTIONS: Mapping[str, Value] = {
    "flash-attn": (lambda text: flash_attention(text) is not None, "on, off or auto"),
    "n-gpu-layers": (
        lambda text: text in ("-1", "0", "all", "auto") or is_count(text),
        "a number of layers, 0 for none, -1 for all",
    ),
    "n-batch": TOKENS,
    "n-ubatch": TOKENS,
    "estimator": one_of("hidden", "logprobs"),
    **placement.OPTIONS,
}
_CONTROLLED: Mapping[str, str] = {
    **dict.fromkeys(("type-k", "type-v", "cache-type-k", "cache-type-v"), "write kv=K/V"),
    "flash-attn-type": "write flash-attn=on or off",
    **dict.fromkeys(("n-threads", "n-threads-batch"), "pass --threads"),
    "n-ctx": "every request gets the room that it needs; a server's is serve.n-ctx",
    "n-seq-max": "every request gets the room that it needs",
    **dict.fromkeys(("embeddings", "pooling-type", "vocab-only", "ctx-type"), "captures are made of logits"),
    **dict.fromkeys(
        ("model-draft", "draft-max", "draft-min", "draft-p-min", "spec-type", "spec-ngram-size-n", "spec-ngram-size-m"),
        DRAFTS,
    ),
}


class LlamaCppEngine(Engine):
    """Engine adapter of llama.cpp."""

    name: ClassVar[str] = "llamacpp"
    title: ClassVar[str] = "llama.cpp"
    dialect: ClassVar[Dialect] = DIALECT
    server_metrics: ClassVar[MetricNames] = PAGE_NAMES
    harmless: ClassVar[Mapping[str, Harmless]] = HARMLESS
    own_flags: ClassVar[Mapping[str, str]] = {
        **OWN_FLAGS,
        **dict.fromkeys(("cache-type-k", "cache-type-v"), "write kv: K/V"),
        "threads": "pass --threads",
    }
    shortened_flags: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = (_PACKAGE,)
    checkpoint_format: ClassVar[str] = "gguf"
    own_program: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("fidelab.engines.llamacpp.library", "llama_cpp.llama_cpp")
    options: ClassVar[Mapping[str, Value]] = _OPTIONS
    controlled: ClassVar[Mapping[str, str]] = _CONTROLLED
    samples: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {
        **{flag.name: flag.option for flag in FLAGS if flag.option in _OPTIONS and flag.option != flag.name},
        "ngl": "n-gpu-layers",
    }
    cache_formats: ClassVar[Mapping[str, CacheFormat]] = CACHE_FORMATS
    native_kv: ClassVar[str] = "f16"  # llama.cpp's own default
    start_seconds: ClassVar[float] = 3.0
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"served"}
    ways: ClassVar[frozenset[str]] = frozenset(WAYS)

    @classmethod
    def versions(cls) -> dict[str, str]:
        """The bindings' version, the hash of the libraries of an own build, and whether rotation is disabled."""
        if not (versions := versions_of(_PACKAGE)):
            raise EngineError(f"engine llamacpp needs {_PACKAGE}: pip install 'fidelab[llamacpp]'")
        if folder := os.environ.get(_LIBRARY):
            versions["libllama"] = f"own build {_content(Path(folder))}"
        if os.environ.get(_UNROTATED):
            versions["rotation"] = f"{_UNROTATED}={os.environ[_UNROTATED]}"
        return versions

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return list(CACHE_FORMATS)

    cache_format = staticmethod(format_of)

    @classmethod
    def holds_alike(cls, kv: KVSpec) -> str | None:
        return kv.text if kv.k.name in _BLOCKS and kv.v.name in (*_BLOCKS, *serve.UNQUANTIZED) else None

    @classmethod
    def environment_command(cls, arm: Arm, host: str, port: int) -> list[str]:
        """Its own server where one is on PATH, else that of the bindings."""
        words = cls.serve_command(arm, host, port)
        program = shutil.which(words[0])
        return serve.python_server(arm, host, port) if program is None else [program, *words[1:]]

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        for side in (kv.k, kv.v):
            if side.options:
                raise UsageError(f"KV format {kv.label!r}: formats of engine llamacpp take no options")
        if kv.skipped:
            raise UsageError(f"KV format {kv.label!r}: llama.cpp has one format for all layers, no skip-layers")

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        parameters(arm.options, _OPTIONS, _CONTROLLED)
        if Path(arm.path).suffix != ".gguf":
            return Support(False, f"llama.cpp loads GGUF files and {arm.model} has none: pass the path of a .gguf file")
        if arm.dtype == "float32":
            return Support(False, "llama.cpp computes in the types of the file, not in float32: omit --dtype")
        if reason := serve.needs_flash(arm):
            return Support(False, reason)
        return Support(True)

    serve_command = staticmethod(serve.serve_command)

    @classmethod
    def control_for(cls, reference: KVSpec, native: str) -> str | None:
        # The nearest cache that takes the kernel path of the quantized ones.
        return "bf16" if {str(reference.k), str(reference.v)} <= {"f32", "f16"} else None

    @classmethod
    def lossless(cls, arm: Arm) -> bool | None:
        """Return whether the formats are lossless: llama.cpp computes in float32, or float16 with flash attention."""
        formats = {arm.kv.k.name, arm.kv.v.name}
        flash = serve.flash(arm)
        by_kernel = formats <= {"f32", "f16"}, formats == {"f32"}
        return by_kernel[flash == "off"] if flash != "auto" or by_kernel[0] == by_kernel[1] else None

    @classmethod
    def estimator_for(cls, arm: Arm) -> Estimator:
        elsewhere = _on_gpu(arm) or sys.platform == "darwin"  # where Apple's BLAS rounds nothing
        default = Estimator.LOGPROBS if elsewhere else Estimator.HIDDEN
        return Estimator(dict(arm.options).get("estimator", default))

    def open(self, arm: Arm) -> None:
        self._arm = arm
        self._options = dict(arm.options)
        self._parameters = parameters(arm.options, _OPTIONS, _CONTROLLED)
        self._seen: SeenCache | None = None
        self._chunk = int(self._options.get("n-batch", _CHUNK))
        self._gpu = _on_gpu(arm)
        self._head: LlamaHead | None = None
        self._tap: States | None = None  # of the contexts that answer a request
        try:
            offload = can_offload()
        except (ImportError, OSError, RuntimeError) as error:
            text = " ".join(str(error).split())[:200]
            remedy = f"look at {_LIBRARY}" if os.environ.get(_LIBRARY) else "pip install 'fidelab[llamacpp]'"
            raise EngineError(f"{_PACKAGE} does not load ({text}): {remedy}") from error
        self.mark("import")
        self._reads = GraphReads()
        self._read_layers = 0  # whose content was compared
        self._proof = proof((arm.kv.k.name, arm.kv.v.name), None, None, (False, False), self._reads.kinds)
        self._ignores_layers = self._gpu and not offload and arm.device == "cpu"  # as llama-server without a GPU
        self._gpu = self._gpu and not self._ignores_layers
        if self._gpu and not offload:
            raise NotSupportedError(
                f"this build of {_PACKAGE} runs only on the CPU: pass --device cpu or install another"
            )
        placed = placement.Placement(native(), self._options)
        self._model = LlamaModel(arm.path, **self._model_fields(placed))
        self.mark("weights")
        if not self._model.decodes:
            raise NotSupportedError(f"{arm.model} is not a decoder-only model")
        self._try_out()

    def tokenize(self, text: str) -> list[int]:
        return self._model.tokenize(text)

    def answer(self, request: Request, sink: Sink) -> Answer:
        head = self._replayed(request)
        self._tap = None if head is None else States(head.tensor)
        estimator = Estimator.LOGPROBS if head is None else Estimator.HIDDEN
        return self.answer_by_kind(request, sink, estimator, head)

    def runtime_info(self) -> RuntimeInfo:
        seen, about = self._seen, build()
        assert seen is not None  # since :meth:`_try_out`
        return RuntimeInfo(
            versions={**self.versions(), "llama.cpp": about["llama.cpp"], "python": platform.python_version()},
            device=f"cpu ({platform.machine()})" if self._arm.device == "cpu" else self._arm.device,
            attention=seen.attention,
            k_format=seen.k,
            v_format=seen.v,
            k_dtype=seen.k,
            v_dtype=seen.v,
            cache_bytes_per_token=self._bytes,
            expected_bytes_per_token=self._expected,
            kv_layers=seen.layers,
            state_bytes_per_sequence=sum(size for _, size in self._states) or None,
            sequence=self._sequence(seen),
            more={
                **({"state_dtypes": sorted({kind for kind, _ in self._states})} if self._states else {}),
                "proof": self._proof,
                "observed": to_json(Observed((self._read_layers, seen.layers or 0))),
                "threads": self._arm.threads,
                "system": about["system"],
                "k_rotated": seen.rotated_k,
                "v_rotated": seen.rotated_v,
                "graph_splits": seen.splits,
                **({"n_gpu_layers": "ignored: this build has no GPU"} if self._ignores_layers else {}),
            },
        )

    def _sequence(self, seen: SeenCache) -> SequenceBytes | None:
        """Bytes of a sequence on llama-server, whose layers with a window hold it and a step, in whole pages of cells.

        The library's own default, with which captures are made, holds all tokens there: values are the same.
        """
        if not self._bytes or not seen.windowed or switched(self._options.get("swa-full", "no")):
            return None
        cells = self._model.window + int(self._options.get("n-ubatch", _CHUNK))
        stores = (
            StoreBytes(seen.windowed * self._bytes, window=-(-cells // PAGE_CELLS) * PAGE_CELLS),
            StoreBytes((1 - seen.windowed) * self._bytes),
        )
        return SequenceBytes(stores, float(sum(size for _, size in self._states)))

    def close(self) -> None:
        self._model.close()

    # ------------------------------------------------------------------------------------------- model

    def _model_fields(self, placed: placement.Placement) -> dict[str, Any]:
        """Fields of ``llama_model_params``: where the weights go, and what the arm sets besides."""
        layers = self._options.get("n-gpu-layers", "auto")
        number_of_layers = _ALL_LAYERS if layers in ("auto", "all", "-1") else int(layers)
        _, colon, number = self._arm.device.partition(":")
        device = {"main_gpu": int(number), "split_mode": _ONE_GPU} if colon else {}
        if colon and "main_gpu" in placed.fields:
            raise UsageError(f"engine llamacpp: --device {self._arm.device} chooses the GPU: leave main-gpu out")
        fields = {"n_gpu_layers": number_of_layers if self._gpu else 0}
        return {**fields, **device, **self._parameters["model"], **placed.fields}

    def _context(
        self,
        cells: int,
        sequences: int = 1,
        k: str | None = None,
        v: str | None = None,
        states: States | None = None,
        **more: Any,
    ) -> LlamaContext:
        """Create a context of this arm; ``k`` and ``v`` override the arm's formats; ``more``: further fields."""
        return self._model.context(
            cells,
            sequences,
            states=states or self._tap,
            type_k=GGML_TYPES[k or self._arm.kv.k.name][0],
            type_v=GGML_TYPES[v or self._arm.kv.v.name][0],
            flash_attn_type={"auto": -1, "off": 0, "on": 1}[serve.flash(self._arm)],
            n_batch=self._chunk,
            n_ubatch=min(self._chunk, int(self._options.get("n-ubatch", _CHUNK))),
            n_threads=self._arm.threads,
            n_threads_batch=self._arm.threads,
            **{"offload_kqv": self._gpu, "op_offload": self._gpu, **self._parameters["context"], **more},
        )

    def _try_out(self) -> None:
        """Decode a few tokens: refuse arms that cannot run, measure the bytes per token, and read the cache back.

        Raises:
            NotSupportedError: If the model keeps no keys and values.
        """
        self._bytes: float | None = None
        self._expected: float | None = None
        formats = self._arm.kv.k.name, self._arm.kv.v.name
        self._states: list[tuple[str, int]] = []
        size, state = self._growth(*formats)
        if self._seen is None or not self._seen.layers:
            raise NotSupportedError(f"{self._arm.model} keeps no keys and values in llama.cpp")
        # Three caches of unquantized types give the values per token and the other bytes of a cell.
        try:
            (plain, _), (keys, _), (both, exact) = (
                self._growth(k, v) for k, v in (("f16", "f16"), ("f32", "f16"), ("f32", "f32"))
            )
        except EngineError:  # this build lacks one of them: no proof by bytes, but by name
            return
        first, original = (read_state(x, _TRIAL_TOKENS, self._seen.layers) for x in (state, exact))
        self._read_layers = int(None not in (first, original))
        self._proof = proof(
            formats, first, original, (bool(self._seen.rotated_k), bool(self._seen.rotated_v)), self._reads.kinds
        )
        n_keys, n_values = (keys - plain) / 2, (both - keys) / 2
        beside = plain - 2 * (n_keys + n_values)
        self._bytes = size - beside
        self._expected = float(
            CACHE_FORMATS[self._arm.kv.k.name].k.head_bytes(round(n_keys), 2)
            + CACHE_FORMATS[self._arm.kv.v.name].v.head_bytes(round(n_values), 2)
        )

    def _growth(self, k: str, v: str) -> tuple[int, bytes]:
        """Bytes that one more token adds to the saved state of a sequence, and that state."""
        is_first = (k, v) == (self._arm.kv.k.name, self._arm.kv.v.name) and self._seen is None
        watched = {"cb_eval": self._reads.callback} if is_first else {}
        with self._context(_TRIAL_TOKENS, k=k, v=v, **watched) as context:
            sizes = []
            for token in range(_TRIAL_TOKENS):
                context.step({0: token})
                sizes.append(context.stored_bytes())
            if (k, v) == (self._arm.kv.k.name, self._arm.kv.v.name):
                self._seen = context.seen
            state, layers = context.state(), self._model.recurrent_layers
            if layers and (found := read_recurrent(context.state(recurrent=True), layers)):
                self._states, length = found
                state = state[:-length]
            return sizes[-1] - sizes[-2], state

    # ------------------------------------------------------------------------------------------ requests

    def _replayed(self, request: Request) -> LlamaHead | None:
        """Head that scoring multiplies the states of this request with; ``None`` if rows are not states."""
        if self.estimator_for(self._arm) is not Estimator.HIDDEN or isinstance(request, Timed):
            return None
        if isinstance(request, Generate) and not request.rows:
            return None
        if self._head is None:
            if self._reads.head is None:
                raise EngineError(f"llama.cpp's graph has no product that gives the logits: {USE_LOGPROBS}")
            weight, tensor = self._reads.head
            tap = States(tensor)
            tap.stop = False
            with self._context(_TRIAL_TOKENS, states=tap) as context:
                live = np.concatenate(list(context.feed(range(_TRIAL_TOKENS), range(_TRIAL_TOKENS))))
                self._head = LlamaHead(self._model, Path(self._arm.path), weight, tensor, tap.take(_TRIAL_TOKENS), live)
        return self._head

    def _rows(self, context: LlamaContext, blocks: Iterable[Floats], *, check: bool = False) -> dict[str, Array]:
        """Rows that a capture keeps of the context's next rows; ``check``: replay the last of them."""
        if self._head is None or context.states is None:
            return {"logprobs": np.concatenate(list(map(_logprobs, blocks)))}
        context.states.stop = not check
        rows = np.concatenate(list(blocks))
        if not check:
            return {"hidden": self._head.rounded(rows)}
        inputs = self._head.rounded(context.states.take(len(rows)))
        self._head.check(inputs[-_SENTINEL_ROWS:], rows[-_SENTINEL_ROWS:])
        return {"hidden": inputs}

    def _prefill(self, request: Prefill, sink: Sink) -> dict[str, Any]:
        shallow = Shallow(request)
        with self._largest_context(shallow) as context:
            request = shallow.request
            self._seen = context.seen
            for index, window in enumerate(request.windows):
                context.clear()
                own = request.rows_of(index)
                rows = context.feed(window, own if isinstance(own, range) else frozenset(own))
                sink.add(index, shallow.whole(index, self._rows(context, rows, check=index == 0)))
                sink.progress(len(window))
        return {"tokens": sum(map(len, request.windows)), **shallow.facts}

    def _largest_context(self, shallow: Shallow) -> LlamaContext:
        """Create a context for the longest window; windows are cut as long as there is no memory for it."""
        while True:
            try:
                return self._context(max(map(len, shallow.request.windows)))
            except EngineError:
                if not shallow.halve():
                    raise

    def _generate(self, request: Generate, sink: Sink) -> dict[str, Any]:
        produced = 0
        for batch in _batches(request, self._chunk):
            cells = max(len(request.prompts[i]) for i in batch) + request.max_tokens
            with self._context(cells, len(batch)) as context:
                self._seen = context.seen
                if context.states is not None:
                    context.states.stop = False
                answers = self._greedy(request, batch, context, sink)
                name = "logprobs" if context.states is None else "hidden"
                for index, (ids, rows, failed) in zip(batch, answers, strict=True):
                    add_sequence(sink, index, ids, {name: np.stack(rows)} if rows else {}, failed)
                    produced += len(ids)
        return {"tokens": sum(map(len, request.prompts)) + produced, "generated": produced}

    def _forced(self, request: Forced, sink: Sink) -> dict[str, Any]:
        cells = max(map(len, request.items()), default=1)
        with self._context(cells) as context:
            self._seen = context.seen
            for index, prompt, continuation in continuations(request, sink):
                context.clear()
                blocks = _continued(context, prompt, continuation, sink)
                add_sequence(sink, index, continuation, self._rows(context, blocks, check=index == 0))
        return {"tokens": sum(map(len, request.items()))}

    def _timed(self, request: Timed, sink: Sink) -> dict[str, Any]:
        together = min(request.batch, len(request.prompts))
        if together > (most := min(self._chunk, _MAX_SEQUENCES)):
            raise NotSupportedError(f"llama.cpp answers at most {most} prompts together here, not {together}")
        cells = max(map(len, request.prompts), default=1) + request.n
        with self._context(cells, max(1, together)) as context:
            self._seen = context.seen

            def decode(group: Sequence[Tokens]) -> Iterator[list[int]]:
                context.clear()
                return _endless(context, group)

            return time_prompts(request, sink, decode)

    def _served(self, request: Served, sink: Sink) -> dict[str, Any]:
        """Windows in one of the ways in which llama.cpp's server computes them, by the same calls of its library."""
        sequences = 1 + len(request.others) if request.way == "batch" else 1
        if sequences > _MAX_SEQUENCES:
            raise NotSupportedError(f"llama.cpp answers at most {_MAX_SEQUENCES} prompts together")
        other = len(request.others[0]) if request.way == "prefix-other" else 0
        with self._context(max(map(len, (*request.windows, *request.others))) + other, sequences) as context:
            self._seen = context.seen
            serving = _Serving(context, request)
            for index, window in enumerate(request.windows):
                sink.add(index, self._rows(context, serving.answer(window)))
                sink.progress(request.n_tokens // len(request.windows))
        return {"tokens": request.n_tokens, **proof_of_way(request, serving.counted, most=self._chunk)}

    def _greedy(
        self, request: Generate, batch: Sequence[int], context: LlamaContext, sink: Sink
    ) -> Iterator[tuple[list[int], list[NDArray[Any]], str | None]]:
        """Greedy or sampled decode of one batch, a sequence per prompt; yields (ids, rows [n][V or d], failure)."""
        sampling = request.sampling
        generated: list[list[int]] = [[] for _ in batch]
        rows: list[list[NDArray[Any]]] = [[] for _ in batch]
        failed: list[str | None] = [None] * len(batch)
        pending: dict[int, Floats] = {}  # live sequence → logits [V] of its next token
        kept: dict[int, NDArray[Any]] = {}  # live sequence → the row that a capture keeps
        for sequence, index in enumerate(batch):
            logits = _last(context, request.prompts[index], sequence)
            pending[sequence] = logits[0]
            sink.progress(len(request.prompts[index]))
            if request.rows:
                kept[sequence] = self._capture_rows(context, logits)[0]
        while True:
            for sequence, row in list(pending.items()):
                ids = generated[sequence]
                token = int(row.argmax())  # the first of equal logits; NaN wins
                if sampling is not None:
                    token = draw(row, sampling, request.prompts[batch[sequence]], len(ids))
                if np.isnan(row[token]):
                    failed[sequence] = f"NaN logits at generated token {len(ids)}"
                    del pending[sequence]
                    continue
                ids.append(token)
                if request.rows:
                    rows[sequence].append(kept[sequence])
                if token in request.stop or len(ids) == request.max_tokens:
                    del pending[sequence]
            if not pending:
                break
            tokens = {sequence: generated[sequence][-1] for sequence in pending}
            logits = context.step(tokens)
            pending = dict(zip(tokens, logits, strict=True))
            if request.rows:
                kept = dict(zip(tokens, self._capture_rows(context, logits), strict=True))
            sink.progress(len(pending), decoded=len(pending))
        yield from zip(generated, rows, failed, strict=True)

    def _capture_rows(self, context: LlamaContext, logits: Floats) -> NDArray[Any]:
        """Rows that a capture keeps, from the logits [n, V] of the context's last call."""
        if self._head is None or context.states is None:
            return _logprobs(logits)
        inputs = self._head.rounded(context.states.take(len(logits)))
        if not self._head.sentinels:
            self._head.check(inputs, logits)
        return inputs


class _Serving:
    """Answers windows in the serving mode of a request; ``counted``: counts of each window."""

    def __init__(self, context: LlamaContext, request: Served) -> None:
        self._context, self._request = context, request
        self.counted: list[Counted] = []

    def answer(self, window: Tokens) -> list[Floats]:
        """Logits [≤ 64, V] of the requested rows, in order."""
        request, size, context = self._request, self._request.size, self._context
        context.clear()
        kept = lost = 0
        match request.way:
            case "prefix" | "prefix-partial":
                _last(context, window)
                kept = context.keep_first(size)
            case "prefix-other":
                _last(context, (*window[:size], *request.others[0]))
                kept = context.keep_first(size)
            case "prefix-generated":
                _last(context, window[: size // 2])
                for token in window[size // 2 : size]:
                    context.step({0: token})
                kept = context.keep_first(size)
            case "evicted":
                _last(context, window)
                lost = len(window) - context.keep_first(0)
                for tokens in request.others:
                    _last(context, tokens)
                    context.keep_first(0)
        before = len(context.calls)
        rows = list(self._computed(window, kept))
        self.counted.append(Counted(context.calls[before:], kept, lost))
        return rows

    def _computed(self, window: Tokens, kept: int) -> Iterator[Floats]:
        """The rows of a window of which the first ``kept`` tokens are in the sequence."""
        request, size, context = self._request, self._request.size, self._context
        rows = range(request.first, request.last + 1)
        match request.way:
            case "batch":
                yield from context.mixed((window, *request.others), rows)
            case "chunked":
                yield from context.feed(window, rows, piece=size)
            case "decode":
                yield from context.feed(window[:size], rows)
                yield from context.feed(window[size:], range(rows.start - size, rows.stop - size), piece=1)
            case _:
                yield from context.feed(window[kept:], range(rows.start - kept, rows.stop - kept))


def _on_gpu(arm: Arm) -> bool:
    options = dict(arm.options)
    if options.get("devices") == "none":
        return False
    return arm.device != "cpu" or options.get("n-gpu-layers", "0") not in ("0", "auto")


def _batches(request: Generate, most: int) -> Iterator[list[int]]:
    """Prompts of similar length together: each sequence of a context has room for the longest."""
    order = sorted(range(len(request.prompts)), key=lambda i: (len(request.prompts[i]), i))
    size = min(request.batch, most, _MAX_SEQUENCES)
    yield from (order[start : start + size] for start in range(0, len(order), size))


def _last(context: LlamaContext, tokens: Sequence[int], sequence: int = 0) -> Floats:
    """Logits [1, V] after the last of the tokens, which are appended to the sequence."""
    return np.concatenate(list(context.feed(tokens, range(len(tokens) - 1, len(tokens)), sequence)))


def _continued(context: LlamaContext, prompt: Tokens, continuation: Sequence[int], sink: Sink) -> Iterator[Floats]:
    """Rows after a prompt and after each token of its continuation but the last, read one by one."""
    yield _last(context, prompt)
    sink.progress(len(prompt))
    for token in continuation[:-1]:
        yield context.step({0: token})
        sink.progress(1, decoded=1)


def _endless(context: LlamaContext, group: Sequence[Tokens]) -> Iterator[list[int]]:
    """Yield greedy tokens after the prompts without end, one call per step for all sequences."""
    logits = context.read(group)
    while True:
        tokens = logits.argmax(axis=-1).tolist()
        yield tokens
        logits = context.step(dict(enumerate(tokens)))


def _logprobs(logits: Floats) -> NDArray[np.float16]:
    """Log-softmax of rows [n, V], summed in float64, stored in float16.

    See docs/metrics/distributions.md#estimators.
    """
    top = logits.max(axis=-1, keepdims=True).astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite logits make NaN, which scoring counts
        total = np.exp(logits - top.astype(np.float32)).sum(axis=-1, keepdims=True, dtype=np.float64)
        return np.asarray(logits - (top + np.log(total)), dtype=np.float16)


def _content(folder: Path) -> str:
    """A short hash of the libraries in a folder.

    Raises:
        EngineError: If there are none.
    """
    files = sorted(
        path for path in folder.glob("*") if path.is_file() and path.name.startswith(("lib", "llama", "ggml"))
    )
    if not files:
        raise EngineError(f"{_LIBRARY}={folder} holds no library: name the folder of libllama, or unset it")
    sha = hashlib.sha256()
    for path in files:
        sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()[:12]
