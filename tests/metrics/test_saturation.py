from __future__ import annotations

import pytest

from fidelab.metrics.serving import saturation


@pytest.mark.parametrize(
    ("levels", "rates", "at", "gain"),
    [
        pytest.param([1, 2, 4, 8, 16], [10, 19, 30, 31, 60], 4, 1 / 30, id="the first step below the threshold"),
        pytest.param([32, 64], [1000, 1096], None, 0.096, id="a curve that grows to its end does not saturate"),
        pytest.param([1, 2], [10, 8], 1, -0.2, id="a rate that falls has a negative gain"),
    ],
)
def test_the_first_step_that_adds_less_than_the_threshold_saturates(
    levels: list[int], rates: list[float], at: int | None, gain: float
) -> None:
    found = saturation(levels, rates)
    assert found[0] == at
    assert found[1] == pytest.approx(gain)


def test_a_step_of_exactly_the_threshold_still_pays() -> None:
    assert saturation([1, 2], [4, 5], threshold=0.25)[0] is None


@pytest.mark.parametrize("points", [([], []), ([4], [10.0])])
def test_fewer_than_two_points_tell_nothing(points: tuple[list[int], list[float]]) -> None:
    assert saturation(*points) == (None, None)
