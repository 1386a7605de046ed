"""``fidelab bench``: speed, start-up and memory of a model on its engine; and of servers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fidelab.cli import bench_serve, bench_speculation, completion, options, values
from fidelab.cli.axes import bench_settings, counts
from fidelab.cli.commands import Commands
from fidelab.cli.compare import launch
from fidelab.cli.defaults import use_defaults
from fidelab.cli.output import note
from fidelab.cli.rules import given_flags

_DEFAULT = "offline"


app = Commands(
    default=_DEFAULT,
    help="Measure speed, start-up time and memory of models and servers. MODEL alone means offline MODEL.",
)


app.command("serve")(bench_serve.serve)
app.command("sweep")(bench_serve.sweep)
app.command("speculation")(bench_speculation.speculation)


class _MeasureOptions(options.Options, panel=options.MEASURED):
    """The benches, and settings that several of them have."""

    benches: options.Benches = "offline"
    prompt_lens: Annotated[str | None, typer.Option(help="Prompt lengths in tokens: 128,512.")] = None
    depths: Annotated[str | None, typer.Option(help="Context lengths before decoding: 0,512.")] = None
    decode_tokens: Annotated[
        int | None,
        typer.Option(parser=values.tokens, metavar="N", help="Tokens decoded at each depth. \\[default: 32]"),
    ] = None
    batch: Annotated[str | None, typer.Option(help="Batch sizes: 1,4. \\[default: 1]")] = None
    repeats: Annotated[int | None, typer.Option(help="Number of measurements. \\[default: 5; start-up: 3]")] = None
    interleave: Annotated[
        str | None, typer.Option(help="Interleave configurations (live), reload between repeats (loads), or auto.")
    ] = None

    def settings(self) -> dict[str, Any]:
        lengths = None if self.prompt_lens is None else counts("--prompt-lens", self.prompt_lens)
        depths = None if self.depths is None else counts("--depths", self.depths, least=0)
        batch = None if self.batch is None else counts("--batch", self.batch)
        flags: dict[str, dict[str, Any]] = {
            "prompt-lens": {"prefill.lengths": lengths, "memory.lengths": lengths},
            "depths": {"decode.depths": depths},
            "decode-tokens": {"decode.n": self.decode_tokens},
            "batch": {f"{name}.batch": batch for name in ("prefill", "decode", "memory")},
            "repeats": {f"{name}.repeats": self.repeats for name in ("prefill", "decode", "startup")},
            "interleave": {f"{name}.interleave": self.interleave for name in ("prefill", "decode", "memory")},
        }
        return {"benches": bench_settings(self.benches, flags)}


@app.command(_DEFAULT)
@options.expand_options
def offline(
    context: typer.Context,
    *,
    model: options.OptionalModel = None,
    preset: options.Preset = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(help="KV format. The first is the reference. Repeatable.", autocompletion=completion.kv_format),
    ] = None,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Further configuration as KEY=VALUE,…, as in fidelab compare. Repeatable.")
    ] = None,
    measure: _MeasureOptions,
    overrides: options.Set = None,
    engine: options.ServableEngineOptions,
    runs: options.RunsOptions,
    as_json: options.Json = False,
    trusted: options.Trusted = None,
) -> None:
    r"""Measure speed and memory without comparing outputs.

    [bold]Examples[/bold]

      fidelab bench smollm2-135m --kv bf16 --kv int8

      fidelab bench m.gguf --engine llamacpp --kv f16 --kv q8_0 --depths 0,4096

      fidelab bench ./my-model --batch 1,4 --benches prefill,decode --json

      fidelab bench --preset smollm2-cpu --benches decode
    """
    from fidelab.config.flags import StartingPoint, read_flags

    if preset is None and (line := use_defaults(context)):
        note(line)
    data: dict[str, Any] = {
        "model": model,
        **engine.settings(),
        **({"reference": kv[0]} if kv else {}),
        "control": "none",
        "candidates": [*(kv or [])[1:], *(candidate or [])],
        "axes": {},
        **measure.settings(),
        **runs.settings(),
    }
    begun = StartingPoint(preset=preset, given=given_flags(context))
    experiment, _ = read_flags(data, "bench", overrides=overrides or [], trusted=trusted or [], begun=begun)
    launch(experiment, options.ShowOptions(as_json=as_json))
