"""Fits of measured decoding: a Hill curve of the rate over the batch, and an affine time of a step.

Hill: ``S(B) = Smax·B^γ / (B½^γ + B^γ)``, empirical.  Affine: ``t = a + b·B + c·B·T`` in ms, where ``a`` is the fixed
cost of a step (weights, launches), ``b`` the cost per sequence and ``c`` the time per token in the cache.
"""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core import read_file, strict_json
from fidelab.core.errors import InputError, UsageError, nearest_first

Floats = NDArray[np.float64]
HILL, AFFINE = ("smax", "b_half", "gamma"), ("a", "b", "c")
_MAX_FILE_BYTES = 2**27
_RESAMPLES = 400  # of clusters, each of which is fitted again
_MAX_STEPS = 30  # of a resample's fit; one that has not converged by then is left out, as others are
_MIN_CLUSTERS = 3  # with fewer there is no interval


def read_points(path: Path) -> dict[str, list[Any]]:
    """Read columns from a CSV file, a JSON list of objects, or the bench ``decode`` of a report.

    The columns of a report are the repeats of each arm: ``arm``, ``batch``, ``context`` and ``tok_s``.

    Raises:
        InputError: If the file cannot be read, has another format, or has no rows.
    """
    try:
        text = read_file(path, _MAX_FILE_BYTES).decode("utf-8-sig")
        if path.suffix.lower() == ".json":
            content = strict_json(text, not_finite=float)
            if isinstance(content, dict) and str(content.get("schema", "")).startswith("fidelab.report/"):
                rows = [*_decode_rows(content)]
            else:
                rows = content if isinstance(content, list) else []
        else:
            rows = [*csv.DictReader(io.StringIO(text))]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} has no rows: a fit takes CSV with a heading, a JSON list of objects, or a report")
    return {str(name): [row.get(name) for row in rows] for name in rows[0]}


