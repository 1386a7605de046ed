"""Options of SGLang and its server that a foreign file may set without permission, and those that load code."""

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
    Harmless,
    Listed,
    Words,
    group,
)

ALGORITHMS = ("DFLASH", "EAGLE", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE")  # of drafts

HARMLESS: Mapping[str, Harmless] = {
    **group("sizes of the cache and of steps", TOKENS, "context-length", "max-prefill-tokens", "max-total-tokens"),
    **group(
        "numbers of tokens, sequences and ranks",
        COUNT,
        *("cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill", "max-mamba-cache-size", "max-running-requests"),
        *("num-continuous-decode-steps", "page-size", "random-seed", "torch-compile-max-bs", "tp", "tp-size"),
        *("triton-attention-num-kv-splits",),
    ),
    **group("a number of tokens, or prefill in one piece", Count(-1), "chunked-prefill-size"),
    **group("sizes of batches with a graph", Listed(COUNT), "cuda-graph-bs-decode", "cuda-graph-bs-prefill"),
    **group("a share of memory", SHARE, "mem-fraction-static", "swa-full-tokens-ratio"),
    **group("GiB of weights in the computer's memory", Amount(0, 1e6), "cpu-offload-gb"),
    **group("how much room requests are given", Amount(0, 100), "schedule-conservativeness"),
    **group(
        "how steps are computed",
        SWITCH,
        *("cuda-graph", "disable-chunked-prefix-cache", "disable-cuda-graph", "disable-cuda-graph-padding"),
        *("disable-overlap-schedule", "disable-radix-cache", "enable-deterministic-inference", "enable-mixed-chunk"),
        *("enable-torch-compile", "triton-attention-reduce-in-fp32"),
    ),
    **group(
        "SGLang looks the name up in its own list",
        NAME,
        *("attention-backend", "decode-attention-backend", "prefill-attention-backend", "quantization"),
        *("sampling-backend", "schedule-policy"),
    ),
    **group(
        "the drafts' methods that import no class",
        Words((*ALGORITHMS, *map(str.lower, ALGORITHMS))),
        "speculative-algorithm",
    ),
    **group("weights of a model that drafts, which are read as the model's own", MODEL, "speculative-draft-model-path"),
    **group(
        "numbers of tokens that are drafted",
        COUNT,
        *("speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-num-steps"),
    ),
    **group("what is saved", Words(("hidden", "logprobs")), "estimator"),
    **group("parsers of answers, by SGLang's own names", NAME, "reasoning-parser", "tool-call-parser"),
    **group("a request less when the server starts", SWITCH, "skip-server-warmup"),
    **group("a template that only renders text, or SGLang's own name of one", Beside(NAME), "chat-template"),
}

LOADS_CODE: Mapping[str, str] = {
    **dict.fromkeys(("custom-weight-loader", "enable-custom-logit-processor", "forward-hooks", "sidecar"), ""),
    "hicache-storage-backend-extra-config": "module_path",
}
"""Option → pattern of the values that import code by name, or start a program; empty: all do."""
