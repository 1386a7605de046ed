"""Transformers over our pages and kernels, against Transformers' own attention over its own cache."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from copy import deepcopy
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import forked
from k16v8 import K16V8Cache
from k16v8.plugins.transformers.attention import attend
from paged_models import (
    CAUSAL,
    PADDED,
    PAGE,
    PROMPT,
    generated,
    logits,
    model,
    padded,
    paged,
    plain,
    tokens,
)

kinds = pytest.mark.parametrize("kind", CAUSAL)


@kinds
def test_without_loss_the_logits_are_those_of_eager_attention(kind: str) -> None:
    expected = logits(model(kind, "eager"), plain(kind))
    torch.testing.assert_close(logits(model(kind), paged(kind)), expected, rtol=1e-5, atol=2e-5)


@kinds
def test_values_in_8_bits_give_the_logits_of_a_cache_with_rounded_values(kind: str) -> None:
    expected = logits(model(kind, "eager"), plain(kind, rounded=True))
    off = (logits(model(kind), K16V8Cache(model(kind).config)) - expected).abs()
    # a last bit of the layer before may turn the rounding of a value: few, and none far
    assert off.median() < 1e-5
    assert off.max() < 0.01 * expected.abs().max()
    lossless = logits(model(kind, "eager"), plain(kind))
    assert off.mean() < 0.01 * (lossless - expected).abs().mean()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_in_bfloat16_the_logits_are_as_near_to_float32_as_those_of_eager_attention(kind: str) -> None:
    half = torch.bfloat16
    exact = logits(model(kind, "eager"), plain(kind, rounded=True))
    theirs = logits(model(kind, "eager", half), plain(kind, half, rounded=True)).float()
    ours = logits(model(kind, dtype=half), K16V8Cache(model(kind, dtype=half).config)).float()
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


def test_skipped_layers_keep_the_compute_type() -> None:
    lossless = logits(model("llama", "eager"), plain("llama"))
    coarse: dict[str, Any] = {"k_format": "int4", "v_format": "int4"}
    assert torch.allclose(logits(model("llama"), paged("llama", **coarse, skip_layers=(0, 1, 2))), lossless, atol=2e-5)
    assert not torch.allclose(logits(model("llama"), paged("llama", **coarse, skip_layers=(0, 2))), lossless, atol=1e-2)


@pytest.mark.parametrize("kind", PADDED)
def test_a_left_padded_batch_generates_what_its_prompts_generate_alone(kind: str) -> None:
    ids, mask = padded((5, 20, 9))
    together = generated(model(kind), ids, paged(kind), mask, do_sample=False)
    for row in range(3):
        alone = generated(model(kind, "eager"), ids[row : row + 1, mask[row].bool()], plain(kind), do_sample=False)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("kind", PADDED)
def test_logits_of_a_left_padded_batch_are_those_of_its_prompts_alone(kind: str) -> None:
    ids, mask = padded((5, 20, 9))
    places = (mask.cumsum(1) - 1).clamp_min(0)
    out = model(kind)(input_ids=ids, attention_mask=mask, position_ids=places, cache=paged(kind)).logits
    for row, many in enumerate((5, 20, 9)):
        alone = model(kind)(input_ids=ids[row : row + 1, -many:], cache=paged(kind)).logits
        torch.testing.assert_close(out[row, -many:], alone[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("lengths", [(5, 20, 9), (20, 20, 20)])
def test_layers_that_use_the_keys_of_others_may_ask_for_the_last_tokens_alone(
    lengths: tuple[int, ...], keep: int
) -> None:
    ids, mask = padded(lengths)
    given: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
    }
    whole = model("gemma4")(**given, cache=paged("gemma4")).logits
    last = model("gemma4")(**given, cache=paged("gemma4"), logits_to_keep=keep).logits
    torch.testing.assert_close(last, whole[:, -keep:], rtol=1e-5, atol=2e-5)


def test_greedy_generation_with_values_in_8_bits_is_that_of_a_cache_with_rounded_values() -> None:
    ids = tokens(2, PROMPT)
    expected = generated(model("llama", "eager"), ids, plain("llama", rounded=True), do_sample=False)
    assert torch.equal(generated(model("llama"), ids, K16V8Cache(model("llama").config), do_sample=False), expected)


def test_samples_are_those_of_eager_attention_from_the_same_seed() -> None:
    found = []
    for built, past in ((model("gemma2"), paged("gemma2")), (model("gemma2", "eager"), plain("gemma2"))):
        torch.manual_seed(3)
        found.append(generated(built, tokens(2, PROMPT), past, do_sample=True, num_return_sequences=2))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_nan_in_padding_reaches_nothing(kind: str) -> None:
    ids, mask = padded((5, 20, 9))
    places = (mask.cumsum(1) - 1).clamp_min(0)
    poisoned = deepcopy(model(kind))
    expected = None
    for value in (0.0, float("nan")):
        poisoned.get_input_embeddings().weight[0] = value  # the head may be tied to it: token 0 is never compared
        past = paged(kind)
        out = [poisoned(input_ids=ids, attention_mask=mask, position_ids=places, cache=past).logits[:, -1, 1:]]
        longer = mask
        for step in range(3):
            longer = torch.cat((longer, torch.ones(3, 1).long()), 1)
            new = torch.full((3, 1), 7 + step)
            at = (longer.sum(1, keepdim=True) - 1).long()
            more = poisoned(input_ids=new, attention_mask=longer, position_ids=at, cache=past).logits
            out.append(more[:, -1, 1:])
        assert all(x.isfinite().all() for x in out)
        expected = out if expected is None else expected
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_outputs_at_padding_are_zero_and_padding_takes_no_room() -> None:
    past = paged("llama")
    layer = past.layers[0]
    key, value, query = torch.randn(2, 2, 20, 32), torch.randn(2, 2, 20, 32), torch.randn(2, 4, 20, 32)
    mask = torch.arange(20) >= torch.tensor([[15], [0]])
    new_key, new_value = layer.update(key, value)
    out, _ = attend(None, query, new_key, new_value, mask[:, None, None])
    assert out.shape == (2, 20, 4, 32)
    assert not out[0, :15].any()
    assert (out[0, 15:].abs().amax(-1) > 0).all()
    assert past.storage()[0].k_cache.shape[0] == 1 + 2  # pages of 5 and of 20 tokens


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_padding_behind_and_between_tokens_is_skipped_too(kind: str) -> None:
    ids = tokens(1, 6)
    gaps = torch.tensor([[1, 1, 0, 1, 0, 0]]) > 0
    past, alone = paged(kind), paged(kind)
    model(kind)(input_ids=ids, attention_mask=gaps, position_ids=(gaps.cumsum(1) - 1), cache=past)
    model(kind)(input_ids=ids[gaps][None], cache=alone)
    more = torch.cat((gaps, torch.ones(1, 1).bool()), 1)
    places = torch.tensor([[3]])
    got = model(kind)(input_ids=ids[:, :1], attention_mask=more, position_ids=places, cache=past).logits
    expected = model(kind)(input_ids=ids[:, :1], position_ids=places, cache=alone).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def _plain_bytes(past: DynamicCache) -> int:
    return sum(x.untyped_storage().nbytes() for layer in past.layers for x in (layer.keys, layer.values))


def test_whole_pages_take_three_quarters_of_a_16_bit_cache() -> None:
    built = model("llama", dtype=torch.bfloat16)
    ours, plain = K16V8Cache(built.config, page=PAGE), DynamicCache(config=built.config)
    logits(built, ours, steps=(4 * PAGE,))
    logits(model("llama", "eager", torch.bfloat16), plain, steps=(4 * PAGE,))
    assert ours.bytes() * 4 == _plain_bytes(plain) * 3
    assert ours.bytes_per_token() == 3 * 2 * 32 * (2 + 1)  # layers, heads, values of K and of V
    assert ours.storage_dtypes() == ("bfloat16", "uint8")
    assert ours.kernels == ("torch[k=bf16,v=fp8_e4m3]",)


def test_growing_leaves_at_most_an_eighth_empty() -> None:
    past = paged("llama")
    logits(model("llama"), past, batch=1, steps=(10 * PAGE, *[1] * 40))
    assert past.storage()[0].k_cache.shape[0] in (13, 14)  # 12.5 pages are used


def test_keys_and_values_of_all_layers_lie_in_storage_of_their_own() -> None:
    past = K16V8Cache(model("gemma4").config)
    logits(model("gemma4"), past)
    sides = [x.untyped_storage() for held in past.storage() for x in (held.k_cache, held.v_cache)]
    places = sorted((side.data_ptr(), side.data_ptr() + side.nbytes()) for side in sides)
    assert len(places) == 4
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))


def test_behind_a_window_memory_stays_bounded_and_the_logits_right() -> None:
    ours, plain = paged("mistral"), DynamicCache(config=model("mistral", "eager").config)
    at, most = 0, 0
    for step in range(500):
        many = 100 if step == 0 else 1
        ids = tokens(2, 600)[:, at : at + many]
        places = torch.arange(at, at + many).expand(2, -1)
        at += many
        out = model("mistral")(input_ids=ids, cache=ours, position_ids=places).logits
        if step:
            most = max(most, ours.bytes())
        expected = model("mistral", "eager")(input_ids=ids, cache=plain, position_ids=places).logits
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-5)
    page = 2 * PAGE * 2 * 16 * 4  # bytes of keys and values of a page, in a layer
    assert most <= 2 * page * 2 * 3  # layers, sequences, pages: a window of 8 touches 2, one is kept free
    assert ours.storage()[0].block_table.shape[1] <= 2


def test_memory_goes_with_the_last_reference_and_waits_for_no_collector() -> None:
    past = K16V8Cache(model("llama").config)
    logits(model("llama"), past)
    gone = weakref.ref(past.storage()[0].k_cache)
    gc.disable()
    try:
        del past
        assert gone() is None
    finally:
        gc.enable()


def _python(script: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = forked.run(["-c", script], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_plugins_imports_no_torch() -> None:
    asked = "import sys, k16v8.plugins; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


_INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"  # Transformers imports Triton, too
import torch, transformers
from k16v8 import K16V8Cache, register_attention
register_attention()
torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=64)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=8, pad_token_id=0)
config = transformers.Gemma2Config(**sizes, **heads, attn_implementation="k16v8")
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))
mask = torch.arange(27) >= torch.tensor([[13], [0]])
found = []
for name in ("torch", "interpreter"):
    past, out, done = K16V8Cache(config, implementation=name, unpack=UNPACK), [], 0
    for new in (20, 3, 1):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, done : done + new]
        step = model(input_ids=ids[:, done : done + new], attention_mask=mask[:, : done + new].long(),
                     position_ids=places, cache=past)
        out.append(step.logits[:, -1].float())
        done += new
    assert past.kernels == (name + "[k=bf16,v=ATTENDED]",), past.kernels
    found.append(torch.stack(out))
print(float((found[0] - found[1]).norm() / found[0].norm()))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("unpack", "attended"), [(False, "fp8_e4m3"), (True, "bf16")])
def test_triton_kernels_give_what_the_torch_path_gives(unpack: bool, attended: str) -> None:
    script = _INTERPRETED.replace("UNPACK", str(unpack)).replace("ATTENDED", attended)
    assert float(_python(script)) < 0.01
