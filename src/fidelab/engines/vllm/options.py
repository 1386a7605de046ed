"""The options of vLLM that fidelab knows, and those that it sets itself."""

from __future__ import annotations

from collections.abc import Mapping

from fidelab.engines.options import SHARE, TOKENS, TRUST, YES_NO, Value, is_count, one_of

MODEL_RUNNER, ASYNC = "model-runner", "async-scheduling"
QUICK_START = "quick-start"  # fidelab's own: without compilation and graphs, for prompts alone
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SPECULATIVE = "speculative-config"


def size_in_bytes(text: str) -> int:
    """Bytes, or 512M, 4G."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def _size(text: str) -> bool:
    try:
        return size_in_bytes(text) > 0
    except (ValueError, IndexError):
        return False


_ONE_PROCESS = "fidelab asks one engine in one process"
_GREEDY = "decoding is greedy"
CONTROLLED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model-tag"), "write model=…"),
    "dtype": "write dtype=…",
    "kv-cache-dtype": "write kv=…",
    "device": "pass --device",
    **dict.fromkeys(
        ("tokenizer", "skip-tokenizer-init", "tokenizer-mode"), "all configurations share the model's tokenizer"
    ),
    "enable-prefix-caching": "captures compute every position; test paths asks what a hit in the cache changes",
    **dict.fromkeys(("worker-cls", "worker-extension-cls"), "the capture is such a class"),
    "distributed-executor-backend": "it follows from tp",
    **dict.fromkeys(("generation-config", "override-generation-config"), _GREEDY),
    **dict.fromkeys(("max-logprobs", "logprobs-mode"), "captures hold the whole vocabulary"),
    "disable-log-stats": "counters are read",
    **dict.fromkeys(("data-parallel-size", "pipeline-parallel-size", "nnodes"), _ONE_PROCESS),
    **dict.fromkeys(("served-model-name", "headless"), "only concerns serving"),
    "hf-token": "set the variable HF_TOKEN",
}
OPTIONS: Mapping[str, Value] = {
    "enforce-eager": YES_NO,
    "kv-cache-memory": (_size, "a number of bytes, as 512M or 4G"),
    "max-model-len": TOKENS,
    "max-num-seqs": (is_count, "a number of sequences"),
    "chunked-prefill": YES_NO,
    "max-num-batched-tokens": TOKENS,
    "tp": (is_count, "a number of ranks"),
    "block-size": TOKENS,
    "attention-backend": (str.isidentifier, "the name of one of vLLM's attention backends"),
    "quantization": (bool, "the name of one of vLLM's quantization methods"),
    "gpu-memory-utilization": SHARE,
    SPECULATIVE: (bool, "a JSON object"),
    "estimator": one_of("hidden", "logprobs"),
    MODEL_RUNNER: one_of("v1", "v2"),
    QUICK_START: YES_NO,
    ASYNC: YES_NO,
    "force": YES_NO,
    TRUST: YES_NO,
}
