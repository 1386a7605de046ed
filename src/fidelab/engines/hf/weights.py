"""Weights rounded to a format after they are loaded: the engine option ``weights``.

``int4[group=128,skip=0,29,down_proj]`` rounds the linear weights of all decoder layers, except those that a pattern of
``skip`` names; ``only`` takes the same patterns.  A pattern is a layer (``7``), a range of layers (``0-3``), or a part
of a weight's dotted name, with wildcards (``down_proj``, ``self_attn``, ``self_attn.*_proj``).  ``+`` adds a rule, and
of the rules that name a weight the last one holds: ``int4+int8[only=down_proj]+bf16[only=0,29]``.

Embeddings, the LM head, routers, norms and all weights outside the decoder's layers are rounded only where ``only``
has their own name: ``int8[only=lm_head]``.  With tied embeddings, these two are one weight.

``native`` rounds nothing: a level of a grid (``--vary weights=native,int4``).

Each weight is rounded in place, so that a model is never held twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelab.core import Arm, FormatSpec
from fidelab.core.errors import FidelabError, NotSupportedError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from fidelab.formats.weights import WeightFormat

WEIGHTS, NATIVE = "weights", "native"  # the option's name, and its value that rounds nothing
_SPAN = re.compile(r"(?P<first>[0-9]{1,6})(?:-(?P<last>[0-9]{1,6}))?")
_PATTERN = re.compile(r"[\w*?-]+(?:\.[\w*?-]+)*")
_ROUTERS = ("router", "gate", "shared_expert_gate", "shared_expert_gating")
_MAX_LISTED = 12


@dataclass(frozen=True)
class WeightRule:
    """Rule: one format, and the patterns of its weights. An empty ``only`` means all."""

    format: FormatSpec
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ModelWeight:
    """A weight of a loaded model.

    ``name``: its module's name (``model.layers.0.mlp.down_proj``), with the parameter's for fused experts.
    ``layer``: its decoder layer.  ``tensor``: a view ``[..., N, K]``, K the inputs.  ``usual``: rounded unless skipped.
    ``key``: equal for two names of one weight.
    """

    name: str
    layer: int | None
    tensor: Tensor
    usual: bool
    key: int

    @property
    def kind(self) -> str:
        """Last part of the name: ``down_proj``."""
        return self.name.rpartition(".")[2]


def rounding_of(arm: Arm) -> str:
    """Return the option ``weights`` of an arm of engine hf; empty if nothing is rounded."""
    return dict(arm.options).get(WEIGHTS, "") if arm.engine == "hf" else ""


def parse_rules(text: str) -> tuple[WeightRule, ...]:
    """Parse the rules of an option ``weights``. Their formats are not looked up.

    Raises:
        UsageError: If the text does not have the form that this module describes.
    """
    rules = []
    for part in re.split(r"\+(?![^\[]*\])", text):
        try:
            spec = FormatSpec.parse(part)
        except UsageError as error:
            raise _about(text, error) from None
        patterns = {key: tuple(value.split(",")) for key, value in spec.options if key in ("only", "skip")}
        for pattern in (pattern for each in patterns.values() for pattern in each):
            if not _PATTERN.fullmatch(pattern):
                raise UsageError(
                    f"weights={text}: {pattern!r} is not a pattern; write layers (7 or 0-3) or parts of names, such as "
                    "down_proj, self_attn or lm_head"
                )
        rules.append(WeightRule(spec.without("only", "skip"), **patterns))
    return tuple(rules)


def check_weights(text: str, path: str, *, trusted: bool = False) -> None:
    """Refuse an option ``weights`` whose form, formats or patterns are wrong, before a model is loaded.

    ``path``: the checkpoint; skipped if it does not exist yet.

    Raises:
        UsageError, NotSupportedError: If the option is wrong. The message names the fault.
    """
    rules = parse_rules(text)
    _formats(text, rules)
    if any(rule.only or rule.skip for rule in rules) and (Path(path) / "config.json").is_file():
        from fidelab.engines.hf.structure import skeleton

        module = skeleton(path, trusted=trusted)
        assigned(weights_of(module, module.config.get_text_config(decoder=True)), rules, text)


def _formats(text: str, rules: Sequence[WeightRule]) -> list[WeightFormat]:
    from fidelab.formats.weights import weight_format

    try:
        return [weight_format(rule.format) for rule in rules]
    except FidelabError as error:
        raise _about(text, error) from None


def _about(text: str, error: FidelabError) -> FidelabError:
    """The same error with the name of the option."""
    kind = NotSupportedError if isinstance(error, NotSupportedError) else UsageError
    return kind(f"weights={text}: {str(error).removeprefix('KV format ')}")


def weights_of(module: Any, config: Any) -> list[ModelWeight]:
    """Return the weights of a loaded model that a format can round, in module order; tied ones under each name.

    Raises:
        NotSupportedError: If its decoder layers are not found.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    from fidelab.engines.hf.structure import decoder_layers

    place = {id(each): n for n, layer in enumerate(decoder_layers(module, config)) for each in layer.modules()}
    weights: list[ModelWeight] = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_floating_point() or parameter.element_size() < 2 or key.endswith("bias"):
                continue
            name = prefix if key == "weight" else f"{prefix}.{key}"
            # Transformers' fused experts declare their orientation; other tensors of three dimensions are left alone.
            experts = parameter.ndim == 3 and hasattr(owner, "is_transposed")
            transposed = isinstance(owner, Conv1D) or (experts and owner.is_transposed)
            is_linear = experts or isinstance(owner, torch.nn.Linear | Conv1D)
            if not (is_linear or parameter.ndim <= 2):
                continue
            layer = place.get(id(owner))
            tensor = parameter.data.transpose(-1, -2) if transposed else parameter.data
            usual = is_linear and layer is not None and name.rpartition(".")[2] not in _ROUTERS
            weights.append(ModelWeight(name, layer, tensor, usual, id(parameter)))
    return weights


