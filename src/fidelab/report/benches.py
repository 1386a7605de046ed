"""Speed, memory and serving of all arms: the figures that stand beside fidelity, and one section per bench."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fidelab.core import Status
from fidelab.report.bench_tables import Arms, Bench, decode, labels_of, memory, over, prefill, ratio_of, startup
from fidelab.report.cells import STATUS, Estimate
from fidelab.report.serving import served, serving
from fidelab.results.bench_record import SpeedCell
from fidelab.results.bench_values import Spread
from fidelab.results.numbers import (
    ABSENT,
    format_amount,
    format_bytes,
    format_mib,
    format_ratio,
    format_tokens,
    one_line,
)
from fidelab.results.record import ArmRecord

__all__ = ["BENCHES", "Performance", "bench_failures", "performance_of"]

BENCHES = {"startup": "start-up", "prefill": "prefill", "decode": "decode", "memory": "memory", "serving": "serving"}
"""Field of the record → word, in reading order."""


@dataclass(frozen=True)
class Performance:
    """Speed and memory: a row of figures per arm, each with its ratio to the reference's; and the benches."""

    columns: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[Estimate, ...], ...]
    benches: tuple[Bench, ...]
    measured: str
    """Which benches, in words."""

    @property
    def note(self) -> str:
        """How to read the figures."""
        names = " ".join(self.columns)
        lines = ["Medians of the repeats, at the largest length and the deepest depth that were measured."]
        lines = lines if "prefill" in names or "decode" in names else []
        lines += ["Decode is isolated: the time between the first and the last token."] if "decode" in names else []
        lines += ["Served: the highest load at which the first arm is valid."] if "served" in names else []
        return " ".join(
            [*lines, *(["× : over the reference's; ≈ : the repeats overlap."] if len(self.rows) > 1 else [])]
        )


def performance_of(arms: Arms) -> Performance | None:
    """What the benches found; ``None`` where none was run."""
    asked = [word for name, word in BENCHES.items() if any(getattr(arm.benches, name) for _, arm in arms)]
    if not asked:
        return None
    found = (make(arms) for make in (startup, prefill, decode, memory, serving))
    picked = [(name, cells) for name, cells in _summary(arms) if any(not cell.absent for cell in cells)]
    return Performance(
        columns=tuple(name for name, _ in picked),
        names=tuple(labels_of(arms)),
        rows=tuple(tuple(cells[number] for _, cells in picked) for number, _ in enumerate(arms)),
        benches=tuple(bench for bench in found if bench is not None),
        measured=asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}",
    )


def bench_failures(arm: ArmRecord) -> list[str]:
    """Benches that ended otherwise than well, in words."""
    return [
        f"{word} {STATUS[outcome.status]}: {one_line(outcome.reason or '')}"
        for name, word in BENCHES.items()
        if (outcome := getattr(arm.benches, name)) and outcome.status not in (Status.OK, Status.IDENTICAL)
    ]


def _summary(arms: Arms) -> Iterator[tuple[str, list[Estimate]]]:
    """Largest length, deepest depth, bytes of cache, start-up, peak memory, served rate: names and a cell per arm."""
    benches = [arm.benches for _, arm in arms]
    for word, at, cells in (
        ("prefill", "{} tokens", [found.prefill.cells if found.prefill else () for found in benches]),
        ("decode", "depth {}", [found.decode.cells if found.decode else () for found in benches]),
    ):
        if (wanted := _deepest(cells)) is not None:
            shape = at.format(format_tokens(wanted[0])) + (f" × {wanted[1]}" if wanted[1] > 1 else "")
            yield f"{word} tok/s, {shape}", _measured([_rate(found, wanted) for found in cells])
    memory = [found.memory for found in benches]
    yield "KV bytes per token", _beside([found.kv_bytes_per_token if found else None for found in memory], format_bytes)
    warm = any(found.startup and found.startup.warm for found in benches)
    splits = [(found.startup.warm if warm else found.startup.cold) if found.startup else None for found in benches]
    yield f"start-up s, {'warm' if warm else 'cold'}", _measured([split.total if split else None for split in splits])
    some = [found for found in memory if found and found.peak_host_bytes is not None]
    device = bool(some) and all(found.peak_device_bytes is not None for found in some)
    peaks = [(found.peak_device_bytes if device else found.peak_host_bytes) if found else None for found in memory]
    yield f"peak MiB, {'device' if device else 'host'}", _beside(peaks, format_mib)
    if (picked := served(benches)) is not None:
        shape, rates = picked
        yield f"served tok/s, {shape}", _beside(rates)


def _deepest(arms: Iterable[Sequence[SpeedCell]]) -> tuple[int, int] | None:
    """(tokens, batch): the largest length at the smallest batch of the first arm that has a figure."""
    for cells in arms:
        if measured := [(cell.tokens, cell.batch) for cell in cells if cell.rate]:
            least = min(batch for _, batch in measured)
            return max(shape for shape in measured if shape[1] == least)
    return None


def _rate(cells: Iterable[SpeedCell], wanted: tuple[int, int]) -> Spread | None:
    return next((cell.rate for cell in cells if cell.rate and (cell.tokens, cell.batch) == wanted), None)


def _measured(values: Sequence[Spread | None]) -> list[Estimate]:
    """Medians of repeats, with their ratio to the first one as far as the repeats tell."""
    medians = [format_amount(value.median if value else None) for value in values]
    ratios = [ABSENT, *(ratio_of(value, values[0]) for value in values[1:])]
    return [Estimate(median, ratio) for median, ratio in zip(medians, ratios, strict=True)]


def _beside(values: Sequence[float | None], form: Callable[[float | None], str] = format_amount) -> list[Estimate]:
    base, *rest = values
    return [Estimate(form(base)), *(Estimate(form(value), format_ratio(over(value, base))) for value in rest)]
