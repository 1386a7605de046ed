"""Measure k16v8's kernels next to those of torch, FlashAttention, FlashInfer and vLLM (Marlin) that are installed.

Decode over a paged cache, and extend (a chunk of a prompt over its prefix): microseconds, share of this device's
own copy bandwidth, speed-up over the best 16-bit kernel and what bytes allow at most. Every output is checked
against the definition; one that fails has no time. What cannot run is listed with its reason.

With --operations weights: products with 4-bit weights as AWQ and GPTQ store them, of a model's linear layers and of
all experts in one launch, against 16-bit weights, dequantizing first, torch's own 4-bit product and Marlin, and how
long the device takes to read that many bytes.

With --model-shape: the step of a whole model with random weights, all layers and the head in one graph.

With --model-shape and --engine vllm: that model in stock vLLM, 16/16 and 8/8 by vLLM itself and 16/8 by the plug-in;
milliseconds of a decoded step and the tokens that the cache holds. The Python that runs k16v8 is the one with vLLM.

examples:
  k16v8 bench --model-shape qwen2.5-7b --device cuda
  k16v8 bench --engine vllm --model-shape qwen2.5-7b --device cuda
  k16v8 bench --geometry qwen2.5-7b --lengths 2k --batch 1,4
  k16v8 bench --device cuda --minutes 9
  k16v8 bench --operations weights --geometry qwen2.5-7b --experts none --rows 1
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from k16v8.cli.bench_tables import render, render_engine, render_model
from k16v8.cli.common import add_json, add_operations, check_device, counts, note, number_type, operations, show_json
from k16v8.errors import UnknownNameError, UsageError

# default shapes: a GPU takes ten minutes, a CPU two
_DEFAULTS: dict[str, dict[str, str]] = {
    "cuda": {"batch": "1,4,8,16,32,64", "lengths": "2k,8k,32k,128k", "prefixes": "2k,8k,32k"},
    "cpu": {"batch": "1,4", "lengths": "512,2k", "prefixes": "512"},
}
_CHUNK = {"cuda": 512, "cpu": 64}
_EXTEND_BATCHES = {"cuda": (1, 8), "cpu": (1,)}
_GEOMETRIES = "llama-3.1-8b,qwen2.5-7b,mistral-7b"
_LAYERS = {"cuda": _GEOMETRIES, "cpu": "llama-3.1-8b"}  # linear ones, by default
_EXPERTS = {"cuda": "qwen3-30b-a3b,mixtral-8x7b", "cpu": "none"}
_ROWS = {"cuda": "1,4,16,64,512,4096", "cpu": "1"}
_SECONDS, _LAYOUTS, _GROUP = 0.1, "awq,gptq", 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--device", default="cpu", help="cpu or cuda. [default: cpu]")
    add(
        "--geometry",
        help="Models whose attention or linear layers are measured: llama-3.1-8b, qwen2.5-7b, mistral-7b, tiny. "
        "[default: the first three; weights on cpu: the first]",
    )
    add(
        "--model-shape",
        help="Measure a whole model's step: llama-3.1-8b, qwen2.5-7b, mistral-7b, tiny. Takes --formats, one --batch, "
        "--lengths, --page and the knobs.",
    )
    add("--engine", help="With --model-shape: measure that model in an engine, vllm. Takes the same, and --minutes.")
    add("--formats", default="16/16,16/8,8/8", help="K/V bits of our kernels. [default: 16/16,16/8,8/8]")
    add("--batch", help="Sequences. [default: 1,4,8,16,32,64; cpu: 1,4]")
    add("--lengths", help="Tokens of each. [default: 2k,8k,32k,128k; cpu: 512,2k]")
    add("--prefixes", help="Tokens before a chunk of extend, or none. [default: 2k,8k,32k; cpu: 512]")
    add("--chunk", type=number_type(1, int), help="Tokens of a chunk. [default: 512; cpu: 64]")
    add("--page", type=number_type(1, int), help="Tokens in a page. [default: 16; of a whole model 64]")
    add("--rows", help="Of activations, or tokens. [default: 1,4,16,64,512,4096; cpu: 1]")
    add("--layouts", default=_LAYOUTS, help="Of our 4-bit weights. [default: awq,gptq]")
    add("--group", type=number_type(1, int), default=_GROUP, help="Inputs that share a scale. [default: 128]")
    add(
        "--experts",
        help="Models whose experts are measured: qwen3-30b-a3b, mixtral-8x7b, tiny-experts, or none. "
        "[default: the first two; cpu: none]",
    )
    add("--kernels", help="Ours: torch or triton. [default: triton on cuda, else torch]")
    turn = parser.add_argument_group("knobs of our decode, for experiments", "Left out: what k16v8 chooses.")
    turn.add_argument("--tile-tokens", type=number_type(1, int), default=0, help="Tokens of a tile, a power of two.")
    turn.add_argument("--warps", type=number_type(1, int), default=0, help="Warps of a program, a power of two.")
    turn.add_argument("--stages", type=number_type(1, int), default=0, help="Stages of the software pipeline.")
    turn.add_argument("--registers", type=number_type(1, int), default=0, help="Registers of a thread, at most.")
    turn.add_argument("--split-tokens", type=number_type(1, int), default=0, help="Tokens of a split.")
    turn.add_argument("--merge-stages", type=number_type(1, int), default=0, help="Of the loop that merges splits.")
    add("--seconds", type=number_type(0.0, float, 60.0), default=_SECONDS, help="Of each timing. [default: 0.1]")
    add("--minutes", type=number_type(0.0, float), help="After which nothing more is begun.")
    add("--seed", type=number_type(0, int), default=0, help="Of the random inputs. [default: 0]")
    add("--output", type=Path, help="The record. [default: runs/kernels-DEVICE-TIME.json]")
    add("--resume", type=Path, help="Resume this record. What it holds is kept.")
    add_operations(parser, "attention")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """The exit code.

    Raises:
        K16V8Error: If a name, a flag or a record is invalid, or the device cannot continue.
    """
    import torch

    from k16v8.bench.contenders import CONTENDERS
    from k16v8.bench.machine import describe, slug
    from k16v8.bench.run import Settings
    from k16v8.bench.session import bench_kernels
    from k16v8.bench.shapes import cells, expert_geometry, geometry, weight_cells
    from k16v8.bench.weights import WEIGHT_CONTENDERS
    from k16v8.kernels.knobs import turned

    began = time.monotonic()
    if options.engine is not None:
        return _run_engine(options, began)
    if options.model_shape is not None:
        return _run_model(options, began)
    device = options.device
    measured = operations(options.operations)
    own, pairs, layouts = _checked(device, options.kernels, options.formats, options.layouts)
    if options.resume is not None and options.output is not None:
        raise UsageError("--resume writes to the record that it resumes; leave out --output")
    place, default = torch.device(device), _DEFAULTS[device]
    chosen, layered = (
        [geometry(name) for name in (options.geometry or names).split(",")] for names in (_GEOMETRIES, _LAYERS[device])
    )
    experts = options.experts or _EXPERTS[device]
    weighed = weight_cells(
        layered,
        [] if experts == "none" else [expert_geometry(name) for name in experts.split(",")],
        rows=counts("--rows", options.rows or _ROWS[device]),
        group=options.group,
    )
    prefixes = options.prefixes or default["prefixes"]
    asked = cells(
        chosen,
        batches=counts("--batch", options.batch or default["batch"]),
        lengths=counts("--lengths", options.lengths or default["lengths"]),
        prefixes=() if prefixes == "none" else counts("--prefixes", prefixes),
        chunk=options.chunk or _CHUNK[device],
        extend_batches=_EXTEND_BATCHES[device],
        page=options.page or 16,
    )
    settings = Settings(
        place,
        own,
        (*(asked if "attention" in measured else ()), *(weighed if "weights" in measured else ())),
        tuple(
            one
            for one in (*CONTENDERS, *WEIGHT_CONTENDERS)
            if one.role not in ("ours", "variant") or one.formats in (*pairs, *layouts)
        ),
        options.seconds,
        options.seed,
        until=math.inf if options.minutes is None else began + 60 * options.minutes,
    )
    path = options.resume or options.output
    if path is None:
        path = Path("runs") / f"kernels-{slug(str(describe(place)['name']))}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    with turned(**_knobs(options, own, decodes="attention" in measured)):
        record = bench_kernels(
            settings,
            chosen if "attention" in measured else [],
            path,
            resume=options.resume is not None,
        )
    if options.as_json:
        show_json(record, indent=1)
    else:
        print(*render(record), sep="\n")
    note(f"the record is {path}")
    return 0


def _knobs(options: argparse.Namespace, own: str, *, decodes: bool) -> dict[str, int]:
    knobs = {
        "tokens": options.tile_tokens,
        "warps": options.warps,
        "stages": options.stages,
        "registers": options.registers,
        "split_tokens": options.split_tokens,
        "merge_stages": options.merge_stages,
    }
    if any(knobs.values()) and (own == "torch" or not decodes):
        raise UsageError("knobs are of decode in Triton: add --device cuda, or leave them out")
    return knobs


_NOT_OF_MODELS = ("geometry", "prefixes", "chunk", "rows", "experts", "resume")


def _run_model(options: argparse.Namespace, began: float) -> int:
    """Measure a whole model; the exit code is 1 where a contender's logits are wrong."""
    import torch

    from k16v8.bench.machine import describe, slug
    from k16v8.bench.model import BATCH, LENGTHS, ModelSettings, bench_model, model_shape
    from k16v8.kernels.knobs import turned

    _check_model(options)
    shape = model_shape(options.model_shape)
    own, pairs, _ = _checked(options.device, options.kernels, options.formats, options.layouts)
    place = torch.device(options.device)
    settings = ModelSettings(
        shape,
        place,
        own,
        pairs,
        _one_batch(options, BATCH),
        LENGTHS[options.device] if options.lengths is None else counts("--lengths", options.lengths),
        options.page or 64,
        options.seconds,
        options.seed,
        math.inf if options.minutes is None else began + 60 * options.minutes,
    )
    path = options.output
    if path is None:
        name = f"model-{options.model_shape}-{slug(str(describe(place)['name']))}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path("runs") / f"{name}.json"
    with turned(**_knobs(options, own, decodes=True)):
        record = bench_model(settings, path)
    if options.as_json:
        show_json(record, indent=1)
    else:
        print(*render_model(record), sep="\n")
    note(f"the record is {path}")
    return 1 if any(one["status"] == "wrong" for cell in record["cells"] for one in cell["results"]) else 0


