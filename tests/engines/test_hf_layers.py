"""Engine hf, layer-wise requests: the states and the q, k, v that Transformers itself has; and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from fidelab.captures.container import BFloat16, to_float32
from fidelab.captures.requests import Layerwise, Prefill
from fidelab.core.errors import EngineError, FidelabError, NotSupportedError
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.structure import decoder_layers
from fidelab.metrics.layers import LayerCurve, LayerDivergence, part, relative_errors
from k16v8.kernels.reference import Attention, attend
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import KINDS, Answers

TOKENS = 24
WINDOWS = (tiny.tokens(TOKENS), tiny.tokens(TOKENS, 1))
STATES = Layerwise("layers", WINDOWS, 0, TOKENS - 1)
DEPTH = 8  # layers of the models into which faults are planted


def qkv(*layers: int) -> Layerwise:
    return Layerwise("qkv", WINDOWS[:1], 0, TOKENS - 1, tensors="qkv", layers=layers)


def answered(engine: HFEngine, request: Layerwise) -> list[dict[str, Tensor]]:
    """The arrays of each window."""
    sink = Answers()
    answer = engine.answer(request, sink)
    assert answer.head is None
    assert sink.tokens == answer.facts["tokens"] == sum(map(len, request.windows))
    return [{name: torch.from_numpy(to_float32(x)) for name, x in sink.items[i].items()} for i in sorted(sink.items)]


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_that_transformers_tells(kind: str, checkpoint: Checkpoint) -> None:
    """Its own list ends behind the final norm, so the last layer's is compared through that of the head."""
    engine = tiny.opened(checkpoint(kind))
    first, second = answered(engine, STATES)
    for window, found in zip(WINDOWS, (first["states"], second["states"]), strict=True):
        with torch.no_grad():
            told = tiny.model(kind)(torch.tensor([window]), output_hidden_states=True).hidden_states
        assert found.shape == (len(told), TOKENS, told[0].shape[-1])
        for ours, theirs in zip(found[:-1], told, strict=False):
            torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-4)


def test_what_leaves_the_last_layer_is_what_the_final_norm_gets(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"))
    seen: list[Tensor] = []
    norm = engine._model.module.model.norm
    hook = norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0]))
    found = answered(engine, STATES)
    hook.remove()
    for arrays, given in zip(found, seen, strict=True):
        assert torch.equal(arrays["states"][-1], given)


def test_rows_first_to_last_alone_are_kept_in_the_compute_type_whatever_the_estimator(checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint("llama")), Answers()
    plain = answered(engine, STATES)
    some = answered(engine, Layerwise("layers", WINDOWS, 5, 9))
    for whole, cut in zip(plain, some, strict=True):
        assert torch.equal(cut["states"], whole["states"][:, 5:10])
    other = answered(tiny.opened(checkpoint("llama"), estimator="logprobs"), STATES)
    assert torch.equal(plain[0]["states"], other[0]["states"])
    tiny.opened(checkpoint("llama"), "bf16", "bfloat16").answer(STATES, sink)
    assert isinstance(sink.items[0]["states"], BFloat16)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *(("llama", attention) for attention in ("sdpa", "eager", "k16v8")),
        *(("mistral", attention) for attention in ("sdpa", "k16v8")),
        ("gemma2", "eager"),  # with a soft-cap, which sdpa lacks
    ],
)
def test_attention_by_definition_over_q_k_v_is_what_the_layer_computes(
    kind: str, attention: str, checkpoint: Checkpoint
) -> None:
    """Position embedding, heads and order are right: the definition of attention gives what o_proj gets."""
    engine = tiny.opened(checkpoint(kind), attention=attention)
    module, config = engine._model.module, engine._model.config
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args, n=n: seen.__setitem__(n, args[0][0]))
        for n, layer in enumerate(module.model.layers)
    ]
    layers = tuple(range(config.num_hidden_layers))
    [found] = answered(engine, qkv(*layers))
    for hook in hooks:
        hook.remove()
    assert sorted(found) == sorted(f"{layer}.{part}" for layer in layers for part in "qkv")
    for layer in layers:
        attends = module.model.layers[layer].self_attn
        softcap = getattr(attends, "attn_logit_softcapping", None) or 0.0
        rule = Attention(attends.scaling, KINDS[kind].kv[layer][3] or 0, softcap)
        q, k, v = (found[f"{layer}.{part}"].transpose(0, 1) for part in "qkv")
        out, _ = attend(q, k, v, torch.arange(TOKENS), rule)
        torch.testing.assert_close(out.flatten(1), seen[layer], rtol=1e-4, atol=1e-5)


def test_keys_and_values_are_those_before_the_cache(checkpoint: Checkpoint) -> None:
    plain = answered(tiny.opened(checkpoint("llama")), qkv(0))[0]
    coarse = answered(tiny.opened(checkpoint("llama"), "int4"), qkv(0))[0]
    assert all(torch.equal(plain[name], coarse[name]) for name in plain)


def _hooks(engine: HFEngine) -> int:
    modules = list(engine._model.module.modules())
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)


