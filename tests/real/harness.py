"""What the tests of vLLM and SGLang share: an odd checkpoint, questions, and an engine's process that answers them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from fidelab import compare
from fidelab.captures.container import to_float32
from fidelab.captures.requests import Forced, Generate, Prefill, Request, Served, Timed, request_record
from fidelab.core import Arm, KVSpec
from fidelab.engines.hf.adapter import HFEngine
from fidelab.environments.environment import Environment, locate
from fidelab.errors import EngineError
from fidelab.results.record import RuntimeRecord
from tests.engines import tiny

VOCAB = 515  # odd: vLLM pads it to a multiple of 64 for each rank, SGLang pads it too
BAD = 9  # a token whose embedding is NaN
ROOT = Path(__file__).parents[2]
STANDINS = ROOT / "tests" / "standins"  # SGLang's imports on a machine without a GPU


def installed(engine: str, *shims: Path) -> Environment:
    """The engine's environment, which finds these tests, too; skips the test where there is none."""
    try:
        return locate(engine, pythonpath=[str(folder) for folder in (*shims, ROOT)])
    except EngineError as error:
        pytest.skip(str(error))


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(10, VOCAB, n))


WINDOWS = tuple(tokens(100, seed) for seed in range(3))
PROMPTS = tuple(tokens(n, 10 + n) for n in (5, 17, 40, 9))
EQUAL = tuple(tokens(9, 30 + n) for n in range(4))
CONTINUATIONS = tuple(tokens(12, 50 + n) for n in range(4))
PREFILL = Prefill("kld", WINDOWS, 10, 98, tuple((0,) * 89 for _ in WINDOWS))
GENERATE = Generate("trajectory", PROMPTS, 12, (), batch=4)
PROBES: dict[str, Request] = {
    "prefill": PREFILL,
    "generate": GENERATE,
    "one": replace(GENERATE, batch=1),
    "stop": replace(GENERATE, max_tokens=400, stop=tuple(range(0, VOCAB, 2))),
    "forced": Forced("forced", PROMPTS, CONTINUATIONS),
    "forced_text": Forced("forced", (WINDOWS[0][:11], WINDOWS[1][:3]), (WINDOWS[0][11:], ())),
    "timed": Timed("timing", PROMPTS[:2], n=6),
    "together": Timed("timing", EQUAL, n=6, warmup=0, batch=3),
    "free": replace(GENERATE, prompts=EQUAL, max_tokens=7, batch=1, rows=False),
    "nan": replace(GENERATE, prompts=((*PROMPTS[0], BAD), PROMPTS[1])),
    "full": Prefill("kld", (tokens(512, 1),), 500, 510, ((0,) * 11,)),
    "long": Prefill("kld", (tokens(600, 1),), 10, 598, ((0,) * 589,)),
}
SERVED = Served("paths.chunked", WINDOWS, 10, 98, "chunked", 32)  # not of PROBES: it has the engine launched otherwise
OWN = {"prompts": PROMPTS, "max_tokens": 12, "window": WINDOWS[0], "vocabulary": VOCAB}


