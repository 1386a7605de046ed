"""Flags of ``llama-server`` and what they mean for an arm, and its metrics."""

from __future__ import annotations

import re

from fidelab.engines.dialect import Dialect
from fidelab.engines.llamacpp.flags import CONVERSIONS, FLAGS, spellings, switch, variables
from fidelab.engines.server_metrics import MetricNames

DIALECT = Dialect(
    programs=("llama-server",),
    program="llama-server",
    mark=r"^(?!.*(sglang|vllm)).*llama",  # images of other servers may name the family of models
    port=8080,
    names={flag.name: flag.option for flag in FLAGS if flag.option},
    spellings=spellings(),
    switches=re.compile("|".join(rf"(no-)?{re.escape(flag.name)}" for flag in FLAGS if not flag.values)),
    values={flag.name: len(flag.values) for flag in FLAGS},
    ignored={flag.name: flag.ignored for flag in FLAGS if flag.ignored},
    refused={flag.name: flag.refused for flag in FLAGS if flag.refused},
    variables=variables(),
    variable_prefix="LLAMA_ARG_",
    switch=switch,
    conversions=CONVERSIONS,
)

PAGE_NAMES = MetricNames(
    server="llama.cpp",
    generated="llamacpp:tokens_predicted",
    usage="llamacpp:kv_cache_usage_ratio",
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
)
