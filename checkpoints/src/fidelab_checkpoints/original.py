"""Rules that compare a checkpoint with the original that it was made from (``--base``).

Weights that a method keeps must equal the original's, number by number.  Weights that it quantizes are compared on rows
spread over the whole layer.  AWQ and SmoothQuant move a factor per channel from one tensor to the next, which leaves
the model unchanged.  Such a factor is ignored only where it cancels.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError
from fidelab_checkpoints.files import RAW, Checkpoint, TensorInfo, to_floats
from fidelab_checkpoints.layouts import (
    ACTIVATION_PARTS,
    Awq,
    Gptq,
    QuantizedModule,
    StoredArray,
    pack_words,
    quantized_modules,
    unpack_words,
)
from fidelab_checkpoints.modules import Module, kind_of, modules_of, strip_prefixes, tensor_in, text_config, weight_in
from fidelab_checkpoints.rules import Finding, Severity, Subject, are, broken, counted, counted_findings, listed, verb

Floats = NDArray[np.float32]

_NUM_ROWS = 64  # of each layer that are compared, at even distances, the first and the last among them; a multiple of 8
# Largest relative error by bits, of which an ordinary one is a third, and by how much a layer may be larger or smaller.
_MAX_ERROR = {8: 0.15, 6: 0.15, 5: 0.25, 4: 0.35, 3: 0.7, 2: 1.2, 1: 1.5}
_MAX_SCALE_CHANGE = {8: 0.03, 6: 0.05, 5: 0.05, 4: 0.1, 3: 0.2, 2: 0.4, 1: 0.6}
_KEPT_ERROR = 0.02  # largest error of rescaled 16-bit layers
_FACTOR_SHARE = 0.7  # share of an error: from here on, one factor explains it and rounding does not
_SAME_RATIO = 1.01  # times as large an error tells nothing
_CLEAR_RATIO = 1.5  # times as large an error tells one of two explanations apart
_EPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23, "F64": 2.0**-52}  # the last bit, relative
_SUBNORMAL = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149, "F64": 0.0}  # the smallest number
_MAX_WHOLE_BYTES = 4 << 20  # bytes: tensors up to this size are read at once
_FEEDS = {  # a layer → the one whose inputs are its outputs, one by one
    "v_proj": "o_proj",
    "up_proj": "down_proj",
    "w3": "w2",
    "attn_v": "attn_output",
    "ffn_up": "ffn_down",
}
_FED = {after: before for before, after in _FEEDS.items()}
_SIBLINGS: tuple[tuple[str, ...], ...] = (  # siblings, which read the same activations
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
)
_AFTER_NORMS = {leaf for leaves in _SIBLINGS for leaf in leaves} | {"qkv_proj", "gate_up_proj"}


@broken(
    title="Layers that the original has",
    symptom="the engine leaves them as initialized, or refuses: noise in text, or a blind or deaf model",
    cause="experts, biases or towers that a conversion did not know by name",
    check="with --base: every tensor of the original is there, as it is or quantized, and of the same shape",
    command="convert or quantize again; fidelab checkpoint convert ends with a certificate over all tensors",
)
def _base_missing(subject: Subject) -> Iterator[Finding]:
    if subject.base is None or subject.checkpoint.missing_files:
        return
    present = {strip_prefixes(module.name): module for module in subject.modules.values()}
    stacked = any(".experts." in name and module.expert is None for name, module in subject.modules.items())
    numbered = any(module.expert is not None for module in subject.modules.values())
    tied = not any(module.kind == "head" for module in subject.modules.values())
    missing, shapes = [], []
    for original in modules_of(subject.base).values():
        module = present.get(strip_prefixes(original.name))
        if module is None:
            regrouped = ".experts" in original.name and (numbered if original.expert is None else stacked)
            if not regrouped and not (tied and original.kind == "head") and "rotary" not in original.name:
                missing += [info.name for info in original.parts.values()]
            continue
        if "bias" in original.parts and "bias" not in module.parts:
            missing.append(original.parts["bias"].name)
        weight, packing = original.parts.get("weight"), module.packing()
        k = packing.inputs(subject.scheme.of(module.name).bits) if packing else None
        if weight is None or len(weight.shape) != 2:
            continue
        plain = module.parts.get("weight")
        repacked = packing is not None and k is not None and not _close(weight.shape, (packing.n, k), packing.layout)
        reshaped = plain is not None and not module.quantized and plain.shape[1:] != weight.shape[1:]
        if repacked or reshaped:
            shapes.append(module.name)
    yield from listed(f"{counted(missing, 'tensor')} of the original {are(missing)} not there:", missing)
    yield from counted_findings(shapes, "module", "of another shape than the original")


def _close(shape: Sequence[int], stored: Sequence[int], layout: str) -> bool:
    """Return whether a packed shape, which may be padded to whole words, matches the original."""
    slack = 32 if layout in ("words", "gptq") else 1
    return stored[0] == shape[0] and shape[1] <= stored[1] < shape[1] + slack


# ------------------------------------------------------------------------------------------------------------- weights


@broken(
    title="Weights that are not the original's",
    symptom="noise, or another model's answers, though every tensor loads",
    cause="codes in another order than the kernel unpacks, zero points off by one, layers swapped, scales of another "
    "run, or another original",
    check=f"with --base: {_NUM_ROWS} rows of every quantized layer, spread evenly over it and dequantized, against the "
    "original's, with their size; a factor per channel, as AWQ and SmoothQuant move it, counts where the norm or "
    "layer before has its reciprocal",
    command="convert again with fidelab checkpoint convert, or name the checkpoint that it was really made from",
)
def _base_differs(subject: Subject) -> Iterator[Finding]:
    if subject.base is not None:
        yield from _differing(_comparison(subject).weights, "module", ".0f")


def _differing(found: Mapping[str, float], noun: str, digits: str) -> list[Finding]:
    names, worst = list(found), 100 * max(found.values(), default=0.0)
    by = f"by up to {worst:{digits}}% of its size:"
    return listed(f"{counted(names, noun)} {verb(names, 'differ')} from the original {by}", names)


@broken(
    title="Kept tensors that are not the original's",
    symptom="answers of another model, or noise where a norm or an embedding is far off, though every tensor loads",
    cause="norms stored with or without their one, an embedding that was resized or partly written, tensors of another "
    "revision",
    check="with --base: every number of norms, embeddings, biases and layers in 16 bits, up to the last bit of the "
    "smaller type; a norm may be divided by the factor of the layers after it",
    command="copy these tensors from the original, or quantize again",
)
def _base_kept_differs(subject: Subject) -> Iterator[Finding]:
    if subject.base is not None:
        yield from _differing(_comparison(subject).kept, "kept tensor", ".3g")


@dataclass(frozen=True)
class _Comparison:
    """Quantized modules and kept tensors that differ, with the difference relative to the original's size."""

    weights: dict[str, float] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)


