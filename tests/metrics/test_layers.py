"""Layer bisect: errors by hand, and faults planted into a residual stream whose every part is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.metrics.layers import LayerCurve, LayerDivergence, added_errors, outlier_ratios, part, relative_errors

Floats = NDArray[np.float64]
LAYERS, ROWS, WIDTH = 16, 200, 48


def stream(noise: Floats, seed: int = 0, rows: Floats | None = None) -> list[tuple[Floats, Floats]]:
    """(reference, candidate) states [rows, d] of a residual stream to which layers add what they make of its direction.

    ``noise`` [layers]: what the candidate's layer adds, relative to the norm of the state; ``rows`` [rows] scales it.
    The first row is a sink: its state is 300 times as long.
    """
    draw = np.random.default_rng(seed)
    ref = draw.standard_normal((ROWS, WIDTH))
    ref[0] *= 300
    test = ref.copy()
    found = [(ref, test)]
    for size in noise:
        first, second = draw.standard_normal((2, WIDTH, WIDTH)) / math.sqrt(WIDTH)
        ref, test = (x + np.tanh(_normed(x) @ first) @ second for x in (ref, test))
        kick = draw.standard_normal(ref.shape) / math.sqrt(WIDTH) * np.linalg.norm(ref, axis=1, keepdims=True)
        test = test + size * kick * (1.0 if rows is None else rows[:, None])
        found.append((ref, test))
    return found


def _normed(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt(np.mean(x**2, axis=1, keepdims=True)))


def curve(pairs: list[tuple[Floats, Floats]]) -> LayerCurve:
    return LayerCurve.of([relative_errors(ref, test) for ref, test in pairs])


def planted(layer: int, size: float, ground: float = 0.0) -> LayerDivergence:
    noise = np.full(LAYERS, ground)
    noise[layer] = size
    return part(curve(stream(noise)))


def test_a_rows_error_is_relative_to_its_own_norm_infinite_where_nothing_is_finite_and_left_out_where_unknown() -> None:
    ref = np.array([[3.0, 4.0], [300.0, 400.0]])
    assert relative_errors(ref, ref + np.array([0.0, 1.0])) == pytest.approx([0.2, 0.002])
    ref = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    test = np.array([[math.nan, 0.0], [math.inf, 0.0], [0.0, 1e-9], [0.0, 0.0]])
    assert relative_errors(ref, test).tolist() == [math.inf, math.inf, math.inf, 0.0]
    ref = np.array([[math.nan, 1.0], [1.0, 0.0]])
    assert relative_errors(ref, np.ones((2, 2))).tolist() == [1.0]


@pytest.mark.parametrize(
    ("errors", "added"),
    [([0.0, 3.0, 5.0, 4.0, 4.0], [3.0, 4.0, 0.0, 0.0]), ([0.0, 1.0, math.inf, math.inf], [1.0, math.inf, 0.0])],
    ids=["legs of right triangles", "what becomes infinite adds once"],
)
def test_added_errors_are_the_legs_of_right_triangles(errors: list[float], added: list[float]) -> None:
    assert added_errors(errors).tolist() == added


def test_a_ratio_is_over_the_root_mean_square_of_the_others() -> None:
    values = np.random.default_rng(1).random(9)
    slow = [values[i] / math.sqrt(sum(v**2 for j, v in enumerate(values) if j != i) / 8) for i in range(9)]
    assert outlier_ratios(values) == pytest.approx(slow)
    assert outlier_ratios([0.0, 2.0, 0.0]).tolist() == [0.0, math.inf, 0.0]
    assert outlier_ratios([2.0]).tolist() == [0.0]
    assert outlier_ratios([1.0, math.inf]).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("layer", [0, 1, LAYERS // 2, LAYERS - 1])
@pytest.mark.parametrize("ground", [0.0, 1e-3])
def test_a_planted_fault_is_named(layer: int, ground: float) -> None:
    found = planted(layer, 2e-2, ground)
    assert found.stand_out == (layer,)
    assert found.begins == (0 if ground else layer)


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1e-1])
@pytest.mark.parametrize("seed", range(3))
def test_equal_noise_in_every_layer_names_none(size: float, seed: int) -> None:
    found = part(curve(stream(np.full(LAYERS, size), seed)))
    assert found.stand_out == ()
    assert found.begins == 0


@pytest.mark.parametrize("seed", range(3))
def test_layers_of_twofold_sensitivity_do_not_stand_out(seed: int) -> None:
    noise = 1e-3 * 2 ** np.random.default_rng(seed).uniform(-0.5, 0.5, LAYERS)
    assert part(curve(stream(noise, seed))).stand_out == ()


def test_equal_states_have_no_beginning_and_a_single_layer_nothing_to_stand_out_from() -> None:
    found = part(curve(stream(np.zeros(LAYERS))))
    assert found == LayerDivergence(None, (), (0.0,) * LAYERS)
    assert part(curve(stream(np.array([0.1])))) == LayerDivergence(0, (), (0.0,))


def test_a_layer_that_enlarges_what_enters_it_does_not_stand_out() -> None:
    """The last layer's added error is beyond three times the others', but less than what entered it."""
    errors = np.array([0.0, *[0.01] * 20, 0.0135])
    errors[1:8] = np.linspace(0.004, 0.01, 7)
    found = part(LayerCurve(errors, errors, errors))
    assert found.ratios[-1] > 3
    assert found.stand_out == ()


def test_a_fault_in_every_seventh_row_is_named_by_the_tail() -> None:
    some = (np.arange(ROWS) % 7 == 0).astype(float)
    noise = np.zeros(LAYERS)
    noise[10] = 2e-2
    found = curve(stream(noise, rows=some))
    assert not found.median.any()
    assert part(found).stand_out == (10,)


def test_a_single_row_names_no_layer() -> None:
    noise = np.full(LAYERS, 1e-3)
    pairs = stream(noise)
    for _, test in pairs[11:]:
        test[0] *= 2  # the sink alone
    found = curve(pairs)
    assert found.rms[11] > 10 * found.rms[10]
    assert part(found).stand_out == ()


def test_what_the_reference_does_to_itself_is_not_a_finding() -> None:
    noise = np.zeros(LAYERS)
    noise[7] = 1e-3
    found = curve(stream(noise))
    assert part(found).stand_out == (7,)
    assert part(found, floor=curve(stream(np.full(LAYERS, 1e-3), seed=3))) == LayerDivergence(
        None, (), part(found).ratios
    )


def test_states_that_are_no_longer_finite_name_the_layer() -> None:
    pairs = stream(np.full(LAYERS, 1e-3))
    for _, test in pairs[6:]:
        test[:] = math.nan
    assert part(curve(pairs)).stand_out == (5,)
