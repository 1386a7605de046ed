"""Fits of measured decoding: a Hill curve over the batch, an affine time of a step; and figures that cannot be right.

Hill: ``S(B) = Smax·B^γ / (B½^γ + B^γ)``, empirical.  Affine: ``t = a + b·B + c·B·T``, where ``a`` is what a step
costs at least (weights, launches), ``b`` what a sequence adds, and ``c`` the time per token in the cache, so that KV
bytes per token over ``c`` is the bandwidth at which caches are read.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core import read_file, strict_json
from fidelab.core.errors import InputError, UsageError, nearest_first
from fidelab.physics.devices import Device

Floats = NDArray[np.float64]
_MOST_BYTES = 2**27
_TOLERANCE = 0.02  # a measured speed-up may exceed its ceiling by so much before it is called impossible
_BOOTSTRAPS = 400


@dataclass(frozen=True)
class Points:
    """Columns of equal length; ``columns[name]`` is [n], NaN where a row has no number, ``labels`` are texts."""

    source: str
    columns: Mapping[str, Floats]
    labels: Mapping[str, tuple[str, ...]]

    def column(self, name: str) -> Floats:
        """One column, or the product of columns: ``batch*n_q_heads``.

        Raises:
            UsageError: there is none of this name; lists those that there are.
        """
        if name not in self.columns and "*" in name:
            return np.asarray(np.prod([self.column(part.strip()) for part in name.split("*")], axis=0))
        if name not in self.columns:
            raise UsageError(
                f"{self.source} has no column {name!r}; it has {', '.join(nearest_first(name, self.columns))}"
            )
        return self.columns[name]

    def where(self, keep: NDArray[np.bool_]) -> Points:
        """The rows for which ``keep`` [n] is true."""
        labels = {name: tuple(np.array(values)[keep].tolist()) for name, values in self.labels.items()}
        return Points(self.source, {name: values[keep] for name, values in self.columns.items()}, labels)


def read_points(path: Path, part: str | None = None) -> Points:
    """Rows of numbers from CSV, or from JSON: a list of objects, or an object that has such a list under ``part``.

    Of a report of fidelab these are the repeats of bench ``decode``: ``arm``, ``batch``, ``context`` and ``tok_s``.

    Raises:
        InputError: the file cannot be read, is neither, or has no rows.  UsageError: no such part.
    """
    try:
        text = read_file(path, _MOST_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    try:
        rows = _json_rows(path, text, part) if path.suffix.lower() == ".json" else [*csv.DictReader(io.StringIO(text))]
    except (csv.Error, AttributeError, TypeError) as error:  # a report may hold anything
        raise InputError(f"{path} cannot be read ({str(error)[:200]}); write its rows again") from None
    if not rows:
        raise InputError(f"{path} has no rows; a fit takes CSV with a heading, or JSON with a list of objects")
    names = dict.fromkeys(str(key) for row in rows for key in row if key is not None)
    numbers = {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
    is_text = {name for name, values in numbers.items() if np.isnan(values).all()}
    return Points(
        str(path),
        {name: values for name, values in numbers.items() if name not in is_text},
        {name: tuple(str(row.get(name)) for row in rows) for name in is_text},
    )


def _json_rows(path: Path, text: str, part: str | None) -> list[dict[str, Any]]:
    try:
        content = strict_json(text, not_finite=float)
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error})") from None
    if isinstance(content, dict) and str(content.get("schema", "")).startswith("fidelab.report/"):
        return [*_decode_rows(content)]
    lists = {"": content} if isinstance(content, list) else content if isinstance(content, dict) else {}
    parts = {name: rows for name, rows in lists.items() if _is_rows(rows)}
    if part is not None and part not in parts:
        raise UsageError(f"{path} has no rows under {part!r}; it has {', '.join(nearest_first(part, parts)) or 'none'}")
    if part is None and len(parts) > 1:
        raise UsageError(f"{path} has rows under {', '.join(parts)}; choose with --part")
    chosen: list[dict[str, Any]] = parts[part] if part is not None else next(iter(parts.values()), [])
    return chosen


def _decode_rows(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What bench ``decode`` measured by its first method, a row per repeat."""
    for arm in filter(None, (report.get("reference"), *(report.get("candidates") or ()))):
        bench = (arm.get("benches") or {}).get("decode") or {}
        for metric in bench.get("metrics") or ():
            cell = metric.get("cell") or {}
            if metric.get("key") == "isolated" and "batch" in cell:
                place = {"arm": arm.get("name"), "batch": cell["batch"], "context": cell.get("depth")}
                yield from ({**place, "tok_s": value} for value in metric.get("repeats") or [metric.get("value")])


