"""Recipes of ``fidelab checkpoint quantize``: which modules are quantized and how, resolved for a checkpoint.

Everything that can be known from names and shapes is checked here, before anything is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fidelab.config.load import read_yaml, validate_as
from fidelab.core.errors import ConfigError, InputError
from fidelab.core.paths import expand, is_file
from fidelab_checkpoints.files import Checkpoint
from fidelab_checkpoints.modules import Module, modules_of

_STRICT_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk|block)\.(\d+)\.")
_FORMATS = {"W4A16": (4, 128), "W8A16": (8, 128), "FP8": (8, None), "NVFP4": (4, 16)}

Kind = Literal["recurrent", "router", "shared gate", "vision", "audio", "head"]


class Scheme(BaseModel):
    """A format of weights; a bare name means its ``format``.

    ``group``: inputs that share a scale.  FP8 has one scale for each output, NVFP4 groups of 16.
    """

    model_config = _STRICT_CONFIG

    format: Literal["W4A16", "W8A16", "FP8", "NVFP4"] = "W4A16"
    bits: Literal[4, 8] | None = Field(default=None, description="bits of a weight; the format's")
    group: int | None = Field(default=None, ge=8, description="inputs that share a scale; 128")
    symmetric: bool = Field(default=True, description="without zero points")

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"format": data}
        known = _FORMATS.get(str(data.get("format", "W4A16"))) if isinstance(data, dict) else None
        return {"bits": known[0], "group": known[1], **data} if known else data

    @model_validator(mode="after")
    def _check_format(self) -> Scheme:
        bits, group = _FORMATS[self.format]
        if self.bits != bits:
            raise ValueError(f"{self.format} has {bits} bits, not {self.bits}")
        if self.format in ("FP8", "NVFP4") and (self.group != group or not self.symmetric):
            raise ValueError(f"{self.format} is symmetric and has its own groups: leave out group and symmetric")
        return self


class Rule(BaseModel):
    """Modules that stay in 16 bits: ``pattern`` is a name, or ``re:`` and an expression for the whole name.

    ``matches``: how many modules it has to match, so that a pattern for another model's names does not pass unseen.
    """

    model_config = _STRICT_CONFIG

    pattern: str = Field(min_length=1)
    matches: int | None = Field(default=None, ge=1, description="modules that it has to match; at least 1")

    @model_validator(mode="after")
    def _compiles(self) -> Rule:
        self.expression()
        return self

    def expression(self) -> re.Pattern[str]:
        """Return the pattern as an expression for whole names."""
        text = self.pattern.removeprefix("re:")
        try:
            return re.compile(text if self.pattern.startswith("re:") else re.escape(text))
        except re.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from None


class Layers(BaseModel):
    """Whole layers that stay in 16 bits: those at the edges, and every n-th (counted from 1) between them."""

    model_config = _STRICT_CONFIG

    first: int = Field(default=0, ge=0)
    last: int = Field(default=0, ge=0)
    every: int | None = Field(default=None, ge=1, description="every n-th layer, as global attention is interleaved")


class Source(BaseModel):
    """One part of the calibration mix.

    ``text``: a UTF-8 file, documents apart by blank lines; or JSON lines with ``text`` or ``messages``.
    """

    model_config = _STRICT_CONFIG

    text: str
    weight: float = Field(default=1.0, gt=0, description="share of the samples, relative to the others")


class Share(BaseModel):
    """Samples that have to contain a mark, such as ``<think>``."""

    model_config = _STRICT_CONFIG

    mark: str = Field(min_length=1)
    at_least: float = Field(ge=0, le=1, description="share of the samples")


class Calibration(BaseModel):
    """Calibration data: text on which activations are measured."""

    model_config = _STRICT_CONFIG

    sources: tuple[Source, ...] = Field(min_length=1)
    samples: int = Field(default=256, ge=1)
    length: int = Field(default=2048, ge=8, description="tokens of a sample")
    seed: int = 0
    shares: tuple[Share, ...] = ()
    all_experts: bool = Field(default=True, description="route every token to every expert while calibrating")
    balance: int = Field(default=1, ge=1, le=64, description="draw this many times more, keep what balances experts")


class Fidelity(BaseModel):
    """Evaluation data: text, other than the calibration data, on which the result is compared with the original."""

    model_config = _STRICT_CONFIG

    text: str = "default"
    windows: int = Field(default=32, ge=2)
    n_ctx: int = Field(default=512, ge=16)


def _rules(value: Any) -> Any:
    parts = value if isinstance(value, list | tuple) else [value]
    return [{"pattern": part} if isinstance(part, str) else part for part in parts]


class Recipe(BaseModel):
    """A recipe file."""

    model_config = _STRICT_CONFIG

    method: Literal["gptq", "awq", "rtn", "autoround"]
    scheme: Scheme = Scheme.model_validate("W4A16")
    tp: int = Field(default=1, ge=1, description="devices that layers will be split over")
    keep: Annotated[tuple[Rule, ...], BeforeValidator(_rules)] = ()
    keep_kinds: tuple[Kind, ...] = ("recurrent", "router", "shared gate", "vision", "audio", "head")
    keep_layers: Layers = Layers()
    calibration: Calibration | None = None
    fidelity: Fidelity | None = Fidelity()

    @model_validator(mode="after")
    def _complete(self) -> Recipe:
        if self.method == "rtn" and self.calibration is not None:
            raise ValueError("rtn rounds without calibration: leave out calibration")
        if self.method != "rtn" and self.calibration is None:
            raise ValueError(f"{self.method} needs calibration: sources")
        if self.method in ("gptq", "awq", "autoround") and self.scheme.format in ("FP8", "NVFP4"):
            raise ValueError(f"{self.scheme.format} is written by rtn here, not by {self.method}")
        if self.scheme.format == "NVFP4":
            raise ValueError("NVFP4 here means scaled activations as well, which need a GPU: use W4A16, W8A16 or FP8")
        return self


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a YAML file.

    Paths in it are relative to its folder.

    Raises:
        ConfigError: If the file is missing, is not YAML, or has an unknown key (the message names the nearest) or an
            invalid value.  A recipe of llm-compressor is named, with the keys that say the same here.
    """
    content = read_yaml(path, keys="'method:' and 'scheme:'", kind="a recipe")
    if said := _of_llm_compressor(content):
        raise ConfigError(f"{path} is {said}")
    recipe = validate_as(Recipe, content, str(path))
    base = expand(path).parent
    if recipe.fidelity is not None and recipe.fidelity.text not in ("default", "wikitext-2"):
        text = _file(path, base, "fidelity.text", recipe.fidelity.text)
        recipe = recipe.model_copy(update={"fidelity": recipe.fidelity.model_copy(update={"text": text})})
    if recipe.calibration is None:
        return recipe
    sources = tuple(
        source.model_copy(update={"text": _file(path, base, "calibration.sources", source.text)})
        for source in recipe.calibration.sources
    )
    if recipe.fidelity is not None and any(source.text == recipe.fidelity.text for source in sources):
        raise ConfigError(f"{path}: fidelity.text is also calibrated on, which flatters the result: name another")
    return recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"sources": sources})})


