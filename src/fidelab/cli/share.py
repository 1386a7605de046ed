"""``fidelab share``: receipts, leaderboards and mirrors: what leaves a run for others."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import UNDECIDED, command_line, exit_on, note, print_json, show_study

if TYPE_CHECKING:
    from fidelab.results.record import Report

app = Commands(help="Publish verifiable results, verify those of others, rank runs, mirror runs to trackers.")


@app.command()
def publish(
    run_dir: options.RunDir,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The receipt; a file that is not there yet.")
    ],
    supersedes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A receipt that this one corrects.", show_default=False)
    ] = None,
    because: Annotated[str, typer.Option(help="Why it is corrected.", show_default=False)] = "",
) -> None:
    """Write a run's receipt: its figures and the hashes of its captures, as JSON lines that others can verify.

    Plots, texts and folders stay out of it. Receipts are never replaced: a correction names what it supersedes.

    [bold]Examples[/bold]

      fidelab share publish latest -o receipt.jsonl

      fidelab share publish latest -o new.jsonl --supersedes old.jsonl --because "…"
    """
    from fidelab.core.errors import UsageError
    from fidelab.ledger.receipt import publish as write
    from fidelab.results.store import RunFolder

    if (supersedes is None) != (not because):
        raise UsageError("--supersedes FILE and --because TEXT go together")
    print(write(RunFolder.open(run_dir.absolute()), out, supersedes=supersedes, because=because))


_VERDICTS = {"verified": "verified", "consistent": "consistent, not verified", "wrong": "wrong"}


@app.command()
def verify(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="What fidelab share publish wrote.")],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Its run, with captures. \\[default: the run of this name in runs, if it is there]",
            show_default=False,
            callback=options.find_run,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check receipts; exit with 1 where one was altered, contradicts itself, or is not what the captures give.

    Where the run is at hand, all figures are computed again from its captures, without an engine. Where it is not,
    a receipt is consistent at best, and the exit code is 3.

    [bold]Examples[/bold]

      fidelab share verify receipt.jsonl

      fidelab share verify receipt.jsonl --run runs/20260101-120000-smollm2-135m
    """
    from fidelab.core.errors import UsageError
    from fidelab.ledger import receipt as ledger
    from fidelab.run.conduct import recompute

    if run is not None and len(receipts) > 1:
        raise UsageError("--run is the run of one receipt: verify the others by themselves")
    found = [ledger.verify(path, lambda *given: recompute(*given).report, run) for path in receipts]
    heads = [one.receipt.head for one in found]
    corrected = {
        head.supersedes.hash: one.receipt.path
        for one, head in zip(found, heads, strict=True)
        if head is not None and head.supersedes is not None
    }
    entries = []
    for one, head in zip(found, heads, strict=True):
        path, checked = one.receipt.path, one.recomputed
        remarks = [*one.remarks]
        if (later := corrected.get(one.receipt.hash or "")) is not None:
            remarks.append(f"it is superseded by {later}")
        entries.append(
            {
                "receipt": str(path),
                "run_id": None if head is None else head.run_id,
                "hash": one.receipt.hash,
                "verdict": one.verdict,
                "faults": list(one.faults),
                "recomputed": checked,
                "remarks": remarks,
            }
        )
        if as_json:
            continue
        again = "" if checked is None else f", {checked:,} numbers computed again from captures"
        print(f"{path}: {_VERDICTS[one.verdict]}: {len(one.receipt.lines)} lines{again}")
        for line in remarks:
            print(f"  {line}")
    if as_json:
        print_json({"receipts": entries})
    exit_on([f"{one.receipt.path}: {fault}" for one in found for fault in one.faults])
    if any(one.verdict != "verified" for one in found):
        raise typer.Exit(UNDECIDED)


