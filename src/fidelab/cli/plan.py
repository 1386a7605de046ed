"""``fidelab plan``: how many windows or prompts a wanted precision takes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import duration, note, open_console

if TYPE_CHECKING:
    from fidelab.run.sample_size import Advice, SizeLine, SizePlan


def plan(
    run_dir: options.RunDir,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Half-width of the interval, in the test's unit (kld: nats, trajectory: points) or e.g. 5% of "
            "the estimate.",
            show_default=False,
        ),
    ] = None,
    margin: options.Margin = None,
    max_kld: options.MaxKLD = None,
    axis: Annotated[str, typer.Option(help="Test of the run, e.g. kld or trajectory.")] = "kld",
    as_json: options.Json = False,
) -> None:
    """Estimate the sample size for a precision or margin from a pilot run.

    [bold]Examples[/bold]

      fidelab plan runs/20260101-120000-smollm2-135m --precision 0.001

      fidelab plan runs/pilot --axis trajectory --precision 5

      fidelab plan runs/pilot --margin 0.5% --max-kld 0.005
    """
    from fidelab.run.sample_size import plan_size

    if sys.stderr.isatty():
        note("fidelab: scoring the run again from its captures")
    limits = {key: value for key, value in (("margin", margin), ("max_kld", max_kld)) if value is not None}
    size_plan = plan_size(run_dir, precision, axis, limits=limits)
    if as_json:
        print(json.dumps(asdict(size_plan), indent=2, ensure_ascii=False))
    else:
        _show(size_plan)


def _show(plan: SizePlan) -> None:
    from fidelab.report.cells import shared
    from fidelab.report.text import literal, print_line, simple_table
    from fidelab.results.numbers import one_line

    console = open_console()
    line = partial(print_line, console)
    certified = plan.asked is None
    what = "losses ruled out with probability 0.8" if certified else "95% intervals"
    line(f"{one_line(plan.run_id)}: {plan.axis}, {plan.items_now} {plan.items}; {what}")
    table = simple_table()
    table.add_column("arm", overflow="fold", max_width=30)
    figures = ("loss", "finds now", "margin") if certified else (plan.unit, "± now", "± asked")
    for heading in (*figures, "clusters\nnow", "clusters\nneeded", f"{plan.items}\nneeded"):
        table.add_column(literal(heading, console), justify="right")
    for entry in plan.lines:
        table.add_row(*(literal(cell, console) for cell in _row(entry, plan.unit)))
    console.print(table)
    for said in shared(dict.fromkeys((one_line(e.arm), one_line(e.reason)) for e in plan.lines if e.reason)):
        line(said)
    if plan.advice is None:
        if certified and any(entry.status == "failed" for entry in plan.lines):
            line("No sample size would confirm the others.")
        else:
            line(f"The run is {'large' if certified else 'precise'} enough: {plan.items_now} {plan.items} do.")
        return
    for text in _sentences(plan, plan.advice):
        line(text)
    command = plan.advice.command or f"fidelab compare … {plan.advice.flag} {plan.advice.items}"
    console.print(literal(f"  {command}", console), soft_wrap=True)  # not wrapped: a command is to be copied


def _row(line: SizeLine, unit: str) -> list[str]:
    from fidelab.metrics.equivalence import CLAIM_NAMES
    from fidelab.results.numbers import ABSENT, format_count, format_kld, format_score, one_line

    values = (line.estimate, line.half_width, line.precision)
    written = format_kld if unit == "nats" else format_score
    if line.quantity in ("mean", "excess"):
        name = one_line(line.arm) if line.quantity == "mean" else "  over control"
        figures = [written(value) for value in values]
    else:
        name = f"{one_line(line.arm)}: {CLAIM_NAMES.get(line.quantity, line.quantity)}"
        figures = [ABSENT if value is None else _loss(value, line.quantity) for value in values]
    if line.status == "needed":
        needs = [_up_to(line.clusters_needed, line.clusters_upper), _up_to(line.items_needed, line.items_upper)]
    else:
        needs = 2 * [ABSENT if line.status == "failed" else line.status]
    return [name, *figures, format_count(line.clusters), *needs]


def _loss(value: float, claim: str) -> str:
    from fidelab.results.numbers import format_kld, format_score

    return f"{format_kld(value)} nats" if claim == "mean_kl" else f"{format_score(100 * value)} points"


def _up_to(needed: int | None, upper: int | None) -> str:
    from fidelab.results.numbers import format_count

    return format_count(needed) + (f" (up to {format_count(upper)})" if upper != needed else "")


def _sentences(plan: SizePlan, advice: Advice) -> list[str]:
    n = _up_to(advice.items, advice.upper)
    span = " A cluster (document or block of windows) is taken to span as many windows as here."
    sentences = [
        f"About {n} {plan.items} are enough, assuming similar text; skewed costs make the upper figure "
        f"optimistic.{span if plan.source == 'text' else ''}"
    ]
    supply = advice.supply
    if supply is not None and supply.holds < advice.upper:
        remedy = "a longer --text" if plan.source == "text" else "--prompts FILE with more of them"
        if supply.name == "text default":
            remedy = "--text wikitext-2 or a longer file"
        advised = f": pass {remedy}; the spread of other configurations may differ" if advice.short else ""
        sentences.append(f"The {supply.name} holds {supply.holds:,} {plan.items}{advised}.")
    mib = advice.disk_bytes / 2**20
    cost = f"about {mib:,.{0 if mib >= 10 else 1}f} MiB of captures"
    if advice.seconds is not None:
        cost = f"about {duration(advice.seconds)} of capturing and {cost}"
    sentences.append(f"By the pilot's own figures, in proportion: {cost}.")
    return sentences
