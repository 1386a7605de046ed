"""The audit finds every fault that is planted, by its rule and with its names, and nothing in whole checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli
from tests.tiny_models import KINDS

from checkpoints.tests.conversations import CHATML
from checkpoints.tests.synthetic import (
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QUANTIZERS,
    Synthetic,
    linear_modules,
    plain,
    quantized,
    replaced,
)
from fidelab_checkpoints.audit import audit
from fidelab_checkpoints.files import open_checkpoint
from fidelab_checkpoints.rules import RULES, Finding, Subject, broken, information, suspicious

DOWN, GATE, QUERY = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.q_proj"


def findings(folder: Path, **options: Any) -> dict[str, list[Finding]]:
    """Of an audit, by rule."""
    found: dict[str, list[Finding]] = {}
    for finding in audit(folder, **options).findings:
        found.setdefault(finding.rule, []).append(finding)
    return found


def _with_cache_scales(content: Synthetic) -> Synthetic:
    content.config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    for n in range(2):
        for part in ("k_scale", "v_scale"):
            content.tensors[f"model.layers.{n}.self_attn.{part}"] = torch.tensor([0.02]).bfloat16()
    return content


CLEAN: dict[str, Callable[[], Synthetic]] = {
    "plain": plain,
    "plain, tied": lambda: plain(tied=True),
    "plain, float32": lambda: plain(dtype=torch.float32),
    "plain, experts": lambda: plain(moe=True),
    "plain, shards": lambda: plain(moe=True).sharded(),
    **{form: (lambda form=form: quantized(form)) for form in QUANTIZERS},  # type: ignore[misc]
    **{f"{form}, experts": (lambda form=form: quantized(form, moe=True)) for form in QUANTIZERS},  # type: ignore[misc]
    "w4a16, scales of the KV cache": lambda: _with_cache_scales(quantized("w4a16")),
    "w4a16, shards": lambda: quantized("w4a16", moe=True).sharded(),
}


@pytest.mark.parametrize("kind", CLEAN)
def test_nothing_is_found_in_a_whole_checkpoint(kind: str, tmp_path: Path) -> None:
    base = plain(moe="experts" in kind or "shards" in kind, tied="tied" in kind).write(tmp_path / "base")
    folder = CLEAN[kind]().write(tmp_path / "m")
    every: tuple[dict[str, Any], ...] = ({}, {"tp": 2}, {"base": base})
    for options in every:
        outcome = audit(folder, **options)
        assert [(finding.rule, finding.text) for finding in outcome.findings] == []
        assert outcome.verdict == "ok"
        assert (outcome.quantized > 0) == (outcome.method is not None)


def _blocks(values: Any) -> tuple[Any, Any]:
    """A matrix in blocks of 8 bits, or in float16 where its rows are not of whole blocks."""
    kind = gguf.GGMLQuantizationType.Q8_0 if values.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F16
    return gguf.quantize(values, kind), kind


def test_nothing_is_found_in_gguf_files(tmp_path: Path) -> None:
    assert findings(write_gguf(tmp_path / "f32.gguf", template=CHATML)) == {}
    stored = {f"blk.0.{part}.weight": _blocks for part in ("attn_q", "attn_output", "ffn_up", "ffn_down")}
    assert findings(write_gguf(tmp_path / "q8.gguf", template=CHATML, stored=stored)) == {}


WRITTEN = ["bloom", "mistral3", "qwen3_next"]  # old names, images, recurrent layers with experts: for each push
MORE_WRITTEN = ["falcon_h1", "gemma4", "inkling2", "minicpm3"]


@pytest.mark.parametrize("name", [*WRITTEN, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_WRITTEN)])
def test_nothing_is_found_in_what_transformers_writes(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind.auto).from_config(kind.config())
    model.save_pretrained(tmp_path)
    assert findings(tmp_path) == {}


@pytest.mark.model
def test_nothing_is_found_in_the_embedded_model() -> None:
    outcome = audit("smollm2-135m")
    assert (outcome.findings, outcome.method, outcome.quantized) == ((), "gguf", 211)


@dataclass
class Fault:
    """A change to a whole checkpoint, the rule that must find it, and the names that it must give."""

    rule: str
    whole: Callable[[], Synthetic]
    change: Callable[[Synthetic], Any]
    names: list[str] = field(default_factory=list)
    severity: str | None = None
    tp: int = 1
    base: Callable[[], Synthetic] | None = None
    also: tuple[str, ...] = ()  # rules that rightly speak up, too


def _set(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        content.tensors[name] = value(content.tensors[name].clone())

    return change


def _changed(
    rule: str,
    whole: Callable[[], Synthetic],
    name: str,
    value: Callable[[torch.Tensor], torch.Tensor],
    severity: str | None = None,
    **more: Any,
) -> Fault:
    """A fault of one tensor, whose name the rule must give."""
    return Fault(rule, whole, _set(name, value), [name], severity, **more)


def _poked(value: float, place: int = 3) -> Callable[[torch.Tensor], torch.Tensor]:
    def poke(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[place] = value
        return tensor

    return poke


def _drop(*names: str) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        for name in names:
            del content.tensors[name]

    return change


def _settings(**changes: Any) -> Callable[[Synthetic], None]:
    return lambda content: content.config["quantization_config"].update(changes)


def _quantize(module: str, form: str) -> Callable[[Synthetic], None]:
    """Quantize one more module."""
    return lambda content: replaced(content, module, QUANTIZERS[form][1](content.tensors[f"{module}.weight"]))


def _keep(module: str, whole: Callable[[], Synthetic]) -> Callable[[Synthetic], None]:
    """Put a module back as it was."""

    def change(content: Synthetic) -> None:
        content.tensors = {k: v for k, v in content.tensors.items() if not k.startswith(f"{module}.")}
        content.tensors[f"{module}.weight"] = whole().tensors[f"{module}.weight"]

    return change


def _several(*changes: Callable[[Synthetic], Any]) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        for one in changes:
            one(content)

    return change


def _add(module: str, weight: torch.Tensor, form: str | None = None) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        content.tensors[f"{module}.weight"] = weight
        if form is not None:
            _quantize(module, form)(content)

    return change


def _swapped(one: str, other: str) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        names = {one: other, other: one}
        content.tensors = {
            f"{names.get(name.rpartition('.')[0], name.rpartition('.')[0])}.{name.rpartition('.')[2]}": value
            for name, value in content.tensors.items()
        }

    return change


def _all_but_first_expert(value: float) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        for e in range(1, EXPERTS):
            content.tensors[f"model.layers.0.mlp.experts.{e}.up_proj.weight_scale"].fill_(value)

    return change


def _sharded(change: Callable[[Synthetic], Any]) -> Callable[[Synthetic], None]:
    def both(content: Synthetic) -> None:
        content.sharded()
        content.index = dict(content.shards)
        change(content)

    return both


def _index(content: Synthetic) -> dict[str, str]:
    assert content.index is not None
    return content.index


def _moved(name: str, file: str, *, listed: bool) -> Callable[[Synthetic], None]:
    def change(content: Synthetic) -> None:
        content.shards[name] = file
        if listed:
            _index(content)[name] = file

    return change


def _second_copy(content: Synthetic, value: torch.Tensor | None = None) -> None:
    name = f"{GATE}.weight"
    content.more["model-00003-of-00003.safetensors"] = {
        name: content.tensors[name].clone() if value is None else value,
        "extra.weight": torch.ones(1),
    }
    _index(content)["extra.weight"] = "model-00003-of-00003.safetensors"


def _form(form: str, **options: Any) -> Callable[[], Synthetic]:
    return lambda: quantized(form, **options)


def _weights(**changes: Any) -> Callable[[Synthetic], None]:
    """Other settings of compressed-tensors' weights."""
    return lambda content: content.config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)


