"""Transformers' class of a checkpoint, its parameters without their weights, and its decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.engines.base import one_line
from fidelab.engines.layer_states import layer_list


def auto_class(config: Any) -> tuple[Any, Any]:
    """Return the Transformers class that loads a decoder-only model of this config, and its table of models."""
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForImageTextToText, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def skeleton(path: str, *, trusted: bool = False) -> Any:
    """Build Transformers' model of a checkpoint without its weights, for the names and shapes of its parameters.

    Raises:
        EngineError: If Transformers has no such model.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        with torch.device("meta"):
            return auto_class(config)[0].from_config(config, trust_remote_code=trusted)
    except Exception as error:
        raise EngineError(f"Transformers has no model for {path}: {one_line(error)}") from error


def decoder_layers(module: Any, config: Any) -> Sequence[Any]:
    """Return the decoder layers: the outermost list in the model's decoder that is as long as ``config`` says.

    Raises:
        NotSupportedError: If there is none.
    """
    try:
        return list(layer_list(module.get_decoder(), config.num_hidden_layers))
    except RuntimeError as error:
        raise NotSupportedError(f"{config.model_type}: {error}") from error


def checksums(model: Any) -> dict[str, int]:
    """Return a sum of the bits of each parameter, computed on its device: any single change gives another one.

    Buffers are left out: some models compute theirs anew for each length.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = {}
    for name, weight in model.named_parameters():
        if weight.is_meta:  # elsewhere, by device-map
            continue
        own = weight.to_local() if hasattr(weight, "to_local") else weight  # a part, by tp-plan
        flat = own.detach().reshape(-1)
        size = flat.element_size()
        wide = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
        bits = flat.view(kinds[8] if wide else kinds[min(size, 8)])
        found[name] = int(bits.sum(dtype=torch.int64))
    return found
