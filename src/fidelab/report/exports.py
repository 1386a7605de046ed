"""One arm of a report in other tools' forms: results as lm-evaluation-harness writes them, and a badge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from fidelab.errors import UnknownNameError, UsageError
from fidelab.report.charts import element
from fidelab.results.measurement import Measurement, Metric, label
from fidelab.results.numbers import format_kld, one_line, printable
from fidelab.results.record import ArmRecord, Report

__all__ = ["choose_arm", "lm_eval_results", "render_badge"]

_STDERRS = 2 * 1.959964  # in the width of a 95% interval
_NO_FILTER = "none"
# White text on them has a contrast of 5 and more: the colours of verdicts on the light page
_COLOURS = {"EXCELLENT": "#14713f", "PASS": "#3d7413", "DEGRADED": "#8a5800", "FAIL": "#b3261e", None: "#565c64"}
_LABEL = "#3b4148"
_HEIGHT, _LETTER, _PAD = 20, 6.6, 8  # pixels, at 11 px of a sans-serif font
_LONGEST = 80  # characters


def choose_arm(report: Report, name: str | None = None) -> ArmRecord:
    """The candidate of a name, else the recommended one, else the only one.

    Raises:
        UnknownNameError: there is none of this name.
        UsageError: none was named, none is recommended, and there are several, or none.
    """
    arms = {arm.name: arm for arm in report.candidates}
    advised = report.recommendation.arm if report.recommendation else None
    chosen = name or advised or (next(iter(arms)) if len(arms) == 1 else None)
    if chosen in arms:
        return arms[chosen]
    if chosen is not None:
        raise UnknownNameError("arm", chosen, arms)
    if not arms:
        raise UsageError(f"{report.run_id} has no candidate, so there is no arm to export")
    raise UsageError(f"no arm is recommended: name one of them with --arm: {', '.join(arms)}")


def lm_eval_results(report: Report, arm: ArmRecord) -> dict[str, Any]:
    """What lm-evaluation-harness would have written to ``results_*.json``; see docs/sharing.md#exports.

    Each axis and bench is a task ``fidelab_<name>``, each shape of work a task of its own behind that.
    """
    tasks: dict[str, dict[str, Metric]] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, measurement in {**arm.axes, **arm.benches}.items():
        for task, metric in _tasks(name, measurement):
            tasks.setdefault(task, {})[_slug(metric.name)] = metric
            if measurement.n_items is not None:
                usable = measurement.n_items - (measurement.n_failed or 0)
                counts[task] = {"original": measurement.n_items, "effective": usable}
    results: dict[str, dict[str, Any]] = {}
    for task, metrics in tasks.items():
        results[task] = {"alias": task, "name": task}
        for name, metric in metrics.items():
            results[task][f"{name},{_NO_FILTER}"] = metric.value
            results[task][f"{name}_stderr,{_NO_FILTER}"] = _stderr(metric)
    path = PurePath(arm.model)
    model = path.name if path.is_absolute() else arm.model  # exports are published
    settings = f"model={model},k={arm.kv.k},v={arm.kv.v}"
    return {
        "results": results,
        "group_subtasks": {task: [] for task in tasks},
        "configs": {task: {"task": task} for task in tasks},
        "versions": dict.fromkeys(tasks, report.fidelab_version),
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {
            task: {name: None if one.better is None else one.better == "higher" for name, one in metrics.items()}
            for task, metrics in tasks.items()
        },
        "n-samples": counts,
        "config": {"model": arm.engine, "model_args": settings, "model_sha": arm.weights_sha256},
        "git_hash": report.environment.get("commit") or "",
        "date": report.created.timestamp(),
        "model_source": arm.engine,
        "model_name": model,
        "model_name_sanitized": re.sub(r"[\"<>:/\\|?*\[\]]+", "__", model),
        "fidelab": {
            "run_id": report.run_id,
            "arm": arm.name,
            "reference": report.reference.name,
            "verdict": arm.verdict.sentence if arm.verdict else None,
            "units": {task: {name: one.unit for name, one in metrics.items()} for task, metrics in tasks.items()},
            "intervals": {
                task: {name: list(one.ci) for name, one in metrics.items() if one.ci} for task, metrics in tasks.items()
            },
        },
    }


def _tasks(name: str, measurement: Measurement) -> Iterator[tuple[str, Metric]]:
    for metric in measurement.metrics:
        if metric.value is not None:
            yield "_".join(filter(None, ("fidelab", _slug(name), _slug(label(metric.cell))))), metric


def _slug(text: str) -> str:
    """A part of a task's name or a metric's: these hold no comma and no blank."""
    return re.sub(r"\W+", "_", text).strip("_")


def _stderr(metric: Metric) -> float | str:
    interval = metric.interval
    return "N/A" if interval is None else (interval[1] - interval[0]) / _STDERRS


def render_badge(arm: ArmRecord) -> str:
    """An SVG of 20 pixels' height: ``fidelab | k16v8: EXCELLENT, KL ≤ 0.0012 nats``."""
    band = arm.verdict.band if arm.verdict else None
    words = band or (arm.status.value if not arm.measured else "no verdict")
    mean = arm.axes["kld"].metric("mean") if "kld" in arm.axes else None
    if mean is not None and mean.interval is not None and not mean.bound:
        words += f", KL ≤ {format_kld(mean.interval[1])} nats"
    text = one_line(f"{arm.name}: {words}")
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    left, right = (round(_LETTER * len(part) + 2 * _PAD) for part in ("fidelab", text))
    letters: dict[str, str | float] = {
        "fill": "#fff",
        "font_family": "Verdana, DejaVu Sans, sans-serif",
        "font_size": 11,
    }
    body = (
        element("title", f"fidelab: {text}"),
        element("rect", width=left + right, height=_HEIGHT, rx=3, fill=_COLOURS[band]),
        element("path", d=f"M3 0H{left}V{_HEIGHT}H3A3 3 0 0 1 0 {_HEIGHT - 3}V3A3 3 0 0 1 3 0Z", fill=_LABEL),
        element("text", "fidelab", x=_PAD, y=14, textLength=left - 2 * _PAD, **letters),
        element("text", text, x=left + _PAD, y=14, textLength=right - 2 * _PAD, **letters),
    )
    size = {"width": left + right, "height": _HEIGHT}
    svg: Markup = element("svg", *body, xmlns="http://www.w3.org/2000/svg", role="img", **size)
    return printable(f"{svg}\n")
