"""Estimate from a checkpoint's weights how large its keys are, channel by channel, before anything runs.

A key is ``W x + b`` with ``x`` the output of a normalization, whose entries have a mean square of one times its own
weights ``g``.  The root mean square of a channel is then about ``sqrt(|w ⊙ g|² + b²)``, and with a normalization of
keys its weight times the channel's share of the head.  Large biases are what made keys of Qwen2.5-7B fail in 8 bits:
their norm is 605 in its first layer and 22 in the median layer (llama.cpp#21385).

Only headers and the tensors of keys are read, of a matrix no more than :data:`_COLUMNS` inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Entry
from fidelab.models.gguf import StoredTensor, read_header
from fidelab.models.local import SPLIT
from fidelab.models.weights import read_entries, read_json, weight_files

Floats = NDArray[np.float32]

_COLUMNS = 1024  # inputs of a matrix that are read: the error of a row's norm is about 2%
_NAME = re.compile(
    r"(?:.*\.)?(?:layers|blk)\.(?P<layer>\d+)\.(?:self_attn\.|attention\.|attn\.|attn_)?"
    r"(?P<which>k_proj|k_norm|k_layernorm|qkv_proj|input_layernorm|k|norm|qkv)\.(?P<part>weight|bias)"
)
_PARTS = {"k_proj": "k", "k_layernorm": "k_norm", "qkv_proj": "qkv", "input_layernorm": "norm"}
_ONE_PLUS = ("gemma", "gemma2", "gemma3", "gemma3_text")  # whose normalizations multiply by one plus their weights
LEAST_RATIO = 32
"""Channels that are this many times the median make 8-bit integers lose: steps of a block follow its largest value.

On copies of SmolLM2-135M whose keys were scaled (``checkpoint make-fragile``) the mean KL of q8_0 rises with the square
of the ratio: 0.0003 nats at a ratio of 4 (the model itself), 0.003 at 19, 0.07 at 77, 1.4 at 309; at 32 it is about
0.01, where PASS ends.
"""
_FP8_MOST = 448  # the largest number of E4M3
_REACH = 4.0  # root mean squares that the largest of some ten thousand keys reaches
_WIDE = frozenset(("f32", "f16", "bf16", "float32", "float16", "bfloat16", "auto", "exact", "k16v8", "fp16", "fp32"))
_TYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class LayerKeys:
    """Estimated keys of one layer.

    Attributes:
        layer: number of the layer, from 0.
        largest: root mean square of its largest channel.
        median: that of the median channel of the whole model.
    """

    layer: int
    largest: float
    median: float

    @property
    def ratio(self) -> float:
        """How many times the model's median channel the largest channel of the layer is."""
        return self.largest / self.median


def key_sizes(model: Path) -> tuple[LayerKeys, ...]:
    """Return the layers of a checkpoint whose keys can be estimated, in order; none where no layer's can.

    ``model``: a folder with ``config.json`` and ``*.safetensors``, or a ``.gguf`` file.  Latent and shared keys are
    left out, and matrices that a safetensors checkpoint stores in fewer than 16 bits; of these, biases and
    normalizations count.

    >>> max(key_sizes(Path("Qwen2.5-7B")), key=lambda layer: layer.ratio).layer
    0

    Raises:
        InputError: If the checkpoint is damaged.
    """
    tensors, heads = (_of_gguf if model.suffix == ".gguf" else _of_folder)(model)
    channels = {
        layer: found for layer, parts in sorted(tensors.items()) if (found := _channels(parts, heads)) is not None
    }
    if not channels:
        return ()
    median = float(np.median(np.concatenate(list(channels.values()))))
    if not (math.isfinite(median) and median > 0):
        return ()
    return tuple(LayerKeys(layer, float(found.max()), median) for layer, found in channels.items())


def fragile_keys(layers: Sequence[LayerKeys]) -> str:
    """Say which layers have keys that formats of 8 bits lose, and what holds them; empty if none does.

    ``keys of layer 3 have a channel 77 times the model's median (30 layers are above 32 times): …``
    """
    outliers = [layer for layer in layers if layer.ratio >= LEAST_RATIO]
    saturating = [layer for layer in layers if _REACH * layer.largest > _FP8_MOST]
    if not (outliers or saturating):
        return ""
    worst = max(outliers or saturating, key=lambda layer: layer.ratio)
    others = f" ({len(outliers)} layers are above {LEAST_RATIO} times)" if len(outliers) > 1 else ""
    fails = [
        *(["formats whose scales are shared by a block of 8-bit integers, such as q8_0"] if outliers else []),
        *([f"FP8 without scales, which ends at {_FP8_MOST}"] if saturating else []),
    ]
    return (
        f"keys of layer {worst.layer} have a channel {worst.ratio:.0f} times the model's median{others}: expect a loss "
        f"from {' and '.join(fails)}; k16v8 keeps keys in 16 bits, and a rotation spreads the channel"
    )


def narrow(keys: str) -> bool:
    """Return whether a format of keys, by its name, has fewer than 16 bits."""
    return keys not in _WIDE


@dataclass(frozen=True)
class _Heads:
    keys: int
    dim: int
    queries: int