@dataclass
class _Layer:
    """A layer on sampled rows.

    Attributes:
        quantized: whether the layer is quantized; otherwise it is kept in 16 bits and differs.
        limit, factor_limit: the largest error, and distance of a factor from one, that rounding may cause.
        norm: the changed norm that it compensates.
        best: error and factor, see :func:`_misfit`, of the original divided by the factor of that norm.
        errors: the error with every changed norm that it might compensate, and with none (``""``); of a layer that
            feeds another one where every output has a factor of its own.
        free: the error where every input has a factor of its own, and how much these factors vary.
        rows: which rows were sampled.
        gains: of each of these rows: the factor by which it is larger than the original's.
        gained: the error where these factors are taken out.
        cancels: whether the layer after (or before) it has the reciprocals of its factors.
    """

    quantized: bool
    limit: float
    factor_limit: float
    norm: str
    best: tuple[float, float]
    errors: dict[str, float]
    free: tuple[float, float]
    rows: NDArray[np.intp]
    gains: Floats
    gained: float
    cancels: bool = False

    def fits(self, error: float, factor: float) -> bool:
        """Return whether rounding explains an error and a factor.

        Few bits shrink weights, and their error is far larger than that.
        """
        return error <= self.limit and abs(factor - 1) <= max(self.factor_limit, _FACTOR_SHARE * error)


def _comparison(subject: Subject) -> _Comparison:
    """Compute the comparison once for both rules."""
    if "comparison" not in subject.kept:
        assert subject.base is not None
        subject.kept["comparison"] = _compared(subject, subject.base)
    found: _Comparison = subject.kept["comparison"]
    return found


