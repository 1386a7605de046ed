"""Flags of a load: one check per kind, each of which returns a sentence with figures, or ``None``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from fidelab.bench.load_pool import Pool
from fidelab.metrics.serving import fill, sent_rate
from fidelab.results.measurement import Flag

_DEPTH = 0.05  # relative difference of the prompts' length from the requested one
_FILLED = 0.9  # of the requested concurrency
FAILED = 0.05  # of all requests, beyond which a cell is invalid
_LAG = 0.1  # of the median gap between events
_RATE = 0.95  # of the requested requests per second
_MISMATCH = (0.9, 1.1)  # client's over server's output rate

SPOILS = frozenset({"depth", "underfilled", "overlong", "errors", "no-usage", "rate"})
"""Kinds for which a cell may be invalid; the others make it doubtful."""


def find_flags(pool: Pool) -> tuple[Flag, ...]:
    """All flags of a cell."""
    checks: tuple[tuple[str, Callable[[Pool], str | None]], ...] = (
        ("depth", _depth),
        ("underfilled", _underfilled),
        ("output", _output),
        ("overlong", _overlong),
        ("errors", _errors),
        ("no-usage", _no_usage),
        ("lag", _lag),
        ("rate", _rate),
        ("server-mismatch", _mismatch),
    )
    return tuple(Flag(kind=kind, text=text) for kind, check in checks if (text := check(pool)))


def _depth(pool: Pool) -> str | None:
    """Over all prompts together: single prompts may differ where words are used for tokens."""
    read = wanted = 0
    for drive in pool.drives:
        asked = {request.index: request.prompt_tokens for request in drive.requests}
        for exchange in drive.measured:
            length = asked[exchange.index]
            if exchange.error is None and exchange.prompt_tokens is not None and length is not None:
                read, wanted = read + exchange.prompt_tokens, wanted + length
    if not wanted or abs(read - wanted) <= _DEPTH * wanted:
        return None
    return f"the server counted {read:,} prompt tokens, {read / wanted:.2f} times the {wanted:,} that were asked"


def _underfilled(pool: Pool) -> str | None:
    """Up to the last request sent: after it, no request can replace those that end."""
    wanted = pool.asked.concurrency
    if pool.asked.arrival != "closed" or wanted is None or not pool.done:
        return None
    results = [(drive.measured, drive.result) for drive in pool.drives]
    least = min(fill(sent, result.started + pool.asked.ramp, result.ended) for sent, result in results)
    if least >= _FILLED * wanted:
        return None
    return f"{least:.1f} requests were in flight, not {wanted}"


def _output(pool: Pool) -> str | None:
    if not pool.asked.whole or not pool.counted:
        return None
    short = lacking = 0
    for drive in pool.drives:
        wanted = {request.index: request.max_tokens for request in drive.requests}
        for exchange in drive.measured:
            missing = wanted[exchange.index] - (exchange.output_tokens or 0) if exchange.error is None else 0
            short, lacking = short + (missing > 0), lacking + max(0, missing)
    if not short:
        return None
    return f"{short} of {len(pool.done)} answers ended early, {lacking / short:.1f} tokens on average"


def _overlong(pool: Pool) -> str | None:
    """More tokens than were asked: the server counts what it did not write, or wrote another load than this."""
    over = most = 0
    for drive in pool.drives:
        wanted = {request.index: request.max_tokens for request in drive.requests}
        for exchange in drive.measured:
            surplus = (exchange.output_tokens or 0) - wanted[exchange.index] if exchange.error is None else 0
            over, most = over + (surplus > 0), max(most, surplus)
    if not over:
        return None
    return f"the server counted more tokens than were asked for {over} of {len(pool.done)} answers, up to {most:,} more"


def _errors(pool: Pool) -> str | None:
    if not pool.failed:
        return None
    kinds = Counter(exchange.error for exchange in pool.sent if exchange.error)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{pool.failed} of {len(pool.sent)} requests failed: {listed}"


def _no_usage(pool: Pool) -> str | None:
    if pool.counted and pool.asked.by_finish:
        return "the server's streams carry no usage: tokens are those asked, as answers ended for their length"
    without = sum(exchange.output_tokens is None for exchange in pool.done)
    if not without:
        return None
    return f"the server counted no tokens for {without} of {len(pool.done)} answers: there are no token rates"


def _lag(pool: Pool) -> str | None:
    gaps, lag = pool.latencies.of("itl"), pool.lag(99).get("p99")
    if lag is None or not len(gaps) or lag <= _LAG * (gap := float(np.median(gaps))):
        return None
    return f"the client's own lag (p99 {lag:.2f} ms) is over 10% of the gaps that it measured (p50 {gap:.2f} ms)"


def _rate(pool: Pool) -> str | None:
    """Against the schedule of the sent requests, because random gaps are not the client's fault."""
    for drive in pool.drives:
        due = [exchange.due for exchange in drive.measured if exchange.due is not None]
        span = max(due, default=0.0) - min(due, default=0.0)
        reached, planned = sent_rate(drive.measured), (len(due) - 1) / span if span > 0 else None
        slow = reached is not None and planned is not None and reached < _RATE * planned
        if pool.asked.arrival != "closed" and (slow or drive.result.behind):
            limit = pool.asked.concurrency
            why = f"; no more than {limit} were to be in flight" if limit is not None else ""
            due_sent = f"{_rounded(planned or 0)} requests/s were due, {_rounded(reached or 0)} sent"
            return f"the client could not keep the rate: {due_sent}{why}"
    return None


def _mismatch(pool: Pool) -> str | None:
    ours, ratio = pool.output_rate(), pool.ratio()
    if ours is None or ratio is None or _MISMATCH[0] <= ratio <= _MISMATCH[1]:
        return None
    return f"the client saw {_rounded(ours)} tok/s, the server counted {_rounded(ours / ratio)}: ratio {ratio:.2f}"


def _rounded(rate: float) -> str:
    """Four significant digits, whole from 1,000 on."""
    return f"{rate:,.0f}" if rate >= 999.95 else f"{rate:.4g}"
