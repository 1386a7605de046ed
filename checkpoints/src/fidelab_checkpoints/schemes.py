"""Quantization according to a checkpoint's configuration, in one form for all methods.  It is not trusted.

A configuration has settings for all modules and others for some of them: by name, by pattern or by group.
:meth:`Scheme.of` gives those of one module.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fidelab.core.errors import InputError
from fidelab_checkpoints.files import Checkpoint
from fidelab_checkpoints.layouts import method_of
from fidelab_checkpoints.modules import strip_prefixes

METHODS = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "auto-round": "auto-round",
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
}
"""Methods as configurations name them → the families that the audit knows."""

IGNORING = {
    "gptq": ("modules_to_not_convert",),
    "awq": ("modules_to_not_convert",),
    "auto-round": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "modelopt": ("exclude_modules", "ignore"),
    "mxfp4": ("modules_to_not_convert",),
    "quark": ("exclude",),
}
"""The keys under which engines look for modules that are not quantized, by method."""


@dataclass(frozen=True)
class Weights:
    """Storage of one module's weight according to the configuration; ``None`` where it does not say.

    Attributes:
        bits: per weight.
        group: inputs that share a scale; ``None`` also if it is a whole row.
        symmetric: whether there are no zero points.
        strategy: of scales: ``tensor``, ``channel``, ``group`` …
        block: outputs and inputs that share a scale of FP8.
    """

    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    strategy: str | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Scheme:
    """Quantization according to a checkpoint's configuration.

    Attributes:
        method: a value of :data:`METHODS`; ``None``: nothing is quantized.
        weights: of all modules that have no settings of their own.
        layers: settings of single modules, by their names without prefixes.
        overrides: settings of modules by pattern, of which the first counts.
        listed: whether only modules in ``layers`` are quantized.
        ignored: patterns of modules that are not quantized, see :meth:`ignores`.
        ignored_by: the key that lists them.
        targets: patterns of quantized modules, if the configuration lists them; else all linear layers.
        layout: a key of :data:`fidelab_checkpoints.layouts.LAYOUTS`, if modules are in one of them.
        kv_cache: whether scales of the KV cache are announced.
        reordered: whether a group index of the inputs is announced (``desc_act``, ``actorder: group``).
    """

    method: str | None = None
    weights: Weights = field(default_factory=Weights)
    layers: Mapping[str, Weights] = field(default_factory=dict)
    overrides: tuple[tuple[str, Weights], ...] = ()
    listed: bool = False
    ignored: tuple[str, ...] = ()
    ignored_by: str = "ignore"
    targets: tuple[str, ...] = ()
    layout: str | None = None
    kv_cache: bool = False
    reordered: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[str, Weights] = field(default_factory=dict, compare=False, repr=False)
    _kept: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    def of(self, module: str) -> Weights:
        """Return the settings of one module."""
        if module not in self._known:
            own = self._own(module)
            matching = (found for pattern, found in self.overrides if _matches(pattern, module, self.method))
            self._known[module] = own or next(matching, self.weights)
        return self._known[module]

    def _own(self, module: str) -> Weights | None:
        """Return what is listed for a module, or for what it is a part of."""
        name = strip_prefixes(module)
        while name and name not in self.layers:
            name = name.rpartition(".")[0]
        return self.layers.get(name)

    def ignores(self, module: str) -> bool:
        """Return whether the configuration keeps this module in 16 bits."""
        if module not in self._kept:
            unlisted = self.listed and self._own(module) is None
            named = (_matches(pattern, module, self.method) for pattern in self.ignored)
            self._kept[module] = unlisted or any(named)
        return self._kept[module]

    def targets_linear(self, module: str) -> bool:
        """Return whether an engine would build this linear layer quantized."""
        if self.ignores(module):
            return False
        return not self.targets or any(
            target == "Linear" or _matches(target, module, self.method) for target in self.targets
        )


def _matches(pattern: str, module: str, method: str | None) -> bool:
    """Return whether a pattern of a configuration names a module, by the rules of the library that wrote it."""
    if pattern.startswith("re:"):
        return _search(pattern[3:], module, at_start=True)
    if method == "gptq":  # GPTQModel's dynamic: regular expressions
        return _search(pattern, module, at_start=True)
    if method in ("modelopt", "quark", "mxfp4") and "*" in pattern:
        matches = _wildcard(pattern).match
        return matches(module) is not None or matches(strip_prefixes(module)) is not None
    if method in ("awq", "fp8", "auto-round", "mxfp4"):  # a part of the name between its dots
        return re.search(rf"(^|\.){re.escape(pattern.strip('.'))}(\.|$)", module) is not None or (
            method == "awq" and pattern in module
        )
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


@lru_cache(maxsize=4096)
def _wildcard(pattern: str) -> re.Pattern[str]:
    """Return the expression for a name that matches stars, or for what is within it."""
    return re.compile(rf"{fnmatch.translate(pattern)[:-2]}(\..*)?$", re.DOTALL)  # without the end that it sets itself


def _search(pattern: str, text: str, *, at_start: bool) -> bool:
    """Search with a regular expression from a file.

    An expression that is broken, or so long or nested that it may not end, matches nothing.
    """
    if len(pattern) > 1000 or len(text) > 500 or re.search(r"\)[*+{]", pattern):
        return False
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return (compiled.match(text) if at_start else compiled.search(text)) is not None


def scheme_of(checkpoint: Checkpoint) -> Scheme:
    """Return the quantization of the checkpoint's configuration, in one form for all methods.

    Raises:
        InputError: If the configuration names an unknown method, or an unknown variant of one.
    """
    raw = checkpoint.quantization
    if raw is None:
        return Scheme()
    named = raw.get("quant_method")
    method = METHODS.get(named) if isinstance(named, str) else None
    known = f"{', '.join(dict.fromkeys(METHODS.values()))}, GGUF and unquantized weights"
    of_mlx = "mode" in raw or any(name.endswith(".biases") for name in checkpoint.tensors)
    if named is None and {"bits", "group_size"} <= {*raw} and of_mlx:
        raise InputError(
            f"{checkpoint.name} is quantized by MLX ({raw['bits']} bits, groups of {raw['group_size']}), whose layout "
            f"is not audited; audited are {known}"
        )
    if method is None:
        raise InputError(
            f"{checkpoint.name} says that it is quantized by the method {str(named)[:60]!r}, which is not known; "
            f"known are {known}"
        )
    if method == "compressed-tensors":
        return _compressed(raw)
    ignored_by, ignored = _listed(raw, *IGNORING[method])
    base = Scheme(method, ignored=ignored, ignored_by=ignored_by, kv_cache=_announces_cache(raw), raw=raw)
    if method == "modelopt":
        return _modelopt(base, checkpoint.modelopt)
    if method == "quark":
        return _quark(base)
    if method == "mxfp4":
        return base
    base = replace(base, layout=method_of({**raw, "quant_method": method}))
    if method == "fp8":
        block = _block(raw.get("weight_block_size"))
        return replace(base, weights=Weights(group=block[1] if block else None, block=block))
    return _integers(base)


def _integers(base: Scheme) -> Scheme:
    """Return the scheme of GPTQ, AWQ or AutoRound, with the settings of single modules."""
    method, raw = base.method, base.raw
    weights = _settings(raw, Weights())
    if method == "awq":
        zero_point = raw.get("zero_point")
        weights = replace(weights, symmetric=not zero_point if isinstance(zero_point, bool) else None)
    key = {"gptq": "dynamic", "auto-round": "extra_config"}.get(str(method), "")
    own = raw.get(key)
    overrides: list[tuple[str, Weights]] = []
    kept: list[str] = []
    layers: dict[str, Weights] = {}
    for name, settings in own.items() if isinstance(own, dict) else ():
        if method == "gptq" and name.startswith("-:"):
            kept.append(name[2:])
        elif not isinstance(settings, dict):
            continue
        elif method == "gptq":
            overrides.append((name.removeprefix("+:"), _settings(settings, weights)))
        else:
            pattern = f"re:{name}" if re.search(r"[*+?^$|\\\[]", name) else name
            if settings.get("bits") in (16, 32):
                kept.append(pattern)
            elif pattern == name:
                layers[strip_prefixes(name)] = _settings(settings, weights)
            else:
                overrides.append((pattern, _settings(settings, weights)))
    return replace(
        base,
        weights=weights,
        layers=layers,
        overrides=tuple(overrides),
        ignored=(*base.ignored, *kept),
        ignored_by=key if key and (kept or not base.ignored) else base.ignored_by,
        targets=_strings(raw.get("modules_in_block_to_quantize")),
        reordered=method == "gptq" and raw.get("desc_act") is True,
    )


def _settings(raw: Mapping[str, Any], base: Weights) -> Weights:
    """Return the settings that a configuration of integers gives, and of ``base`` where it gives none."""
    group, symmetric = _number(raw, "group_size", "q_group_size"), raw.get("sym")
    return replace(
        base,
        bits=_number(raw, "bits", "w_bit") or base.bits,
        group=base.group if group is None else group if group > 0 else None,
        symmetric=symmetric if isinstance(symmetric, bool) else base.symmetric,
    )


_ALGORITHMS = {
    "FP8": Weights(8, strategy="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Weights(8, strategy="channel"),
    "NVFP4": Weights(4, 16),
    "NVFP4_AWQ": Weights(4, 16),
    "W4A16_NVFP4": Weights(4, 16),
    "MXFP4": Weights(4, 32),
    "W4A8_MXFP4_FP8": Weights(4, 32),
    "MXFP8": Weights(8, 32),
}
"""ModelOpt's algorithms → how they store weights; of others only names and scales are checked."""


