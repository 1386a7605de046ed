"""``fidelab runs``: list the runs of a folder, or show one of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import note, open_console, print_json

if TYPE_CHECKING:
    from fidelab.ledger.index import LedgerRow

app = Commands(help="List and show runs.")


@app.command("list")
@options.expand_options
def list_runs(runs: options.RunsOptions, as_json: options.Json = False) -> None:
    """List runs, newest first, with status, result and size.

    [bold]Example[/bold]

      fidelab runs list
    """
    from fidelab.ledger import index

    rows = index.list_runs(runs.output_dir)
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
    open_console(400).print(table)


@app.command()
def show(run_dir: options.RunDir, as_json: options.Json = False) -> None:
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
        **made,
    }
    for name, value in facts.items():
        if value not in ("", None, {}, []):
            print(f"{name:<24}  {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")


def _entry(row: LedgerRow) -> dict[str, Any]:
    held = row.existing_captures()
    return {
        **vars(row),
        "captures": {path: held.get(path) for path in row.captures},
        "capture_bytes": sum(held.values()),
    }


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