def _is_rows(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)


def _number(value: Any) -> float:
    try:
        return math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True)
class Fit:
    """Parameters with 95% intervals, and how well they explain the points.

    Attributes:
        parameters: name → (estimate, lower, upper); bounds are NaN where the points do not tell.
        n: points.
        r2: ``1 - SS_res/SS_tot`` in the units of the fitted column.
        clusters: groups of points that were resampled whole for the intervals; 0: intervals from the covariance of the
            linearised model, as scipy's ``curve_fit`` gives it.
    """

    parameters: Mapping[str, tuple[float, float, float]]
    n: int
    r2: float
    clusters: int = 0

    def value(self, name: str) -> float:
        """The estimate of a parameter."""
        return self.parameters[name][0]


class HillFit(Fit):
    """``smax``, ``b_half``, ``gamma``."""

    def predict(self, x: Floats) -> Floats:
        """The curve at ``x`` [n]."""
        return _hill(x, *(self.value(name) for name in ("smax", "b_half", "gamma")))


class AffineFit(Fit):
    """``a``, ``b``, and with a column of contexts ``c``; in the unit of the fitted time."""

    def predict(self, batch: Floats, tokens: Floats | None = None) -> Floats:
        """The time of a step at ``batch`` [n] and ``tokens`` [n]."""
        time = self.value("a") + self.value("b") * batch
        return time if tokens is None else time + self.value("c") * batch * tokens


def _hill(x: Floats, smax: float, b_half: float, gamma: float) -> Floats:
    # (x / B½)^γ over 1 + the same: does not overflow where x^γ would
    ratio = np.exp(np.clip(gamma * (np.log(x) - math.log(b_half)), -600, 600))
    return np.asarray(smax * ratio / (1 + ratio))


def fit_hill(x: Floats, y: Floats, clusters: Sequence[str] | None = None) -> HillFit:
    """Least squares of the Hill curve over ``x`` [n] and ``y`` [n], both above 0.

    ``clusters``: what each point belongs to (a model, a machine); intervals then come from resampling those.

    Raises:
        InputError: too few points, NaN, or values that are not above 0; says how many are needed.
    """
    _check({"x": x, "y": y}, 3, distinct=x)

    def solve(rows: NDArray[np.intp]) -> _Solved | None:
        starts = [(1.2 * float(y[rows].max()), float(np.median(x[rows])), gamma) for gamma in (1.0, 2.0)]
        bounds = ((1e-12,) * 3, (np.inf, np.inf, 50.0))
        found = (_curve_fit(_hill, x[rows], y[rows], start, bounds=bounds, max_nfev=2000) for start in starts)
        return min(
            filter(None, found), key=lambda one: float(np.square(y[rows] - _hill(x[rows], *one[0])).sum()), default=None
        )

    if (found := solve(np.arange(len(x)))) is None:
        raise InputError("the Hill curve does not converge on these points; they may not saturate at all")
    return HillFit(*_judged(("smax", "b_half", "gamma"), found, y, _hill(x, *found[0]), solve, clusters))


_Solved = tuple[Floats, Floats]  # estimates [k] and their covariance [k, k]


def _curve_fit(
    model: Callable[..., Floats], x: Floats, y: Floats, start: Sequence[float], **options: Any
) -> _Solved | None:
    """Least squares; ``None`` where it does not converge."""
    import warnings

    from scipy.optimize import OptimizeWarning, curve_fit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)  # a covariance that cannot be told is infinite
        try:
            estimates, covariance = curve_fit(model, x, y, start, **options)
        except RuntimeError:
            return None
    return estimates, covariance