@app.command()
def leaderboard(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            help="Run folders, report.json files or receipts (.jsonl); or a folder of runs: all of them.",
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
    by: Annotated[str, typer.Option(help="The axis or bench by whose first figure arms are ranked.")] = "kld",
    as_json: options.Json = False,
) -> None:
    """Rank the arms of many runs: in one table only what was measured alike, ties shown as ties.

    Of receipts, one that another one corrects is named as superseded, and not ranked.

    [bold]Examples[/bold]

      fidelab share leaderboard runs receipts/*.jsonl -o leaderboard.html

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
    reports, superseded = _current(runs)
    study = rank(reports, BENCH + by if by in BENCHES.names() else by, superseded, command_line())
    if out is not None:
        print(write_atomically(out, faces[out.suffix.lower()](study)))
    else:
        show_study(study, None, as_json)


def _current(paths: list[Path]) -> tuple[list[Report], list[tuple[Report, str]]]:
    """The reports of runs and receipts, and those that a receipt among them corrects, with a line that says so.

    A run's own folder counts as corrected, too, where the correction is of another run.
    """
    from fidelab.ledger.receipt import read_receipt

    receipts = [read_receipt(path) for path in paths if path.suffix == ".jsonl"]
    found = [(one.hash, one.report()) for one in receipts]
    found += [(None, report) for report in _reports([path for path in paths if path.suffix != ".jsonl"])]
    corrected: dict[str | None, str] = {}
    for one in receipts:
        if one.head is not None and (former := one.head.supersedes) is not None:
            why = f"superseded by receipt {(one.hash or '')[:12]} of {one.head.run_id}: {former.reason}"
            corrected[former.hash] = why
            if former.run_id != one.head.run_id:
                corrected[former.run_id] = why
    current: list[Report] = []
    superseded: list[tuple[Report, str]] = []
    for key, report in found:
        if (correction := corrected.get(key or report.run_id)) is None:
            current.append(report)
        else:
            superseded.append((report, correction))
    return current, superseded


def _reports(paths: list[Path]) -> Iterator[Report]:
    """The reports of runs, and of all runs in folders; each once.

    Raises:
        InputError: one that was named is none; of those in a folder, damaged and unfinished ones are left out.
    """
    from fidelab.core.errors import InputError
    from fidelab.results.baselines import read_run
    from fidelab.results.store import CONFIG, REPORT, find_run

    seen: set[Path] = set()
    for path in map(find_run, paths):
        inside = sorted(path.glob(f"*/{REPORT}")) if path.is_dir() and not (path / CONFIG).is_file() else []
        for file in inside or [path / REPORT if path.is_dir() and (path / REPORT).is_file() else path]:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                yield read_run(file)
            except InputError as error:
                if not inside:
                    raise
                note(f"fidelab: left out: {error}")


@app.command()
def reference(
    run_dir: options.RunDir,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help="A new folder, or hf://owner/name.")],
    other: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="A run of the same reference on another machine: the pack says how far the two are apart.",
            show_default=False,
            callback=options.find_run,
        ),
    ] = None,
) -> None:
    """Pack a run's reference, so that others compare with it and need not run it.

    The pack holds token windows, saved outputs, the output head and what they were made with.
    fidelab compare MODEL --reference PLACE takes it.

    [bold]Examples[/bold]

      fidelab share reference latest --to smollm2-reference

      fidelab share reference latest --to hf://owner/smollm2-reference
    """
    from fidelab.results.store import RunFolder
    from fidelab.run.packing import share_reference

    beside = None if other is None else RunFolder.open(other.absolute())
    print(share_reference(RunFolder.open(run_dir.absolute()), to, beside))


class _Tracker(StrEnum):
    WANDB = "wandb"
    TRACKIO = "trackio"


@app.command()
def mirror(
    run_dir: options.RunDir,
    to: Annotated[_Tracker, typer.Option("--to", help="wandb (Weights & Biases) or trackio.")],
    project: Annotated[str, typer.Option(help="The project there.")] = "fidelab",
) -> None:
    """Copy a finished run to an experiment tracker: figures with intervals, verdicts, provenance, tables, the page.

    Where to, and whether over the network, is up to the tracker's own variables (WANDB_MODE, TRACKIO_DIR).

    [bold]Examples[/bold]

      fidelab share mirror latest --to trackio

      WANDB_MODE=offline fidelab share mirror latest --to wandb --project kv
    """
    from fidelab.ledger.mirror import mirror as write
    from fidelab.results.store import RunFolder

    print(write(RunFolder.open(run_dir.absolute()), to.value, project))
