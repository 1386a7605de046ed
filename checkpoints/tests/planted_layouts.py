"""Faults to plant in the layouts of :mod:`checkpoints.tests.field_layouts`, with the rules that may name each.

The list was written before the rules.  A fault is planted in every layout that has what it needs, so that most layouts
have 30 and more.  It counts as named if one of its rules reports something, at whatever severity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints.tests.field_layouts import (
    EXPERTS,
    FFN,
    HIDDEN,
    LAYERS,
    TOTAL,
    Field,
    Layout,
    fp8_rows,
    int8_rows,
    integers,
    weights_of,
)
from checkpoints.tests.synthetic import replaced
from fidelab_checkpoints.layouts import Awq, Gptq, PackQuantized

Change = Callable[[Field, Layout], Any]


@dataclass(frozen=True)
class Planted:
    """A fault: where it may be planted, what it changes, and which rules may name it."""

    fits: Callable[[Layout], bool]
    change: Change
    rules: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------- helpers

_POWERS = (torch.uint8, torch.float8_e8m0fnu)  # scales that are powers of two


def _cast(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.uint8:  # the exponents of E8M0
        return (torch.log2(value.float()) + 127).round().clamp(0, 254).to(torch.uint8)
    return value.to(like.dtype)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.exp2(tensor.float() - 127) if tensor.dtype == torch.uint8 else tensor.float()


def _apply(content: Field, name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
    old = content.tensors[name]
    content.tensors[name] = _cast(to(_values(old)), old)


def _scale(to: Callable[[torch.Tensor], torch.Tensor], part: str = "scale") -> Change:
    return lambda content, layout: _apply(content, f"{layout.linear}.{getattr(layout, part)}", to)


def _everywhere(to: Callable[[torch.Tensor], torch.Tensor], part: str) -> Change:
    def change(content: Field, layout: Layout) -> None:
        for name in [*content.tensors]:
            if name.endswith(f".{getattr(layout, part)}"):
                _apply(content, name, to)

    return change


def _first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def to(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return to


def _fill(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def _nan(content: Field, layout: Layout) -> None:
    name = f"{layout.linear}.{layout.scale}"
    if content.tensors[name].dtype in _POWERS:
        content.tensors[name].view(torch.uint8).view(-1)[0] = 255
    else:
        _apply(content, name, _first(float("nan")))


def whole(layout: Layout) -> Field:
    """Return the whole checkpoint of a layout, which is built once; nobody may change it."""
    if layout.build not in _WHOLE:
        _WHOLE[layout.build] = layout.build()
    return _WHOLE[layout.build]


_WHOLE: dict[Callable[[], Field], Field] = {}


def _sample(layout: Layout, part: str) -> torch.Tensor:
    return whole(layout).tensors[f"{layout.linear}.{getattr(layout, part)}"]


def _has(*names: str) -> Callable[[Layout], bool]:
    return lambda layout: all(getattr(layout, name) for name in names)


def _floating(layout: Layout) -> bool:
    """Scales in 16 or 32 bits, which hold any number."""
    return bool(layout.linear) and _sample(layout, "scale").dtype in (torch.float16, torch.bfloat16, torch.float32)


def _signed(layout: Layout) -> bool:
    return bool(layout.linear) and _sample(layout, "scale").dtype not in _POWERS


def _many(layout: Layout) -> bool:
    return _signed(layout) and _sample(layout, "scale").numel() > 16


def _grid(layout: Layout) -> bool:
    return bool(layout.linear) and _sample(layout, "scale").dim() == 2 and _sample(layout, "scale").shape[0] > 1


def _drop(content: Field, start: str) -> int:
    """Drop tensors, and return how many are left."""
    content.tensors = {name: value for name, value in content.tensors.items() if not name.startswith(start)}
    return len(content.tensors)


def _dense(content: Field, layout: Layout, module: str) -> torch.Tensor:
    """Weights of a module's shape, outputs and inputs as they are before they are quantized."""
    key = f"{module}.{layout.codes}"
    codes = content.tensors[key]
    if layout.codes == "qweight":
        n = content.tensors[f"{module}.scales"].shape[1]
        bits_words = codes.shape[0] if codes.shape[1] == n else None
        k = codes.shape[0] if bits_words is None else content.tensors[f"{module}.g_idx"].shape[0]
    elif f"{module}.weight_shape" in content.tensors:
        n, k = (int(size) for size in content.tensors[f"{module}.weight_shape"])
    else:
        n, k = codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(n, k, generator=generator) * 0.05).to(
        torch.float16 if layout.codes == "qweight" else torch.bfloat16
    )


