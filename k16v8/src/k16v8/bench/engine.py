"""Decode speed and cache of stock vLLM with random weights: its own caches, and K16/V8 by the plug-in.

An arm is a pair of K/V formats: 16/16 and 8/8 are vLLM's own caches (``auto`` and ``fp8``), 16/8 is the plug-in's.
Each arm is a process of its own, so that one that fails leaves the others.  All have the same settings, weights,
prompts and graphs.  Prompts are read once into the prefix cache; a timed run finds them there.  The seconds of a step
are the difference of two runs that decode ``SHORT`` and ``SHORT + steps`` tokens: starts and prompts cancel.

A prompt of ``tokens`` has one token more, which every run computes: vLLM finds whole blocks only, never the last token.
Speeds are of greedy decoding without a tokenizer.  They say nothing of text: weights are random.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from k16v8.bench.machine import describe, versions
from k16v8.bench.model import ModelShape, model_shape
from k16v8.bench.run import Status
from k16v8.bench.session import save
from k16v8.bench.shapes import FORMATS
from k16v8.bench.timing import free_bytes
from k16v8.errors import EngineError, NotSupportedError, OutputError, UnknownNameError, UsageError, one_line
from k16v8.kernels.dispatch import PAGE_STEP
from k16v8.kernels.knobs import turned
from k16v8.plugins.shared import COUNT_SWITCH, SWITCH
from k16v8.plugins.vllm.plugin import VLLM, register

SCHEMA = "k16v8.engine/0"
ENGINES = ("vllm",)
BATCH, STEPS = {"cuda": 32, "cpu": 2}, {"cuda": 128, "cpu": 16}
LENGTHS = {"cuda": (2048, 8192, 30720), "cpu": (128,)}
SHORT = 8  # tokens of the shorter run
PAIR = "16/8"  # the plug-in's
LEAST_CACHED = 0.9  # of a timed run's prompt tokens
_REPEATS = 3
_CACHE_TYPES = {"16/16": "auto", "16/8": "auto", "8/8": "fp8"}
_GPU_SHARE = 0.92  # of the GPU's memory
_CPU_BYTES = 256 << 20  # of the cache, at least
_STEP_TOKENS = {"cuda": 16384, "cpu": 2048}  # of a step, at most
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # knobs and layers are in the arm's own process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    COUNT_SWITCH: "0",
}
_NO_MEMORY = ("out of memory", "available memory for the cache", "KV cache is needed", "Free memory on device")
_UNSUPPORTED = ("not support", "n't support", "unsupported", "KV cache on CPU requires")
_LONGEST_REASON = 600  # characters
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "tiny": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
}

Run = Callable[[int], tuple[float, float]]
"""Decode so many tokens of each sequence → seconds, and the share of prompt tokens found in the prefix cache."""
Tell = Callable[[dict[str, Any]], None]
"""Tell the parent: ``arm`` and ``context`` hold fields of the record, ``left_out`` contexts that time left out."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of :func:`bench_engine`.

    Args:
        model: Name of a model's shape.
        device: ``cuda`` or ``cpu``, on which this Python's vLLM runs.
        pairs: K/V formats, one arm each.
        batch: Sequences that decode together.
        lengths: Tokens of each sequence in the cache, multiples of ``page``.
        page: Tokens of a block that vLLM is asked for.
        steps: Decoded tokens of each sequence whose time is measured.
        seed: Of the prompts and of vLLM.
        knobs: Of our decode (:func:`k16v8.kernels.knobs.turned`), in the arm 16/8.
        until: Of ``time.monotonic()``, after which nothing more is begun.
    """

    model: str
    device: torch.device
    pairs: tuple[str, ...] = ("16/16", "16/8", "8/8")
    batch: int = BATCH["cuda"]
    lengths: tuple[int, ...] = LENGTHS["cuda"]
    page: int = 64
    steps: int = STEPS["cuda"]
    seed: int = 0
    knobs: dict[str, int] = field(default_factory=dict)
    until: float = math.inf


@dataclass(frozen=True)
class Job:
    """Task of an arm's process, which it gets as one JSON object."""

    model: str
    device: str
    pair: str
    batch: int
    lengths: tuple[int, ...]
    page: int
    steps: int
    seed: int
    knobs: dict[str, int]
    seconds_left: float | None  # None: no limit