def _compared(subject: Subject, base: Checkpoint) -> _Comparison:
    changed = dict(_changed(subject, base))
    norms = _norm_factors(subject, base, changed)
    layers: dict[str, _Layer] = {}
    modules = [module for module in subject.modules.values() if _samples(module, changed)]
    known = _readable(subject)
    for module in sorted(modules, key=lambda module: module.name.rpartition(".")[2] in _FED):  # feeding layers first
        layer = _layer(subject, base, module, known, norms, layers)
        if layer is not None:
            layers[module.name] = layer
    made_up = {layer.norm for layer in layers.values() if layer.norm}
    weights: dict[str, float] = {}
    for name, layer in layers.items():
        if layer.quantized and not _sound(subject, name, layer):
            weights[name] = max(layer.best[0], abs(layer.best[1] - 1))
    for name, error in _uncompensated_layers(layers):
        weights.setdefault(name, error)
    kept: dict[str, float] = {}
    for name, difference in changed.items():
        owner = name.rpartition(".")[0]
        layer_of = layers.get(owner)
        rescaled = layer_of is not None and (layer_of.norm or layer_of.cancels) and _sound(subject, owner, layer_of)
        if owner not in made_up and not rescaled:
            kept[name] = difference
    return _Comparison(weights, kept)


def _sound(subject: Subject, name: str, layer: _Layer) -> bool:
    """Return whether a layer equals the original's, apart from factors that cancel."""
    if layer.fits(*layer.best):
        return True
    leaf = name.rpartition(".")[2]
    if layer.cancels:
        return min(layer.gained, layer.free[0]) <= layer.limit
    before = _FED.get(leaf)
    unknown = leaf not in _AFTER_NORMS and (before is None or f"{name[: -len(leaf)]}{before}" not in subject.modules)
    error, spread = layer.free  # what comes before it is not known: factors per input that differ are AWQ's
    return unknown and error <= layer.limit and spread > layer.factor_limit


def _uncompensated_layers(layers: Mapping[str, _Layer]) -> Iterator[tuple[str, float]]:
    """Yield the layers that do not compensate a norm as their siblings do, with the error.

    Siblings read the same activations.
    """
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        for leaves in _SIBLINGS:
            others = [layers.get(f"{parent}.{other}") for other in leaves if leaf in leaves and other != leaf]
            for other in others:
                if other is None or not other.norm or layer.norm or not layer.quantized:
                    continue
                if layer.errors.get(other.norm, 0.0) > _CLEAR_RATIO * layer.errors[""]:
                    yield name, layer.errors[other.norm]


def _samples(module: Module, changed: Mapping[str, float]) -> bool:
    """Return whether rows of a module are compared: all quantized layers, and 16-bit layers that differ."""
    if module.quantized:
        return True
    weight = module.parts.get("weight")
    return weight is not None and weight.name in changed and len(weight.shape) == 2 and module.kind != "embedding"


def _layer(
    subject: Subject,
    base: Checkpoint,
    module: Module,
    known: Mapping[str, QuantizedModule],
    norms: Mapping[str, list[Floats]],
    layers: Mapping[str, _Layer],
) -> _Layer | None:
    """Compare a layer with its original on sampled rows; ``None`` if shapes differ or either cannot be read."""
    info = weight_in(base, module.name)
    if info is None or len(info.shape) != 2 or 0 in info.shape or info.nbytes % info.shape[0]:
        return None
    n = info.shape[0]
    rows = np.linspace(0, n - 1, min(_NUM_ROWS, n)).round().astype(np.intp)  # at even distances, with both ends
    values = _values(subject, module, known, rows, info.shape)
    if values is None or values.shape != (len(rows), info.shape[1]):
        return None
    original = _floats(base, info, rows)
    if not (np.isfinite(values).all() and np.isfinite(original).all()) or not original.any():
        return None
    bits = _bits(subject, module)
    candidates = [("", original)]
    candidates += [
        (name, original / factor)
        for name, factors in norms.items()
        for factor in factors
        if len(factor) == original.shape[1] and _in_same_layer(name, module.name)
    ]
    as_they_are = [_misfit(values, each)[0] for _, each in candidates]
    fitted = as_they_are
    if module.name.rpartition(".")[2] in _FEEDS:
        fitted = [_misfit(values, each * _gains(values, each)[:, None])[0] for _, each in candidates]
    alike = [n for n, error in enumerate(fitted) if error <= _SAME_RATIO * min(fitted)]
    norm, expected = candidates[min(alike, key=lambda n: as_they_are[n])]  # gains hide one factor for all inputs
    errors: dict[str, float] = {}
    for (name, _), error in zip(candidates, fitted, strict=True):
        errors[name] = min(error, errors.get(name, math.inf))
    limit = _MAX_ERROR.get(bits, _MAX_ERROR[8]) if module.quantized else _KEPT_ERROR
    gains = _gains(values, expected)
    gained = _misfit(values, expected * gains[:, None])[0]
    if gained > limit:  # other factors of its inputs, which are for the norm to answer for
        gains = _gains(values, expected, free=True)
    layer = _Layer(
        quantized=module.quantized,
        limit=limit,
        factor_limit=_MAX_SCALE_CHANGE.get(bits, _MAX_SCALE_CHANGE[8]) if module.quantized else _KEPT_ERROR,
        norm=norm,
        best=_misfit(values, expected),
        errors=errors,
        free=_free(values, original),
        rows=rows,
        gains=gains,
        gained=gained,
    )
    _link(subject, module.name, layer, layers, values, original)
    return layer