def _kept(content: Field, layout: Layout, module: str, *, listed: bool) -> None:
    weight = _dense(content, layout, module)
    _drop(content, f"{module}.")
    content.tensors[f"{module}.weight"] = weight
    if listed:
        layout.keep(content, module)


def _keep_siblings(content: Field, layout: Layout) -> None:
    for module in layout.siblings:
        _kept(content, layout, module, listed=module == layout.siblings[0])


def _restored(
    content: Field, layout: Layout, module: str, store: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    """Quantize a module in another way."""
    weight = _dense(content, layout, module)
    _drop(content, f"{module}.")
    content.tensors[f"{module}.weight"] = weight
    replaced(content, module, store(weight))


def _other_bits(content: Field, layout: Layout, module: str) -> None:
    if layout.codes == "weight_packed":
        _restored(content, layout, module, integers(PackQuantized, 8, scale="BF16"))
    elif "GPTQ" in content.quantization["quant_method"].upper() or content.quantization["quant_method"] == "auto-round":
        _restored(content, layout, module, integers(Gptq, 4))  # of a module with 8
    else:
        _restored(content, layout, module, integers(Gptq, 4, symmetric=False))


def _other_group(content: Field, layout: Layout, module: str) -> None:
    if layout.codes == "weight_packed":
        _restored(content, layout, module, integers(PackQuantized, 4, scale="BF16", group=64))
    elif content.quantization["quant_method"] == "awq":
        _restored(content, layout, module, integers(Awq, 4, symmetric=False, group=64))
    else:
        _restored(content, layout, module, integers(Gptq, 8, group=64))


def _other_type(content: Field, layout: Layout, module: str) -> None:
    is_int8 = layout.codes == "weight" and content.tensors[f"{module}.weight"].dtype == torch.int8
    _restored(content, layout, module, fp8_rows if is_int8 else int8_rows)


def _for_lists(content: Field) -> Iterator[list[str]]:
    quantization = [content.quantization]
    if "hf_quant_config.json" in content.json_files:
        quantization.append(content.json_files["hf_quant_config.json"]["quantization"])
    for place in quantization:
        for key in ("ignore", "exclude_modules", "exclude", "modules_to_not_convert"):
            if isinstance(place.get(key), list):
                yield place[key]


def _unlist(content: Field, like: str) -> None:
    for names in _for_lists(content):
        names[:] = [name for name in names if not re.search(like, name)]


def _without_config(content: Field) -> None:
    content.json_files.pop("hf_quant_config.json", None)
    for place in (content.config, content.config.get("text_config", {})):
        place.pop("quantization_config", None)


def _kv(to: Callable[[torch.Tensor], torch.Tensor], count: int | None = 1) -> Change:
    def change(content: Field, layout: Layout) -> None:
        for name in layout.kv[-count:] if count else layout.kv:
            _apply(content, name, to)

    return change


def _kv_silent(content: Field, layout: Layout) -> None:
    quantization = content.quantization
    quantization["kv_cache_scheme"] = quantization["kv_cache_quant_algo"] = None
    if "export" in quantization:
        quantization["export"]["kv_cache_group"] = []
        quantization["layer_quant_config"] = quantization["kv_cache_quant_config"] = {}


def _roles(content: Field, layout: Layout) -> tuple[str, str, str]:
    names = ("gate_proj", "up_proj", "down_proj")
    return (
        names
        if any(name.startswith(f"{layout.experts.format(0)}.gate_proj.") for name in content.tensors)
        else ("w1", "w3", "w2")
    )


def _fuse(content: Field, layout: Layout) -> None:
    """Store the experts of a layer in 16 bits, in two tensors."""
    experts = layout.experts.format("").rstrip(".")
    for e in range(EXPERTS):
        _drop(content, f"{experts}.{e}.")
    noise = weights_of({"gate_up": (EXPERTS, HIDDEN, 2 * FFN), "down": (EXPERTS, FFN, HIDDEN)})
    content.tensors[f"{experts}.gate_up_proj"] = noise["gate_up"]
    content.tensors[f"{experts}.down_proj"] = noise["down"]


def _expert_change(role: int, to: Callable[[Field, Layout, str], Any]) -> Change:
    def change(content: Field, layout: Layout) -> None:
        to(content, layout, f"{layout.experts.format(2)}.{_roles(content, layout)[role]}")

    return change


def _drop_part(part: str) -> Callable[[Field, Layout, str], Any]:
    return lambda content, layout, module: _drop(content, f"{module}.{getattr(layout, part)}")


def _mtp_listed(layout: Layout) -> bool:
    """Whether the layer for multi-token prediction is kept, by a list that can lose its entry."""
    content = whole(layout)
    return bool(layout.mtp) and any(re.search("mtp", name) for names in _for_lists(content) for name in names)


def _mtp_quantized(layout: Layout) -> bool:
    return bool(layout.mtp) and f"{layout.mtp_linear}.{layout.scale}" in whole(layout).tensors


def _sibling(place: int, to: Callable[[Field, Layout, str], Any]) -> Change:
    return lambda content, layout: to(content, layout, layout.siblings[place])


def _has_list(layout: Layout) -> bool:
    return bool(layout.linear) and any(True for _ in _for_lists(whole(layout)))


def _method(*names: str) -> Callable[[Layout], bool]:
    return lambda layout: whole(layout).quantization.get("quant_method") in names


def _store_matrix(content: Field, layout: Layout, module: str) -> None:
    """Quantize a module that is kept."""
    weight = content.tensors[f"{module}.weight"]
    replaced(content, module, layout.store(weight))


def _weights_setting(**changes: object) -> Change:
    def change(content: Field, layout: Layout) -> None:
        quantization = content.quantization
        groups = quantization.get("config_groups")
        (groups["group_0"]["weights"] if groups else quantization).update(changes)

    return change


def _rename_list(content: Field, layout: Layout) -> None:
    """Put the list under a key that the method does not read."""
    for place in (content.quantization,):
        for key in ("ignore", "exclude_modules", "exclude", "modules_to_not_convert"):
            if place.get(key):
                place["ignored_layers" if key != "modules_to_not_convert" else "ignore"] = place.pop(key)
                return


# ------------------------------------------------------------------------------------------------------ the list

ZERO = ("scale-zero", "experts-uncalibrated", "scale-absurd")
NONFINITE = ("scale-nonfinite", "experts-uncalibrated")
ABSURD = ("scale-absurd", "experts-uncalibrated")
UNLISTED = ("plain-not-ignored", "fused-siblings")
OTHER = ("fused-siblings", "packing-mismatch")
_linear, _siblings, _input, _total = _has("linear"), _has("siblings"), _has("linear", "input"), _has("linear", "total")
_kvs, _expert, _router = _has("kv"), _has("experts"), _has("router", "linear")
_integer = _has("integer")

PLANTED: dict[str, Planted] = {
    # scales of weights
    "scales of zero": Planted(_signed, _scale(_fill(0.0)), ZERO),
    "one scale of zero": Planted(_many, _scale(_first(0.0)), ZERO),
    "a scale that is NaN": Planted(_linear, _nan, NONFINITE),
    "an infinite scale": Planted(_floating, _scale(_first(float("inf"))), NONFINITE),
    "negative scales": Planted(_signed, _scale(lambda t: -t), ("scale-negative",)),
    "reciprocal scales": Planted(_floating, _scale(lambda t: 1 / t), ABSURD),
    "scales of one": Planted(_signed, _scale(_fill(1.0)), ABSURD),
    "constant scales": Planted(_many, _scale(lambda t: torch.full_like(t, float(t.mean()))), ABSURD),
    "scales 10,000 times too large": Planted(_floating, _scale(lambda t: t * 1e4), ABSURD),
    "scales 10,000 times too small": Planted(_floating, _scale(lambda t: t / 1e4), (*ABSURD, "scale-underflow")),
    "no scales": Planted(_linear, lambda c, at: _drop(c, f"{at.linear}.{at.scale}"), ("incomplete-module", *ABSURD)),
    "scales with a row less": Planted(
        _grid,
        lambda c, at: c.tensors.update({f"{at.linear}.{at.scale}": c.tensors[f"{at.linear}.{at.scale}"][:-1].clone()}),
        ("packing-mismatch",),
    ),
    "transposed scales": Planted(
        lambda at: _grid(at) and _sample(at, "scale").shape[0] != _sample(at, "scale").shape[1],
        lambda c, at: c.tensors.update(
            {f"{at.linear}.{at.scale}": c.tensors[f"{at.linear}.{at.scale}"].t().contiguous()}
        ),
        ("packing-mismatch",),
    ),
    "the same scale in every layer": Planted(
        lambda at: _floating(at) and _sample(at, "scale").numel() == 1, _everywhere(_fill(3e-4), "scale"), ABSURD
    ),
    # scales of activations
    "an input scale of zero": Planted(_input, _scale(_fill(0.0), "input"), ZERO),
    "an input scale that is NaN": Planted(_input, _scale(_fill(float("nan")), "input"), NONFINITE),
    "a negative input scale": Planted(_input, _scale(lambda t: -t, "input"), ("scale-negative",)),
    "an infinite input scale": Planted(_input, _scale(_fill(float("inf")), "input"), NONFINITE),
    "a reciprocal input scale": Planted(_input, _scale(lambda t: 1 / t, "input"), ABSURD),
    "reciprocal input scales": Planted(_input, _everywhere(lambda t: 1 / t, "input"), ABSURD),
    "input scales of one": Planted(_input, _everywhere(_fill(1.0), "input"), ABSURD),
    "one input scale of one": Planted(_input, _scale(_fill(1.0), "input"), ABSURD),
    "the same input scale in every layer": Planted(_input, _everywhere(_fill(0.0173), "input"), ABSURD),
    "no input scale in one layer": Planted(
        _input, lambda c, at: _drop(c, f"{at.siblings[0]}.{at.input}"), ("fused-siblings", "incomplete-module")
    ),
    "input scales of fused layers differ": Planted(
        _input, _sibling(1, lambda c, at, m: _apply(c, f"{m}.{at.input}", lambda t: t * 4)), ("fused-siblings",)
    ),
    # global scales
    "a global scale of zero": Planted(_total, _scale(_fill(0.0), "total"), ZERO),
    "a global scale that is NaN": Planted(_total, _scale(_fill(float("nan")), "total"), NONFINITE),
    "an infinite global scale": Planted(_total, _scale(_fill(float("inf")), "total"), NONFINITE),
    "a negative global scale": Planted(_total, _scale(lambda t: -t, "total"), ("scale-negative",)),
    "a reciprocal global scale": Planted(_total, _scale(lambda t: 1 / t, "total"), ABSURD),
    "reciprocal global scales": Planted(_total, _everywhere(lambda t: 1 / t, "total"), ABSURD),
    "global scales of one": Planted(_total, _everywhere(_fill(1.0), "total"), ABSURD),
    "the same global scale in every layer": Planted(
        _total, lambda c, at: _everywhere(_fill(float(1 / TOTAL if at.inverse else TOTAL)), "total")(c, at), ABSURD
    ),
    "global scales of q and k differ": Planted(
        lambda at: _total(at) and at.build.__name__ != "modelopt_mixed",
        _sibling(1, lambda c, at, m: _apply(c, f"{m}.{at.total}", lambda t: t * 2.1)),
        ("fused-siblings",),
    ),
    "global scales of gate and up differ": Planted(
        lambda at: _total(at) and at.linear.endswith("down_proj"),
        lambda c, at: _apply(c, f"{at.linear.replace('down', 'gate')}.{at.total}", lambda t: t * 2.1),
        ("fused-siblings",),
    ),
    "no global scale": Planted(_total, lambda c, at: _drop(c, f"{at.linear}.{at.total}"), ("incomplete-module",)),
    # what engines fuse
    "one of fused layers is kept": Planted(
        _siblings, _sibling(0, lambda c, at, m: _kept(c, at, m, listed=True)), ("fused-siblings",)
    ),
    "the last of fused layers is kept": Planted(
        _siblings, _sibling(-1, lambda c, at, m: _kept(c, at, m, listed=True)), ("fused-siblings",)
    ),
    "one of fused layers is kept and not listed": Planted(
        _siblings, _sibling(0, lambda c, at, m: _kept(c, at, m, listed=False)), UNLISTED
    ),
    "one of fused layers is listed and quantized": Planted(
        lambda at: _siblings(at) and at.linear != "",
        _sibling(0, lambda c, at, m: at.keep(c, m)),
        ("ignored-quantized", "fused-siblings"),
    ),
    "all fused layers are kept, and one is listed": Planted(
        _siblings,
        _keep_siblings,
        UNLISTED,
    ),
    "one of fused layers has another type": Planted(_siblings, _sibling(1, _other_type), (*OTHER, "doubly-quantized")),
    "one of fused layers has other bits": Planted(_integer, _sibling(1, _other_bits), OTHER),
    "one of fused layers has other groups": Planted(_integer, _sibling(1, _other_group), OTHER),
    "one of fused layers lacks its scales": Planted(
        _siblings, _sibling(1, _drop_part("scale")), ("incomplete-module", "experts-uncalibrated")
    ),
    "gate_proj alone is kept": Planted(
        lambda at: at.linear.endswith("down_proj"),
        lambda c, at: _kept(c, at, at.linear.replace("down", "gate"), listed=True),
        ("fused-siblings",),
    ),
    # what is quantized
    "a kept layer that is not listed": Planted(_linear, lambda c, at: _kept(c, at, at.linear, listed=False), UNLISTED),
    "a listed layer that is quantized": Planted(_linear, lambda c, at: at.keep(c, at.linear), ("ignored-quantized",)),
    "an LM head that is not listed": Planted(
        lambda at: at.lists_head and _has_list(at) and at.build.__name__ != "modelopt_mixed",
        lambda c, at: _unlist(c, "lm_head"),
        ("plain-not-ignored",),
    ),
    "no quantization in the configuration": Planted(
        lambda at: True, lambda c, at: _without_config(c), ("quantization-mismatch",)
    ),
    "the list under another key": Planted(
        lambda at: _has_list(at) and "mixed" not in at.build.__name__ and at.scale != "scale",
        _rename_list,
        ("ignore-key",),
    ),
    "no codes": Planted(_linear, lambda c, at: c.tensors.pop(f"{at.linear}.{at.codes}"), ("incomplete-module",)),
    "codes of zero": Planted(
        _linear,
        lambda c, at: c.tensors.update(
            {f"{at.linear}.{at.codes}": torch.zeros_like(c.tensors[f"{at.linear}.{at.codes}"])}
        ),
        ("zero-weights",),
    ),
    "a NaN in a norm": Planted(
        lambda at: True,
        lambda c, at: _apply(c, next(n for n in c.tensors if "norm" in n), _first(float("nan"))),
        ("nonfinite",),
    ),
    "a second form of the weight": Planted(
        lambda at: at.codes != "weight",
        lambda c, at: c.tensors.update({f"{at.linear}.weight": _dense(c, at, at.linear)}),
        ("doubly-quantized",),
    ),
    "other bits in the configuration": Planted(_integer, _weights_setting(bits=3, num_bits=3), ("packing-mismatch",)),
    "another group in the configuration": Planted(
        _integer, _weights_setting(group_size=64), ("packing-mismatch", "group-not-dividing")
    ),
    "no zero points": Planted(
        _method("awq", "gptq"), lambda c, at: _drop(c, f"{at.linear}.qzeros"), ("incomplete-module",)
    ),
    "a bit rule that is lost": Planted(
        _method("gptq"), lambda c, at: c.quantization["dynamic"].pop(r"+:.*\.1\..*"), ("packing-mismatch",)
    ),
    "a keep rule that is lost": Planted(
        _method("gptq"), lambda c, at: c.quantization["dynamic"].pop(r"-:.*\.3\.mlp\.down_proj.*"), UNLISTED
    ),
    "bits of layers that are lost": Planted(
        _method("auto-round"),
        lambda c, at: [v.pop("bits") for k, v in c.quantization["extra_config"].items() if "self_attn" in k],
        ("packing-mismatch",),
    ),
    "a layer that is listed with another algorithm": Planted(
        lambda at: at.build.__name__ == "modelopt_mixed",
        lambda c, at: c.quantization["quantized_layers"].update({at.linear: {"quant_algo": "FP8"}}),
        ("packing-mismatch",),
    ),
    "two configurations that disagree": Planted(
        lambda at: at.build.__name__ == "modelopt_mixed",
        lambda c, at: c.json_files["hf_quant_config.json"]["quantization"].update(quant_algo="FP8"),
        ("doubly-quantized",),
    ),
    "a layer more than configured": Planted(
        lambda at: at.linear.startswith(("model.layers.1.", "layers.1.")) and not at.mtp,
        lambda c, at: c.tensors.update(
            {f"model.layers.{LAYERS}.self_attn.o_proj.weight": torch.ones(HIDDEN, HIDDEN).bfloat16()}
        ),
        ("geometry-layers",),
    ),
    "fewer layers than configured": Planted(
        lambda at: True,
        lambda c, at: (c.config.get("text_config") or c.config).update(num_hidden_layers=LAYERS + 3),
        ("geometry-layers",),
    ),
    # experts
    "a missing expert": Planted(_expert, lambda c, at: _drop(c, f"{at.experts.format(2)}."), ("experts-missing",)),
    "an expert without scales": Planted(
        _expert, _expert_change(0, _drop_part("scale")), ("experts-uncalibrated", "incomplete-module")
    ),
    "an expert that is kept": Planted(
        _expert,
        _expert_change(
            2,
            lambda c, at, m: (
                c.tensors.update({f"{m}.{at.codes}": torch.randn(HIDDEN, FFN).bfloat16()})
                or _drop(c, f"{m}.{at.scale}")
            ),
        ),
        (*UNLISTED, "incomplete-module", "packing-mismatch"),
    ),
    "an expert of another type": Planted(
        lambda at: _expert(at) and at.scale != "scale", _expert_change(1, _other_type), (*OTHER, "doubly-quantized")
    ),
    "experts in 16 bits in two tensors": Planted(_expert, _fuse, ("plain-not-ignored",)),
    "no router": Planted(_router, lambda c, at: _drop(c, f"{at.router}."), ("router-missing",)),
    "a quantized router": Planted(
        lambda at: _router(at) and at.codes != "qweight",
        lambda c, at: _store_matrix(c, at, at.router),
        ("router-quantized",),
    ),
    "a router that is not listed": Planted(
        lambda at: _router(at) and _has_list(at) and at.lists_head,
        lambda c, at: _unlist(c, r"gate\$?$"),
        ("plain-not-ignored",),
    ),
    # the KV cache
    "a KV scale of zero": Planted(_kvs, _kv(_fill(0.0)), ("kv-scales-invalid",)),
    "a KV scale of -1": Planted(_kvs, _kv(_fill(-1.0)), ("kv-scales-invalid",)),
    "a KV scale that is NaN": Planted(_kvs, _kv(_fill(float("nan"))), ("kv-scales-invalid",)),
    "an infinite KV scale": Planted(_kvs, _kv(_fill(float("inf"))), ("kv-scales-invalid",)),
    "reciprocal KV scales": Planted(_kvs, _kv(lambda t: 1 / t, None), ("kv-scales-invalid",)),
    "a KV scale far too small": Planted(_kvs, _kv(lambda t: t / 1e6), ("kv-scales-invalid",)),
    "KV scales of one": Planted(_kvs, _kv(_fill(1.0), None), ("kv-scales-default",)),
    "the same KV scale in every layer": Planted(_kvs, _kv(_fill(0.031), None), ("kv-scales-default",)),
    "one KV scale missing": Planted(_kvs, lambda c, at: _drop(c, at.kv[-1]), ("kv-scales-missing",)),
    "a layer without KV scales": Planted(
        _kvs, lambda c, at: [_drop(c, name) for name in at.kv[-2:]], ("kv-scales-missing",)
    ),
    "no KV scales": Planted(_kvs, lambda c, at: [_drop(c, name) for name in at.kv], ("kv-scales-missing",)),
    "KV scales that are not announced": Planted(_kvs, _kv_silent, ("kv-scales-unannounced",)),
    # multi-token prediction
    "no layer for multi-token prediction": Planted(_has("mtp"), lambda c, at: _drop(c, at.mtp), ("mtp-missing",)),
    "MTP that is not listed": Planted(_mtp_listed, lambda c, at: _unlist(c, "mtp"), ("plain-not-ignored",)),
    "MTP that is kept and not listed": Planted(
        _mtp_quantized, lambda c, at: _kept(c, at, at.mtp_linear, listed=False), ("plain-not-ignored",)
    ),
    "MTP without scales": Planted(
        _mtp_quantized, lambda c, at: _drop(c, f"{at.mtp_linear}.{at.scale}"), ("incomplete-module",)
    ),
    "MTP that is listed and quantized": Planted(
        _mtp_quantized, lambda c, at: at.keep(c, at.mtp_linear), ("ignored-quantized",)
    ),
    # gpt-oss
    "fused experts: scales that are NaN": Planted(
        lambda at: not at.linear,
        lambda c, at: c.tensors["model.layers.1.mlp.experts.down_proj_scales"][2].fill_(255),
        NONFINITE,
    ),
    "fused experts: blocks of zero": Planted(
        lambda at: not at.linear,
        lambda c, at: c.tensors["model.layers.1.mlp.experts.down_proj_blocks"].zero_(),
        ("zero-weights",),
    ),
    "fused experts: one expert of zero": Planted(
        lambda at: not at.linear,
        lambda c, at: c.tensors["model.layers.1.mlp.experts.down_proj_blocks"][1].zero_(),
        ("zero-weights", "experts-uncalibrated"),
    ),
    "fused experts: no scales": Planted(
        lambda at: not at.linear,
        lambda c, at: _drop(c, "model.layers.1.mlp.experts.down_proj_scales"),
        ("incomplete-module",),
    ),
    "fused experts: no blocks": Planted(
        lambda at: not at.linear,
        lambda c, at: _drop(c, "model.layers.1.mlp.experts.down_proj_blocks"),
        ("incomplete-module",),
    ),
    "fused experts: scales of another shape": Planted(
        lambda at: not at.linear,
        lambda c, at: c.tensors.update(
            {n: c.tensors[n][..., :-1].clone() for n in ["model.layers.1.mlp.experts.down_proj_scales"]}
        ),
        ("packing-mismatch",),
    ),
    "fused experts: a layer in 16 bits": Planted(
        lambda at: not at.linear,
        lambda c, at: (
            (
                _drop(c, "model.layers.1.mlp.experts.down_proj_"),
                c.tensors.update(
                    {"model.layers.1.mlp.experts.down_proj": torch.randn(EXPERTS, FFN, HIDDEN).bfloat16()}
                ),
            )
        ),
        ("plain-not-ignored",),
    ),
    "fused experts: scales of one": Planted(
        lambda at: not at.linear,
        lambda c, at: c.tensors["model.layers.1.mlp.experts.down_proj_scales"].fill_(127),
        ABSURD,
    ),
    "fused experts: no router": Planted(
        lambda at: not at.linear, lambda c, at: _drop(c, "model.layers.1.mlp.router."), ("router-missing",)
    ),
    "fused experts: a NaN in a bias": Planted(
        lambda at: not at.linear,
        lambda c, at: _apply(c, "model.layers.1.mlp.experts.down_proj_bias", _first(float("nan"))),
        ("nonfinite",),
    ),
}
"""Name of a fault → what it is."""


def planted_in(layout: Layout) -> dict[str, Planted]:
    """Return the faults that fit a layout."""
    return {name: fault for name, fault in PLANTED.items() if fault.fits(layout)}


def plant(fault: Planted, layout: Layout) -> Field:
    """Return the checkpoint of a layout with a fault."""
    content = deepcopy(whole(layout))
    fault.change(content, layout)
    return content
