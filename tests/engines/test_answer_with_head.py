"""What stands beside an adapter's facts when a request is answered."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fidelab.captures.requests import Forced, Generate, Layerwise, Prefill, Request, Timed
from fidelab.core import Estimator
from fidelab.engines.base import answer_with_head

WINDOWS = ((1, 2, 3, 4),)
GENERATE = Generate("trajectory", WINDOWS, 4, ())


class Head:
    def __init__(self, *sentinels: tuple[float, float]) -> None:
        self.sentinels = list(sentinels)

    def fields(self) -> dict[str, Any]:
        return {"head": {"weight": np.eye(2, dtype=np.float32)}, "softcap": 30.0, "scale": 0.5}


@pytest.mark.parametrize(
    ("query", "with_head"),
    [
        (Prefill("kld", WINDOWS, 1, 2, ((0, 0),)), True),
        (Forced("forced", WINDOWS, ((5,),)), True),
        (GENERATE, True),
        (replace(GENERATE, rows=False), False),
        (Timed("timing", WINDOWS, n=1), False),
        (Layerwise("layers", WINDOWS, 1, 2), False),
    ],
)
def test_the_head_goes_with_rows_of_states_alone(query: Request, with_head: bool) -> None:
    answer = answer_with_head(query, Estimator.HIDDEN, {}, time.monotonic(), Head())
    assert (answer.head is not None, answer.softcap, answer.scale) == (
        (True, 30.0, 0.5) if with_head else (False, None, 1.0)
    )


def test_the_worst_sentinels_and_the_seconds_are_facts() -> None:
    head = Head((0.9999, 1e-9), (1.0, 3e-9))
    facts = answer_with_head(GENERATE, Estimator.HIDDEN, {"tokens": 7}, time.monotonic() - 2, head).facts
    assert (facts["tokens"], facts["sentinel_cosine"], facts["sentinel_kl"]) == (7, 0.9999, 3e-9)
    assert facts["seconds"] >= 2


def test_without_checks_nothing_is_said_of_sentinels() -> None:
    for head in (Head(), None):
        assert set(answer_with_head(GENERATE, Estimator.LOGPROBS, {}, time.monotonic(), head).facts) == {"seconds"}
