"""safetensors → GGUF: a dense model in a file for llama.cpp, of architectures whose weights it keeps as they are.

Names come from the package ``gguf``.  Queries and keys of Llama are stored with the two halves of each head
interleaved, everything else as in Transformers.  What cannot be said in such a file, or would be read in another way,
is refused by name; whoever calls compares what Transformers reads back from the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError
from fidelab.models.hub import first_line

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Transformers' model types, and llama.cpp's architectures."""

_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_SPLITS = {  # the expression that splits words → llama.cpp's name of the pre-tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "qwen2",
}
_SAMPLES = (
    "The quick brown fox can't jump over 12,345 lazy dogs; isn't that 3.14159?",
    "  def f(x):\n\t\treturn x ** 2  # 2026-01-31\n\n\nÜber naïve façades: 東京 – Привет!",
    "A1b2 C3\r\n[link](https://example.org/?q=1&r=22) 🙂 ...",
)


@dataclass(frozen=True)
class Tensor:
    """A parameter by Transformers' name, with what reads it as float32; ``dtype``: F32, F16 or BF16."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], NDArray[np.float32]]


def load_config(folder: Path) -> Any:
    """Transformers' config of a model that can be written.

    Raises:
        InputError: Transformers does not know it, or it is of another architecture or uses what the file cannot say.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configs are damaged in many ways
        raise InputError(f"{folder}: Transformers cannot read its config ({first_line(error)})") from error
    if config.model_type not in ARCHITECTURES:
        raise InputError(
            f"{folder} is of model type {config.model_type}, whose weights llama.cpp stores in ways that are not known "
            f"here; {', '.join(ARCHITECTURES)} can be written, llama.cpp's convert_hf_to_gguf.py knows more"
        )
    rope = config.rope_parameters or {}
    odd = {
        f"rope_type {rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        f"sliding_window {getattr(config, 'sliding_window', None)}": bool(getattr(config, "sliding_window", None))
        and getattr(config, "use_sliding_window", True),
        f"partial_rotary_factor {rope.get('partial_rotary_factor')}": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
    }
    for what, is_odd in odd.items():
        if is_odd:
            raise InputError(f"{folder} has {what}, which is not written here: use llama.cpp's convert_hf_to_gguf.py")
    return config


def write_gguf(
    file: Path, folder: Path, config: Any, tensors: Iterable[Tensor], cast: Callable[..., NDArray[Any]]
) -> dict[str, str]:
    """Write the model of a folder; returns llama.cpp's name of each tensor.

    Args:
        file: to be written.
        folder: with tokenizer and chat template.
        config: of :func:`load_config`.
        tensors: all parameters; one is in memory at a time.
        cast: (values, dtype, name) → the values in that type, BF16 as its 16 bits.

    Raises:
        InputError: a parameter or a tokenizer that has no place in such a file.
    """
    import gguf

    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(file, architecture)
    try:
        _describe(writer, config)
        _add_tokenizer(writer, folder, config.vocab_size)
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        found: dict[str, Tensor] = {}
        kinds = set()
        for tensor in tensors:
            name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
            if name is None or name in found:
                raise InputError(f"{folder}: llama.cpp's {architecture} has no place for tensor {tensor.name}")
            found[name] = tensor
            kind = "F32" if len(tensor.shape) == 1 else _TYPES[tensor.dtype]  # llama.cpp wants norms in float32
            kinds.add(kind) if len(tensor.shape) > 1 else None
            size = np.dtype("f4" if kind == "F32" else "u2").itemsize * int(np.prod(tensor.shape))
            shape = (*tensor.shape[:-1], tensor.shape[-1] * 2) if kind == "BF16" else tensor.shape
            stored = {"F32": np.float32, "F16": np.float16, "BF16": np.uint8}[kind]
            raw = gguf.GGMLQuantizationType.BF16 if kind == "BF16" else None
            writer.add_tensor_info(name, shape, np.dtype(stored), size, raw)
        files = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
        writer.add_file_type(gguf.LlamaFileType[files[min(kinds)]])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in found.values():
            kind = "F32" if len(tensor.shape) == 1 else tensor.dtype
            values = cast(_arranged(tensor, config, architecture), kind, tensor.name)
            writer.write_tensor_data(values.view(np.uint8) if kind == "BF16" else values)
    finally:
        writer.close()
    return {tensor.name: name for name, tensor in found.items()}


def _arranged(tensor: Tensor, config: Any, architecture: str) -> NDArray[np.float32]:
    values = tensor.read()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if f".{part}." in tensor.name), None)
    if architecture != "llama" or count is None:
        return values
    halves = values.reshape(count, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _describe(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


# ----------------------------------------------------------------------------------------------------------- tokenizer


def _add_tokenizer(writer: Any, folder: Path, size: int) -> None:
    import gguf

    description = _json(folder / "tokenizer.json")
    model = description.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise InputError(
            f"{folder}/tokenizer.json is of type {model.get('type', 'unknown')}"
            f"{' with byte fallback' if model.get('byte_fallback') else ''}, not byte-level BPE: use llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    kind = _pre_tokenizer(description)
    if kind is None:
        raise InputError(
            f"{folder}/tokenizer.json splits words in a way for which llama.cpp's name is not known here; use its "
            "convert_hf_to_gguf.py"
        )
    pieces: dict[int, tuple[str, Any]] = {
        number: (text, gguf.TokenType.NORMAL) for text, number in model["vocab"].items()
    }
    for added in description.get("added_tokens", ()):
        special = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        pieces[added["id"]] = added["content"], special
    if max(pieces) >= size:
        raise InputError(f"{folder}: the tokenizer has token {max(pieces)}, the model {size} tokens")
    unused = gguf.TokenType.UNUSED
    tokens, kinds = zip(*(pieces.get(n, (f"[PAD{n}]", unused)) for n in range(size)), strict=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    tokenizer = _tokenizer(folder)
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{role}_token_id")
        if number in pieces:  # Transformers' classes may add one of their own
            getattr(writer, f"add_{role}_token_id")(number)
    first = tokenizer("a").input_ids[0]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def check_tokenizer(folder: Path, read_back: Path) -> None:
    """Check that a tokenizer read back from a file gives the tokens of the original.

    Raises:
        InputError: it does not; names the text.
    """
    ours, theirs = _tokenizer(folder), _tokenizer(read_back)
    for text in _SAMPLES:
        if ours(text, add_special_tokens=False).input_ids != theirs(text, add_special_tokens=False).input_ids:
            raise InputError(
                f"{folder}: its tokenizer gives other tokens than the one of the GGUF file, for {text[:20]!r} …: use "
                "llama.cpp's convert_hf_to_gguf.py"
            )


def _pre_tokenizer(description: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of what splits text into words; ``None`` where it is none of those known here."""
    if description.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    split = description.get("pre_tokenizer") or {}
    parts = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    *before, last = parts
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not before:
        return "gpt-2" if last.get("use_regex", True) else None
    [first, *more] = before
    if more:
        return None
    if first.get("type") == "Digits" and first.get("individual_digits") and last.get("use_regex", True):
        return "smollm"
    if first.get("type") == "Split" and not last.get("use_regex", True) and first.get("behavior") == "Isolated":
        return _SPLITS.get(first["pattern"].get("Regex", ""))
    return None


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers are damaged in many ways
        raise InputError(f"{folder}: Transformers cannot read its tokenizer ({first_line(error)})") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({first_line(error)}); a GGUF file needs it") from None
    return content if isinstance(content, dict) else {}
