"""The pages of an arm of engine ``hf`` with the attention of the package k16v8; imported when such an arm is opened."""

from __future__ import annotations

from typing import Any

from fidelab.core import Arm
from fidelab.engines.hf import kernels as hf_kernels
from fidelab.formats.base import Format
from k16v8.plugins.transformers.attention import register_attention
from k16v8.plugins.transformers.cache import PagedKVCache, bytes_per_place

__all__ = ["ArmCache", "register_attention"]


class ArmCache(PagedKVCache):
    """The paged cache of an arm, with the bytes that its formats should take."""

    def __init__(self, config: Any, arm: Arm, k: Format, v: Format) -> None:
        unpack = dict(arm.options).get("dequant") == "unpack"
        super().__init__(config, **hf_kernels.options_of(arm.kv), skip_layers=arm.kv.skip_layers, unpack=unpack)
        self._promise = k, v

    def expected_bytes_per_token(self) -> float | None:
        """Bytes per token of one sequence over all layers, by the formats' own definition."""
        k, v = self._promise
        total = 0.0
        for layer in self.paged:
            held = layer.held
            if held is not None:
                promised = held.kv_heads * (k.token_bytes(held.head_dim) + v.token_bytes(held.v_dim))
                total += bytes_per_place(held) if layer.skipped else promised
        return total or None

    def packed_bytes_per_token(self) -> None:
        """No format of the kernels is emulated."""
