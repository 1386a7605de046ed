"""Recipes: plans of formats by layer, written in the forms that engines read.

See docs/diagnosis.md#which-keys-and-values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from fidelab.core import KVSpec, write_atomically
from fidelab.core.errors import NotSupportedError, UnknownNameError, UsageError
from fidelab.engines.hf.weights import NATIVE
from fidelab.results.numbers import format_layers
from fidelab.results.study import StudyPlan

WIDE: Final = ("auto", NATIVE, "bf16", "f16", "f32", "bfloat16", "float16", "float32")
"""Names of the compute type."""
VLLM: Final = ("fp8_e4m3", "fp8_e5m2")
"""Formats of vLLM itself that Transformers rounds to the same numbers."""
_GGML: Final = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
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
        layers = format_layers(self.skipped).removeprefix("layers ").removeprefix("layer ")  # ``0, 4–6``
        return f"{head}[{more}skip-layers={layers.replace('–', '-').replace(', ', ',')}]"


def pair_name(k: str, v: str, wide: str) -> str:
    """Return ``q8_0`` for both sides, or ``bf16/q8_0``."""
    return k if k == v else "/".join(wide if side == NATIVE else side for side in (k, v))


def _refusal(why: str, uniform: str | None) -> NotSupportedError:
    return NotSupportedError(f"--export: {why}. Nearest that works: {uniform or 'a single format'} in all layers")


def _nothing() -> NotSupportedError:
    return NotSupportedError("--export: the plan keeps the compute type in all layers, there is nothing to write")


def _for_vllm(recipe: Recipe, uniform: str | None) -> tuple[str, list[int]]:
    """The only quantized format of the plan, and the layers without it."""
    if not recipe.quantized:
        raise _nothing()
    if len(recipe.quantized) > 1:
        raise _refusal("vLLM has one cache format next to native layers, this plan has several", uniform)
    [(k, v)] = recipe.quantized
    if k != v or k not in VLLM:
        name = recipe.name.get((k, v), f"{k}/{v}")
        raise _refusal(f"vLLM itself stores {' and '.join(VLLM)}, not {name}; --export-format fidelab has it", uniform)
    return k, recipe.skipped


def _vllm(recipe: Recipe, uniform: str | None) -> str:
    name, skipped = _for_vllm(recipe, uniform)
    arguments: dict[str, Any] = {"kv_cache_dtype": name}
    if skipped:
        arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in skipped]
    return json.dumps(arguments) + "\n"


def _vllm_arguments(recipe: Recipe, uniform: str | None) -> str:
    name, skipped = _for_vllm(recipe, uniform)
    words = ["--kv-cache-dtype", name]
    return shlex.join([*words, "--kv-cache-dtype-skip-layers", *map(str, skipped)] if skipped else words) + "\n"


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


def _ik_llama(recipe: Recipe, uniform: str | None) -> str:
    """First and last layers with types of their own; the compute type is f16."""
    words: list[str] = []
    for place, side in enumerate("kv"):
        types = ["f16" if pair[place] == NATIVE else pair[place] for pair in recipe.layers.values()]
        if unknown := next((name for name in types if name not in (*_GGML, "f16")), None):
            raise _refusal(f"ik_llama.cpp has {', '.join(_GGML)} and f16, not {unknown}", uniform)
        spans = [(name, len([*some])) for name, some in groupby(types)]
        if len(spans) > 3:
            sides = {"k": "keys", "v": "values"}[side]
            raise _refusal(
                f"ik_llama.cpp sets the first and the last layers, this plan changes {sides} in {len(spans)} places",
                uniform,
            )
        middle = max(range(len(spans)), key=lambda at: spans[at][1]) if len(spans) < 3 else 1
        words += [f"--cache-type-{side}", spans[middle][0]]
        words += [f"--cache-type-{side}-first", f"{spans[0][0]},{spans[0][1]}"] if middle > 0 else []
        words += [f"--cache-type-{side}-last", f"{spans[-1][0]},{spans[-1][1]}"] if middle < len(spans) - 1 else []
    return shlex.join(words) + "\n"


def _llamacpp(recipe: Recipe, uniform: str | None) -> str:
    if len(recipe.quantized) == 1 and not recipe.skipped:
        return _ik_llama(recipe, uniform)
    raise _refusal("llama.cpp has one type for keys and one for values in all layers", uniform)


def _fidelab(recipe: Recipe, uniform: str | None) -> str:
    if (kv := recipe.kv()) is None:
        raise _refusal("--kv has one format next to native layers, this plan has several", uniform)
    return kv + "\n"


def _tensorrt(recipe: Recipe, uniform: str | None) -> str:
    raise _refusal("no released TensorRT-LLM documents cache formats by layer", uniform)


EXPORTS: Final[Mapping[str, Callable[[Recipe, str | None], str]]] = {
    "vllm": _vllm,
    "vllm-args": _vllm_arguments,
    "modelopt": _modelopt,
    "ik_llama": _ik_llama,
    "llamacpp": _llamacpp,
    "tensorrt-llm": _tensorrt,
    "fidelab": _fidelab,
}
"""Name → the text of a recipe.  The second argument is the nearest single format."""
_BY_NAME: Final = {"hf_quant_config.json": "modelopt"}
_BY_SUFFIX: Final = {".json": "vllm", ".args": "vllm-args", ".kv": "fidelab"}


def form_of(path: Path, given: str | None) -> str:
    """Return the name of the form, by ``--export-format`` or by the file's name.

    Raises:
        UsageError: If the form does not exist, or the file's name does not give one.
    """
    name = given or _BY_NAME.get(path.name) or _BY_SUFFIX.get(path.suffix)
    if name is None:
        raise UsageError(f"--export {path}: add --export-format {', '.join(EXPORTS)}")
    if name not in EXPORTS:
        raise UnknownNameError("--export-format", name, EXPORTS)
    return name


def export_plan(plan: StudyPlan, path: Path, form: str) -> None:
    """Write the plan for an engine; ``form`` is a name of :data:`EXPORTS`.

    Raises:
        NotSupportedError: If the engine cannot store the plan.
        OutputError: If the file cannot be written.
    """
    text = plan.kv + "\n" if form == "fidelab" and plan.kv else EXPORTS[form](Recipe.of(plan.formats), plan.uniform)
    write_atomically(path, text)
