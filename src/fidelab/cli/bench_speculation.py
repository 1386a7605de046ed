"""``fidelab bench speculation``: do quantization and speculative decoding multiply."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli.options import Json
from fidelab.cli.output import command_line, exit_on, show_study


def speculation(
    plain: Annotated[
        str, typer.Option(metavar="RUN", help="Run with neither (folder or report.json; RUN:NAME picks one).")
    ],
    quantized: Annotated[str, typer.Option(metavar="RUN", help="Run with quantization only.")],
    speculative: Annotated[str, typer.Option(metavar="RUN", help="Run with speculation only.")],
    both: Annotated[str, typer.Option(metavar="RUN", help="Run with both.")],
    as_json: Json = False,
) -> None:
    """Test whether the speed-ups of quantization and speculative decoding multiply.

    The ratio is S_both / (S_quantized · S_speculative), where S is the speed-up over --plain. Below 0.9 the speed-ups
    overlap, above 1.1 they reinforce each other. If the server's counters do not show whether it speculated, there is
    no ratio and the exit code is 3.

    [bold]Example[/bold]

      fidelab bench speculation --plain a --quantized b --speculative c --both d
    """
    from fidelab.studies.composition import compose_runs

    where = {"plain": plain, "quantized": quantized, "speculative": speculative, "both": both}
    study = compose_runs(where, command_line())
    show_study(study, None, as_json)
    ratios = [row for row in study.rows if row.at["part"] == "together"]
    if missing := sum(not row.measured for row in ratios):
        exit_on([], [f"{missing} of {len(ratios)} cells have no ratio: a run was not of the named kind"])
