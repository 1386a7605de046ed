"""Reports of schema ``fidelab.report/0`` as reports of schema 1, so that old runs and baselines stay readable.

Schema 0 had a record of its own for every axis and bench; what it did not say, which side of a figure is better, is
said here as it was judged then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fidelab.axes import AXES
from fidelab.axes.base import OVER_CONTROL, SCORE
from fidelab.axes.kld import KLD_METRICS, kl_curve
from fidelab.axes.trajectory import TRAJECTORY_METRICS, divergence_texts, survival_plot
from fidelab.results.measurement import Better, Coordinates, Definition, Measurement, Metric, Unit
from fidelab.results.plots import Curve, TextPair, Texts

__all__ = ["metrics_of", "upgrade"]

Plain = Mapping[str, Any]

# Axis → figures whose better side was known; of perplexity, the context stood behind the name.
_BETTER: Mapping[str, Mapping[str, Better]] = {
    "perplexity": {"ln ratio": "lower", "PPL change": "lower"},
    "gsm8k": {"accuracy": "higher", "difference": "higher"},
    "forced": {"mean KL": "lower", "median KL": "lower", "99th percentile": "lower", "same top token": "higher"},
    "degeneration": {"degenerate earlier": "lower"},
    "rniah": {"accuracy": "higher", "accuracy difference": "higher"},
    "plad": {"excess drift": "lower", "drift of the candidate": "lower"},
    "capability": {"passed": "higher", "difference": "higher"},
}
_COMPOSED = ("trajectory", "kld", "rniah", "plad")
_BOUND = ", at least"  # behind the name of a figure that is a lower bound


def upgrade(plain: Plain) -> dict[str, Any]:
    """The JSON object of a report of schema 0 as one of schema 1.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: it is malformed.
    """
    report = {**plain, "schema": "fidelab.report/1", "floor": _axes(plain.get("floor") or {}, 0.0)}
    if (grid := report.pop("isolation", None)) is not None:
        outcomes = [_renamed(outcome, n_units="n_clusters") for outcome in grid["outcomes"]]
        report["ablation"] = {**grid, "outcomes": outcomes}
    for name in ("reference", "control", "truth"):
        if report.get(name) is not None:
            report[name] = _arm(report[name])
    for name in ("controls", "candidates"):
        report[name] = [_arm(arm) for arm in report.get(name) or ()]
    return report


def _renamed(plain: Plain, **names: str) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in plain.items()}


def _arm(arm: Plain) -> dict[str, Any]:
    from fidelab.imports.upgrade_benches import upgrade_benches

    noise = (arm.get("floor") or {}).get("mean") or 0.0
    benches = {name: bench for name, bench in (arm.get("benches") or {}).items() if bench is not None}
    timing = benches.pop("timing", None)
    axes = _axes(arm.get("axes") or {}, noise)
    record = {**arm, "axes": axes, "timing": timing, "benches": upgrade_benches(benches)}
    if arm.get("composite") is not None:
        counted = [name for name in _COMPOSED if (arm["axes"].get(name) or {}).get("score") is not None]
        record["composite"] = {**arm["composite"], "axes": counted}
    return record


def _axes(axes: Plain, noise: float) -> dict[str, Any]:
    """``noise``: what last bits move the arm's KL by (nats)."""
    known = {"kld": _kld, "trajectory": _trajectory}
    results = {
        name: known.get(name, _other)(name, {**axis, "score_ci": axis.get("ci")})
        for name, axis in axes.items()
        if axis is not None
    }
    if "kld" in results:
        shaken = tuple(m.model_copy(update={"noise": noise}) if m.unit == "nats" else m for m in results["kld"].metrics)
        results["kld"] = results["kld"].model_copy(update={"metrics": shaken})
    return {name: measurement.model_dump(mode="json") for name, measurement in results.items()}