def _link(
    subject: Subject, name: str, layer: _Layer, layers: Mapping[str, _Layer], values: Floats, original: Floats
) -> None:
    """Note of a layer and its predecessor whether factors of the outputs of one cancel in the inputs of the other."""
    parent, _, leaf = name.rpartition(".")
    before = layers.get(f"{parent}.{_FED[leaf]}" if parent else _FED[leaf]) if leaf in _FED else None
    if before is None or not before.gains.all():
        return
    outputs = weight_in(subject.base, f"{parent}.{_FED[leaf]}") if subject.base is not None else None
    if outputs is None:
        return
    columns = _inputs(subject, before.rows, outputs.shape[0], original.shape[1])
    if columns is None:
        return
    part, there = values[:, columns], original[:, columns]
    if not there.any():
        return
    error, factor = _misfit(part, there / before.gains)
    if error < _misfit(part, there)[0] and layer.fits(error, factor):
        layer.cancels = before.cancels = True


def _inputs(subject: Subject, rows: NDArray[np.intp], n: int, k: int) -> NDArray[np.intp] | None:
    """Return the inputs of a layer that these outputs feed; a value head feeds several query heads."""
    if n == k:
        return rows
    text = text_config(subject.checkpoint.config)
    dim, heads = text.get("head_dim"), text.get("num_attention_heads")
    if dim is None and type(heads) is int and heads > 0:
        dim = k // heads
    if type(dim) is not int or dim < 1 or k % n or n % dim:
        return None
    return rows // dim * (k // n) * dim + rows % dim


def _misfit(values: Floats, original: Floats) -> tuple[float, float]:
    """Return the root mean square of the difference, relative to the original's, and the factor that fits best."""
    power = float((original.astype(np.float64) ** 2).sum())
    if not power or not math.isfinite(power):
        return math.inf, math.inf
    difference = float(((values - original).astype(np.float64) ** 2).sum())
    return math.sqrt(difference / power), float((values * original).sum(dtype=np.float64)) / power


def _free(values: Floats, original: Floats) -> tuple[float, float]:
    """Return the error if every input has its best factor, and the relative spread of these factors."""
    factor = _fitted(values, original, 0)
    live = factor[original.any(0)]
    middle = float(np.abs(live).mean()) if live.size else 0.0
    return _misfit(values, original * factor)[0], float(live.std()) / middle if middle else 0.0


def _gains(values: Floats, original: Floats, *, free: bool = False) -> Floats:
    """Return the factor by which each row exceeds the original's; ``free``: every input has a factor, too."""
    gains = np.ones(len(values), np.float32)
    columns = np.ones(values.shape[1], np.float32)
    for _ in range(8 if free else 1):
        expected = original * columns
        gains = _fitted(values, expected, 1)
        if free:
            columns = _fitted(values, original * gains[:, None], 0)
            columns /= np.median(np.abs(columns[columns != 0])) if columns.any() else 1
    return gains


def _fitted(values: Floats, expected: Floats, axis: int) -> Floats:
    """Return the factors by which rows (axis 1) or columns (axis 0) fit best."""
    power = (expected**2).sum(axis)
    factors: Floats = ((values * expected).sum(axis) / np.where(power > 0, power, 1)).astype(np.float32)
    return factors


_STACK = re.compile(r"(.*?(?:^|\.)(?:layers|h|blocks|blk|block)\.\d+)\.")


