"""What a checkpoint's config says of its shape, without Transformers: enough to refuse an arm before anything runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Shape", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """``None`` where the config does not say it in the usual words; the loaded model has the last one."""

    layers: int | None = None
    head_dim: int | None = None


def shape_of(path: str) -> Shape:
    """The shape of the text part of the model in a folder."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        config = config.get("text_config") or config
        layers, head_dim = config.get("num_hidden_layers"), config.get("head_dim")
        if head_dim is None and "kv_lora_rank" not in config:  # latent attention has dimensions of its own
            head_dim = config["hidden_size"] // config["num_attention_heads"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return Shape()
    return Shape(*(value if isinstance(value, int) else None for value in (layers, head_dim)))
