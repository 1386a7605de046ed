"""``fidelab capture`` and ``fidelab score``: the two phases apart, on two machines if need be."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import compare as flags
from fidelab.cli.axes import Axes, Limit, Quick, Set, axis_settings
from fidelab.cli.output import gate, note, show_report

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("capture")(capture)
    app.command("score")(score)


def capture(
    model: Annotated[str, typer.Argument(help="smollm2-135m, a hub id, a folder, or a .gguf file.")],
    kv: Annotated[
        str | None,
        typer.Option("--kv", help="KV format of this arm. \\[default: the engine's native one]", show_default=False),
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder of captures; can be copied to another machine.")] = Path(
        "captures"
    ),
    follow: Annotated[
        Path | None,
        typer.Option(help="The reference's captures, where questions follow from its answers.", show_default=False),
    ] = None,
    engine: flags.Engine = "hf",
    python: flags.Python = None,
    prefix: flags.Prefix = None,
    pythonpath: flags.PythonPath = None,
    base_url: flags.BaseURL = None,
    served: flags.Served = None,
    axes: Axes = "core",
    quick: Quick = False,
    text: flags.TextFile = "default",
    windows: flags.Windows = None,
    n_ctx: flags.NCtx = None,
    protocol: flags.Protocol = None,
    stride: flags.Stride = None,
    prompts: flags.Prompts = "default",
    n_predict: flags.NPredict = None,
    limit: Limit = None,
    template: flags.Template = None,
    overrides: Set = None,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    threads: flags.Threads = None,
    engine_arg: flags.EngineArg = None,
    deadline: flags.Deadline = None,
) -> None:
    """Capture one arm's answers; prints the folder that 'fidelab score' takes.

    [bold]Example[/bold]

      ref=$(fidelab capture smollm2-135m --kv bf16 --output-dir captures)

      fidelab score --ref "$ref" --test "$(fidelab capture smollm2-135m --kv int4)"
    """
    from fidelab.axes import AXES
    from fidelab.cli.progress import watcher
    from fidelab.runs.conduct import capture as run_capture

    given = {
        "kld": {"windows": windows, "n_ctx": n_ctx, "protocol": protocol, "stride": stride},
        "trajectory": {"n_predict": n_predict, "template": template},
    }
    data = {
        "model": model,
        "engine": flags.engine_settings(engine, python, prefix, pythonpath),
        "engine_args": flags.engine_args(engine_arg, base_url, served),
        "reference": {"kv": kv},
        "control": "none",
        "candidates": [{"kv": kv}],
        "axes": axis_settings(axes, given, limit or [], quick),
        "text": text,
        "prompts": prompts,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "floor": 0.0,
        "twins": 0.0,
        "output_dir": str(output_dir),
        "captures_dir": str(output_dir),
        **({} if deadline is None else {"deadline": deadline}),
    }
    experiment = flags.experiment_from(data, "capture", overrides or [])
    leading = [name for name in experiment.axes if AXES.load(name).follows]
    if leading and follow is None:
        note(f"fidelab: axes {', '.join(leading)} follow the reference's answers: capture candidates with --follow")
    [result] = run_capture(experiment, follow=follow, listener=watcher())
    for folder in sorted({path.parent for path in result.captures.values()}):
        print(folder)
    if result.reason:
        note(f"fidelab: {result.arm.name} failed: {result.reason}")
        raise typer.Exit(1)


def score(
    ref: Annotated[Path, typer.Option("--ref", help="Capture (or folder of one arm's captures) of the reference.")],
    test: Annotated[list[Path], typer.Option("--test", help="The same of a candidate; may be repeated.")],
    names: Annotated[
        str | None, typer.Option(help="Names of the candidates, separated by commas.", show_default=False)
    ] = None,
    seed: flags.Seed = 42,
    bands: Annotated[str, typer.Option(help="Band table of the composite: fidelab or refract.")] = "fidelab",
    output_dir: Annotated[
        Path | None, typer.Option(help="Also leave a run folder here (report.json, report.html …).", show_default=False)
    ] = None,
    fail_under: flags.FailUnder = None,
    as_json: flags.Json = False,
) -> None:
    """Score captures against a reference capture; needs no engine and no model.

    [bold]Example[/bold]

      fidelab score --ref captures/smollm2-135m-hf-bf16-0a1b2c3d4e --test other/int4
    """
    from fidelab.runs.phases import score_captures

    labels = [name.strip() for name in names.split(",")] if names else None
    command = shlex.join(["fidelab", *sys.argv[1:]])
    report, folder = score_captures(
        ref,
        test,
        labels,
        seed=seed,
        bands=bands,
        output_dir=output_dir,
        command=command,
        note=lambda text: note(f"fidelab: {text}"),
    )
    show_report(report, as_json=as_json, folder=folder)
    gate(report, fail_under)
