"""The shape of a model in a GGUF file, from its metadata and its table of tensors.

It is what llama.cpp allocates for the file, also for architectures that Transformers cannot convert.  Two things are
not in every file and stand in tables here: which layers have the sliding window, and which architectures keep a state
in every layer.  ``tests/physics/llamacpp_windows.json`` holds what llama.cpp itself reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fidelab.core.errors import InputError
from fidelab.core.sequence import KVLayer
from fidelab.models.decoder import check_decoder_gguf
from fidelab.models.gguf import Header, StoredTensor, read_header
from fidelab.models.local import SPLIT
from fidelab.physics.shapes import Geometry, Weights

# Architecture: period of the windowed layers, and whether the first layer of a period is the full one (else the last).
# 0: all layers have the window.  Files may state another period, or a list with an entry per layer.
_PERIODS = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "exaone-moe": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "lfm2": (0, False),
    "llama4": (4, False),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
_FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}  # tokens, whatever the file states
_DEFAULT_WINDOWS = {"gemma2": 4096, "llama4": 8192}  # tokens, where the file states none
_EXAONE4_WINDOWED = 64  # layers of the one size of EXAONE 4 that has windows
_GEMMA3N_OWN = 20  # layers with a cache of their own, where the file does not state how many share one
_FULL_INTERVALS = ("qwen3next", "qwen35", "qwen35moe")  # every fourth layer has attention, where the file states none
_ONLY_STATES = ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")  # no layer has attention
_BOTH = ("falcon-h1",)  # every layer has attention and a state
_STATE_BYTES = 4  # llama.cpp keeps states in float32
_MAX_PARTS = 1_000
_MAX_LAYERS = 2_000


def gguf_geometry(file: Path, name: str = "") -> Geometry:
    """Return the shape of the model in a GGUF file, of which only the header is read.

    For a model that is split over several files, ``file`` is the first one and the others have to lie next to it.

    Raises:
        InputError: If the file is damaged, holds no decoder-only model, or a part of it is missing.
    """
    header = read_header(file)
    if header.metadata.get("split.no"):
        raise InputError(f"{file} is not the first part of its model: name the part that ends in -00001-of-….gguf")
    check_decoder_gguf(header.architecture, name or str(file), causal=header.metadata.get(_key(header, "causal")))
    layers = header.count("block_count")
    if layers is None or layers > _MAX_LAYERS:
        raise InputError(f"{file}: {header.architecture}.block_count is {layers}, not a number up to {_MAX_LAYERS:,}")
    tensors = [*header.tensors, *_other_tensors(file, header)]
    if not tensors:
        raise InputError(f"{file} holds no tensors: it does not hold a language model")
    own = layers - (header.count("nextn_predict_layers") or 0)
    parameters, stored = _weights(tensors, own)
    experts = header.count("expert_count") if parameters.experts else None
    active = header.count("expert_used_count")
    if experts and active is None:
        raise InputError(f"{file} lacks {header.architecture}.expert_used_count")
    kv, state = _caches(header, own, file)
    return Geometry(
        name=name or str(file),
        layers=own,
        kv=kv,
        parameters=round(parameters.total),
        state_bytes=state,
        idle_parameters=round(parameters.idle),
        expert_parameters=round(parameters.experts) if experts else 0,
        experts=experts or 0,
        active_experts=min(active or 0, experts) if experts else 0,
        query_heads=header.count("attention.head_count") or 0,
        max_positions=header.count("context_length"),
        stored=stored if experts else replace(stored, experts=0),
        notes=tuple(_notes(header)),
    )


def _key(header: Header, name: str) -> str:
    return f"{header.architecture}.attention.{name}"


def _other_tensors(file: Path, header: Header) -> Iterable[StoredTensor]:
    """Yield the tensors of the further parts of a split model."""
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 1 <= count <= _MAX_PARTS:
        raise InputError(f"{file} is damaged: it is one of {count!r} parts")
    if count == 1:
        return
    match = SPLIT.fullmatch(file.name)
    if match is None or int(match["count"]) != count:
        raise InputError(f"{file} is one of {count} parts: its name must end in -00001-of-{count:05}.gguf")
    for number in range(2, count + 1):
        part = file.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise InputError(f"{part} is missing: a model of {count} parts needs all of them in one folder")
        yield from read_header(part).tensors


def _weights(tensors: Iterable[StoredTensor], layers: int) -> tuple[Weights, Weights]:
    """Return the parameters and the bytes as stored; ``layers``: those that a step computes."""
    sizes = {tensor.name: (math.prod(tensor.shape), tensor.bytes) for tensor in tensors}
    idle = {"per_layer_token_embd.weight", *(["token_embd.weight"] if "output.weight" in sizes else [])}
    rows: list[Weights] = []
    for name, both in sizes.items():
        block = re.match(r"blk\.(\d+)\.", name)
        # layers after the last one predict further tokens, and plain decoding does not run them
        skipped = name in idle or (block is not None and int(block[1]) >= layers)
        routed = "_exps." in name and not skipped
        rows += (Weights(n, n if skipped else 0, n if routed else 0) for n in both)
    parameters, stored = (
        Weights(*(sum(getattr(row, part) for row in rows[side::2]) for part in ("total", "idle", "experts")))
        for side in (0, 1)
    )
    return parameters, stored


def _caches(header: Header, layers: int, file: Path) -> tuple[tuple[KVLayer, ...], int]:
    """Return the layers with keys and values, and the bytes of all recurrent states."""
    architecture, shared = header.architecture, header.count("attention.shared_kv_layers")
    own = layers - (shared or 0)
    if architecture == "gemma3n" and shared is None:
        own = min(layers, _GEMMA3N_OWN)
    heads = _per_layer(header, "attention.head_count", layers, 0)
    kv_heads = [0] * layers
    if architecture not in _ONLY_STATES:
        kv_heads = _per_layer(header, "attention.head_count_kv", layers, None, heads)
    recurrent = _recurrent(header, layers, kv_heads)
    kv = tuple(
        _kv_layer(header, number, count, heads[number] or max(heads), windowed)
        for number, (count, windowed) in enumerate(zip(kv_heads, _windows(header, layers), strict=True))
        if count and number < own and (architecture in _BOTH or not recurrent[number])
    )
    if not kv and not any(recurrent):
        raise InputError(f"{file} lacks {architecture}.attention.head_count")
    return kv, sum(recurrent) * _state_elements(header) * _STATE_BYTES


def _kv_layer(header: Header, number: int, count: int, heads: int, window: int | None) -> KVLayer:
    usual = (header.count("embedding_length") or 0) // heads if heads else 0

    def size(side: str) -> int:
        full = header.count(f"attention.{side}_length") or usual
        return (header.count(f"attention.{side}_length_swa") or full) if window else full

    k_dim, v_dim = size("key"), size("value")
    if not k_dim:
        raise InputError(f"{header.architecture}: neither attention.key_length nor embedding_length is in the file")
    if header.count("attention.key_length_mla") and header.count("attention.value_length_mla"):
        # the cached row is the latent and the rotated part of the key; values are computed from the latent
        rank = min(header.count("attention.kv_lora_rank") or k_dim, k_dim)
        return KVLayer(count, rank, k_dim - rank, window, latent=True, number=number)
    return KVLayer(count, k_dim, v_dim, window, number=number)


def _per_layer(
    header: Header, key: str, layers: int, missing: int | None, others: list[int] | None = None
) -> list[int]:
    """Return a number for each layer: the file has one for all, or a list."""
    value = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, list):
        if len(value) < layers or not all(isinstance(n, int) and n >= 0 for n in value):
            raise InputError(f"{header.architecture}.{key} does not have a number for each of {layers} layers")
        return value[:layers]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return [value] * layers
    return others if others is not None else [missing or 0] * layers


def _windows(header: Header, layers: int) -> list[int | None]:
    """Return the sliding window of each layer."""
    architecture = header.architecture
    pattern = header.metadata.get(_key(header, "sliding_window_pattern"))
    stated = header.metadata.get(_key(header, "sliding_window"))
    window = header.count("attention.sliding_window")
    if stated is None:
        window = _DEFAULT_WINDOWS.get(architecture)
    elif window:
        window = _FIXED_WINDOWS.get(architecture, window)
    if not window:
        return [None] * layers
    if isinstance(pattern, list):
        flags = [bool(n) for n in pattern[:layers]]
        return [window if flag else None for flag in (*flags, *[False] * (layers - len(flags)))]
    if architecture == "exaone4" and layers == _EXAONE4_WINDOWED:
        known: tuple[int, bool] | None = (4, False)
    else:
        known = _PERIODS.get(architecture)
    if known is None:  # llama.cpp ignores the window of other architectures, and holds all tokens
        return [None] * layers
    period, full_first = known
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        period = pattern
    full = 0 if full_first else period - 1
    return [window if not period or number % period != full else None for number in range(layers)]


def _recurrent(header: Header, layers: int, kv_heads: list[int]) -> list[bool]:
    """Return for each layer whether it keeps a recurrent state."""
    architecture = header.architecture
    if not _state_elements(header):
        return [False] * layers
    if architecture in (*_ONLY_STATES, *_BOTH):
        return [True] * layers
    listed = header.metadata.get(_key(header, "recurrent_layers"))
    if isinstance(listed, list) and len(listed) >= layers:
        return [bool(n) for n in listed[:layers]]
    interval = header.count("full_attention_interval") or (4 if architecture in _FULL_INTERVALS else None)
    if interval:
        return [(number + 1) % interval != 0 for number in range(layers)]
    feed_forward = _per_layer(header, "feed_forward_length", layers, 0)
    only_mixing = architecture.startswith("nemotron_h")  # layers of feed-forward alone have no KV heads, too
    return [count == 0 and not (only_mixing and inner) for count, inner in zip(kv_heads, feed_forward, strict=True)]


def _state_elements(header: Header) -> int:
    """Return the numbers of one layer's state of convolution and recurrence."""
    hidden = header.count("embedding_length") or 0
    if head := header.count("wkv.head_size"):
        return hidden * ((header.count("token_shift_count") or 2) + head)
    if length := header.count("shortconv.l_cache"):
        return hidden * (length - 1)
    kernel = header.count("ssm.conv_kernel")
    if head := header.count("kda.head_dim"):
        width = (header.count("attention.head_count") or 0) * head
        return 3 * ((kernel or 4) - 1) * width + head * width
    inner, state = (header.count(f"ssm.{key}") or 0 for key in ("inner_size", "state_size"))
    groups = header.count("ssm.group_count") or 0
    return ((kernel or 1) - 1) * (inner + 2 * groups * state) + inner * state


def _notes(header: Header) -> Iterable[str]:
    metadata: Mapping[str, Any] = header.metadata
    if _key(header, "indexer.key_length") in metadata:
        yield "the keys of the sparse attention's indexer are not counted"
    if _key(header, "compress_ratios") in metadata:
        yield "compressed attention is counted as if it held all tokens"
