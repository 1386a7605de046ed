"""``fidelab share``: leaderboards and packed references."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import command_line, note, show_study

if TYPE_CHECKING:
    from fidelab.results.record import Report

app = Commands(help="Rank results. Pack references for others.")


@app.command()
def leaderboard(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            help="Run folders, report.json files or a folder of runs.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="leaderboard.html or .json. \\[default: printed]",
        ),
    ] = None,
    by: Annotated[str, typer.Option(help="Test or benchmark to rank by.")] = "kld",
    as_json: options.Json = False,
) -> None:
    """Rank the configurations of many runs. Only comparable measurements share a table.

    [bold]Examples[/bold]

      fidelab share leaderboard runs -o leaderboard.html

      fidelab share leaderboard runs/a runs/b --by benches.decode
    """
    from fidelab.bench import BENCHES
    from fidelab.core.errors import UsageError
    from fidelab.report.study import study_html
    from fidelab.results.record import write_atomically
    from fidelab.results.study import Study
    from fidelab.results.table import BENCH
    from fidelab.studies.leaderboard import rank

    faces = {".html": study_html, ".json": Study.to_json}
    if out is not None and (as_json or out.suffix.lower() not in faces):
        raise UsageError(f"-o {out}: write a name that ends in .html or .json, without --json")
    study = rank(_reports(runs), BENCH + by if by in BENCHES.names() else by, command_line())
    if out is not None:
        print(write_atomically(out, faces[out.suffix.lower()](study)))
    else:
        show_study(study, None, as_json)


def _reports(paths: list[Path]) -> list[Report]:
    """Return the reports of runs, and of all runs in folders, each once.

    Raises:
        InputError: If a named path is not a run.  Damaged and unfinished runs in a folder are left out.
    """
    from fidelab.core.errors import InputError
    from fidelab.results.store import CONFIG, REPORT, find_run, read_run

    seen: set[Path] = set()
    reports = []
    for path in map(find_run, paths):
        inside = sorted(path.glob(f"*/{REPORT}")) if path.is_dir() and not (path / CONFIG).is_file() else []
        for file in inside or [path / REPORT if path.is_dir() and (path / REPORT).is_file() else path]:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                reports.append(read_run(file))
            except InputError as error:
                if not inside:
                    raise
                note(f"fidelab: left out: {error}")
    return reports


@app.command()
def reference(
    run_dir: options.RunDir,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help="A new folder, or hf://owner/name.")],
    other: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Run of the same reference on another machine. Their difference goes into the pack.",
            show_default=False,
            callback=options.find_run,
        ),
    ] = None,
) -> None:
    """Pack a run's reference, so that others can compare with it without running it.

    The pack holds token windows, saved outputs and the output head.
    Use it with fidelab compare MODEL --reference PLACE.

    [bold]Examples[/bold]

      fidelab share reference latest --to smollm2-reference

      fidelab share reference latest --to hf://owner/smollm2-reference
    """
    from fidelab.results.store import RunFolder
    from fidelab.run.packing import share_reference

    beside = None if other is None else RunFolder.open(other.absolute())
    print(share_reference(RunFolder.open(run_dir.absolute()), to, beside))
