"""``fidelab share``: receipts and leaderboards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import UNDECIDED, command_line, exit_on, note, print_json, show_study

if TYPE_CHECKING:
    from fidelab.results.record import Report

app = Commands(help="Publish, verify and rank results. Pack references for others.")


@app.command()
def publish(
    run_dir: options.RunDir,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Output file. It must not exist.")],
) -> None:
    """Write a run's verifiable result: its figures and the hashes of its saved outputs.

    It contains no plots, texts or paths.

    [bold]Examples[/bold]

      fidelab share publish latest -o receipt.json
    """
    from fidelab.ledger.receipt import publish as write
    from fidelab.results.store import RunFolder

    print(write(RunFolder.open(run_dir.absolute()), out))


_VERDICTS = {"verified": "verified", "consistent": "consistent, not verified", "wrong": "wrong"}


@app.command()
def verify(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="File written by fidelab share publish.")],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Run folder with saved outputs. \\[default: the run of this name in runs, if it is there]",
            show_default=False,
            callback=options.find_run,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Verify published results against their hashes and saved outputs.

    With the run, all figures are recomputed from its saved outputs, without an engine. Without it, only consistency can
    be checked, and the exit code is 3. Exit code 1 means that a result was altered, is contradictory or differs.

    [bold]Examples[/bold]

      fidelab share verify receipt.json

      fidelab share verify receipt.json --run runs/20260101-120000-smollm2-135m
    """
    from fidelab.core.errors import UsageError
    from fidelab.ledger import receipt as ledger
    from fidelab.run.pipeline import recompute

    if run is not None and len(receipts) > 1:
        raise UsageError("--run is the run of one receipt: verify the others by themselves")
    found = [ledger.verify(path, lambda *given: recompute(*given).report, run) for path in receipts]
    entries = []
    for one in found:
        entries.append(
            {
                "receipt": str(one.path),
                "run_id": one.receipt.report.run_id,
                "sha256": one.receipt.sha256,
                "verdict": one.verdict,
                "faults": list(one.faults),
                "recomputed": one.recomputed,
                "remark": one.remark,
            }
        )
        if as_json:
            continue
        said = one.remark if one.recomputed is None else f"{one.recomputed:,} numbers computed again from saved outputs"
        print(": ".join(filter(None, (str(one.path), _VERDICTS[one.verdict], said))))
    if as_json:
        print_json({"receipts": entries})
    exit_on([f"{one.path}: {fault}" for one in found for fault in one.faults])
    if any(one.verdict != "verified" for one in found):
        raise typer.Exit(UNDECIDED)


@app.command()
def leaderboard(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            help="Run folders, report.json files, published results or a folder of runs.",
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

      fidelab share leaderboard runs receipts/*.json -o leaderboard.html

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
    """Return the reports of runs and receipts, and of all runs in folders, each once.

    Raises:
        InputError: If a named path is neither.  Damaged and unfinished runs in a folder are left out.
    """
    from fidelab.core.errors import InputError
    from fidelab.ledger.receipt import is_receipt, report_of
    from fidelab.results.store import CONFIG, REPORT, find_run, read_run

    seen: set[Path] = set()
    receipts = [path for path in paths if is_receipt(path)]
    reports = [report_of(path) for path in receipts]
    for path in map(find_run, (path for path in paths if path not in receipts)):
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