def _decode_rows(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for arm in filter(None, (report.get("reference"), *(report.get("candidates") or ()))):
        for metric in ((arm.get("benches") or {}).get("decode") or {}).get("metrics") or ():
            cell = metric.get("cell") or {}
            if metric.get("key") == "isolated" and "batch" in cell:
                place = {"arm": arm.get("name"), "batch": cell["batch"], "context": cell.get("depth")}
                yield from ({**place, "tok_s": value} for value in metric.get("repeats") or [metric.get("value")])


def hill(x: Floats, smax: float, b_half: float, gamma: float) -> Floats:
    """Return the Hill curve at ``x`` [n]."""
    # (x / B½)^γ over 1 + the same: does not overflow where x^γ would
    ratio = np.exp(np.clip(gamma * (np.log(x) - math.log(b_half)), -600, 600))
    return np.asarray(smax * ratio / (1 + ratio))


def affine(design: Floats, *terms: float) -> Floats:
    """Return ``design`` [n, k] times the terms."""
    return np.asarray(design @ np.array(terms))


def compare_fits(
    points: Mapping[str, Sequence[Any]],
    *,
    y: str,
    x: str = "batch",
    context: str | None = None,
    is_time: bool = False,
    cluster: str | None = None,
) -> dict[str, Any]:
    """Fit both curves to a column, with 95% intervals. R² of both refers to the rate, so that they are comparable.

    Args:
        points: columns, as :func:`read_points` gives them.
        y: column of tokens per second or speed-ups; with ``is_time`` of milliseconds per step.
        x: column of batches.
        context: column of tokens per sequence, for ``c``.
        cluster: column of models or machines; intervals then come from resampling these (percentile bootstrap), else
            from the covariance of the linearised model.

    Raises:
        UsageError: If the column does not exist.
        InputError: If there are too few points, or a value is not a positive number.
    """
    batch, value = _numbers(points, x), _numbers(points, y)
    rate = 1000 * batch / value if is_time else value
    groups = None if cluster is None else np.array([str(label) for label in _column(points, cluster)])
    start = (1.2 * float(rate.max()), float(np.median(batch)), 1.0)
    found = {"Hill": _fit(HILL, hill, batch, rate, start, groups, bounds=((1e-12,) * 3, (np.inf, np.inf, 50.0)))}
    columns = [np.ones_like(batch), batch, *([] if context is None else [batch * _numbers(points, context)])]
    design = np.stack(columns, axis=1)
    scale = np.abs(design).max(axis=0)
    if np.linalg.matrix_rank(design / scale) == len(scale):
        time = 1000 * batch / rate
        fit = _fit(AFFINE[: len(scale)], affine, design / scale, time, (1.0,) * len(scale), groups)
        fit["parameters"] = {
            name: [number / unit for number in numbers]
            for (name, numbers), unit in zip(fit["parameters"].items(), scale, strict=True)
        }
        fit["fitted"] = 1000 * batch / fit["fitted"]
        found["affine"] = fit
    spread = float(np.square(rate - rate.mean()).sum())
    for fit in found.values():
        fit["r2"] = 1 - float(np.square(rate - fit.pop("fitted")).sum()) / spread if spread else math.nan
    return {"x": x, "y": y, "n": len(batch), "clusters": 0 if groups is None else len({*groups}), "fits": found}


def _fit(
    names: Sequence[str],
    model: Callable[..., Floats],
    x: Floats,
    y: Floats,
    start: Sequence[float],
    groups: NDArray[Any] | None,
    **options: Any,
) -> dict[str, Any]:
    """Return the estimates with their intervals, and the fitted values."""
    from scipy.optimize import OptimizeWarning, curve_fit
    from scipy.stats import t

    if len(y) < len(names) + 2:
        needed = len(names) + 2
        raise InputError(f"{len(y)} points are too few: this fit has {len(names)} parameters and needs {needed}")

    def solve(rows: Any, **limits: Any) -> tuple[Floats, Floats] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # an unknown covariance is infinite
            try:
                return curve_fit(model, x[rows], y[rows], start, **options, **limits)
            except RuntimeError:
                return None

    solved = solve(slice(None))
    if solved is None:
        raise InputError("the Hill curve does not converge on these points; they may not saturate at all")
    estimates, covariance = solved
    labels = [] if groups is None else sorted({*groups})
    if groups is not None and len(labels) >= _MIN_CLUSTERS:
        rows = {label: np.flatnonzero(groups == label) for label in labels}
        random = np.random.default_rng(0)
        draws = [tuple(sorted(random.choice(labels, len(labels)))) for _ in range(_RESAMPLES)]
        limits = {"max_nfev": _MAX_STEPS} if "bounds" in options else {}  # without bounds the problem is linear
        # few clusters have few different draws: each is solved once
        solutions = {
            draw: solve(np.concatenate([rows[label] for label in draw]), **limits) for draw in dict.fromkeys(draws)
        }
        drawn = [found[0] for draw in draws if (found := solutions[draw]) is not None]
        if len(drawn) < len(draws) / 2:
            raise InputError(
                f"the fit converges for {len(drawn)} of {len(draws)} resamples of the clusters: too few for intervals; "
                "leave out --cluster, or add points"
            )
        low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
    else:
        half = t.ppf(0.975, len(y) - len(names)) * np.sqrt(np.diag(covariance))
        low, high = estimates - half, estimates + half
    parameters = zip(names, np.stack([estimates, low, high], axis=1).tolist(), strict=True)
    return {"parameters": dict(parameters), "fitted": model(x, *estimates)}


def _column(points: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    if name not in points:
        raise UsageError(f"the file has no column {name!r}; it has {', '.join(nearest_first(name, points))}")
    return points[name]


def _numbers(points: Mapping[str, Sequence[Any]], name: str) -> Floats:
    """A column [n] of finite numbers above 0."""
    for row, value in enumerate(column := _column(points, name), 1):
        try:
            good = math.isfinite(float(value)) and float(value) > 0
        except (TypeError, ValueError):
            good = False
        if not good:
            raise InputError(f"{name} must be a number above 0; row {row} has {value!r}")
    return np.array(column, dtype=float)
