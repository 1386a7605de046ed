"""``fidelab bench calibrate``: the load generator's own error and speed, against a mock server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fidelab.bench.load.calibrate import Calibration, ClientLatency, Delay


def calibrate(
    ttft: Annotated[float, typer.Option(min=0, help="Time to first token of the mock server in ms.")] = 200,
    itl: Annotated[float, typer.Option(min=0, help="Time between tokens of the mock server in ms.")] = 20,
    jitter: Annotated[float, typer.Option(min=0, help="Jitter of these times, ± ms.")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Streams with compared timestamps.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per stream.")] = 64,
    fast_requests: Annotated[int, typer.Option(min=1, help="Streams for the throughput test, 8 tokens each.")] = 4000,
    workers: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure the accuracy of the load generator on a mock server.

    [bold]Examples[/bold]

      fidelab bench calibrate

      fidelab bench calibrate --ttft 50 --itl 5 --jitter 2 --concurrency 128 --json
    """
    from fidelab.bench.load.calibrate import calibrate as measure

    calibration = measure(
        ttft=ttft,
        itl=itl,
        jitter=jitter,
        concurrency=concurrency,
        requests=requests,
        tokens=tokens,
        fast_requests=fast_requests,
        workers=workers,
        seed=seed,
    )
    sys.stdout.write(calibration.to_json() + "\n" if as_json else "".join(f"{line}\n" for line in _lines(calibration)))


def _lines(calibration: Calibration) -> Iterator[str]:
    from fidelab.bench.load.calibrate import GOAL_P50, GOAL_P99

    settings, accuracy, speed = calibration.settings, calibration.accuracy, calibration.speed
    assert accuracy.events is not None
    yield (
        f"{accuracy.streams} streams of {settings['tokens']} tokens, concurrency {settings['concurrency']}, "
        f"TTFT {settings['ttft']:g} ms, ITL {settings['itl']:g} ± {settings['jitter']:g} ms"
    )
    if accuracy.failed or accuracy.unmatched:
        yield f"  {accuracy.failed} requests failed, {accuracy.unmatched} streams lack events: they are left out"
    yield _delay("timestamp error", accuracy.events)
    yield from (_latency(name, each) for name, each in (("TTFT", accuracy.ttft), ("TPOT", accuracy.tpot)) if each)
    if calibration.lag is not None:
        yield _delay("event loop lag", calibration.lag)
    outcome = "met" if calibration.goals_met else "MISSED"
    yield f"Goal (p50 ≤ {GOAL_P50:g} ms, p99 ≤ {GOAL_P99:g} ms, nothing lost): {outcome}."
    yield f"As fast as possible: {speed.requests} streams of {speed.tokens} tokens"
    if speed.failed:
        yield f"  {speed.failed} of these failed"
    yield f"  {speed.requests_per_second:,.0f} requests/s, {speed.events_per_second:,.0f} events/s"
    yield (
        f"  {1e3 * speed.cpu_seconds_per_request:.3f} ms of the client's processor time per request, "
        f"{1e3 * speed.cpu_seconds_sending:.3f} of it while sending; the rest reads the answers afterwards"
    )


def _delay(name: str, delay: Delay) -> str:
    return f"  {name:<16} p50 {delay.p50:.2f} ms, p99 {delay.p99:.2f} ms, max {delay.max:.2f} ms ({delay.n:,})"


def _latency(name: str, latency: ClientLatency) -> str:
    return (
        f"  {name:<16} {latency.measured:.2f} ms measured, {latency.true:.2f} ms true (medians); "
        f"error p99 {latency.error.p99:.2f} ms"
    )
