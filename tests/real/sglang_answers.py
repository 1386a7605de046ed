"""Runs in SGLang's environment: one arm answers probes, then SGLang's own interface is asked about the same tokens.

python sglang_answers.py JOB.json FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.container import Array, to_float32
from fidelab.core import Arm, finite
from fidelab.engines.sglang import SGLangEngine
from fidelab.errors import FidelabError
from fidelab.probes import Probe, probe_from_record


class Answers:
    """A sink that keeps what it is given, by names for ``numpy.savez``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arrays: dict[str, Any] = {}
        self.failed: dict[int, str] = {}

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        for key, array in arrays.items():
            exact = isinstance(array, np.ndarray) and array.dtype.kind in "if" and array.dtype.itemsize >= 4
            self.arrays[f"{self.name}.{item}.{key}"] = array if exact else to_float32(array)

    def fail(self, item: int, reason: str) -> None:
        self.failed[item] = reason

    def progress(self, tokens: int) -> None:
        pass


def main() -> None:
    job, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    arrays: dict[str, Any] = {}
    said: dict[str, Any] = {"facts": {}, "failed": {}, "errors": {}, "steps": {}}
    engine = SGLangEngine()
    try:
        engine.open(Arm.from_record(job["arm"]))
        said["ids"] = engine.tokenize("w5 w6 w7")
        said["phases"] = list(engine.phases)
        heads = set()
        stepped = engine._session.stream
        for name, record in job["probes"].items():
            answers = Answers(name)
            engine._session.stream = _noted(stepped, said["steps"].setdefault(name, []))  # type: ignore[method-assign]
            try:
                answer = engine.answer(probe_from_record(record), answers)
            except FidelabError as error:
                said["errors"][name] = str(error)
                continue
            said["facts"][name], said["failed"][name] = answer.facts, answers.failed
            arrays |= answers.arrays
            if answer.head is not None:
                heads.add(id(answer.head))
                arrays |= {f"head.{key}": to_float32(array) for key, array in answer.head.items()}
        said["heads"] = len(heads)
        if job["own"]:
            said["own"] = _own(engine, job["own"])
        said["ran"] = engine.ran().record()
        if job["end"]:
            said["processes"] = [pid for pid, _ in _children()]
            said["errors"]["ended"] = _ended(engine, probe_from_record(next(iter(job["probes"].values()))))
        engine.close()
        said["left"] = [name for _, name in _children() if name.startswith("sglang")]
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


def _own(engine: SGLangEngine, asked: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's own greedy tokens, and its log-probabilities of the whole vocabulary at every position of a window."""
    running: Any = engine._session._engine
    greedy = {"temperature": 0.0, "max_new_tokens": asked["max_tokens"], "ignore_eos": True}
    generated = running.generate(input_ids=asked["prompts"], sampling_params=greedy)
    said = running.generate(
        input_ids=asked["window"],
        sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=asked["vocabulary"],
    )
    rows = []
    for entries in said["meta_info"]["input_top_logprobs"][1:]:
        row = dict.fromkeys(range(asked["vocabulary"]), 0.0)
        row |= {token: value for value, token, _ in entries}
        rows.append(list(row.values()))
    return {"generated": [answer["output_ids"] for answer in generated], "logprobs": rows}


def _ended(engine: SGLangEngine, probe: Probe) -> str:
    """What is said when the scheduler is killed in the middle."""
    for pid, name in _children():
        if name.startswith("sglang::sched"):
            os.kill(pid, signal.SIGKILL)
    try:
        engine.answer(probe, Answers("ended"))
    except FidelabError as error:
        return str(error)
    return "nothing"


def _children() -> list[tuple[int, str]]:
    """Processes that this one started, and what they call themselves."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if int(parent) == os.getpid() and state != "Z":
            found.append((int(stat.parent.name), name))
    return found


if __name__ == "__main__":  # SGLang's schedulers import this file again
    main()