_MODIFIERS = {  # llm-compressor's class → the method that does the same here
    "QuantizationModifier": "rtn",
    "GPTQModifier": "gptq",
    "AWQModifier": "awq",
    "AutoRoundModifier": "autoround",
}


def _of_llm_compressor(content: Any) -> str:
    """Describe a recipe of llm-compressor in this file's keys; empty for any other content.

    ``llm-compressor's own recipe (GPTQModifier); the same here: method: gptq, scheme: W4A16, keep: [lm_head]``
    """
    found: dict[str, Mapping[str, Any]] = {}
    level = [content]
    for _ in range(6):  # stages hold groups, groups hold modifiers
        tables = [table for table in level if isinstance(table, dict)]
        for table in tables:
            found |= {k: v for k, v in table.items() if str(k).endswith("Modifier") and isinstance(v, dict)}
        level = [value for table in tables for value in table.values()]
    if not found:
        return ""
    name = next((key for key in found if key in _MODIFIERS), next(iter(found)))
    scheme, ignored = found[name].get("scheme"), found[name].get("ignore")
    same = [f"method: {_MODIFIERS[name]}"] if name in _MODIFIERS else []
    if isinstance(scheme, str):
        known = next((form for form in _FORMATS if scheme.upper().startswith(form)), None)
        same.append(f"scheme: {known}" if known else f"no scheme for {scheme:.40}")
    if isinstance(ignored, list):
        same.append(f"keep: [{', '.join(map(str, ignored[:8]))}{', …' if len(ignored) > 8 else ''}]")
    words = ", ".join(same) or "see docs/checkpoints.md"
    return f"llm-compressor's own recipe ({', '.join(found)}); the same here: {words}"


def _file(path: Path, base: Path, key: str, name: str) -> str:
    try:
        file = (expand(name) if name.startswith("~") else base / name).resolve()
    except InputError as error:
        raise ConfigError(f"{path}: {key}: {error}") from None
    if not is_file(file):
        raise ConfigError(f"{path}: {key}: {file} is not a file")
    return str(file)


def edge_and_global(n_layers: int, layers: Layers) -> tuple[int, ...]:
    """Return the numbers, counted from 0, of layers that stay in 16 bits.

    Of 60 layers, ``first: 8, last: 8, every: 6`` keeps 23: both edges, and layers 11, 17 … 47 between them.
    """
    return tuple(
        layer
        for layer in range(n_layers)
        if layer < layers.first
        or layer >= n_layers - layers.last
        or (layers.every is not None and (layer + 1) % layers.every == 0)
    )


