"""``fidelab check``: a quality gate on a saved report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import options, values
from fidelab.cli.output import UNDECIDED, open_console

if TYPE_CHECKING:
    from fidelab.results.check import Policy

_CODES = {"GO": 0, "NO-GO": 1, "INCONCLUSIVE": UNDECIDED}


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
    arm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Configuration. \\[default: the recommended or the only one]")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all configurations.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the decision as JSON; - prints it.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the decision as JUnit XML.")] = None,
    markdown: options.Markdown = False,
) -> None:
    """Check a finished run against limits: GO (exit code 0), NO-GO (1) or INCONCLUSIVE (3).

    A figure passes or fails by its whole 95% interval. If the interval crosses a limit, the required sample size is
    printed. No engine is needed.

    [bold]Examples[/bold]

      fidelab check latest --max-kld 0.01 --min-same-top 97%

      fidelab check latest --policy policy.yaml --baseline main.json
    """
    from fidelab.axes import AXES
    from fidelab.bench import BENCHES
    from fidelab.core import write_atomically
    from fidelab.core.errors import UsageError
    from fidelab.imports import NEMO_EVALUATOR
    from fidelab.report.exports import choose_arm
    from fidelab.results.check import check as decide
    from fidelab.results.compare import compare
    from fidelab.results.store import read_run
    from fidelab.results.table import BENCH

    if markdown and json_file == "-":
        raise UsageError("--markdown and --json -: name one")
    report, diff = read_run(options.find_run(run_dir, _usable(policy), "finished run with these metrics")), None
    measured = dict.fromkeys(name for arm in report.candidates for name in arm.axes)
    asked = read_policy(policy, {"kld.mean": {"max": max_kld}, "kld.top1": {"min": min_same_top}}, measured)
    if baseline is not None:
        former = read_run(options.find_run(baseline, _usable(policy), "finished run with these metrics"))
        diff = compare(former, report, asked.baseline)
    everywhere = not any(rule.arm is None for rule in asked.rules)  # each rule names its own
    alone = () if report.candidates else (report.reference,)  # a run that compares nothing
    arms = alone or (report.candidates if every or everywhere else [choose_arm(report, arm)])
    groups = {*AXES.names(), *(f"{BENCH}{bench}" for bench in BENCHES.names())}
    groups |= {rule.metric.rpartition(".")[0] for rule in asked.rules if rule.metric.startswith(f"{NEMO_EVALUATOR}:")}
    found = decide(report, asked, arms, groups=groups, diff=diff)
    if json_file is not None and json_file != "-":
        write_atomically(json_file, found.to_json())
    if junit is not None:
        from fidelab.report.check import render_junit

        write_atomically(junit, render_junit(found))
    if json_file == "-":
        sys.stdout.write(found.to_json())
    elif markdown:
        from fidelab.report.check import render_check_markdown

        sys.stdout.write(render_check_markdown(found))
    else:
        from fidelab.report.check import render_check

        render_check(found, open_console())
    raise typer.Exit(_CODES[found.decision])


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