def fit_affine(
    batch: Floats, time: Floats, tokens: Floats | None = None, clusters: Sequence[str] | None = None
) -> AffineFit:
    """Least squares of ``t = a + b·B (+ c·B·T)`` over ``batch`` [n], ``time`` [n] and ``tokens`` [n].

    Raises: as :func:`fit_hill`; and where the points do not vary enough to tell the terms apart.
    """
    names = ("a", "b") if tokens is None else ("a", "b", "c")
    _check({"batch": batch, "time": time, **({} if tokens is None else {"context": tokens})}, len(names))
    design = np.stack([np.ones_like(batch), batch, *([] if tokens is None else [batch * tokens])], axis=1)
    scale = np.abs(design).max(axis=0)
    if np.linalg.matrix_rank(design / scale) < len(names):
        lacks = "batches" if len(set(batch.tolist())) < 2 else "contexts"
        raise InputError(f"an affine time needs points at two or more {lacks}; these have one")

    def solve(rows: NDArray[np.intp]) -> _Solved | None:
        if np.linalg.matrix_rank(design[rows] / scale) < len(names):
            return None
        scaled = _curve_fit(
            lambda x, *terms: x @ np.array(terms), design[rows] / scale, time[rows], (1.0,) * len(names)
        )
        return None if scaled is None else (scaled[0] / scale, scaled[1] / np.outer(scale, scale))

    found = solve(np.arange(len(batch)))
    assert found is not None
    return AffineFit(*_judged(names, found, time, design @ found[0], solve, clusters))


def _check(columns: Mapping[str, Floats], parameters: int, distinct: Floats | None = None) -> None:
    """Raises InputError where a fit would mean nothing."""
    n = len(next(iter(columns.values())))
    needed = parameters + 2
    if n < needed:
        raise InputError(f"{n} points are too few: this fit has {parameters} parameters and needs at least {needed}")
    for name, values in columns.items():
        if (bad := int((~np.isfinite(values)).sum())) > 0:
            first = int(np.flatnonzero(~np.isfinite(values))[0]) + 1
            raise InputError(f"{bad} of {n} points have no number for {name} (the first is row {first}); remove them")
        if (values <= 0).any():
            first = int(np.flatnonzero(values <= 0)[0]) + 1
            raise InputError(f"{name} must be above 0; row {first} has {values[first - 1]:g}")
    if distinct is not None and len(set(distinct.tolist())) < parameters:
        raise InputError(
            f"a Hill curve needs points at {parameters} or more values of x, not {len(set(distinct.tolist()))}"
        )


def _judged(
    names: Sequence[str],
    found: _Solved,
    y: Floats,
    fitted: Floats,
    solve: Callable[[NDArray[np.intp]], _Solved | None],
    clusters: Sequence[str] | None,
) -> tuple[dict[str, tuple[float, float, float]], int, float, int]:
    """The fields of a fit."""
    from scipy.stats import t

    estimates, covariance = found
    loss, spread = float(np.square(y - fitted).sum()), float(np.square(y - y.mean()).sum())
    r2 = 1 - loss / spread if spread > 0 else math.nan
    groups = sorted(set(clusters or ()))
    if len(groups) >= 3:
        low, high = _resampled(solve, np.array(clusters), groups, len(names))
    else:
        half = t.ppf(0.975, len(y) - len(names)) * np.sqrt(np.diag(covariance))
        half[~np.isfinite(half)] = np.nan
        low, high = estimates - half, estimates + half
    parameters = {
        name: (float(value), float(lower), float(upper))
        for name, value, lower, upper in zip(names, estimates, low, high, strict=True)
    }
    return parameters, len(y), r2, len(groups) if len(groups) >= 3 else 0


def _resampled(
    solve: Callable[[NDArray[np.intp]], _Solved | None], clusters: NDArray[Any], groups: Sequence[str], k: int
) -> tuple[Floats, Floats]:
    """2.5% and 97.5% of estimates from resampled clusters (percentile bootstrap)."""
    rows = {group: np.flatnonzero(clusters == group) for group in groups}
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(_BOOTSTRAPS):
        chosen = [groups[i] for i in random.integers(0, len(groups), len(groups))]
        if (found := solve(np.concatenate([rows[group] for group in chosen]))) is not None:
            drawn.append(found[0])
    if len(drawn) < _BOOTSTRAPS // 2:
        return np.full(k, np.nan), np.full(k, np.nan)
    low, high = np.percentile(np.array(drawn), (2.5, 97.5), axis=0)
    return low, high


