"""Runs in SGLang's environment: one arm answers requests, then SGLang's own interface is asked about the same tokens.

python -m tests.real.sglang_answers JOB.json FOLDER
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fidelab.captures.requests import Request, request_from_record
from fidelab.core import Arm
from fidelab.core.errors import FidelabError
from fidelab.core.serial import from_json
from fidelab.engines.sglang.adapter import SGLangEngine
from tests.real.answers import Answers, answering


def main() -> None:
    engine = SGLangEngine()
    with answering() as (job, said):
        engine.foreseen = frozenset(record["kind"] for record in job["requests"].values())
        engine.open(from_json(Arm, job["arm"]))
        said.plain |= {"ids": engine.tokenize("w5 w6 w7"), "phases": list(engine.phases)}
        said.put(engine, job["requests"], engine._session, "stream")
        if job["own"]:
            said.plain["own"] = _own(engine, job["own"])
        said.plain["ran"] = engine.runtime_info().record()
        if job["end"]:
            said.plain["processes"] = [pid for pid, _ in _children()]
            said.plain["errors"]["ended"] = _ended(engine, request_from_record(next(iter(job["requests"].values()))))
        engine.close()
        said.plain["left"] = [name for _, name in _children() if name.startswith("sglang")]


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


def _ended(engine: SGLangEngine, request: Request) -> str:
    """What is said when the scheduler is killed in the middle."""
    for pid, name in _children():
        if name.startswith("sglang::sched"):
            os.kill(pid, signal.SIGKILL)
    try:
        engine.answer(request, Answers("ended"))
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
