"""A cross-engine experiment as terminal text: baseline, 8-bit caches, agreement, the long prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fidelab.report.cells import STATUS, Estimate, scored, status_line
from fidelab.report.text import literal, print_line, print_path, simple_table, wrap_name
from fidelab.results.cross_record import Agreement, Candidate, CrossReport, EngineRow, LongCell, RepeatSpread
from fidelab.results.numbers import ABSENT, format_bytes, format_count, format_kld, format_share, format_span, one_line
from fidelab.results.values import Outcome

__all__ = ["render_cross"]

_NAME_WIDTH = 14
_UNSTEADY = "*"


def render_cross(report: CrossReport, console: Console, *, folder: Path | None = None) -> None:
    """Print the experiment; ``folder`` is where its files lie.

    Nothing from engines, logs or configs is read as markup.
    """
    line = partial(print_line, console)

    def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if rows:
            line(title, "bold")
            console.print(_table(columns, rows, console))

    settings, rows = report.settings, report.engines
    model = Path(str(settings.get("model", "")))
    line(f"{report.run_id}: {one_line(model.name if model.is_absolute() else str(model))}, {len(rows)} engines", "bold")
    for name, outcome in _faults(report):
        line(f"  {one_line(name)}: {status_line(outcome)}")
    contexts = list(dict.fromkeys(n for row in rows for n in row.perplexity))
    table(
        "16-bit baseline, measured simply (one prompt at a time)",
        [
            "engine",
            "version",
            "KV",
            *(f"PPL\n{n}" for n in contexts),
            "load\ns",
            "prefill\ntok/s",
            "decode tok/s\nisolated",
            "decode tok/s\nsubtraction",
            "KV bytes\n/token",
        ],
        [_baseline(row, contexts) for row in rows],
    )
    if note := _timing_note(report):
        line(note)
    axes = list(dict.fromkeys(name for row in rows if row.candidate for name in row.candidate.scores))
    table(
        "8-bit KV against each engine's own 16-bit reference",
        [
            "engine",
            "KV",
            "KLD\nnats",
            *(f"{one_line(name)}\n0-100" for name in axes),
            "composite\n0-100",
            "band",
            "verdict\nby KLD",
        ],
        [_candidate(row, axes) for row in rows],
    )
    first = next((pair.reference for pair in report.agreement), None)
    pairs = {pair.other: pair for pair in report.agreement if pair.reference == first}
    table(
        f"16-bit references: mean KL from {one_line(first or ABSENT)}, and each engine's floor (nats)",
        ["engine", "KL", "top-1", "positions", "floor", "rows from"],
        [_agreement(row, row.name == first, pairs.get(row.name)) for row in rows] if first else [],
    )
    cells = [(row, row.long) for row in rows if row.long is not None]
    table(
        f"One window of {format_count(cells[0][1].tokens) if cells else 0} tokens, tiny model of random weights",
        ["engine", "counted", "rows", "KV bytes\n/token", "by hand", "KV bytes", "peak host\nMiB", "s", "outcome"],
        [_long(row, cell) for row, cell in cells],
    )
    if folder is not None:
        print_path(console, "files", folder)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> Table:
    table = simple_table()
    words = ("engine", "version", "KV", "band", "verdict\nby KLD", "rows from", "outcome")
    for column in columns:
        right = column not in words
        table.add_column(literal(column, console), justify="right" if right else "left", overflow="fold")
    for name, *cells in rows:
        table.add_row(
            literal(wrap_name(one_line(name), _NAME_WIDTH), console), *(_cell(cell, console) for cell in cells)
        )
    return table


def _cell(text: str, console: Console) -> Text:
    """A value with its interval on a second line."""
    return literal(text.replace(" (", "\n(", 1), console)


def _faults(report: CrossReport) -> list[tuple[str, Outcome]]:
    """Every part that has no result."""
    parts: list[tuple[str, Outcome | None]] = []
    for row in report.engines:
        kv = row.candidate.kv if row.candidate else ""
        parts += [
            (row.name, row),
            (f"{row.name} {kv}", row.candidate),
            (f"{row.name} timing", row.speed),
            (f"{row.name} long window", row.long),
        ]
    parts += [(f"{pair.other} from {pair.reference}", pair) for pair in report.agreement]
    return [(name, part) for name, part in parts if part is not None and not part.measured]


def _baseline(row: EngineRow, contexts: Sequence[str]) -> list[str]:
    speed = row.speed
    rates = (speed.prefill, speed.decode_isolated, speed.decode_by_subtraction) if speed else (None, None, None)
    return [
        row.name,
        one_line(row.version or ABSENT),
        one_line(row.reference or ABSENT),
        *(_decimal(row.perplexity.get(n), 3) for n in contexts),
        _decimal(speed.load_seconds if speed else None, 1),
        *(_rate(rate) for rate in rates),
        format_bytes(row.ran.cache_bytes_per_token if row.ran else None),
    ]


def _rate(rate: RepeatSpread | None) -> str:
    """The median, and slowest to fastest repeat below."""
    if rate is None:
        return ABSENT
    mark = _UNSTEADY if rate.steady is False else ""
    return f"{_short(rate.median)}{mark}\n{_short(rate.low)}–{_short(rate.high)}"


def _timing_note(report: CrossReport) -> str:
    speeds = [row.speed for row in report.engines if row.speed is not None and row.speed.prefill is not None]
    if not speeds or speeds[0].prefill is None:
        return ""
    first, repeats = speeds[0], len(speeds[0].prefill.repeats)
    rates = [rate for s in speeds for rate in (s.prefill, s.decode_isolated, s.decode_by_subtraction)]
    notes = [
        f"medians of {repeats} prompts of {first.prompt} tokens, {first.n} decoded behind each; "
        "below them slowest–fastest"
    ]
    if any(rate is not None and rate.steady is False for rate in rates):
        notes.append(f"{_UNSTEADY} the last three repeats differ by 5% or more")
    if any(speed.decode_by_subtraction is None for speed in speeds):
        notes.append("no subtraction where an answer took no longer than the prefill alone")
    return "; ".join(notes)


def _candidate(row: EngineRow, axes: Sequence[str]) -> list[str]:
    candidate = row.candidate
    if candidate is None:
        return [row.name, *[ABSENT] * (len(axes) + 3), STATUS[row.status], ABSENT]
    composite = candidate.composite
    return [
        row.name,
        one_line(candidate.kv),
        str(Estimate(format_kld(candidate.kld), format_span(candidate.kld_ci))),
        *(str(scored(candidate.scores.get(name), candidate.score_ci.get(name))) for name in axes),
        str(scored(composite.value, composite.ci)) if composite else ABSENT,
        _band(candidate),
        _verdict(candidate),
    ]


def _verdict(candidate: Candidate) -> str:
    verdict = candidate.verdict
    if verdict is None:
        return ABSENT
    word = verdict.band or (f"at best\n{verdict.at_best}" if verdict.at_best else ABSENT)
    return f"{word}\nmodified" if verdict.modified else word


def _band(candidate: Candidate) -> str:
    """The composite's band, or why there is none."""
    if not candidate.measured:
        return STATUS[candidate.status]
    if candidate.composite is None or candidate.composite.band is None:
        return ABSENT
    return candidate.composite.band + ("\ntoo close" if candidate.composite.too_close_to_call else "")


def _agreement(row: EngineRow, first: bool, pair: Agreement | None) -> list[str]:
    floor = str(Estimate(format_kld(row.floor), format_span(row.floor_ci)))
    if pair is None:
        kl, top1, positions = ("itself" if first else ABSENT), ABSENT, ABSENT
    else:
        kl = str(Estimate(format_kld(pair.kld), format_span(pair.ci))) if pair.kld is not None else STATUS[pair.status]
        top1, positions = format_share(pair.top1), format_count(pair.n_positions)
    return [row.name, kl, top1, positions, floor, row.estimator or ABSENT]


def _long(row: EngineRow, cell: LongCell) -> list[str]:
    return [
        row.name,
        format_count(cell.counted),
        format_count(cell.rows),
        format_bytes(cell.bytes_per_token),
        format_bytes(cell.by_hand),
        format_bytes(cell.kv_bytes),
        format_bytes(None if cell.peak_host_bytes is None else cell.peak_host_bytes / 2**20),
        _decimal(cell.seconds, 1),
        STATUS[cell.status],
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _decimal(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"
