"""Settings that two reports must share to compare a metric, and differences that are only reported.

See docs/metrics/between-runs.md#comparability.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from fidelab.core import canonical_json
from fidelab.results.measurement import Metric
from fidelab.results.record import ArmRecord, Report
from fidelab.results.table import BENCH, CACHE, COMPOSITE, OVER_CONTROL, Key, arms
from fidelab.results.values import Free, Record

COUNTED = "composite.axes"
_MEANINGS = {  # of fields whose values tell a person nothing
    "items": "other questions were asked (another text, other prompts, or more or fewer of them)",
    "vocabulary": "the tokenizers differ",
    "tokenizer": "the tokenizers differ",
}
_CALLED = {
    "reference.kv": "the reference's KV cache",
    "control.kv": "the control's KV cache",
    COUNTED: "what the composite is made of",
    "floor": "the share of items run again for run-to-run noise",
}
_CAPTURE = re.compile(r"\.?\+\d+(?=\.)")  # kld.+1.items, kld.512+1.items
_MAX_SHOWN_LENGTH = 40  # characters of a value: lists are long
_VOLATILE = ("loaded_host_bytes", "peak_host_bytes", "seconds")  # of what ran: differs from one run to the next
# Fields of the environment and of the runtime on which last bits depend.
_MACHINE = ("machine", "processor", "usable_cores", "packages", "gpus", "gpu_driver")
_ROUNDING = ("device", "attention", "threads", "versions", "variables")


class Difference(Record):
    """Something that differs."""

    where: str
    """A configuration, or ``environment``."""
    field: str
    """Name of the field that differs."""
    baseline: Free = None
    """Value in the baseline; null: not recorded."""
    now: Free = None
    """Value in the run; null: not recorded."""


def fields(report: Report, key: Key, metric: Metric, groups: Set[str]) -> dict[str, Any]:
    """Return the settings that must agree for this metric, as path → value.

    An entry ``X`` or ``X.part`` of the report's comparability key concerns group ``X``. An entry that names none of the
    ``groups`` concerns all axes. Axes also have to share the reference's KV format, an excess the control's format, the
    floor its share of the items, and a composite its axes.
    """
    values: dict[str, Any] = {f"unit of {key.metric}": metric.unit}
    for group in metric.rests_on or (key.group,):
        for name, value in report.comparability_key.items():
            if _concerns(name, group, groups):
                values |= dict(_flat(name, value))
    if key.group != CACHE and not key.group.startswith(BENCH):
        values["reference.kv"] = report.reference.kv_text
    if key.metric == OVER_CONTROL:
        named = {arm.name: arm.control for arm in report.candidates if key.role == "candidate"}.get(key.arm)
        control = next((arm for arm in report.controls if arm.name == named), report.control)
        values["control.kv"] = control.kv_text if control else None
    if key.role == "floor":
        values["floor"] = report.settings.get("floor")
    if key.group == COMPOSITE:
        values[COUNTED] = sorted(metric.rests_on)
    return values


def describe_difference(field: str, baseline: Any, now: Any) -> str:
    """Describe a difference in a field of :func:`fields`. Hashes and lists of captures are omitted."""
    field = _CAPTURE.sub("", field)
    axis, _, name = field.rpartition(".")
    if name in _MEANINGS and axis:
        return f"{axis}: {_MEANINGS[name]}"
    what = _CALLED.get(field) or field.replace(".settings.", ": ")
    return f"{what} was {_shorten(baseline)} in the baseline and is {_shorten(now)} now"


def _shorten(value: Any) -> str:
    if value is None:
        return "not recorded"
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[: _MAX_SHOWN_LENGTH - 1]}…"


def _concerns(name: str, group: str, groups: Set[str]) -> bool:
    if group == CACHE:
        return False
    if name == group or name.startswith(f"{group}."):
        return True
    bench = BENCH.rstrip(".")
    if group.startswith(BENCH):
        return name == bench
    named = name == bench or name.startswith(BENCH)
    return not named and not any(name == other or name.startswith(f"{other}.") for other in groups)


def environment_differences(baseline: Report, now: Report) -> Iterator[Difference]:
    """Return differences of environment, and of settings and runtime info of the arms that both reports have."""
    was, is_ = (
        {"fidelab": report.fidelab_version, **dict(_flat("", report.environment))} for report in (baseline, now)
    )
    yield from _differences("environment", was, is_)
    known = {(role, arm.name): arm for role, arm in arms(baseline)}
    for role, arm in arms(now):
        if (role, arm.name) in known:
            yield from _differences(arm.name, _arm_facts(known[role, arm.name]), _arm_facts(arm))


def same_environment(baseline: Report, now: Report) -> bool:
    """Whether both ran with the same machine, packages, kernels and variables, as far as the reports state them."""
    return not any(
        difference.field.split(".")[0] in (_MACHINE if difference.where == "environment" else _ROUNDING)
        for difference in environment_differences(baseline, now)
    )


def _arm_facts(arm: ArmRecord) -> dict[str, Any]:
    """Return the settings and runtime info of an arm as a flat mapping."""
    ran = {} if arm.ran is None else arm.ran.model_dump(mode="json")
    for name in (*_VOLATILE, "cache_bytes_per_token", "sequence"):  # the latter two are sizes, of which one is a metric
        ran.pop(name, None)
    return {"engine": arm.engine, "model": arm.model, "KV asked": arm.kv_text, **dict(_flat("", ran))}


def _differences(where: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys((*was, *now)):
        if was.get(name) != now.get(name):
            yield Difference(where=where, field=name, baseline=was.get(name), now=now.get(name))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to paths. An empty mapping keeps its place."""
    if isinstance(value, Mapping) and value:
        for part, inner in value.items():
            yield from _flat(f"{name}.{part}" if name else part, inner)
    else:
        yield name, value
