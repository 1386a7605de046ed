"""``fidelab advise``: which weights with which cache, by measured losses and by bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import open_console
from fidelab.cli.physics import parse_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fidelab.studies.advice import Advice, AdviceCell

_MOST_ROWS = 24


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
    max_loss: options.MaxLoss = None,
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
    Without --max-loss it is the pair of the least loss that fits, with it the fastest that is shown to lose less.

    [bold]Examples[/bold]

      fidelab advise smollm2-135m --device H100 --context 8k --batch 32

      fidelab advise ./Qwen3-8B --device H200 --context 32k --batch 32 --memory 80G --max-loss 0.01 --from runs/latest
    """
    from fidelab.core import parse_bytes
    from fidelab.errors import UsageError
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
        max_loss=max_loss,
        native=native,
        tp=tp,
        overhead=0.0 if overhead is None else parse_bytes(overhead),
    )
    if as_json:
        sys.stdout.write(found.to_json())
    else:
        _show(found)


def _show(found: Advice) -> None:
    from fidelab.report.text import literal, print_line, simple_table
    from fidelab.results.numbers import counted, format_kld, format_ratio, format_span, format_tokens

    console = open_console()

    def line(text: str = "") -> None:
        print_line(console, text)

    def command(text: str) -> None:
        """Not wrapped, so that it can be copied."""
        console.print(literal(f"  {text}", console), soft_wrap=True)

    def table(cells: Sequence[AdviceCell]) -> None:
        grid = simple_table()
        for heading in ("", "weights", "cache", "GB", "at most", "tokens", "KL, nats", "95%", "is"):
            number = heading in ("GB", "at most", "tokens", "KL, nats")
            grid.add_column(
                literal(heading, console),
                justify="right" if number else "left",
                overflow="fold",
                no_wrap=number or heading == "95%",
            )
        for cell in cells:
            parts = f" ({len(cell.loss.parts)})" if cell.loss.source == "predicted" else ""
            row = (
                "•" if cell.on_frontier else "",
                cell.weights,
                cell.kv,
                f"{cell.bytes / 1e9:,.3f}{' ' if cell.fits else '!'}",
                format_ratio(cell.speedup),
                "any" if cell.longest_context is None else f"{cell.longest_context:,}",
                format_kld(cell.loss.mean),
                format_span(cell.loss.ci),
                f"{cell.loss.source}{parts}",
            )
            grid.add_row(*(literal(text, console) for text in row))
        console.print(grid)

    line(
        f"{found.model} on {found.device}, {format_tokens(found.context)} tokens × {found.batch:,}, "
        f"{found.memory / 1e9:,.1f} GB: {counted(len(found.cells), 'pair')} of weights and cache"
    )
    edge = tuple(cell for cell in found.cells if cell.on_frontier)
    shown = edge if len(found.cells) > _MOST_ROWS else found.cells
    line(f"{'the frontier' if shown is edge else 'all pairs'}, by size; at most: decode speed-up over 16 bits;")
    line("tokens: what fits at this batch; •: on the frontier; !: does not fit; (n): the sum of n measured losses")
    table(shown)
    line(found.text)
    if found.command:
        command(found.command)
        if found.command_note:
            line(f"  ({found.command_note})")
    for one in found.level_down:
        verdict = "cannot be told apart"
        if one.ci is not None and not one.ci[0] <= 0 <= one.ci[1]:
            verdict = "worse" if one.difference > 0 else "better"
        line(
            f"from weights {one.weights}: a cache in {one.kv} (saves {one.saved[0] / 1e9:,.3f} GB) instead of weights "
            f"in {one.lower} (saves {one.saved[1] / 1e9:,.3f} GB): {verdict}, "
            f"{format_kld(one.difference, signed=True)} nats, 95% {format_span(one.ci)} ({one.how})"
        )
    if found.checks:
        ratios = sorted(check.measured / check.predicted for check in found.checks)
        line(
            f"predictions against measurements, {counted(len(ratios), 'pair')}: measured is {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f} times the sum"
        )
    elif any(cell.loss.source == "predicted" for cell in found.cells):
        line("no pair was measured that could be predicted: how far sums are wrong is not known here")
    if found.next:
        line("the choice hinges on: " + "; ".join(f"{cell.weights} with {cell.kv}" for cell in found.next))
    if found.measure:
        line("to measure:")
        command(found.measure)
    for text in found.notes:
        line(f"note: {text}")
