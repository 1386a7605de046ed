"""Engine hf, forced decoding: given tokens, one by one through the cache."""

from __future__ import annotations

import pytest
import torch

from fidelab.captures.requests import Forced, Generate, Prefill
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import KINDS, Answers

PROMPT, GIVEN = tiny.tokens(11, seed=5), tiny.tokens(7, seed=6)
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_states_are_those_of_one_prefill_where_the_cache_loses_nothing(kind: str, checkpoint: Checkpoint) -> None:
    engine, forced, whole = tiny.opened(checkpoint(kind)), Answers(), Answers()
    engine.answer(Forced("forced", (PROMPT,), (GIVEN,)), forced)
    first, last = len(PROMPT) - 1, len(PROMPT) + len(GIVEN) - 2
    engine.answer(Prefill("kld", ((*PROMPT, *GIVEN),), first, last, ((0,) * len(GIVEN),)), whole)
    assert tiny.ids(forced.items[0]) == list(GIVEN)
    close = (tiny.hidden(forced.items[0]), tiny.hidden(whole.items[0]))
    torch.testing.assert_close(*close, rtol=1e-3, atol=1e-3)


@kinds
def test_its_own_trajectory_gives_the_states_of_generation_bit_by_bit(kind: str, checkpoint: Checkpoint) -> None:
    engine, generated, forced = tiny.opened(checkpoint(kind), "int4"), Answers(), Answers()
    engine.answer(Generate("trajectory", (PROMPT,), 7, ()), generated)
    path = tuple(tiny.ids(generated.items[0]))
    engine.answer(Forced("forced", (PROMPT,), (path,)), forced)
    assert torch.equal(tiny.hidden(forced.items[0]), tiny.hidden(generated.items[0]))


def test_an_empty_continuation_is_a_failed_item_and_progress_counts_what_was_processed(checkpoint: Checkpoint) -> None:
    sink = Answers()
    tiny.opened(checkpoint("llama")).answer(Forced("forced", (PROMPT, PROMPT), ((), GIVEN)), sink)
    assert sink.failed == {0: "empty continuation"}
    assert list(sink.items[0]) == ["ids"]
    assert tiny.hidden(sink.items[1]).shape == (len(GIVEN), 64)
    sink = Answers()
    tiny.opened(checkpoint("llama")).answer(Forced("forced", (PROMPT,), (GIVEN,)), sink)
    assert (sink.tokens, sink.decoded) == (len(PROMPT) + len(GIVEN) - 1, len(GIVEN) - 1)
