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
_GGUF_OTHERS = frozenset(  # encoders, projectors of images, codecs, and diffusion models, which cache nothing
    (
        *("bert", "clip", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada", "llada-moe"),
        *("llama-embed", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1", "t5encoder"),
        "wavtokenizer-dec",
    )
)


def check_decoder(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose ``config.json`` describes an encoder with a decoder.

    Raises:
        InputError: If it does. The message names the model and its type.
    """
    kind = config.get("model_type")
    if config.get("is_encoder_decoder", kind in _TYPES) is True:
        raise _refusal(name, str(kind or "of no named type"))


def check_decoder_gguf(architecture: str, name: str, *, causal: object = None) -> None:
    """Refuse a GGUF file of such an architecture, and of one that is not a decoder.

    ``causal``: the file's ``attention.causal``, which encoders have set to false.

    Raises:
        InputError: If it is one.
    """
    if architecture in _GGUF:
        raise _refusal(name, architecture)
    if causal is False or architecture in _GGUF_OTHERS:
        raise not_a_decoder(name, architecture)


def not_a_decoder(name: str, kind: str) -> InputError:
    """Return the error for a model that does not decode, such as BERT or CLIP."""
    return InputError(f"{name} is {kind[:60]}, not a decoder: fidelab runs decoder-only models")


def _refusal(name: str, kind: str) -> InputError:
    return InputError(
        f"encoder-decoder models are not supported: {name} is {kind[:60]}, fidelab runs decoder-only models"
    )
