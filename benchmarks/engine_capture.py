"""Prefill with capture against the engine's own prefill of the same prompts, in one process, in turn; medians.

Capture: a Prefill request, half of each window's rows handed to a sink.  Own: ``LLM.generate`` of vLLM,
``sglang.Engine.generate``, with one token to generate, all prompts at once, as the engine batches them.  Runs itself in
the engine's environment; SGLang on a CPU with the import stand-ins of its recipe.

    python benchmarks/engine_capture.py --engine vllm|sglang [--windows 8] [--n-ctx 512] [--repeats 5] [--threads 1]
        [--kv auto]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
GOAL_RATES = {"vllm": 400, "sglang": 250}
GOAL_RATIO = 1.3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=TITLES, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path is None:
        _in_its_environment(options.engine, options.model)
        return
    figures = _measure(options)
    rate, ratio = figures["capture_tokens_per_second"], figures["ratio"]
    print(f"{f'{TITLES[options.engine]} alone':<44} {figures['own_tokens_per_second']:>8.0f} tok/s")
    print(f"{f'with capture (goal ≥ {GOAL_RATES[options.engine]})':<44} {rate:>8.0f} tok/s")
    print(f"{f'ratio of times (goal ≤ {GOAL_RATIO})':<44} {ratio:>8.2f}")
    print(json.dumps(figures))


def _in_its_environment(engine: str, model: str) -> None:
    from fidelab.environments.environment import locate
    from fidelab.models import resolve

    environment = locate(engine)
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

    from fidelab.captures.requests import Prefill
    from fidelab.core import Arm, KVSpec
    from fidelab.engines import ENGINES

    engine, n = ENGINES.load(options.engine)(), options.n_ctx
    kv = KVSpec.parse(options.kv)
    engine.open(Arm("arm", engine.name, options.model, options.path, "0" * 8, kv, "bfloat16", "cpu", options.threads))
    drawn = np.random.default_rng(0).integers(10, 10_000, (options.windows, n))
    windows = tuple(tuple(int(token) for token in window) for window in drawn)
    request = Prefill("kld", windows, n // 2, n - 2, tuple((0,) * (n - 1 - n // 2) for _ in windows))
    own = {"vllm": _vllm, "sglang": _sglang}[engine.name]
    asked: dict[str, Callable[[], Any]] = {
        "own": own(engine, [window[:-1] for window in windows]),  # what the request feeds, too
        "capture": lambda: engine.answer(request, _Sink()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    try:
        for repeat in range(options.repeats + 1):
            for name, ask in asked.items():
                began = time.perf_counter()
                ask()
                if repeat:  # the first warms up
                    seconds[name].append(time.perf_counter() - began)
    finally:
        engine.close()
    alone, capture = (statistics.median(values) for values in seconds.values())
    tokens = options.windows * (n - 1)
    return {
        "benchmark": f"{engine.name}_capture",
        "versions": engine.versions(),
        "kv": options.kv,
        "threads": options.threads,
        "tokens": tokens,
        "own_seconds": seconds["own"],
        "capture_seconds": seconds["capture"],
        "own_tokens_per_second": tokens / alone,
        "capture_tokens_per_second": tokens / capture,
        "ratio": capture / alone,
    }


def _vllm(engine: Any, prompts: Sequence[tuple[int, ...]]) -> Callable[[], Any]:
    from vllm import SamplingParams

    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    return lambda: engine._model.llm.generate(given, params, use_tqdm=False)


def _sglang(engine: Any, prompts: Sequence[tuple[int, ...]]) -> Callable[[], Any]:
    from fidelab.engines.sglang.session import SGLangRequest

    plain = [SGLangRequest(prompt) for prompt in prompts]  # no instructions: no capture
    return lambda: engine._session.ask(plain)


if __name__ == "__main__":  # SGLang's schedulers import this file again
    main()
