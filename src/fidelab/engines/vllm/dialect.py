"""Flags of ``vllm serve`` and what they mean for an arm, and its metrics."""

from __future__ import annotations

import re

from fidelab.engines.dialect import Dialect, pairs
from fidelab.engines.server_metrics import MetricNames

DIALECT = Dialect(
    programs=("vllm serve", "python -m vllm.entrypoints.openai.api_server"),
    program=r"vllm serve|python\S* -m vllm\.entrypoints\.(cli\.main serve|openai\.api_server)",
    mark="vllm",
    port=8000,
    in_image=True,
    positional_model=True,
    names={
        "model": "@model",
        "revision": "@revision",
        "dtype": "@dtype",
        "device": "@device",
        "kv-cache-dtype": "@kv",
        "kv-cache-dtype-skip-layers": "@skip",
        "tensor-parallel-size": "tp",
        "kv-cache-memory-bytes": "kv-cache-memory",
        "enable-chunked-prefill": "chunked-prefill",
        "device-memory-utilization": "gpu-memory-utilization",
    },
    short=pairs(
        "-tp tensor-parallel-size -pp pipeline-parallel-size -dp data-parallel-size "
        "-ep enable-expert-parallel -q quantization -sc speculative-config -cc compilation-config "
        "-ac attention-config -asc api-server-count -dcp decode-context-parallel-size "
        "-pcp prefill-context-parallel-size -O optimization-level"
    ),
    switches=re.compile(
        r"(?!disable-access-log-for)(enable|disable|no|skip|use|return|trust)-.*|enforce-eager|async-scheduling"
        r"|headless|language-model-only|kv-sharing-fast-prefill|data-parallel-(hybrid|external)-lb|fully-sharded-loras"
    ),
    unsaid={"enforce-eager": "no"},
)

PAGE_NAMES = MetricNames(
    server="vllm",
    generated="vllm:generation_tokens",
    usage="vllm:kv_cache_usage_perc",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    drafted="vllm:spec_decode_num_draft_tokens",
    accepted="vllm:spec_decode_num_accepted_tokens",
    drafts="vllm:spec_decode_num_drafts",
    preempted="vllm:num_preemptions",
    ttft="vllm:time_to_first_token_seconds",
    tpot="vllm:request_time_per_output_token_seconds",
    itl="vllm:inter_token_latency_seconds",
    e2el="vllm:e2e_request_latency_seconds",
)
