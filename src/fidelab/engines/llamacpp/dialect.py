"""Flags of ``llama-server`` and what they mean for an arm, and its metrics."""

from __future__ import annotations

import re

from fidelab.engines.dialect import Dialect, pairs
from fidelab.engines.server_metrics import MetricNames

DIALECT = Dialect(
    programs=("llama-server",),
    program="llama-server",
    mark=r"^(?!.*(sglang|vllm)).*llama",  # images of other servers may name the family of models
    port=8080,
    names={
        "model": "@model",
        "threads": "@threads",
        "cache-type-k": "@k",
        "cache-type-v": "@v",
        "batch-size": "n-batch",
        "ubatch-size": "n-ubatch",
        "gpu-layers": "n-gpu-layers",
        "rope-scaling": "rope-scaling-type",
        "repack": "use-extra-bufts",
        "kv-offload": "offload-kqv",
    },
    short=pairs(
        "-m model -t threads -tb threads-batch -c ctx-size -b batch-size -ub ubatch-size -ngl gpu-layers "
        "-fa flash-attn -ctk cache-type-k -ctv cache-type-v -sm split-mode -ts tensor-split -mg main-gpu "
        "-kvu kv-unified -nkvo no-kv-offload -kvo kv-offload -np parallel -cb cont-batching "
        "-nocb no-cont-batching -a alias -v verbose -lv verbosity -n predict -s seed -to timeout "
        "-hf hf-repo -hfr hf-repo -mu model-url -hft hf-token -sps slot-prompt-similarity -dev device "
        "-md model-draft -cmoe cpu-moe -ncmoe n-cpu-moe -ot override-tensor -fit fit -j json-schema "
        "-cram cache-ram -ctxcp ctx-checkpoints -dt defrag-thold -mm mmproj"
    ),
    switches=re.compile(r"no-.*|mlock|kv-unified|swa-full|cont-batching|jinja|metrics|slots|props|verbose|cpu-moe"),
    ignored={
        "cache-prompt": "windows and prompts start with an empty cache",
        "cache-reuse": "windows and prompts start with an empty cache",
        "cache-ram": "windows and prompts start with an empty cache",
        "ctx-checkpoints": "windows and prompts start with an empty cache",
        "context-shift": "no window is longer than the context",
        "defrag-thold": "llama.cpp itself ignores it",
        **dict.fromkeys(("mmap", "mlock"), "says how weights get into memory; no number depends on it"),
        "threads-batch": "configurations use one number of threads, that of --threads",
        "ctx-size": "the context is as long as each request",
        "fit": "the context is as long as each request",
        "mmproj": "only text is asked",
    },
)

PAGE_NAMES = MetricNames(
    server="llama.cpp",
    generated="llamacpp:tokens_predicted",
    usage="llamacpp:kv_cache_usage_ratio",
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
)
