"""``fidelab bench speculation``: do quantization and speculative decoding multiply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli.options import Json
from fidelab.cli.output import exit_on, open_console

if TYPE_CHECKING:
    from fidelab.results.composition_record import Composition

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
    from fidelab.runs.speculation import compose_runs

    records = compose_runs({"plain": plain, "quantized": quantized, "speculative": speculative, "both": both})
    if as_json:
        data = [record.model_dump(mode="json") for record in records]
        print(json.dumps({"compositions": data}, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _show(records)
    if missing := sum(record.rho is None for record in records):
        exit_on([], [f"{missing} of {len(records)} cells have no ratio: an arm was not what it should have been"])


def _show(records: Sequence[Composition]) -> None:
    from fidelab.metrics.speculation import ARMS
    from fidelab.report.text import literal, print_line, simple_table
    from fidelab.results.numbers import one_line

    console = open_console()
    print_line(console, "output tok/s; how many times the plain arm's; tokens per verification of drafts", "bold")
    table = simple_table()
    for heading in ("context\noutput", "conc.\nrate", *ARMS, "ρ\n95%"):
        table.add_column(literal(heading, console), justify="right")
    table.add_column("together")
    for record in records:
        table.add_row(*(literal(cell, console) for cell in _row(record)))
    console.print(table)
    for name, where in records[0].arms.items():
        print_line(console, one_line(f"{name}: {where}"))
    for record in records:
        for flag in record.flags:
            text = one_line(f"{_cell(record)}{flag.text} ({flag.kind})")
            print_line(console, text, "red" if record.rho is None else "")


def _row(record: Composition) -> list[str]:
    """The row of one cell; a cell of the table holds several figures, one per line."""
    from fidelab.metrics.speculation import ARMS
    from fidelab.results.numbers import ABSENT, format_amount, format_ratio, format_tokens

    context, output = (ABSENT if n is None else format_tokens(n) for n in (record.context, record.output))
    rate = "" if record.request_rate is None else f"{record.request_rate:g}/s"
    plain = record.rates.get("plain")
    rates = []
    for arm in ARMS:
        tokens, length = record.rates.get(arm), record.acceptance_lengths.get(arm)
        times = format_ratio(tokens / plain if tokens and plain and arm != "plain" else None)
        rates.append(f"{format_amount(tokens)}\n{times}" + ("" if length is None else f"\n{length:.2f}"))
    rho = ABSENT if record.rho is None else f"{record.rho:.3f}"
    ci = "" if record.ci is None else f"{record.ci[0]:.3f}–{record.ci[1]:.3f}"
    limit = ABSENT if record.concurrency is None else f"{record.concurrency}"
    return [f"{context}\n{output}", f"{limit}\n{rate}", *rates, f"{rho}\n{ci}", record.kind]


def _cell(record: Composition) -> str:
    """The coordinates of the cell that a flag belongs to, as a prefix."""
    named = {"context": record.context, "output": record.output, "concurrency": record.concurrency}
    coordinates = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
    return f"{coordinates}: " if coordinates else ""
