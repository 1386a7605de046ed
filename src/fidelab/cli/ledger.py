"""``fidelab runs``, ``publish``, ``verify``: all runs of a folder, and what leaves one of them for others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options
from fidelab.cli.commands import Commands
from fidelab.cli.output import UNDECIDED, command_line, exit_on, note, open_console, print_json, show_study

if TYPE_CHECKING:
    from fidelab.ledger.index import LedgerRow
    from fidelab.results.record import Report

app = Commands(help="List, show and clean up runs.")


@app.command("list")
@options.expand_options
def list_runs(
    *,
    model: Annotated[str | None, typer.Option(help="Only of models with this in their names.")] = None,
    engine: Annotated[str | None, typer.Option(help="Only with an arm on this engine.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only from this day or time on: 2026-01-31, or 7d, 12h before now."),
    ] = None,
    runs: options.RunsOptions,
    as_json: options.Json = False,
) -> None:
    """One line per run, the latest first: what was compared, how it ended, its answer, its size with captures.

    [bold]Example[/bold]

      fidelab runs list --model qwen --engine vllm --since 30d
    """
    from fidelab.ledger import index

    earliest = None if since is None else _moment(since)
    rows = [
        row
        for row in index.list_runs(runs.output_dir)
        if (model is None or model.lower() in row.model.lower())
        and (engine is None or engine in row.engines)
        and (earliest is None or (row.started is not None and row.started >= earliest))
    ]
    if as_json:
        print_json({"runs": [_entry(row) for row in rows]})
        return
    if not rows:
        note(f"fidelab: there is no such run in {runs.output_dir}")
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("run", "started (UTC)", "model", "reference", "arms", "engine", "status", "verdicts", "recommended"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_plain, _cells(row)))
    open_console(400).print(table)


@app.command()
def show(run_dir: options.RunDir, as_json: options.Json = False) -> None:
    """What is known of one run: command, arms, verdicts, captures, and on what it was made.

    [bold]Example[/bold]

      fidelab runs show latest
    """
    from fidelab.ledger.index import provenance, read_row

    row = read_row(run_dir)
    made = provenance(run_dir)
    if as_json:
        print_json({**_entry(row), "provenance": made})
        return
    held, size = row.held(), _mebibytes(row.bytes)
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
        "captures": f"{_mebibytes(sum(held.values()))} in {len(held)} of {len(row.captures)}, shared with other runs",
        **made,
    }
    for name, value in facts.items():
        if value not in ("", None, {}, []):
            print(f"{name:<24}  {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")


@app.command()
@options.expand_options
def gc(
    *,
    older_than: Annotated[float, typer.Option(help="Days since a run was started.", show_default=False)],
    remove: Annotated[bool, typer.Option("--remove", help="Remove them; without it, they are only named.")] = False,
    runs: options.RunsOptions,
) -> None:
    """Name, and with --remove delete, the captures that only finished runs of a certain age refer to.

    Reports, pages and settings stay; such a run cannot be scored again, but run again. Captures of runs that were
    stopped, and those that a younger run shares, stay. While a run is being written, nothing is removed.
    """
    from fidelab.ledger.index import collect_captures

    removed, concerned = collect_captures(runs.output_dir, older_than, dry_run=not remove)
    for path, size in removed:
        print(f"{'removed' if remove else 'would remove'} {path} ({_mebibytes(size)})")
    for name in concerned:
        print(f"{name} {'cannot' if remove else 'could not'} be scored again")
    print(f"{_mebibytes(sum(size for _, size in removed))} in {len(removed)} places")
    if removed and not remove:
        note("fidelab: nothing was removed; do so with --remove")


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

      fidelab runs mirror latest --to trackio

      WANDB_MODE=offline fidelab runs mirror latest --to wandb --project kv
    """
    from fidelab.ledger.mirror import mirror as write
    from fidelab.results.store import RunFolder

    print(write(RunFolder.open(run_dir.absolute()), to.value, project))


def _entry(row: LedgerRow) -> dict[str, Any]:
    held = row.held()
    return {
        **vars(row),
        "captures": {path: held.get(path) for path in row.captures},
        "capture_bytes": sum(held.values()),
    }


