"""Make an equivalent checkpoint whose keys overflow formats with a small range.

A score of attention is ``q . k``.  Position embeddings that rotate (Su et al., 2021) turn pairs of channels, so that
both channels of a pair of K can be scaled by ``factor`` and those of Q by ``1 / factor`` without changing any score.
With a power of two as factor the roundings of binary floats stay what they were, as long as nothing overflows or
becomes subnormal: the outputs are equal bit for bit.  The keys then have outliers like those of models with large
biases of K, and FP8 without scales saturates.  The values are unchanged.

The checkpoint is copied file by file and the rows of its projections are scaled in place: the memory needed is the size
of one projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError, UsageError
from fidelab.core.paths import expand
from fidelab_checkpoints.convert import check_room, check_target, copy_files, whole_folder
from fidelab_checkpoints.files import RAW, Checkpoint, TensorInfo, open_checkpoint
from fidelab_checkpoints.modules import text_config

_HALVES = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "gemma", "gemma2", "granite", "smollm3", "starcoder2", "phi")
)  # channel i rotates with channel i + rotated / 2, as in GPT-NeoX
_NEIGHBOURS = frozenset(("cohere", "cohere2", "glm", "glm4", "ernie4_5"))  # with the adjacent channel, as in GPT-J
_PROJECTION = re.compile(r"(?P<layer>.*\.layers\.\d+\.self_attn)\.(?P<which>[qk])_proj\.(?P<part>weight|bias)")
_NORM = re.compile(r".*\.self_attn\.(?:[qk]_(?:layer)?norm|qk_norm)s?\b.*")
_FLOATS = frozenset(("F32", "BF16", "F16"))


@dataclass(frozen=True)
class Fragile:
    """Result of :func:`make_fragile`.

    Attributes:
        channels: channels of each key head whose rows were scaled.
        layers: number of layers.
    """

    folder: Path
    factor: int
    channels: tuple[int, ...]
    layers: int


def make_fragile(source: str | Path, target: Path, *, pairs: int = 2, factor: int = 4096) -> Fragile:
    """Write a copy of ``source`` in which the rows of ``pairs`` RoPE pairs of K are ``factor`` times as large.

    The pairs are those that rotate fastest, in every layer and head.  The same rows of all heads of Q, which share the
    heads of K in groups, are scaled by ``1 / factor``.  Biases are scaled with their rows.

    Args:
        source: a folder with safetensors of 16 or 32 bits, not quantized.
        target: a folder that does not exist yet.
        factor: a power of two of at least 2.

    Raises:
        UsageError: If ``target`` exists, or ``factor`` or ``pairs`` are not possible.
        InputError: If the model undoes the scaling (norms of queries and keys), keeps its projections in another form,
            or has an architecture whose pairs are not known; or a weight would overflow or become subnormal.
        OutputError: If ``target`` cannot be written.
    """
    if factor < 2 or factor & (factor - 1):
        raise UsageError(f"factor {factor} is not a power of two of at least 2; other factors would round the weights")
    target = expand(target)
    with open_checkpoint(source) as checkpoint:
        check_target(checkpoint, target)
        projections = _projections(checkpoint)
        config = {**checkpoint.config, **text_config(checkpoint.config)}
        dim = _head_dim(checkpoint, config)
        channels = _channels(checkpoint, config, dim, pairs)
        check_room(target, sum(file.stat().st_size for file in checkpoint.files))
        with whole_folder(target) as folder:
            copy_files(checkpoint, folder)
            for tensor, is_key in projections:
                _scale(folder, tensor, channels, dim, float(factor) if is_key else 1 / factor)
    return Fragile(target, factor, channels, sum(is_key and len(t.shape) == 2 for t, is_key in projections))


def _projections(checkpoint: Checkpoint) -> list[tuple[TensorInfo, bool]]:
    """Return the weights and biases of Q and K, each with whether it is K's; refuse models that cannot be scaled so."""
    if checkpoint.format != "safetensors":
        raise InputError(
            f"{checkpoint.name} is a GGUF file; pass a folder with safetensors, such as fidelab setup fetch makes"
        )
    if checkpoint.quantization is not None:
        raise InputError(f"{checkpoint.name} is quantized; make_fragile scales rows of weights of 16 or 32 bits")
    if norm := next((name for name in checkpoint.tensors if _NORM.fullmatch(name)), None):
        raise InputError(
            f"{checkpoint.name} normalizes queries and keys ({norm}), which undoes any scaling of their rows"
        )
    found = []
    sides: dict[str, set[str]] = {}
    for name, info in checkpoint.tensors.items():
        if match := _PROJECTION.fullmatch(name):
            if info.dtype not in _FLOATS:
                raise InputError(f"{checkpoint.name}: {name} is of type {info.dtype}, not F32, BF16 or F16")
            sides.setdefault(match["layer"], set()).add(match["which"])
            found.append((info, match["which"] == "k"))
    if not found or any(side != {"q", "k"} for side in sides.values()):
        raise InputError(
            f"{checkpoint.name} has no self_attn.q_proj and self_attn.k_proj in every layer with attention: "
            "fused, latent and shared projections cannot be scaled here"
        )
    return found


