"""Load on a server as a table: a row per cell, which says whether it is valid; and where servers saturate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fidelab.core import Status
from fidelab.report.bench_tables import NOTES, Arms, Bench, Notes, bench_table, labels_of, over
from fidelab.report.cells import shared
from fidelab.results.bench_record import Benches
from fidelab.results.bench_values import Flag
from fidelab.results.numbers import (
    ABSENT,
    MINUS,
    format_amount,
    format_count,
    format_ratio,
    format_share,
    format_tokens,
    one_line,
)
from fidelab.results.serving_record import Distribution, LoadCell, Saturation, Server, Serving

__all__ = ["counts", "served", "serving"]

_COLUMNS = (
    *("arm", "context asked/ measured", "out", "at once", "req/s asked", "output tok/s", "low–high", "× ref."),
    *("TTFT ms p50/p99", "TPOT ms p50/p99", "ITL ms p50/p99", "E2E ms p50/p99", "in flight", "requests", "errors"),
    *("goodput req/s", "good", "client over server", "server running/ queued", "KV used", "lag ms p99"),
    *("accepted length", "valid", NOTES),
)
_TITLE = "Serving: load on a server"
Shape = tuple[str, int | None, int | None, int | None, float | None]


def serving(arms: Arms) -> Bench | None:
    """All cells of all arms."""
    found = [
        (name, arm.benches.serving) for (_, arm), name in zip(arms, labels_of(arms), strict=True) if arm.benches.serving
    ]
    notes = Notes()
    first = arms[0][1].benches.serving
    base = {_shape(cell): cell for cell in (first.cells if first else ()) if counts(cell)}
    rows = [
        (name, *_cells(name, cell, None if own is first else base.get(_shape(cell)), notes))
        for name, own in found
        for cell in own.cells
    ]
    if not rows:
        return None
    lines = shared((name, line) for name, own in found for line in _lines(own))
    sources = shared((name, _source(own)) for name, own in found)
    table = bench_table("serving", _TITLE, _COLUMNS, rows)
    return Bench("serving", _TITLE, (table,), notes, tuple(lines), tuple(sources))


def served(benches: Sequence[Benches]) -> tuple[str, list[float | None]] | None:
    """Output tok/s of all arms at the smallest context and the highest load at which the first one of them is valid."""
    for found in benches:
        valid = [cell for cell in (found.serving.cells if found.serving else ()) if counts(cell)]
        if valid:
            pick = max(valid, key=lambda cell: (-(cell.context or 0), cell.concurrency or 0, cell.request_rate or 0))
            rates = [_served(other, _shape(pick)) for other in benches]
            return f"{_load(pick)}, context {_context(pick.context)}", rates
    return None


def counts(cell: LoadCell) -> bool:
    """The cell may stand in a comparison."""
    return cell.valid and cell.status is Status.OK and cell.output_rate is not None


def _served(benches: Benches, shape: Shape) -> float | None:
    cells = benches.serving.cells if benches.serving else ()
    return next((cell.output_rate for cell in cells if counts(cell) and _shape(cell) == shape), None)


def _shape(cell: LoadCell) -> Shape:
    return cell.arrival, cell.context, cell.output, cell.concurrency, cell.request_rate


def _load(cell: LoadCell) -> str:
    if cell.request_rate is not None:
        return f"{cell.request_rate:g} req/s"
    return f"{cell.concurrency} at once" if cell.concurrency is not None else "no limit"


def _context(context: int | None) -> str:
    return "mixed" if context is None else format_tokens(context)


def _cells(name: str, cell: LoadCell, base: LoadCell | None, notes: Notes) -> tuple[str, ...]:
    ratio = over(cell.output_rate, base.output_rate) if base and counts(cell) else None
    asked = _context(cell.context)
    repeats = cell.repeats.get("output_rate", ())
    server, drafts = cell.server, cell.server.speculation if cell.server else None
    return (
        asked if cell.context_measured is None else f"{asked}/{cell.context_measured:,.0f}",
        format_count(cell.output),
        format_count(cell.concurrency),
        format_amount(cell.request_rate),
        format_amount(cell.output_rate),
        f"{format_amount(min(repeats))}–{format_amount(max(repeats))}" if len(repeats) > 1 else ABSENT,
        format_ratio(ratio),
        *(_tail(times) for times in (cell.ttft, cell.tpot, cell.itl, cell.e2el)),
        format_amount(cell.effective_concurrency),
        format_count(cell.n_requests),
        format_count(sum(cell.errors.values())),
        format_amount(cell.goodput.rate if cell.goodput else None),
        format_share(cell.goodput.share if cell.goodput else None),
        format_ratio(server.ratio if server else None),
        _queue(server),
        format_share(server.kv_usage_max if server else None),
        format_amount(cell.client.lag_p99 if cell.client else None),
        format_amount(drafts.acceptance_length if drafts else None),
        "yes" if counts(cell) else "no",
        notes.mark(name, (*cell.flags, *_errors(cell)), cell),
    )


def _tail(times: Distribution | None) -> str:
    """``p50/p99``."""
    if times is None:
        return ABSENT
    return "/".join(format_amount(times.percentiles.get(name)) for name in ("p50", "p99"))


def _queue(server: Server | None) -> str:
    """Requests at work on average, and the longest queue, as the server says."""
    if server is None or (server.running_mean is None and server.waiting_max is None):
        return ABSENT
    return f"{format_amount(server.running_mean)}/{format_count(server.waiting_max)}"


def _errors(cell: LoadCell) -> Iterator[Flag]:
    if cell.errors and not any(flag.kind == "errors" for flag in cell.flags):
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in cell.errors.items())
        yield Flag(kind="errors", text=f"failed requests by kind: {kinds}")


def _source(serving: Serving) -> str:
    return f"{one_line(serving.model)} at {one_line(serving.target)}{one_line(serving.endpoint)}"


def _lines(serving: Serving) -> Iterator[str]:
    """What concerns all cells, and where each context saturates."""
    yield from (one_line(flag.text) for flag in serving.flags)
    yield from (f"context {_context(found.context)}: {_saturation(found)}" for found in serving.saturation)


def _saturation(found: Saturation) -> str:
    gain = "" if found.gain is None else f"{100 * found.gain:.1f}%".replace("-", MINUS)
    if found.concurrency is not None:
        adds = f": the next step adds {gain}, less than {100 * found.threshold:g}%" if gain else ""
        return f"saturated at {found.concurrency} requests at once{adds}"
    return f"not saturated as far as was measured{f' (the last step adds {gain})' if gain else ''}"
