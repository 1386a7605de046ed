"""What counts prove about the way in which a window was answered."""

from __future__ import annotations

import pytest

from fidelab.captures.requests import Served
from fidelab.engines.served import Counted, proof

WINDOW = tuple(range(48))
OTHERS = ((1, 2), (3, 4, 5), (6,))
WHOLE = Counted([(0, 47, 1)], 0)
STEPS = [(0, 8, 1), *((n, 1, 1) for n in range(8, 47))]


def _proof(way: str, size: int, counted: Counted, block: int = 16, most: int = 0) -> dict[str, object]:
    others = OTHERS if way in ("batch", "evicted") else ()
    return proof(Served(f"paths.{way}", (WINDOW,), 0, 46, way, size, others), [counted], block, most)


@pytest.mark.parametrize(
    ("way", "size", "counted", "counts"),
    [
        ("cold", 0, WHOLE, {"forwards": 1, "largest forward": 47}),
        ("chunked", 32, Counted([(0, 32, 1), (32, 15, 1)], 0), {"forwards": 2, "largest forward": 32}),
        ("decode", 8, Counted(STEPS, 0), {"forwards": 40, "largest forward": 8, "sequences": 1}),
        ("prefix", 32, Counted([(32, 15, 1)], 32), {"forwards": 1, "largest forward": 15, "hit tokens": 32}),
        ("prefix-partial", 37, Counted([(37, 10, 1)], 37), {"forwards": 1, "largest forward": 10, "hit tokens": 37}),
        ("batch", 0, Counted([(0, 47, 4)], 0), {"forwards": 1, "largest forward": 47, "sequences": 4}),
        ("evicted", 0, Counted([(0, 47, 1)], 0, 32), {"forwards": 1, "largest forward": 47, "tokens lost": 32}),
    ],
)
def test_counts_that_show_a_way_prove_it(way: str, size: int, counted: Counted, counts: dict[str, int]) -> None:
    assert _proof(way, size, counted) == {"engaged": counts}


@pytest.mark.parametrize(
    ("way", "size", "counted", "reason"),
    [
        ("cold", 0, Counted([], 0), "no forward was counted"),
        ("cold", 0, Counted([(0, 32, 1), (32, 15, 1)], 0), "read in 2 pieces of at most 32"),
        ("cold", 0, Counted([(0, 47, 3)], 0), "3 sequences were computed together"),
        ("cold", 0, Counted([(16, 31, 1)], 16), "16 tokens were found in the prefix cache"),
        ("cold", 0, Counted([(16, 31, 1)], 0), "the engine counts 0 tokens of a hit, and 16 were not computed"),
        ("chunked", 64, WHOLE, "the window of 47 tokens was read at once, not in chunks of 64"),
        ("chunked", 16, Counted([(0, 32, 1), (32, 15, 1)], 0), "read in 2 pieces of at most 32 tokens, not 16"),
        ("decode", 8, Counted([(0, 8, 1), (8, 39, 1)], 0), "0 of 39 tokens were fed one by one"),
        ("prefix", 32, WHOLE, "0 tokens were found in the prefix cache, not 32"),
        ("prefix", 8, WHOLE, "a prefix of 8 tokens is less than a block of 16"),
        ("prefix-other", 32, Counted([(48, 1, 1)], 48), "48 tokens were found in the prefix cache, not 32"),
        ("prefix-generated", 40, Counted([(40, 7, 1)], 40), "not 32 (16 to a block)"),
        ("prefix-partial", 37, Counted([(32, 15, 1)], 32), "reuses only whole blocks of 16 tokens: 32 of 37 were hit"),
        ("prefix-partial", 37, Counted([(16, 31, 1)], 16), "16 tokens were found in the prefix cache, not 37"),
        ("prefix-partial", 32, Counted([(32, 15, 1)], 32), "a hit of 32 tokens ends with a whole block of 16"),
        ("batch", 0, WHOLE, "1 sequences were computed together, not 4"),
        ("batch", 0, Counted([(0, 32, 4), (32, 15, 1)], 0), "1 sequences were computed together, not 4"),
        ("evicted", 0, WHOLE, "no token of the window lost its place in the cache"),
    ],
)
def test_counts_that_show_another_way_say_which(way: str, size: int, counted: Counted, reason: str) -> None:
    [(kind, said)] = _proof(way, size, counted).items()
    assert kind == "not_engaged"
    assert reason in str(said)


def test_an_engine_that_splits_what_is_long_may_read_a_window_in_as_many_pieces_as_it_must() -> None:
    pieces, more = Counted([(0, 32, 4), (32, 15, 1)], 0), Counted([(0, 16, 1), (16, 16, 1), (32, 15, 1)], 0)
    assert "engaged" in _proof("evicted", 0, Counted(pieces.steps, 0, 16), most=32)
    assert "engaged" in _proof("batch", 0, pieces, most=32)
    assert _proof("cold", 0, more, most=32)["not_engaged"] == "the window was read in 3 pieces of at most 16 tokens"