def _cached() -> Synthetic:
    return _with_cache_scales(quantized("w4a16"))


def _older_file(content: Synthetic, change: bool = True) -> None:
    """A model.safetensors beside the shards, which the index does not name."""
    content.sharded()
    older = {name: value.clone() for name, value in content.tensors.items()}
    if change:
        older[f"{GATE}.weight"] *= 2
    content.more["model.safetensors"] = older


def _reversed_end(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:128], weight[128:].flip(0)])


def _normed() -> Synthetic:
    """The original, with norms as they are after training."""
    content = plain()
    generator = torch.Generator().manual_seed(1)
    for name, value in content.tensors.items():
        if "norm" in name:
            value.copy_(1 + 0.3 * torch.randn(value.shape, generator=generator))
    return content


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GPTQ, AWQ, W4, W4_MOE, FP8 = _form("gptq"), _form("awq"), _form("w4a16"), _form("w4a16", moe=True), _form("fp8")
W4_ASYM = _form("w4a16-asymmetric")
KEYS = "model.layers.0.self_attn.k_proj.weight"
NORM, V_SCALE = "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.v_scale"
EXPERT_SCALES = [f"model.layers.0.mlp.experts.{e}.up_proj.weight_scale" for e in range(1, EXPERTS)]
INF, NAN = float("inf"), float("nan")
FAULTS: dict[str, Fault] = {
    "NaN in a norm": _changed("nonfinite", plain, "model.norm.weight", _poked(NAN), "broken"),
    "infinity in a matrix": _changed("nonfinite", plain, f"{DOWN}.weight", _poked(-INF)),
    "NaN among FP8 codes": _changed(
        "nonfinite", FP8, f"{DOWN}.weight", lambda t: _poked(0x7F)(t.view(torch.uint8)).view(t.dtype)
    ),
    "NaN scale": _changed("scale-nonfinite", GPTQ, f"{DOWN}.scales", _poked(NAN), "broken"),
    "infinite FP8 scale": _changed("scale-nonfinite", FP8, f"{DOWN}.weight_scale", _poked(INF)),
    "zero scales": _changed("scale-zero", AWQ, f"{GATE}.scales", torch.zeros_like, "broken"),
    "some zero scales": _changed("scale-zero", W4, f"{GATE}.weight_scale", _poked(0.0), "suspicious"),
    "absurd scales": _changed("scale-absurd", GPTQ, f"{DOWN}.scales", lambda t: t * 0 + 6e4),
    "scales of one": _changed("scale-absurd", W4, f"{DOWN}.weight_scale", torch.ones_like),
    "negative scales": _changed(
        "scale-negative",
        _form("auto-round"),
        f"{DOWN}.scales",
        lambda t: t * torch.where(torch.arange(t.shape[1]) % 2 == 0, 1, -1),
        "information",
    ),
    "scales that vanish": _changed("scale-underflow", W4, f"{DOWN}.weight_scale", _poked(1e-9), "suspicious"),
    "subnormal scales": _changed(
        "scale-underflow", GPTQ, f"{DOWN}.scales", lambda t: t * 0 + 3e-6, also=("scale-absurd",)
    ),
    "a norm beyond float16": _changed("overflow-float16", plain, "model.norm.weight", _poked(7e4), "suspicious"),
    "a norm beyond the float16 of the configuration": Fault(
        "overflow-float16",
        plain,
        _several(_set("model.norm.weight", _poked(7e4)), lambda c: c.config.update(torch_dtype="float16")),
        ["model.norm.weight"],
        "broken",
    ),
    "zero codes": _changed("zero-weights", GPTQ, f"{DOWN}.qweight", torch.zeros_like, "suspicious"),
    "zero codes over live weights": _changed(
        "zero-weights", GPTQ, f"{DOWN}.qweight", torch.zeros_like, "broken", base=plain, also=("base-differs",)
    ),
    "middle codes": _changed("zero-weights", W4, f"{DOWN}.weight_packed", lambda t: t * 0 - 0x77777778),
    "half of the codes blank": _changed(
        "zero-weights",
        AWQ,
        f"{DOWN}.qweight",
        lambda t: torch.cat([t[: len(t) // 2], torch.zeros_like(t[len(t) // 2 :])]),
        "suspicious",
    ),
    "a zero matrix": _changed("zero-weights", plain, f"{DOWN}.weight", torch.zeros_like),
    "infinite scales of experts": Fault(
        "experts-uncalibrated", W4_MOE, _all_but_first_expert(INF), EXPERT_SCALES, "broken"
    ),
    "default scales of experts": Fault(
        "experts-uncalibrated", W4_MOE, _all_but_first_expert(1.0), EXPERT_SCALES, "broken"
    ),
    "an expert without input scale": Fault(
        "experts-uncalibrated",
        _form("nvfp4", moe=True),
        lambda c: c.tensors.update(
            {f"model.layers.0.mlp.experts.{e}.up_proj.input_global_scale": torch.tensor([3.0 + e]) for e in (0, 1, 3)}
        ),
        ["model.layers.0.mlp.experts.2.up_proj"],
        also=("fused-siblings",),
    ),
    "an expert missing amid others": Fault(
        "experts-missing",
        W4_MOE,
        lambda c: _drop(*(name for name in c.tensors if name.startswith("model.layers.1.mlp.experts.1.up")))(c),
        ["model.layers.1.mlp.experts.1.up_proj"],
        "broken",
    ),
    "a missing expert": Fault(
        "experts-missing",
        W4_MOE,
        lambda c: _drop(*(name for name in c.tensors if name.startswith("model.layers.1.mlp.experts.3.")))(c),
        [f"model.layers.1.mlp.experts.3.{part}_proj" for part in ("gate", "up", "down")],
    ),
    "a tensor in no file": Fault(
        "index-missing", plain, _sharded(_drop(f"{QUERY}.weight")), [f"{QUERY}.weight"], "broken"
    ),
    "a tensor not in the index": Fault(
        "index-unlisted", plain, _sharded(lambda c: _index(c).pop(f"{QUERY}.weight")), [f"{QUERY}.weight"], "suspicious"
    ),
    "a tensor in another file": Fault(
        "index-elsewhere", plain, _sharded(_moved(f"{GATE}.weight", SECOND, listed=False)), [f"{GATE}.weight"]
    ),
    "scales in another file": Fault(
        "scale-apart", W4, _sharded(_moved(f"{GATE}.weight_scale", SECOND, listed=True)), [f"{GATE}.weight_scale"]
    ),
    "the same tensor twice": Fault("duplicate-tensor", plain, _sharded(_second_copy), [f"{GATE}.weight"], "suspicious"),
    "another tensor of the same name": Fault(
        "duplicate-tensor", plain, _sharded(lambda c: _second_copy(c, torch.ones(2))), [f"{GATE}.weight"], "broken"
    ),
    "a layer under two prefixes": Fault(
        "duplicate-tensor",
        plain,
        lambda c: c.tensors.update({f"model.language_model.{DOWN[6:]}.weight": c.tensors[f"{DOWN}.weight"].clone()}),
        [f"{DOWN}.weight", f"model.language_model.{DOWN[6:]}.weight"],
    ),
    "no scales": Fault("incomplete-module", GPTQ, _drop(f"{DOWN}.scales"), [DOWN], "broken"),
    "no zero points": Fault("incomplete-module", AWQ, _drop(f"{DOWN}.qzeros"), [DOWN], also=("packing-mismatch",)),
    "no codes": Fault("incomplete-module", W4, _drop(f"{DOWN}.weight_packed"), [DOWN]),
    "no scale of FP8": Fault("incomplete-module", FP8, _drop(f"{DOWN}.weight_scale"), [DOWN]),
    "two forms of a weight": Fault(
        "doubly-quantized",
        GPTQ,
        lambda c: c.tensors.update({f"{DOWN}.weight": plain().tensors[f"{DOWN}.weight"]}),
        [DOWN],
    ),
    "two methods": Fault(
        "doubly-quantized", GPTQ, _several(_keep(DOWN, plain), _quantize(DOWN, "w4a16")), also=("scale-dtype",)
    ),
    "no quantization_config": Fault(
        "quantization-mismatch", W4, lambda c: c.config.pop("quantization_config"), [DOWN], "broken"
    ),
    "nothing quantized": Fault(
        "quantization-mismatch", plain, lambda c: c.config.update(quantization_config=QUANTIZERS["awq"][0])
    ),
    "a quantized layer on the list": Fault(
        "ignored-quantized", AWQ, _settings(modules_to_not_convert=["layers.0.mlp.down_proj"]), [DOWN], "broken"
    ),
    "a quantized layer under ignore": Fault(
        "ignored-quantized", W4, _settings(ignore=["lm_head", "re:.*layers.0.mlp.down.*"]), [DOWN]
    ),
    "a kept layer that is not listed": Fault("plain-not-ignored", W4, _keep(DOWN, plain), [DOWN], "broken"),
    "a kept layer of AWQ that is not listed": Fault("plain-not-ignored", AWQ, _keep(DOWN, plain), [DOWN], "broken"),
    "the other method's key": Fault(
        "ignore-key",
        AWQ,
        _several(_keep(DOWN, plain), _settings(ignore=[DOWN])),
        [DOWN],
        "broken",
        also=("plain-not-ignored",),
    ),
    "a quantized router": Fault(
        "router-quantized",
        _form("w8a16", moe=True),
        _several(
            _settings(ignore=["lm_head", "re:.*shared_expert_gate$"]), _quantize("model.layers.0.mlp.gate", "w8a16")
        ),
        ["model.layers.0.mlp.gate"],
        also=("plain-not-ignored",),
    ),
    "a quantized shared-expert gate": Fault(
        "router-quantized",
        _form("fp8", moe=True),
        _several(
            _settings(ignore=["lm_head", "re:.*mlp.gate$"]), _quantize("model.layers.1.mlp.shared_expert_gate", "fp8")
        ),
        ["model.layers.1.mlp.shared_expert_gate"],
        also=("plain-not-ignored",),
    ),
    "a quantized norm": Fault(
        "norm-quantized",
        FP8,
        lambda c: c.tensors.update(
            {
                "model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn),
                "model.norm.weight_scale": torch.ones(1) * 0.5,
            }
        ),
        ["model.norm"],
    ),
    "a recurrent layer in 4 bits": Fault(
        "recurrent-quantized",
        GPTQ,
        _add("model.layers.0.linear_attn.in_proj_qkvz", torch.randn(128, 128) * 0.05, "gptq"),
        ["model.layers.0.linear_attn.in_proj_qkvz"],
        "suspicious",
    ),
    "other bits": Fault("packing-mismatch", GPTQ, _settings(bits=8), [DOWN], "broken", also=("zero-point-offset",)),
    "other groups": Fault(
        "packing-mismatch",
        W4,
        lambda c: c.config["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64),
        [DOWN],
    ),
    "the other packing": Fault(
        "packing-mismatch", GPTQ, lambda c: c.config.update(quantization_config=QUANTIZERS["awq"][0]), [DOWN]
    ),
    "another stored shape": Fault("packing-mismatch", W4, _set(f"{DOWN}.weight_shape", lambda t: t * 2), [DOWN]),
    "a short last group": Fault(
        "group-not-dividing",
        AWQ,
        lambda c: c.tensors.update(
            {
                f"{DOWN}.qweight": torch.randint(-(1 << 30), 1 << 30, (176, 16), dtype=torch.int32),
                f"{DOWN}.qzeros": torch.randint(-(1 << 30), 1 << 30, (6, 16), dtype=torch.int32),
                f"{DOWN}.scales": torch.rand(6, 128).half() * 0.01 + 0.01,
            }
        ),
        [DOWN],
        "broken",
    ),
    "a group across devices": Fault(
        "tp-split",
        _form("gptq"),
        lambda c: None,
        [f"model.layers.{n}.self_attn.o_proj" for n in range(2)],
        "broken",
        tp=8,
    ),
    "outputs that are no multiple of 8": Fault("tp-split", AWQ, lambda c: None, [GATE], tp=64),
    "a group index beyond the groups": _changed("group-index", GPTQ, f"{DOWN}.g_idx", _poked(99)),
    "one group for all inputs": _changed("group-index", GPTQ, f"{DOWN}.g_idx", torch.zeros_like),
    "inputs out of order": _changed("group-index", GPTQ, f"{DOWN}.g_idx", lambda t: t.flip(0)),
    "zero points of the other version": Fault(
        "zero-point-offset", GPTQ, _settings(checkpoint_format="gptq_v2"), [f"{DOWN}.qzeros"], "broken"
    ),
    "scales of two types": _changed("scale-dtype", GPTQ, f"{DOWN}.scales", lambda t: t.bfloat16(), "suspicious"),
    "no scales of the KV cache": Fault("kv-scales-missing", W4, _settings(kv_cache_scheme={"num_bits": 8})),
    "no vision tower": Fault(
        "vision-missing",
        plain,
        lambda c: c.config.update(vision_config={"depth": 2}, architectures=["Qwen2_5_VLForConditionalGeneration"]),
        severity="broken",
    ),
    "no vision tower in a model for text": Fault(
        "vision-missing", plain, lambda c: c.config.update(vision_config={"depth": 2}), severity="suspicious"
    ),
    "no LM head": Fault("head-missing", plain, _drop("lm_head.weight"), ["lm_head.weight"], "broken"),
    "no embedding": Fault("head-missing", plain, _drop("model.embed_tokens.weight")),
    "a layer that the original has": Fault(
        "base-missing", plain, _drop(f"{QUERY}.weight"), [f"{QUERY}.weight"], "broken", base=plain
    ),
    "another layer's weights": Fault(
        "base-differs",
        GPTQ,
        _swapped(GATE, GATE.replace("gate", "up")),
        [GATE, GATE.replace("gate", "up")],
        "broken",
        base=plain,
        also=("base-differs",),
    ),
    "codes in another order": Fault(
        "base-differs", AWQ, _set(f"{DOWN}.qweight", lambda t: t.roll(1, 1)), [DOWN], base=plain
    ),
    "zero points off by one": Fault(
        "base-differs",
        GPTQ,
        _set(f"{DOWN}.qzeros", lambda t: t + 0x11111111),
        [DOWN],
        base=plain,
        also=("zero-point-offset",),
    ),
    "transposed zero points of GPTQ": Fault(
        "packing-mismatch", GPTQ, _set(f"{DOWN}.qzeros", lambda t: t.t()), [DOWN], "broken"
    ),
    "transposed zero points of AWQ": Fault(
        "packing-mismatch", AWQ, _set(f"{DOWN}.qzeros", lambda t: t.t()), [DOWN], "broken"
    ),
    "transposed zero points of compressed-tensors": Fault(
        "packing-mismatch", W4_ASYM, _set(f"{DOWN}.weight_zero_point", lambda t: t.t()), [DOWN], "broken"
    ),
    "scales per output where one is configured": Fault(
        "packing-mismatch", FP8, _weights(strategy="tensor"), [DOWN, QUERY], "broken"
    ),
    "one scale where scales per output are configured": Fault(
        "packing-mismatch", FP8, _set(f"{DOWN}.weight_scale", lambda t: t[:1].clone()), [DOWN], "broken"
    ),
    "scales of other blocks": Fault(
        "packing-mismatch",
        _form("fp8-blocks"),
        _set(f"{DOWN}.weight_scale_inv", lambda t: t[:2].clone()),
        [DOWN],
        "broken",
    ),
    "one layer without its zero points": Fault(
        "incomplete-module", W4_ASYM, _drop(f"{DOWN}.weight_zero_point"), [DOWN], "broken"
    ),
    "zero points of weights called symmetric": Fault(
        "zero-point-unannounced", W4_ASYM, _weights(symmetric=True), [f"{DOWN}.weight_zero_point"], "broken"
    ),
    "zero points of GPTQ weights called symmetric": _changed(
        "zero-point-unannounced", GPTQ, f"{DOWN}.qzeros", _poked(0x12345678), "broken"
    ),
    "zero points of AWQ weights called symmetric": Fault(
        "zero-point-unannounced", AWQ, _settings(zero_point=False), [f"{DOWN}.qzeros"], "broken"
    ),
    "middle zero points of symmetric weights": Fault(
        "zero-point-unannounced",
        W4,
        lambda c: c.tensors.update({f"{DOWN}.weight_zero_point": torch.full((16, 8), -0x77777778, dtype=torch.int32)}),
        [f"{DOWN}.weight_zero_point"],
        "suspicious",
    ),
    "reordered inputs without their index": Fault(
        "group-index",
        GPTQ,
        _several(lambda c: _drop(*(name for name in c.tensors if "g_idx" in name))(c), _settings(desc_act=True)),
        [DOWN, QUERY],
        "broken",
    ),
    "reordered inputs of compressed-tensors without their index": Fault(
        "group-index", W4, _weights(actorder="group"), [DOWN, QUERY], "broken"
    ),
    "one v_scale missing": Fault("kv-scales-missing", _cached, _drop(V_SCALE), [V_SCALE], "suspicious"),
    "a layer without scales of the KV cache": Fault(
        "kv-scales-missing", _cached, _drop(V_SCALE, V_SCALE.replace("v_", "k_")), [V_SCALE], "suspicious"
    ),
    "scales of the KV cache at one": Fault(
        "kv-scales-default",
        _cached,
        lambda c: c.tensors.update(
            {k: torch.ones_like(v) for k, v in c.tensors.items() if k.endswith(("k_scale", "v_scale"))}
        ),
        [V_SCALE],
        "suspicious",
    ),
    "a scale of the KV cache at zero": _changed("kv-scales-invalid", _cached, V_SCALE, torch.zeros_like, "broken"),
    "a scale of the KV cache at -1": _changed("kv-scales-invalid", _cached, V_SCALE, lambda t: t * 0 - 1, "broken"),
    "a huge scale of the KV cache": _changed("kv-scales-invalid", _cached, V_SCALE, lambda t: t * 1e4, "suspicious"),
    "keys with a channel far above the others": Fault(
        "fragile-keys",
        plain,
        _set(KEYS, lambda t: torch.cat([t[:3], t[3:4] * 100, t[4:]])),
        [],
        "information",
    ),
    "one of fused layers kept": Fault(
        "fused-siblings",
        W4,
        _several(_keep(QUERY, plain), _settings(ignore=["lm_head", QUERY])),
        [QUERY, QUERY.replace("q_proj", "k_proj")],
        "broken",
    ),
    "other scales of fused layers": Fault(
        "fused-siblings",
        _form("nvfp4"),
        _set(f"{GATE}.weight_global_scale", lambda t: t * 2.1),
        [GATE, GATE.replace("gate", "up")],
        "suspicious",
    ),
    "no layer for multi-token prediction": Fault(
        "mtp-missing", W4, lambda c: c.config.update(num_nextn_predict_layers=1), severity="suspicious"
    ),
    "scales of the KV cache without a scheme": Fault(
        "kv-scales-unannounced", _cached, _settings(kv_cache_scheme=None), [V_SCALE], "suspicious"
    ),
    "a layer without its router": Fault(
        "router-missing", W4_MOE, _drop("model.layers.1.mlp.gate.weight"), ["model.layers.1.mlp.gate"], "broken"
    ),
    "a zero norm": _changed("zero-weights", plain, NORM, torch.zeros_like, "suspicious"),
    "a zero final norm": _changed("zero-weights", plain, "model.norm.weight", torch.zeros_like, "suspicious"),
    "scales of AWQ in 32 bits": _changed("scale-dtype", AWQ, f"{DOWN}.scales", lambda t: t.float(), "suspicious"),
    "an older single file beside the shards": Fault("stale-file", plain, _older_file, [f"{GATE}.weight"], "broken"),
    "the same weights in a single file beside the shards": Fault(
        "stale-file", plain, lambda c: _older_file(c, change=False), severity="suspicious"
    ),
    "a tied head that is another one": Fault(
        "head-tied", plain, lambda c: c.config.update(tie_word_embeddings=True), ["lm_head.weight"], "suspicious"
    ),
    "rows from 128 on reversed": Fault(
        "base-differs",
        GPTQ,
        lambda c: replaced(
            c, GATE, QUANTIZERS["gptq"][1](_reversed_end(plain(dtype=torch.float16).tensors[f"{GATE}.weight"]))
        ),
        [GATE],
        "broken",
        base=plain,
    ),
    "one layer's scales doubled": Fault(
        "base-differs", GPTQ, _set(f"{DOWN}.scales", lambda t: t * 2), [DOWN], "broken", base=plain
    ),
    "a norm minus one": Fault(
        "base-kept-differs",
        GPTQ,
        lambda c: c.tensors.update({k: v - int(k == NORM) for k, v in _normed().tensors.items() if "norm" in k}),
        [NORM],
        "broken",
        base=_normed,
    ),
    "a norm of another revision": _changed(
        "base-kept-differs", _form("gptq"), NORM, lambda t: t * 1.1, "broken", base=plain
    ),
    "zeroed embedding rows": _changed(
        "base-kept-differs",
        W4,
        "model.embed_tokens.weight",
        lambda t: torch.cat([t[:40], t[40:] * 0]),
        "broken",
        base=plain,
    ),
    "a kept layer with one other number": _changed(
        "base-kept-differs", W4, "lm_head.weight", _poked(0.5), "broken", base=plain
    ),
    "another base of rotary positions": Fault(
        "base-config", W4, lambda c: c.config.update(rope_theta=500000.0), severity="broken", base=plain
    ),
    "another epsilon of norms": Fault(
        "base-config", W4, lambda c: c.config.update(rms_norm_eps=0.1), severity="broken", base=plain
    ),
    "more and narrower heads": Fault(
        "base-config",
        W4,
        lambda c: c.config.update(num_attention_heads=8, num_key_value_heads=4, head_dim=16),
        severity="broken",
        base=plain,
    ),
    "a longer context": Fault(
        "base-config", W4, lambda c: c.config.update(max_position_embeddings=128), severity="suspicious", base=plain
    ),
    "a layer of another shape": Fault(
        "base-missing", plain, _set(f"{QUERY}.weight", lambda t: t[:, :64].clone()), [QUERY], base=plain
    ),
}


OURS = ("fidelab_checkpoints.tensors", "fidelab_checkpoints.fusing", "fidelab_checkpoints.original")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found_by_its_rule_with_its_names(kind: str, tmp_path: Path) -> None:
    fault = FAULTS[kind]
    content = fault.whole()
    fault.change(content)
    options: dict[str, Any] = {"tp": fault.tp}
    if fault.base is not None:
        options["base"] = fault.base().write(tmp_path / "base")
    found = findings(content.write(tmp_path / "m"), **options)
    ours = {rule for rule in found if RULES[rule].find.__module__ in OURS}
    assert fault.rule in ours
    assert ours <= {fault.rule, *fault.also}
    names = [name for finding in found[fault.rule] for name in finding.tensors]
    assert set(fault.names) <= set(names)
    if fault.severity is not None:
        assert fault.severity in {finding.severity for finding in found[fault.rule]}


@pytest.mark.parametrize("form", QUANTIZERS)
def test_two_layers_that_are_swapped_are_told_from_the_original_in_every_format(form: str, tmp_path: Path) -> None:
    content = quantized(form)
    up = GATE.replace("gate", "up")
    _swapped(GATE, up)(content)
    [finding] = findings(content.write(tmp_path / "m"), base=plain().write(tmp_path / "base"))["base-differs"]
    assert set(finding.tensors) == {GATE, up}


@pytest.mark.parametrize(
    "change", [_reversed_end, lambda weight: weight * 1.25], ids=["rows at the end", "another size"]
)
@pytest.mark.parametrize("form", QUANTIZERS)
def test_a_layer_of_other_rows_or_another_size_than_the_original_is_found_in_every_format(
    form: str, change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    content, whole = quantized(form), plain().tensors[f"{GATE}.weight"]
    replaced(content, GATE, QUANTIZERS[form][1](change(whole)))
    [finding] = findings(content.write(tmp_path / "m"), base=plain().write(tmp_path / "base"))["base-differs"]
    assert finding.tensors == [GATE]


def _smoothed(seed: int = 2, *, moe: bool = False, mild: bool = False) -> Synthetic:
    """The original as AWQ leaves it before it rounds: factors moved from norms, values and gates to what follows.

    ``mild``: factors that are nearly the same for all inputs, which is what AWQ finds in some models.
    """
    content = _normed() if not moe else plain(moe=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: value.float() for name, value in content.tensors.items()}

    def factors(n: int, middle: float = 0.0) -> torch.Tensor:
        return torch.exp((middle if mild else 0.0) + (0.1 if mild else 0.5) * torch.randn(n, generator=generator))

    for n in range(2):
        layer = f"model.layers.{n}"
        for norm, followers in (
            ("input_layernorm", [f"self_attn.{part}_proj" for part in "qkv"]),
            (
                "post_attention_layernorm",
                [
                    name.removeprefix(f"{layer}.").removesuffix(".weight")
                    for name in tensors
                    if name.startswith(f"{layer}.mlp") and "down_proj" not in name
                ],
            ),
        ):
            factor = factors(HIDDEN, -0.3)
            tensors[f"{layer}.{norm}.weight"] /= factor
            for follower in followers:
                tensors[f"{layer}.{follower}.weight"] *= factor
        heads = factors(KV_HEADS * HEAD_DIM)
        tensors[f"{layer}.self_attn.v_proj.weight"] /= heads[:, None]
        repeated = heads.view(KV_HEADS, 1, HEAD_DIM).expand(-1, HEADS // KV_HEADS, -1).reshape(-1)
        tensors[f"{layer}.self_attn.o_proj.weight"] *= repeated
        for name in [name for name in tensors if name.startswith(f"{layer}.mlp") and name.endswith("up_proj.weight")]:
            factor = factors(FFN, -0.8)
            tensors[name] /= factor[:, None]
            tensors[name.replace("up_proj", "down_proj")] *= factor
    content.tensors = {name: value.bfloat16() for name, value in tensors.items()}
    return content


def _rounded(content: Synthetic, form: str) -> Synthetic:
    for module in linear_modules(content):
        replaced(content, module, QUANTIZERS[form][1](content.tensors[f"{module}.weight"]))
    content.config["quantization_config"] = deepcopy(QUANTIZERS[form][0])
    return content


@pytest.mark.parametrize(("moe", "mild"), [(False, False), (True, False), (False, True)], ids=["", "experts", "mild"])
@pytest.mark.parametrize("form", QUANTIZERS)
def test_factors_that_cancel_between_layers_are_no_difference(form: str, moe: bool, mild: bool, tmp_path: Path) -> None:
    folder = _rounded(_smoothed(moe=moe, mild=mild), form).write(tmp_path / "m")
    base = (plain(moe=True) if moe else _normed()).write(tmp_path / "base")
    found = findings(folder, base=base)
    assert {rule for rule in found if rule.startswith("base")} == set()


def test_smoothed_weights_that_were_not_rounded_are_no_difference(tmp_path: Path) -> None:
    assert findings(_smoothed().write(tmp_path / "m"), base=_normed().write(tmp_path / "base")) == {}


def test_a_norm_that_was_not_divided_by_the_factors_of_the_layers_behind_it_is_told(tmp_path: Path) -> None:
    content = _rounded(_smoothed(), "w4a16")
    content.tensors[NORM] = _normed().tensors[NORM]
    [finding] = findings(content.write(tmp_path / "m"), base=_normed().write(tmp_path / "base"))["base-differs"]
    assert set(finding.tensors) == {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"}


def test_a_layer_that_was_not_multiplied_as_its_siblings_were_is_told(tmp_path: Path) -> None:
    content = _smoothed()
    content.tensors[f"{QUERY}.weight"] = _normed().tensors[f"{QUERY}.weight"]
    folder = _rounded(content, "w4a16").write(tmp_path / "m")
    [finding] = findings(folder, base=_normed().write(tmp_path / "base"))["base-differs"]
    assert finding.tensors == [QUERY]


def test_a_change_of_type_is_not_a_difference(tmp_path: Path) -> None:
    base = plain(dtype=torch.float32).write(tmp_path / "base")
    for dtype in (torch.bfloat16, torch.float16):
        content = plain(dtype=torch.float32)
        content.tensors = {name: value.to(dtype) for name, value in content.tensors.items()}
        found = findings(content.write(tmp_path / str(dtype)), base=base)
        assert not {rule for rule in found if rule.startswith("base")}


def test_a_configuration_that_says_the_same_in_newer_words_is_not_a_difference(tmp_path: Path) -> None:
    content = plain()
    del content.config["rope_theta"], content.config["head_dim"]
    content.config["rope_parameters"] = {"rope_theta": 10000, "rope_type": "default"}
    assert findings(content.write(tmp_path / "m"), base=plain().write(tmp_path / "base")) == {}


def test_a_tied_head_with_the_embeddings_numbers_is_whole(tmp_path: Path) -> None:
    content = plain(tied=True)
    content.tensors["lm_head.weight"] = content.tensors["model.embed_tokens.weight"].clone()
    assert findings(content.write(tmp_path / "m")) == {}


def test_layers_that_override_symmetric_may_have_zero_points(tmp_path: Path) -> None:
    content = quantized("gptq")
    _set(f"{DOWN}.qzeros", _poked(0x12345678))(content)
    content.config["quantization_config"]["dynamic"] = {r"+:.*layers\.0\.mlp\.down_proj": {"sym": False}}
    assert findings(content.write(tmp_path / "m")) == {}


def test_norms_that_begin_at_zero_are_whole(tmp_path: Path) -> None:
    content = plain()
    for name, value in content.tensors.items():
        if "norm" in name:
            value.zero_()
    assert findings(content.write(tmp_path / "m")) == {}


def test_modules_are_counted_by_their_matrices(tmp_path: Path) -> None:
    outcome = audit(quantized("gptq").write(tmp_path / "m"))
    assert (outcome.quantized, outcome.modules) == (14, 16)  # embedding and LM head besides, and no norm
    outcome = audit(write_gguf(tmp_path / "m.gguf"))
    assert outcome.modules == sum(len(info.shape) > 1 for info in open_checkpoint(tmp_path / "m.gguf").tensors.values())


def test_every_rule_about_tensors_has_a_planted_fault() -> None:
    ours = {name for name, rule in RULES.items() if rule.find.__module__ in OURS}
    assert ours == {fault.rule for fault in FAULTS.values()}


@pytest.mark.parametrize(("severity", "code"), [(broken, 1), (suspicious, 0), (information, 0)])
def test_a_rule_is_one_function_with_its_severity_as_decorator(
    severity: Callable[..., Callable[[Any], Any]], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of CONTRIBUTING.md, by the command."""
    monkeypatch.setitem(RULES, "many-layers", RULES["base-config"])  # so that the rule is gone after the test
    del RULES["many-layers"]

    @severity(title="Many layers", symptom="takes long", cause="a large model", check="the number", command="wait")
    def _many_layers(subject: Subject) -> Iterator[Finding]:
        yield Finding(f"{len(subject.modules)} modules", [*subject.modules][:1])

    plain().write(tmp_path / "m")
    done = cli("checkpoint", "audit", "m", "--json", cwd=tmp_path)
    [found] = [one for one in json.loads(done.out)["findings"] if one["rule"] == "many-layers"]
    assert (found["severity"], found["at_run_time"], found["count"]) == (severity.args[0], "takes long", 1)  # type: ignore[attr-defined]
    assert done.code == code


def test_a_missing_shard_is_a_finding_that_names_it(tmp_path: Path) -> None:
    folder = plain().sharded().write(tmp_path / "m")
    (folder / SECOND).unlink()
    [finding] = findings(folder)["index-missing"]
    assert SECOND in finding.text
    assert f"{QUERY}.weight" in finding.tensors


def test_a_router_of_gguf_in_blocks_and_infinite_block_scales_are_found(tmp_path: Path) -> None:

    def infinite(values: Any) -> tuple[Any, Any]:
        raw, kind = _blocks(values)
        raw[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
        return raw, kind

    changed = {"blk.0.ffn_gate_inp.weight": (4, 32)}
    stored = {"blk.0.ffn_gate_inp.weight": _blocks, "blk.0.ffn_up.weight": infinite}
    found = findings(write_gguf(tmp_path / "m.gguf", changed=changed, stored=stored))
    assert found["router-quantized"][0].tensors == ["blk.0.ffn_gate_inp"]
    assert found["scale-nonfinite"][0].tensors == ["blk.0.ffn_up.weight"]


def _experts(values: Any) -> tuple[Any, Any]:
    """The experts of a layer in blocks of 8 bits; those from the second on are as they were allocated."""
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = np.stack([gguf.quantize(part, kind) for part in values])
    raw[1:] = 0
    return raw, kind


def test_experts_of_gguf_that_were_never_written_are_found_by_number(tmp_path: Path) -> None:
    name = "blk.0.ffn_up_exps.weight"
    file = write_gguf(tmp_path / "m.gguf", changed={name: (4, 64, 32)}, stored={name: _experts})
    found = findings(file)
    assert found["experts-uncalibrated"][0].tensors == [f"{name}[{n}]" for n in (1, 2, 3)]


def test_gguf_rows_are_compared_with_the_original(tmp_path: Path) -> None:

    def other(values: Any) -> tuple[Any, Any]:
        return _blocks(np.ascontiguousarray(values[::-1]))

    base = write_gguf(tmp_path / "base.gguf")
    up, down = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"
    whole = write_gguf(tmp_path / "whole.gguf", template=CHATML, stored={up: _blocks, down: _blocks})
    assert findings(whole, base=base) == {}
    changed = write_gguf(tmp_path / "changed.gguf", stored={up: _blocks, down: other})
    [finding] = findings(changed, base=base)["base-differs"]
    assert finding.tensors == ["blk.0.ffn_down"]


def test_experts_in_mxfp4_as_gpt_oss_has_them_are_whole_or_found_by_number(tmp_path: Path) -> None:
    content = plain()
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    content.tensors[f"{experts}_blocks"] = torch.randint(0, 256, (4, 64, 4, 16), dtype=torch.uint8)
    content.tensors[f"{experts}_scales"] = torch.randint(115, 123, (4, 64, 4), dtype=torch.uint8)
    content.tensors[f"{experts}_bias"] = torch.randn(4, 64).bfloat16()
    content.config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}
    assert findings(content.write(tmp_path / "whole")) == {}
    content.tensors[f"{experts}_scales"][2] = 255  # NaN
    [finding] = findings(content.write(tmp_path / "nan"))["experts-uncalibrated"]
    assert finding.tensors == [f"{experts}_scales[2]"]


def test_an_audit_records_what_was_checked_and_what_was_not(tmp_path: Path) -> None:
    whole, base = quantized("gptq").write(tmp_path / "whole"), plain().write(tmp_path / "base")
    alone = audit(str(whole))
    needs_base = {name for name in RULES if name.startswith("base-")}
    assert {*alone.unchecked} == {*needs_base, "tp-split"}
    assert (len(alone.rules), alone.files) == (len(RULES) - len(needs_base) - 1, 1)
    assert audit(str(whole), str(base), 2).unchecked == {}


def test_an_embedded_original_of_a_folder_is_read_as_the_weights_that_were_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = plain().write(tmp_path / "base"), AWQ().write(tmp_path / "awq")
    monkeypatch.setattr("fidelab_checkpoints.audit.embedded.NAMES", ("embedded",))
    monkeypatch.setattr("fidelab_checkpoints.audit.path", lambda name: base)
    [missed, compared] = [audit(other, original).as_json() for original in (None, "embedded")]
    assert compared["findings"] == audit(other, base).as_json()["findings"]
    assert len(compared["rules"]) > len(missed["rules"])
