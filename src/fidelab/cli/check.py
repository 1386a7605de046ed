"""``fidelab check``: a quality gate on a saved report."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options, values
from fidelab.cli.output import UNDECIDED, command_line, exit_on, note, open_console

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment
    from fidelab.results.check import Check, Policy
    from fidelab.results.measurement import Unit
    from fidelab.results.record import ArmRecord, Report

_CODES = {"GO": 0, "NO-GO": 1, "INCONCLUSIVE": UNDECIDED}
_SUMMARY = "GITHUB_STEP_SUMMARY"  # the runner's variable: path of the file that becomes the job's summary
_UNITS: Mapping[str, Unit] = {"kld.mean": "nats", "kld.top1": "share"}  # others are known when they are measured
_CONDITION = re.compile(r"\s*(?P<metric>[\w.-]+)\s*(?P<sign>[<>])\s*(?P<limit>[^<>=\s]+)\s*")


def check(
    run_dir: options.NamedRunDir,
    max_kld: Annotated[
        float | None, typer.Option(parser=values.nats, metavar="NATS", help="Maximum mean KLD in nats (kld.mean).")
    ] = None,
    min_same_top: Annotated[
        str | None, typer.Option(help="Minimum share of equal top tokens, e.g. 97% (kld.top1).")
    ] = None,
    policy: options.Policy = None,
    baseline: options.Baseline = None,
    configuration: Annotated[
        str | None, typer.Option(metavar="NAME", help="Configuration. \\[default: the recommended or the only one]")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all configurations.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the decision as JSON; - prints it.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the decision as JUnit XML.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Annotate the job and write its summary, in a workflow of GitHub.")
    ] = False,
    markdown: options.Markdown = False,
) -> None:
    """Check a finished run against limits: GO (exit code 0), NO-GO (1) or INCONCLUSIVE (3).

    A figure passes or fails by its whole 95% interval. If the interval crosses a limit, the required sample size is
    printed. No engine is needed.

    [bold]Examples[/bold]

      fidelab check latest --max-kld 0.01 --min-same-top 97%

      fidelab check latest --policy policy.yaml --baseline main.json

      fidelab check latest --max-kld 0.01 --github --junit check.xml
    """
    from fidelab.core import write_atomically
    from fidelab.core.errors import UsageError
    from fidelab.report.check import render_check, render_check_markdown, render_junit
    from fidelab.results.compare import compare
    from fidelab.results.store import read_run

    if markdown and json_file == "-":
        raise UsageError("--markdown and --json -: name one")
    if github and json_file == "-":
        raise UsageError("--github prints annotations on standard output: write --json to a file")
    report, diff = read_run(options.find_run(run_dir, _usable(policy), "finished run with these metrics")), None
    measured = dict.fromkeys(name for arm in report.candidates for name in arm.axes)
    asked = read_policy(policy, {"kld.mean": {"max": max_kld}, "kld.top1": {"min": min_same_top}}, measured)
    if baseline is not None:
        former = read_run(options.find_run(baseline, _usable(policy), "finished run with these metrics"))
        diff = compare(former, report, asked.baseline)
    found = decide(report, asked, _checked(report, asked, configuration, every), diff)
    command = command_line()
    if json_file is not None and json_file != "-":
        write_atomically(json_file, found.to_json())
    if junit is not None:
        write_atomically(junit, render_junit(found, report, command))
    if json_file == "-":
        sys.stdout.write(found.to_json())
    elif markdown:
        sys.stdout.write(render_check_markdown(found))
    elif github:
        from fidelab.report.github import job_annotations

        with _commands_ignored():
            render_check(found, open_console())
        for line in job_annotations(found):
            print(line)
        _append_summary(render_check_markdown(found, command))
    else:
        render_check(found, open_console())
    raise typer.Exit(_CODES[found.decision])


def _checked(report: Report, asked: Policy, name: str | None, every: bool) -> Sequence[ArmRecord]:
    """Return the configurations that rules without a name apply to.

    Raises:
        UnknownNameError: If there is no configuration of this name.
        UsageError: If a name is needed and missing, or given and without effect.
    """
    from fidelab.core.errors import UnknownNameError, UsageError
    from fidelab.report.exports import choose_arm

    named = [arm.name for arm in report.candidates or (report.reference,)]
    if name is not None and name not in named:
        raise UnknownNameError("configuration", name, named)
    everywhere = not any(rule.arm is None for rule in asked.rules)  # each rule names its own
    if name is not None and everywhere:
        raise UsageError(f"--configuration {name} has no effect: no limit needs it, --baseline compares all: omit it")
    return report.candidates if every or everywhere or not report.candidates else [choose_arm(report, name)]


def decide(report: Report, asked: Policy, arms: Sequence[ArmRecord], diff: Any = None) -> Check:
    """Decide a report by a policy; rules without a configuration apply to ``arms``, empty: to the reference.

    Raises:
        UsageError: If nothing decides, or a limit does not fit the metric's unit.
        UnknownNameError: If a metric or a configuration of this name does not exist.
    """
    from fidelab.axes import AXES
    from fidelab.bench import BENCHES
    from fidelab.imports import NEMO_EVALUATOR
    from fidelab.results.check import check
    from fidelab.results.table import BENCH

    groups = {*AXES.names(), *(f"{BENCH}{bench}" for bench in BENCHES.names())}
    groups |= {rule.metric.rpartition(".")[0] for rule in asked.rules if rule.metric.startswith(f"{NEMO_EVALUATOR}:")}
    return check(report, asked, arms or (report.reference,), groups=groups, diff=diff)


@contextmanager
def _commands_ignored() -> Iterator[None]:
    """Keep the runner from obeying what is printed meanwhile: names in a report may look like workflow commands."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}")
    try:
        yield
    finally:
        print(f"::{token}::")