def model_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model's shape, as Transformers and vLLM read it.

    Raises:
        UnknownNameError: If there is no such model.
    """
    shape = model_shape(name)
    one = shape.geometry
    return _FAMILIES[name] | {
        "hidden_size": one.hidden,
        "intermediate_size": one.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": one.heads,
        "num_key_value_heads": one.kv_heads,
        "head_dim": one.head_dim,
        "vocab_size": shape.vocabulary,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def check_vllm() -> None:
    """Check that this Python has vLLM; it is not imported.

    Raises:
        NotSupportedError: If it does not.
    """
    if find_spec("vllm") is None:
        raise NotSupportedError(
            f"vLLM is not installed for {sys.executable}: run k16v8 with a Python that has it (python -m k16v8 bench …)"
        )


def bench_engine(settings: EngineSettings, path: Path) -> dict[str, Any]:
    """Measure an arm for each pair of formats.  The record is written to ``path`` after every arm and every length.

    The log of an arm that ended otherwise than measured is kept next to ``path``, as ``NAME-16-8.log``.

    Returns:
        The record.  ``arms``: per arm ``start_seconds``, ``cache_tokens`` (what its cache holds), ``block`` (tokens of
        a block), ``backend``, and ``contexts``; per context ``batch`` (by halves of ``asked_batch`` where the cache
        holds fewer), ``fill_seconds`` (all prompts read once), ``cached`` (share, the least of all timed runs),
        ``step_seconds`` (of each repeat), ``seconds`` (their median) and ``tokens_per_second`` (of all sequences).
        ``ratios``: of :func:`ratios`.

    Raises:
        UsageError: If the page or a length is impossible, or not even the weights fit into a CPU's memory.
        UnknownNameError: If the model or a pair of formats does not exist.
        NotSupportedError: If this Python has no vLLM.
        OutputError: If the record or a log cannot be written.
    """
    shape = model_shape(settings.model)
    _check(settings, shape)
    check_vllm()
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe(settings.device),
        "versions": versions() | {"vllm": _vllm_version()},
        "engine": "vllm",
        "model": settings.model,
        "layers": shape.layers,
        "weight_bytes": shape.weight_bytes,
        "page": settings.page,
        "steps": settings.steps,
        "seed": settings.seed,
        "knobs": settings.knobs,
        "left_out": 0,
        "arms": [],
        "ratios": {},
    }
    save(path, record)
    for pair in dict.fromkeys(settings.pairs):
        if time.monotonic() > settings.until:
            record["left_out"] += len(settings.lengths)
            continue
        arm: dict[str, Any] = {
            "formats": pair,
            "status": "unfinished",
            "reason": "",
            "start_seconds": None,
            "cache_tokens": None,
            "block": None,
            "backend": "",
            "contexts": [],
        }
        record["arms"].append(arm)
        save(path, record)
        _measure_arm(settings, arm, record, path)
        save(path, record)
    save(path, record)
    return record


def _check(settings: EngineSettings, shape: ModelShape) -> None:
    for pair in settings.pairs:
        if pair not in FORMATS:
            raise UnknownNameError("formats", pair, FORMATS)
    if settings.page < 1 or settings.page % PAGE_STEP:
        raise UsageError(f"page {settings.page}: pages have a multiple of {PAGE_STEP} tokens")
    for tokens in settings.lengths:
        if tokens < 1 or tokens % settings.page:
            raise UsageError(f"length {tokens} is not a multiple of the page, {settings.page} tokens")
    most = model_config(settings.model)["max_position_embeddings"]
    if min(settings.lengths) + _room(settings.steps, settings.page) > most:
        raise UsageError(f"length {min(settings.lengths)}: {settings.model} has {most} positions; name a smaller one")
    if settings.device.type == "cpu":  # of a GPU vLLM says it; asking here would take some of its memory
        needed = shape.weight_bytes + 2 * shape.vocabulary * shape.geometry.hidden
        if needed > (free := free_bytes(settings.device)):
            raise UsageError(
                f"the weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: name a smaller model"
            )


def _vllm_version() -> str | None:
    for package in VLLM.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


# ------------------------------------------------------------------------------------------------- the parent


def _measure_arm(settings: EngineSettings, arm: dict[str, Any], record: dict[str, Any], path: Path) -> None:
    """Run an arm's process; what it tells goes into the record, which is written each time."""
    left = None if settings.until == math.inf else max(0.0, settings.until - time.monotonic())
    job = Job(
        settings.model,
        settings.device.type,
        arm["formats"],
        settings.batch,
        settings.lengths,
        settings.page,
        settings.steps,
        settings.seed,
        settings.knobs if arm["formats"] == PAIR else {},
        left,
    )
    log = path.with_name(f"{path.stem}-{arm['formats'].replace('/', '-')}.log")
    try:
        with log.open("wb") as sink:
            code = _follow(arm_command(job), arm_environment(job), sink, arm, record, path)
    except OSError as error:
        raise OutputError(f"{error.filename or log}: {error.strerror or error}") from error
    if arm["status"] == "unfinished":
        arm["status"] = "failed"
        arm["reason"] = f"its process ended {_ending(code)}{_last_line(log)}"
    if arm["status"] == "measured":
        log.unlink()


