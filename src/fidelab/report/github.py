"""The decision on a run as GitHub's runners read it: workflow commands that annotate a job.

A workflow command is a line ``::NAME KEY=VALUE,…::MESSAGE``.  Escapes are those of the runner: ``%``, CR and LF in
messages, and ``:`` and ``,`` in values, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from fidelab.report.check import baseline_line, breach_line
from fidelab.results.check import Check, Decision
from fidelab.results.numbers import printable

Level = Literal["error", "warning", "notice"]

_LEVELS: Mapping[tuple[str, Decision], Level] = MappingProxyType(
    {
        ("critical", "NO-GO"): "error",
        ("critical", "INCONCLUSIVE"): "warning",
        ("supporting", "NO-GO"): "warning",
    }
)
"""Annotations of what counts.  The rest is shown as a notice, except a GO, which has none."""
_MESSAGE = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_VALUE = {**_MESSAGE, ":": "%3A", ",": "%2C"}


def job_annotations(found: Check) -> list[str]:
    """Return a workflow command for each rule and baseline that does not pass, errors first.

    >>> workflow_command("error", "NO-GO", "q8_0 kld.mean 0.0865 > 0.01")
    '::error title=NO-GO::q8_0 kld.mean 0.0865 > 0.01'
    """
    order = ("error", "warning", "notice")
    return [
        workflow_command(level, title, message)
        for level, title, message in sorted(_points(found), key=lambda point: order.index(point[0]))
    ]


def workflow_command(level: Level, title: str, message: str) -> str:
    """Return one command in one line, without a line's end."""
    heading, text = printable(title).translate(_table(_VALUE)), printable(message).translate(_table(_MESSAGE))
    return f"::{level} title={heading}::{text}"


def _table(escapes: Mapping[str, str]) -> dict[int, str]:
    return {ord(char): escape for char, escape in escapes.items()}


def _points(found: Check) -> Iterator[tuple[Level, str, str]]:
    """Level, title and message of what does not pass."""
    for result in found.results:
        if result.decision != "GO":
            tier = "" if result.tier == "critical" else f" ({result.tier})"
            level = _LEVELS.get((result.tier, result.decision), "notice")
            yield level, f"{result.decision}{tier}", breach_line(result)
    if found.baseline is not None and found.baseline_decision not in (None, "GO"):
        assert found.baseline_decision is not None
        yield _LEVELS["critical", found.baseline_decision], found.baseline_decision, baseline_line(found)
