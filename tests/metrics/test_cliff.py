"""Cliffs of widths, and asymmetry of keys and values."""

from __future__ import annotations

import numpy as np
import pytest

from fidelab.metrics.cliff import PER_BIT, asymmetry, cliff
from tests.present import present

CLUSTERS = np.repeat(np.arange(8), 5)


def _steady(losses: dict[int, float]) -> tuple[list[int], np.ndarray]:
    """The same loss in every row."""
    return [*losses], np.array([[loss] * len(CLUSTERS) for loss in losses.values()])


def test_cliff_is_the_widest_width_whose_last_bit_costs_the_limit() -> None:
    bits, losses = _steady({8: 0.0, 6: 0.1, 5: 0.15, 4: 0.15 + PER_BIT, 3: 4.0, 2: 9.0})
    assert cliff(bits, losses, CLUSTERS, native=16).bits == 4


def test_loss_is_shared_among_the_bits_that_were_removed_at_once() -> None:
    bits, losses = _steady({8: 0.0, 2: 6 * PER_BIT - 0.01})
    assert cliff(bits, losses, CLUSTERS, native=16).bits is None
    bits, losses = _steady({8: 0.0, 2: 6 * PER_BIT + 0.01})
    assert cliff(bits, losses, CLUSTERS, native=16).bits == 2


def test_first_width_is_held_against_the_native_cache() -> None:
    bits, losses = _steady({4: 12 * PER_BIT + 0.01})
    assert cliff(bits, losses, CLUSTERS, native=16).bits == 4
    assert cliff(bits, losses, CLUSTERS, native=32).bits is None


def test_interval_holds_the_cliff_and_is_one_width_where_all_documents_agree() -> None:
    bits, losses = _steady({5: 0.0, 4: 1.0, 3: 3.0})
    assert cliff(bits, losses, CLUSTERS, native=16).interval == (4, 4)
    rng = np.random.default_rng(5)
    spread = losses * np.exp(rng.normal(0, 1.2, size=8))[CLUSTERS] * 0.12
    found = cliff(bits, spread, CLUSTERS, native=16)
    assert found.interval is not None
    assert found.interval[0] <= (found.bits or 0) <= found.interval[1]
    assert found.interval[0] < found.interval[1]


def test_too_few_documents_have_no_interval() -> None:
    bits, losses = _steady({5: 0.0, 4: 1.0})
    assert cliff(bits, losses, CLUSTERS % 2, native=16).interval is None


def test_asymmetry_is_the_ratio_of_flips_of_perplexity() -> None:
    native = np.full(len(CLUSTERS), 2.0)
    k, v = native + 1.5, native + 0.25
    found = present(asymmetry(native, k, v, CLUSTERS))
    ratio, interval = found
    assert ratio == pytest.approx((np.exp(3.5) - np.exp(2)) / (np.exp(2.25) - np.exp(2)))
    assert interval == pytest.approx((ratio, ratio))


def test_asymmetry_is_not_told_where_the_values_lose_nothing() -> None:
    rng = np.random.default_rng(2)
    native = rng.normal(3, 1, len(CLUSTERS))
    noise = rng.normal(0, 0.3, 8)[CLUSTERS]
    assert asymmetry(native, native + 1, native + noise - noise.mean(), CLUSTERS) is None


def test_row_without_a_number_is_left_out_of_all_sides() -> None:
    native = np.full(len(CLUSTERS), 2.0)
    k, v = native + 1.0, native + 0.5
    native[3], k[7] = np.nan, np.inf
    found = present(asymmetry(native, k, v, CLUSTERS))
    assert found[0] == pytest.approx((np.exp(3) - np.exp(2)) / (np.exp(2.5) - np.exp(2)))
