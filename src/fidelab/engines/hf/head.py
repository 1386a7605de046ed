"""Store the LM head of a Transformers model, and replay it to check the logits of scoring."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fidelab.captures.container import Array, BFloat16
from fidelab.core.errors import EngineError

USE_LOGPROBS = "pass --engine-arg estimator=logprobs"
_COSINE = 0.9999
_ROWS = 1 << 14  # of the head that are replayed at a time
_KL = {"float32": 1e-8, "bfloat16": 1e-3, "float16": 1e-3}
# Names of the soft-cap and the scale of the logits in configurations.  Models differ in whether they multiply or divide
# by the scale, before or after the head, so the factor is found by comparison with live logits.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class ReplayedHead:
    """Logits are ``softcap(scale · (state @ weightᵀ + bias))``; ``sentinels`` holds (cosine, KL) of every check.

    Args:
        module: the model's output embeddings: ``weight`` [≥ V, d] and perhaps ``bias``.
        config: the text configuration, which names soft-cap and scale.
        dtype: the compute type's name.
        states, live: some states before the head [n, d] and their live logits [n, V], to find the scale with.
    """

    def __init__(self, module: Any, config: Any, dtype: str, states: Tensor, live: Tensor) -> None:
        self._weight, self._bias = module.weight, getattr(module, "bias", None)
        self._dtype = dtype
        self._vocabulary = live.shape[-1]
        self.sentinels: list[tuple[float, float]] = []
        self._softcap = next((float(cap) for name in _SOFTCAPS if (cap := getattr(config, name, None))), None)
        values = [value for name in _SCALES if (value := getattr(config, name, None))]
        named = [float(value) for value in values if isinstance(value, int | float)]  # MPT has a word there
        factors = [1.0, *named, *(1 / value for value in named)]
        self._scale = min(factors, key=lambda scale: float((self._replay(states, scale) - live).norm()))
        self._arrays: dict[str, Array] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of an answer that describe the head. The arrays are the same every time."""
        if self._arrays is None:
            self._arrays = {"weight": _lossless(self._weight[: self._vocabulary])}
            if self._bias is not None:
                self._arrays["bias"] = _lossless(self._bias[: self._vocabulary])
        return {"head": self._arrays, "softcap": self._softcap, "scale": self._scale}

    def check(self, states: Tensor, live: Tensor) -> None:
        """Replay some rows and compare with the live logits. See docs/metrics/distributions.md#estimators.

        Raises:
            EngineError: If scoring would compute other distributions than the model did.
        """
        usable = ~states.isnan().any(dim=-1)  # a row of NaN comes from the format and is marked failed by the scorer
        if not usable.any():
            return
        replayed, live = self._replay(states[usable], self._scale), live[usable]
        cosine = float(torch.cosine_similarity(replayed.double(), live.double(), dim=-1).min())
        kl = _mean_kl(replayed, live)
        self.sentinels.append((cosine, kl))
        # Live logits are rounded to the compute type, perhaps before and after each step of a soft-cap; the larger they
        # are, the more that alone costs (bfloat16 at 16 … 32: 4e-4 nats), and it is not the replay's fault.
        allowed = _KL[self._dtype] + 4 * _mean_kl(replayed, replayed.to(states.dtype))
        if not (cosine >= _COSINE and kl <= allowed):
            raise EngineError(
                f"hidden state × head does not replay this model's logits (cosine {cosine:.6f}, KL {kl:.2g}): "
                f"{USE_LOGPROBS}"
            )

    def _replay(self, states: Tensor, scale: float) -> Tensor:
        """Logits by the stored head in float32: the computation that scoring repeats later."""
        # in chunks: a whole head in float32 is the largest tensor of many models, and would be the peak of their memory
        weights = self._weight[: self._vocabulary].split(_ROWS)
        logits = torch.cat([states.float() @ rows.float().T for rows in weights], dim=-1)
        if self._bias is not None:
            logits = logits + self._bias[: self._vocabulary].float()
        logits = logits * scale
        return self._softcap * torch.tanh(logits / self._softcap) if self._softcap else logits


def to_array(x: Tensor) -> Array:
    """Convert a tensor to the form in which captures store it, off the device."""
    x = x.detach().contiguous().cpu()
    return BFloat16(x.view(torch.uint16).numpy()) if x.dtype == torch.bfloat16 else x.numpy()


def to_tensor(array: Array) -> Tensor:
    """Convert an array of a capture back."""
    return torch.from_numpy(array.bits).view(torch.bfloat16) if isinstance(array, BFloat16) else torch.from_numpy(array)


def head_of(
    arrays: Mapping[str, Array], about: Mapping[str, Any], dtype: str, rows: Array, live: Array
) -> ReplayedHead:
    """Return a head from an engine's files, checked with some rows; ``about``: ``softcap`` and ``scale`` of the model.

    Raises:
        EngineError: See :meth:`ReplayedHead.check`.
    """
    config = SimpleNamespace(final_logit_softcapping=about["softcap"], logit_scale=about["scale"])
    module = SimpleNamespace(**{part: to_tensor(array) for part, array in arrays.items()})
    states, logits = to_tensor(rows), to_tensor(live)
    head = ReplayedHead(module, config, dtype, states, logits)
    head.check(states, logits)
    return head


def _mean_kl(p: Tensor, q: Tensor) -> float:
    """Mean KL(P‖Q) over rows of logits, in float64."""
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean().clamp_min(0.0))


def _lossless(weight: Tensor) -> Array:
    """Tensor in 16 bits if that is lossless (a bfloat16 checkpoint loaded in float32), else unchanged."""
    half = weight.to(torch.bfloat16)
    return to_array(half if torch.equal(half.to(weight.dtype), weight) else weight)
