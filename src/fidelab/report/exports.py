"""One arm of a report in the form of lm-evaluation-harness's results."""

from __future__ import annotations

import re
from typing import Any

from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.results.measurement import Metric, label
from fidelab.results.numbers import public_name
from fidelab.results.record import ArmRecord, Report

_STDERRS = 2 * 1.959964  # in the width of a 95% interval
_NO_FILTER = "none"


def choose_arm(report: Report, name: str | None = None) -> ArmRecord:
    """Return the candidate of a name, else the recommended one, else the only one.

    Raises:
        UnknownNameError: If there is no candidate of this name.
        UsageError: If no candidate is named or recommended, and the report does not have exactly one.
    """
    arms = {arm.name: arm for arm in report.candidates}
    advised = report.recommendation.arm if report.recommendation else None
    chosen = name or advised or (next(iter(arms)) if len(arms) == 1 else None)
    if chosen in arms:
        return arms[chosen]
    if chosen is not None:
        raise UnknownNameError("configuration", chosen, arms)
    if not arms:
        raise UsageError(f"{report.run_id} has no candidate to choose: it compares nothing")
    raise UsageError(f"no configuration is recommended: choose one with --configuration: {', '.join(arms)}")


def lm_eval_results(report: Report, arm: ArmRecord) -> dict[str, Any]:
    """Return the content of ``results_*.json`` as lm-evaluation-harness writes it; see docs/sharing.md#exports.

    Each axis and bench is a task ``fidelab_<name>``, and each shape of work a separate task after it.
    """
    tasks: dict[str, dict[str, Metric]] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, measurement in {**arm.axes, **arm.benches}.items():
        for metric in (metric for metric in measurement.metrics if metric.value is not None):
            task = "_".join(filter(None, ("fidelab", slug(name), slug(label(metric.cell)))))
            tasks.setdefault(task, {})[metric.key] = metric
            if measurement.n_items is not None:
                usable = measurement.n_items - (measurement.n_failed or 0)
                counts[task] = {"original": measurement.n_items, "effective": usable}
    results: dict[str, dict[str, Any]] = {}
    for task, metrics in tasks.items():
        results[task] = {"alias": task, "name": task}
        for name, metric in metrics.items():
            results[task][f"{name},{_NO_FILTER}"] = metric.value
            interval = metric.interval
            stderr = "N/A" if interval is None else (interval[1] - interval[0]) / _STDERRS
            results[task][f"{name}_stderr,{_NO_FILTER}"] = stderr
    model = public_name(arm.model)
    settings = f"model={model},kv={arm.kv_text}"
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


def slug(text: str) -> str:
    """Return a part of a task's or a metric's name, without commas and blanks."""
    return re.sub(r"\W+", "_", text).strip("_")