def compare_fits(
    points: Points,
    *,
    y: str,
    x: str = "batch",
    context: str | None = None,
    is_time: bool = False,
    by: str | None = None,
    min_x: float | None = None,
    kv_bytes: float | None = None,
    device: Device | None = None,
    ceiling: float | None = None,
) -> dict[str, Any]:
    """Both fits of a column, which explains more of it, and what in it cannot be right; plain data.

    Args:
        y: a speed-up or a rate (tokens per second); with ``is_time`` the milliseconds of a step.
        x: batches; ``A*B`` multiplies two columns.
        context: tokens per sequence, for the affine time.
        by: what each point belongs to; intervals then come from resampling those.
        min_x: points below it are left out; without it the fit is repeated on x >= 4, where curves often part.
        kv_bytes: per token, for the bandwidth that the affine time implies; held against ``device``.
        ceiling: of the speed-up; points above it by more than 2% are named.

    A Hill curve of a time is fitted to ``1000·x/y``, the rate that it stands for; R² of both is that of the rate, so
    that they can be compared.  A speed-up has no affine time.

    Raises:
        UsageError: a column that is not there.  InputError: as :func:`fit_hill`, where neither fit can be had.
    """
    batch, value = points.column(x), points.column(y)
    tokens = None if context is None else points.column(context)
    groups = None
    if by is not None:
        if by not in points.labels and by not in points.columns:
            raise UsageError(
                f"{points.source} has no column {by!r}; it has {', '.join([*points.labels, *points.columns])}"
            )
        groups = points.labels.get(by) or tuple(f"{number:g}" for number in points.columns[by])
    if min_x is not None:
        keep = batch >= min_x
        batch, value = batch[keep], value[keep]
        tokens = None if tokens is None else tokens[keep]
        groups = None if groups is None else tuple(np.array(groups)[keep].tolist())
    is_speedup = not is_time and value.size > 0 and float(np.nanmax(value)) < 50 and "tok" not in y.lower()
    rate = 1000 * batch / value if is_time else value
    fits: dict[str, dict[str, Any]] = {}
    errors: dict[str, InputError] = {}
    fitted: dict[str, Floats] = {}

    def keep_fit(name: str, formula: str, solve: Callable[[], tuple[Fit, Floats]]) -> None:
        try:
            fit, on_rate = solve()
        except InputError as error:
            errors[name], fits[name] = error, {"why_not": str(error)}
            return
        fitted[name] = on_rate
        fits[name] = {
            "formula": formula,
            "parameters": {key: list(values) for key, values in fit.parameters.items()},
            "n": fit.n,
            "r2": fit.r2,
            "clusters": fit.clusters,
        }

    def affine() -> tuple[Fit, Floats]:
        milliseconds = value if is_time else 1000 * batch / value
        fit = fit_affine(batch, milliseconds, tokens, groups)
        return fit, 1000 * batch / fit.predict(batch, tokens)

    keep_fit("Hill", "Smax·x^γ / (x½^γ + x^γ)", lambda: _hill_of(batch, rate, groups))
    if not is_speedup:
        keep_fit("affine", "t = a + b·x + c·x·T, ms" if tokens is not None else "t = a + b·x, ms", affine)
    if len(errors) == len(fits):
        raise next(iter(errors.values()))
    if min_x is None and float(batch.min()) < 4:
        keep = batch >= 4
        few = None if groups is None else tuple(np.array(groups)[keep].tolist())
        keep_fit(f"Hill, {x} of 4 and more", "the same", lambda: _hill_of(batch[keep], rate[keep], few))
        fitted.pop(f"Hill, {x} of 4 and more", None)
    sentences = [*_which(rate, fitted), *_artefacts(fits, is_speedup, value, ceiling, kv_bytes, device)]
    return {
        "source": points.source,
        "x": x,
        "y": y,
        "fits": fits,
        "sentences": sentences,
        "residuals": _residuals(batch, rate, fitted),
    }


