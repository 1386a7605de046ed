"""``fidelab doctor``: what works on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import waiting

__all__ = ["doctor"]


def doctor(
    trial: Annotated[
        bool, typer.Option("--trial", help="Also let each installed engine run each of its KV formats; takes minutes.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check this machine: what works, what does not, and what to do about it.

    Exits with 1 where the main job, a comparison of the embedded model's k16v8, could not run.

    [bold]Example[/bold]

      fidelab doctor --json
    """
    from fidelab.doctor import examine
    from fidelab.doctor.text import show

    with waiting("examining this machine") as say:
        diagnosis = examine(trial=trial, say=say)
    show(diagnosis, as_json=as_json)
    if not diagnosis.ready:
        raise typer.Exit(1)
