"""Options of vLLM and its server that a foreign file may set without permission, and those that load code."""

from __future__ import annotations

from collections.abc import Mapping

from fidelab.engines.harmless import (
    COUNT,
    MODEL,
    NAME,
    SHARE,
    SWITCH,
    TOKENS,
    Amount,
    Beside,
    Count,
    Either,
    Fields,
    Harmless,
    Listed,
    Words,
    group,
)
from fidelab.engines.vllm.options import MODEL_RUNNER, SPECULATIVE

CUSTOM = "custom_class"  # method of drafts that imports the class which "model" names
# Methods that load the weights of the model that drafts, or find them in the model itself.
_WEIGHTS = Words(("draft_model", "dflash", "dspark", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp"))
NGRAM = ("ngram", "ngram_gpu", "[ngram]")  # methods, and names of models, that look drafts up in the text
_LOOKUP = Words(NGRAM)
_DRAFTED: Mapping[str, Count] = dict.fromkeys(
    ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "max_model_len"), Count(1)
) | {"draft_tensor_parallel_size": Count(1)}
_DRAFTS = Either(
    (
        # With the method in words, vLLM does not read a name with a dot as a class.
        Fields({"method": _WEIGHTS, "model": MODEL, "quantization": NAME, **_DRAFTED}, ("method",)),
        Fields({"method": _LOOKUP, "model": _LOOKUP, **_DRAFTED}),
    )
)

HARMLESS: Mapping[str, Harmless] = {
    **group(
        "sizes of the cache and of steps",
        TOKENS,
        "kv-cache-memory",
        "kv-cache-memory-bytes",
        "max-model-len",
        "max-num-batched-tokens",
    ),
    **group(
        "numbers of tokens, sequences and ranks",
        COUNT,
        *("block-size", "decode-context-parallel-size", "long-prefill-token-threshold", "max-cudagraph-capture-size"),
        *("max-num-seqs", "num-gpu-blocks-override", "seed", "tensor-parallel-size", "tp"),
    ),
    **group("sizes of batches with a graph", Listed(COUNT), "cudagraph-capture-sizes"),
    **group("a share of the GPU's memory", SHARE, "gpu-memory-utilization"),
    **group("GiB of weights in the computer's memory", Amount(0, 1e6), "cpu-offload-gb"),
    **group("how steps are computed", Words(("0", "1", "2", "3")), "optimization-level"),
    **group(
        "how steps are computed",
        SWITCH,
        *("async-scheduling", "chunked-prefill", "disable-cascade-attn", "disable-sliding-window"),
        *("enable-chunked-prefill", "enforce-eager", "language-model-only"),
    ),
    **group("how steps are computed", Words(("v1", "v2")), MODEL_RUNNER),
    **group("vLLM looks the name up in its own list", NAME, "attention-backend", "quantization"),
    **group("the drafts' methods that import no class", _DRAFTS, SPECULATIVE),
    **group("what is saved", Words(("hidden", "logprobs")), "estimator"),
    **group("a format runs although the backend does not list it", SWITCH, "force"),
    **group("parsers of answers, by vLLM's own names", NAME, "reasoning-parser", "tool-call-parser"),
    **group("whether answers may call tools", SWITCH, "enable-auto-tool-choice"),
    **group("a template that only renders text", Beside(), "chat-template"),
}

LOADS_CODE: Mapping[str, str] = {
    **dict.fromkeys(("io-processor-plugin", "logits-processors", "model-class-overrides", "scheduler-cls"), ""),
    **dict.fromkeys(("reasoning-parser-plugin", "tool-parser-plugin"), ""),
    **dict.fromkeys(("ec-transfer-config", "kv-transfer-config"), "module_path"),
    "compilation-config": r'"backend":\s*"\w+\.',
    "spec-method": CUSTOM,
    "spec-model": r"^[^/]+\.[^/]+$",
}
"""Option → pattern of the values that import code by name; empty: all do."""
