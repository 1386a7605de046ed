"""Refuse encoder-decoder models by what their configuration says, before anything is loaded or hashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fidelab.core.errors import InputError

# Values of ``model_type`` in Transformers whose configuration may leave ``is_encoder_decoder`` at its default, true.
_TYPES = frozenset(
    (
        *("bart", "barthez", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led"),
        *("longt5", "m2m_100", "marian", "mbart", "moonshine", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x"),
        *("plbart", "pop2piano", "prophetnet", "seamless_m4t", "seamless_m4t_v2", "speech-encoder-decoder"),
        *("speech_to_text", "speecht5", "switch_transformers", "t5", "t5gemma", "udop", "umt5"),
        *("vision-encoder-decoder", "whisper", "xlm-prophetnet"),
    )
)
_GGUF = frozenset(("t5",))  # of ``general.architecture``


def check_decoder(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose ``config.json`` describes an encoder with a decoder.

    Raises:
        InputError: If it does. The message names the model and its type.
    """
    kind = config.get("model_type")
    if config.get("is_encoder_decoder", kind in _TYPES) is True:
        raise _refusal(name, str(kind or "of no named type"))


def check_decoder_gguf(architecture: str, name: str) -> None:
    """Refuse a GGUF file of such an architecture.

    Raises:
        InputError: If it is one.
    """
    if architecture in _GGUF:
        raise _refusal(name, architecture)


def _refusal(name: str, kind: str) -> InputError:
    return InputError(
        f"encoder-decoder models are not supported: {name} is {kind[:60]}, fidelab runs decoder-only models"
    )
