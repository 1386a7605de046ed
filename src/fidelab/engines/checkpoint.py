"""An arm's checkpoint by its ``config.json``, read without any engine's library: enough to refuse an arm early."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fidelab.core import Arm, KVSpec, plain_json
from fidelab.engines.installed import package_folder
from fidelab.engines.options import trusts_code

_DTYPES = ("float32", "bfloat16", "float16")


def read_config(path: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model's folder; empty if there is none that can be read."""
    try:
        config = plain_json((Path(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def loading_refusal(arm: Arm, *own: str) -> str:
    """Return the reason why an arm's compute type or architecture cannot be loaded; empty if none is known.

    ``own``: see :func:`unknown_architecture`.
    """
    if arm.dtype not in _DTYPES:
        return f"dtype {arm.dtype!r} is not one of {', '.join(_DTYPES)}"
    return "" if trusts_code(arm) else unknown_architecture(arm, *own)


def unknown_architecture(arm: Arm, *own: str) -> str:
    """Return the reason why no installed package reads the config of an arm's model; empty if one may.

    ``own``: folders of packages (``vllm/transformers_utils``) with types of configs that Transformers does not have.
    """
    kind = read_config(arm.path).get("model_type")
    if not isinstance(kind, str) or not kind:
        return ""
    named = re.compile(rf"[\"']{re.escape(kind)}[\"']|\b{re.escape(kind)}=")
    places = [place for name in ("transformers/models/auto", *own) if (place := _folder_of(name)) is not None]
    files = (file for place in places for file in place.rglob("*.py"))
    if not places or any(named.search(file.read_text("utf-8", errors="replace")) for file in files):
        return ""
    readers = " and ".join((f"transformers {metadata.version('transformers')}", *(name.split("/")[0] for name in own)))
    return (
        f"the config.json of {arm.model} has model_type {kind!r}, which is unknown to {readers}: correct it, or "
        "upgrade what is to read it"
    )


def _folder_of(name: str) -> Path | None:
    """A folder below an installed package, which is not imported."""
    package, _, below = name.partition("/")
    home = package_folder(package)
    return home / below if home is not None and (home / below).is_dir() else None


@dataclass(frozen=True)
class Shape:
    """The cache of a checkpoint by its config; ``None`` if the config names it otherwise.

    ``head_dim`` is unknown for latent attention, which has dimensions of its own.  ``values``: of a token in a layer, 0
    if unknown.  ``windowed``: whether any layer has a sliding window; ``window``: its tokens, and ``full``: the layers
    without one, as far as the config says so.
    """

    layers: int | None = None
    head_dim: int | None = None
    positions: int | None = None
    values: int = 0
    latent: bool = False
    windowed: bool | None = None
    window: int | None = None
    full: int | None = None


def shape_of(path: str) -> Shape:
    """Return the shape of the text part of a model in a folder."""
    config = read_config(path)
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        return Shape()
    numbers = {key: value for key, value in text.items() if isinstance(value, int)}
    heads, head_dim, latent = (numbers.get(key) or 0 for key in ("num_attention_heads", "head_dim", "kv_lora_rank"))
    if heads and not latent:
        head_dim = head_dim or numbers.get("hidden_size", 0) // heads
    values = (
        latent + numbers.get("qk_rope_head_dim", 0)
        if latent
        else 2 * head_dim * (numbers.get("num_key_value_heads") or heads)
    )
    layers, positions = (numbers.get(key) for key in ("num_hidden_layers", "max_position_embeddings"))
    windowed, kinds = _windowed(text), text.get("layer_types")
    full = sum("sliding" not in str(kind) for kind in kinds) if isinstance(kinds, list) else None
    window = numbers.get("sliding_window") if windowed else None
    return Shape(layers, head_dim or None, positions, values, bool(latent), windowed, window, full)


def _windowed(config: dict[str, Any]) -> bool | None:
    """Whether a config names a layer with a sliding window; ``None`` if it says nothing of its layers."""
    if isinstance(kinds := config.get("layer_types"), list):
        return any("sliding" in str(kind) for kind in kinds)
    if "num_hidden_layers" not in config:
        return None
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def skip_refusal(kv: KVSpec, layers: int | None, windowed: bool | None = None) -> str:
    """Return the reason why a model cannot skip the layers that the spec names; empty if it can.

    ``layers``: how many it has; ``windowed``: whether any of them has a sliding window.
    """
    if layers is not None and (beyond := [layer for layer in kv.skip_layers if layer >= layers]):
        return f"skip-layers={beyond[0]}: the model has layers 0–{layers - 1}"
    if kv.skip_kinds and windowed is False:
        return f"skip-layers={kv.skip_kinds[0]}: no layer of the model has a sliding window"
    return "skip-layers leaves no layer to encode" if len(kv.skip_layers) == layers else ""
