"""Tiny models over pages, and over Transformers' own attention with its own cache."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
import transformers
from tests import tiny_models as tiny
from tests.tiny_models import VOCAB, WINDOW
from torch import Tensor
from transformers.cache_utils import DynamicCache

from k16v8 import register_attention
from k16v8.plugins.transformers.cache import PagedKVCache

PROMPT, CHUNK, MORE = 14, 5, 11  # a prompt, a longer step, single steps: one page of 16 is not enough
PAGE = 16
CAUSAL = [  # full, sliding, both, shared keys, fused projections, hybrids, sinks
    *("llama", "mistral", "gemma2", "gemma4", "mistral3", "cohere", "phi", "phi3"),
    *("lfm2", "qwen3_next", "bamba", "falcon_h1", "gpt_oss"),
]
PADDED = ["llama", "mistral", "gemma2", "gemma4", "gpt_oss"]  # recurrent layers take no padding

register_attention()


@cache
def _gpt_oss() -> Any:
    """Sinks, and layers of both kinds."""
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=None,
        eos_token_id=None,
    )
    model = tiny.randomised(transformers.GptOssForCausalLM._from_config(config, dtype=torch.float32))
    for layer in model.model.layers:
        layer.self_attn.sinks.normal_(0.0, 2.0, generator=torch.Generator().manual_seed(1))
    return model


@cache
def model(kind: str, attention: str = "k16v8", dtype: torch.dtype = torch.float32) -> Any:
    built = deepcopy(_gpt_oss() if kind == "gpt_oss" else tiny.model(kind))
    built.set_attn_implementation(attention)
    return built.to(dtype)


def tokens(batch: int, many: int) -> Tensor:
    return torch.tensor([tiny.tokens(many, seed) for seed in range(batch)])


def logits(
    built: Any, past: DynamicCache, batch: int = 2, steps: tuple[int, ...] = (PROMPT, CHUNK, *[1] * MORE)
) -> Tensor:
    """Of a prompt, of a chunk after it, of single tokens after that: ``[batch, all tokens, V]``."""
    ids, at, found = tokens(batch, sum(steps)), 0, []
    for many in steps:
        places = torch.arange(at, at + many).expand(batch, -1)
        out = built(input_ids=ids[:, at : at + many], cache=past, use_cache=True, position_ids=places)
        found.append(out.logits)
        at += many
    return torch.cat(found, 1)


class _Rounded(DynamicCache):
    """Transformers' cache, whose values are what e4m3 with scale 1.0 makes of them."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        codes = value_states.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        return super().update(key_states, codes.to(value_states.dtype), layer_idx, *args, **kwargs)


def plain(kind: str, dtype: torch.dtype = torch.float32, *, rounded: bool = False) -> DynamicCache:
    """Transformers' own cache; ``rounded``: with values in 8 bits."""
    return (_Rounded if rounded else DynamicCache)(config=model(kind, "eager", dtype).config)


def paged(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> PagedKVCache:
    return PagedKVCache(model(kind, dtype=dtype).config, page=PAGE, **options)


def padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths, token 0 before the shorter ones, and their mask."""
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.tensor(tiny.tokens(length, seed=row))
        mask[row, longest - length :] = 1
    return ids, mask


def generated(built: Any, ids: Tensor, past: DynamicCache, mask: Tensor | None = None, **options: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    done: Tensor = built.generate(ids, attention_mask=mask, cache=past, max_new_tokens=24, pad_token_id=0, **options)
    return done[:, ids.shape[1] :]
