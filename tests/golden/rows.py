"""Rows: the figures of a report as lines of a text file, and how two sets of them differ.

A row names its run, its arm, where the figure comes from (an axis, a bench, a decision), the figure and its cell.
``kind`` says how it is compared:

- ``text`` and ``count``: exactly.
- ``nats``: means of divergences, within 1e-8 nats + 1e-5 of the value.  A row of a distribution is good to 1e-8 nats.
- ``float``: everything else, within 3e-7 + 4e-4 of the value: differences and slopes of such means cancel.
- The ends of an interval: within 1e-8 + 1e-3 of the end.  The bootstrap divides by standard errors.

Runs of engine ``fake``, whose rows are stored as log-probabilities, are held to a hundredth of that.

Why so: logits are float32 products of states with the head, whose order of sums differs by processor and library.
Computed in float64 instead, no figure of the stored runs moves by more than a fifth of what is allowed (test
``test_tolerances_are_above_the_rounding_of_the_head``).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

Kind = Literal["text", "count", "nats", "float"]
_DIGITS = 12
_TOLERANCE = {"nats": (1e-8, 1e-5), "float": (3e-7, 4e-4), "end": (1e-8, 1e-3)}


@dataclass(frozen=True, order=True)
class Row:
    """One figure with its interval, as text; absent ends and values are empty."""

    run: str
    arm: str
    source: str
    figure: str
    cell: str
    kind: Kind
    value: str
    low: str = ""
    high: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What the row is about."""
        return (self.run, self.arm, self.source, self.figure, self.cell)

    @property
    def shown(self) -> str:
        """The value with its interval."""
        ends = f" [{self.low}, {self.high}]" if self.low or self.high else ""
        return f"{self.value or 'absent'}{ends}"


def number(value: float | None) -> str:
    """Twelve digits; empty for an absent figure."""
    return "" if value is None else f"{value + 0.0:.{_DIGITS}g}"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in their order of keys."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(field.name for field in fields(Row))
    out.writerows(map(astuple, sorted(rows)))
    path.write_text(text.getvalue(), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]  # type: ignore[arg-type]


def differences(old: Iterable[Row], new: Iterable[Row], scale: float = 1.0) -> list[str]:
    """Lines that name each figure which changed, in the form ``run, arm, source, figure, cell: old → new``.

    ``scale``: by which tolerances are multiplied.
    """
    before, after = ({row.key: row for row in rows} for rows in (old, new))
    return [
        f"{', '.join(filter(None, key))}: {_shown(before.get(key))} → {_shown(after.get(key))}"
        for key in sorted({*before, *after})
        if not _alike(before.get(key), after.get(key), scale)
    ]


def _shown(row: Row | None) -> str:
    return "no row" if row is None else row.shown


def _alike(old: Row | None, new: Row | None, scale: float) -> bool:
    if old is None or new is None or old.kind != new.kind:
        return False
    exact = old.kind in ("text", "count")
    ends = all(_close("end", *pair, scale) for pair in ((old.low, new.low), (old.high, new.high)))
    return ends and (old.value == new.value if exact else _close(old.kind, old.value, new.value, scale))


def _close(kind: str, old: str, new: str, scale: float) -> bool:
    if old == new or not (old and new):
        return old == new
    absolute, relative = (scale * part for part in _TOLERANCE[kind])
    a, b = float(old), float(new)
    return a == b or abs(a - b) <= absolute + relative * max(abs(a), abs(b))
