"""Offline benches as tables, one per bench; doubts about single figures are numbered footnotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fidelab.core import Status
from fidelab.report.cells import STATUS
from fidelab.report.tables import Table
from fidelab.results.axis_record import Outcome
from fidelab.results.bench_record import Memory, MemoryPoint, SpeedCell, StartupSplit
from fidelab.results.bench_values import Flag, Spread
from fidelab.results.numbers import (
    ABSENT,
    MIB,
    format_amount,
    format_bytes,
    format_count,
    format_mib,
    format_ratio,
    format_tokens,
    one_line,
)
from fidelab.results.record import ArmRecord

__all__ = [
    "Arms",
    "Bench",
    "Notes",
    "bench_table",
    "decode",
    "labels_of",
    "memory",
    "over",
    "prefill",
    "ratio_of",
    "startup",
]

Arms = Sequence[tuple[str, ArmRecord]]
"""Roles and records, the reference first."""

NOTES = "notes"
STEADY = {True: "steady", False: "not steady", None: ABSENT}


@dataclass
class Notes:
    """Footnotes of one bench: the same words have one number."""

    owners: dict[str, list[str]] = field(default_factory=dict)
    """Text → arms."""

    def mark(self, name: str, flags: Iterable[Flag], outcome: Outcome | None = None) -> str:
        """The numbers of an arm's outcome that is none and of its flags, for a cell."""
        texts = [one_line(flag.text) for flag in flags]
        if outcome is not None and outcome.status not in (Status.OK, Status.IDENTICAL):
            texts.insert(0, f"{STATUS[outcome.status]}: {one_line(outcome.reason or '')}")
        for text in texts:
            self.owners.setdefault(text, []).append(name)
        numbers = list(self.owners)
        return ", ".join(str(numbers.index(text) + 1) for text in dict.fromkeys(texts))

    def numbered(self) -> list[str]:
        """The footnotes below a table."""
        return [f"{number}: {text}" for number, text in enumerate(self.owners, 1)]

    def named(self) -> list[str]:
        """The same where there is no table: by arms."""
        return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in self.owners.items()]


@dataclass(frozen=True)
class Bench:
    """One bench: its tables, the first of which is the one to read, what it says in words, and what is doubtful."""

    key: str
    title: str
    tables: tuple[Table, ...]
    notes: Notes
    lines: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Whom it was asked: not for publication."""

    @property
    def word(self) -> str:
        """The title's beginning, for a list of contents."""
        return self.title.partition(":")[0].partition(" (")[0]


def over(value: float | None, base: float | None) -> float | None:
    """value / base, where both are there."""
    return value / base if value is not None and base else None


def ratio_of(own: Spread | None, base: Spread | None) -> str:
    """The medians' ratio; ``≈`` before it where the repeats overlap, or where there are none to tell by."""
    if own is None or base is None or not base.median:
        return ABSENT
    apart = own.low > base.high or own.high < base.low
    told = apart and min(len(own.repeats), len(base.repeats)) > 1
    return f"{'' if told else '≈ '}{format_ratio(own.median / base.median)}"


def labels_of(arms: Arms) -> list[str]:
    """The arms' names; a reference or a control that shares its name with another arm has its role before it."""
    names = [one_line(arm.name) for _, arm in arms]
    return [
        name if role == "candidate" or names.count(name) == 1 else f"{role} {name}"
        for (role, _), name in zip(arms, names, strict=True)
    ]


