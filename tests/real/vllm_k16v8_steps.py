"""Runs in vLLM's environment: stock vLLM with the plug-in, as a user would have it; what each step held and computed.

python -m tests.real.vllm_k16v8_steps MODEL ANSWER.json    (K16V8 as in the environment)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k16v8.plugins.shared import switched
from tests.real.k16v8 import LAYERS, PROMPTS, compared

BUDGET = 48  # tokens of one step: prompts come in chunks, beside others that decode
BLOCK = 32
TOKENS = 16
NAMED = tuple(f"model.layers.{layer}.self_attn.attn" for layer in LAYERS)


def main() -> None:
    model, answer = sys.argv[1], Path(sys.argv[2])
    from vllm import LLM

    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        block_size=BLOCK,
        max_num_batched_tokens=BUDGET,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=True,
        async_scheduling=False,
        distributed_executor_backend="uni",
    )
    config = llm.llm_engine.vllm_config.cache_config
    said: dict[str, Any] = {"tokens": config.num_gpu_blocks * config.block_size, "dtype": config.cache_dtype}
    if switched() is not None:
        with _noted() as said["steps"]:
            said["together"] = _answers(llm, PROMPTS)
        said["alone"] = []
        for prompt in PROMPTS:
            llm.reset_prefix_cache()
            said["alone"] += _answers(llm, [prompt])
    answer.write_text(json.dumps(said))


def _answers(llm: Any, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Greedy tokens, the log-probabilities of the five most probable at each, and prompt tokens found in the cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [
        {
            "ids": list(out.outputs[0].token_ids),
            "rows": [{token: x.logprob for token, x in row.items()} for row in out.outputs[0].logprobs],
            "cached": out.num_cached_tokens,
        }
        for out in llm.generate(given, params, use_tqdm=False)
    ]


@contextmanager
def _noted() -> Iterator[list[dict[str, Any]]]:
    """Of each step: how many tokens each sequence had in it, and how far some layers are from the definition."""
    import torch

    from k16v8.kernels import reference
    from k16v8.plugins.vllm.backend import K16V8Attention

    steps: list[dict[str, Any]] = []
    forward = K16V8Attention.forward

    def checked(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, step: Any, **outputs: Any
    ) -> Any:
        result = forward(self, layer, query, key, value, kv_cache, step, **outputs)
        if step is None or layer.layer_name not in NAMED:
            return result
        n, starts = step.num_actual_tokens, step.query_start_loc
        cache = self._pages.paged(step.block_table, step.seq_lens)
        wanted, _ = reference.extend(query[:n], starts, cache, self._attention, dtype=torch.float64)
        steps.append(compared(starts, result[:n], wanted) | {"decodes": step.num_decodes})
        return result

    K16V8Attention.forward = checked  # type: ignore[method-assign, assignment]
    try:
        yield steps
    finally:
        K16V8Attention.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
