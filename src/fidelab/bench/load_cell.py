"""One load on a server → its record: figures, and whether they may be compared.

A cell is invalid where it was not the load that was asked: another depth, too few requests in flight, requests later
than due, many failed, tokens that nobody counted.  What is merely doubtful is flagged and stays valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fidelab.bench.load.exchange import Exchange
from fidelab.bench.load.server_metrics import ServerReading
from fidelab.bench.load_flags import FAILED, SPOILS, find_flags
from fidelab.bench.load_pool import Asked, Drive, Pool
from fidelab.core import Status
from fidelab.metrics.saturation import saturation
from fidelab.results.bench_values import FlagKind
from fidelab.results.serving_record import LoadCell, Saturation

__all__ = ["Asked", "Drive", "compare_counts", "count_by_finish", "find_saturation", "load_cell", "why_invalid"]

_READINGS = 5  # of the server's metrics within the measured part, for their differences to be a rate
_ALWAYS: frozenset[FlagKind] = frozenset({"depth", "underfilled", "rate"})  # make a cell invalid


def count_by_finish(drive: Drive) -> Drive:
    """The drive with token counts where the stream had no usage, but ended for its length.

    A server that stops for ``length`` says that it wrote as many tokens as were asked.  Only for servers that say the
    same in the usage of an answer that is no stream, and count prompts as we do: so nothing is guessed from events.
    """
    asked = {request.index: request for request in drive.requests}

    def counted(exchange: Exchange) -> Exchange:
        if exchange.error is not None or exchange.output_tokens is not None or exchange.finish_reason != "length":
            return exchange
        request = asked[exchange.index]
        return replace(exchange, prompt_tokens=request.prompt_tokens, output_tokens=request.max_tokens)

    return replace(drive, result=replace(drive.result, exchanges=[*map(counted, drive.result.exchanges)]))


def compare_counts(drive: Drive, whole: ServerReading | None, seconds: float) -> Drive:
    """The drive with the server's rate from its counters over the whole drive, where the measured part is short.

    Counters are read once a second: between two readings it is not known when the tokens came.  But over the whole
    drive (``whole``, ``seconds``), the warm-up included, the server's tokens are ours: the share of ours that belongs
    to the measured part is taken of the server's, too.
    """
    read = drive.server
    if read is None or whole is None or whole.output_rate is None or read.samples >= _READINGS:
        return drive
    written = {one.index: one.output_tokens or 0 for one in drive.result.exchanges}
    ours, measured = sum(written.values()), sum(written[one.index] for one in drive.measured)
    if not ours or drive.seconds <= 0:
        return replace(drive, server=replace(read, output_rate=None))
    rate = whole.output_rate * seconds * measured / ours / drive.seconds
    return replace(drive, server=replace(read, output_rate=rate))


def load_cell(asked: Asked, drives: Sequence[Drive]) -> LoadCell:
    """The record of a cell that was driven at least once; repeats are pooled, and stand apart in ``repeats``."""
    whole = Pool(asked, drives)
    flags = find_flags(whole)
    base = LoadCell(
        status=Status.OK if whole.done else Status.FAILED,
        reason=None if whole.done else whole.why(),
        arrival=asked.arrival,
        context=asked.context,
        output=asked.output,
        concurrency=asked.concurrency,
        request_rate=asked.request_rate,
        valid=whole.counted
        and whole.failed <= FAILED * len(whole.sent)
        and not any(flag.kind in _ALWAYS for flag in flags),
        flags=flags,
        seconds=whole.seconds,
        n_requests=len(whole.sent),
        n_completed=len(whole.done),
        errors=dict(Counter(exchange.error for exchange in whole.sent if exchange.error)),
        input_tokens=sum(exchange.prompt_tokens or 0 for exchange in whole.done),
        output_tokens=sum(exchange.output_tokens or 0 for exchange in whole.done),
        context_measured=whole.context(),
        effective_concurrency=whole.in_flight(),
        completed_rate=whole.per_second(len(whole.done)),
        output_rate=whole.output_rate(),
        total_rate=whole.total_rate(),
        goodput=whole.goodput(),
        client=whole.client(),
        server=whole.server(),
    )
    return base.model_copy(update=whole.distributions() | {"repeats": _repeats(asked, drives)})


def why_invalid(cell: LoadCell) -> str:
    """One line for a cell that failed or may not stand in a comparison; empty for any other."""
    if cell.status is not Status.OK:
        return f"{cell.status.replace('_', ' ')}: {cell.reason}"
    return "" if cell.valid else f"invalid: {'; '.join(flag.text for flag in cell.flags if flag.kind in SPOILS)}"


def find_saturation(cells: Sequence[LoadCell]) -> tuple[Saturation, ...]:
    """Per context and output with at least two valid closed-loop cells: where more requests stop paying."""
    curves: dict[tuple[int | None, int | None], dict[int, float]] = {}
    for cell in cells:
        if cell.valid and cell.arrival == "closed" and cell.concurrency and cell.output_rate:
            curves.setdefault((cell.context, cell.output), {})[cell.concurrency] = cell.output_rate
    found = []
    for (context, _), curve in curves.items():
        if len(curve) > 1:
            at, gain = saturation(list(curve), list(curve.values()))
            found.append(Saturation(context=context, concurrency=at, gain=gain))
    return tuple(found)


def _repeats(asked: Asked, drives: Sequence[Drive]) -> dict[str, tuple[float, ...]]:
    """Metric → its value in each repeat; those that some repeat lacks are left out."""
    if len(drives) < 2:
        return {}
    rows = [Pool(asked, [drive]).figures() for drive in drives]
    names = [name for name in rows[0] if all(row.get(name) is not None for row in rows)]
    return {name: tuple(float(row[name] or 0.0) for row in rows) for name in names}
