"""One loaded Transformers model: forwards through an encoded cache, and the rows that are kept.

Imported only when a model is opened, since it imports torch and Transformers.
"""

from __future__ import annotations

import ctypes
import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers
from torch import Tensor

from fidelab.captures.container import Array
from fidelab.core import Arm, cache_parameter
from fidelab.core.errors import EngineError, FidelabError, NotSupportedError
from fidelab.engines import k16v8
from fidelab.engines.base import one_line
from fidelab.engines.hf import exceptions
from fidelab.engines.hf import kernels as hf_kernels
from fidelab.engines.hf.cache import EncodedCache
from fidelab.engines.hf.cache_formats import quantized_of
from fidelab.engines.hf.head import USE_LOGPROBS, ReplayedHead, to_array
from fidelab.engines.hf.loading import load_key, turn_key
from fidelab.engines.hf.proof import Proof
from fidelab.engines.hf.quantized import TransformersCache
from fidelab.engines.hf.quantized_proof import QuantizedProof
from fidelab.engines.hf.structure import auto_class, checksums
from fidelab.engines.hf.weights import WEIGHTS, round_weights
from fidelab.engines.options import trusts_code
from fidelab.formats import create

if TYPE_CHECKING:
    from fidelab.engines.hf.paged import ArmCache
    from fidelab.formats.base import Format

    HFCache = EncodedCache | TransformersCache | ArmCache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_CAUSAL = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # largest relative change of logits by rounding

_SUPPORTED_ATTENTION = {
    None,
    "eager",
    "sdpa",
    "flex_attention",
}  # attention that a config may choose: of torch and Transformers alone


def _attentions(config: Any) -> set[str | None]:
    """The attention that a config and its parts name.  ``owner/name`` would fetch and run a kernel of a hub."""
    parts = filter(None, (getattr(config, key, None) for key in config.sub_configs))
    return {config._attn_implementation}.union(*map(_attentions, parts))


def _leave_attention_open(config: Any) -> None:
    """Let Transformers choose the attention of a config and its parts, and ignore their own settings."""
    for part in filter(None, (getattr(config, key, None) for key in config.sub_configs)):
        _leave_attention_open(part)
    config._attn_implementation = None


