"""Transformers: any decoder-only model, on CPU or GPU, with the KV cache in any of our formats.

Engine options (``--engine-arg``): ``attention`` (sdpa, eager, …; Transformers' own choice unless told),
``estimator`` (hidden, logprobs).  What goes into the cache is Transformers' choice too: models with latent
attention may hand it a latent as keys and the rotary part as values.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fidelab.captures.container import Array
from fidelab.core import Arm, Estimator, Forced, Generate, KVSpec, Prefill, Probe
from fidelab.engines.base import Answer, Engine, Ran, Sink, Verdict
from fidelab.errors import EngineError, NotSupportedError, UsageError
from fidelab.formats import FORMATS, create

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.engines.hf_head import ReplayedHead
    from fidelab.plugins.transformers_cache import EncodedCache

_OPTIONS = {"attention": None, "estimator": ("hidden", "logprobs")}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_SENTINEL_ROWS = 8
_SHARED_PREFIX = 128  # tokens from which on it pays to compute once what all prompts begin with
_CAUSAL = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # what rounding may change logits by, relative


@dataclass(frozen=True)
class _Shared:
    """The cache of what all prompts of a probe begin with."""

    tokens: int
    cache: EncodedCache


class HFEngine(Engine):
    """Transformers behind the engine contract."""

    name: ClassVar[str] = "hf"

    @classmethod
    def versions(cls) -> dict[str, str]:
        found = {}
        for package in ("transformers", "torch"):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                raise EngineError(f"engine hf needs {package}: pip install fidelab") from None
        return found

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return FORMATS.names()

    @classmethod
    def check_kv(cls, kv: KVSpec) -> None:
        create(kv.k)
        create(kv.v)

    @classmethod
    def supports(cls, arm: Arm) -> Verdict:
        for key, value in arm.options:
            if key not in _OPTIONS:
                raise UsageError(f"engine hf has no option {key!r}; it has: {', '.join(_OPTIONS)}")
            allowed = _OPTIONS[key]
            if allowed and value not in allowed:
                raise UsageError(f"engine hf: {key}={value!r} is not one of {', '.join(allowed)}")
        if arm.dtype not in _DTYPES:
            return Verdict(False, f"dtype {arm.dtype!r} is not one of {', '.join(_DTYPES)}")
        return Verdict(True)

    @classmethod
    def control_for(cls, reference: KVSpec, native: str) -> str | None:
        # A 32-bit reference: the model's own 16-bit cache.  A 16-bit cache in a 16-bit model has no nearer arm:
        # every other format takes the same attention path here, so the floor is the only noise there is.
        return native if str(reference.k) == str(reference.v) == "f32" else None

    def open(self, arm: Arm) -> None:
        import torch
        import transformers

        self._arm = arm
        self._options = dict(arm.options)
        self._torch = torch
        torch.set_num_threads(arm.threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._k, self._v = create(arm.kv.k), create(arm.kv.v)
        self._states: list[Tensor] = []  # what entered the LM head in one forward
        self._keep = 1
        self._cache: EncodedCache | None = None
        self._head: ReplayedHead | None = None  # estimator hidden
        self._load()
        self._takes = inspect.signature(self._model.forward).parameters
        self._try_out()

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def answer(self, probe: Probe, sink: Sink) -> Answer:
        began = time.monotonic()
        if self._head is not None:
            self._head.sentinels.clear()
        match probe:
            case Prefill():
                facts = self._prefill(probe, sink)
            case Generate():
                facts = self._generate(probe, sink)
            case Forced():
                facts = self._forced(probe, sink)
            case _:
                raise NotSupportedError(f"engine hf does not answer {probe.kind} probes yet")
        if self._sentinels:
            cosines, divergences = zip(*self._sentinels, strict=True)
            facts |= {"sentinel_cosine": min(cosines), "sentinel_kl": max(divergences)}
        facts["seconds"] = time.monotonic() - began
        wanted = not isinstance(probe, Generate) or probe.rows
        head = self._head.fields() if self._head and wanted else {}
        return Answer(Estimator(self._options.get("estimator", "hidden")), **head, facts=facts)

    def ran(self) -> Ran:
        import torch

        cache = self._cache
        dtypes = cache.storage_dtypes() if cache else None
        packed = cache.packed_bytes_per_token() if cache else None
        return Ran(
            versions={**self.versions(), "python": _python_version()},
            device=_device_name(self._arm.device),
            attention=self._config._attn_implementation,
            k_format=str(self._arm.kv.k) if dtypes else None,
            v_format=str(self._arm.kv.v) if dtypes else None,
            k_dtype=dtypes[0] if dtypes else None,
            v_dtype=dtypes[1] if dtypes else None,
            cache_bytes_per_token=cache.bytes_per_token() if cache else None,
            expected_bytes_per_token=cache.expected_bytes_per_token() if cache else None,
            kv_layers=cache.kv_layers if cache else None,
            layers_without_kv=len(cache.layers) - cache.kv_layers if cache else None,
            more={
                "compute_dtype": self._arm.dtype,
                "threads": torch.get_num_threads(),
                "skipped_layers": list(self._arm.kv.skip_layers),
                "k_options": dict(self._arm.kv.k.options),
                "v_options": dict(self._arm.kv.v.options),
                **({} if packed is None else {"emulated": True, "packed_bytes_per_token": packed}),
            },
        )

    # ------------------------------------------------------------------------------------------- model

    def _load(self) -> None:
        """Tokenizer and model, as the checkpoint has them; whatever Transformers raises becomes one line."""
        import transformers

        path, asked = self._arm.path, self._options.get("attention")
        try:
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            if config.is_encoder_decoder:
                raise EngineError(
                    f"{config.model_type} is an encoder-decoder model; engine hf runs decoder-only models"
                )
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
            model, report = auto.from_pretrained(
                path,
                trust_remote_code=False,
                dtype=getattr(self._torch, _DTYPES[self._arm.dtype]),
                use_safetensors=True,
                output_loading_info=True,
                **({"attn_implementation": asked} if asked else {}),
            )
            self._model = model.to(self._arm.device).eval()
            self._lm_head = model.get_output_embeddings()
            if self._lm_head is not None:
                self._lm_head.register_forward_pre_hook(self._at_head)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"Transformers cannot load {self._arm.model}: {_one_line(error)}") from error
        self._config = model.config.get_text_config(decoder=True)
        unfilled = sorted(report["missing_keys"])
        if unfilled:
            raise EngineError(f"{len(unfilled)} parameters were filled by no checkpoint tensor, first {unfilled[0]}")
        if asked and self._config._attn_implementation != asked:
            raise EngineError(f"attention={asked} was asked for, Transformers runs {self._config._attn_implementation}")

    def _try_out(self) -> None:
        """Two small forwards: an impossible spec, or a model that is not what we take it for, is refused now and
        not in the middle of a probe."""
        from fidelab.engines.hf_head import ReplayedHead

        kind = self._config.model_type
        try:
            logits, states = self._forward(self._tensor([[0, 1]]), self._new_cache(), keep=2)
            if self._hidden:
                self._head = ReplayedHead(self._lm_head, self._config, self._arm.dtype, states[0], logits[0])
            twins = self._forward(self._tensor([[0, 1], [0, 2]]), None, keep=2)[0][:, 0].float()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{kind} does not run with an encoded cache: {_one_line(error)}") from error
        if (twins[0] - twins[1]).norm() > _CAUSAL[self._arm.dtype] * twins[0].norm():
            raise EngineError(f"{kind} is not a decoder: a token changes the distribution of the one before it")
        if not (self._cache and self._cache.kv_layers):
            raise NotSupportedError(f"{kind} keeps no keys and values in the cache it is given")
        if not self._cache.encoded:
            raise NotSupportedError("skip-layers leaves no layer to encode")
        # Left padding would enter a recurrent state, and a model that takes no positions would count it.
        self._padding = "position_ids" in self._takes and not self._cache.has_recurrent_layers

    # ------------------------------------------------------------------------------------------ probes

    def _prefill(self, probe: Prefill, sink: Sink) -> dict[str, Any]:
        for index, window in enumerate(probe.windows):
            sentinel = self._hidden and index in (0, len(probe.windows) - 1)
            keep = _SENTINEL_ROWS if sentinel else 1
            if not self._hidden:
                keep = len(window) - probe.first
            logits, states = self._forward(self._tensor([window]), self._new_cache(), keep=keep)
            if sentinel:
                self._check_replay(states[0, -keep:], logits[0])
            rows = self._rows(states[0, probe.first : probe.last + 1], logits[0, : probe.n_rows])
            sink.add(index, self._stored(rows))
            sink.progress(len(window))
        return {"tokens": sum(map(len, probe.windows))}

    def _generate(self, probe: Generate, sink: Sink) -> dict[str, Any]:
        produced = 0
        shared = self._shared_prefix(probe.prompts, sink)
        for batch in self._batches(probe):
            for index, (ids, rows, failed) in zip(batch, self._greedy(probe, batch, shared, sink), strict=True):
                sink.add(index, {"ids": np.asarray(ids, dtype=np.int32), **rows})
                produced += len(ids)
                if failed or not ids:
                    sink.fail(index, failed or "empty output")
        tokens = sum(map(len, probe.prompts)) + produced
        return {"tokens": tokens, "generated": produced, "shared_prefix": shared.tokens if shared else 0}

    def _forced(self, probe: Forced, sink: Sink) -> dict[str, Any]:
        for index, (prompt, continuation) in enumerate(zip(probe.prompts, probe.continuations, strict=True)):
            if not continuation:
                sink.add(index, {"ids": np.zeros(0, dtype=np.int32)})
                sink.fail(index, "empty continuation")
                continue
            cache = self._new_cache()
            rows: list[Tensor] = []
            for step in (prompt, *([token] for token in continuation[:-1])):
                logits, states = self._forward(self._tensor([step]), cache)
                if not self._sentinels:
                    self._check_replay(states[0, -1:], logits[0])
                rows.append(self._rows(states[0, -1], logits[0, -1]))
                sink.progress(len(step))
            sink.add(index, {"ids": np.asarray(continuation, dtype=np.int32), **self._stacked(rows)})
        return {"tokens": sum(map(len, probe.items()))}

    def _greedy(
        self, probe: Generate, batch: Sequence[int], shared: _Shared | None, sink: Sink
    ) -> Iterator[tuple[list[int], Mapping[str, Array], str | None]]:
        """Greedy decode of one left-padded batch; yields (ids, rows, failure) in batch order."""
        prompts = [probe.prompts[i] for i in batch]
        longest = max(map(len, prompts))
        head = shared.tokens if shared else 0
        ids = self._tensor([[0] * (longest - len(p)) + list(p[head:]) for p in prompts])
        mask = None
        if any(len(p) < longest for p in prompts):
            mask = self._tensor([[1] * head + [0] * (longest - len(p)) + [1] * (len(p) - head) for p in prompts])
        cache = self._new_cache(mask) if shared is None else shared.cache.repeated(len(batch))
        self._cache = cache
        generated: list[list[int]] = [[] for _ in batch]
        failed: list[str | None] = [None] * len(batch)
        steps: list[Tensor] = []  # [batch, width] each
        live = list(range(len(batch)))
        processed = sum(map(len, prompts)) - head * len(prompts)
        for _ in range(probe.max_tokens):
            if not live:
                break
            logits, states = self._forward(ids, cache, mask=mask)
            if not self._sentinels:
                self._check_replay(states[:, -1], logits[:, -1])
            if probe.rows:
                steps.append(self._rows(states[:, -1], logits[:, -1]))
            sink.progress(processed)
            best = logits[:, -1].max(dim=-1)  # the first of equals; NaN wins
            scores, tokens = best.values.tolist(), best.indices.tolist()
            for row in live:
                if math.isnan(scores[row]):
                    failed[row] = f"NaN logits at generated token {len(generated[row])}"
                else:
                    generated[row].append(tokens[row])
            live = [row for row in live if not failed[row] and tokens[row] not in probe.stop]
            processed = len(live)
            ids = best.indices[:, None]
            if mask is not None:
                mask = self._torch.cat((mask, self._torch.ones_like(ids)), dim=1)
        for row, tokens in enumerate(generated):
            yield tokens, self._stacked([step[row] for step in steps[: len(tokens)]]), failed[row]

    def _shared_prefix(self, prompts: Sequence[tuple[int, ...]], sink: Sink) -> _Shared | None:
        """What all prompts begin with, computed once; ``None`` where that is short, or would change the answers.

        It would with sliding windows (the padding behind it takes places there) and with scales fitted to what is
        written first.
        """
        first, last = min(prompts), max(prompts)  # all others begin with what these two have in common
        same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, prompts)))
        tokens = min(same, min(map(len, prompts)) - 1)
        if len(prompts) < 2 or tokens < _SHARED_PREFIX or not self._padding:
            return None
        cache = self._new_cache()
        if cache.has_sliding_layers:
            return None
        self._forward(self._tensor([first[:tokens]]), cache)
        if cache.has_fitted_scales:
            return None
        sink.progress(tokens * len(prompts))
        return _Shared(tokens, cache)

    def _batches(self, probe: Generate) -> Iterator[list[int]]:
        """Prompts of similar length together; of equal length where the model must not be padded."""
        order = sorted(range(len(probe.prompts)), key=lambda i: (len(probe.prompts[i]), i))
        batch: list[int] = []
        for index in order:
            if batch:
                shortest, this = len(probe.prompts[batch[0]]), len(probe.prompts[index])
                limit = shortest + max(32, shortest // 2) if self._padding else shortest
                if len(batch) >= probe.batch or this > limit:
                    yield batch
                    batch = []
            batch.append(index)
        if batch:
            yield batch

    # ----------------------------------------------------------------------------------------- forward

    def _new_cache(self, mask: Tensor | None = None) -> EncodedCache:
        """A fresh cache; the one before goes first, so that only one is ever held."""
        from fidelab.plugins.transformers_cache import EncodedCache

        self._cache = None
        padding = None if mask is None else mask.bool()
        self._cache = EncodedCache(self._model.config, self._k, self._v, self._arm.kv.skip_layers, padding)
        return self._cache

    def _forward(
        self, ids: Tensor, cache: EncodedCache | None, *, mask: Tensor | None = None, keep: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Live logits of the last ``keep`` rows, and the state before the LM head of every row.

        Estimator logprobs has no use for states and gets the logits twice.
        """
        self._states.clear()
        self._keep = keep
        extra: dict[str, Any] = {}
        if mask is not None:
            extra["attention_mask"] = mask
        if cache is not None and "position_ids" in self._takes:
            # Always, as generate() does: some hybrids that are left to themselves count from 0 in every forward.
            extra["position_ids"] = self._positions(ids, cache, mask)
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, **extra)
        logits = out.logits[:, -keep:]
        if not self._hidden:
            return logits, logits
        if [x.shape[:2] for x in self._states] != [ids.shape]:
            from fidelab.engines.hf_head import USE_LOGPROBS

            seen = [tuple(x.shape) for x in self._states]
            raise EngineError(f"the LM head saw states {seen} for tokens {tuple(ids.shape)}: {USE_LOGPROBS}")
        return logits, self._states[0]

    def _at_head(self, _module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Before the LM head: note what it is given, and let it compute only the rows that are wanted.

        Not by ``logits_to_keep``, which not all models take, and for which some leave out rows of the state as well.
        """
        self._states.append(args[0])
        return (args[0][:, -self._keep :], *args[1:])

    def _positions(self, ids: Tensor, cache: EncodedCache, mask: Tensor | None) -> Tensor:
        new = ids.shape[1]
        if mask is not None:
            return (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
        past = cache.get_seq_length()
        return self._torch.arange(past, past + new, device=ids.device).expand(ids.shape)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return self._torch.tensor(rows, dtype=self._torch.long, device=self._arm.device)

    # ----------------------------------------------------------------------------------- distributions

    @property
    def _hidden(self) -> bool:
        return self._options.get("estimator", "hidden") == "hidden"

    @property
    def _sentinels(self) -> list[tuple[float, float]]:
        """Checks of the replay since the probe began."""
        return self._head.sentinels if self._head else []

    def _check_replay(self, states: Tensor, live: Tensor) -> None:
        if self._head is not None:
            self._head.check(states, live)

    def _rows(self, states: Tensor, logits: Tensor) -> Tensor:
        """What is kept of some rows: states in the compute type, or float16 log-probabilities, off the device."""
        if self._hidden:
            return states.clone()  # not a view, which would keep the states of a whole prompt
        return self._torch.log_softmax(logits.float(), dim=-1).to(self._torch.float16).cpu()

    def _stored(self, rows: Tensor) -> Mapping[str, Array]:
        from fidelab.engines.hf_head import to_array

        return {"hidden" if self._hidden else "logprobs": to_array(rows)}

    def _stacked(self, rows: Sequence[Tensor]) -> Mapping[str, Array]:
        return self._stored(self._torch.stack(tuple(rows))) if rows else {}


def _one_line(error: Exception) -> str:
    """A foreign exception in at most 200 characters; the log has the rest."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


def _device_name(device: str) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})"


def _python_version() -> str:
    import platform

    return platform.python_version()
