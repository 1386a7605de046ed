"""Benches as flat lists of metrics: start-up, tok/s by length and depth, memory, load by its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fidelab.results.bench_record import Benches, Memory, SpeedCell, Startup
from fidelab.results.bench_values import Flag, Spread
from fidelab.results.metric import BENCH, LIMITS, Better, Entry, Metric, Unit, failure
from fidelab.results.serving_record import Distribution, LoadCell, Saturation, Serving
from fidelab.results.values import Outcome

__all__ = ["bench_metrics"]

_FEWEST_BEYOND = 10  # values beyond a percentile, for it to say something without repeats


def bench_metrics(benches: Benches) -> Iterator[Entry]:
    """All metrics of an arm's benches; a load that its record calls invalid gives none."""
    named: Sequence[tuple[str, Outcome | None]] = (
        ("startup", benches.startup),
        ("prefill", benches.prefill),
        ("decode", benches.decode),
        ("memory", benches.memory),
        ("serving", benches.serving),
    )
    for name, bench in named:
        if bench is not None:
            yield from failure(BENCH + name, "", bench)
    if benches.startup is not None:
        yield from _startup(benches.startup)
    if benches.prefill is not None:
        for cell in benches.prefill.cells:
            yield from _speed(f"{BENCH}prefill", f"{cell.tokens} tokens × {cell.batch}", cell, "rate")
    if benches.decode is not None:
        for cell in benches.decode.cells:
            yield from _speed(f"{BENCH}decode", f"depth {cell.tokens} × {cell.batch}", cell, "isolated")
    if benches.memory is not None:
        yield from _memory(benches.memory)
    if benches.serving is not None:
        yield from _serving(benches.serving)


def _startup(bench: Startup) -> Iterator[Entry]:
    for cell, split in (("cold", bench.cold), ("warm", bench.warm)):
        if split is not None:
            for name, spread in {"total": split.total, **split.parts}.items():
                yield Entry(f"{BENCH}startup", cell, name, _spread(spread, "s", "lower", bench.flags))


def _speed(group: str, place: str, cell: SpeedCell, name: str) -> Iterator[Entry]:
    yield from failure(group, place, cell)
    for metric, spread in ((name, cell.rate), ("by subtraction", cell.by_subtraction)):
        if spread is not None:
            found = _spread(spread, "tok/s", "higher", cell.flags)
            yield Entry(group, place, metric, replace(found, optional=spread is not cell.rate))


def _spread(spread: Spread, unit: Unit, better: Better, flags: Sequence[Flag]) -> Metric:
    return Metric(spread.median, unit, better, LIMITS[unit], spread.repeats, flags=_kinds(flags))


def _kinds(flags: Sequence[Flag]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(flag.kind for flag in flags))


def _bytes(value: float, *, exact: bool, better: Better | None = "lower") -> Metric:
    return Metric(value, "bytes", better, "memory", exact=exact)


def _memory(bench: Memory) -> Iterator[Entry]:
    stored = {
        "KV bytes per token": bench.kv_bytes_per_token,
        "expected KV bytes per token": bench.expected_bytes_per_token,
        "state bytes per sequence": bench.state_bytes_per_sequence,
        "weights": bench.weights_bytes,
    }
    taken = {
        "host, model loaded": bench.loaded_host_bytes,
        "peak host": bench.peak_host_bytes,
        "peak device": bench.peak_device_bytes,
    }
    places = [("", stored, taken)]
    for point in bench.points:
        peaks = {"peak host": point.peak_host_bytes, "peak device": point.peak_device_bytes}
        places.append((f"{point.tokens} tokens × {point.batch}", {"KV": point.kv_bytes}, peaks))
    for cell, exact, measured in places:
        for name, value in {**exact, **measured}.items():
            if value is not None:
                yield Entry(f"{BENCH}memory", cell, name, _bytes(value, exact=name in exact))
    if bench.reserved_bytes is not None:  # the pool takes what other things leave: a smaller one is no gain
        yield Entry(f"{BENCH}memory", "", "pool", _bytes(bench.reserved_bytes, exact=False, better=None))
    if bench.reserved_tokens is not None:
        yield Entry(f"{BENCH}memory", "", "pool tokens", Metric(bench.reserved_tokens, "tokens", "higher", "memory"))


