from __future__ import annotations

import pytest

from fidelab.metrics.serving import saturation


def test_the_first_step_that_adds_less_than_the_threshold_saturates() -> None:
    at, gain = saturation([1, 2, 4, 8, 16], [10, 19, 30, 31, 60])
    assert at == 4
    assert gain == pytest.approx(1 / 30)


def test_a_curve_that_grows_to_its_end_does_not_saturate_and_tells_the_last_gain() -> None:
    at, gain = saturation([32, 64], [1000, 1096])
    assert at is None
    assert gain == pytest.approx(0.096)


def test_a_rate_that_falls_saturates_with_a_negative_gain() -> None:
    at, gain = saturation([1, 2], [10, 8])
    assert at == 1
    assert gain == pytest.approx(-0.2)


def test_a_step_of_exactly_the_threshold_still_pays() -> None:
    assert saturation([1, 2], [4, 5], threshold=0.25)[0] is None


@pytest.mark.parametrize("points", [([], []), ([4], [10.0])])
def test_fewer_than_two_points_tell_nothing(points: tuple[list[int], list[float]]) -> None:
    assert saturation(*points) == (None, None)