@pytest.mark.parametrize("query", [STATES, qkv(0, 2)], ids=["states", "qkv"])
@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_the_model_is_as_before_although_a_forward_failed(
    query: Layerwise, fails: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.opened(checkpoint("llama"))
    hooks, interface = _hooks(engine), transformers.AttentionInterface.get_interface

    def failing(*_args: Any, **_kwargs: Any) -> None:
        raise EngineError("no memory left")

    if fails:
        with monkeypatch.context() as patched:
            patched.setattr(engine._model, "forward", failing)
            with pytest.raises(EngineError, match="no memory left"):
                engine.answer(query, Answers())
    else:
        answered(engine, query)
    assert _hooks(engine) == hooks
    assert transformers.AttentionInterface.get_interface is interface
    assert "update" not in vars(engine._model.cache)
    again = Answers()
    engine.answer(Prefill("kld", WINDOWS, 0, TOKENS - 1, ((0,) * TOKENS,) * 2), again)
    assert sorted(again.items) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "layer", "said"),
    [
        ("llama", 3, "layer 3: the model has layers 0–2"),
        ("lfm2", 0, "layer 0 shows no q: its attention is of another kind"),
        ("gemma4", 3, "layer 3 shows no k: its attention is of another kind"),
        ("minicpm3", 0, "layer 0 caches something else than keys and values"),
    ],
)
def test_layers_without_q_k_v_are_refused_in_one_line(kind: str, layer: int, said: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(FidelabError) as caught:
        tiny.opened(checkpoint(kind)).answer(qkv(layer), Answers())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_that_run_twice_or_are_not_found_are_refused(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"))
    engine._model.module.model.layers[1] = engine._model.module.model.layers[0]
    with pytest.raises(NotSupportedError, match="did not run once each, in order"):
        engine.answer(STATES, Answers())
    config = SimpleNamespace(num_hidden_layers=5, model_type="odd")
    with pytest.raises(NotSupportedError, match="odd: LlamaModel has no list of its 5 decoder layers"):
        decoder_layers(tiny.model("llama"), config)


def _deep(layer: int, window: int = 9) -> Any:
    """Eight layers that attend to everything, but ``layer`` to so many tokens.

    What a layer adds is small beside what it gets, as usual initialisations have it: random layers of another size
    enlarge any error that enters them, which trained ones do not.
    """
    kinds = ["sliding_attention" if i == layer else "full_attention" for i in range(DEPTH)]
    sizes: Any = {"vocab_size": tiny.VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": DEPTH}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    sizes |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    config = transformers.Qwen2Config(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    built = tiny.randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    built.model.embed_tokens.weight.mul_(30)
    for block in built.model.layers:
        for weight in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
            weight.mul_((2 * DEPTH) ** -0.5)
    return built


def _scaled_keys(layer: int) -> Any:
    built = _deep(layer)
    attention = built.model.layers[layer].self_attn
    for weight in (attention.k_proj.weight, attention.k_proj.bias):
        weight.mul_(1.07)
    return built


def _zeroed(layer: int) -> Any:
    built = _deep(layer)
    built.model.layers[layer].self_attn.o_proj.weight.zero_()
    return built


FAULTS: dict[str, Callable[[int], Any]] = {
    "K scale off by 7%": _scaled_keys,
    "window off by one": lambda layer: _deep(layer, 10),
    "zeroed output": _zeroed,
}


def _parting(folder: Path, faulty: Any, layer: int, kv: str) -> LayerDivergence:
    """Where the faulty model with this cache parts from the right one with a 32-bit cache."""
    paths = (tiny.save(_deep(layer), folder / "right"), tiny.save(faulty, folder / "faulty"))
    right, wrong = (
        np.concatenate([x["states"].numpy() for x in answered(tiny.opened(path, how), STATES)], axis=1)
        for path, how in zip(paths, ("f32", kv), strict=True)
    )
    return part(LayerCurve.of([relative_errors(a, b) for a, b in zip(right, wrong, strict=True)]))


@pytest.mark.parametrize("layer", [0, DEPTH // 2, DEPTH - 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_layer_with_a_fault_is_the_first_that_stands_out(fault: str, layer: int, tmp_path: Path) -> None:
    found = _parting(tmp_path, FAULTS[fault](layer), layer, "f32")
    assert found.stand_out[:1] == (layer,)
    assert found.begins == layer


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int4"])
def test_an_equally_coarse_cache_has_no_layer_that_stands_out(kv: str, tmp_path: Path) -> None:
    found = _parting(tmp_path, _deep(3), 3, kv)
    assert found.stand_out == ()
    assert found.begins == 0


@pytest.mark.parametrize(("dtype", "bits"), [("float32", torch.int32), ("bfloat16", torch.int16)])
def test_a_jitter_flips_last_bits_of_layer_0_alone(dtype: str, bits: torch.dtype, checkpoint: Checkpoint) -> None:
    plain, engine = (tiny.opened(checkpoint("llama"), "f32", dtype, **option) for option in ({}, {"jitter": "7"}))
    before, after = (dict(e._model.module.named_parameters()) for e in (plain, engine))
    flipped = 0
    for name, weight in before.items():
        changed = weight.view(bits) ^ after[name].view(bits)
        assert set(changed.unique().tolist()) <= ({0, 1} if ".layers.0." in name else {0}), name
        flipped += int(changed.sum())
    assert flipped == engine.runtime_info().more["jittered_weights"] > 0
    assert "jittered_weights" not in plain.runtime_info().more


def test_a_jitter_is_the_same_for_the_same_seed_and_another_for_another(checkpoint: Checkpoint) -> None:
    def weights(seed: str) -> Tensor:
        module = tiny.opened(checkpoint("llama"), jitter=seed)._model.module
        return torch.cat([weight.flatten() for weight in module.parameters()])

    assert torch.equal(weights("1"), weights("1"))
    assert not torch.equal(weights("1"), weights("2"))
