"""A one-layer llama in a GGUF file, with a byte-level vocabulary and three merges of blanks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN, HEADS, FFN = 32, 2, 64
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"


def write_gguf(
    path: Path,
    pre: str = "smollm",
    template: str = TEMPLATE,
    *,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    changed: Mapping[str, tuple[int, ...] | None] | None = None,
    numbers: Mapping[str, float] | None = None,
    stored: Mapping[str, Callable[[NDArray[np.float32]], tuple[NDArray[Any], Any]]] | None = None,
    seed: int = 0,
) -> Path:
    """Write the file; equal arguments give equal bytes.

    ``changed``: tensors of other shapes, ``None`` for none.  ``numbers``: further metadata of the architecture.
    ``stored``: what gives the bytes and the type of a tensor that is not stored in float32.
    """
    import gguf

    tokens = [*CONTROL, *_byte_letters(), "ĠĠ", "ĠĠĠ"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["Ġ Ġ", "ĠĠ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    rng = np.random.default_rng(seed)
    for name, shape in {**_shapes(len(tokens)), **(changed or {})}.items():
        if shape is None:
            continue
        values = rng.standard_normal(shape).astype(np.float32)
        encode = (stored or {}).get(name)
        blocks, kind = encode(values) if encode else (values, None)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    for key, number in (numbers or {}).items():
        writer.add_float32(f"{architecture}.{key}", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS
    return {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
