"""``fidelab bench``: speed, start-up and memory of a model on its engine; and of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fidelab.cli import bench_calibrate, bench_serve, bench_speculation
from fidelab.cli.axes import Set
from fidelab.cli.benches import Benches, bench_settings, counts
from fidelab.cli.compare import (
    BaseURL,
    Deadline,
    Device,
    Dtype,
    EngineArg,
    Json,
    Prefix,
    Python,
    PythonPath,
    Served,
    Threads,
    engine_args,
    engine_settings,
    experiment_from,
    launch,
)

__all__ = ["app"]

_DEFAULT = "offline"


class _Group(typer.core.TyperGroup):
    """``fidelab bench MODEL`` is ``fidelab bench offline MODEL``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else [_DEFAULT, *args])


app = typer.Typer(
    cls=_Group,
    help="Speed, start-up and memory: of a model on its engine, and of servers. fidelab bench MODEL is short for "
    "fidelab bench offline MODEL.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True},
)


app.command("serve")(bench_serve.serve)
app.command("sweep")(bench_serve.sweep)
app.command("calibrate")(bench_calibrate.calibrate)
app.command("speculation")(bench_speculation.speculation)


@app.command(_DEFAULT)
def offline(
    model: Annotated[str, typer.Argument(help="smollm2-135m, a hub id, a folder, or a .gguf file.")],
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help="KV format; the first is what the others are compared with; may be repeated."),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", help="A further arm as KEY=VALUE,…, as for fidelab compare; may be repeated."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine that runs all arms.")] = "hf",
    python: Python = None,
    prefix: Prefix = None,
    pythonpath: PythonPath = None,
    base_url: BaseURL = None,
    served: Served = None,
    benches: Benches = "offline",
    prompt_lens: Annotated[
        str | None, typer.Option("--prompt-lens", help="Tokens of prompts: 128,512.", show_default=False)
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Tokens before the first decoded one: 0,512.", show_default=False)
    ] = None,
    n: Annotated[
        int | None, typer.Option("--decode-tokens", help="Tokens decoded at each depth. \\[default: 32]")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences together: 1,4. \\[default: 1]")] = None,
    repeats: Annotated[int | None, typer.Option(help="Measured answers. \\[default: 5; start-up: 3]")] = None,
    interleave: Annotated[
        str | None, typer.Option(help="Arms in turn (live), repeats over several loads (loads), or auto.")
    ] = None,
    overrides: Set = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    engine_arg: EngineArg = None,
    deadline: Deadline = None,
    output_dir: Annotated[Path, typer.Option(help="Where runs are written.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    r"""Measure arms without comparing what they say.

    [bold]Examples[/bold]

      fidelab bench smollm2-135m --kv bf16 --kv int8

      fidelab bench smollm2-135m --engine llamacpp --kv f16 --kv q8_0 --prompt-lens 128,512,2048 --depths 0,1024,4096

      fidelab bench ./my-model --batch 1,4 --benches prefill,decode --json
    """
    data: dict[str, Any] = {
        "model": model,
        "engine": engine_settings(engine, python, prefix, pythonpath),
        "engine_args": engine_args(engine_arg, base_url, served),
        **({"reference": kv[0]} if kv else {}),
        "control": "none",
        "candidates": [*(kv or [])[1:], *(candidate or [])],
        "axes": {},
        "benches": bench_settings(benches, _flags(prompt_lens, depths, n, batch, repeats, interleave)),
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "output_dir": str(output_dir),
        **({} if deadline is None else {"deadline": deadline}),
    }
    launch(experiment_from(data, "bench", overrides or []), as_json)


def _flags(
    prompt_lens: str | None,
    depths: str | None,
    n: int | None,
    batch: str | None,
    repeats: int | None,
    interleave: str | None,
) -> dict[str, dict[str, Any]]:
    """Flags → the settings of benches that they stand for."""
    lengths = None if prompt_lens is None else counts("--prompt-lens", prompt_lens)
    deep = None if depths is None else counts("--depths", depths, least=0)
    together = None if batch is None else counts("--batch", batch)
    return {
        "prompt-lens": {"prefill.lengths": lengths, "memory.lengths": lengths},
        "depths": {"decode.depths": deep},
        "decode-tokens": {"decode.n": n},
        "batch": {f"{name}.batch": together for name in ("prefill", "decode", "memory")},
        "repeats": {f"{name}.repeats": repeats for name in ("prefill", "decode", "startup")},
        "interleave": {f"{name}.interleave": interleave for name in ("prefill", "decode", "memory")},
    }
