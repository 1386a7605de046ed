"""``fidelab share``: packed references."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands

app = Commands(help="Pack references for others.")


@app.command()
def reference(
    run_dir: options.ComparedRunDir,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help="A new folder, or hf://owner/name.")],
    other: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Run of the same reference on another machine. Their difference goes into the pack.",
            callback=options.compared,
        ),
    ] = None,
) -> None:
    """Pack a run's reference, so that others can compare with it without running it.

    The pack holds token windows, saved outputs and the output head.
    Use it with fidelab compare MODEL --reference PLACE.

    [bold]Examples[/bold]

      fidelab share reference latest --to smollm2-reference

      fidelab share reference latest --to hf://owner/smollm2-reference
    """
    from fidelab.axes import AXES
    from fidelab.references.packing import share_reference
    from fidelab.results.store import RunFolder
    from fidelab.scoring.machines import machine_difference

    run = RunFolder.open(run_dir.absolute())
    difference = None if other is None else machine_difference(run, RunFolder.open(other.absolute()))
    alone = [name for name in AXES.names() if not AXES.load(name).follows]  # the others ask what an arm answered
    print(share_reference(run, to, alone, difference))
