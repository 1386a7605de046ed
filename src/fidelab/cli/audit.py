"""``fidelab audit``: what is wrong with a checkpoint, before anything of it runs."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import exit_on, open_console, waiting

if TYPE_CHECKING:
    from fidelab.checkpoints.audit import Audit
    from fidelab.checkpoints.rules import Finding

_MARGIN = 13  # columns before the text of a finding
_NAMES = 8  # tensors listed of each finding


def audit(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder with config.json and *.safetensors, a .gguf file or a hub id.")
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="ORIGINAL", help="The checkpoint that it was made from.", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option(help="Devices that tensor parallelism would split it over.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Look for what breaks a checkpoint at run time: scales, packing, experts, index, lists of kept layers.

    Every tensor is read once; nothing of the model is run, and no GPU is needed. Of a repository on the hub, tensors
    are read by ranges and not stored. Exit code 1 where the verdict is broken.

    [bold]Examples[/bold]

      fidelab audit ./Qwen3-30B-A3B-AWQ --base Qwen/Qwen3-30B-A3B --tp 2

      fidelab audit smollm2-135m
    """
    from fidelab.checkpoints.audit import audit as run

    with waiting(f"reading {checkpoint}") as say:
        outcome = run(checkpoint, base, tp, lambda done, total: say(f"read {done / 1e9:,.1f} of {total / 1e9:,.1f} GB"))
    if as_json:
        sys.stdout.write(json.dumps(outcome.as_json(), indent=2, ensure_ascii=False) + "\n")
    else:
        _show(outcome)
    if outcome.verdict == "broken":
        count = sum(finding.severity == "broken" for finding in outcome.findings)
        exit_on([f"{checkpoint} is broken: {count} finding{'s' if count > 1 else ''}"])


def _show(outcome: Audit) -> None:
    width = open_console().width
    method = outcome.method or "not quantized"
    print(
        f"{outcome.checkpoint}: {method}, {outcome.quantized:,} of {outcome.modules:,} modules quantized, "
        f"{outcome.tensors:,} tensors, {outcome.nbytes / 1e6:,.1f} MB"
    )
    for finding in outcome.findings:
        print()
        _show_finding(finding, width)
    print(f"\nverdict: {outcome.verdict}")


def _show_finding(finding: Finding, width: int) -> None:
    from fidelab.checkpoints.rules import RULES

    known = RULES[finding.rule]
    _paragraph(str(finding.severity), f"{known.title} ({finding.rule}): {finding.text}.", width)
    _paragraph("run time", f"{known.symptom}.", width)
    _paragraph("to do", f"{known.command}.", width)
    if len(finding.tensors) > 2:
        more = len(finding.tensors) - _NAMES
        names = [*finding.tensors[:_NAMES], *([f"and {more:,} more (--json has all)"] if more > 0 else [])]
        for place, name in enumerate(names):
            print(f"{'tensors' if place == 0 else '':<{_MARGIN}}{name}")


def _paragraph(label: str, text: str, width: int) -> None:
    """A label in the margin, and beside it a text wrapped to the terminal; names are never broken."""
    print(
        textwrap.fill(
            text,
            max(width, 40),
            initial_indent=f"{label:<{_MARGIN}}",
            subsequent_indent=" " * _MARGIN,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
