"""One arm of a report in other tools' forms: lm-evaluation-harness's results, the hub's model card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.report.markdown import code_span
from fidelab.results.measurement import Metric, label
from fidelab.results.numbers import format_interval, heading, public_name
from fidelab.results.record import ArmRecord, Report
from fidelab.results.values import NEEDS_REASON

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

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
        raise UnknownNameError("arm", chosen, arms)
    if not arms:
        raise UsageError(f"{report.run_id} has no candidate, so there is no configuration to export")
    raise UsageError(f"no configuration is recommended: choose one with --arm: {', '.join(arms)}")


def lm_eval_results(report: Report, arm: ArmRecord) -> dict[str, Any]:
    """Return the content of ``results_*.json`` as lm-evaluation-harness writes it; see docs/sharing.md#exports.

    Each axis and bench is a task ``fidelab_<name>``, and each shape of work a separate task after it.
    """
    tasks: dict[str, dict[str, Metric]] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, measurement in {**arm.axes, **arm.benches}.items():
        for metric in (metric for metric in measurement.metrics if metric.value is not None):
            task = "_".join(filter(None, ("fidelab", _slug(name), _slug(label(metric.cell)))))
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


def _slug(text: str) -> str:
    """A part of a task's name or a metric's: without commas and blanks."""
    return re.sub(r"\W+", "_", text).strip("_")


# --------------------------------------------------------------------------------------------------- the hub


def model_card(report: Report, arm: ArmRecord) -> str:
    """Return a model card for the hub: the section for people, and the first figures of each axis as ``model-index``.

    Raises:
        UsageError: If no axis has a figure.
    """
    from huggingface_hub.repocard_data import eval_results_to_model_index

    found = [*_eval_results(report, arm)]
    if not found:
        raise UsageError(f"{report.run_id} has no figure of fidelity for {arm.name}: there is nothing for a model card")
    index = {"model-index": eval_results_to_model_index(public_name(arm.model), found)}
    head = yaml.safe_dump(index, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n# Fidelity of {code_span(arm.name)}\n\n{report.to_markdown()}"


def _eval_results(report: Report, arm: ArmRecord) -> Iterator[EvalResult]:
    """The headlines of all axes."""
    from huggingface_hub import EvalResult

    axes = report.settings.get("axes")
    text = report.settings.get("text")
    for name, measured in arm.axes.items():
        asked = axes.get(name) if isinstance(axes, dict) else None
        given = {key: value for key, value in (asked or {}).items() if isinstance(value, bool | int | float)}
        for metric in measured.headlines:
            if measured.status in NEEDS_REASON or metric.value is None:
                continue
            interval = f" (95% {format_interval(metric.ci, metric.unit)})" if metric.ci else ""
            place = f", {label(metric.cell)}" if metric.cell else ""
            yield EvalResult(
                task_type="text-generation",
                task_name=measured.title or name,
                dataset_type=f"fidelab-{_slug(name)}",
                dataset_name=f"fidelab {name}",
                dataset_args={**given, **({"text": public_name(text)} if isinstance(text, str) else {})},
                metric_type=_slug(f"{name}_{metric.key}"),
                metric_name=f"{arm.name}: {heading(metric.name, metric.unit)}{place}{interval}",
                metric_value=metric.value,
                metric_args={
                    "kv_cache": arm.kv_text,
                    "engine": arm.engine,
                    "reference": report.reference.name,
                    "unit": metric.unit,
                    "ci95": None if metric.ci is None else [*metric.ci],
                    "lower_bound": metric.bound,
                },
            )
