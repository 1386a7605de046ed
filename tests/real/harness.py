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
from fidelab.captures.requests import Forced, Generate, Layerwise, Prefill, Request, Served, Timed, request_record
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import EngineError
from fidelab.core.serial import to_json
from fidelab.engines.hf.adapter import HFEngine
from fidelab.environments.environment import Environment, locate
from fidelab.models.tiny import make_tiny
from fidelab.results.record import RuntimeRecord
from fidelab.results.study import Study
from tests.engines import tiny
from tests.run.harness import cli

VOCAB = 515  # odd: vLLM pads it to a multiple of 64 for each rank, SGLang pads it too
BAD = 9  # a token whose embedding is NaN
ROOT = Path(__file__).parents[2]
STORES_FP8 = bool({"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text("utf-8", "replace").split()))
NEEDS_FP8 = pytest.mark.skipif(not STORES_FP8, reason="vLLM stores FP8 caches on CPUs with AVX-512 or AMX only")


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
PLACES = ((10, 11, 50, 98), (15, 58), (97,))  # of windows of different lengths
DEPTHS = Prefill(
    "kld", (WINDOWS[0], WINDOWS[1][:60], WINDOWS[2]), 10, 98, tuple((0,) * len(own) for own in PLACES), positions=PLACES
)
GENERATE = Generate("trajectory", PROMPTS, 12, (), batch=4)
PROBES: dict[str, Request] = {
    "prefill": PREFILL,
    "depths": DEPTHS,
    "generate": GENERATE,
    "one": replace(GENERATE, batch=1),
    "stop": replace(GENERATE, max_tokens=400, stop=tuple(range(0, VOCAB, 2))),
    "forced": Forced("forced", PROMPTS, CONTINUATIONS),
    "forced_text": Forced("forced", (WINDOWS[0][:11], WINDOWS[1][:3]), (WINDOWS[0][11:], ())),
    "timed": Timed("timing", PROMPTS[:2], n=6),
    "together": Timed("timing", EQUAL, n=6, batch=3),
    "free": replace(GENERATE, prompts=EQUAL, max_tokens=7, batch=1, rows=False),
    "layers": Layerwise("layers", WINDOWS[:2], 10, 98),
    "nan": replace(GENERATE, prompts=((*PROMPTS[0], BAD), PROMPTS[1])),
    "full": Prefill("kld", (tokens(512, 1),), 500, 510, ((0,) * 11,)),
    "long": Prefill("kld", (tokens(600, 1),), 10, 598, ((0,) * 589,)),
}
SERVED = Served("paths.chunked", WINDOWS, 10, 98, "chunked", 32)  # not of PROBES: it has the engine launched otherwise
ON_CPU: dict[str, Any] = {"device": "cpu", "threads": 1}
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
    job = {"arm": to_json(arm), "requests": records, "own": None, "end": False, **more}
    (folder / "job.json").write_text(json.dumps(job))
    plain = ran_there(environment, f"{environment.engine}_answers", folder, str(folder / "job.json"), str(folder))
    with np.load(folder / "arrays.npz") as arrays:
        return Said(dict(arrays), plain)


def ran_there(environment: Environment, script: str, folder: Path, *words: str, **variables: str) -> dict[str, Any]:
    """What a script of this folder leaves in ``said.json``, run by the engine's interpreter."""
    with (folder / "log").open("w") as log:  # a pipe would be held open by whatever outlives the process
        command, everything = environment.command(f"tests.real.{script}"), {**os.environ, **environment.variables()}
        subprocess.run([*command, *words], env={**everything, **variables}, stdout=log, stderr=log, check=False)
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


def states_of_transformers(arm: Arm, request: Prefill | Layerwise) -> list[NDArray[np.float32]]:
    """What Transformers says of each window."""
    engine, answers = HFEngine(), tiny.Answers()
    engine.open(arm)
    engine.answer(request, answers)
    name = "hidden" if isinstance(request, Prefill) else "states"
    return [to_float32(answers.items[item][name]) for item in range(len(request.windows))]


def agrees_with_transformers(environment: Environment, checkpoint: Path, kv: str, folder: Path, **options: str) -> None:
    """A pair inside the engine is proven, takes the bytes that it says, and computes what ``hf`` does with the same.

    The yardstick is what the formats themselves cost, by ``hf``: 0.02 with INT8, a quarter with INT4, where a key that
    is rounded otherwise by one engine may become another code.
    """
    one = arm(environment.engine, checkpoint, kv, "bfloat16", **options)
    said = asked(environment, one, {"prefill": PREFILL}, folder)
    assert "error" not in said.plain, said.plain["error"]
    ran = said.plain["ran"]
    assert (ran["k_format"], ran["v_format"]) == (str(one.kv.k), str(one.kv.v))
    assert ran["proof"]["stored"] == ran["proof"]["named"] == "shown"
    assert ran["cache_bytes_per_token"] == ran["expected_bytes_per_token"] < 2 * 2 * 4 * 32 * 2
    there = replace(one, engine="hf", options=(("attention", "k16v8"),))
    same, native = (states_of_transformers(x, PREFILL) for x in (there, replace(there, kv=KVSpec.parse("bf16"))))
    ours = [said.arrays[f"prefill.{item}.hidden"] for item in range(len(WINDOWS))]

    def apart(some: list[NDArray[np.float32]], others: list[NDArray[np.float32]]) -> float:
        return float(np.linalg.norm(np.stack(some) - np.stack(others)) / np.linalg.norm(np.stack(others)))

    cost, distance = apart(same, native), apart(ours, same)
    assert distance <= max(0.04, cost / 3), (distance, cost)  # vLLM's 16-bit arm is 0.023 from that of hf


def k16v8_beside_16_bits(engine: str | dict[str, Any], folder: Path) -> tuple[RuntimeRecord, RuntimeRecord]:
    """What ran with K16/V8 and with the engine's own cache, when the first was found to cost next to nothing."""
    arms: dict[str, Any] = {"reference": "auto", "candidates": ["k16v8", "bf16[kernels=k16v8]"]}
    axes = {"kld": {"windows": 4, "n_ctx": 256}}
    report = compare("smollm2-135m", engine=engine, axes=axes, output_dir=str(folder), floor=False, **arms, **ON_CPU)
    narrow, kernels = report.candidates
    for arm in report.candidates:
        assert arm.status == "ok", arm.reason
    lost, path = (arm.axes["kld"].value("mean") or 0 for arm in report.candidates)
    assert 0 < lost <= 0.005
    assert path < lost  # the format's loss, which the kernels alone do not have
    ran, wide, paged = narrow.ran, report.reference.ran, kernels.ran
    assert ran is not None
    assert wide is not None
    assert paged is not None
    assert (paged.attention, paged.k_dtype, paged.v_dtype) == ("k16v8 (torch)", "bfloat16", "bfloat16")
    assert paged.cache_bytes_per_token == wide.cache_bytes_per_token
    assert (ran.attention, ran.k_dtype, ran.v_dtype) == ("k16v8 (torch)", "bfloat16", "float8_e4m3fn")
    assert ran.cache_bytes_per_token == 0.75 * (wide.cache_bytes_per_token or 0)
    return ran, wide


_PLANTED = '''"""A fault in one layer, number FIDELAB_PLANTED: what its attention adds is 1.3 times too much."""

import os


def vllm():
    from vllm.model_executor.models.llama import LlamaAttention

    plant(LlamaAttention, lambda attention: int(attention.attn.layer_name.split(".")[2]))


def sglang():
    from sglang.srt.models.llama import LlamaAttention

    plant(LlamaAttention, lambda attention: attention.attn.layer_id)


def plant(attention, number):
    forward = attention.forward
    if getattr(forward, "planted", False) or "FIDELAB_PLANTED" not in os.environ:
        return
    faulty = int(os.environ["FIDELAB_PLANTED"])

    def planted(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        return out * 1.3 if number(self) == faulty else out

    planted.planted = True
    attention.forward = planted
'''


def faulty_layer(engine: str, folder: Path) -> int | None:
    """Where ``fidelab diagnose layers`` finds the fault planted in layer 2 of four, with engine ``hf`` as reference."""
    make_tiny(folder / "tiny", layers=4)
    paths = ("--pythonpath", planted_fault(folder / "shim"))
    words = ("--reference", "engine=hf,kv=f32", "--candidate", "env.FIDELAB_PLANTED=2,kv=auto", "--dtype", "float32")
    sizes = ("--windows", 1, "--n-ctx", 64, "--threads", 1, "--no-floor", "--json")
    done = cli("diagnose", "layers", "./tiny", "--engine", engine, *paths, *words, *sizes, cwd=folder)
    assert done.code == 0, done.err
    study = Study.model_validate_json(done.out)
    assert max(row.value("error") or 0 for row in study.rows[1:3]) < 1e-4  # until then both compute the same
    first: int | None = study.facts["first"]
    return first


def planted_fault(folder: Path) -> Path:
    """A shim folder whose plug-in of vLLM and SGLang makes the layer of ``FIDELAB_PLANTED`` wrong."""
    about = folder / "planted-1.dist-info"
    about.mkdir(parents=True)
    (folder / "planted.py").write_text(_PLANTED)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nplanted = planted:vllm\n[sglang.srt.plugins]\nplanted = planted:sglang\n"
    )
    return folder


def ways_that_part(
    engine: dict[str, Any], arms: Sequence[Mapping[str, Any]], folder: Path, options: Mapping[str, str]
) -> dict[str, set[str]]:
    """By name of an arm the ways that axis ``paths`` finds to part in it; each way but the partial hit was proven."""
    asked: dict[str, Any] = {"engine": engine, "engine_args": dict(options), "reference": "auto"}
    asked |= {"candidates": [dict(arm) for arm in arms], "axes": {"paths": {"windows": 2, "n_ctx": 128, "others": [7]}}}
    report = compare("smollm2-135m", **asked, floor=False, output_dir=str(folder), **ON_CPU)
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

    What was generated, or read in other pieces, differs in last bits, under which a small fault of a hit may hide.
    """
    hits = {"prefix", "prefix-other", "prefix-generated", "prefix-partial"}
    for fault in ("stale", "position", "scale"):
        assert {"prefix", "prefix-other"} <= found[fault] <= hits, fault
    assert {"decode"} <= found["format"] <= {"decode", "prefix-generated"}


def planted(kv: str, fault: str) -> dict[str, Any]:
    """An arm with one of :data:`tests.real.faults.FAULTS`."""
    return {"kv": kv, "name": fault, "env": {"FAULT": fault}}