def _channels(parts: Mapping[str, Floats], heads: _Heads) -> Floats | None:
    """Return the size of each channel of keys of one layer; ``None`` if its tensors do not say."""
    rows = heads.keys * heads.dim
    weight, bias = parts.get("k.weight"), parts.get("k.bias")
    if "qkv.weight" in parts or "qkv.bias" in parts:  # rows of queries, of keys, of values
        begin = heads.queries * heads.dim
        fused, offset = parts.get("qkv.weight"), parts.get("qkv.bias")
        whole = begin + 2 * rows
        weight = fused[begin : begin + rows] if fused is not None and len(fused) == whole else None
        bias = offset[begin : begin + rows] if offset is not None and len(offset) == whole else None
    sizes = None
    if weight is not None and weight.ndim == 2 and len(weight) == rows:
        gain = parts.get("norm.weight")
        scaled = weight * gain[: weight.shape[1]] if gain is not None and gain.ndim == 1 else weight
        inputs = parts["inputs"][0] if "inputs" in parts else weight.shape[1]
        sizes = np.square(scaled).sum(axis=1) * (inputs / weight.shape[1])
    if bias is not None and len(bias) == rows:
        sizes = np.square(bias) if sizes is None else sizes + np.square(bias)
    norm = parts.get("k_norm.weight")
    if norm is not None and norm.ndim == 1 and len(norm) in (heads.dim, rows):
        if sizes is None:
            return np.abs(norm)
        by_head = sizes.reshape(-1, len(norm))
        share = by_head / np.maximum(by_head.mean(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return np.asarray(np.sqrt(share) * np.abs(norm)).ravel()
    return None if sizes is None else np.sqrt(sizes)


def _place(name: str) -> tuple[int, str] | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    which = _PARTS.get(match["which"], match["which"])
    return int(match["layer"]), f"{which}.{match['part']}"


def _of_folder(folder: Path) -> tuple[dict[int, dict[str, Floats]], _Heads]:
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, dict) else config
    heads = _heads_of(text)
    plus = 1.0 if text.get("model_type") in _ONE_PLUS else 0.0
    tensors: dict[int, dict[str, Floats]] = {}
    for file in weight_files(folder):
        entries, start = read_entries(file)
        for name, entry in entries.items():
            place = _place(name)
            if place is None or "visual" in name or "vision" in name or "audio" in name or ".mtp" in name:
                continue
            if entry.dtype not in _TYPES or len(entry.shape) not in (1, 2) or 0 in entry.shape:
                continue
            values = _read(file, start, entry)
            layer = tensors.setdefault(place[0], {})
            layer[place[1]] = values + plus if place[1].endswith("norm.weight") else values
            if place[1] in ("k.weight", "qkv.weight"):
                layer["inputs"] = np.array([entry.shape[1]], dtype=np.float32)
    return tensors, heads


def _read(file: Path, start: int, entry: Entry) -> Floats:
    raw = np.memmap(file, dtype=_TYPES[entry.dtype], mode="r", offset=start + entry.start, shape=entry.shape)
    part = np.ascontiguousarray(raw[:, :_COLUMNS] if len(entry.shape) == 2 else raw)
    if entry.dtype == "BF16":
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.float32)


def _of_gguf(file: Path) -> tuple[dict[int, dict[str, Floats]], _Heads]:
    header = read_header(file)
    queries = header.count("attention.head_count") or 0
    keys = header.count("attention.head_count_kv") or queries
    dim = header.count("attention.key_length") or ((header.count("embedding_length") or 0) // queries if queries else 0)
    tensors: dict[int, dict[str, Floats]] = {}
    for part in _parts(file):
        for tensor in (header if part == file else read_header(part)).tensors:
            if (place := _place(tensor.name)) is None or len(tensor.shape) not in (1, 2) or 0 in tensor.shape:
                continue
            if (values := _dequantized(part, tensor)) is not None:
                layer = tensors.setdefault(place[0], {})
                layer[place[1]] = values
                if place[1] in ("k.weight", "qkv.weight"):
                    layer["inputs"] = np.array([tensor.shape[1]], dtype=np.float32)
    return tensors, _Heads(keys, dim, queries)


def _parts(file: Path) -> list[Path]:
    """The files of a split model that are here, ``file`` among them."""
    match = SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    every = (
        file.with_name(f"{match['stem']}-{n:05}-of-{match['count']}.gguf") for n in range(1, int(match["count"]) + 1)
    )
    return [part for part in every if part.is_file()]


def _dequantized(file: Path, tensor: StoredTensor) -> Floats | None:
    """Return the first columns of a tensor as floats; ``None`` for a type that package gguf does not know."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = math.prod(tensor.shape[:-1])
        row_bytes = tensor.shape[-1] // block * block_bytes
        kept = min(row_bytes, max(1, _COLUMNS // block) * block_bytes) if len(tensor.shape) == 2 else row_bytes
        raw = np.memmap(file, np.uint8, "r", tensor.offset, (rows, row_bytes))
        values = gguf.dequantize(np.ascontiguousarray(raw[:, :kept]), kind).astype(np.float32)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return np.asarray(values if len(tensor.shape) == 2 else values.ravel())


def _heads_of(text: Mapping[str, Any]) -> _Heads:
    def number(*names: str) -> int:
        return next((text[name] for name in names if type(text.get(name)) is int and text[name] > 0), 0)

    queries = number("num_attention_heads", "n_head")
    dim = number("head_dim") or (number("hidden_size", "n_embd") // queries if queries else 0)
    return _Heads(number("num_key_value_heads") or queries, dim, queries)
