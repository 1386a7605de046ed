"""Make a small language model of random weights, as two files of the same numbers, with room for long contexts.

Its text is meaningless.  It serves where meaning does not matter: exact counts, memory, long positions, and whether
two engines compute the same.  Needs no network.

The layout is Llama's.  Transformers and llama.cpp rotate keys and queries in different orders of their channels:
where safetensors have (0 … d/2 − 1, d/2 … d − 1), GGUF has the pairs (0, d/2, 1, d/2 + 1, …).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import UsageError

GGUF_NAME = "model.gguf"

_BOS, _EOS = "<|begin|>", "<|end|>"
_EPSILON = 1e-5
_THETA = 1e6  # rotary base: its slowest channel turns once in about 4 million positions
_QK_DEVIATION = 1.5  # standard deviation of queries and keys: some positions get more attention than others
_LOGIT_DEVIATION = 2.0  # standard deviation of the logits
_SMALLEST_MAGNITUDE = 2.0**-14  # smallest magnitude of a weight: float16 and bfloat16 both hold it exactly

Weights = dict[str, NDArray[np.float32]]


def make_tiny(
    folder: Path,
    gguf_type: str = "F16",
    /,
    *,
    vocab: int = 512,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    positions: int = 40_960,
    seed: int = 0,
) -> Path:
    """Write the model into ``folder`` and return that: safetensors in bfloat16, config and tokenizer for Transformers,
    vLLM and SGLang, and ``model.gguf`` for llama.cpp, with matrices of ``gguf_type``: float16, which holds the same
    numbers, or a quantized one such as ``Q8_0``.  Equal arguments give equal bytes.

    A token of one sequence takes ``layers · kv_heads · 2 · head_dim`` values of cache.  Token ids: two special ones,
    the 256 bytes, then pairs of printable characters.

    Raises:
        UsageError: If the sizes fit no such model.
    """
    pairs = vocab - 2 - 256
    if not 0 <= pairs <= 95**2:
        raise UsageError(f"vocab={vocab} is not between 258 and {258 + 95**2}")
    if min(layers, hidden, kv_heads, positions) < 1 or heads < kv_heads or heads % kv_heads or head_dim % 2:
        raise UsageError(
            f"layers={layers}, hidden={hidden}, positions={positions}, heads={heads}, kv_heads={kv_heads}, "
            f"head_dim={head_dim} fit no model: heads are a multiple of kv_heads, head_dim is even, none is 0"
        )
    import torch
    from safetensors.torch import save_file

    # The character of each byte in byte-level vocabularies: itself where it prints, else from U+0100
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    letters = [chr(byte if byte in prints else next(substitutes)) for byte in range(256)]
    printable = [letters[byte] for byte in range(32, 127)]
    order = printable[65:] + printable[:65]  # lower-case letters first
    merges = list(islice(((a, b) for a in order for b in order), pairs))
    pieces = [_BOS, _EOS, *letters, *(a + b for a, b in merges)]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": _EPSILON,
        "rope_theta": _THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},  # Transformers 5 reads this one
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(config, seed)
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, pieces, merges, positions)
    tensors = {name: torch.from_numpy(x).bfloat16() for name, x in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_gguf(folder / GGUF_NAME, config, weights, pieces, merges, gguf_type)
    return folder


def _weights(config: Mapping[str, Any], seed: int) -> Weights:
    """Random weights by their Transformers names, each a number that float16 and bfloat16 hold exactly."""
    rng = np.random.default_rng(seed)
    d, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    weights: Weights = {}

    def matrix(name: str, rows: int, columns: int, deviation: float = 1.0) -> None:
        """Add a matrix whose outputs have standard deviation ``deviation`` where its inputs have 1."""
        drawn = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(deviation / columns**0.5)
        weights[name] = _shared(drawn)

    def norm(name: str) -> None:
        weights[name] = _shared(1 + np.float32(0.1) * rng.standard_normal(d, dtype=np.float32))

    matrix("model.embed_tokens.weight", vocab, d, d**0.5)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm.weight")
        matrix(f"{at}.self_attn.q_proj.weight", q, d, _QK_DEVIATION)
        matrix(f"{at}.self_attn.k_proj.weight", kv, d, _QK_DEVIATION)
        matrix(f"{at}.self_attn.v_proj.weight", kv, d)
        matrix(f"{at}.self_attn.o_proj.weight", d, q)
        norm(f"{at}.post_attention_layernorm.weight")
        matrix(f"{at}.mlp.gate_proj.weight", ffn, d)
        matrix(f"{at}.mlp.up_proj.weight", ffn, d)
        matrix(f"{at}.mlp.down_proj.weight", d, ffn)
    norm("model.norm.weight")
    matrix("lm_head.weight", vocab, d, _LOGIT_DEVIATION)
    return weights


def _shared(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut to bfloat16's 8 bits of precision; what float16 would hold with fewer becomes 0."""
    cut = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.abs(cut) < _SMALLEST_MAGNITUDE, np.float32(0), cut)


def _write_tokenizer(folder: Path, pieces: list[str], merges: list[tuple[str, str]], positions: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (_BOS, _EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": _EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": positions,
        },
    )


def _write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Weights,
    pieces: list[str],
    merges: list[tuple[str, str]],
    matrices: str,
) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[matrices]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(_THETA)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_vocab_size(len(pieces))
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{matrices}"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(pieces) - 2))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, x in weights.items():
        target = str(names.get_name(name, try_suffixes=(".weight",)))
        for part, n in heads.items():
            if f".{part}." in target:
                x = x.reshape(n, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
        if x.ndim == 1:  # llama.cpp wants norms in float32
            writer.add_tensor(target, x)
        else:
            writer.add_tensor(target, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
