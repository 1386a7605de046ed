"""Figures of recorded event streams, against closed forms."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fidelab.metrics.serving import count_good, effective_concurrency, fill, latencies, sent_rate


@dataclass
class Recorded:
    """A request: sent, its events, and what the server counted."""

    sent: float
    events: NDArray[np.float64]
    output_tokens: int | None = None
    error: str | None = None
    due: float | None = None
    ended: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.ended = self.ended or (float(self.events[-1]) if len(self.events) else self.sent)


def steady(sent: float, ttft: float, gap: float, tokens: int) -> Recorded:
    """One token per event, evenly."""
    return Recorded(sent, np.array([sent + ttft + gap * number for number in range(tokens)]), tokens)


def test_the_latencies_of_a_steady_stream_are_its_delays() -> None:
    found = latencies([steady(10.0, 0.2, 0.02, 64)])
    assert found.ttft == pytest.approx([200])
    assert found.tpot == pytest.approx([20])
    assert found.itl == pytest.approx(np.full(63, 20))
    assert found.e2el == pytest.approx([200 + 63 * 20])


@pytest.mark.parametrize("per_event", [2, 3, 7, 21])
def test_tokens_that_share_events_leave_tpot_to_first_and_last_event(per_event: int) -> None:
    """Speculation sends several tokens at once: events are no tokens."""
    events = np.linspace(0.5, 1.7, 1 + 42 // per_event)
    found = latencies([Recorded(0.0, events, 43)])
    assert found.tpot == pytest.approx([1200 / 42])
    assert len(found.itl) == 42 // per_event


@pytest.mark.parametrize(("tokens", "events"), [(None, [1.0, 2.0]), (1, [1.0]), (5, [1.0])])
def test_tpot_is_unknown_without_usage_or_without_a_second_event(tokens: int | None, events: list[float]) -> None:
    found = latencies([Recorded(0.0, np.array(events), tokens)])
    assert np.isnan(found.tpot).all()
    assert len(found.of("tpot")) == 0
    assert found.ttft == pytest.approx([1000])


def test_failed_requests_have_no_latencies_and_keep_their_place() -> None:
    broken = Recorded(0.0, np.array([1.0, 2.0]), error="aborted")
    found = latencies([broken, steady(0.0, 0.1, 0.01, 3)])
    assert np.isnan(found.ttft[0])
    assert found.ttft[1] == pytest.approx(100)
    assert len(found.itl) == 2


def test_goodput_counts_requests_that_meet_every_target() -> None:
    requests = [
        steady(0, 0.4, 0.02, 10),  # meets both
        steady(0, 0.6, 0.02, 10),  # too late
        steady(0, 0.4, 0.08, 10),  # too slow
        Recorded(0, np.array([0.4]), 1),  # one token: no TPOT to miss
        Recorded(0, np.array([0.4, 0.5]), None),  # nobody counted its tokens
        Recorded(0, np.array([0.4, 0.5]), 10, error="aborted"),
    ]
    assert count_good(requests, {"ttft": 500, "tpot": 50}) == 2
    assert count_good(requests, {"ttft": 500}) == 4
    assert count_good(requests, {"e2el": 420}) == 1


def test_effective_concurrency_is_time_in_flight_over_time() -> None:
    requests = [steady(0, 1, 0, 1), steady(0, 2, 0, 1), steady(1, 1, 0, 1)]
    assert effective_concurrency(requests, 0, 2) == pytest.approx(2)
    assert effective_concurrency(requests, 0, 4) == pytest.approx(1)
    assert effective_concurrency(requests, 1.5, 2) == pytest.approx(2)  # of each what lies inside


@given(st.integers(1, 6), st.integers(1, 8), st.floats(0.1, 10))
def test_a_full_closed_loop_is_full_until_its_last_request_is_sent(waves: int, concurrency: int, each: float) -> None:
    requests = [steady(wave * each, each, 0, 1) for wave in range(waves) for _ in range(concurrency)]
    assert fill(requests, 0, waves * each) == pytest.approx(concurrency)


def test_the_tail_of_a_closed_loop_counts_as_filled_and_half_as_many_requests_as_half() -> None:
    """A server that answers one at a time: two wait all the while, except behind the last sending."""
    requests = [Recorded(max(0.0, i - 1.0), np.array([i + 1.0]), 1) for i in range(8)]
    assert effective_concurrency(requests, 0, 8) == pytest.approx(15 / 8)
    assert fill(requests, 0, 8) == pytest.approx(2)
    assert fill([steady(i, 1, 0, 1) for i in range(4)], 0, 4) == pytest.approx(1)


def test_the_rate_of_sending_counts_gaps() -> None:
    assert sent_rate([steady(t, 9, 0, 1) for t in (0.0, 0.5, 1.0)]) == pytest.approx(2)
    assert sent_rate([steady(0.0, 9, 0, 1)]) is None
