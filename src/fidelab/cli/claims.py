"""``fidelab claims``: published figures, judged by arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import open_console

if TYPE_CHECKING:
    from fidelab.claims.checks import Judged

__all__ = ["claims"]


def claims(
    file: Annotated[
        Path | None, typer.Argument(help="Claims as YAML; without it those that come with fidelab.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Judge published claims by arithmetic: holds, underpowered, or cannot be right.

    [bold]Examples[/bold]

      fidelab claims

      fidelab claims ours.yaml --json
    """
    from fidelab.claims.checks import judge, read_claims, shipped_claims

    judged = [judge(claim) for claim in (shipped_claims() if file is None else read_claims(file))]
    if as_json:
        from fidelab.core import finite

        rows = [{**asdict(one), "claim": one.claim.model_dump(mode="json")} for one in judged]
        print(json.dumps(finite({"claims": rows}), indent=2, ensure_ascii=False))
    else:
        _show(judged)


def _show(judged: list[Judged]) -> None:
    from fidelab.report.text import literal, print_line, simple_table
    from fidelab.results.numbers import one_line

    console = open_console()
    table = simple_table()
    table.add_column("claim", overflow="fold")
    table.add_column("kind")
    table.add_column("verdict")
    for one in judged:
        table.add_row(*(literal(one_line(text), console) for text in (one.claim.name, one.claim.kind, one.verdict)))
    console.print(table)
    line = partial(print_line, console)
    for one in judged:
        line(f"{one_line(one.claim.name)}: {one.verdict}", style="bold")
        if one.claim.published:
            source = f" ({one_line(one.claim.source)})" if one.claim.source else ""
            line(f"  published: {one_line(one.claim.published)}{source}")
        for text in one.arithmetic:
            line(f"  - {one_line(text)}")
