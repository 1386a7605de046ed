"""``fidelab bench kernels``: attention kernels against each other on one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli.benches import counts
from fidelab.cli.compare import Json
from fidelab.cli.output import note

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["kernels"]

# what is measured unless told: a GPU in ten minutes, a CPU in two
_DEFAULTS: dict[str, dict[str, str]] = {
    "cuda": {"batch": "1,4,8,16,32,64", "lengths": "2k,8k,32k,128k", "prefixes": "2k,8k,32k", "depths": "2k,8k,32k"},
    "cpu": {"batch": "1,4", "lengths": "512,2k", "prefixes": "512", "depths": "512"},
}
_CHUNK = {"cuda": 512, "cpu": 64}
_EXTEND_BATCHES = {"cuda": (1, 8), "cpu": (1,)}
_GEOMETRIES = "llama-3.1-8b,qwen2.5-7b,mistral-7b"
_MODELS = {"cuda": "qwen2.5-7b,llama-3.1-8b", "cpu": "tiny"}  # of --end-to-end unless told


def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    geometry: Annotated[
        str | None,
        typer.Option(
            help="Models whose attention is measured: llama-3.1-8b, qwen2.5-7b, mistral-7b, tiny. "
            "\\[default: the first three]",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[str, typer.Option(help="K/V bits of our kernels.")] = "16/16,16/8,8/8",
    batch: Annotated[
        str | None, typer.Option(help="Sequences. \\[default: 1,4,8,16,32,64; cpu: 1,4]", show_default=False)
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens of each. \\[default: 2k,8k,32k,128k; cpu: 512,2k]", show_default=False),
    ] = None,
    prefixes: Annotated[
        str | None,
        typer.Option(
            help="Tokens before a chunk of extend, or none. \\[default: 2k,8k,32k; cpu: 512]", show_default=False
        ),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a chunk. \\[default: 512; cpu: 64]", show_default=False)
    ] = None,
    page: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
    implementation: Annotated[
        str | None,
        typer.Option(
            "--kernels", help="Ours: torch or triton. \\[default: triton on cuda, else torch]", show_default=False
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=60.0, help="Of each timing.")] = 0.1,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="After which nothing more is begun.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    end_to_end: Annotated[
        bool, typer.Option("--end-to-end", help="Decode with whole models of random weights, too (cpu: tiny).")
    ] = False,
    models_batch: Annotated[int, typer.Option("--end-to-end-batch", min=1, help="Sequences there.")] = 32,
    models_lengths: Annotated[
        str | None,
        typer.Option("--end-to-end-lengths", help="Tokens there. \\[default: 2k,8k,32k; cpu: 512]", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The record. \\[default: runs/kernels-DEVICE-TIME.json]", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this record; what it holds is kept.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure attention kernels: ours, and those of torch, FlashAttention and FlashInfer that are installed.

    Decode over a paged cache, and extend (a chunk of a prompt over its prefix): microseconds, share of this device's
    own copy bandwidth, speed-up over the best 16-bit kernel and what bytes allow at most. Every output is checked
    against the definition; one that fails has no time. What cannot run is listed with its reason.

    [bold]Examples[/bold]

      fidelab bench kernels --geometry qwen2.5-7b --lengths 2k --batch 1,4

      fidelab bench kernels --device cuda --end-to-end --minutes 9
    """
    import math
    import time

    import torch

    from fidelab.cli.bench_kernels_view import render
    from fidelab.errors import UsageError
    from fidelab.kernel_bench.bench import Settings
    from fidelab.kernel_bench.conduct import EndToEnd, bench_kernels
    from fidelab.kernel_bench.contenders import CONTENDERS
    from fidelab.kernel_bench.end_to_end import PAGE
    from fidelab.kernel_bench.machine import describe, slug
    from fidelab.kernel_bench.shapes import cells
    from fidelab.kernel_bench.shapes import geometry as named

    began = time.monotonic()
    own, pairs = _checked(device, implementation, formats)
    if resume is not None and output is not None:
        raise UsageError("--resume writes to the record that it goes on with; leave out --output")
    place, default = torch.device(device), _DEFAULTS[device]
    chosen, models = (
        [named(name) for name in (geometry or names).split(",")] for names in (_GEOMETRIES, _MODELS[device])
    )
    asked = cells(
        chosen,
        batches=counts("--batch", batch or default["batch"]),
        lengths=counts("--lengths", lengths or default["lengths"]),
        prefixes=() if prefixes == "none" else counts("--prefixes", prefixes or default["prefixes"]),
        chunk=chunk or _CHUNK[device],
        extend_batches=_EXTEND_BATCHES[device],
        page=page,
    )
    settings = Settings(
        place,
        own,
        tuple(asked),
        tuple(one for one in CONTENDERS if one.role != "ours" or one.formats in pairs),
        seconds,
        seed,
        until=math.inf if minutes is None else began + 60 * minutes,
    )
    depths = counts("--end-to-end-lengths", models_lengths or default["depths"])
    if min(depths) < PAGE:
        raise UsageError(f"--end-to-end-lengths {min(depths)}: the last {PAGE} tokens are timed; write {PAGE} or more")
    path = resume or output
    if path is None:
        path = Path("runs") / f"kernels-{slug(str(describe(place)['name']))}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    record = bench_kernels(
        settings,
        chosen,
        path,
        resume=resume is not None,
        end_to_end=EndToEnd(models, depths, models_batch) if end_to_end else None,
    )
    if as_json:
        sys.stdout.write(json.dumps(record, indent=1, allow_nan=False) + "\n")
    else:
        render(record, _console())
    note(f"fidelab: the record is {path}")


def _checked(device: str, implementation: str | None, formats: str) -> tuple[str, tuple[str, ...]]:
    """Our implementation, and the pairs of formats, of which all that can be wrong is said before anything runs."""
    import torch

    from fidelab.errors import UnknownNameError, UsageError
    from fidelab.kernel_bench.shapes import formats as named

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r}: there are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    own = implementation or ("triton" if device == "cuda" else "torch")
    if own not in ("torch", "triton"):
        raise UnknownNameError("kernel implementation", own, ("torch", "triton"))
    if own == "triton" and device == "cpu":
        raise UsageError("--kernels triton: compiled kernels need a GPU; add --device cuda")
    pairs = tuple(formats.split(","))
    for pair in pairs:
        named(pair)
    return own, pairs


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)  # a file or a pipe has no width of its own