def _in_same_layer(norm: str, module: str) -> bool:
    """Return whether a norm and a linear layer are in the same layer, or both in none."""
    one, other = _STACK.match(f"{norm}."), _STACK.match(f"{module}.")
    return (one and one[1]) == (other and other[1])


def _norm_factors(subject: Subject, base: Checkpoint, changed: Mapping[str, float]) -> dict[str, list[Floats]]:
    """Return for each changed norm the factor by which it multiplies activations relative to the original's.

    There are two: for norms as stored, and for norms that add one to their weights.
    """
    found: dict[str, list[Floats]] = {}
    for name in changed:
        owner, _, part = name.rpartition(".")
        info = tensor_in(base, name)
        if part != "weight" or kind_of(owner) != "norm" or info is None or len(info.shape) != 1:
            continue
        now = subject.checkpoint.floats(name)
        before = base.floats(info)
        found[owner] = []
        for one in (0, 1):
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = ((now + one) / (before + one)).astype(np.float32)
            if np.isfinite(factor).all() and factor.all():
                found[owner].append(factor)
    return found


def _changed(subject: Subject, base: Checkpoint) -> Iterator[tuple[str, float]]:
    """Yield the kept floating-point tensors that differ from the original's, each with its :func:`_difference`."""
    checkpoint = subject.checkpoint
    for module in subject.modules.values():
        for part, info in module.parts.items():
            other = tensor_in(base, info.name)
            if part not in ("weight", "bias", "") or (part == "weight" and module.quantized) or other is None:
                continue
            if info.dtype not in _EPS or other.dtype not in _EPS or "rotary" in info.name:
                continue
            if not info.shape or not other.shape or info.shape[1:] != other.shape[1:]:  # another rule says so
                continue
            difference = _difference(checkpoint, info, base, other)
            if difference is not None:
                yield info.name, difference


def _difference(checkpoint: Checkpoint, info: TensorInfo, base: Checkpoint, other: TensorInfo) -> float | None:
    """Return the relative distance of the common rows of two tensors, or ``None`` if they are equal.

    It is relative to the larger of the two where they differ.  Tensors are equal if they agree up to the last bit of
    the coarser type.
    """
    rows = min(info.shape[0], other.shape[0])  # a vocabulary may be filled up
    info, other = _row_slice(info, 0, rows), _row_slice(other, 0, rows)
    step, tiny = max(_EPS[info.dtype], _EPS[other.dtype]), max(_SUBNORMAL[info.dtype], _SUBNORMAL[other.dtype])
    apart = before_power = now_power = 0.0
    differs = False
    for now, before in zip(_pieces(checkpoint, info), _pieces(base, other), strict=True):
        if info.dtype == other.dtype and np.array_equal(now.view(np.uint8), before.view(np.uint8)):
            continue
        one, two = _as_floats(now, info.dtype), _as_floats(before, other.dtype)
        with np.errstate(invalid="ignore"):
            distance = np.abs(one - two)
            same = (distance <= step * np.abs(two) + tiny) | (np.isnan(one) & np.isnan(two)) | (one == two)
        differs = differs or not same.all()
        apart += _power(np.where(same, 0, distance))
        now_power, before_power = now_power + _power(one), before_power + _power(two)
    return math.sqrt(apart / (max(now_power, before_power) or 1)) if differs else None


def _power(values: NDArray[Any]) -> float:
    """Return the sum of the squares of the finite values."""
    return float((np.where(np.isfinite(values), values, 0).astype(np.float64) ** 2).sum())


