"""One load on a server → its metrics, and whether they may be compared.

A cell is invalid where it was not the load that was asked: another depth, too few requests in flight, requests later
than due, many failed, tokens that nobody counted or asked for.  What is merely doubtful is flagged and stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fidelab.bench.base import CellResult
from fidelab.bench.load.exchange import Exchange
from fidelab.bench.load.server_metrics import ServerReading
from fidelab.bench.load_figures import load_metrics
from fidelab.bench.load_flags import FAILED, SPOILS, find_flags
from fidelab.bench.load_pool import Drive, LoadAsked, Pool
from fidelab.core import Status
from fidelab.results.measurement import Cell

__all__ = ["Drive", "LoadAsked", "compare_counts", "count_by_finish", "load_cell", "why_invalid"]

_READINGS = 5  # of the server's metrics within the measured part, for their differences to be a rate
_ALWAYS = frozenset({"depth", "underfilled", "overlong", "rate"})  # make a cell invalid


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


def load_cell(asked: LoadAsked, drives: Sequence[Drive]) -> CellResult:
    """A cell that was driven at least once; repeats are pooled, and stand apart in its metrics' ``repeats``."""
    whole = Pool(asked, drives)
    flags = find_flags(whole)
    cell = Cell(
        status=Status.OK if whole.done else Status.FAILED,
        reason=None if whole.done else whole.why(),
        at=asked.at,
        valid=whole.counted
        and whole.failed <= FAILED * len(whole.sent)
        and not any(flag.kind in _ALWAYS for flag in flags),
        flags=flags,
        facts=whole.facts(),
    )
    return CellResult(cell, load_metrics(asked.at, whole.rates(), whole.shown, whole.more(), _repeats(asked, drives)))


def why_invalid(cell: Cell) -> str:
    """One line for a cell that failed or may not stand in a comparison; empty for any other."""
    if cell.status is not Status.OK:
        return f"{cell.status.replace('_', ' ')}: {cell.reason}"
    return "" if cell.valid else f"invalid: {'; '.join(flag.text for flag in cell.flags if flag.kind in SPOILS)}"


def _repeats(asked: LoadAsked, drives: Sequence[Drive]) -> dict[str, tuple[float, ...]]:
    """Metric → its value in each repeat; those that some repeat lacks are left out."""
    if len(drives) < 2:
        return {}
    pools = [Pool(asked, [drive]) for drive in drives]
    rows = [{m.key: m.value or 0.0 for m in load_metrics(asked.at, pool.rates(), pool.shown)} for pool in pools]
    return {name: tuple(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}
