"""Transformers: any decoder-only model, on CPU or GPU, with the KV cache in any of our formats.

Engine options (``--engine-arg``): ``attention`` (sdpa, eager, …), ``estimator`` (hidden, logprobs).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fidelab.captures.container import Array, BFloat16
from fidelab.core import Arm, Estimator, Forced, Generate, KVSpec, Prefill, Probe
from fidelab.engines.base import Answer, Engine, Ran, Sink, Verdict
from fidelab.errors import EngineError, NotSupportedError, UsageError
from fidelab.formats import FORMATS, create

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.plugins.transformers_cache import EncodedCache

_OPTIONS = {"attention": None, "estimator": ("hidden", "logprobs")}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_SENTINEL_ROWS = 8
_SENTINEL_COSINE = 0.9999
_SENTINEL_KL = {"float32": 1e-8, "bfloat16": 1e-3, "float16": 1e-3}


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
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(arm.path)
        self._k, self._v = create(arm.kv.k), create(arm.kv.v)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            arm.path,
            dtype=getattr(torch, _DTYPES[arm.dtype]),
            attn_implementation=self._options.get("attention", "sdpa"),
            use_safetensors=True,
            output_loading_info=True,
        )
        unfilled = sorted(report.get("missing_keys", ()))
        if unfilled:
            raise EngineError(f"{len(unfilled)} parameters were filled by no checkpoint tensor, first {unfilled[0]}")
        self._model = model.to(arm.device).eval()
        self._decoder = model.get_decoder()
        self._states: list[Tensor] = []
        self._decoder.register_forward_hook(lambda _m, _i, out: self._states.append(out[0]))
        self._last_cache: EncodedCache | None = None
        self._new_cache(None)  # refuses an impossible spec now, not in the middle of a probe

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def answer(self, probe: Probe, sink: Sink) -> Answer:
        began = time.monotonic()
        match probe:
            case Prefill():
                facts = self._prefill(probe, sink)
            case Generate():
                facts = self._generate(probe, sink)
            case Forced():
                facts = self._forced(probe, sink)
            case _:
                raise NotSupportedError(f"engine hf does not answer {probe.kind} probes yet")
        facts["seconds"] = time.monotonic() - began
        return Answer(Estimator(self._options.get("estimator", "hidden")), **self._head(), facts=facts)

    def ran(self) -> Ran:
        import torch

        cache = self._last_cache
        dtypes = cache.storage_dtypes() if cache is not None else None
        return Ran(
            versions={**self.versions(), "python": _python_version()},
            device=_device_name(self._arm.device),
            attention=self._model.config._attn_implementation,
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
            },
        )

    # ------------------------------------------------------------------------------------------ probes

    def _prefill(self, probe: Prefill, sink: Sink) -> dict[str, Any]:
        worst_cosine, worst_kl = 1.0, 0.0
        for index, window in enumerate(probe.windows):
            ids = self._tensor([window])
            sentinel = self._hidden and index in (0, len(probe.windows) - 1)
            keep = _SENTINEL_ROWS if sentinel else 1
            if not self._hidden:
                keep = len(window) - probe.first
            logits, states = self._forward(ids, self._new_cache(None), keep=keep)
            if sentinel:
                cosine, kl = self._replay_error(states[0, -keep:], logits[0])
                worst_cosine, worst_kl = min(worst_cosine, cosine), max(worst_kl, kl)
            sink.add(index, self._rows(states[0, probe.first : probe.last + 1], logits[0, : probe.n_rows]))
            sink.progress(len(window))
        facts: dict[str, Any] = {"tokens": sum(map(len, probe.windows))}
        if self._hidden:
            self._check_replay(worst_cosine, worst_kl)
            facts |= {"sentinel_cosine": worst_cosine, "sentinel_kl": worst_kl}
        return facts

    def _generate(self, probe: Generate, sink: Sink) -> dict[str, Any]:
        produced = 0
        for batch in self._batches(probe):
            for index, (ids, rows, failed) in zip(batch, self._greedy(probe, batch, sink), strict=True):
                sink.add(index, {"ids": np.asarray(ids, dtype=np.int32), **rows})
                produced += len(ids)
                if failed or not ids:
                    sink.fail(index, failed or "empty output")
        return {"tokens": sum(map(len, probe.prompts)) + produced, "generated": produced}

    def _forced(self, probe: Forced, sink: Sink) -> dict[str, Any]:
        for index, (prompt, continuation) in enumerate(zip(probe.prompts, probe.continuations, strict=True)):
            cache = self._new_cache(None)
            states, logits = [], []
            for step in (prompt, *([token] for token in continuation[:-1])):
                live, hidden = self._forward(self._tensor([step]), cache)
                states.append(hidden[0, -1])
                logits.append(live[0, -1])
            rows = self._rows(self._torch.stack(states), self._torch.stack(logits))
            sink.add(index, {"ids": np.asarray(continuation, dtype=np.int32), **rows})
            sink.progress(len(prompt) + len(continuation))
        return {"tokens": sum(map(len, probe.items()))}

    def _greedy(
        self, probe: Generate, batch: Sequence[int], sink: Sink
    ) -> Iterator[tuple[list[int], Mapping[str, Array], str | None]]:
        """Greedy decode of one left-padded batch; yields (ids, rows, failure) in batch order."""
        torch = self._torch
        prompts = [probe.prompts[i] for i in batch]
        longest = max(map(len, prompts))
        ids = self._tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = self._tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        cache = self._new_cache(mask.bool())
        generated: list[list[int]] = [[] for _ in batch]
        states: list[list[Tensor]] = [[] for _ in batch]
        kept: list[list[Tensor]] = [[] for _ in batch]  # live logits, only where they are stored
        failed: list[str | None] = [None] * len(batch)
        live = set(range(len(batch)))
        for _ in range(probe.max_tokens):
            logits, hidden = self._forward(ids, cache, mask=mask)
            sink.progress(int(mask.sum()) if ids.shape[1] > 1 else len(live))
            scores = logits[:, -1].float()
            broken = torch.isnan(scores).any(dim=-1).tolist()
            best = scores.argmax(dim=-1).tolist()
            for row in sorted(live):
                if broken[row]:
                    failed[row] = f"NaN logits at generated token {len(generated[row])}"
                    live.discard(row)
                    continue
                generated[row].append(best[row])
                states[row].append(hidden[row, -1].clone())
                kept[row].append(logits[row, -1] if not self._hidden else hidden[row, -1, :0])
                if best[row] in probe.stop:
                    live.discard(row)
            if not live:
                break
            ids = self._tensor([[token] for token in best])
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        for row in range(len(batch)):
            rows = self._rows(torch.stack(states[row]), torch.stack(kept[row])) if states[row] else {}
            yield generated[row], rows, failed[row]

    def _batches(self, probe: Generate) -> Iterator[list[int]]:
        """Prompts of similar length together; of equal length where recurrent state would see the padding."""
        equal_only = self._new_cache(None).has_recurrent_layers
        order = sorted(range(len(probe.prompts)), key=lambda i: (len(probe.prompts[i]), i))
        batch: list[int] = []
        for index in order:
            if batch:
                shortest, this = len(probe.prompts[batch[0]]), len(probe.prompts[index])
                limit = shortest if equal_only else shortest + max(32, shortest // 2)
                if len(batch) >= probe.batch or this > limit:
                    yield batch
                    batch = []
            batch.append(index)
        if batch:
            yield batch

    # ----------------------------------------------------------------------------------------- forward

    def _new_cache(self, mask: Tensor | None) -> EncodedCache:
        from fidelab.plugins.transformers_cache import EncodedCache

        return EncodedCache(self._model.config, self._k, self._v, self._arm.kv.skip_layers, mask)

    def _forward(
        self, ids: Tensor, cache: EncodedCache, *, mask: Tensor | None = None, keep: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Live logits of the last ``keep`` rows, and the state after the final norm of every row."""
        self._states.clear()
        extra: dict[str, Any] = {}
        if mask is not None:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            extra = {"attention_mask": mask, "position_ids": positions}
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep, **extra)
        self._last_cache = cache
        if len(self._states) != 1:
            raise EngineError(f"the decoder ran {len(self._states)} times in one forward; its states are ambiguous")
        return out.logits[:, -keep:], self._states[0]

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return self._torch.tensor(rows, dtype=self._torch.long, device=self._arm.device)

    # ----------------------------------------------------------------------------------- distributions

    @property
    def _hidden(self) -> bool:
        return self._options.get("estimator", "hidden") == "hidden"

    def _rows(self, states: Tensor, logits: Tensor) -> Mapping[str, Array]:
        """Rows as they are stored: states in the compute type, or the live logits as float16 log-probabilities."""
        if self._hidden:
            return {"hidden": _to_array(states)}
        logprobs = self._torch.log_softmax(logits.float(), dim=-1)
        return {"logprobs": _to_array(logprobs.to(self._torch.float16))}

    def _replay(self, states: Tensor) -> Tensor:
        """Logits by the stored head in float32: the computation that scoring repeats later."""
        head = self._model.get_output_embeddings()
        logits = states.float() @ head.weight.float().T
        if getattr(head, "bias", None) is not None:
            logits = logits + head.bias.float()
        softcap, scale = self._transform()
        logits = logits * scale
        return softcap * self._torch.tanh(logits / softcap) if softcap else logits

    def _transform(self) -> tuple[float | None, float]:
        """Soft-cap and multiplier between head and logits, where the architecture has them."""
        config = self._model.config.get_text_config()
        scale = 1.0
        if getattr(config, "logit_scale", None):  # Cohere multiplies
            scale = float(config.logit_scale)
        elif getattr(config, "logits_scaling", None):  # Granite divides
            scale = 1.0 / float(config.logits_scaling)
        softcap = getattr(config, "final_logit_softcapping", None)
        return (float(softcap) if softcap else None), scale

    def _head(self) -> dict[str, Any]:
        if not self._hidden:
            return {}
        head = self._model.get_output_embeddings()
        arrays = {"weight": _lossless(head.weight.detach())}
        if getattr(head, "bias", None) is not None:
            arrays["bias"] = _lossless(head.bias.detach())
        softcap, scale = self._transform()
        return {"head": arrays, "softcap": softcap, "scale": scale}

    def _replay_error(self, states: Tensor, live: Tensor) -> tuple[float, float]:
        """Cosine of replayed and live logits and KL(replay‖live), worst row (METRICS §3, sentinels)."""
        torch = self._torch
        replayed, live = self._replay(states).double(), live.double()
        cosine = torch.nn.functional.cosine_similarity(replayed, live, dim=-1).min()
        p, q = torch.log_softmax(replayed, -1), torch.log_softmax(live, -1)
        kl = (p.exp() * (p - q)).nan_to_num(0.0).sum(-1).max()
        return float(cosine), max(0.0, float(kl))

    def _check_replay(self, cosine: float, kl: float) -> None:
        if cosine < _SENTINEL_COSINE or kl > _SENTINEL_KL[self._arm.dtype]:
            raise EngineError(
                f"hidden state × head does not replay this model's logits (cosine {cosine:.6f}, KL {kl:.2g}): "
                "pass --engine-arg estimator=logprobs"
            )


def _lossless(weight: Tensor) -> Array:
    """The tensor in 16 bits where that loses nothing (a bfloat16 checkpoint loaded in float32)."""
    import torch

    half = weight.to(torch.bfloat16)
    return _to_array(half if torch.equal(half.to(weight.dtype), weight) else weight)


def _to_array(x: Tensor) -> Array:
    import torch

    x = x.detach().contiguous().cpu()
    return BFloat16(x.view(torch.uint16).numpy()) if x.dtype == torch.bfloat16 else x.numpy()


def _device_name(device: str) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})"


def _python_version() -> str:
    import platform

    return platform.python_version()
