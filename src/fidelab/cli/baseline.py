"""``fidelab baseline``: reports kept under a name, for ``fidelab check --baseline``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli.commands import Commands
from fidelab.cli.options import Json, RunDir
from fidelab.cli.output import note

if TYPE_CHECKING:
    from fidelab.results.baselines import Baselines

baseline = Commands(help="Keep reports under a name, to compare later runs with.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The baseline's name.")]
Folder = Annotated[Path, typer.Option("--dir", help="Folder of baselines; may be committed.")]
_DIR = Path("baselines")


@baseline.command()
def save(
    name: Name,
    run_dir: RunDir,
    folder: Folder = _DIR,
    force: Annotated[bool, typer.Option("--force", help="Replace a baseline of this name.")] = False,
) -> None:
    """Keep a run's report as a baseline.

    [bold]Example[/bold]

      fidelab baseline save main runs/20260101-120000-smollm2-135m
    """
    from fidelab.results.baselines import Baselines

    print(Baselines(folder).save(name, run_dir, force=force))


@baseline.command("list")
def list_baselines(folder: Folder = _DIR, as_json: Json = False) -> None:
    """One line per baseline: name, day, metrics and arms; or what is wrong with its file."""
    from fidelab.results.baselines import Baselines

    entries = [_entry(Baselines(folder), name) for name in Baselines(folder).names()]
    if as_json:
        print(json.dumps({"baselines": entries}, indent=2, ensure_ascii=False))
        return
    for entry in entries:
        print(f"{entry['name']:<20}  {_described(entry)}")
    if not entries:
        note(f"fidelab: there is no baseline in {folder}")


def _entry(store: Baselines, name: str) -> dict[str, Any]:
    """One baseline as data; a damaged one is listed with its problem."""
    from fidelab.core.errors import FidelabError
    from fidelab.results.table import tabulate

    try:
        _, report = store.read(name)
    except FidelabError as error:
        return {"name": name, "problem": str(error)}
    metrics = tabulate(report).metrics
    arms = list(dict.fromkeys(key.arm for key in metrics))
    facts = {"created": report.created.isoformat(), "run_id": report.run_id, "model": report.reference.model}
    return {"name": name, **facts, "arms": arms, "metrics": len(metrics)}


def _described(entry: Mapping[str, Any]) -> str:
    from fidelab.results.numbers import one_line

    if "problem" in entry:
        return one_line(f"damaged: {entry['problem']}")
    return one_line(f"{entry['created'][:10]}  {entry['metrics']:>4} metrics of {', '.join(entry['arms'])}")


@baseline.command()
def remove(name: Name, folder: Folder = _DIR) -> None:
    """Remove a baseline."""
    from fidelab.results.baselines import Baselines

    print(f"removed {Baselines(folder).remove(name)}")