def _serving(bench: Serving) -> Iterator[Entry]:
    group = f"{BENCH}serving"
    for cell in bench.cells:
        place = _place(cell)
        yield from failure(group, place, cell)
        if not cell.valid:
            why = "; ".join(flag.text for flag in cell.flags)
            yield Entry(group, place, "", None, f"the cell is invalid{': ' if why else ''}{why}")
            continue
        for name, metric in _load(cell):
            repeats = _repeats(cell).get(_plain(name), ())
            yield Entry(group, place, name, replace(metric, repeats=repeats, flags=_kinds(cell.flags)))
    for point in bench.saturation:
        if point.concurrency is not None:
            yield Entry(group, _context(point), "saturation", Metric(point.concurrency, "count", None))


def _place(cell: LoadCell) -> str:
    """``1024→128 tokens, closed, C = 32``."""
    sizes = "→".join("mixed" if n is None else str(n) for n in (cell.context, cell.output))
    rate = "" if cell.request_rate is None else f" {cell.request_rate:g}/s"
    limit = "" if cell.concurrency is None else f", C = {cell.concurrency}"
    return f"{sizes} tokens, {cell.arrival}{rate}{limit}"


def _context(point: Saturation) -> str:
    return "mixed" if point.context is None else f"{point.context} tokens"


def _load(cell: LoadCell) -> Iterator[tuple[str, Metric]]:
    rates: Mapping[str, tuple[float | None, Unit]] = {
        "output rate": (cell.output_rate, "tok/s"),
        "total rate": (cell.total_rate, "tok/s"),
        "completed rate": (cell.completed_rate, "req/s"),
        "server's output rate": (cell.server.output_rate if cell.server else None, "tok/s"),
        "goodput": (cell.goodput.rate if cell.goodput else None, "req/s"),
    }
    for name, (value, unit) in rates.items():
        if value is not None:
            yield name, Metric(value, unit, "higher", "slowdown")
    for name, found in (("ttft", cell.ttft), ("tpot", cell.tpot), ("itl", cell.itl), ("e2el", cell.e2el)):
        if found is not None:
            yield from ((f"{name} {part}", metric) for part, metric in _latencies(found))
    if cell.goodput is not None:
        yield "good requests", Metric(cell.goodput.share, "share", "higher", "score")
    if cell.n_requests:
        yield "failed requests", Metric(1 - cell.n_completed / cell.n_requests, "share", "lower", "score")
    if cell.effective_concurrency is not None:
        yield "effective concurrency", Metric(cell.effective_concurrency, "count", None)
    speculation = cell.server.speculation if cell.server else None
    if speculation is not None and speculation.acceptance_length is not None:
        yield "acceptance length", Metric(speculation.acceptance_length, "tokens", "higher", "slowdown")


def _latencies(found: Distribution) -> Iterator[tuple[str, Metric]]:
    yield "mean", Metric(found.mean, "ms", "lower", "slowdown")
    for name, value in found.percentiles.items():
        beyond = found.n * (1 - _quantile(name))
        few = f"{beyond:.3g} of {found.n} beyond" if beyond < _FEWEST_BEYOND else ""
        yield name, Metric(value, "ms", "lower", "slowdown", weak=few)


def _quantile(name: str) -> float:
    """``p99`` → 0.99; what names no percentile counts as the largest."""
    try:
        return min(1.0, max(0.0, float(name.removeprefix("p")) / 100))
    except ValueError:
        return 1.0


def _repeats(cell: LoadCell) -> dict[str, tuple[float, ...]]:
    return {_plain(name): values for name, values in cell.repeats.items()}


def _plain(name: str) -> str:
    """``ttft_p50``, ``ttft.p50`` and ``ttft p50`` are one name."""
    return name.lower().replace("_", " ").replace(".", " ")
