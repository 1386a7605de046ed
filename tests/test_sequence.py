"""Bytes of a sequence: closed forms, and a count token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.core.sequence import SequenceBytes, StoreBytes, encoded_tokens
from fidelab.core.serial import from_json, to_json

stores = st.builds(
    StoreBytes,
    encoded_token=st.integers(1, 40),
    exact_token=st.integers(0, 90),
    packed_token=st.none() | st.integers(1, 40),
    sinks=st.integers(0, 5),
    tail=st.integers(0, 9),
    block=st.sampled_from([1, 2, 4, 6]),
    window=st.none() | st.integers(1, 20),
    fitted=st.integers(0, 8),
)


def by_hand(store: StoreBytes, n_tokens: int) -> float:
    """Bytes of a sequence, each token looked at: the first ones, the last ones, whole blocks, the rest."""
    held = list(range(n_tokens))[-store.window if store.window else 0 :]
    between = held[store.sinks : max(store.sinks, len(held) - store.tail)]
    whole = len(between) - len(between) % store.block
    return whole * store.encoded_token + (len(held) - whole) * store.exact_token + store.fitted


@given(st.lists(stores, max_size=4), st.integers(0, 60), st.integers(0, 100))
def test_bytes_are_those_of_its_tokens_counted_one_by_one(held: list[StoreBytes], n: int, state: int) -> None:
    due = sum(by_hand(store, n) for store in held) + state
    assert SequenceBytes(tuple(held), state).bytes_of_sequence(n) == due
    assert SequenceBytes.summed(held, state).bytes_of_sequence(n) == due


@given(st.lists(stores, min_size=1, max_size=3), st.integers(0, 50))
def test_the_peak_is_the_most_at_any_length_up_to_there(held: list[StoreBytes], n: int) -> None:
    unlimited = [StoreBytes(**{**vars(store), "window": None, "exact_token": 60}) for store in held]
    sequence = SequenceBytes(tuple(unlimited))
    assert sequence.peak_bytes(n) == max(sequence.bytes_of_sequence(m) for m in range(n + 1))


@given(st.lists(stores, max_size=3), st.integers(0, 60))
def test_packed_bytes_replace_those_of_emulated_storages_alone(held: list[StoreBytes], n: int) -> None:
    due = sum(by_hand(StoreBytes(**{**vars(s), "encoded_token": s.packed_token or s.encoded_token}), n) for s in held)
    assert SequenceBytes.summed(held).bytes_of_sequence(n, packed=True) == due


def test_a_tail_of_96_tokens_leaves_a_quarter_of_128_tokens_encoded() -> None:
    quarter = SequenceBytes((StoreBytes(encoded_token=28, exact_token=100, tail=96),), state=7)
    assert quarter.bytes_of_sequence(128) == 32 * 28 + 96 * 100 + 7
    assert quarter.bytes_of_sequence(128, kv_scale=0.5) == (32 * 28 + 96 * 100) / 2 + 7
    assert [encoded_tokens(n, 2, 3, 4) for n in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 4, 4, 8]


def test_the_record_reads_back_and_damaged_ones_are_refused() -> None:
    whole = SequenceBytes((StoreBytes(1.5, 4, sinks=1, tail=2, block=8, window=64, fitted=3),), 9)
    assert from_json(SequenceBytes, to_json(whole)) == whole
    assert to_json(SequenceBytes((StoreBytes(2),))) == {"stores": [{"encoded_token": 2}]}
    for store in ({"encoded_token": -1}, {"encoded_token": 1, "block": 0}, {"encoded_token": 1, "sinks": 0.5}, {}):
        with pytest.raises(ValueError, match=r"is of another type|at least 1 token|lacks"):
            from_json(SequenceBytes, {"stores": [store]})
