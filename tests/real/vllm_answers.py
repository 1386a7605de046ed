"""Runs in vLLM's environment: one arm answers probes, then vLLM's own interface is asked about the same tokens.

python vllm_answers.py JOB.json FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.container import Array, to_float32
from fidelab.core import Arm, finite
from fidelab.engines.vllm import VLLMEngine
from fidelab.errors import FidelabError
from fidelab.probes import probe_from_record


class Answers:
    """A sink that keeps what it is given, by names for ``numpy.savez``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arrays: dict[str, Any] = {}
        self.failed: dict[int, str] = {}
        self.tokens = 0

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        for key, array in arrays.items():
            wide = isinstance(array, np.ndarray) and array.dtype == np.float64
            self.arrays[f"{self.name}.{item}.{key}"] = array if wide else to_float32(array)

    def fail(self, item: int, reason: str) -> None:
        self.failed[item] = reason

    def progress(self, tokens: int) -> None:
        self.tokens += tokens


def main() -> None:
    job, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    arrays: dict[str, Any] = {}
    said: dict[str, Any] = {"facts": {}, "failed": {}, "progress": {}, "errors": {}, "steps": {}}
    engine = VLLMEngine()
    try:
        engine.open(Arm.from_record(job["arm"]))
        said["ids"] = engine.tokenize("w5 w6 w7")
        said["phases"] = list(engine.phases)
        stepped = engine._model.tokens
        for name, record in job["probes"].items():
            answers = Answers(name)
            engine._model.tokens = _noted(stepped, said["steps"].setdefault(name, []))  # type: ignore[method-assign]
            try:
                answer = engine.answer(probe_from_record(record), answers)
            except FidelabError as error:
                said["errors"][name] = str(error)
                continue
            said["facts"][name], said["failed"][name] = answer.facts, answers.failed
            said["progress"][name] = answers.tokens
            arrays |= answers.arrays
            if answer.head is not None:
                arrays |= {f"head.{key}": to_float32(array) for key, array in answer.head.items()}
        if job["own"]:
            said["own"] = _own(engine, job["own"])
        said["ran"] = engine.ran().record()
        engine.close()
    except FidelabError as error:
        said["error"] = str(error)
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "said.json").write_text(json.dumps(finite(said)))


def _noted(stepped: Callable[..., Iterator[list[int]]], groups: list[Any]) -> Callable[..., Iterator[list[int]]]:
    """The same steps; the tokens of each go into a new list of ``groups``."""

    def noted(*asked: Any) -> Iterator[list[int]]:
        groups.append([])
        for ids in stepped(*asked):
            groups[-1].append(ids)
            yield ids

    return noted


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