def _follow(
    command: list[str], environment: dict[str, str], sink: Any, arm: dict[str, Any], record: dict[str, Any], path: Path
) -> int:
    """Return the exit code of a command whose standard output is JSON lines for the record."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                told = json.loads(line)
                arm.update(told.get("arm", {}))
                arm["contexts"] += [told["context"]] if "context" in told else []
                record["left_out"] += told.get("left_out", 0)
                record["ratios"] = ratios(record["arms"])
                save(path, record)
        except BaseException:
            process.kill()
            raise
    return process.returncode


def arm_command(job: Job) -> list[str]:
    """Return the command line of an arm's process."""
    return [sys.executable, "-m", "k16v8.bench.engine", json.dumps(asdict(job))]


def arm_environment(job: Job) -> dict[str, str]:
    """Return the variables of an arm's process: this one's, without network, and with the plug-in only in 16/8."""
    found = {**os.environ, **_ENVIRONMENT, SWITCH: "1" if job.pair == PAIR else "0"}
    if find_spec("flashinfer") is None:
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if job.device == "cpu":
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:_LONGEST_REASON]}" if last else ""


def ratios(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what formats gain over others, of the arms' fields in the record.

    ``speed``: by length, the seconds of a step of the other over those of 16/8, where both decoded as many sequences;
    ``capacity``: tokens that the caches hold.
    """
    speed: dict[str, dict[str, float]] = {}
    steps = {
        (arm["formats"], one["tokens"]): one for arm in arms for one in arm["contexts"] if one["seconds"] is not None
    }
    for tokens in dict.fromkeys(tokens for _, tokens in steps):
        mine = steps.get((PAIR, tokens))
        for other in ("16/16", "8/8"):
            theirs = steps.get((other, tokens))
            if mine and theirs and mine["batch"] == theirs["batch"]:
                found = speed.setdefault(str(tokens), {})
                found[f"{PAIR} over {other}"] = theirs["seconds"] / mine["seconds"]
    held = {arm["formats"]: arm["cache_tokens"] for arm in arms if arm["cache_tokens"]}
    capacity = {f"{one} over 16/16": held[one] / held["16/16"] for one in (PAIR, "8/8") if {one, "16/16"} <= {*held}}
    return {"speed": speed, "capacity": capacity}


# ------------------------------------------------------------------------------------------------- an arm's process


def _room(steps: int, page: int) -> int:
    """Tokens that a sequence takes besides those that it has in the cache."""
    return 1 + SHORT + steps + page


def fitting_batch(batch: int, tokens: int, *, steps: int, block: int, cache_tokens: int) -> int:
    """Return the largest batch, by halves of the one asked for, whose sequences the cache holds at once; 0: none.

    ``tokens``: of a sequence before its first step; ``block``: tokens of a block; ``cache_tokens``: of the whole cache.
    """
    blocks = -(-(tokens + _room(steps, block)) // block)
    while batch and batch * blocks > cache_tokens // block - 1:  # vLLM keeps one for itself
        batch //= 2
    return batch


def measure_context(entry: dict[str, Any], run: Run, steps: int) -> None:
    """Put into ``entry`` the seconds of a step; ``reason`` says why there are none.

    Args:
        entry: A context of the record with ``batch``.
        run: Decodes so many tokens of each of its sequences.
        steps: By which the longer run is longer.
    """
    entry["fill_seconds"], _ = run(1)
    _, shared = run(SHORT)  # compiles what the timed runs launch
    found = []
    if shared >= LEAST_CACHED:
        for _ in range(_REPEATS):
            (short, one), (long, other) = run(SHORT), run(SHORT + steps)
            found.append((long - short) / steps)
            shared = min(shared, one, other)
    entry["cached"], entry["step_seconds"] = shared, found
    if shared < LEAST_CACHED:
        entry["status"] = "wrong"
        entry["reason"] = (
            f"only {100 * shared:.0f}% of the prompts were found in the prefix cache, {100 * LEAST_CACHED:.0f}% are "
            "needed: prompts that are read again would be timed"
        )
        return
    middle = statistics.median(found)
    if middle <= 0:
        entry["status"], entry["reason"] = "wrong", "the longer run did not take longer: the machine is too busy"
        return
    entry |= {"status": "measured", "reason": "", "seconds": middle, "tokens_per_second": entry["batch"] / middle}


def _measure(job: Job, tell: Tell) -> None:
    """Start vLLM and measure each length.

    Raises:
        NotSupportedError: If vLLM is for another device.
        EngineError: If vLLM took another backend than the arm is of.
        Exception: What vLLM raises.
    """
    began = time.monotonic()
    until = math.inf if job.seconds_left is None else began + job.seconds_left
    if job.pair == PAIR:  # also where vLLM does not find the plug-in by its entry point
        register()
    from vllm.platforms import current_platform

    if current_platform.device_type != job.device:
        raise NotSupportedError(
            f"this vLLM runs on {current_platform.device_type}: add --device, or use another Python"
        )
    lengths = _possible(job, tell)
    with tempfile.TemporaryDirectory() as folder:
        config = model_config(job.model)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = _engine(job, folder, max(lengths))
    cache = llm.llm_engine.vllm_config.cache_config
    block, held = cache.block_size, (cache.num_gpu_blocks or 0) * cache.block_size
    layers = [
        layer
        for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        if hasattr(layer, "impl")
    ]
    backend = _backend(layers, job.pair)
    started = {"start_seconds": time.monotonic() - began, "cache_tokens": held, "block": block, "backend": backend}
    tell({"arm": started})
    for number, tokens in enumerate(lengths):
        if time.monotonic() > until:
            tell({"left_out": len(lengths) - number})
            break
        entry = _context(job, tokens)
        entry["batch"] = fitting_batch(job.batch, tokens, steps=job.steps, block=block, cache_tokens=held)
        if not entry["batch"]:
            entry |= {"status": "no_memory", "reason": f"the cache holds {held} tokens, less than one sequence takes"}
            tell({"context": entry})
            continue
        try:
            llm.reset_prefix_cache()
            measure_context(entry, _runs(llm, job, entry, config["vocab_size"]), job.steps)
        except Exception as error:
            entry["status"], entry["reason"] = _failure(error)
            tell({"context": entry})
            raise
        tell({"context": entry, "arm": {"backend": _backend(layers, job.pair)}})


def _context(job: Job, tokens: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "asked_batch": job.batch,
        "batch": 0,
        "status": "unfinished",
        "reason": "",
        "fill_seconds": None,
        "cached": None,
        "step_seconds": [],
        "seconds": None,
        "tokens_per_second": None,
    }


def _possible(job: Job, tell: Tell) -> list[int]:
    """Lengths for which the model has positions; it tells of the others."""
    most, found = model_config(job.model)["max_position_embeddings"], []
    for tokens in job.lengths:
        if tokens + _room(job.steps, job.page) <= most:
            found.append(tokens)
        else:
            reason = f"{job.model} has {most} positions"
            tell({"context": _context(job, tokens) | {"status": "not_supported", "reason": reason}})
    return found


def _engine(job: Job, folder: str, longest: int) -> Any:
    from vllm import LLM

    room = _room(job.steps, job.page)
    more: dict[str, Any] = {"enforce_eager": True}
    if job.device == "cuda":
        # no compiler and two graphs: half the time to start, and the same for all arms
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted({1, job.batch})}
        more = {"gpu_memory_utilization": _GPU_SHARE, "compilation_config": graphs}
        if job.pair == PAIR:
            more["attention_backend"] = "CUSTOM"
    else:
        wanted = model_shape(job.model).cache_bytes("16/16", job.batch, longest + room + job.page)
        more["kv_cache_memory_bytes"] = max(_CPU_BYTES, wanted)
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=_CACHE_TYPES[job.pair],
        block_size=job.page,
        max_model_len=longest + room,
        max_num_seqs=job.batch,
        max_num_batched_tokens=max(_STEP_TOKENS[job.device], job.batch),
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        seed=job.seed,
        **more,
    )


def _backend(layers: Sequence[Any], pair: str) -> str:
    """Name of the backend that vLLM took; the plug-in's with its kernels, once they ran."""
    names = {layer.impl.label if hasattr(layer.impl, "label") else layer.attn_backend.get_name() for layer in layers}
    ours = [type(layer.impl).__module__.startswith("k16v8.") for layer in layers]
    if not ours or (pair == PAIR) is not all(ours) or (pair != PAIR and any(ours)):
        raise EngineError(f"vLLM took {', '.join(sorted(names)) or 'no attention backend'} for {pair}")
    return ", ".join(sorted(names))


def _runs(llm: Any, job: Job, entry: dict[str, Any], vocabulary: int) -> Run:
    from vllm import SamplingParams

    draw = random.Random(job.seed + entry["tokens"])
    length = entry["tokens"] + 1
    prompts = [
        {"prompt_token_ids": [draw.randrange(2, vocabulary) for _ in range(length)]} for _ in range(entry["batch"])
    ]

    def run(count: int) -> tuple[float, float]:
        wanted = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        done = llm.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(one.outputs[0].token_ids) != count for one in done):
            raise EngineError(f"vLLM did not decode {count} tokens of each sequence")
        return seconds, sum(one.num_cached_tokens or 0 for one in done) / (len(prompts) * length)

    return run


def _failure(error: BaseException) -> tuple[Status, str]:
    text = f"{type(error).__name__}: {one_line(error)}"[:_LONGEST_REASON]
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or any(words in text for words in _NO_MEMORY):
        return "no_memory", text
    refused = isinstance(error, (ImportError, NotImplementedError, NotSupportedError))
    if refused or any(words in text for words in _UNSUPPORTED):
        return "not_supported", text
    return "failed", text


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing comes: it ends when the parent does
    os._exit(1)


def main(argv: Sequence[str]) -> None:
    """Be an arm's process: JSON lines on standard output, all that libraries print on standard error."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    fields = json.loads(argv[0])
    job = Job(**(fields | {"lengths": tuple(fields["lengths"])}))

    def tell(what: dict[str, Any]) -> None:
        said.write(json.dumps(what, allow_nan=False) + "\n")

    try:
        with turned(**job.knobs):
            _measure(job, tell)
        tell({"arm": {"status": "measured"}})
    except Exception as error:  # engines raise what they like
        import traceback

        traceback.print_exc()
        status, reason = _failure(error)
        tell({"arm": {"status": status, "reason": reason}})
    said.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine takes long to end, and may fail then


if __name__ == "__main__":
    main(sys.argv[1:])
