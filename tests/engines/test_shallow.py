"""Windows that are cut to what an engine can read, and the rows that count then."""

from __future__ import annotations

import numpy as np

from fidelab.captures.container import BFloat16, to_float32
from fidelab.captures.requests import CUT_SHORT, Prefill
from fidelab.engines.base import Shallow

PLACES = ((3, 30, 90), (5, 40))
REQUEST = Prefill(
    "kld", (tuple(range(100)), tuple(range(50))), 3, 90, ((1,) * 3, (2,) * 2), positions=PLACES, notes=("a", "b")
)


def test_windows_are_halved_until_their_rows_and_a_token_more_fit() -> None:
    shallow = Shallow(REQUEST)
    found = shallow.fit(64)
    assert ([*map(len, found.windows)], found.positions) == ([50, 50], ((3, 30), (5, 40)))
    assert (found.first, found.last, found.units) == (3, 40, ((1, 1), (2, 2)))
    assert shallow.facts == {CUT_SHORT: {"0": 2}}


def test_a_request_that_fits_is_left_as_it_is() -> None:
    shallow = Shallow(REQUEST)
    assert shallow.fit(92) is REQUEST
    assert shallow.facts == {}


def test_windows_are_cut_no_further_than_to_a_row_of_each() -> None:
    shallow = Shallow(REQUEST)
    assert shallow.fit(2).positions == ((3,), (5,))
    assert not shallow.halve()


def test_requests_without_positions_are_never_cut() -> None:
    dense = Prefill("kld", REQUEST.windows[:1], 10, 98, ((1,) * 89,))
    shallow = Shallow(dense)
    assert shallow.fit(8) is dense
    assert not shallow.halve()


def test_rows_that_were_left_out_are_nan_and_ids_that_are_none() -> None:
    shallow = Shallow(REQUEST)
    shallow.fit(64)
    bits = BFloat16(np.full((2, 4), 0x3F80, dtype=np.uint16))
    found = shallow.whole(0, {"hidden": bits, "topk_ids": np.ones((2, 4), dtype=np.int32)})
    rows = to_float32(found["hidden"])
    assert rows.shape == (3, 4)
    assert (rows[:2] == 1).all()
    assert np.isnan(rows[2]).all()
    np.testing.assert_array_equal(np.asarray(found["topk_ids"])[2], -1)
    assert shallow.whole(1, {"hidden": bits})["hidden"] is bits
