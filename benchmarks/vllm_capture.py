"""Prefill with capture against vLLM's own prefill of the same prompts, in one process, in turn; medians.

Capture: a Prefill probe, half of each window's rows handed to a sink.  Own: ``LLM.generate`` with one token to
generate, all prompts at once, as vLLM batches them.  Runs itself in the environment of engine vllm.

    python benchmarks/vllm_capture.py [--windows 8] [--n-ctx 512] [--repeats 5] [--threads 1] [--kv auto]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

GOAL_RATE, GOAL_RATIO = 400, 1.3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path is None:
        _in_its_environment(options.model)
        return
    figures = _measure(options)
    rate, ratio = figures["capture_tokens_per_second"], figures["ratio"]
    print(f"{'vLLM alone':<44} {figures['own_tokens_per_second']:>8.0f} tok/s")
    print(f"{f'with capture (goal ≥ {GOAL_RATE})':<44} {rate:>8.0f} tok/s")
    print(f"{f'ratio of times (goal ≤ {GOAL_RATIO})':<44} {ratio:>8.2f}")
    print(json.dumps(figures))


def _in_its_environment(model: str) -> None:
    from fidelab.environments.environment import locate
    from fidelab.models import resolve

    environment = locate("vllm")
    command = [environment.python, __file__, *sys.argv[1:], "--path", str(resolve(model).path)]
    sys.exit(subprocess.run(command, env={**os.environ, **environment.variables()}, check=False).returncode)


class _Sink:
    """Looks at what it is given, and forgets it."""

    def add(self, item: int, arrays: Mapping[str, Any]) -> None:
        assert arrays

    def fail(self, item: int, reason: str) -> None:
        raise AssertionError(reason)

    def progress(self, tokens: int) -> None:
        pass


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    from fidelab.core import Arm, KVSpec
    from fidelab.engines.vllm import VLLMEngine
    from fidelab.probes import Prefill

    engine, n = VLLMEngine(), options.n_ctx
    kv = KVSpec.parse(options.kv)
    engine.open(Arm("arm", "vllm", options.model, options.path, "0" * 8, kv, "bfloat16", "cpu", options.threads))
    from vllm import SamplingParams

    drawn = np.random.default_rng(0).integers(10, 10_000, (options.windows, n))
    windows = tuple(tuple(int(token) for token in window) for window in drawn)
    probe = Prefill("kld", windows, n // 2, n - 2, tuple((0,) * (n - 1 - n // 2) for _ in windows))
    prompts = [{"prompt_token_ids": list(window[:-1])} for window in windows]  # what the probe feeds, too
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    seconds: dict[str, list[float]] = {"own": [], "capture": []}
    for repeat in range(options.repeats + 1):
        for name in seconds:
            began = time.perf_counter()
            if name == "own":
                engine._model.llm.generate(prompts, params, use_tqdm=False)
            else:
                engine.answer(probe, _Sink())
            if repeat:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    own, capture = (statistics.median(values) for values in seconds.values())
    tokens = options.windows * (n - 1)
    return {
        "benchmark": "vllm_capture",
        "versions": engine.versions(),
        "kv": options.kv,
        "threads": options.threads,
        "tokens": tokens,
        "own_seconds": seconds["own"],
        "capture_seconds": seconds["capture"],
        "own_tokens_per_second": tokens / own,
        "capture_tokens_per_second": tokens / capture,
        "ratio": capture / own,
    }


if __name__ == "__main__":
    main()
