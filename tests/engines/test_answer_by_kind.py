"""What stands beside an adapter's facts when a request is answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fidelab.captures.requests import Forced, Generate, Layerwise, Prefill, Request, Timed
from fidelab.core import Estimator, Speculation
from fidelab.engines.base import Answer, Sink
from fidelab.engines.fake import FakeEngine
from fidelab.engines.speculation import Drafts
from tests.engines.tiny import Answers

WINDOWS = ((1, 2, 3, 4),)
GENERATE = Generate("trajectory", WINDOWS, 4, ())


class Head:
    def __init__(self) -> None:
        self.sentinels = [(0.1, 9.0)]  # of an earlier request

    def fields(self) -> dict[str, Any]:
        return {"head": {"weight": np.eye(2, dtype=np.float32)}, "softcap": 30.0, "scale": 0.5}


class Checked(FakeEngine):
    """Checks the head while it answers, and drafts."""

    def __init__(self, *checks: tuple[float, float]) -> None:
        super().__init__()
        self.head, self.checks, self.drafts = Head(), checks, Drafts(5, 9, 7)

    def facts_of(self, request: Request, sink: Sink) -> dict[str, Any]:
        self.head.sentinels += self.checks
        self.drafts += Drafts(1, 2, 1)
        return {"tokens": 7}

    def answered(self, request: Request, speculation: Speculation | None = None) -> Answer:
        return self.answer_by_kind(request, Answers(), Estimator.HIDDEN, self.head, speculation, lambda: self.drafts)


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
    answer = Checked().answered(query)
    assert (answer.head is not None, answer.softcap, answer.scale) == (
        (True, 30.0, 0.5) if with_head else (False, None, 1.0)
    )


def test_the_worst_sentinels_seconds_and_drafts_of_the_request_are_facts_and_without_checks_no_sentinels() -> None:
    facts = Checked((0.9999, 1e-9), (1.0, 3e-9)).answered(GENERATE).facts
    assert (facts["tokens"], facts["sentinel_cosine"], facts["sentinel_kl"]) == (7, 0.9999, 3e-9)
    assert facts["seconds"] >= 0
    assert set(Checked().answered(GENERATE).facts) == {"tokens", "seconds"}
    facts = Checked().answered(GENERATE, Speculation("ngram", 3, None, "", ())).facts
    assert [facts["speculation"][name] for name in ("drafts", "drafted", "accepted")] == [1, 2, 1]