def _append_summary(text: str) -> None:
    """Append Markdown to the summary of the job. Where that is impossible, one line says so."""
    place = os.environ.get(_SUMMARY)
    if not place:
        note(f"fidelab: {_SUMMARY} is not set: the job summary is left out")
        return
    try:
        with Path(place).open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"\n{text}" if file.tell() else text)  # a paragraph of its own after another command's
    except OSError as error:
        note(f"fidelab: the job summary is left out: {place}: {error.strerror or error}")


# ------------------------------------------------------------------------------------------ compare --fail-on


def read_conditions(conditions: Sequence[str]) -> Policy:
    """Return a critical rule for each condition of ``--fail-on``: ``kld.mean > 0.01``, ``kld.top1 < 97%``.

    Raises:
        UsageError: If one is not a metric, ``>`` or ``<``, and a limit.
    """
    from fidelab.config.load import validate_as
    from fidelab.core.errors import UsageError
    from fidelab.results.check import Policy

    rules = []
    for condition in conditions:
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise UsageError(
                f"--fail-on: {condition!r} is not a condition: write 'kld.mean > 0.01' or 'kld.top1 < 97%'"
            )
        rules.append({"metric": match["metric"], "max" if match["sign"] == ">" else "min": match["limit"]})
    return validate_as(Policy, {"rules": rules}, "--fail-on")


def check_conditions(asked: Policy, experiment: Experiment) -> None:
    """Refuse conditions on tests and benches that an experiment does not run, before it runs.

    Raises:
        UnknownNameError: If a condition names another one. The message has the nearest.
        UsageError: If a limit does not fit the unit of one of the figures in :data:`_UNITS`.
    """
    from fidelab.core.errors import UnknownNameError
    from fidelab.results.table import BENCH, CACHE, COMPOSITE

    groups = {*experiment.axes, *(f"{BENCH}{name}" for name in experiment.benches), CACHE, COMPOSITE}
    for rule in asked.rules:
        group = rule.metric.rpartition(".")[0]
        if group not in groups:
            raise UnknownNameError("test of --fail-on", group or rule.metric, groups)
        if (unit := _UNITS.get(rule.metric)) is not None:
            rule.limits(unit)


def exit_on_conditions(report: Report, asked: Policy | None, faults: Sequence[str]) -> None:
    """Exit with 1 for a fault or a condition that a candidate meets, with 3 if one is undecided; a line for each.

    ``asked``: the conditions; ``None``: there are none.

    Raises:
        UnknownNameError: If the run has no metric of this name.
        UsageError: If a limit does not fit the metric's unit.
    """
    from fidelab.report.check import breach_line

    results = decide(report, asked, report.candidates).results if asked else ()
    lines = {
        decision: [f"{decision}: {breach_line(result)}" for result in results if result.decision == decision]
        for decision in ("NO-GO", "INCONCLUSIVE")
    }
    exit_on([*faults, *lines["NO-GO"]], lines["INCONCLUSIVE"])


def _usable(policy: Path | None) -> Callable[[Path], bool]:
    """Return whether a run has something that is checked: a metric of the policy's, else a comparison."""
    from fidelab.config.load import read_yaml
    from fidelab.results.table import BENCH

    rules = read_yaml(policy, keys="'rules:'").get("rules", ()) if policy is not None else ()
    metrics = [str(rule.get("metric", "")) for rule in rules if isinstance(rule, dict)] if rules else []

    def usable(folder: Path) -> bool:
        found = options.measured_in(folder)
        groups = {*found["compared"], *(f"{BENCH}{name}" for name in found["benches"])}
        if metrics:
            return any(metric == group or metric.startswith(f"{group}.") for metric in metrics for group in groups)
        return bool(found["compared"])

    return usable


def read_policy(path: Path | None, flags: dict[str, dict[str, Any]], axes: Collection[str]) -> Policy:
    """Return the rules of the file, and critical rules from the flags that were given.

    A policy of NeMo Evaluator becomes rules on the benchmarks among ``axes``.

    Raises:
        ConfigError: If the file or a flag is invalid.  The message says what is wrong.
    """
    from fidelab.config.load import read_yaml, validate_as
    from fidelab.core.errors import UsageError
    from fidelab.core.share import LIMIT
    from fidelab.results.check import Policy

    same = flags.get("kld.top1", {}).get("min")
    try:
        LIMIT.parse(same if same is not None else 0.0)
    except ValueError as error:
        raise UsageError(f"--min-same-top: {error}") from None
    content = {} if path is None else read_yaml(path, keys="'rules:'")
    if {"defaults", "benchmarks"} & content.keys():
        from fidelab.imports.nemo_evaluator import GatePolicy

        content = {"rules": [*validate_as(GatePolicy, content, str(path)).rules(axes)]}
    asked = validate_as(Policy, content, str(path))
    rules = [{"metric": metric, **limit} for metric, limit in flags.items() if None not in limit.values()]
    given = validate_as(Policy, {"rules": rules}, "check")
    return asked.model_copy(update={"rules": (*given.rules, *asked.rules)})
