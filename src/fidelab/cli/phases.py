"""``fidelab capture`` and ``fidelab score``: the two phases apart, on two machines if need be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.compare import experiment_from
from fidelab.cli.output import command_line, exit_on, failures, note, show_report


@options.expand_options
def capture(
    *,
    model: options.Model,
    kv: Annotated[
        str | None,
        typer.Option(
            help="KV format of this arm. \\[default: the engine's native one]",
            show_default=False,
            autocompletion=options.complete_kv,
        ),
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder of captures; can be copied to another machine.")] = Path(
        "captures"
    ),
    follow: Annotated[
        Path | None,
        typer.Option(help="The reference's captures, where questions follow from its answers.", show_default=False),
    ] = None,
    axes: options.AxesOptions,
    overrides: options.Set = None,
    engine: options.ServableEngineOptions,
) -> None:
    """Capture one arm's answers; prints the folder that 'fidelab score' takes.

    [bold]Example[/bold]

      ref=$(fidelab capture smollm2-135m --kv bf16 --output-dir captures)

      fidelab score --ref "$ref" --test "$(fidelab capture smollm2-135m --kv int4)"
    """
    from fidelab.axes import AXES
    from fidelab.cli.progress import watcher
    from fidelab.run.conduct import capture as run_capture

    data = {
        "model": model,
        **engine.settings(),
        "reference": {"kv": kv},
        "control": "none",
        "candidates": [{"kv": kv}],
        **axes.settings(),
        "floor": 0.0,
        "twins": 0.0,
        "output_dir": str(output_dir),
        "captures_dir": str(output_dir),
    }
    experiment = experiment_from(data, "capture", overrides or [])
    leading = [name for name in experiment.axes if AXES.load(name).follows]
    if leading and follow is None:
        note(f"fidelab: axes {', '.join(leading)} follow the reference's answers: capture candidates with --follow")
    [result] = run_capture(experiment, follow=follow, listener=watcher())
    for folder in sorted({path.parent for path in result.captures.values()}):
        print(folder)
    if result.reason:
        note(f"fidelab: {result.arm.name} failed: {result.reason}")
        raise typer.Exit(1)


@options.expand_options
def score(
    *,
    ref: Annotated[Path, typer.Option(help="Capture (or folder of one arm's captures) of the reference.")],
    test: Annotated[list[Path], typer.Option(help="The same of a candidate; may be repeated.")],
    names: Annotated[
        str | None, typer.Option(help="Names of the candidates, separated by commas.", show_default=False)
    ] = None,
    scoring: options.ScoringOptions,
    limits: options.MarginOptions,
    output_dir: Annotated[
        Path | None, typer.Option(help="Also leave a run folder here (report.json, report.html …).", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Score captures against a reference capture; needs no engine and no model.

    [bold]Example[/bold]

      fidelab score --ref captures/smollm2-135m-hf-bf16-0a1b2c3d4e --test other/int4
    """
    from fidelab.run.phases import score_captures

    labels = [name.strip() for name in names.split(",")] if names else None
    report, folder = score_captures(
        ref,
        test,
        labels,
        seed=scoring.seed,
        bands=scoring.bands,
        limits=limits.settings().get("limits", {}),
        output_dir=output_dir,
        command=command_line(),
        note=lambda text: note(f"fidelab: {text}"),
    )
    show_report(report, as_json=as_json, folder=folder)
    exit_on(failures(report))
