"""``fidelab quantize``: a recipe, carried out by llm-compressor, audited and compared with the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options


def quantize(
    model: Annotated[str, typer.Argument(help="Folder with safetensors, hub id or embedded model.")],
    recipe: Annotated[Path, typer.Option(metavar="FILE", help="The recipe, in YAML.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to be made. \\[default: by model and recipe]", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Quantize a model by a recipe, audit the result, and compare it with the original.

    The recipe is checked against the checkpoint's names and shapes before anything is loaded.
    The tool has an environment of its own: fidelab engines install llm-compressor.

    [bold]Example[/bold]

      fidelab quantize ./model --recipe w4a16.yaml -o ./model-w4a16
    """
    from fidelab.cli.output import exit_on, note, show_report, waiting
    from fidelab.run.quantize import quantize as run

    target = output or Path(f"{Path(model).name}-{recipe.stem}")
    with waiting(f"quantizing {model}") as say:

        def tell(text: str) -> None:
            say(text)
            note(f"fidelab: {text}")

        try:
            outcome = run(model, recipe, target, resume=resume, python=python, say=tell)
        except KeyboardInterrupt:
            note("fidelab: stopped; the same command with --resume goes on")
            raise
    idle = outcome.experts.get("without_tokens", {})
    if idle:
        count = sum(map(len, idle.values()))
        note(f"fidelab: {count} experts of {len(idle)} layers got no token of the calibration data from their router")
    summary = f"{len(outcome.plan.quantized)} modules quantized, {len(outcome.plan.kept)} kept"
    note(f"fidelab: {outcome.output}: {summary}, audit: {outcome.verdict}")
    if outcome.report is not None:
        show_report(outcome.report, as_json=as_json)
    if outcome.verdict == "broken":
        exit_on([f"{outcome.output} is broken: fidelab audit {outcome.output}"])
