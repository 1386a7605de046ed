"""The drive: sends a load to a server, closed or open loop, from this process or from several.

Several processes share a load: each sends every k-th request at its part of the concurrency, and all begin at the same
instant of the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np

from fidelab.bench.load.client import ClientPart, ClientShare, run_here
from fidelab.bench.load.exchange import DriveResult, Exchange, Load, ServerRefusedError, Target
from fidelab.bench.load.workers import run_workers
from fidelab.core.errors import UsageError

__all__ = ["BEHIND", "Load", "ServerRefusedError", "Target", "drive", "workers_for"]

BEHIND = 0.050  # seconds: p99 of sent − due above which an open loop did not keep its rate

_REQUESTS_PER_WORKER = 1000.0  # per second; a core manages 3,000, but a busy client is a late one
_TOKENS_PER_WORKER = 10_000.0  # per second; a core manages 16,000 to 33,000 (benchmarks/load_client.py --itl 10)
_CONCURRENCY_PER_WORKER = 256


def drive(target: Target, load: Load, on_progress: Callable[[int, int], None] | None = None) -> DriveResult:
    """Send ``load`` to ``target`` and return the outcome of each request.

    Ends without help, since every request has time-outs.  A failed request is an exchange with an error; the load goes
    on.  ``on_progress`` is called about five times a second with the number of ended requests and of all requests.

    Raises:
        InputError: nobody answers at the URL, or (:class:`ServerRefusedError`, with the server's words) the first
            requests are all refused alike, so that the others would be; UsageError: a URL, a header or a load that
            cannot be.
    """
    _check(load)
    k = load.workers or workers_for(load, os.cpu_count() or 1)
    k = max(1, min(k, len(load.requests) - load.warmup, load.concurrency or len(load.requests)))
    shares = [_share(load, at, k) for at in range(k)]
    total = len(load.requests)
    progress = None if on_progress is None else (lambda ended: on_progress(ended, total))
    parts = [run_here(target, shares[0], progress)] if k == 1 else run_workers(target, shares, progress)
    return _merge(parts, load.open_loop)


def workers_for(load: Load, cores: int) -> int:
    """Client processes for a load: by rate and tokens per second of an open loop, by the concurrency of a closed one.

    One core is left to the server.  The rate of a closed loop depends on the server and is not known beforehand.
    """
    need = (load.concurrency or 1) / _CONCURRENCY_PER_WORKER
    last = max((request.due or 0.0) for request in load.requests)
    if load.open_loop and last > 0:
        rate = len(load.requests) / last
        tokens = float(np.mean([request.max_tokens for request in load.requests]))
        need = max(need, rate / _REQUESTS_PER_WORKER, rate * tokens / _TOKENS_PER_WORKER)
    return max(1, min(math.ceil(need), cores - 1))


def _check(load: Load) -> None:
    if not 0 <= load.warmup < len(load.requests):
        raise UsageError(f"{len(load.requests)} requests with a warm-up of {load.warmup} leave nothing to measure")
    if len({request.index for request in load.requests}) < len(load.requests):
        raise ValueError("each request needs an index of its own")
    if load.open_loop and any(request.due is None for request in load.requests):
        raise ValueError("an open loop needs to know when each request is due")
    for name, value in (("concurrency", load.concurrency), ("workers", load.workers)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}: at least 1 is needed")


def _share(load: Load, at: int, k: int) -> ClientShare:
    """What process ``at`` of ``k`` sends."""
    measured = load.requests[load.warmup :]
    concurrency = None
    if load.concurrency is not None:
        concurrency = load.concurrency // k + (at < load.concurrency % k)
    return ClientShare(
        warmup=load.requests[: load.warmup][at::k],
        measured=measured[at::k],
        concurrency=concurrency,
        open_loop=load.open_loop,
        warmup_seconds=min(request.due or 0.0 for request in measured) if load.open_loop and load.warmup else 0.0,
        phases=1 + (load.warmup > 0 and not load.open_loop),
        duration=load.duration,
        drain=load.drain,
        ramp=load.ramp,
    )


def _merge(parts: list[ClientPart], open_loop: bool) -> DriveResult:
    exchanges = sorted((exchange for part in parts for exchange in part.exchanges), key=lambda one: one.index)
    started = parts[0].started
    return DriveResult(
        exchanges=exchanges,
        started=started,
        ended=max((exchange.ended for exchange in exchanges if not exchange.warmup), default=started),
        lag=np.concatenate([part.lag for part in parts]),
        cpu_seconds=sum(part.cpu_seconds for part in parts),
        workers=len(parts),
        behind=open_loop and _behind(exchanges),
    )


def _behind(exchanges: list[Exchange]) -> bool:
    late = [e.sent - e.due for e in exchanges if e.due is not None and not e.warmup and e.error != "connect"]
    return bool(late) and float(np.percentile(late, 99)) > BEHIND
