"""``fidelab repeat``: the same experiment several times, and how far its scores spread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import command_line, exit_on, note, open_console

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment
    from fidelab.runs.repeat import AxisSpread, Judgement, Repeat
    from fidelab.runs.runner import Listener

_RUNS = 4
_GATES: dict[str, Judgement] = {"noisy": "NOISY", "unstable": "UNSTABLE"}
_STYLES = {"HEALTHY": "green", "NOISY": "yellow", "UNSTABLE": "bold red"}


def repeat(
    context: typer.Context,
    experiment: Annotated[
        Path | None, typer.Argument(help="Experiment file (YAML), or a run's folder.", show_default=False)
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help=f"How often to run it, at least 2. \\[default: {_RUNS}]", show_default=False)
    ] = None,
    overrides: options.Overrides = None,
    fail_on: Annotated[
        str | None,
        typer.Option(help="Exit with 1 where a candidate is this or worse: noisy, unstable.", show_default=False),
    ] = None,
    as_json: options.Json = False,
    resume_dir: Annotated[
        Path | None,
        typer.Option("--resume", metavar="REPEAT_DIR", help="Go on with a stopped repeat.", show_default=False),
    ] = None,
    trusted: options.Trusted = None,
) -> None:
    """Run an experiment several times from scratch and say how far its scores spread.

    HEALTHY: standard deviation of at most 1 point; NOISY: at most 3; UNSTABLE: more.

    [bold]Examples[/bold]

      fidelab repeat experiment.yaml --runs 4

      fidelab repeat runs/20260101-120000-smollm2-135m --fail-on noisy

      fidelab repeat --resume runs/repeats/20260101-120000-smollm2-135m
    """
    from fidelab.config.trust import Trust
    from fidelab.errors import UnknownNameError, UsageError
    from fidelab.runs.repeat import repeat_experiment, resume_repeat

    if fail_on is not None and fail_on not in _GATES:
        raise UnknownNameError("verdict of --fail-on", fail_on, _GATES)
    if resume_dir is not None:
        options.refuse_beside_resume(context, "repeat", ("fail_on", "as_json", "trusted"))
        result, folder = resume_repeat(resume_dir, watch=_watch, trust=Trust(trusted or ()))
    elif experiment is None:
        raise UsageError("name an experiment: fidelab repeat EXPERIMENT (or --resume REPEAT_DIR)")
    else:
        settings = _load(experiment, overrides or [], trusted or [])
        runs = _RUNS if runs is None else runs
        result, folder = repeat_experiment(settings, runs, command=command_line(), watch=_watch)
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        _show(result, folder)
    _gate(result, fail_on)


def _load(path: Path, overrides: list[str], trusted: list[Path]) -> Experiment:
    """An experiment file, or the settings of a run."""
    from fidelab.config.experiment import validate
    from fidelab.config.trust import load_trusted
    from fidelab.errors import UsageError
    from fidelab.results.store import RunFolder
    from fidelab.runs.repeat import REPEAT

    if (path / REPEAT).is_file():
        raise UsageError(f"{path} is a repeat; go on with it by: fidelab repeat --resume {path}")
    file = RunFolder.open(path).config if path.is_dir() else path
    return load_trusted(file, overrides, trusted, validate)


def _watch(number: int, runs: int) -> Listener:
    from fidelab.cli.progress import watcher

    note(f"fidelab: run {number} of {runs}")
    return watcher()


def _gate(result: Repeat, fail_on: str | None) -> None:
    """Exit with 1 where an arm failed or a candidate misses the gate; say why on standard error."""
    failures = {
        f"{spread.candidate} failed in run {lost.run} of {len(result.runs)}: {lost.reason}"
        for spread in result.spreads
        for lost in spread.lost
        if lost.status in ("failed", "not_engaged")
    }
    reaching = [] if fail_on is None else result.reaches(_GATES[fail_on])
    exit_on([*sorted(failures), *(f"{name} misses --fail-on {fail_on}" for name in reaching)])


def _show(result: Repeat, folder: Path) -> None:
    from fidelab.report.text import literal, print_line, print_path, simple_table, wrap_name
    from fidelab.results.numbers import one_line

    console = open_console()
    print_line(console, one_line(f"{result.repeat_id}: {len(result.runs)} runs"), "bold")
    table = simple_table()
    table.add_column("arm", overflow="fold", max_width=17)
    table.add_column("axis", overflow="fold", max_width=12)
    table.add_column("verdict")
    for heading in ("sd\npoints", "mean\nrange", "cost, nats\nsd, nats"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("scores of the runs", overflow="fold")
    for spread in result.spreads:
        name, axis, verdict, *rest = _row(spread)
        table.add_row(
            literal(wrap_name(name, 17), console),
            literal(axis, console),
            literal(verdict, console, _STYLES.get(spread.verdict or "", "")),
            *(literal(cell, console) for cell in rest),
        )
    console.print(table)
    for text in (*_lost(result), f"{result.sentence}."):
        print_line(console, one_line(text))
    print_path(console, "files", folder)


def _lost(result: Repeat) -> list[str]:
    """The missing scores, one line per candidate and reason."""
    places: dict[tuple[str, str], tuple[dict[str, None], dict[int, None]]] = {}
    for spread in result.spreads:
        for lost in spread.lost:
            axes, runs = places.setdefault((spread.candidate, lost.reason), ({}, {}))
            axes[spread.axis] = runs[lost.run] = None
    return [
        f"{name} lacks scores of {', '.join(axes)} in run{'s' * (len(runs) > 1)} {', '.join(map(str, runs))}: {reason}"
        for (name, reason), (axes, runs) in places.items()
    ]


def _row(spread: AxisSpread) -> list[str]:
    from fidelab.results.numbers import format_figure, format_kld, format_range, format_score, one_line

    score, nats = spread.score, spread.nats
    n_scored = len(score.values) - len(spread.lost)
    verdict = (spread.verdict or "not measurable") + ("\nrepeats exactly" if spread.exact else "")
    if spread.lost:
        verdict += f"\n{n_scored} of {len(score.values)} runs"
    scale = None if score.low is None or score.high is None else (score.low, score.high)
    return [
        one_line(spread.candidate),
        one_line(spread.axis),
        verdict,
        format_figure(score.sd, "ratio"),
        f"{format_score(score.mean)}\n{format_range(scale)}",
        "" if nats is None else f"{format_kld(nats.mean)}\n{format_kld(nats.sd)}",
        " ".join(format_score(value) for value in score.values),
    ]
