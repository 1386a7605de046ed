"""A diagnosis on standard output: one line per fact, or JSON; in color on a terminal that supports it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby

from fidelab.core.lines import columns, encodable, folded_command, wrapped
from fidelab.doctor import Diagnosis
from fidelab.doctor.check import CAUGHT, DoctorCheck, Finding
from fidelab.results.numbers import printable

_MAX_WIDTH = 100
_MIN_DETAIL = 30  # columns; on narrower terminals details stand below, and those with a word that does not fit
_STYLES: dict[str, str] = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "red"}
_STYLES |= {"ready:": "green", "not ready:": "red"}
_WITH_DETAIL = "packages"  # whose details are versions; formats and tests that work have nothing to say
_REMEDY = "-> "
_CAN_RUN = " can run"
_NBSP = "\N{NO-BREAK SPACE}"  # lines are not broken between a package and its version
_STATUS_WIDTH = max(map(len, ("warning", "missing"))) + 2


def show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print the diagnosis."""
    if as_json:
        sys.stdout.write(printable(json.dumps(diagnosis.record(), indent=2), escaped=True) + "\n")
        return
    terminal = sys.stdout.isatty()
    encoding = sys.stdout.encoding or "utf-8"
    text = [encodable(printable(line), encoding) for line in lines(diagnosis, min(_MAX_WIDTH, columns()))]
    if not (terminal and _in_colour(text)):
        sys.stdout.write("\n".join(text) + "\n")


def lines(diagnosis: Diagnosis, width: int = _MAX_WIDTH) -> list[str]:
    """Return the text form.

    No line is longer than ``width``, unless it is one word, such as a path: those are copied.  The end says whether
    anything blocks the main job.
    """
    rows = [row for _, group in groupby(diagnosis.checks, lambda check: check.group) for row in _rows(list(group))]
    indent = _STATUS_WIDTH + max(len(label) for _, label, _ in rows) + 2
    text = []
    for status, label, detail in rows:
        first = f"{status:<{_STATUS_WIDTH}}{label:<{indent - _STATUS_WIDTH}}"
        hang = indent
        if width - indent < max(_MIN_DETAIL, *map(len, detail.split(" "))):
            text += wrapped(first, width) if first.strip() else []
            first, hang = "  ", 2
        text += _folded(detail, width, first, " " * hang)
    return [*(line.replace(_NBSP, " ") for line in text), "", *_verdict(diagnosis, width)]


def _folded(detail: str, width: int, first: str, hang: str) -> list[str]:
    """Wrap a detail; a command that is a whole remedy is folded so that it can be pasted."""
    command = detail.removeprefix(_REMEDY)
    if detail == command or not command.startswith(("fidelab ", "pip ", "python ")):
        return wrapped(detail, width, indent=first, hang=hang)
    begun = f"{first}{_REMEDY}"
    inner = " " * len(begun)
    return [
        f"{begun}{line.strip()}" if n == 0 else line
        for n, line in enumerate(folded_command(command, width, indent=inner))
    ]


def _rows(checks: list[DoctorCheck]) -> Iterator[tuple[str, str, str]]:
    """Yield status, label and text of each row.

    Packages, formats and axes that work share one row; every other check has its own.
    """
    group = checks[0].group
    together = group == "packages" or group == "tests" or group.startswith("KV formats")
    if together:
        good = [check for check in checks if check.status == "ok"]
        names = [f"{check.name}{_NBSP}{check.detail}" if group == _WITH_DETAIL else check.name for check in good]
        status: Finding = "ok" if len(good) == len(checks) else "warning" if good else "broken"
        yield status, group, f"{len(good)} of {len(checks)} work{': ' if good else ''}{', '.join(names)}"
    rest = [check for check in checks if not (together and check.status == "ok")]
    if group.startswith("KV formats"):
        # Group the formats of an engine that cannot run here: one row for each reason
        checks = [check for check in rest if check.status == "missing"]
        for why, names in by_reason({check.name: check.detail for check in checks}).items():
            yield "missing", group, f"{', '.join(names)}: {why}"
        rest = [check for check in rest if check.status != "missing"]
    for check in rest:
        yield check.status, check.label, check.detail
        if check.remedy:
            yield "", "", f"{_REMEDY}{check.remedy}"


def by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Group names by their reason.

    A shared reason that names its format at its end says "it" instead.
    """
    reasons: dict[str, list[str]] = {}
    for name, why in refused.items():
        same = why.removesuffix(name)
        reasons.setdefault(same if same == why else f"{same}it", []).append(name)
    return {why if len(names) > 1 else refused[names[0]]: names for why, names in reasons.items()}


def _verdict(diagnosis: Diagnosis, width: int) -> list[str]:
    """The reasons in one line where they fit; a command that does not fit stands on lines of its own."""
    if diagnosis.ready:
        command, can_run, rest = diagnosis.good.partition(_CAN_RUN)
        if len(f"ready: {diagnosis.good}") <= width or not can_run or rest:
            return wrapped(f"ready: {diagnosis.good}", width)
        return ["ready: this can run", *folded_command(command, width, indent="  ")]
    reasons = diagnosis.reasons
    line = ""
    for n in range(len(reasons), 0, -1):
        more = f"; and {len(reasons) - n} more (above)" if n < len(reasons) else ""
        line = f"not ready: {'; '.join(reasons[:n])}{more}"
        if len(line) <= width:
            break
    return wrapped(line, width)


def _in_colour(text: list[str]) -> bool:
    """Print with the first word colored (rich heeds NO_COLOR); return False, with nothing printed, if rich fails."""
    try:
        from rich.console import Console
        from rich.text import Text

        console, rows = Console(highlight=False), list[Text]()
        for line in text:
            word = next((word for word in _STYLES if line.startswith(word)), "")
            rows.append(Text.assemble((word, _STYLES.get(word, "")), line.removeprefix(word)))
    except CAUGHT:
        return False
    for row in rows:
        console.print(row, soft_wrap=True)
    return True
