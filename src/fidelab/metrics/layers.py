"""Layer diff: the layer from which on two arms differ.

h_l is a row's state (the residual stream) after layer l, h_in what entered the first one.  Of each row
``e_l = ‖h_l − h_l,ref‖ / ‖h_l,ref‖``: relative per row, because a few rows (attention sinks) have states a hundred
times as long as all others.  A curve has the median over rows, and another the 90th percentile, which sees what goes
wrong in every tenth row alone.

**Added error** of layer l: ``a_l = sqrt(max(0, e_l² − e_{l−1}²))``.  The residual stream carries an error on: as it
grows, so does the error, and their ratio stays about the same; errors of different layers are nearly orthogonal, so
their squares add up.

**A layer stands out** where, on one of the two curves, all of this holds:

1. a_l is more than 3 times the root mean square of all other layers' added errors.
2. ``a_l ≥ e_{l−1}``: it adds at least as much as came in.  Some layers enlarge whatever enters them, the last one of
   many models among them; by less than this.
3. a_l is more than 3 times e_l of run-to-run noise: the reference against itself in another process.

A format that is equally coarse in every layer makes a curve without such a layer.  Where all layers are coarse, a fault
in one of them shows once its added error is about three times theirs, late in the model more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

TIMES = 3.0  # multiple of the other layers' root mean square, and of run-to-run noise
_TAIL_QUANTILE = 0.9  # over positions: an error of few positions does not show in their median


@dataclass(frozen=True, eq=False)
class LayerCurve:
    """Relative errors ``[1 + layers]``: of what entered the first layer, and of what left each.

    See docs/metrics/causes.md#layer-differences.
    """

    median: Floats
    tail: Floats
    """The 90th percentile over rows."""
    rms: Floats
    """Root mean square over rows: a single row can move it."""

    @classmethod
    def of(cls, errors: Sequence[Floats]) -> LayerCurve:
        """Build a curve from the errors ``[rows]`` of each."""
        with np.errstate(invalid="ignore"):  # the quantile between two infinite rows
            tail = np.array([np.quantile(e, _TAIL_QUANTILE, method="higher") for e in errors])
        rms = np.array([np.sqrt(np.mean(e**2)) for e in errors])
        return cls(np.array([np.median(e) for e in errors]), tail, rms)


@dataclass(frozen=True)
class LayerDivergence:
    """The layers at which two arms differ, numbered from 0.

    ``begins``: the first layer that adds any error beyond the floor; ``None``: no layer does.  ``stand_out``: the
    layers that do so by the rule, in order.  ``ratios``: each layer's larger multiple of the other layers' added error.
    See docs/metrics/causes.md#layer-differences.
    """

    begins: int | None
    stand_out: tuple[int, ...]
    ratios: tuple[float, ...]


def relative_errors(ref: ArrayLike, test: ArrayLike) -> Floats:
    """``‖test − ref‖ / ‖ref‖`` of each row of ``[rows, d]``; infinite where the test row is not finite, or where a row
    of zeros became another.  Rows of ``ref`` that are not finite are left out.
    See docs/metrics/causes.md#layer-differences.

    Raises:
        ValueError: If the shapes differ.
    """
    reference, other = np.asarray(ref, dtype=np.float64), np.asarray(test, dtype=np.float64)
    if reference.shape != other.shape or reference.ndim != 2:
        raise ValueError(f"states {list(other.shape)} cannot be compared with {list(reference.shape)}")
    usable = np.asarray(np.isfinite(reference).all(axis=1))
    reference, other = reference[usable], other[usable]
    finite = np.asarray(np.isfinite(other).all(axis=1))
    distance = np.linalg.norm(np.where(finite[:, None], other - reference, 0.0), axis=1)
    size = np.linalg.norm(reference, axis=1)
    errors = np.divide(distance, size, out=np.where(distance > 0, np.inf, 0.0), where=size > 0)
    return np.where(finite, errors, np.inf)


def added_errors(curve: ArrayLike) -> Floats:
    """Return each layer's added error ``[layers]`` from a curve ``[1 + layers]``. It is 0 after an infinite error.

    See docs/metrics/causes.md#layer-differences.
    """
    errors = np.asarray(curve, dtype=np.float64)
    before, after = errors[:-1], errors[1:]
    grown = after > before
    after, before = np.where(grown, after, 0.0), np.where(grown, before, 0.0)
    with np.errstate(over="ignore"):
        return np.asarray(np.sqrt((after - before) * (after + before)))  # not ∞ − ∞ where squares overflow


def outlier_ratios(added: ArrayLike) -> Floats:
    """Return each layer's added error over the root mean square of all others.

    The ratio is 0 for a layer that adds nothing and for a single layer, and infinite if no other layer adds anything.
    See docs/metrics/causes.md#layer-differences.
    """
    values = np.asarray(added, dtype=np.float64)
    ratios = np.zeros(len(values))
    for layer in np.flatnonzero(values > 0):
        others = np.delete(values, layer)
        if len(others):
            rms = float(np.sqrt(np.mean(others**2)))
            ratios[layer] = values[layer] / rms if 0 < rms < np.inf else 0.0 if rms else np.inf
    return ratios


def part(curve: LayerCurve, floor: LayerCurve | None = None) -> LayerDivergence:
    """Judge a curve. Without run-to-run noise (``None``), the reference counts as bit-identical in every run.

    See docs/metrics/causes.md#layer-differences."""
    layers = len(curve.median) - 1
    noise = LayerCurve(*[np.zeros(layers + 1)] * 3) if floor is None else floor
    stand_out: set[int] = set()
    begins: set[int] = set()
    ratios = np.zeros(layers)
    for errors, repeat in ((curve.median, noise.median), (curve.tail, noise.tail)):
        added = added_errors(errors)
        multiples = outlier_ratios(added)
        audible = added > TIMES * repeat[1:]
        stand_out |= set(np.flatnonzero((multiples > TIMES) & (added >= errors[:-1]) & audible).tolist())
        begins |= set(np.flatnonzero(audible).tolist())
        ratios = np.maximum(ratios, multiples)
    return LayerDivergence(min(begins, default=None), tuple(sorted(stand_out)), tuple(ratios.tolist()))