def assigned(
    weights: Sequence[ModelWeight], rules: Sequence[WeightRule], text: str = ""
) -> list[tuple[ModelWeight, FormatSpec]]:
    """Return the weights that rules name, each once, with the format of the last rule that names it.

    Raises:
        UsageError: If a pattern names no weight.
    """
    chosen: dict[int, tuple[ModelWeight, FormatSpec]] = {}
    for rule in rules:
        for pattern in (*rule.only, *rule.skip):
            if not any(_matches(pattern, weight) for weight in weights):
                what = f"weights={text or rule.format}: {pattern} names no weight of this model"
                raise UsageError(f"{what}; {_describe_names(pattern, weights)}")
        for weight in weights:
            # A weight that is not rounded by default must be named itself, not by a name that includes it.
            own = any(pattern.rpartition(".")[2] == weight.kind and _matches(pattern, weight) for pattern in rule.only)
            named = own or (weight.usual and (not rule.only or any(_matches(p, weight) for p in rule.only)))
            if named and not any(_matches(pattern, weight) for pattern in rule.skip):
                chosen[weight.key] = (weight, rule.format)
    return list(chosen.values())


def _describe_names(pattern: str, weights: Sequence[ModelWeight]) -> str:
    """Names that a pattern of this form can match."""
    if _SPAN.fullmatch(pattern):
        return f"its layers are 0–{max((weight.layer for weight in weights if weight.layer is not None), default=0)}"
    kinds = list(dict.fromkeys(weight.kind for weight in weights if weight.usual))
    return f"its linear weights are {', '.join(kinds[:_MAX_LISTED])}{', …' if len(kinds) > _MAX_LISTED else ''}"


def _matches(pattern: str, weight: ModelWeight) -> bool:
    if span := _SPAN.fullmatch(pattern):
        first, last = int(span["first"]), int(span["last"] or span["first"])
        return weight.layer is not None and first <= weight.layer <= last
    parts, name = pattern.split("."), weight.name.split(".")
    return any(
        all(fnmatchcase(piece, part) for piece, part in zip(name[at:], parts, strict=False))
        for at in range(len(name) - len(parts) + 1)
    )


def round_weights(module: Any, config: Any, text: str) -> dict[str, Any]:
    """Round a loaded model's weights by an option ``weights``; return the facts for the record.

    ``simulated_weight_bytes``: bytes of all parameters, rounded ones in their formats; ``simulated_weights``:
    format → its weights, parameters and bytes, and ``native`` → those that were not rounded; ``weights_option``: the
    option itself.

    Raises:
        UsageError: If a pattern names no weight.
        NotSupportedError: If the checkpoint has no weights that could be rounded, or keeps them on disk.
    """
    rules = parse_rules(text)
    formats = dict(zip((rule.format for rule in rules), _formats(text, rules), strict=True))
    weights = weights_of(module, config)
    if not any(weight.usual for weight in weights):
        raise NotSupportedError(f"weights={text}: this checkpoint has no floating-point linear weights to round")
    counts: dict[str, dict[str, int]] = {}
    native = {id(parameter): parameter for parameter in module.parameters()}
    for weight, spec in assigned(weights, rules, text):
        if weight.tensor.is_meta:
            raise NotSupportedError(f"weights={text}: {weight.name} is kept on disk, where it cannot be rounded")
        fmt, shape = formats[spec], tuple(weight.tensor.shape)
        fmt.round_(weight.tensor)
        _count(counts, fmt.used(shape[-1]), weight.tensor.numel(), fmt.nbytes(shape))
        native.pop(weight.key)
    for parameter in native.values():
        _count(counts, "native", parameter.numel(), parameter.nbytes)
    return {
        "simulated_weight_bytes": sum(count["bytes"] for count in counts.values()),
        "simulated_weights": counts,
        "weights_option": text,
    }


def _count(counts: dict[str, dict[str, int]], name: str, parameters: int, nbytes: int) -> None:
    count = counts.setdefault(name, {"weights": 0, "parameters": 0, "bytes": 0})
    count["weights"] += 1
    count["parameters"] += parameters
    count["bytes"] += nbytes
