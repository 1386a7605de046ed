"""``fidelab runs``: list the runs of a folder, or show one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import note, open_console, print_json, say_fact

if TYPE_CHECKING:
    from fidelab.ledger.index import LedgerRow
    from fidelab.report.runs import RunRow

app = Commands(help="List and show runs.")


@app.command("list")
@options.expand_options
def list_runs(
    runs: options.RunsOptions,
    figures: Annotated[
        bool, typer.Option("--figures", help="A line per configuration: KLD, same top token, cache size, speed.")
    ] = False,
    as_csv: options.Csv = False,
    as_json: options.Json = False,
) -> None:
    """List runs, newest first, with status, result and size, or with the figures of each configuration.

    [bold]Examples[/bold]

      fidelab runs list --figures

      fidelab runs list --csv > runs.csv
    """
    from fidelab.core.errors import UsageError
    from fidelab.ledger import index

    if as_json and (figures or as_csv):
        raise UsageError(f"--json and {'--csv' if as_csv else '--figures'}: name one")
    rows = index.list_runs(runs.output_dir)
    if (figures or as_csv) and rows:
        _print_figures(_figures([(runs.output_dir / row.path, row) for row in rows]), as_csv)
        return
    if as_json:
        print_json({"runs": [_entry(row) for row in rows]})
        return
    if not rows:
        note(f"fidelab: there is no run in {runs.output_dir}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("run", "engine", "reference", "status", "recommended"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for row in rows:
        # Cells that fit into 80 columns; `--json` and `runs show` have the rest
        status = row.status if row.kind == "run" else f"{row.status} ({row.kind})"
        size = _mebibytes(row.bytes + sum(row.existing_captures().values()))
        cells = (row.path, ", ".join(row.engines), row.reference, status, row.recommended, size)
        table.add_row(*map(Text, cells))
    open_console().print(table)


@app.command()
@options.expand_options
def page(
    *,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN_DIR", help="Run folders. \\[default: all in --output-dir]")
    ] = None,
    runs: options.RunsOptions,
    output: options.PageFile = Path("runs.html"),
) -> None:
    """Write one page over several runs: a table of figures, and the charts of their benches.

    [bold]Examples[/bold]

      fidelab runs page -o runs.html

      fidelab runs page runs/a runs/b
    """
    from fidelab.core.errors import InputError
    from fidelab.ledger import index
    from fidelab.report.runs import write_runs

    if folders:
        places = [options.finished(folder) for folder in folders]
        rows = _figures([(place, index.read_row(place)) for place in places])
    else:
        rows = _figures([(runs.output_dir / row.path, row) for row in index.list_runs(runs.output_dir)])
    if not rows:
        raise InputError("none of these runs has figures: name runs of compare, bench or eval")
    print(write_runs(rows, output))


def _figures(runs: Sequence[tuple[Path, LedgerRow]]) -> list[RunRow]:
    """Return the figures of runs (folder, row) that have a report; others are counted in a note."""
    from fidelab.core.errors import FidelabError
    from fidelab.report.runs import rows_of
    from fidelab.results.record import Report
    from fidelab.results.store import REPORT

    found: list[RunRow] = []
    left: dict[str, int] = {}
    for place, row in runs:
        try:
            found += rows_of(row.path, Report.from_json(place / REPORT))
        except FidelabError:
            why = row.status if row.status != "ok" else f"{row.kind}, another kind"
            left[why] = left.get(why, 0) + 1
    for why, count in left.items():
        note(f"fidelab: {count} run{'s' if count > 1 else ''} without figures ({why})")
    return found


def _print_figures(rows: Sequence[RunRow], as_csv: bool) -> None:
    from fidelab.report.runs import print_runs, runs_csv

    if as_csv:
        print(runs_csv(rows), end="")
        return
    print_runs(rows, open_console())


@app.command()
def show(run_dir: options.AnyRunDir, as_json: options.Json = False) -> None:
    """Show a run's command, configurations, verdicts, saved outputs and machine.

    [bold]Example[/bold]

      fidelab runs show latest
    """
    from fidelab.ledger.index import provenance, read_row

    row = read_row(run_dir)
    made = provenance(run_dir)
    if as_json:
        print_json({**_entry(row), "provenance": made})
        return
    held, size = row.existing_captures(), _mebibytes(row.bytes)
    facts = {
        "run": str(run_dir),
        "kind": row.kind,
        "started": row.created or "not known",
        "model": row.model,
        "reference": row.reference,
        "status": f"{row.status} ({row.problem})" if row.problem else row.status,
        **{f"verdict of {name}": verdict for name, verdict in row.verdicts.items()},
        "recommended": row.recommended,
        "folder": size,
        "saved outputs": f"{_mebibytes(sum(held.values()))} in {len(held)} of {len(row.captures)}, shared by runs",
        **_together(made),
    }
    for name, value in facts.items():
        if value not in ("", None, {}, []):
            text = value if isinstance(value, str) else _in_words(value)
            say_fact(name, text, 26, command=name == "command")


def _together(made: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance as a screen shows it: memory in GiB, and configurations that ran alike once."""
    found: dict[str, Any] = {}
    alike: dict[str, list[str]] = {}  # facts → names
    for name, value in made.items():
        what, _, configuration = name.partition(" ")
        if name == "memory_bytes":
            found["memory"] = f"{value / 2**30:,.1f} GiB"
        elif what == "configuration":
            alike.setdefault(json.dumps(value, sort_keys=True), []).append(configuration)
        else:
            found[name.replace("_", " ")] = value
    for facts, names in alike.items():
        found[f"configuration{'s' if len(names) > 1 else ''} {', '.join(names)}"] = json.loads(facts)
    return found


def _in_words(value: Any) -> str:
    """Return plain data as ``name value, name value``."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {_in_words(inner)}" for name, inner in value.items() if inner not in ("", None, {}, [])
        )
    if isinstance(value, list):
        return " ".join(map(_in_words, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _entry(row: LedgerRow) -> dict[str, Any]:
    held = row.existing_captures()
    return {
        **vars(row),
        "captures": {path: held.get(path) for path in row.captures},
        "capture_bytes": sum(held.values()),
    }


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