def _hill_of(batch: Floats, rate: Floats, groups: Sequence[str] | None) -> tuple[Fit, Floats]:
    fit = fit_hill(batch, rate, groups)
    return fit, fit.predict(batch)


def _which(rate: Floats, fitted: Mapping[str, Floats]) -> list[str]:
    """Which fit explains more of the rate, by R² on the same column."""
    if len(fitted) < 2:
        return []
    spread = float(np.square(rate - rate.mean()).sum())
    r2 = {name: 1 - float(np.square(rate - values).sum()) / spread for name, values in fitted.items()}
    first, second = sorted(r2, key=lambda name: -r2[name])
    return [
        f"Of the rate, {first} explains {r2[first]:.2%} and {second} {r2[second]:.2%}: "
        + ("they explain it alike." if r2[first] - r2[second] < 0.005 else f"{first} explains more.")
    ]


def _artefacts(
    fits: Mapping[str, Mapping[str, Any]],
    is_speedup: bool,
    value: Floats,
    ceiling: float | None,
    kv_bytes: float | None,
    device: Device | None,
) -> list[str]:
    found = []
    if ceiling is not None and is_speedup:
        above = [impossible_speedup(float(v), ceiling) for v in value]
        count = sum(text is not None for text in above)
        if count:
            found.append(
                f"{count} of {len(value)} points cannot be an effect of memory: "
                + str(impossible_speedup(float(value.max()), ceiling))
            )
        smax = fits.get("Hill", {}).get("parameters", {}).get("smax", [math.nan])[0]
        if why := impossible_speedup(smax, ceiling):
            found.append(f"Smax: {why}")
    slope = fits.get("affine", {}).get("parameters", {}).get("c")
    if kv_bytes is not None and slope is not None:
        bandwidth = kv_bytes / (slope[0] / 1000)
        text = f"Caches are read at {bandwidth / 1e12:.2f} TB/s ({kv_bytes:,.0f} bytes per token over c)"
        if slope[0] <= 0:
            text = "c is not above 0: these points do not show that a longer cache takes longer"
        elif device is not None:
            share = bandwidth / device.bandwidth
            text += f", {share:.0%} of what {device.name} has" + (
                ": above it, so that these times are not those of reading the cache" if share > 1 + _TOLERANCE else ""
            )
        found.append(text + ".")
    if is_speedup and "Hill" in fits and "gamma" in fits["Hill"].get("parameters", {}):
        below = int((value < 1).sum())
        if below:
            found.append(f"{below} of {len(value)} points are slower than the reference.")
    return found


def _residuals(batch: Floats, rate: Floats, fitted: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Per value of x: the median residual of each fit, its range, and a bar to look at."""
    largest = max((float(np.abs(rate - values).max()) for values in fitted.values()), default=0.0) or 1.0
    rows = []
    for x in sorted(set(batch.tolist()))[:64]:
        here = batch == x
        by_fit = {}
        for name, values in fitted.items():
            residual = (rate - values)[here]
            middle = float(np.median(residual))
            width = round(10 * abs(middle) / largest)
            bar = f"{'█' * width if middle < 0 else '':>10}│{'█' * width if middle >= 0 else '':<10}"
            by_fit[name] = {"median": middle, "from": float(residual.min()), "to": float(residual.max()), "bar": bar}
        rows.append({"x": x, "n": int(here.sum()), "by_fit": by_fit})
    return rows


# ------------------------------------------------------------------------------------- what cannot be right


def impossible_speedup(measured: float, ceiling: float) -> str | None:
    """Why a measured speed-up of decoding is not explained by fewer bytes; ``None`` where it may be."""
    if measured <= ceiling * (1 + _TOLERANCE):
        return None
    return (
        f"{measured:.3g}× is above the ceiling of {ceiling:.3g}× that reading fewer bytes allows: "
        "the reference ran slower than it could, or something else changed as well"
    )


def impossible_rate(measured: float, bound: float, what: str = "weights and caches") -> str | None:
    """Why a measured rate of tokens per second cannot be right; ``None`` where it may be."""
    if measured <= bound * (1 + _TOLERANCE):
        return None
    return f"{measured:,.0f} tokens/s cannot be right: reading {what} allows {bound:,.0f}"
