"""``fidelab doctor``: check this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import waiting


def doctor(
    trial: Annotated[
        bool, typer.Option("--trial", help="Also try each KV format on each installed engine. Takes minutes.")
    ] = False,
    system: Annotated[
        bool,
        typer.Option("--system", help="Check the driver, GPUs, their interconnect and known bad versions instead."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check this machine and suggest fixes.

    Exit code 1 means that a comparison of the embedded model cannot run, and with --system that a known bad version was
    found.

    [bold]Example[/bold]

      fidelab doctor --json

      fidelab doctor --system
    """
    from fidelab.doctor import examine, examine_machine
    from fidelab.doctor.text import show

    with waiting("examining this machine") as say:
        diagnosis = examine_machine() if system else examine(trial=trial, say=say)
    show(diagnosis, as_json=as_json)
    if not diagnosis.ready:
        raise typer.Exit(1)