@dataclass(frozen=True)
class Said:
    """What the process found: arrays by ``request.item.name``, the rest as plain data."""

    arrays: dict[str, NDArray[Any]]
    plain: dict[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def logprobs(self, name: str) -> Tensor:
        return (self[name] @ self["head.weight"].T).double().log_softmax(-1)


def asked(environment: Environment, arm: Arm, requests: Mapping[str, Request], folder: Path, **more: Any) -> Said:
    """One arm in a process of its engine's environment (``vllm_answers``, ``sglang_answers``).

    ``more``: ``own``, the tokens about which the engine's own interface is asked; ``end`` (SGLang).
    """
    records = {name: request_record(request) for name, request in requests.items()}
    job = {"arm": arm.record(), "requests": records, "own": None, "end": False, **more}
    (folder / "job.json").write_text(json.dumps(job))
    plain = ran_there(environment, f"{environment.engine}_answers", folder, str(folder / "job.json"), str(folder))
    with np.load(folder / "arrays.npz") as arrays:
        return Said(dict(arrays), plain)


def ran_there(environment: Environment, script: str, folder: Path, *words: str, **variables: str) -> dict[str, Any]:
    """What a script of this folder leaves in ``said.json``, run by the engine's interpreter."""
    with (folder / "log").open("w") as log:  # a pipe would be held open by whatever outlives the process
        subprocess.run(
            [*environment.command(f"tests.real.{script}"), *words],
            env={**os.environ, **environment.variables(), **variables},
            stdout=log,
            stderr=log,
            check=False,
        )
    assert (folder / "said.json").exists(), (folder / "log").read_text()[-3000:]
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return said


Run = Callable[..., Said]


def asking(
    environment: Environment,
    checkpoint: Path,
    requests: Mapping[str, Request],
    factory: pytest.TempPathFactory,
    **always: str,
) -> Run:
    """``run(names, kv, dtype, path, own, end, options)``: arms of one engine, each asked once; ``always``: options."""

    def run(
        names: tuple[str, ...] = ("prefill",),
        kv: str = "auto",
        dtype: str = "float32",
        path: Path = checkpoint,
        own: bool = False,
        end: bool = False,
        **options: str,
    ) -> Said:
        one = arm(environment.engine, path, kv, dtype, **always, **options)
        chosen = {name: requests[name] for name in names}
        return asked(environment, one, chosen, factory.mktemp("answers"), own=OWN if own else None, end=end)

    return cache(run)


def arm(engine: str, path: Path, kv: str = "auto", dtype: str = "float32", **options: str) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm(kv, engine, path.name, str(path), "0" * 8, KVSpec.parse(kv), dtype, "cpu", 1, named)


def drawn(config: Any) -> Any:
    """A model of random weights, in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny.randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def odd_checkpoint(folder: Path) -> Path:
    """Two layers, whose head is not the embedding; ``BAD`` has no embedding."""
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    model = drawn(transformers.LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, **shape, **heads, **none))
    model.model.embed_tokens.weight[BAD] = float("nan")
    return tiny.save(model, folder)


def lacking(part: str, checkpoint: Path, folder: Path) -> Path:
    """A copy of the checkpoint without the tensors that have this part in their name."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    kept = {key: value for key, value in load_file(checkpoint / "model.safetensors").items() if part not in key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def states_of_transformers(arm: Arm, request: Prefill) -> list[NDArray[np.float32]]:
    """What Transformers says of each window."""
    engine, answers = HFEngine(), tiny.Answers()
    engine.open(arm)
    engine.answer(request, answers)
    return [to_float32(answers.items[item]["hidden"]) for item in range(len(request.windows))]


def k16v8_beside_16_bits(engine: str | dict[str, Any], folder: Path) -> tuple[RuntimeRecord, RuntimeRecord]:
    """What ran with K16/V8 and with the engine's own cache, when the first was found to cost next to nothing."""
    report = compare(
        "smollm2-135m",
        engine=engine,
        reference="auto",
        candidates=["k16v8"],
        axes={"kld": {"windows": 4, "n_ctx": 256}},
        floor=False,
        device="cpu",
        threads=1,
        output_dir=str(folder),
    )
    [narrow] = report.candidates
    assert narrow.status == "ok", narrow.reason
    assert 0 < (narrow.axes["kld"].value("mean") or 0) <= 0.005
    ran, wide = narrow.ran, report.reference.ran
    assert ran is not None
    assert wide is not None
    assert (ran.attention, ran.k_dtype, ran.v_dtype) == ("k16v8 (torch)", "bfloat16", "float8_e4m3fn")
    assert ran.cache_bytes_per_token == 0.75 * (wide.cache_bytes_per_token or 0)
    return ran, wide


def ways_that_part(
    engine: dict[str, Any], arms: Sequence[Mapping[str, Any]], folder: Path, options: Mapping[str, str]
) -> dict[str, set[str]]:
    """By name of an arm the ways that axis ``paths`` finds to part in it; each way but the partial hit was proven."""
    report = compare(
        "smollm2-135m",
        engine=engine,
        engine_args=dict(options),
        reference="auto",
        candidates=[dict(arm) for arm in arms],
        axes={"paths": {"windows": 2, "n_ctx": 128, "others": [7]}},
        floor=False,
        device="cpu",
        threads=1,
        output_dir=str(folder),
    )
    found = {}
    for candidate in report.candidates:
        assert candidate.status == "ok", candidate.reason
        cells = candidate.axes["paths"].cells
        unproven = {cell.at["way"] for cell in cells if cell.status != "ok"}
        assert unproven <= {"prefix-partial"}, [cell.reason for cell in cells]
        assert len(cells) == 8
        found[candidate.name] = {str(cell.at["way"]) for cell in cells if cell.flags}
    return found


def names_the_faults(found: Mapping[str, set[str]]) -> None:
    """Each planted fault is found, and only in ways that it concerns.

    What was generated differs in last bits, under which a small fault of a hit may hide.
    """
    for fault in ("stale", "position", "scale"):
        assert {"prefix", "prefix-other"} <= found[fault] <= {"prefix", "prefix-other", "prefix-generated"}, fault
    assert {"decode"} <= found["format"] <= {"decode", "prefix-generated"}


def planted(kv: str, fault: str) -> dict[str, Any]:
    """An arm with one of :data:`tests.real.faults.FAULTS`."""
    return {"kv": kv, "name": fault, "env": {"FAULT": fault}}
