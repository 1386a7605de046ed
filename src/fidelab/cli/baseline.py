"""``fidelab baseline`` and ``fidelab diff``: reports kept under a name, and the regression gate."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli.commands import Commands
from fidelab.cli.options import Json, RunDir
from fidelab.cli.output import exit_on, note, open_console

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


def diff(
    baseline: Annotated[
        str, typer.Argument(metavar="BASELINE", help="A baseline's name, a run's folder, a report.json, or 'latest'.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The same, of what is compared with it.")],
    folder: Folder = _DIR,
    max_slowdown: Annotated[
        str, typer.Option(help="Allowed of start-up, latencies, and the time that a rate stands for.")
    ] = "10%",
    max_memory_increase: Annotated[str, typer.Option(help="Allowed of bytes.")] = "5%",
    max_kld_increase: Annotated[str, typer.Option(help="Allowed of KL divergences: a percentage, or nats.")] = "10%",
    max_score_drop: Annotated[float, typer.Option(help="Allowed of scores and shares, in points of 100.")] = 1.0,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Pass although the run lacks metrics, or some must not be compared.")
    ] = False,
    full: Annotated[bool, typer.Option("--all", help="List unchanged metrics, too.")] = False,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
) -> None:
    """Compare a run with a baseline, metric by metric; exit with 1 where one regressed, with 3 where that is open.

    A change counts when it is certainly larger than allowed: by repeats, or by the intervals of axes. Only what was
    measured alike is compared; everything else is named. What is missing, must not be compared, or has intervals too
    wide to tell is open.

    [bold]Examples[/bold]

      fidelab diff main runs/20260102-120000-smollm2-135m --max-slowdown 5%

      fidelab diff runs/before runs/after --max-kld-increase 0.001 --markdown
    """
    from fidelab.core.errors import UsageError
    from fidelab.results.baselines import Baselines
    from fidelab.results.compare import compare
    from fidelab.results.diff_record import Thresholds

    if markdown and as_json:
        raise UsageError("--markdown and --json: name one")
    if not 0 <= max_score_drop <= 100:
        raise UsageError(f"--max-score-drop {max_score_drop:g}: write points between 0 and 100")
    kld, nats = _divergence(max_kld_increase)
    thresholds = Thresholds(
        slowdown=_percentage("--max-slowdown", max_slowdown),
        memory_increase=_percentage("--max-memory-increase", max_memory_increase),
        kld_increase=kld,
        kld_increase_nats=nats,
        score_drop=max_score_drop,
    )
    store = Baselines(folder)
    (old_name, old), (new_name, new) = store.read(baseline), store.read(run)
    changes = compare(old, new, thresholds, names=(old_name, new_name))
    if as_json:
        sys.stdout.write(changes.to_json())
    elif markdown:
        from fidelab.report.diff import render_diff_markdown

        sys.stdout.write(render_diff_markdown(changes, full=full))
    else:
        from fidelab.report.diff import render_diff

        render_diff(changes, open_console(), full=full)
    exit_on(changes.faults(), changes.undecided(allow_missing=allow_missing))


def _percentage(flag: str, text: str) -> float:
    """``10%`` → 0.1.

    Raises:
        UsageError: anything else.
    """
    from fidelab.core.errors import UsageError

    value = _number(text.strip().removesuffix("%")) if text.strip().endswith("%") else None
    if value is None:
        raise UsageError(f"{flag} {text!r}: write a percentage such as 10%")
    return value / 100


def _divergence(text: str) -> tuple[float, float]:
    """``10%`` → (0.1, 0); ``0.001`` → (0, 0.001)."""
    from fidelab.core.errors import UsageError

    if text.strip().endswith("%"):
        return _percentage("--max-kld-increase", text), 0.0
    nats = _number(text)
    if nats is None:
        raise UsageError(f"--max-kld-increase {text!r}: write a percentage such as 10%, or nats such as 0.001")
    return 0.0, nats


def _number(text: str) -> float | None:
    """A finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
