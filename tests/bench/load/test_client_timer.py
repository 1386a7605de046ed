"""Timers on the monotonic clock, with the system's own files and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvloop

from fidelab.bench.load import timer
from fidelab.bench.load.timer import Ticker, Timer


@pytest.fixture(params=["file", "loop"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop, with timers that are files (where there are any) or the loop's own."""
    if request.param == "loop":
        monkeypatch.setattr(timer, "sys", SimpleNamespace(platform="other"))
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    yield made
    made.close()


def test_a_timer_calls_back_not_before_its_instant_and_once(loop: asyncio.AbstractEventLoop) -> None:
    called: list[float] = []
    one = Timer(loop, lambda: called.append(time.monotonic()))
    when = time.monotonic() + 0.05
    one.at(when)
    loop.run_until_complete(asyncio.sleep(0.3))
    one.close()
    assert len(called) == 1
    assert called[0] >= when - 0.002  # the loop's own timers round to milliseconds


def test_a_timer_for_an_instant_that_is_over_calls_back_at_once(loop: asyncio.AbstractEventLoop) -> None:
    called: list[int] = []
    one = Timer(loop, lambda: called.append(1))
    one.at(time.monotonic() - 5)
    loop.run_until_complete(asyncio.sleep(0.1))
    one.close()
    assert called == [1]


def test_what_was_asked_last_counts(loop: asyncio.AbstractEventLoop) -> None:
    called: list[float] = []
    one = Timer(loop, lambda: called.append(time.monotonic()))
    one.at(time.monotonic() + 0.01)
    later = time.monotonic() + 0.1
    one.at(later)
    loop.run_until_complete(asyncio.sleep(0.3))
    one.close()
    assert len(called) == 1
    assert called[0] >= later - 0.002


def test_a_closed_timer_calls_nobody(loop: asyncio.AbstractEventLoop) -> None:
    called: list[int] = []
    one = Timer(loop, lambda: called.append(1))
    one.at(time.monotonic() + 0.02)
    one.close()
    loop.run_until_complete(asyncio.sleep(0.1))
    assert called == []


def test_a_ticker_counts_every_tick_that_a_standstill_covers(loop: asyncio.AbstractEventLoop) -> None:
    ticker = Ticker(loop, 0.01, lambda now: None)

    async def stand_still() -> None:
        await asyncio.sleep(0.02)
        time.sleep(0.1)
        await asyncio.sleep(0.02)

    began = time.monotonic()
    loop.run_until_complete(stand_still())
    seconds = time.monotonic() - began
    ticker.close()
    assert abs(len(ticker.late) - seconds / 0.01) <= 3
    assert sum(late > 0.015 for late in ticker.late) >= 8
