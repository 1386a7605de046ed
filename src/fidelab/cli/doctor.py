"""``fidelab doctor``: what works on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import waiting


def doctor(
    trial: Annotated[
        bool, typer.Option("--trial", help="Also let each installed engine run each of its KV formats; takes minutes.")
    ] = False,
    system: Annotated[
        bool,
        typer.Option(
            "--system",
            help="Instead: driver, GPUs, whether these reach each other, and versions known to be bad.",
        ),
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(
            help="Instead: the engines in a container image; with --trial they run in it.", show_default=False
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine: what works, what does not, and what to do about it.

    Exits with 1 where the main job, a comparison of the embedded model's k16v8, could not run; with --system, where
    something is known to be bad; with --image, where no engine works in the image.

    [bold]Example[/bold]

      fidelab doctor --json

      fidelab doctor --system
    """
    from fidelab.core.errors import UsageError
    from fidelab.doctor import examine, examine_image, examine_machine
    from fidelab.doctor.text import show

    if system and (trial or image):
        raise UsageError("--system looks at the machine, --trial and --image at engines: give one of them")
    with waiting("examining this machine") as say:
        if system:
            diagnosis = examine_machine()
        elif image is not None:
            diagnosis = examine_image(image, say if trial else None)
        else:
            diagnosis = examine(trial=trial, say=say)
    show(diagnosis, as_json=as_json)
    if not diagnosis.ready:
        raise typer.Exit(1)