def _kld(name: str, axis: Plain) -> Measurement:
    bound = axis.get("estimator") == "topk"
    metrics = list(metrics_of(axis, KLD_METRICS, bound))
    contexts = axis.get("contexts") or ()
    for context in contexts if len(contexts) > 1 else ():
        cell = {"context": context["n_ctx"]}
        metrics += metrics_of(context, {field: KLD_METRICS[field] for field in ("mean", "top1")}, bound, cell)
    drawn = {key: bins for key in ("position", "confidence") if (bins := axis.get(f"by_{key}")) and any(bins["mean"])}
    plots = [kl_curve(key, bins["edges"], bins["mean"]) for key, bins in drawn.items()]
    about = ("n_ctx", "n_positions", "n_documents", "windows")
    return _measurement(
        name,
        axis,
        metrics,
        plots=plots,
        n_items=axis.get("n_positions"),
        facts={
            **_given(axis, "estimator", "n_ctx", "n_documents"),
            **({} if axis.get("n_units") is None else {"n_clusters": axis["n_units"]}),
            "contexts": [_given(context, *about) for context in contexts],
        },
    )


def _trajectory(name: str, axis: Plain) -> Measurement:
    plots: list[Curve | Texts] = []
    if shares := axis.get("survival"):
        plots.append(survival_plot(shares))
    if forks := axis.get("divergences"):
        plots.append(Texts(title="First divergences", pairs=tuple(map(_fork, forks))))
    facts = _given(axis, "n_predict", "template")
    return _measurement(name, axis, list(metrics_of(axis, TRAJECTORY_METRICS)), plots=plots, facts=facts)


def _fork(fork: Plain) -> TextPair:
    margin = math.nan if fork.get("margin") is None else fork["margin"]
    return divergence_texts(
        fork["item"], fork["at"], margin, **_given(fork, "prompt", "shared", "reference", "candidate")
    )


def _other(name: str, axis: Plain) -> Measurement:
    figures = axis.get("figures") or ()
    bound = any(figure["name"].endswith(_BOUND) for figure in figures)
    metrics = list(metrics_of(axis, {"score": SCORE}))
    for figure in figures:
        called, cell = figure["name"].removesuffix(_BOUND), Coordinates()
        head, _, tail = called.rpartition(" ")
        if name == "perplexity" and tail.isdecimal():
            called, cell = head, {"context": int(tail)}
        unit: Unit = figure.get("unit") or ""
        defined = Definition(called, unit, _BETTER.get(name, {}).get(called))
        metrics.append(defined(figure.get("value"), figure.get("ci"), cell=cell, bound=bound and unit == "nats"))
    return _measurement(
        name,
        axis,
        metrics,
        bound=bound,
        title=axis.get("title") or "",
        plots=axis.get("panels") or (),
        facts=axis.get("details") or {},
    )


def _measurement(name: str, axis: Plain, metrics: list[Metric], *, bound: bool = False, **more: Any) -> Measurement:
    """What all axes have in common; ``bound``: the figures in nats are lower bounds."""
    if excess := axis.get("excess_over_control"):
        # the difference of two lower bounds bounds nothing
        definition = AXES.load(name).excess if name in AXES.built_in else OVER_CONTROL
        over = definition(excess.get("mean"), excess.get("ci"))
        unjudged = bound or any(metric.bound for metric in metrics)
        metrics.append(over.model_copy(update={"better": None}) if unjudged else over)
    fields = {**_given(axis, "status", "reason", "n_items", "n_failed"), **more}
    return Measurement.model_validate({**fields, "metrics": tuple(_numbered(metrics))})


def _numbered(metrics: list[Metric]) -> Iterator[Metric]:
    """A second metric of the same place gets a number behind its name."""
    seen: dict[tuple[str, str], int] = {}
    for metric in metrics:
        place = metric.name, repr(metric.cell)
        seen[place] = seen.get(place, 0) + 1
        yield metric if seen[place] == 1 else metric.model_copy(update={"name": f"{metric.name} #{seen[place]}"})


def metrics_of(
    figures: Plain, definitions: Mapping[str, Definition], bound: bool = False, cell: Coordinates | None = None
) -> Iterator[Metric]:
    """The metrics of what is there; ``bound``: those in nats are lower bounds.  The first one is the headline."""
    for number, (field, definition) in enumerate(definitions.items()):
        value, ci = figures.get(field), figures.get(f"{field}_ci")
        if value is not None or ci is not None:
            lower = bound and definition.unit == "nats"
            yield definition(value, ci, cell=cell, bound=lower, headline=number == 0 and not cell)


def _given(plain: Plain, *names: str) -> dict[str, Any]:
    return {name: plain[name] for name in names if plain.get(name) is not None}