def keep_freed_memory() -> None:
    """Have the C library of this process use the memory of freed tensors again.

    By default glibc returns each block above 32 MiB to the kernel, which then clears every page of the next one
    (``benchmarks/batch_prefill.py``).  Other C libraries are left as they are.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_M_MMAP_THRESHOLD, 1 << 30):  # refused by versions before 2.35; the second call alone would harm there
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


@dataclass(frozen=True)
class Loaded:
    """A model as ``from_pretrained`` gives it, on its device.

    ``report``: what it says of missing tensors.  ``checksums``: of the weights, if they were computed for all.
    ``attention``: the implementation that it was loaded with.
    """

    tokenizer: Any
    model: Any
    report: Mapping[str, Any]
    attention: str
    checksums: Mapping[str, int] | None = None


_shared: dict[str, Loaded] = {}
"""The model that was loaded in the process from which this one was forked, or for the arm before, by its key."""

_keeps = False  # the next model that is loaded, for arms to come


def keep() -> None:
    """Keep the model that is loaded next in this process, until one with another key is."""
    global _keeps
    _keeps = True


def share(arm: Arm | None, loading: Mapping[str, Any] | None = None) -> None:
    """Load an arm's model for workers that are forked from this process, with one thread; ``None``: release it.

    Threads of a pool would not live on in a fork, so that none are started.
    """
    _shared.clear()
    if arm is None or (key := load_key(arm)) is None:
        return
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = load(arm, _attention_of(arm, excepted=False), loading or {}, lambda phase: None)
    _shared[key] = replace(loaded, checksums=checksums(loaded.model))


def _attention_of(arm: Arm, *, excepted: bool) -> str | None:
    """The attention that Transformers is asked for; ``None``: its own choice."""
    if excepted:
        return exceptions.ATTENTION
    attention = dict(arm.options).get("attention")
    return None if attention == hf_kernels.THEIRS else attention


def load(arm: Arm, attn: str | None, loading: Mapping[str, Any], mark: Callable[[str], None]) -> Loaded:
    """Load an arm's tokenizer and model as Transformers does.  ``loading``: further arguments of ``from_pretrained``.

    Raises:
        EngineError: If it has an encoder, too. Exceptions of Transformers are left as they are.
    """
    trusted = trusts_code(arm)
    config = transformers.AutoConfig.from_pretrained(arm.path, trust_remote_code=trusted)
    if config.is_encoder_decoder:
        raise EngineError(
            f"encoder-decoder models are not supported: this is {config.model_type}, fidelab runs decoder-only models"
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(arm.path, trust_remote_code=trusted)
    auto, mapped = auto_class(config)
    mapped.get(type(config), None)  # imports the model's code, so that this is not timed as loading weights
    mark("import")
    opened: dict[str, Any] = {"attn_implementation": attn} if attn else {}
    opened |= loading
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("quant_method") == "compressed-tensors":
        # Dense from the start, as they would be after the first forward; and where a checkpoint does not say
        # that it is compressed, Transformers would leave its layers at random numbers.
        opened.setdefault("quantization_config", transformers.CompressedTensorsConfig(dequantize=True))
    elsewhere = arm.device == "cpu" or {"device_map", "tp_plan"} & opened.keys()
    if not elsewhere and find_spec("accelerate") is not None:
        opened["device_map"] = {"": arm.device}  # without a copy of the weights on the host
    if not _attentions(config) <= _SUPPORTED_ATTENTION:
        _leave_attention_open(config)
        opened["config"] = config
    model, report = auto.from_pretrained(
        arm.path,
        trust_remote_code=trusted,
        dtype=getattr(torch, arm.dtype),
        use_safetensors=True,
        output_loading_info=True,
        **opened,
    )
    placed = {"device_map", "tp_plan"} & opened.keys()
    model = model if placed else model.to(arm.device)
    return Loaded(tokenizer, model, report, _attention_now(model))


def _attention_now(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


Keep: TypeAlias = "int | Sequence[int]"
"""Rows of a forward whose logits are computed: a number of last ones, or their positions."""


class HFModel:
    """An arm's model, loaded and tried out.  ``mark`` is called at the end of each phase of opening.

    ``loading``: further arguments of ``from_pretrained``.  ``seed``: seed from which the proof draws layers until a
    request brings its own.

    Attributes:
        module: Transformers' model; ``config``: the configuration of its text part.
        cache: the last cache that was made.
        head: set for estimator hidden.
        padding: whether sequences of a batch may be padded on the left.
        quantized: Transformers' own quantized cache, if that is what the configuration has.
        paged: whether k16v8's kernels compute attention.
        kernels_refused: why they do not, on a GPU where no attention was requested.
        proof: evidence for the formats.
        rounded: weights rounded by the option ``weights``, for the record.
        shared: whether the model was loaded before this process was forked, once for several configurations.

    Raises:
        EngineError: If it cannot be loaded, or its structure is not as expected.
        NotSupportedError: If it has no keys and values that can be encoded.
    """

    def __init__(
        self, arm: Arm, mark: Callable[[str], None], loading: Mapping[str, Any] | None = None, seed: int = 0
    ) -> None:
        self._arm = arm
        self._seed = seed
        self._loading = loading or {}
        self._mark = mark
        self._options = dict(arm.options)
        torch.set_num_threads(arm.threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.quantized = quantized_of(arm.kv)
        self._sides: tuple[Format, Format] | None = None
        if self.quantized is None:
            self._sides = create(arm.kv.k), create(arm.kv.v)
        self._excepted = self._sides is not None and any(side.has_exceptions for side in self._sides)
        self.proof = self._new_proof()
        self._states: list[Tensor] = []  # input of the LM head in one forward
        self._keep: Keep = 1
        self.cache: HFCache | None = None
        self.head: ReplayedHead | None = None
        self.kernels_refused: str | None = None
        self._hook: Any = None
        self._load()
        if arm.device == "cpu":  # after loading, whose copies are better returned
            keep_freed_memory()
        self._takes = inspect.signature(self.module.forward).parameters
        self._cache_parameter = cache_parameter(self.module)
        if "attention" in self._options or not arm.device.startswith("cuda") or not self._kernels_attend():
            self._try_out()

    def _new_proof(self) -> Proof:
        if self.quantized is not None:
            return QuantizedProof(self._arm.kv, self.quantized, self._seed)
        assert self._sides is not None
        return Proof(self._arm.kv, *self._sides, self._seed)

    def _load(self) -> None:
        """Load tokenizer and model; exceptions of Transformers become one line."""
        attn = _attention_of(self._arm, excepted=self._excepted)
        if attn == exceptions.ATTENTION:
            exceptions.register_attention()
        if attn == hf_kernels.NAME:
            if reason := k16v8.missing():
                raise NotSupportedError(f"attention={attn} {reason}")
            from fidelab.engines.hf.paged import register_attention

            register_attention()
        try:
            key = (turn_key if _keeps else load_key)(self._arm)
            shared = _shared.get(key or "")
            if shared is None and _keeps:
                _shared.clear()  # before the next one is loaded
            loaded = shared or load(self._arm, attn, self._loading, self._mark)
            model, report, self.tokenizer = loaded.model, loaded.report, loaded.tokenizer
            if shared is None and _keeps and key is not None:
                loaded = _shared[key] = replace(loaded, checksums=checksums(model))
            elif shared is not None and _attention_now(model) != loaded.attention:  # of the arm before
                model.set_attn_implementation(loaded.attention)
            self.module, self.shared, self._checksums = model.eval(), shared is not None, loaded.checksums
            self.config = model.config.get_text_config(decoder=True)
            self.rounded = round_weights(model, self.config, text) if (text := self._options.get(WEIGHTS)) else {}
            self._mark("weights")
            self._lm_head = model.get_output_embeddings()
            if self._lm_head is not None:
                self._hook = self._lm_head.register_forward_pre_hook(self._at_head)
        except FidelabError:
            raise
        except Exception as error:
            raise EngineError(f"Transformers cannot load {self._arm.model}: {one_line(error)}") from error
        unfilled = sorted(report["missing_keys"])
        if unfilled:
            raise EngineError(f"{len(unfilled)} parameters were filled by no checkpoint tensor, first {unfilled[0]}")
        if attn and self.config._attn_implementation != attn:
            raise EngineError(f"attention={attn} was asked for, Transformers runs {self.config._attn_implementation}")

    def close(self) -> None:
        """Leave the model as it was loaded, and release the memory of caches."""
        if self._hook is not None:
            self._hook.remove()
        self.cache = self.head = None
        self._states.clear()
        if self._arm.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def remember_weights(self, *, changed: bool) -> None:
        """Note the weights as they are now, for :meth:`check_weights`; ``changed``: since they were loaded."""
        if self._checksums is None or changed:
            self._checksums = checksums(self.module)

    def check_weights(self) -> None:
        """Refuse what a model answered whose weights have changed since they were noted.

        Raises:
            EngineError: The message names the format and the first weight that changed.
        """
        now, known = checksums(self.module), self._checksums or {}
        if changed := [name for name, total in known.items() if now.get(name) != total]:
            raise EngineError(
                f"{self._arm.kv.label} changed the model's weights while it ran: {len(changed)} of {len(known)}, "
                f"first {changed[0]}; its answers are not those of this model"
            )

    @property
    def paged(self) -> bool:
        """Whether the kernels of package k16v8 compute attention, over pages."""
        return bool(self.config._attn_implementation == hf_kernels.NAME)

    @property
    def attention(self) -> str:
        """Attention implementation for the record, with the names of k16v8's kernels if those run."""
        kernels = getattr(self.cache, "kernels", ())  # of pages alone
        return " ".join((self.config._attn_implementation, *kernels))

    @property
    def dequant(self) -> str:
        """Where codes are converted: ``fused`` in k16v8's kernels, ``unpack`` before attention."""
        return self._options.get("dequant", "fused") if self.paged else "unpack"

    def _kernels_attend(self) -> bool:
        """Switch to k16v8's kernels where they support this arm and model, else keep Transformers' attention."""
        default_attention = self.config._attn_implementation
        try:
            if reason := hf_kernels.refusal(self._arm):
                raise NotSupportedError(reason)
            from fidelab.engines.hf.paged import register_attention

            register_attention()
            self.module.set_attn_implementation(hf_kernels.NAME)
            if not self.paged:
                raise NotSupportedError("Transformers cannot exchange this model's attention")
            self._try_out()
        except EngineError as error:
            self.kernels_refused = str(error)
            self.module.set_attn_implementation(default_attention)
        return self.paged

    def _try_out(self) -> None:
        """Run two small forwards, so that an unusable spec or model is refused before any request is answered."""
        kind = self.config.model_type
        # Of this attention, whatever was tried before.
        self.proof = self._new_proof()
        self.proof.begin(self._seed, observing=False)  # but for the forward below
        try:
            cache = self.new_cache()
            with self.proof.watch(cache):
                logits, states = self.forward(self.tensor([[0, 1]]), cache, keep=2)
            if self.quantized is not None:  # the first forward reads nothing quantized
                with self.proof.watch(cache):
                    self.forward(self.tensor([[2]]), cache)
            if self.hidden:
                self.head = ReplayedHead(self._lm_head, self.config, self._arm.dtype, states[0], logits[0])
            plain = self.new_cache() if self.paged else None  # k16v8's attention needs a cache
            twins = self.forward(self.tensor([[0, 1], [0, 2]]), plain, keep=2)[0][:, 0].float()
            self._poison()
        except EngineError:
            raise
        except Exception as error:
            how = f"attention={hf_kernels.NAME}" if self.paged else "an encoded cache"
            raise EngineError(f"{kind} does not run with {how}: {one_line(error)}") from error
        if (twins[0] - twins[1]).norm() > _CAUSAL[self._arm.dtype] * twins[0].norm():
            raise EngineError(f"{kind} is not a decoder: a token changes the distribution of the one before it")
        if not (self.cache and self.cache.kv_layers):
            raise NotSupportedError(
                f"{type(self.module).__name__} keeps no keys and values in the cache that it gets as "
                f"{self._cache_parameter!r}"
            )
        if self.cache.storage_dtypes() is None:
            raise NotSupportedError("skip-layers leaves no layer to encode")
        if self.paged and self.cache.bytes_per_token() != self.cache.expected_bytes_per_token():
            raise NotSupportedError(
                f"the kernels hold {self.cache.bytes_per_token():g} bytes per token, {self._arm.kv.label} is "
                f"{self.cache.expected_bytes_per_token():g}: integers take group= the size of a head"
            )
        # Left padding would enter a recurrent state, a model that takes no positions would count it, so would sinks.
        # Groups and scales of Transformers' caches go over all sequences of a batch.
        padded = not (self.cache.has_recurrent_layers or self._excepted or self.quantized)
        self.padding = "position_ids" in self._takes and padded

    def _poison(self) -> None:
        """Check that NaN from the cache reaches the logits, for attention whose inputs cannot be compared."""
        for layer, side in self.proof.unseen():
            cache = self.new_cache()
            with self.proof.poisoned(cache, layer, side):
                logits, _ = self.forward(self.tensor([[0, 1]]), cache)
            if not logits.isnan().any():
                self.proof.refute("received", f"what the cache hands over in layer {layer} does not reach the logits")

    # ----------------------------------------------------------------------------------------- forward

    def new_cache(self, mask: Tensor | None = None) -> HFCache:
        """Create a fresh cache.  The previous one is released first, so that only one is held."""
        self.cache = None
        if self.quantized is not None:
            self.cache = TransformersCache(self.module.config, self.quantized)
            return self.cache
        assert self._sides is not None
        if self.paged:
            from fidelab.engines.hf.paged import ArmCache

            with k16v8.translated_errors():
                self.cache = ArmCache(self.module.config, self._arm, *self._sides)
            return self.cache
        padding = None if mask is None else mask.bool()
        kv = self._arm.kv
        self.cache = EncodedCache(self.module.config, *self._sides, kv.skip_layers, padding, kv.skip_kinds)
        return self.cache

    def forward(
        self,
        ids: Tensor,
        cache: HFCache | None,
        *,
        mask: Tensor | None = None,
        keep: Keep = 1,
    ) -> tuple[Tensor, Tensor]:
        """Return live logits [batch, keep, V] of the last rows, and the state [batch, tokens, d] before the LM head.

        ``keep``: the number of last rows, or the positions of the rows in these tokens.
        Estimator logprobs needs no states and gets the logits twice.
        """
        self._states.clear()
        self._keep = keep
        extra: dict[str, Any] = {}
        if mask is not None:
            extra["attention_mask"] = mask
        if cache is not None and "position_ids" in self._takes:
            # Always, as generate() does: some hybrids that are left to themselves count from 0 in every forward.
            extra["position_ids"] = self._positions(ids, cache, mask)
        watched = nullcontext() if cache is None else self.proof.forward(cache, ids.shape[1])
        with k16v8.translated_errors() if self.paged else nullcontext(), watched:
            out = self.module(input_ids=ids, use_cache=cache is not None, **{self._cache_parameter: cache}, **extra)
        if isinstance(cache, EncodedCache):
            cache.check_bands()
        logits = out.logits[:, -keep:] if isinstance(keep, int) else out.logits
        if not self.hidden:
            return logits, logits
        if [x.shape[:2] for x in self._states] != [ids.shape]:
            shapes = [tuple(x.shape) for x in self._states]
            raise EngineError(f"the LM head saw states {shapes} for tokens {tuple(ids.shape)}: {USE_LOGPROBS}")
        return logits, self._states[0]

    def read(self, windows: Sequence[Sequence[int]], first: int, keep: Keep) -> tuple[Tensor, Tensor]:
        """Return live logits and states, as :meth:`forward` does, of windows of one length through a fresh cache.

        Rows from ``first`` on read what the cache holds.  Transformers' quantized caches are therefore read in several
        forwards: the first one reads its own keys and values, and later ones hold a tail each, so that every position
        reads what it would in decoding token by token.
        """
        ids, cache = self.tensor(windows), self.new_cache()
        pieces = [ids]
        if self.quantized is not None:
            begin = first or ids.shape[1] // 2
            later = torch.split(ids[:, begin:], self.quantized.tail or ids.shape[1], dim=1)
            pieces = [ids[:, :begin], *later] if begin else pieces
        if len(pieces) == 1 or not isinstance(keep, int):
            return self.forward(ids, cache, keep=min(keep, ids.shape[1]) if isinstance(keep, int) else keep)
        found = [self.forward(piece, cache, keep=min(keep, piece.shape[1])) for piece in pieces]
        logits, states = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return logits[:, -keep:], states

    def _at_head(self, _module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hook before the LM head: record its input, and pass on only the rows that are needed.

        ``logits_to_keep`` would not do: not all models take it, and some then drop rows of the state as well.
        """
        self._states.append(args[0])
        kept = args[0][:, -self._keep :] if isinstance(self._keep, int) else args[0][:, [*self._keep]]
        return (kept, *args[1:])

    def _positions(self, ids: Tensor, cache: HFCache, mask: Tensor | None) -> Tensor:
        new = ids.shape[1]
        if mask is not None:
            return (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
        past = cache.get_seq_length()
        return torch.arange(past, past + new, device=ids.device).expand(ids.shape)

    def tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Token ids [batch, tokens] on the device."""
        return torch.tensor(rows, dtype=torch.long, device=self._arm.device)

    # ----------------------------------------------------------------------------------- distributions

    @property
    def hidden(self) -> bool:
        """Whether states are kept instead of log-probabilities."""
        return self._options.get("estimator", "hidden") == "hidden"

    @property
    def sentinels(self) -> list[tuple[float, float]]:
        """Return the checks of the replay since the request began."""
        return self.head.sentinels if self.head else []

    def check_replay(self, states: Tensor, live: Tensor) -> None:
        """Check that the head, if any, replays live logits [n, V] from states [n, d].

        Raises:
            EngineError: If the replayed logits differ from the live ones.
        """
        if self.head is not None:
            self.head.check(states, live)

    def rows(self, states: Tensor, logits: Tensor) -> Tensor:
        """Return the stored form of rows, on the CPU: states in the compute type, or float16 log-probabilities."""
        if self.hidden:
            return states.clone()  # not a view, which would keep the states of a whole prompt
        return torch.log_softmax(logits.float(), dim=-1).to(torch.float16).cpu()

    def stored(self, rows: Tensor) -> Mapping[str, Array]:
        """Return rows [n, …] in the form that a sink takes."""
        return {"hidden" if self.hidden else "logprobs": to_array(rows)}

    def stacked(self, rows: Sequence[Tensor]) -> Mapping[str, Array]:
        """Return the stored form of single rows; empty without rows."""
        return self.stored(torch.stack(tuple(rows))) if rows else {}
