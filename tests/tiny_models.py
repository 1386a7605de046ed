"""Language models of a few thousand random weights, one for each way of keeping keys and values.

Of fidelab nothing is needed: the tests of k16v8 use them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

VOCAB = 64
WINDOW = 8  # of the sliding layers: shorter than most prompts of these tests

Layer = tuple[int, int, int, int | None]  # heads of keys and values, size of a key, size of a value, sliding window


@dataclass(frozen=True)
class Kind:
    """One architecture: its configuration, and by hand what its cache must hold."""

    config: Callable[[], Any]
    kv: tuple[Layer, ...]
    without: int = 0  # layers that keep no keys and values
    recurrent: bool = False
    auto: str = "AutoModelForCausalLM"


_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
_SLIDING |= {"sliding_window_size": WINDOW}
_MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_chunk_size": 8, "mamba_d_head": 16}


def _of(config: str, layers: int, **changes: Any) -> Callable[[], Any]:
    fields = {**_SIZES, **_HEADS, **_NO_TOKENS, "num_hidden_layers": layers, **changes}
    return lambda: getattr(transformers, config)(**fields)


def _gemma4() -> Any:
    """Nested configuration, soft-cap, two head sizes; the last two layers use the keys and values of others."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    attention = {"sliding_window": WINDOW, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2}
    inputs = {"pad_token_id": 0, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
    text = {**_SIZES, **_HEADS, **layers, **attention, **inputs, "final_logit_softcapping": 5.0}
    return transformers.Gemma4Config(text_config=text, vision_config=_VISION, audio_config=None)


def _mistral3() -> Any:
    """A model for images and text."""
    own = {"model_type": "mistral", "num_hidden_layers": 2, "head_dim": 16, "sliding_window": WINDOW}
    vision = {**_VISION, "model_type": "pixtral"}
    return transformers.Mistral3Config(text_config={**_SIZES, **_HEADS, **own}, vision_config=vision)


KINDS: dict[str, Kind] = {
    "llama": Kind(_of("LlamaConfig", 3, head_dim=32), ((2, 32, 32, None),) * 3),
    "mistral": Kind(_of("MistralConfig", 2, head_dim=16, sliding_window=WINDOW), ((2, 16, 16, WINDOW),) * 2),
    "gemma2": Kind(
        _of("Gemma2Config", 2, head_dim=24, sliding_window=WINDOW, final_logit_softcapping=30.0),
        ((2, 24, 24, WINDOW), (2, 24, 24, None)),
    ),
    "gemma4": Kind(_gemma4, ((2, 16, 16, WINDOW), (2, 32, 32, None)), without=2),
    "mistral3": Kind(_mistral3, ((2, 16, 16, WINDOW),) * 2, auto="AutoModelForImageTextToText"),
    "cohere": Kind(_of("CohereConfig", 2, logit_scale=0.0625), ((2, 16, 16, None),) * 2),
    "granite": Kind(_of("GraniteConfig", 2, logits_scaling=8.0), ((2, 16, 16, None),) * 2),
    "minicpm3": Kind(  # divides before the head; caches latents of 16 values beside keys of 8
        _of("MiniCPM3Config", 2, num_key_value_heads=4, dim_model_base=16, **_LATENT),
        ((1, 16, 8, None),) * 2,
    ),
    "hyperclovax": Kind(_of("HyperCLOVAXConfig", 2, logits_scaling=0.5), ((2, 16, 16, None),) * 2),  # multiplies
    "phi": Kind(_of("PhiConfig", 2, num_key_value_heads=4), ((4, 16, 16, None),) * 2),  # head with a bias
    "phi3": Kind(_of("Phi3Config", 2), ((2, 16, 16, None),) * 2),  # one projection for Q, K and V
    "bloom": Kind(_of("BloomConfig", 2, n_head=4), ((4, 16, 16, None),) * 2),  # takes no position ids
    "lfm2": Kind(
        _of("Lfm2Config", 3, layer_types=["conv", "full_attention", "conv"]),
        ((2, 16, 16, None),),
        without=2,
        recurrent=True,
    ),
    "qwen3_next": Kind(
        _of(
            "Qwen3NextConfig",
            2,
            layer_types=["linear_attention", "full_attention"],
            **{**_LINEAR, **_EXPERTS, "head_dim": 32, "num_experts": 4, "shared_expert_intermediate_size": 32},
        ),
        ((2, 32, 32, None),),
        without=1,
        recurrent=True,
    ),
    "bamba": Kind(
        _of("BambaConfig", 2, attn_layer_indices=[1], mamba_n_heads=8, mamba_expand=2, **_MAMBA),
        ((2, 16, 16, None),),
        without=1,
        recurrent=True,
    ),
    "falcon_h1": Kind(  # every layer keeps keys, values and a recurrent state
        _of("FalconH1Config", 2, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, lm_head_multiplier=0.5, **_MAMBA),
        ((2, 16, 16, None),) * 2,
        recurrent=True,
    ),
    "inkling2": Kind(  # the same, one of them with a sliding window; a padded vocabulary
        _of(
            "Inkling2TextConfig",
            2,
            layer_types=["hybrid_sliding", "hybrid"],
            **{**_SLIDING, **_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "unpadded_vocab_size": VOCAB - 4},
        ),
        ((2, 16, 16, WINDOW), (2, 16, 16, None)),
        recurrent=True,
    ),
}


@cache
def model(kind: str) -> Any:
    """The model in float32, from seeded weights wide enough that its distributions are not flat."""
    auto = getattr(transformers, KINDS[kind].auto)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what "randomised" leaves alone, such as the decay rates of recurrent layers
        return randomised(auto.from_config(KINDS[kind].config(), dtype=torch.float32))


def randomised(built: Any) -> Any:
    """Seeded weights, in place."""
    built.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in built.named_parameters():
        if parameter.ndim > 1 or name.endswith("bias"):
            parameter.normal_(0.0, 0.2, generator=generator)
    return built


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, none of them special."""
    drawn = torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))
    return tuple(int(token) for token in drawn)