def bench_table(key: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns that nobody fills."""
    kept = [n for n, _ in enumerate(columns) if n == 0 or any(row[n] not in (ABSENT, "") for row in rows)]
    return Table(key, title, tuple(columns[n] for n in kept), tuple(tuple(row[n] for n in kept) for row in rows))


# ------------------------------------------------------------------------------------------------------- speed


def prefill(arms: Arms) -> Bench | None:
    """Prompt tokens per second by length and batch."""
    columns = ("tokens", "batch", "tok/s", "low–high", "× ref.", "steady", "repeats", NOTES)
    cells = [arm.benches.prefill.cells if arm.benches.prefill else () for _, arm in arms]
    return _speed(
        "prefill",
        "Prefill: prompt tokens per second",
        columns,
        list(zip(labels_of(arms), cells, strict=True)),
        _reading,
    )


def decode(arms: Arms) -> Bench | None:
    """Tokens per second behind the first one by depth and batch: isolated, and by subtraction beside it."""
    columns = (
        *("depth", "batch", "isolated tok/s", "low–high", "× ref.", "steady", "by subtraction tok/s"),
        *("subtraction low–high", "tokens", "repeats", NOTES),
    )
    cells = [arm.benches.decode.cells if arm.benches.decode else () for _, arm in arms]
    return _speed(
        "decode",
        "Decode: tokens per second behind the first one",
        columns,
        list(zip(labels_of(arms), cells, strict=True)),
        _writing,
    )


def _speed(
    key: str,
    title: str,
    columns: tuple[str, ...],
    arms: Sequence[tuple[str, Sequence[SpeedCell]]],
    cells_of: Callable[[SpeedCell, str, str], tuple[str, ...]],
) -> Bench | None:
    notes = Notes()
    base = {(cell.tokens, cell.batch): cell.rate for cell in arms[0][1]}
    rows = []
    for number, (name, cells) in enumerate(arms):
        for cell in cells:
            ratio = ratio_of(cell.rate, base.get((cell.tokens, cell.batch))) if number else ABSENT
            rows.append((name, *cells_of(cell, ratio, notes.mark(name, cell.flags, cell))))
    return Bench(key, title, (bench_table(key, title, ("arm", *columns), rows),), notes) if rows else None


def _reading(cell: SpeedCell, ratio: str, notes: str) -> tuple[str, ...]:
    return (format_bytes(cell.tokens), str(cell.batch), *_rate(cell.rate, ratio), _repeats(cell.rate), notes)


def _writing(cell: SpeedCell, ratio: str, notes: str) -> tuple[str, ...]:
    other = cell.by_subtraction
    return (
        format_bytes(cell.tokens),
        str(cell.batch),
        *_rate(cell.rate, ratio),
        format_amount(other.median if other else None),
        _range(other),
        format_count(cell.n) if cell.n else ABSENT,
        _repeats(cell.rate),
        notes,
    )


def _rate(rate: Spread | None, ratio: str) -> tuple[str, ...]:
    return (format_amount(rate.median if rate else None), _range(rate), ratio, STEADY[rate.steady if rate else None])


def _range(rate: Spread | None) -> str:
    return f"{format_amount(rate.low)}–{format_amount(rate.high)}" if rate and len(rate.repeats) > 1 else ABSENT


def _repeats(rate: Spread | None) -> str:
    return str(len(rate.repeats)) if rate else ABSENT


# ---------------------------------------------------------------------------------------------------- start-up


def startup(arms: Arms) -> Bench | None:
    """Seconds from the process' start to the first token, cold and warm, and where they go."""
    notes = Notes()
    base = arms[0][1].benches.startup
    parts = list(
        dict.fromkeys(part for _, arm in arms for _, split in _splits(arm) for part in (split.parts if split else {}))
    )
    rows = []
    for number, ((_, arm), name) in enumerate(zip(arms, labels_of(arms), strict=True)):
        for kind, split in _splits(arm):
            own = arm.benches.startup
            assert own is not None
            total = split.total if split else None
            same = getattr(base, kind) if base and number else None
            rows.append(
                (
                    name,
                    kind,
                    format_amount(total.median if total else None),
                    _range(total),
                    ratio_of(total, same.total if same else None),
                    *(format_amount(split.parts[p].median if split and p in split.parts else None) for p in parts),
                    _repeats(total),
                    notes.mark(name, own.flags),
                )
            )
    if not rows:
        return None
    title = "Start-up: seconds from the process' start to the first token"
    columns = ("arm", "start", "total s", "low–high", "× ref.", *map(one_line, parts), "repeats", NOTES)
    return Bench("startup", title, (bench_table("startup", title, columns, rows),), notes)


def _splits(arm: ArmRecord) -> Iterator[tuple[str, StartupSplit | None]]:
    found = arm.benches.startup
    if found is not None:
        yield from ((kind, split) for kind, split in (("cold", found.cold), ("warm", found.warm)) if split)


# ------------------------------------------------------------------------------------------------------ memory

_MEMORY: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("KV bytes per token", "kv_bytes_per_token", format_bytes),
    ("asked", "expected_bytes_per_token", format_bytes),
    ("state bytes per sequence", "state_bytes_per_sequence", format_bytes),
    ("pool MiB", "reserved_bytes", format_mib),
    ("pool tokens", "reserved_tokens", format_bytes),
    ("weights MiB", "weights_bytes", format_mib),
    ("loaded MiB", "loaded_host_bytes", format_mib),
    ("peak host MiB", "peak_host_bytes", format_mib),
    ("peak device MiB", "peak_device_bytes", format_mib),
)


def memory(arms: Arms) -> Bench | None:
    """What the cache, the weights and the whole process take; and the same against the length."""
    found = [
        (name, arm.benches.memory) for (_, arm), name in zip(arms, labels_of(arms), strict=True) if arm.benches.memory
    ]
    if not found:
        return None
    title = f"Memory (MiB: {MIB:,} bytes)"
    base = arms[0][1].benches.memory
    rows = [(name, *_figures(own, base if own is not base else None)) for name, own in found]
    first, *rest = (name for name, _, _ in _MEMORY)
    points = [(name, *_point(point)) for name, own in found for point in own.points]
    lengths = ("arm", "tokens", "batch", "KV MiB", "peak host MiB", "peak device MiB")
    tables = [
        bench_table("memory", title, ("arm", first, "× ref.", *rest), rows),
        bench_table("lengths", "Memory against the length", lengths, points),
    ]
    return Bench("memory", title, tuple(table for table in tables if len(table.columns) > 1), Notes())


def _figures(own: Memory, base: Memory | None) -> tuple[str, ...]:
    first, *rest = (form(getattr(own, name)) for _, name, form in _MEMORY)
    return (first, format_ratio(over(own.kv_bytes_per_token, base.kv_bytes_per_token if base else None)), *rest)


def _point(point: MemoryPoint) -> tuple[str, ...]:
    sizes = (point.kv_bytes, point.peak_host_bytes, point.peak_device_bytes)
    return (format_tokens(point.tokens), str(point.batch), *map(format_mib, sizes))