def _check_model(options: argparse.Namespace) -> None:
    """Refuse what a whole model has none of."""
    for name in _NOT_OF_MODELS:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name}: a whole model has none; leave it out, or leave out --model-shape")
    if "weights" in operations(options.operations):
        raise UsageError("--operations weights: the weights of a whole model are of 16 bits; leave it out")


def _one_batch(options: argparse.Namespace, default: dict[str, int]) -> int:
    batch = (default[options.device],) if options.batch is None else counts("--batch", options.batch)
    if len(batch) != 1:
        raise UsageError(f"--batch {options.batch}: a whole model has one batch")
    return batch[0]


# flag → its default, and why an engine has none
_NOT_OF_ENGINES = {
    "kernels": (None, "the plug-in chooses its kernels"),
    "seconds": (_SECONDS, "a timing takes as long as its steps"),
    "layouts": (_LAYOUTS, "the weights are of 16 bits"),
    "group": (_GROUP, "the weights are of 16 bits"),
    "split_tokens": (0, "the plug-in's work list chooses"),
}


def _run_engine(options: argparse.Namespace, began: float) -> int:
    """Measure a whole model in an engine; the exit code is 1 where no arm was measured."""
    import torch

    from k16v8.bench.engine import BATCH, ENGINES, LENGTHS, PAIR, STEPS, EngineSettings, bench_engine, check_vllm
    from k16v8.bench.machine import describe, slug
    from k16v8.bench.model import model_shape
    from k16v8.kernels.knobs import turned

    if options.engine not in ENGINES:
        raise UnknownNameError("engine", options.engine, ENGINES)
    if options.model_shape is None:
        raise UsageError(f"--engine {options.engine}: add --model-shape, as in --model-shape qwen2.5-7b")
    _check_model(options)
    for name, (default, why) in _NOT_OF_ENGINES.items():
        if getattr(options, name) != default:
            raise UsageError(f"--{name.replace('_', '-')}: has no effect with --engine, {why}; leave it out")
    model_shape(options.model_shape)
    own, pairs, _ = _checked(options.device, None, options.formats, options.layouts)
    knobs = {name: value for name, value in _knobs(options, own, decodes=True).items() if value}
    if knobs and PAIR not in pairs:
        raise UsageError(f"knobs are of our decode: add {PAIR} to --formats, or leave them out")
    with turned(**knobs):  # refuses impossible ones before anything runs
        pass
    check_vllm()
    settings = EngineSettings(
        options.model_shape,
        torch.device(options.device),
        pairs,
        _one_batch(options, BATCH),
        LENGTHS[options.device] if options.lengths is None else counts("--lengths", options.lengths),
        options.page or 64,
        STEPS[options.device],
        options.seed,
        knobs,
        math.inf if options.minutes is None else began + 60 * options.minutes,
    )
    path = options.output
    if path is None:
        device = slug(str(describe(settings.device)["name"]))
        path = Path("runs") / f"vllm-{options.model_shape}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    record = bench_engine(settings, path)
    if options.as_json:
        show_json(record, indent=1)
    else:
        print(*render_engine(record), sep="\n")
    note(f"the record is {path}")
    return 0 if any(one["status"] == "measured" for one in record["arms"]) else 1


def _checked(
    device: str, implementation: str | None, formats: str, layouts: str
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Our implementation, pairs of formats and layouts, whose faults are named before anything runs."""
    from k16v8.bench.shapes import formats as named
    from k16v8.kernels.weights import LAYOUTS

    check_device(device)
    own = implementation or ("triton" if device == "cuda" else "torch")
    if own not in ("torch", "triton"):
        raise UnknownNameError("kernel implementation", own, ("torch", "triton"))
    if own == "triton" and device == "cpu":
        raise UsageError("--kernels triton: compiled kernels need a GPU; add --device cuda")
    pairs = tuple(formats.split(","))
    for pair in pairs:
        named(pair)
    held = tuple(layouts.split(","))
    for layout in held:
        if layout not in LAYOUTS:
            raise UnknownNameError("layout of 4-bit weights", layout, LAYOUTS)
    return own, pairs, held