def _modelopt(base: Scheme, file: Mapping[str, Any] | None) -> Scheme:
    """Return the scheme of ModelOpt, from config.json and from ``hf_quant_config.json``."""
    own = base.raw.get("quantized_layers")
    mixed = str(base.raw.get("quant_algo")).upper() == "MIXED_PRECISION" and isinstance(own, dict)
    layers = {
        strip_prefixes(name): _algorithm(settings)
        for name, settings in (own.items() if mixed else ())  # type: ignore[union-attr]
        if isinstance(settings, dict)
    }
    return replace(
        base,
        weights=Weights() if mixed else _algorithm(base.raw),
        layers=layers,
        listed=mixed,
        ignored_by=base.ignored_by if base.ignored or not mixed else "quantized_layers",
        kv_cache=base.kv_cache or (file is not None and _announces_cache(file)),
    )


def _algorithm(raw: Mapping[str, Any]) -> Weights:
    weights = _ALGORITHMS.get(str(raw.get("quant_algo")).upper(), Weights())
    group = _number(raw, "group_size")
    return replace(weights, group=group) if weights.group and group and group > 0 else weights


_QUARK_STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}


def _quark(base: Scheme) -> Scheme:
    """Return the scheme of Quark, with the settings of modules by pattern."""
    own = base.raw.get("layer_quant_config")
    overrides = own.items() if isinstance(own, dict) else ()
    return replace(
        base,
        weights=_quark_weights(base.raw.get("global_quant_config")),
        overrides=tuple((name, _quark_weights(settings)) for name, settings in overrides),
    )


