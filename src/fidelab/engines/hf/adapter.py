"""Transformers: any decoder-only model, on CPU or GPU, with the KV cache in any of fidelab's formats.

Engine options (``--engine-arg``): ``attention`` (sdpa, eager, …, ``transformers``: whichever that chooses itself,
``k16v8``: that package's kernels over pages), ``dequant`` (``fused``, the default with these kernels: they convert what
they read; ``unpack``: the cache is decoded to the compute type before attention, as with every other attention),
``estimator`` (hidden, logprobs), ``jitter`` (a seed: the last bit of some of layer 0's weights is flipped),
``weights`` (formats to which linear weights are rounded: see weights.py), and those of ``from_pretrained``:
``device-map``, ``max-memory``, ``quantization-config``, ``tp-plan`` and ``experts-implementation``.  By default,
attention is k16v8 on a GPU where it is installed, holds the formats of all arms that are compared and runs the model,
and Transformers' own choice elsewhere.  Transformers also chooses the content of the cache: models with latent
attention may pass a latent as keys and the rotary part as values.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fidelab.captures.requests import (
    Forced,
    Generate,
    Layerwise,
    Prefill,
    Request,
    RoundedCache,
    RoundedWeights,
    Timed,
    Tokens,
)
from fidelab.core import Arm, KVSpec, plain_json
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines import DEFAULT
from fidelab.engines.base import (
    Answer,
    Engine,
    Shallow,
    Sink,
    Support,
    add_sequence,
    continuations,
    device_name,
    dtype_name,
    one_line,
)
from fidelab.engines.cache_formats import CacheFormat
from fidelab.engines.checkpoint import loading_refusal, read_config, shape_of, skip_refusal
from fidelab.engines.harmless import Harmless
from fidelab.engines.hf import kernels as hf_kernels
from fidelab.engines.hf.cache_formats import (
    CACHE_FORMATS,
    format_of,
    missing_package,
    packages_of,
    quantized_of,
)
from fidelab.engines.hf.harmless import HARMLESS
from fidelab.engines.hf.loading import has_exceptions, load_key, turn_key
from fidelab.engines.hf.weights import WEIGHTS, check_weights
from fidelab.engines.installed import versions_of
from fidelab.engines.options import (
    NAME,
    OBJECT,
    TRUST,
    YES_NO,
    Value,
    is_count,
    one_of,
    other_options,
    trusts_code,
    unknown_option,
)
from fidelab.engines.storage import ANY_FORMAT, LayerFormats, Stored
from fidelab.engines.timing import time_prompts
from fidelab.formats import FORMATS, create

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.captures.container import Array
    from fidelab.engines.hf.model import Keep
    from fidelab.engines.hf.rounded import Rounding

_LOADING: Mapping[str, Value] = {  # passed on to ``from_pretrained``
    "device-map": (bool, "a device, auto, balanced …, or a JSON object of modules and devices"),
    "experts-implementation": NAME,
    "max-memory": OBJECT,
    "quantization-config": OBJECT,
    "tp-plan": one_of("auto"),
    TRUST: YES_NO,
}
_OPTIONS: Mapping[str, Value] = {
    "attention": NAME,
    "dequant": one_of(*hf_kernels.DEQUANT),
    "estimator": one_of("hidden", "logprobs"),
    "jitter": (is_count, "a seed: a whole number above 0"),
    WEIGHTS: (bool, "a format of weights"),
    **_LOADING,
}
_CONTROLLED: Mapping[str, str] = {
    **dict.fromkeys(("dtype", "torch-dtype"), "write dtype=…"),
    "cache-implementation": "write kv=…",
    **dict.fromkeys(("config", "revision", "subfolder", "variant"), "write model=NAME@REVISION, or a folder"),
    **dict.fromkeys(("use-cache", "use-safetensors", "weights-only"), "it is always on"),
}
# Those of Transformers, and the package k16v8's.
_ATTENTION = (
    *("eager", "sdpa", "flex_attention"),
    *(f"flash_attention_{n}" for n in (2, 3, 4)),
    *(hf_kernels.THEIRS, hf_kernels.NAME),
)
_UNQUANTIZED = ("f32", "f16", "bf16")  # formats of Transformers' own cache
_SENTINEL_ROWS = 8
_NO_MEMORY = "can't allocate memory"  # of the CPU, in torch's words
_BATCH_TOKENS = 8192  # of windows in one forward on a GPU: enough to fill one


def _loading(arm: Arm) -> dict[str, Any]:
    """The options of loading as arguments of ``from_pretrained``."""
    given = ((key, text) for key, text in arm.options if key in _LOADING and key != TRUST)
    return {key.replace("-", "_"): plain_json(text) if text.startswith("{") else text for key, text in given}


def _unreadable_quantization(arm: Arm) -> str | None:
    """Reason why Transformers cannot load a quantized checkpoint here; ``None`` if it can, or for unquantized ones."""
    config = read_config(arm.path).get("quantization_config")
    if not isinstance(config, dict):
        return None
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
        quantizer.validate_environment(device_map={"": arm.device}, weights_only=True)
    except Exception as error:
        method = config.get("quant_method", "of an unknown method")
        return (
            f"the checkpoint is quantized ({method}) and Transformers cannot load it here: "
            f"{one_line(error).rstrip('.')}; run it on engine vllm, or convert it: "
            "fidelab checkpoint convert --to safetensors"
        )
    return None


def _precision() -> dict[str, Any]:
    """Operations that torch allows a GPU to do in reduced precision, for the record."""
    import torch

    matmul = torch.backends.cuda.matmul
    return {
        "tf32_matmul": matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
    }


class HFEngine(Engine):
    """Engine adapter of Transformers."""

    name: ClassVar[str] = DEFAULT
    title: ClassVar[str] = "Transformers"
    needs: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    library: ClassVar[str] = "transformers"
    emulates: ClassVar[bool] = True
    cache_formats: ClassVar[Mapping[str, CacheFormat]] = CACHE_FORMATS
    layer_formats: ClassVar[LayerFormats] = ANY_FORMAT
    shares_attention: ClassVar[bool] = True
    dequantizes: ClassVar[frozenset[str]] = frozenset(("compressed-tensors",))
    harmless: ClassVar[Mapping[str, Harmless]] = HARMLESS
    examined: ClassVar[tuple[str, ...]] = ("transformers",)
    preload: ClassVar[tuple[str, ...]] = ("fidelab.engines.hf.model", "transformers.models.auto.modeling_auto")
    has_jitter: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Value]] = _OPTIONS
    controlled: ClassVar[Mapping[str, str]] = _CONTROLLED
    aliases: ClassVar[Mapping[str, str]] = {"attn-implementation": "attention"}
    samples: ClassVar[bool] = True
    start_seconds: ClassVar[float] = 5.0
    kinds: ClassVar[frozenset[str]] = Engine.kinds | {"layerwise", "roundedweights", "roundedcache"}

    @classmethod
    def versions(cls) -> dict[str, str]:
        versions = versions_of("transformers", "torch")
        if missing := [name for name in ("transformers", "torch") if name not in versions]:
            raise EngineError(f"engine hf needs {missing[0]}: pip install 'fidelab[hf]'")
        return versions

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return [*FORMATS.names(), *CACHE_FORMATS]

    cache_format = staticmethod(format_of)

    @classmethod
    def lossless(cls, arm: Arm) -> bool | None:
        return super().lossless(arm) if format_of(arm.kv) is None else False

    @classmethod
    def stores(cls, kv: KVSpec, *, emulated: bool) -> Stored:
        native = format_of(kv) is not None or (kv.same and kv.text in _UNQUANTIZED)
        return "native" if native else "emulated" if emulated else "plug-in"

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        if quantized_of(kv) is not None:
            return
        create(kv.k)
        create(kv.v)

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        for key, _ in other_options(cls.name, arm.options, _OPTIONS, _CONTROLLED):
            from transformers import GenerationConfig

            if key.replace("-", "_") in GenerationConfig().to_dict():
                raise UsageError(f"engine hf: {key} changes nothing here: fidelab decodes greedily without generate()")
            raise unknown_option(cls.name, key, _OPTIONS)
        if reason := missing_package(arm.kv) or loading_refusal(arm) or _shape_refusal(arm):
            return Support(False, reason)
        attention = dict(arm.options).get("attention", "eager")
        if attention not in _ATTENTION and "/" not in attention:  # owner/name is a kernel of a hub
            raise UsageError(f"engine hf: attention={attention!r} is not one of {', '.join(_ATTENTION)}")
        kept = [spec for spec in (arm.kv.k, arm.kv.v) if has_exceptions(spec)]
        if kept and attention not in ("eager", "sdpa", hf_kernels.THEIRS):
            return Support(False, f"{kept[0]} needs an attention of its own: leave out attention={attention}")
        shape = shape_of(arm.path)
        if reason := skip_refusal(arm.kv, shape.layers, shape.windowed):
            return Support(False, reason)
        if reason := _unreadable_quantization(arm):
            return Support(False, reason)
        if text := dict(arm.options).get(WEIGHTS):
            for key in ("quantization-config", "tp-plan"):
                if key in dict(arm.options):
                    raise UsageError(f"engine hf: weights={text} cannot be combined with {key}")
            check_weights(text, arm.path, trusted=trusts_code(arm))
        is_k16v8 = attention == hf_kernels.NAME
        reason = hf_kernels.dequant_refusal(arm) or (hf_kernels.refusal(arm) if is_k16v8 else None)
        return Support(reason is None, reason or "")

    @classmethod
    def control_for(cls, reference: KVSpec, native: str) -> str | None:
        # For a 32-bit reference, the model's own 16-bit cache.  A 16-bit cache in a 16-bit model has no nearer arm:
        # every other format takes the same attention path, so run-to-run noise is the only noise.
        return native if str(reference.k) == str(reference.v) == "f32" else None

    shared_load = staticmethod(load_key)

    @classmethod
    def load_shared(cls, arm: Arm | None) -> None:
        from fidelab.engines.hf.model import share

        share(arm, None if arm is None else _loading(arm))

    @classmethod
    def turn_load(cls, arm: Arm) -> str | None:
        return turn_key(arm) if arm.device.startswith("cuda") else None

    @classmethod
    def keep_load(cls) -> None:
        from fidelab.engines.hf.model import keep

        keep()

    def open(self, arm: Arm) -> None:
        from fidelab.engines.hf.model import HFModel

        self._arm = arm
        self._model = HFModel(arm, self.mark, _loading(arm), self.seed)
        self._jittered: int | None = None
        self._rounding: Rounding | None = None
        if seed := dict(arm.options).get("jitter"):
            from fidelab.engines.hf.layers import jitter
            from fidelab.engines.hf.structure import decoder_layers

            self._jittered = jitter(decoder_layers(self._model.module, self._model.config)[0], int(seed))
        self._model.remember_weights(changed=self._jittered is not None)

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, request: Request, sink: Sink) -> Answer:
        # A look takes time, and wants all layers.
        observing = not isinstance(request, Timed | RoundedWeights | RoundedCache)
        decodes = isinstance(request, Generate | Forced)
        if self._model.quantized is not None:
            if isinstance(request, Layerwise | RoundedWeights | RoundedCache):
                raise NotSupportedError(
                    f"{self._arm.kv.label} is not compared layer by layer: one forward of Transformers' QuantizedCache "
                    "reads nothing quantized"
                )
            decodes = True  # windows are read in several forwards, too
        self._model.proof.begin(self.seed, observing=observing, decodes=decodes)
        answer = self.answer_by_kind(request, sink, self.estimator_for(self._arm), self._model.head)
        self._model.proof.end(self._model.cache)
        if not isinstance(request, Timed):
            self._model.check_weights()
        return answer

    def close(self) -> None:
        self._model.close()

    def runtime_info(self) -> RuntimeInfo:
        import torch

        from fidelab.engines.hf.cache import EncodedCache, state_tensors
        from fidelab.engines.hf.quantized import TransformersCache

        cache = self._model.cache
        dtypes = cache.storage_dtypes() if cache else None
        states = state_tensors(cache) if cache else []
        packed = cache.packed_bytes_per_token() if cache else None
        return RuntimeInfo(
            versions={
                **self.versions(),
                **versions_of(*packages_of(self._arm.kv)),
                "python": platform.python_version(),
            },
            device=device_name(self._arm.device),
            attention=self._model.attention,
            k_format=self._model.proof.observed_format(0),
            v_format=self._model.proof.observed_format(1),
            k_dtype=dtypes[0] if dtypes else None,
            v_dtype=dtypes[1] if dtypes else None,
            cache_bytes_per_token=cache.bytes_per_token() if cache else None,
            expected_bytes_per_token=cache.expected_bytes_per_token() if cache else None,
            kv_layers=cache.kv_layers if cache else None,
            layers_without_kv=len(cache.layers) - cache.kv_layers if cache else None,
            state_bytes_per_sequence=sum(state.nbytes / len(state) for state in states) or None,
            sequence=cache.sequence_bytes() if isinstance(cache, EncodedCache | TransformersCache) else None,
            more={
                **self._model.proof.record(),
                "compute_dtype": self._arm.dtype,
                "loaded": "once for several configurations" if self._model.shared else "for this configuration",
                "dequant": self._model.dequant,
                "threads": torch.get_num_threads(),
                "skipped_layers": list(self._arm.kv.skipped),
                "k_options": dict(self._arm.kv.k.options),
                "v_options": dict(self._arm.kv.v.options),
                **({} if packed is None else {"emulated": True, "packed_bytes_per_token": packed}),
                **({"quantized_cache": cache.tensors()} if isinstance(cache, TransformersCache) else {}),
                **self._model.rounded,
                **({} if self._jittered is None else {"jittered_weights": self._jittered}),
                **({"state_dtypes": sorted({dtype_name(state.dtype) for state in states})} if states else {}),
                **({"kernels_refused": refused} if (refused := self._model.kernels_refused) else {}),
                **(_precision() if self._arm.device.startswith("cuda") else {}),
            },
        )

    def peak_device_bytes(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated(self._arm.device) if self._arm.device.startswith("cuda") else None

    def reset_peak(self) -> None:
        import torch

        if self._arm.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self._arm.device)

    # ------------------------------------------------------------------------------------------ requests

    def _prefill(self, request: Prefill, sink: Sink) -> dict[str, Any]:
        import torch

        # Not by the memory that is free now: how many windows share a forward changes last bits, so all arms do alike.
        together = self._on_gpu and self._model.hidden and self._model.quantized is None
        tokens = _BATCH_TOKENS if together else 1
        start, windows = 0, request.windows
        shallow = Shallow(request)
        while start < len(windows):
            most = windows[start : start + max(1, tokens // len(windows[start]))]
            batch = most[: next((n for n, window in enumerate(most) if len(window) != len(most[0])), len(most))]
            try:
                for index, arrays in self._prefill_batch(shallow.request, start, batch):
                    sink.add(index, shallow.whole(index, arrays))
                    sink.progress(len(windows[index]))
            except RuntimeError as error:
                if not (isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY in str(error)):
                    raise
                if len(batch) > 1:
                    tokens = 1
                elif not shallow.halve():
                    raise
                windows = shallow.request.windows
            else:
                start += len(batch)
        return {"tokens": sum(map(len, windows)), **shallow.facts}

    @property
    def _on_gpu(self) -> bool:
        """Whether batches pay off: one window leaves a GPU idle, while a CPU computes several no faster."""
        return self._arm.device != "cpu"

    def _prefill_batch(
        self, request: Prefill, start: int, windows: Sequence[Tokens]
    ) -> list[tuple[int, Mapping[str, Array]]]:
        """Return the rows of windows of one length from one forward; the first window has index ``start``."""
        indices = range(start, start + len(windows))
        ends = {0, len(request.windows) - 1}.intersection(indices) if self._model.hidden else set()
        first = min(request.rows_of(index)[0] for index in indices)
        keep: Keep = _SENTINEL_ROWS if ends else 1
        if not self._model.hidden:
            keep = len(windows[0]) - first
            if request.positions and self._model.quantized is None:  # logits of a whole long window fill the memory
                keep = request.rows_of(start)
        logits, states = self._model.read(windows, first, keep)
        found = []
        for row, index in enumerate(indices):
            own = request.rows_of(index)
            if index in ends and isinstance(keep, int):
                self._model.check_replay(states[row, -keep:], logits[row])
            if self._model.hidden:
                rows = self._model.rows(states[row, [*own]], logits[row])
            else:
                taken = logits[row] if keep is own else logits[row, [position - first for position in own]]
                rows = self._model.rows(taken, taken)
            found.append((index, self._model.stored(rows)))
        return found

    def _generate(self, request: Generate, sink: Sink) -> dict[str, Any]:
        from fidelab.engines.hf.generate import answer_generate

        return answer_generate(self._model, request, sink)

    def _forced(self, request: Forced, sink: Sink) -> dict[str, Any]:
        for index, prompt, continuation in continuations(request, sink):
            cache = self._model.new_cache()
            rows: list[Tensor] = []
            for step in (prompt, *([token] for token in continuation[:-1])):
                logits, states = self._model.forward(self._model.tensor([step]), cache)
                if not self._model.sentinels:
                    self._model.check_replay(states[0, -1:], logits[0])
                rows.append(self._model.rows(states[0, -1], logits[0, -1]))
                sink.progress(len(step), decoded=len(step) if len(rows) > 1 else 0)
            add_sequence(sink, index, continuation, self._model.stacked(rows))
        return {"tokens": sum(map(len, request.items()))}

    def _layerwise(self, request: Layerwise, sink: Sink) -> dict[str, Any]:
        from fidelab.engines.hf.layers import answer_layerwise

        return answer_layerwise(self._model, request, sink)

    def _roundedweights(self, request: RoundedWeights | RoundedCache, sink: Sink) -> dict[str, Any]:
        from fidelab.engines.hf.rounded import Rounding

        self._rounding = self._rounding or Rounding(self._model)
        return self._rounding.answer(request, sink)

    _roundedcache = _roundedweights

    def _timed(self, request: Timed, sink: Sink) -> dict[str, Any]:
        return time_prompts(request, sink, self._decode)

    def _decode(self, group: Sequence[Tokens]) -> Iterator[list[list[int]]]:
        """Greedy tokens of all prompts, one forward each, without end; yielding them waits for the device."""
        cache = self._model.new_cache()

        def tokens() -> Iterator[list[list[int]]]:
            ids = self._model.tensor(group)
            while True:
                logits, _ = self._model.forward(ids, cache)
                ids = logits[:, -1].argmax(dim=-1, keepdim=True)
                yield ids.tolist()

        return tokens()


def _shape_refusal(arm: Arm) -> str | None:
    """Reason why a format's rotation or groups do not fit the model's heads, as far as its config has them."""
    if (found := quantized_of(arm.kv)) is not None:
        shape = shape_of(arm.path)
        if shape.windowed:
            return "Transformers' QuantizedCache holds full attention only, and this model has sliding windows"
        return found.refusal(shape.values if shape.latent else shape.values // 2) or None
    sides = [spec for spec in (arm.kv.k, arm.kv.v) if {"rotate", "axis"} & dict(spec.options).keys()]
    head_dim = shape_of(arm.path).head_dim if sides else None
    if head_dim is None:
        return None
    try:
        for spec in sides:
            create(spec).token_bytes(head_dim)
    except NotSupportedError as error:
        return str(error)
    return None