def _cells(row: LedgerRow) -> tuple[str, ...]:
    verdicts = ", ".join(f"{name} {verdict}" for name, verdict in row.verdicts.items())
    return (
        row.path,
        row.created[:16].replace("T", " "),
        row.model,
        row.reference,
        str(len(row.arms)) if row.arms else "",
        ", ".join(row.engines),
        row.status if row.kind == "run" else f"{row.status} ({row.kind})",
        verdicts if len(row.arms) <= 4 else f"{verdicts[:60]}…",
        row.recommended,
        _mebibytes(row.bytes + sum(row.held().values())),
    )


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _moment(text: str) -> datetime:
    """``7d``, ``12h``, a day or a time; without a zone it is UTC, as are the times that are listed.

    Raises:
        UsageError: it is none of these.
    """
    from fidelab.core.errors import UsageError

    if match := re.fullmatch(r"(\d{1,5})([dh])", text.strip()):
        amount = int(match[1])
        return datetime.now(UTC) - (timedelta(days=amount) if match[2] == "d" else timedelta(hours=amount))
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"--since {text!r}: write a day as 2026-01-31, a time as 2026-01-31T12:00, or 7d or 12h"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# ------------------------------------------------------------------------------------------------------- receipts


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

      fidelab publish latest -o receipt.jsonl

      fidelab publish latest -o new.jsonl --supersedes old.jsonl --because "…"
    """
    from fidelab.core.errors import UsageError
    from fidelab.ledger.receipt import publish as write
    from fidelab.results.store import RunFolder

    if (supersedes is None) != (not because):
        raise UsageError("--supersedes FILE and --because TEXT go together")
    print(write(RunFolder.open(run_dir.absolute()), out, supersedes=supersedes, because=because))


_VERDICTS = {"verified": "verified", "consistent": "consistent, not verified", "wrong": "wrong"}


def verify(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="What fidelab publish wrote.")],
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

      fidelab verify receipt.jsonl

      fidelab verify receipt.jsonl --run runs/20260101-120000-smollm2-135m
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


# ----------------------------------------------------------------------------------------- leaderboards and exports


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

      fidelab leaderboard runs receipts/*.jsonl -o leaderboard.html

      fidelab leaderboard runs/a runs/b --by benches.decode
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


class _ExportFormat(StrEnum):
    LM_EVAL = "lm-eval"
    MARKDOWN = "markdown"
    HUB = "hub"


def export(
    run_dir: options.RunDir,
    form: Annotated[
        _ExportFormat,
        typer.Option(
            "--format",
            help="lm-eval (JSON), markdown (for a model card), hub (a model card with its metadata).",
        ),
    ],
    arm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of lm-eval and hub: the arm. \\[default: the recommended or the only one]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="A file; of hub a folder. \\[default: printed]"),
    ] = None,
) -> None:
    """Write a run's figures in the form of another tool.

    [bold]Examples[/bold]

      fidelab export latest --format lm-eval --arm k16v8 -o results.json

      fidelab export latest --format hub -o card
    """
    from fidelab.core.errors import UsageError
    from fidelab.report.exports import choose_arm, hub_files, lm_eval_results
    from fidelab.results.baselines import read_run
    from fidelab.results.record import write_atomically

    report = read_run(run_dir)
    match form:
        case _ExportFormat.MARKDOWN:
            if arm is not None:
                raise UsageError("--arm: the section for a model card is of all arms; leave it out")
            text = report.to_markdown()
        case _ExportFormat.LM_EVAL:
            text = json.dumps(lm_eval_results(report, choose_arm(report, arm)), indent=2, ensure_ascii=False) + "\n"
        case _ExportFormat.HUB:
            _write_files(hub_files(report, choose_arm(report, arm)), out)
            return
    if out is None:
        sys.stdout.write(text)
    else:
        print(write_atomically(out, text))


def _write_files(files: dict[str, str], folder: Path | None) -> None:
    """Files of a form that can be several; none is replaced.

    Raises:
        UsageError: several are to be printed, or one is there already.
    """
    from fidelab.core.errors import OutputError, UsageError
    from fidelab.results.record import write_atomically

    if folder is None:
        if len(files) > 1:
            raise UsageError(f"these are {len(files)} files: name a folder with -o")
        sys.stdout.write(next(iter(files.values())))
        return
    for name in files:
        if (folder / name).exists():
            raise UsageError(f"{folder / name} exists and is not replaced: name another folder with -o")
    for name, text in files.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be made a folder: {error.strerror or error}") from error
        print(write_atomically(folder / name, text))
