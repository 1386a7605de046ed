"""The drive: when requests go out, how many at a time, when it stops; in one process and in several."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fidelab.bench.load.client import MAX_P99_DELAY, drive
from fidelab.bench.load.exchange import Exchange, Load, LoadRequest, Target
from fidelab.core.errors import InputError, UsageError
from tests.bench.load.mock import MockServer, MockSettings
from tests.bench.load.sse_server import HEAD, Script, Talk, chunked, event, proper, requests, serve, unused_port, well
from tests.processes import until


async def after_a_while(talk: Talk) -> None:
    await asyncio.sleep(0.02)
    talk.send(proper())


def together(count: int) -> Script:
    """Answers nobody before ``count`` requests are there."""
    arrived = 0

    async def script(talk: Talk) -> None:
        nonlocal arrived
        arrived += 1
        end = time.monotonic() + 10
        while arrived < count and time.monotonic() < end:
            await asyncio.sleep(0.005)
        await after_a_while(talk)

    return script


async def never(talk: Talk) -> None:
    talk.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(event("a"), end=False))
    await asyncio.sleep(60)


def due(count: int, gap: float) -> list[LoadRequest]:
    return [replace(request, due=at * gap) for at, request in enumerate(requests(count))]


def in_flight(exchanges: list[Exchange]) -> int:
    """Most requests between sent and ended at one time."""
    changes = sorted([(one.ended, -1) for one in exchanges] + [(one.sent, 1) for one in exchanges])
    return int(np.max(np.cumsum([change for _, change in changes])))


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_keeps_its_concurrency_and_never_exceeds_it(concurrency: int) -> None:
    with serve(together(concurrency)) as served:
        result = drive(Target(served.url), Load(requests(30), concurrency=concurrency))
    assert served.most == concurrency == served.connections
    assert in_flight(result.exchanges) == concurrency
    assert [one.index for one in result.exchanges] == list(range(30))


def test_without_a_concurrency_a_closed_loop_sends_all_at_once() -> None:
    with serve(together(30)) as served:
        drive(Target(served.url), Load(requests(30)))
    assert served.most == 30


def test_the_warm_up_has_ended_before_the_measured_part_begins() -> None:
    with serve(after_a_while) as served:
        result = drive(Target(served.url), Load(requests(12), concurrency=4, warmup=5))
    warm, measured = result.exchanges[:5], result.exchanges[5:]
    assert [one.warmup for one in result.exchanges] == [True] * 5 + [False] * 7
    assert max(one.ended for one in warm) <= result.started <= min(one.sent for one in measured)
    assert result.ended == max(one.ended for one in measured)


def test_a_duration_ends_the_sending_and_what_flies_may_end() -> None:
    with serve(after_a_while) as served:
        load = Load(requests(5000), concurrency=2, duration=0.3)
        result = drive(Target(served.url), load)
    assert 2 <= len(result.exchanges) < 5000
    assert {one.error for one in result.exchanges} == {None}
    # On a busy machine, one request of each worker may be written after the end that it was begun before.
    assert sum(one.sent > result.started + 0.3 for one in result.exchanges) <= 2
    assert [one.index for one in result.exchanges] == list(range(len(result.exchanges)))


def test_what_still_flies_after_the_drain_is_aborted_and_keeps_its_events() -> None:
    with serve(never) as served:
        began = time.monotonic()
        load = Load(requests(50), concurrency=3, duration=0.1, drain=0.2)
        result = drive(Target(served.url), load)
    assert [one.error for one in result.exchanges] == ["aborted"] * 3
    assert [len(one.events) for one in result.exchanges] == [1] * 3
    assert time.monotonic() - began < 30


def test_an_open_loop_sends_nothing_early_and_everything_in_order() -> None:
    with serve(after_a_while) as served:
        result = drive(Target(served.url), Load(due(30, 0.007), open_loop=True))
    assert all(one.due is not None and one.sent >= one.due for one in result.exchanges)
    assert [one.due - result.started for one in result.exchanges if one.due is not None] == pytest.approx(
        [at * 0.007 for at in range(30)]
    )
    # on a busy machine the server's threads may read two requests in another order than they were sent in
    assert sorted(json.loads(body)["n"] for body in served.bodies) == list(range(30))
    assert [one.index for one in sorted(result.exchanges, key=lambda one: one.sent)] == list(range(30))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with serve(never) as served:
        load = Load(due(10, 0.01), open_loop=True, duration=0.3, drain=0.0)
        result = drive(Target(served.url), load)
    assert served.most == 10
    assert [one.error for one in result.exchanges] == ["aborted"] * 10


def test_requests_of_an_open_loop_may_come_in_any_order() -> None:
    with serve(well) as served:
        result = drive(Target(served.url), Load(due(10, 0.01)[::-1], open_loop=True))
    assert sorted(json.loads(body)["n"] for body in served.bodies) == list(range(10))
    assert [one.index for one in sorted(result.exchanges, key=lambda one: one.sent)] == list(range(10))
    assert [one.index for one in result.exchanges] == list(range(10))


def test_an_open_loop_that_its_cap_holds_back_is_behind() -> None:
    with serve(after_a_while) as served:
        capped = drive(Target(served.url), Load(due(20, 0.001), open_loop=True, concurrency=1))
    assert served.most == 1
    assert capped.behind
    late = [one.sent - one.due for one in capped.exchanges if one.due is not None]
    assert np.percentile(late, 99) > MAX_P99_DELAY


def test_the_measured_part_of_an_open_loop_begins_when_its_first_request_is_due() -> None:
    with serve(well) as served:
        result = drive(Target(served.url), Load(due(20, 0.01), open_loop=True, warmup=5))
    assert [one.warmup for one in result.exchanges] == [True] * 5 + [False] * 15
    assert result.exchanges[5].due == pytest.approx(result.started)


def test_the_client_counts_its_own_lag_and_time() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.055))  # the event loop stands still
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.2)
    try:
        with serve(after_a_while) as served:
            result = drive(Target(served.url), Load(requests(40), concurrency=2))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(result.lag) > 10
    assert (result.lag >= 0).all()
    assert sorted(result.lag)[-1] > 0.04  # each tick that was missed counts: about 45, 35, 25 … ms
    assert sum(late > 0.02 for late in result.lag) >= 3
    assert 0 < result.cpu_seconds < 10


def test_the_collector_and_the_limit_of_files_are_as_before() -> None:
    before = gc.isenabled(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(InputError):
        drive(Target(f"http://127.0.0.1:{unused_port()}/v1"), Load(requests(10), concurrency=1))
    assert (gc.isenabled(), resource.getrlimit(resource.RLIMIT_NOFILE)) == before


def test_loads_that_cannot_be_are_refused() -> None:
    target = Target("http://127.0.0.1:9/v1")
    with pytest.raises(UsageError, match="nothing to measure"):
        drive(target, Load(requests(3), warmup=3))
    with pytest.raises(UsageError, match="concurrency is 0"):
        drive(target, Load(requests(3), concurrency=0))
    with pytest.raises(ValueError, match="index"):
        drive(target, Load([*requests(3), *requests(1)]))
    with pytest.raises(ValueError, match="due"):
        drive(target, Load(requests(3), open_loop=True))


def test_an_interrupt_ends_everything(tmp_path: Path) -> None:
    script = tmp_path / "load.py"
    script.write_text(
        "import sys\n"
        "from fidelab.bench.load.client import drive\n"
        "from fidelab.bench.load.exchange import Load, LoadRequest, Target\n"
        "load = Load([LoadRequest(at, b'{}', None, 1) for at in range(8)], concurrency=8)\n"
        "drive(Target(sys.argv[1]), load)\n"
    )
    with serve(never) as served:
        process = subprocess.Popen([sys.executable, str(script), served.url], stderr=subprocess.PIPE)
        assert until(lambda: served.running >= 8, 60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in said


def test_nothing_is_received_before_it_was_sent() -> None:
    asked = {"prompt": [1, 2], "max_tokens": 5, "stream": True}
    bodies = [json.dumps({**asked, "user": str(index)}).encode() for index in range(8)]
    with MockServer(MockSettings(itl=0.002)) as mock:
        load = Load([LoadRequest(index, body, 2, 5) for index, body in enumerate(bodies)], concurrency=3)
        result = drive(Target(mock.url), load)
        log = mock.emitted()
    for each in result.exchanges:
        entry = log[str(each.index)]
        assert len(each.events) == 5
        assert each.sent <= entry["received"] <= entry["events"][0]
        assert (each.events >= entry["events"]).all()