def _pieces(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[NDArray[Any]]:
    """Yield a tensor's stored values, flat, with the same number of values in each piece for every type."""
    width = max(1, math.prod(info.shape[1:]))
    step = max(1, (1 << 20) // width)
    for start in range(0, info.shape[0], step):
        yield checkpoint.read(_row_slice(info, start, min(step, info.shape[0] - start))).reshape(-1)


def _as_floats(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    return raw if dtype == "F64" else to_floats(raw, dtype)


# ---------------------------------------------------------------------------------------------------------- their rows


def _bits(subject: Subject, module: Module) -> int:
    """Return the bits per weight of a quantized module."""
    packed, packing = module.packed, module.packing()
    if packed is not None and packed.dtype not in RAW:
        return packed.nbytes * 8 // max(1, math.prod(packed.shape))
    if packed is not None and packed.dtype in ("I8", "F8_E4M3", "F8_E5M2"):
        return packing.bits or 8 if packing else 8
    return (packing.bits if packing else None) or subject.scheme.of(module.name).bits or 4


def _readable(subject: Subject) -> Mapping[str, QuantizedModule]:
    """Return the quantized layers whose weights can be read; other rules cover the rest."""
    if subject.checkpoint.format == "gguf" or subject.scheme.layout is None:
        return {}
    try:
        return quantized_modules(subject.checkpoint.tensors, subject.checkpoint.quantization)
    except InputError:  # a module is incomplete
        return {}


def _values(
    subject: Subject,
    module: Module,
    known: Mapping[str, QuantizedModule],
    rows: NDArray[np.intp],
    shape: tuple[int, ...],
) -> Floats | None:
    """Return rows of a layer's weights, dequantized; ``None`` if they are unavailable."""
    checkpoint = subject.checkpoint
    weight = module.packed or module.parts["weight"]
    if checkpoint.format == "gguf" or not module.quantized:
        return _floats(checkpoint, weight, rows) if weight.shape == shape else None
    if module.name not in known:
        return None
    try:
        stored = _stored(checkpoint, known[module.name], rows, shape[0])
        return known[module.name].unpack(stored).dequantize()
    except (InputError, ValueError, IndexError, ZeroDivisionError):  # shapes that do not belong together
        return None


def _row_slice(info: TensorInfo, start: int, count: int) -> TensorInfo:
    """Return consecutive rows."""
    size = info.nbytes // info.shape[0] if info.shape[0] else 0
    return replace(info, shape=(count, *info.shape[1:]), start=info.start + start * size, nbytes=size * count)


def _floats(checkpoint: Checkpoint, info: TensorInfo, rows: NDArray[np.intp]) -> Floats:
    """Return rows of a matrix as numbers."""
    if checkpoint.format == "gguf" and info.dtype not in RAW:  # blocks, which are decoded from the file
        return np.concatenate([checkpoint.floats(_row_slice(info, int(row), 1)) for row in rows])
    return _as_floats(_rows(checkpoint, info, rows), info.dtype).astype(np.float32)


def _rows(checkpoint: Checkpoint, info: TensorInfo, rows: NDArray[np.intp]) -> NDArray[Any]:
    """Return rows of a tensor as they are stored."""
    if info.nbytes <= _MAX_WHOLE_BYTES:
        return checkpoint.read(info)[rows]
    return np.concatenate([checkpoint.read(_row_slice(info, int(row), 1)) for row in rows])


def _columns(checkpoint: Checkpoint, info: TensorInfo, columns: NDArray[np.intp]) -> NDArray[Any]:
    """Return columns of a matrix as they are stored."""
    return np.concatenate([chunk.reshape(-1, info.shape[1])[:, columns] for chunk in checkpoint.chunks(info)])


def _stored(checkpoint: Checkpoint, module: QuantizedModule, rows: NDArray[np.intp], n: int) -> dict[str, StoredArray]:
    """Read the stored rows of a module of ``n`` outputs without loading the whole layer."""
    stored = {}
    for part, name in module.parts.items():
        if part not in ACTIVATION_PARTS:
            info = checkpoint.tensors[name]
            stored[part] = StoredArray(_stored_part(checkpoint, module, part, info, rows, n), info.dtype)
    return stored


def _stored_part(
    checkpoint: Checkpoint, module: QuantizedModule, part: str, info: TensorInfo, rows: NDArray[np.intp], n: int
) -> NDArray[Any]:
    layout = module.layout
    if part in ("g_idx", "weight_g_idx") or math.prod(info.shape) == 1:
        return checkpoint.read(info)
    if part == "weight_shape":
        return np.array([len(rows), checkpoint.read(info)[1]])
    if isinstance(layout, Awq) and part != "scales":  # eight columns to a word
        words, place = np.unique(rows // 8, return_inverse=True)
        return layout.select_columns(_columns(checkpoint, info, words), place * 8 + rows % 8)
    if isinstance(layout, Gptq) and part == "qzeros":
        return layout.select_zeros(checkpoint.read(info), rows, n)
    if isinstance(layout, Awq | Gptq):
        return _columns(checkpoint, info, rows)
    if part == "weight_zero_point" and info.dtype == "I32":
        words = checkpoint.read(info)
        bits = words.shape[0] * 32 // n
        return pack_words(unpack_words(words, bits, axis=0, count=n)[rows], bits, axis=0)
    if info.shape[0] == n:
        return _rows(checkpoint, info, rows)
    block = module.settings.block  # scales of blocks, which several rows share
    return _rows(checkpoint, info, rows // (block[0] if block else -(-n // info.shape[0])))


# ------------------------------------------------------------------------------------------------------- configuration

_SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_experts", "num_local_experts", "n_routed_experts"),
    *("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "scoring_func"),
    *("first_k_dense_replace", "layer_types", "num_kv_shared_layers"),
)
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    *("hidden_act", "hidden_activation", "activation_function", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier"),
    *("residual_multiplier", "attention_multiplier", "rope_local_base_freq", "attn_output_gate", "use_qk_norm"),
    *("attention_bias", "mlp_bias"),
)
_LENGTHS = ("max_position_embeddings", "sliding_window", "vocab_size")  # whose difference is only suspicious
_MAX_SHOWN_LENGTH = 40  # characters of a value
_GGUF_LENGTHS = ("context_length", "vocab_size", "attention.sliding_window")
_GGUF_OTHER = ("general.", "tokenizer.", "split.", "quantize.")


@broken(
    title="A configuration that is not the original's",
    symptom="noise where heads, positions or norms are computed otherwise, worse answers at long contexts where only "
    "their scaling is, though every tensor loads",
    cause="a configuration that was edited, filled with defaults by a newer library, or taken from a sibling",
    check="with --base: sizes, heads, experts, rotary positions, epsilons, activations, soft caps and tied embeddings, "
    "where both configurations give them; suspicious where only lengths or the vocabulary differ",
    command="take these values from the original's config.json",
)
def _base_config(subject: Subject) -> Iterator[Finding]:
    base = subject.base
    if base is None:
        return
    gguf = subject.checkpoint.format == "gguf"
    now, before = (
        _gguf_settings(checkpoint) if gguf else _settings(checkpoint.config)
        for checkpoint in (subject.checkpoint, base)
    )
    found: dict[Severity, list[str]] = defaultdict(list)
    for key in now:
        if key in before and not _is_close(now[key], before[key]):
            length = key.endswith(_GGUF_LENGTHS) if gguf else key in _LENGTHS
            found["suspicious" if length else "broken"].append(
                f"{key} {str(now[key])[:_MAX_SHOWN_LENGTH]} for {str(before[key])[:_MAX_SHOWN_LENGTH]}"
            )
    for severity, texts in found.items():
        where = "the file's metadata" if gguf else "config.json"
        yield Finding(f"{where} has other values than the original's: {', '.join(texts)}", severity=severity)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what a model computes, under version-independent names."""
    text = text_config(config)
    found = {key: text[key] for key in (*_SHAPE, *_NUMBERS, *_LENGTHS) if text.get(key) is not None}
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if "head_dim" not in found and type(hidden) is int and type(heads) is int and heads > 0:
        found["head_dim"] = hidden // heads
    rope = text.get("rope_parameters")
    rope = dict(rope) if isinstance(rope, dict) else {}
    scaling = text.get("rope_scaling")
    rope = {**rope, **(scaling if isinstance(scaling, dict) else {})}
    for key in ("rope_theta", "partial_rotary_factor"):
        value = text.get(key) if text.get(key) is not None else rope.get(key)
        if value is not None:
            found[key] = value
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if "rope_theta" in found:
        found["rope_type"] = kind
    for kind, inner in [*rope.items()]:  # of kinds of layers
        if isinstance(inner, dict):
            rope |= {f"{kind} {key}": value for key, value in inner.items()}
    for key, value in rope.items():
        if type(value) in (int, float) and key not in ("rope_theta", "partial_rotary_factor"):
            found[f"rope {key}"] = value
    tied = [value for place in (config, text) if type(value := place.get("tie_word_embeddings")) is bool]
    if tied:
        found["tie_word_embeddings"] = all(tied)
    return found


def _gguf_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        key: value
        for key, value in checkpoint.metadata.items()
        if (not key.startswith(_GGUF_OTHER) or key == "general.architecture") and not isinstance(value, list | tuple)
    }


def _is_close(one: Any, other: Any) -> bool:
    if type(one) in (int, float) and type(other) in (int, float):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)
