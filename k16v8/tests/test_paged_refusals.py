"""What our pages and kernels cannot do in a Transformers model is refused, never computed otherwise."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from tests import tiny_models as tiny
from transformers.cache_utils import DynamicCache

from k16v8 import K16V8Cache
from k16v8.errors import K16V8Error, NotSupportedError, UnknownNameError
from k16v8.plugins.transformers.attention import padding_mask
from paged_models import generated, logits, model, padded, paged, tokens


def test_a_model_with_another_attention_is_refused_when_the_cache_is_made() -> None:
    with pytest.raises(NotSupportedError, match="attention is 'eager': call register_attention"):
        K16V8Cache(model("llama", "eager").config)


def test_our_attention_without_a_cache_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="pass cache=K16V8Cache"):
        model("llama")(input_ids=tokens(1, 4))
    with pytest.raises(NotSupportedError, match="pass cache=K16V8Cache"):
        model("llama")(input_ids=tokens(1, 4), cache=DynamicCache(config=model("llama").config))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_attention_never_attends_to_the_new_tokens_alone(attention: str) -> None:
    past = K16V8Cache(model("llama").config)
    with pytest.raises(NotSupportedError, match="is not 'k16v8', or it computes with keys"):
        logits(model("llama", attention), past)


def test_models_with_an_attention_of_their_own_are_refused() -> None:
    bloom = transformers.AutoModelForCausalLM.from_config(tiny.KINDS["bloom"].config())
    bloom.config._attn_implementation = "k16v8"
    with pytest.raises(NotSupportedError, match="it cannot use a paged cache"), torch.no_grad():
        bloom(input_ids=tokens(1, 4), cache=K16V8Cache(bloom.config))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("minicpm3", "it computes with keys that come out of the cache"), ("inkling2", "does not do position_bias")],
)
def test_models_that_want_more_than_attention_over_their_keys_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(NotSupportedError, match=reason):
        logits(model(kind), paged(kind))


def test_layers_that_pages_cannot_hold_are_refused_by_name() -> None:
    config = transformers.DeepseekV32Config()
    config._attn_implementation = "k16v8"
    with pytest.raises(NotSupportedError, match="layer 0 keeps its cache in a DynamicIndexedLayer, which pages"):
        K16V8Cache(config)
    config = transformers.Llama4TextConfig()
    config._attn_implementation = "k16v8"
    with pytest.raises(NotSupportedError, match="does not do attention in chunks"):
        K16V8Cache(config)


def test_masks_that_are_not_causal_are_refused() -> None:
    everything: dict[str, Any] = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    with pytest.raises(NotSupportedError, match="causal masks alone"):
        padding_mask(**everything, mask_function=lambda b, h, q, k: q >= 0)
    with pytest.raises(NotSupportedError, match="causal masks alone"):
        padding_mask(**everything, mask_function=lambda b, h, q, k: k <= q, use_vmap=True)
    assert padding_mask(**everything, mask_function=lambda b, h, q, k: k <= q) is None
    own = torch.zeros(1, 1, 4, 4)
    with pytest.raises(NotSupportedError, match="an attention mask of its own"):
        model("llama")(input_ids=tokens(1, 4), attention_mask=own, cache=paged("llama"))


def test_an_attention_mask_that_says_otherwise_of_the_past_is_refused() -> None:
    ids, mask = padded((5, 20, 9))
    for later, reason in (
        (torch.ones(3, 21).long(), "is another for tokens in the cache"),
        (torch.tensor([[0], [1], [1]]), r"attention_mask is \[3, 1\]; it takes \[3, 21\]"),
    ):
        past = paged("llama")
        model("llama")(input_ids=ids, attention_mask=mask, cache=past)
        with pytest.raises(NotSupportedError, match=reason):
            model("llama")(input_ids=ids[:, -1:], attention_mask=later, cache=past)


def test_another_batch_in_a_used_cache_is_refused() -> None:
    past = paged("llama")
    logits(model("llama"), past, batch=2, steps=(4,))
    with pytest.raises(NotSupportedError, match="holds 4 tokens of 2 sequences, the model goes on from 4 tokens of 1"):
        logits(model("llama"), past, batch=1, steps=(1,))


def test_beams_and_cropping_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="cannot be reordered"):
        generated(model("llama"), tokens(1, 4), paged("llama"), num_beams=2, do_sample=False)
    past = paged("llama")
    logits(model("llama"), past)
    with pytest.raises(NotSupportedError, match=r"cannot be reordered \(beams\), cropped"):
        past.crop(-1)


def test_formats_that_the_kernels_cannot_take_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="q8_0"):
        paged("llama", k_format="q8_0")
    with pytest.raises(NotSupportedError, match="keys as bf16 in a model that computes in float32"):
        logits(model("llama"), paged("llama", k_format="bf16"))
    with pytest.raises(K16V8Error, match=r"compiled kernels need a GPU|for 16-bit queries|Triton is not installed"):
        logits(model("llama"), paged("llama", implementation="triton"))


def test_gradients_are_refused() -> None:
    grown = deepcopy(model("llama")).requires_grad_(True)
    with pytest.raises(NotSupportedError, match="call the model under"), torch.enable_grad():
        logits(grown, K16V8Cache(grown.config))
