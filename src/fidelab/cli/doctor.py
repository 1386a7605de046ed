"""``fidelab doctor``: check this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import waiting

if TYPE_CHECKING:
    from fidelab.doctor import DoctorCheck


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
    if not system:
        diagnosis = replace(diagnosis, checks=(*diagnosis.checks, _defaults()))
    show(diagnosis, as_json=as_json)
    if not diagnosis.ready:
        raise typer.Exit(1)


def _defaults() -> DoctorCheck:
    """Return the user's own defaults as a finding."""
    from fidelab.config.user import USER_OPTIONS, config_file, user_defaults
    from fidelab.core.errors import ConfigError
    from fidelab.doctor import DoctorCheck

    path = config_file()
    try:
        given = user_defaults()
    except ConfigError as error:
        return DoctorCheck("defaults", "folders", "broken", str(error), f"correct or remove {path}")
    if not given:
        return DoctorCheck("defaults", "folders", "ok", f"none; {path} may set {', '.join(USER_OPTIONS)}")
    return DoctorCheck(
        "defaults", "folders", "ok", f"{path}: {', '.join(f'{name} {value}' for name, value in given.items())}"
    )
