"""The failure catalogue: the rules of the audit as a page.

python -m fidelab_checkpoints.catalogue > docs/failures.md
"""

from __future__ import annotations

import re
import sys
from itertools import groupby

import fidelab_checkpoints.audit  # noqa: F401 (all rules enter the table)
from fidelab_checkpoints.rules import RULES, Rule

_SECTIONS = {  # module with the rules → heading
    "tensors": "Weights, scales and files",
    "fusing": "What engines build as one",
    "original": "Against the original",
    "templates": "Chat template and special tokens",
    "geometry": "Sizes",
}
_INTRODUCTION = """\
# Failures of checkpoints

What goes wrong with quantized checkpoints, how it shows, where it comes from, and what finds it. This page is made
from the rules of [`fidelab checkpoint audit`](checkpoints.md#audit) (`python -m fidelab_checkpoints.catalogue`). It
lists every rule of the audit. `broken` and `suspicious` are the verdict that a finding gives. `information` does not
change the verdict.
"""
_TRANSFORMERS_DEFECTS = """\
## What files do not show

Kernels, parsers, calibration texts and engines also fail with intact checkpoints. Only a run shows that:

- Noise after some tens of tokens, or beyond a length of context. A kernel has too few bits in its sums or softmax
  weights, or a lost window of attention. `fidelab diagnose attention MODEL` compares attention with float64, and
  `fidelab diagnose layers` [layer with layer](diagnosis.md#which-layer).
- A loss with an FP8 KV cache at long contexts: unit scales, or scales that one of the kernels leaves out.
  `fidelab compare MODEL --control full` at that length separates [format from kernel](diagnosis.md#format-or-kernel).
- Thinking that never ends, empty answers: calibration without such texts, or a parser of reasoning that does not fit.
  `fidelab compare --axes trajectory,degeneration` compares the texts of both configurations.
"""


def page() -> str:
    """Return the page in Markdown."""
    parts = [_INTRODUCTION]
    rules = sorted(RULES.values(), key=lambda rule: list(_SECTIONS).index(_module(rule)))
    for module, group in groupby(rules, key=_module):
        rows = [
            f"| **{_cell(rule.title)}** `{rule.id}` | {rule.severity} | {_cell(rule.symptom)} | {_cell(rule.cause)} "
            f"| {_cell(rule.check)} | {_cell(rule.command)} |"
            for rule in group
        ]
        head = "| failure | verdict | symptom | cause | check | command |\n|---|---|---|---|---|---|\n"
        parts.append(f"## {_SECTIONS[module]}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join([*parts, _TRANSFORMERS_DEFECTS])


def _module(rule: Rule) -> str:
    return rule.find.__module__.rpartition(".")[2]


_COMMAND = (
    r"fidelab (?!is\b)[a-z0-9-]+(?: (?:audit|convert|quantize|calibrate|attention|layers|sensitivity)\b)?"
    r"(?: --to [a-z]+| --[a-z]+| [A-Z]+\b)*"
)


def _cell(text: str) -> str:
    """Format a text for a table: tokens and commands as code, bars escaped."""
    text = re.sub(r"<\|?\w+\|?>", lambda match: f"`{match[0]}`", text)
    text = re.sub(_COMMAND, lambda match: f"`{match[0]}`", text)
    return text.replace("|", r"\|")


if __name__ == "__main__":
    sys.stdout.write(page())
