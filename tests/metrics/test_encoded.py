"""The share of tokens encoded: closed forms, and a count over rows and contexts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fidelab.metrics.encoded import context_of_share, encoded_share


def by_hand(rows: range, sinks: int, tail: int, block: int) -> float:
    shares = []
    for row in rows:
        read = list(range(row + 1))
        between = read[sinks : max(sinks, len(read) - tail)]
        shares.append((len(between) - len(between) % block) / len(read))
    return float(np.mean(shares))


EXACT = [(0, 0, 1), (4, 0, 1), (0, 9, 1), (4, 64, 1), (1, 4, 8), (0, 0, 32)]


@pytest.mark.parametrize(("sinks", "tail", "block"), EXACT)
def test_the_share_is_the_mean_over_rows_of_encoded_over_read(sinks: int, tail: int, block: int) -> None:
    for rows in (range(64, 127), range(1, 127), range(128)):
        assert encoded_share(rows, sinks, tail, block) == pytest.approx(by_hand(rows, sinks, tail, block), rel=1e-12)


def test_without_exceptions_all_is_encoded_and_with_a_tail_of_all_nothing() -> None:
    assert encoded_share(range(64, 127), 0, 0) == 1
    assert encoded_share(range(64, 127), 0, 127) == 0


def test_the_share_of_one_row_is_one_minus_the_exact_tokens_over_those_read() -> None:
    assert encoded_share([127], 0, 96) == 0.25
    assert encoded_share([127, 127, 95], 0, 96) == pytest.approx(0.5 / 3)


def test_the_context_of_a_share_is_the_first_that_reaches_it() -> None:
    for sinks, tail, block in ((0, 96, 1), (4, 12, 1), (1, 4, 8)):
        context = context_of_share(0.9, sinks, tail, block, first=64, last=126, n_ctx=128)
        each = [by_hand(range(row, row + 1), sinks, tail, block) for row in range(1500)]
        shares = [float(np.mean(each[n // 2 : n - 1])) if n > 3 else 0.0 for n in range(1, 1500)]
        assert context == next(n for n, share in enumerate(shares, 1) if share >= 0.9)


def test_in_the_second_half_of_long_windows_the_context_is_exact_tokens_times_twice_log_2_over_the_rest() -> None:
    # mean over p in n/2 … n of 1 - e/p is 1 - 2 e ln 2 / n
    context = context_of_share(0.9, 0, 9600, first=512, last=1022, n_ctx=1024)
    assert context == pytest.approx(2 * 9600 * math.log(2) / 0.1, rel=1e-3)


def test_a_share_that_no_context_reaches_has_none_and_rows_beyond_the_window_are_refused() -> None:
    assert context_of_share(0.9, 0, 999_999_999, first=64, last=126, n_ctx=128) is None
    with pytest.raises(ValueError, match="rows 64 to 128 are not in a window of 128 tokens"):
        context_of_share(0.9, 0, 1, first=64, last=128, n_ctx=128)
    with pytest.raises(ValueError, match="no row"):
        encoded_share([], 0, 1)
