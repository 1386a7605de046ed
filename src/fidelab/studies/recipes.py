"""Recipes: plans of formats by layer, written in the forms that engines read.

See docs/diagnosis.md#which-keys-and-values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fidelab.core import KVSpec
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.engines.hf.weights import NATIVE
from fidelab.results.numbers import format_layers
from fidelab.results.record import write_atomically
from fidelab.results.study import StudyPlan

WIDE: Final = ("auto", NATIVE, "bf16", "f16", "f32", "bfloat16", "float16", "float32")
"""Names of the compute type."""
VLLM: Final = ("fp8_e4m3", "fp8_e5m2")
"""Formats of vLLM itself that Transformers rounds to the same numbers."""
_MODELOPT: Final = {
    ("fp8_e4m3", "fp8_e4m3"): "FP8",
    ("nvfp4", "nvfp4"): "NVFP4",
    ("fp8_e4m3", "nvfp4"): "FP8_K_NVFP4_V",
}


@dataclass(frozen=True)
class Recipe:
    """Formats of keys and of values by layer; ``native`` is the compute type.

    ``name``: the engine's name of a pair, where it has one.
    """

    layers: Mapping[int, tuple[str, str]]
    name: Mapping[tuple[str, str], str]

    @classmethod
    def of(cls, formats: Mapping[str, str]) -> Recipe:
        """Read the formats of a plan: ``3.keys`` and ``3.values``, or ``3`` for both."""
        layers, names = dict[int, tuple[str, str]](), dict[tuple[str, str], str]()
        for group, name in formats.items():
            layer, _, side = group.partition(".")
            k, v = layers.get(int(layer), (NATIVE, NATIVE))
            if side:
                layers[int(layer)] = (name, v) if side == "keys" else (k, name)
            else:
                spec = KVSpec.parse(name)
                k, v = (NATIVE if one.name in WIDE else str(one) for one in (spec.k, spec.v))
                layers[int(layer)] = k, v
                names[k, v] = name
        return cls(layers, names)

    @property
    def quantized(self) -> list[tuple[str, str]]:
        """Return the pairs in use, in order of appearance, without layers that are native."""
        return [pair for pair in dict.fromkeys(self.layers.values()) if pair != (NATIVE, NATIVE)]

    @property
    def skipped(self) -> list[int]:
        """Return the layers that keep the compute type."""
        return [layer for layer, pair in self.layers.items() if pair == (NATIVE, NATIVE)]

    def kv(self, wide: str = "bf16") -> str | None:
        """Return the recipe as ``--kv``: one format and skipped layers; ``None`` if layers have different formats.

        ``wide``: name of the compute type as one of two sides.
        """
        if len(self.quantized) != 1:
            return None
        [pair] = self.quantized
        name = self.name.get(pair) or pair_name(*pair, wide)
        if not self.skipped:
            return name
        head, bracket, options = name.rpartition("[") if name.endswith("]") else (name, "", "")
        more = f"{options[:-1]}," if bracket else ""
        return f"{head}[{more}skip-layers={','.join(_ranges(self.skipped))}]"


def pair_name(k: str, v: str, wide: str) -> str:
    """Return ``q8_0`` for both sides, or ``bf16/q8_0``."""
    return k if k == v else "/".join(wide if side == NATIVE else side for side in (k, v))


def _ranges(layers: Sequence[int]) -> list[str]:
    """``0``, ``4-6``."""
    text = format_layers(layers).removeprefix("layers ").removeprefix("layer ")
    return text.replace("–", "-").split(", ") if text else []


def _refusal(why: str, uniform: str | None) -> NotSupportedError:
    return NotSupportedError(f"--export: {why}. Nearest that works: {uniform or 'a single format'} in all layers")


def _nothing() -> NotSupportedError:
    return NotSupportedError("--export: the plan keeps the compute type in all layers, there is nothing to write")


def _vllm(recipe: Recipe, uniform: str | None) -> str:
    """Arguments of ``vllm.LLM``: the only quantized format of the plan, and the layers without it."""
    if not recipe.quantized:
        raise _nothing()
    if len(recipe.quantized) > 1:
        raise _refusal("vLLM has one cache format next to native layers, this plan has several", uniform)
    [(k, v)] = recipe.quantized
    if k != v or k not in VLLM:
        name = recipe.name.get((k, v), f"{k}/{v}")
        raise _refusal(f"vLLM itself stores {' and '.join(VLLM)}, not {name}; a .kv file has it", uniform)
    arguments: dict[str, Any] = {"kv_cache_dtype": k}
    if recipe.skipped:
        arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in recipe.skipped]
    return json.dumps(arguments) + "\n"


def _modelopt(recipe: Recipe, uniform: str | None) -> str:
    """The form that Model-Optimizer's export of mixed KV caches writes; native layers are left out of the map."""
    layers = {}
    for layer, pair in recipe.layers.items():
        if pair == (NATIVE, NATIVE):
            continue
        if pair not in _MODELOPT:
            said = "/".join(pair)
            raise _refusal(f"Model-Optimizer has FP8, NVFP4 and FP8/NVFP4, not {said} of layer {layer}", uniform)
        layers[f"model.layers.{layer}.self_attn"] = {"quant_algo": _MODELOPT[pair]}
    if not layers:
        raise _nothing()
    found = {one["quant_algo"] for one in layers.values()}
    whole = found.pop() if len(found) == 1 and not recipe.skipped else "MIXED_PRECISION"
    quantization = {
        "quant_algo": None,
        "kv_cache_quant_algo": whole,
        "kv_cache_quantized_layers": layers,
        "kv_cache_schema_version": 1,
    }
    return json.dumps({"producer": {"name": "fidelab"}, "quantization": quantization}, indent=2) + "\n"


def _fidelab(recipe: Recipe, uniform: str | None) -> str:
    if (kv := recipe.kv()) is None:
        raise _refusal("--kv has one format next to native layers, this plan has several", uniform)
    return kv + "\n"


EXPORTS: Final[Mapping[str, Callable[[Recipe, str | None], str]]] = {
    "vllm": _vllm,
    "modelopt": _modelopt,
    "fidelab": _fidelab,
}
"""Name → the text of a recipe.  The second argument is the nearest single format."""


def form_of(path: Path) -> str:
    """Return the name of the form by the file's name.

    Raises:
        UsageError: If the name does not give one.
    """
    form = "modelopt" if path.name == "hf_quant_config.json" else {".json": "vllm", ".kv": "fidelab"}.get(path.suffix)
    if form is None:
        raise UsageError(
            f"--export {path}: name it NAME.json (vLLM), hf_quant_config.json (Model-Optimizer) or NAME.kv"
        )
    return form


def export_plan(plan: StudyPlan, path: Path) -> str:
    """Write the plan for an engine, in the form that the file's name asks for, and return the form's name.

    Raises:
        NotSupportedError: If the engine cannot store the plan.
        OutputError: If the file cannot be written.
    """
    form = form_of(path)
    text = plan.kv + "\n" if form == "fidelab" and plan.kv else EXPORTS[form](Recipe.of(plan.formats), plan.uniform)
    write_atomically(path, text)
    return form