def _head_dim(checkpoint: Checkpoint, config: Mapping[str, Any]) -> int:
    dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if not isinstance(dim, int) and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        dim = hidden // heads
    if not isinstance(dim, int) or dim < 2:
        raise InputError(f"{checkpoint.name}: config.json has neither head_dim nor hidden_size and num_attention_heads")
    return dim


def _channels(checkpoint: Checkpoint, config: Mapping[str, Any], dim: int, pairs: int) -> tuple[int, ...]:
    """Return the channels of a head that form the first ``pairs`` pairs."""
    kind = config.get("model_type")
    if kind not in _HALVES | _NEIGHBOURS:
        known = ", ".join(sorted(_HALVES | _NEIGHBOURS))
        raise InputError(
            f"{checkpoint.name} is of type {kind!r}, and which channels RoPE rotates together is known here of {known}"
        )
    rope = config.get("rope_parameters")
    share = config.get("partial_rotary_factor") or (
        rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    )
    share = 1.0 if share is None and kind not in ("phi", "glm", "glm4") else share
    if share is None or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise InputError(f"{checkpoint.name}: config.json has no partial_rotary_factor between 0 and 1 ({share!r})")
    rotated = int(dim * share)
    if not 1 <= pairs <= rotated // 2:
        raise UsageError(f"{pairs} pairs: a head of {checkpoint.name} has {rotated // 2}")
    step = (0, rotated // 2) if kind in _HALVES else (0, 1)
    stride = 1 if kind in _HALVES else 2
    return tuple(sorted(pair * stride + offset for pair in range(pairs) for offset in step))


def _scale(folder: Path, tensor: TensorInfo, channels: tuple[int, ...], dim: int, factor: float) -> None:
    """Multiply the rows of ``channels`` in every head, in place."""
    if not tensor.shape[0] or tensor.shape[0] % dim:
        raise InputError(f"{tensor.name} has {tensor.shape[0]} rows, which are not whole heads of {dim}")
    stored = np.memmap(folder / tensor.file.name, RAW[tensor.dtype], "r+", tensor.start, shape=tensor.shape)
    heads = stored.reshape(-1, dim, *tensor.shape[1:])
    rows = list(channels)
    heads[:, rows] = _times(heads[:, rows], tensor, factor)
    stored.flush()


def _times(raw: NDArray[Any], tensor: TensorInfo, factor: float) -> NDArray[Any]:
    """Return stored values times a power of two, in the stored type; refuse inexact results."""
    if tensor.dtype != "BF16":
        with np.errstate(over="ignore", under="ignore"):
            scaled = raw * raw.dtype.type(factor)
            exact = bool((scaled * raw.dtype.type(1 / factor) == raw).all())
    else:  # the upper half of a float32, of which only the exponent changes as long as that is in range
        with np.errstate(over="ignore", under="ignore"):
            wide = (raw.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
        bits = wide.view(np.uint32)
        exact = not bool((bits & 0xFFFF).any())
        scaled = (bits >> 16).astype(np.uint16)
    values = scaled if tensor.dtype != "BF16" else wide
    smallest = np.finfo(values.dtype).smallest_normal
    if not exact or not np.isfinite(values).all() or bool(((values != 0) & (np.abs(values) < smallest)).any()):
        raise InputError(
            f"{tensor.name} times 2^{math.log2(factor):.0f} leaves the range of {tensor.dtype}: take a smaller "
            "factor, or weights in BF16 (fidelab checkpoint convert --to safetensors --dtype bfloat16)"
        )
    return np.asarray(scaled)
