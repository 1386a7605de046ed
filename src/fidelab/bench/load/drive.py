"""The drive: requests onto a server, closed or open loop, by this process or by several.

Several processes share a load: each sends every k-th request at its part of the concurrency, and all begin at one
instant of the system's monotonic clock, which is the same in all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np

from fidelab.bench.load.client import Part, Share, run_here
from fidelab.bench.load.exchange import DriveResult, Exchange, Load, Request, ServerRefusedError, Target
from fidelab.bench.load.workers import run_workers
from fidelab.errors import UsageError

__all__ = ["BEHIND", "Load", "ServerRefusedError", "Target", "drive", "workers_for"]

BEHIND = 0.050  # seconds: p99 of sent − due above which an open loop did not keep its rate

_REQUESTS_PER_WORKER = 1000.0  # per second; a core manages several times as many, but a busy client is a late one
_TOKENS_PER_WORKER = 15_000.0  # per second, likewise
_CONCURRENCY_PER_WORKER = 512


def drive(target: Target, load: Load, on_progress: Callable[[int, int], None] | None = None) -> DriveResult:
    """Put ``load`` on ``target`` and say what became of each request.

    It ends by itself: every request has its time-outs.  A request that fails is an exchange with an error; the load
    goes on.  ``on_progress`` is called about five times a second with the number of requests that ended, and of all.

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

    One core is left to the server's side; a closed loop's rate is the server's affair and not known before.
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


def _share(load: Load, at: int, k: int) -> Share:
    """What process ``at`` of ``k`` sends."""
    measured = load.requests[load.warmup :]
    concurrency = None
    if load.concurrency is not None:
        concurrency = load.concurrency // k + (at < load.concurrency % k)
    return Share(
        warmup=load.requests[: load.warmup][at::k],
        measured=measured[at::k],
        concurrency=concurrency,
        open_loop=load.open_loop,
        warmup_seconds=min(_due(request) for request in measured) if load.open_loop and load.warmup else 0.0,
        phases=1 + (load.warmup > 0 and not load.open_loop),
        duration=load.duration,
        drain=load.drain,
        ramp=load.ramp,
    )


def _merge(parts: list[Part], open_loop: bool) -> DriveResult:
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
    late = [
        one.sent - one.due for one in exchanges if one.due is not None and not one.warmup and one.error != "connect"
    ]
    return bool(late) and float(np.percentile(late, 99)) > BEHIND


def _due(request: Request) -> float:
    return request.due or 0.0