@dataclass(frozen=True)
class Plan:
    """A recipe applied to a checkpoint.

    Attributes:
        quantized: names of modules.
        kept: the modules that stay in 16 bits, with the reason.
        layers: numbers of the layers that stay whole.
        weights: number of weights in the quantized modules.
    """

    quantized: tuple[str, ...]
    kept: Mapping[str, str]
    layers: tuple[int, ...]
    weights: int


def plan(recipe: Recipe, checkpoint: Checkpoint) -> Plan:
    """Apply a recipe to a checkpoint.

    Raises:
        InputError: If the checkpoint is already quantized or is not safetensors, a rule matches another number of
            modules than it states, nothing is left to quantize, or groups do not divide a layer or its share on one of
            ``tp`` devices.
    """
    if checkpoint.format != "safetensors":
        raise InputError(f"{checkpoint.name} is {checkpoint.format}: quantize the original in safetensors")
    if checkpoint.quantization is not None:
        raise InputError(f"{checkpoint.name} is quantized already: quantize the original that it was made from")
    linear = {
        name: module
        for name, module in modules_of(checkpoint).items()
        if module.kind not in ("norm", "embedding") and _rank(module) in (2, 3)
    }
    kept: dict[str, str] = {}
    for rule in recipe.keep:
        matched = [name for name in linear if rule.expression().fullmatch(name)]
        wanted = "at least 1" if rule.matches is None else str(rule.matches)
        if not matched or (rule.matches is not None and len(matched) != rule.matches):
            example = next(iter(linear), "none")
            raise InputError(
                f"keep: {rule.pattern!r} matches {len(matched)} modules of {checkpoint.name}, expected {wanted}; "
                f"modules are named like {example}"
            )
        kept |= dict.fromkeys(matched, rule.pattern)
    numbers = {name: int(match[1]) for name in linear if (match := _LAYER.search(f"{name}.")) is not None}
    text = {name: number for name, number in numbers.items() if linear[name].kind not in ("vision", "audio")}
    layers = edge_and_global(max(text.values(), default=-1) + 1, recipe.keep_layers)
    for name, module in linear.items():
        if name not in kept and module.kind in recipe.keep_kinds:
            kept[name] = module.kind
        elif name not in kept and text.get(name) in layers:
            kept[name] = f"layer {numbers[name]}"
    quantized = tuple(name for name in linear if name not in kept)
    if not quantized:
        raise InputError(f"the recipe quantizes no module of {checkpoint.name}: all {len(linear)} are kept")
    _check_groups(recipe, [linear[name] for name in quantized])
    shapes = [part.shape for name in quantized for part in linear[name].parts.values()]
    return Plan(quantized, kept, layers, sum(math.prod(shape) for shape in shapes if len(shape) > 1))


def _rank(module: Module) -> int:
    weight = module.parts.get("weight") or module.parts.get("")
    return len(weight.shape) if weight is not None else 0


def fitting_groups(inputs: int) -> list[int]:
    """Return the usual sizes of groups that divide a layer's inputs, largest first: 704 takes 64, 32 and 16."""
    return [size for size in (128, 64, 32, 16) if inputs % size == 0]


def _check_groups(recipe: Recipe, modules: list[Module]) -> None:
    """Check that groups divide the inputs, and that kernels accept the outputs of one device; else raise InputError."""
    group = recipe.scheme.group
    faults = []
    for module in modules:
        weight = module.parts.get("weight")
        if weight is None or group is None or len(weight.shape) != 2:
            continue
        n, k = weight.shape
        if module.parallel == "inputs":
            k, whole = k // recipe.tp, k % recipe.tp == 0
        else:
            n, whole = n // recipe.tp, n % recipe.tp == 0
        if not whole:
            faults.append(f"{module.name} cannot be split over {recipe.tp} devices")
        elif k % group:
            fitting = fitting_groups(k)
            hint = f"; {', '.join(map(str, fitting))} would" if fitting else ""
            faults.append(f"group {group} does not divide the {k} inputs of {module.name}{hint}")
        elif recipe.tp > 1 and n % 8:
            faults.append(f"{module.name} has {n} outputs on each of {recipe.tp} devices, no multiple of 8")
    if faults:
        more = f" ({len(faults) - 1} more like it)" if len(faults) > 1 else ""
        raise InputError(f"{faults[0]}{more}; choose another scheme.group or tp, or keep these modules")


def balanced(counts: NDArray[np.integer[Any]], n: int) -> list[int]:
    """Return the samples that use experts most evenly, in the order of the pool.

    The choice is greedy: the next sample is the one with the largest sum over its tokens, where a token is worth one
    over the number of tokens that its expert already has.

    Args:
        counts: ``[samples, experts]`` tokens of each sample at each expert (of all layers).
        n: number of samples to take.
    """
    left = list(range(len(counts)))
    have = np.zeros(counts.shape[1])
    taken = []
    for _ in range(min(n, len(counts))):
        gains = (np.log1p(have + counts[left]) - np.log1p(have)).sum(axis=1)
        best = left.pop(int(np.argmax(gains)))
        have = have + counts[best]
        taken.append(best)
    return sorted(taken)
