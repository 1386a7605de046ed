"""Flags of SGLang's server and what they mean for an arm, and its metrics."""

from __future__ import annotations

from fidelab.engines.dialect import Dialect
from fidelab.engines.server_metrics import MetricNames

DIALECT = Dialect(
    programs=("python -m sglang.launch_server", "sglang serve"),
    program=r"sglang serve|python\S* -m sglang\.launch_server",
    mark="sglang",
    port=30000,
    in_image=True,
    names={
        "model": "@model",
        "model-path": "@model",
        "revision": "@revision",
        "dtype": "@dtype",
        "device": "@device",
        "kv-cache-dtype": "@kv",
        "tp-size": "tp",
        "tensor-parallel-size": "tp",
        "disable-cuda-graph": ("cuda-graph", "off", "on"),
    },
    negates=False,
    unsaid={"cuda-graph": "on"},  # SGLang has none on CPUs, whatever its flags
)

PAGE_NAMES = MetricNames(
    server="sglang",
    generated="sglang:generation_tokens",
    usage="sglang:token_usage",
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    drafts="sglang:spec_verify_calls",
    preempted="sglang:num_retracted_requests",
    rate="sglang:gen_throughput",
    length="sglang:spec_accept_length",
    accepted_share="sglang:spec_accept_rate",
    ttft="sglang:time_to_first_token_seconds",
    itl="sglang:inter_token_latency_seconds",
    e2el="sglang:e2e_request_latency_seconds",
)
