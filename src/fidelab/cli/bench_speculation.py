"""``fidelab bench speculation``: do quantization and speculative decoding multiply."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli.options import Json
from fidelab.cli.output import command_line, exit_on, show_study

_RUN = "a run's folder or its report.json, with :ARM behind it where that has several."


def speculation(
    plain: Annotated[str, typer.Option(metavar="RUN", help=f"Neither: {_RUN}")],
    quantized: Annotated[str, typer.Option(metavar="RUN", help="Quantized, without speculation.")],
    speculative: Annotated[str, typer.Option(metavar="RUN", help="With speculation, not quantized.")],
    both: Annotated[str, typer.Option(metavar="RUN", help="Quantized, with speculation.")],
    as_json: Json = False,
) -> None:
    """Say whether quantization and speculative decoding multiply, from four measured arms.

    The ratio is S_both / (S_quantized · S_speculative), S the output rate over the plain arm's: below 0.9 the two are
    worth less together than each by itself, above 1.1 more.  Whether an arm speculated is read from what its server
    counted; where that is not known there is no ratio, and the exit code is 3.

    [bold]Example[/bold]

      fidelab bench speculation --plain a --quantized b --speculative c --both d
    """
    from fidelab.studies.composition import compose_runs

    where = {"plain": plain, "quantized": quantized, "speculative": speculative, "both": both}
    study = compose_runs(where, command_line())
    show_study(study, None, as_json)
    ratios = [row for row in study.rows if row.at["part"] == "together"]
    if missing := sum(not row.measured for row in ratios):
        exit_on([], [f"{missing} of {len(ratios)} cells have no ratio: an arm was not what it should have been"])
