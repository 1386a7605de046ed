"""Parts of a capture that a lossy format left exactly as they were."""

from __future__ import annotations

import numpy as np
import pytest

from fidelab.metrics.unmoved import EqualRows

WINDOWS, ROWS = 4, 32  # rows 32 … 63 of windows of 64 tokens
ITEM = np.repeat(np.arange(WINDOWS), ROWS)
POSITION = np.tile(np.arange(ROWS, 2 * ROWS), WINDOWS)
N_CTX = np.full(WINDOWS * ROWS, 2 * ROWS)


def found(equal: np.ndarray, first: int = 0, failed: np.ndarray | None = None) -> str | None:
    """What is said where these rows are equal to the reference's, and others are not."""
    kl = np.where(equal, 0.0, 1e-6)
    if failed is not None:
        kl[failed] = np.nan
    return EqualRows(kl, ITEM, POSITION, N_CTX, first).first()


@pytest.mark.parametrize(
    ("equal", "said"),
    [
        pytest.param(ITEM < 0, None, id="no row"),
        pytest.param((ITEM == 2) & (POSITION > ROWS), None, id="a window but for one row"),
        pytest.param(ITEM == 2, "at all 32 rows of window 2 of 64 tokens", id="a window"),
        pytest.param(ITEM > 0, "at all 32 rows of window 1 of 64 tokens, and in 2 of 7 other parts", id="windows"),
        pytest.param(POSITION < 40, "at all 32 rows of positions 32 to 39 of windows of 64 tokens", id="positions"),
    ],
)
def test_a_window_or_a_quarter_of_the_positions_with_equal_rows_is_named(equal: np.ndarray, said: str | None) -> None:
    assert found(equal) == said


def test_rows_asked_to_stay_exact_and_failed_ones_do_not_count_and_prompts_have_no_ranges() -> None:
    assert found(POSITION < 40, first=40) is None
    said = "at all 24 rows of positions 40 to 45 of windows of 64 tokens, and in 1 of 7 other parts"
    assert found(POSITION < 56, first=40) == said
    assert found(ITEM == 2, failed=(ITEM == 2) & (POSITION < 47)) == "at all 17 rows of window 2 of 64 tokens"
    assert found(ITEM == 2, failed=(ITEM == 2) & (POSITION < 49)) is None  # too few are left
    nothing = np.zeros_like(ITEM)
    unmoved = EqualRows(np.where(ITEM == 1, 0.0, 1.0), ITEM, nothing, nothing, word="prompt")
    assert unmoved.first() == "at all 32 rows of prompt 1"


@pytest.mark.parametrize(("every", "said"), [(5, True), (3, False)])
def test_equal_rows_are_no_evidence_where_many_are_equal_elsewhere(every: int, said: bool) -> None:
    assert (found((ITEM == 2) | (np.arange(len(ITEM)) % every == 0)) is not None) is said
