"""``fidelab advise``: which weights with which cache, by measured losses and by bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import command_line, show_study
from fidelab.cli.physics import parse_counts


@options.expand_options
def advise(
    *,
    model: Annotated[str, typer.Argument(help="A model as the runs name it: folder, GGUF file, hub id or name.")],
    device: Annotated[str, typer.Option(help="A row of the device table, such as H200.")],
    context: Annotated[str, typer.Option(help="Tokens of each sequence; k is 1,024.")] = "32k",
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    memory: options.Memory = None,
    overhead: options.Overhead = None,
    tp: options.Sharing = 1,
    max_kld: options.MaxKLD = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="A run folder or report.json with losses; repeat it. \\[default: this model's in --output-dir]",
            show_default=False,
        ),
    ] = None,
    runs: options.RunsOptions,
    as_json: options.Json = False,
) -> None:
    """Choose weights and KV cache together: measured losses against memory and decode ceilings.

    Losses come from runs of fidelab compare; what no arm ran is predicted as the sum of its parts, and says so.
    Without --max-kld it is the pair of the least loss that fits, with it the fastest that is shown to lose less.

    [bold]Examples[/bold]

      fidelab advise smollm2-135m --device H100 --context 8k --batch 32

      fidelab advise ./Qwen3-8B --device H200 --context 32k --batch 32 --memory 80G --max-kld 0.01 --from runs/latest
    """
    from fidelab.core import parse_bytes
    from fidelab.core.errors import UsageError
    from fidelab.physics.devices import find_device
    from fidelab.physics.geometry import named_geometry
    from fidelab.studies.advice import advise as choose
    from fidelab.studies.advice import read_runs

    row = find_device(device)
    contexts = parse_counts(context, "context")
    if len(contexts) > 1:
        raise UsageError(f"--context {context}: one context at a time")
    geometry, native = named_geometry(model)
    found = choose(
        model,
        geometry,
        row,
        contexts[0],
        batch,
        read_runs(model, from_ or (), runs.output_dir, native),
        memory=None if memory is None else parse_bytes(memory),
        max_kld=max_kld,
        native=native,
        tp=tp,
        overhead=0.0 if overhead is None else parse_bytes(overhead),
        command=command_line(),
    )
    show_study(found, None, as_json)
