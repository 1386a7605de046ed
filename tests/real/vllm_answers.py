"""Runs in vLLM's environment: one arm answers requests, then vLLM's own interface is asked about the same tokens.

python -m tests.real.vllm_answers JOB.json FOLDER
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fidelab.core import Arm
from fidelab.core.serial import from_json
from fidelab.engines.vllm.adapter import VLLMEngine
from tests.real.answers import answering


def main() -> None:
    engine = VLLMEngine()
    with answering() as (job, said):
        engine.foreseen = frozenset(record["kind"] for record in job["requests"].values())
        engine.open(from_json(Arm, job["arm"]))
        said.plain |= {"ids": engine.tokenize("w5 w6 w7"), "phases": list(engine.phases)}
        said.put(engine, job["requests"], engine._model, "tokens")
        if job["own"]:
            said.plain["own"] = _own(engine, job["own"])
        said.plain["ran"] = engine.runtime_info().record()
        engine.close()


def _own(engine: VLLMEngine, asked: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's own greedy tokens, and its log-probabilities of the most probable tokens at every prompt position."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
    generated = [list(out.outputs[0].token_ids) for out in engine._model.llm.generate(prompts, params)]
    window = {"prompt_token_ids": asked["window"]}
    [out] = engine._model.llm.generate([window], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    rows = [{token: entry.logprob for token, entry in row.items()} for row in out.prompt_logprobs[1:]]
    return {"generated": generated, "prompt_logprobs": rows}


if __name__ == "__main__":  # ranks of tensor parallel arms import this file again
    main()