def _quark_weights(settings: Any) -> Weights:
    weight = settings.get("weight") if isinstance(settings, dict) else None
    weight = weight if isinstance(weight, dict) else {}
    bits = {"fp8_e4m3": 8, "fp4": 4}.get(str(weight.get("dtype")))
    if bits is None:  # integers are packed in several ways
        return Weights()
    group = _number(weight, "group_size")
    return Weights(
        bits, group if group and group > 0 else None, strategy=_QUARK_STRATEGIES.get(str(weight.get("qscheme")))
    )


def _announces_cache(raw: Mapping[str, Any]) -> bool:
    """Return whether scales of the KV cache are announced; ModelOpt may say so in a file of its own."""
    export = raw.get("export")
    values = [raw.get(key) for key in _ANNOUNCING]
    values += [export.get("kv_cache_group")] if isinstance(export, dict) else []
    return any(bool(value) and str(value).lower() not in ("none", "auto") for value in values)


_ANNOUNCING = (
    *("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant", "kv_cache_dtype", "kv_cache_config"),
    "kv_cache_quant_config",
)
"""Keys under which methods announce scales of the KV cache."""


def _block(value: Any) -> tuple[int, int] | None:
    """Return the shape of blocks, ``(outputs, inputs)``."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    return (value[0], value[1]) if whole else None


def _compressed(raw: Mapping[str, Any]) -> Scheme:
    groups = raw.get("config_groups")
    weights = [
        (group.get("targets"), group["weights"])
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    everywhere = [settings for targets, settings in weights if "Linear" in _strings(targets)]
    one = weights[0][1] if len(weights) == 1 else everywhere[0] if everywhere else {}
    return Scheme(
        method="compressed-tensors",
        weights=_compressed_weights(one),
        overrides=tuple(
            (target, _compressed_weights(settings))
            for targets, settings in weights
            for target in _strings(targets)
            if target != "Linear" and len(weights) > 1
        ),
        ignored=_strings(raw.get("ignore")),
        targets=tuple(target for targets, _ in weights for target in _strings(targets)),
        layout="compressed-tensors",
        kv_cache=isinstance(raw.get("kv_cache_scheme"), dict),
        reordered=len(weights) == 1 and one.get("actorder") in ("group", True),
        raw=raw,
    )


def _compressed_weights(settings: Mapping[str, Any]) -> Weights:
    size, strategy, symmetric = _number(settings, "group_size"), settings.get("strategy"), settings.get("symmetric")
    return Weights(
        bits=_number(settings, "num_bits"),
        group=size if size is not None and size > 0 else None,
        symmetric=symmetric if isinstance(symmetric, bool) else None,
        strategy=strategy if isinstance(strategy, str) else None,
        block=_block(settings.get("block_structure")) if strategy == "block" else None,
    )


def _listed(raw: Mapping[str, Any], *keys: str) -> tuple[str, tuple[str, ...]]:
    """Return the first of these keys that lists something, and its list."""
    found = ((key, _strings(raw.get(key))) for key in keys)
    return next(((key, names) for key, names in found if names), (keys[0], ()))


def _strings(value: Any) -> tuple[str, ...]:
    """Return all texts of a list, or of a list of lists."""
    if isinstance(value, str):
        return (value,)
    items: Iterable[Any] = value if isinstance(value, list) else ()
    return tuple(
        text
        for item in items
        for text in (_strings(item) if isinstance(item, list) else (item,))
        if isinstance(text, str)
    )


def _number(raw: Mapping[str, Any], *keys: str) -> int | None:
    return next((raw[key] for key in keys if type(raw.get(key)) is int), None)
