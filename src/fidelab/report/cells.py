"""Single cells of the report: functions that turn a metric into its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fidelab.core import Status
from fidelab.core.registry import Registry
from fidelab.results.measurement import Coordinates, Measurement, Metric
from fidelab.results.numbers import (
    ABSENT,
    counted,
    format_figure,
    format_interval,
    format_kld,
    format_percent,
    format_percent_span,
    format_range,
    format_ratio,
    format_score,
    format_span,
    one_line,
)
from fidelab.results.record import NO_REFERENCE, ArmRecord
from fidelab.results.table import OVER_CONTROL
from fidelab.results.values import Outcome

STATUS = {
    Status.OK: "ok",
    Status.IDENTICAL: "identical",
    Status.FAILED: "failed",
    Status.NOT_ENGAGED: "not engaged",
    Status.NOT_SUPPORTED: "not supported",
    Status.NOT_MEASURABLE: "not measurable",
}


_MIN_SHOWN_CLUSTERS = 4  # with three documents Student's t alone makes an end of 7% out of no event at all


@dataclass(frozen=True)
class Estimate:
    """A value and its interval, as text; ``order``: a number to sort by if the text is not one."""

    value: str = ABSENT
    margin: str = ABSENT
    order: str = ""

    @property
    def absent(self) -> bool:
        """Whether there is no value."""
        return self.value == ABSENT

    def __str__(self) -> str:
        return self.value if self.margin == ABSENT else f"{self.value} ({self.margin})"


def estimate_of(metric: Metric | None, *, mib: bool = False) -> Estimate:
    """Return a metric with its 95% interval, or else with the range of its repeats; ``mib``: bytes as MiB."""
    if metric is None:
        return Estimate()
    if metric.value is None:
        least = metric.ci is not None and metric.ci[1] is None
        return Estimate(f"> {format_figure(metric.ci[0], metric.unit, mib=mib)}") if least and metric.ci else Estimate()
    bound = "≥ " if metric.bound else ""
    value = format_figure(metric.value, metric.unit, signed=metric.key == OVER_CONTROL, mib=mib)
    return Estimate(bound + value, format_interval(metric.ci or metric.span, metric.unit, mib=mib))


def ratio_of(own: Metric | None, base: Metric | None) -> str:
    """Return own / base, after ``≈`` if the ranges of their repeats overlap or one of them has no repeats.

    Quantities that are always measured once (bytes of storage, one load on a server) have no repeats on either side and
    no ``≈``.
    """
    if own is None or base is None or own.value is None or not base.value:
        return ABSENT
    ratio = format_ratio(own.value / base.value)
    if own.exact or not (own.repeats or base.repeats):
        return ratio
    span, other = own.span, base.span
    apart = span is not None and other is not None and (span[0] > other[1] or span[1] < other[0])
    return ratio if apart else f"≈ {ratio}"


def kv_of(arm: ArmRecord) -> str:
    """Return the requested cache format, with its options."""
    return one_line(arm.kv_text)


def kv_sides(arm: ArmRecord) -> tuple[str, str]:
    """Return the requested formats of keys and of values, each with its options."""
    return (one_line(str(arm.kv.k)), one_line(str(arm.kv.v))) if arm.kv else (arm.kv_text, arm.kv_text)


# ------------------------------------------------------------------- the main table: metrics of the KLD by name


def kld_of(kld: Measurement | None, at: Coordinates | None = None) -> Estimate:
    """Return the mean KL (nats) and its interval, of the worst context or of a given one."""
    return estimate_of(kld.metric("mean", at or {}) if kld else None)


def text_of(kld: Measurement | None, size: Mapping[str, Any] | None = None) -> str:
    """Describe the data of an arm's figures: ``8 windows, 2 documents``; of one context if ``size`` is given.

    ``8 of at most 32 windows`` is shown if a decided arm reads no further windows.
    """
    if kld is None or not kld.measured:
        return ""
    known = kld.facts if size is None else size
    windows, documents, clusters = (known.get(name) for name in ("windows", "n_documents", "n_clusters"))
    most = known.get("at_most")
    parts = [counted(windows, "window")] if isinstance(windows, int) else []
    if isinstance(windows, int) and isinstance(most, int) and windows < most:
        parts = [f"{windows:,} of at most {counted(most, 'window')}"]
    if isinstance(documents, int):
        parts.append(counted(documents, "document"))
    elif isinstance(clusters, int):
        parts.append(counted(clusters, "block"))
    return ", ".join(parts)


def excess_of(kld: Measurement | None) -> Estimate:
    """Return the mean KL beyond the control's, paired (nats)."""
    excess = kld.metric(OVER_CONTROL, {}) if kld else None
    # The difference of two lower bounds bounds nothing: not shown.
    if excess is None or excess.value is None or excess.bound:
        return Estimate()
    return Estimate(format_kld(excess.value, signed=True), format_span(excess.interval))


def _shows_intervals(kld: Measurement | None) -> bool:
    """Whether a share's interval says more than how few documents there are."""
    return kld is not None and (kld.n_clusters is None or kld.n_clusters >= _MIN_SHOWN_CLUSTERS)


def top_token_estimate(kld: Measurement | None) -> Estimate:
    """Return the share of positions at which the top token is the reference's."""
    top1 = kld.metric("top1", {}) if kld else None
    if top1 is None or top1.value is None:
        return Estimate()
    spread, share = ABSENT, top1.value
    if top1.interval and _shows_intervals(kld):
        spread = f"{100 * top1.interval[0]:.1f}–{100 * top1.interval[1]:.1f}%"
    digits = 1 if share < 0.9985 or share == 1 else 2 if share < 0.99985 else 3  # more of them close to 100%
    text = f"{100 * share:.{digits}f}%" if share == 1 or share < 0.999985 else "> 99.99%"
    return Estimate(text, spread, f"{share:g}")


def confident_flips_of(kld: Measurement | None) -> Estimate:
    """Return the share of confident flips; without any, with the upper end of the interval: ``0 (≤0.6%)``."""
    flips = kld.metric("confident_flips", {}) if kld else None
    if flips is None or flips.value is None:
        return Estimate()
    shown = _shows_intervals(kld)
    spread = format_percent_span(flips.interval, flips.value).replace("≤ ", "≤") if shown else ABSENT
    if flips.value == 0:
        shown = shown and flips.interval is not None and flips.interval[1] > 0
        return Estimate(f"0 ({spread})" if shown else "0", order="0")
    return Estimate(format_percent(flips.value), spread, f"{flips.value:g}")


# ---------------------------------------------------------------------------------------------------------- words

_TITLES = Registry("table of titles", {"engines": "fidelab.engines.base:engine_titles"})
"""What the report asks other rooms for their names in texts. As the faces of a report it is found by name, since a
report shows engines and runs none."""


@cache
def engine_title(name: str) -> str:
    """Return the name of an engine in texts; its own name where it is not installed here."""
    titles: dict[str, str] = _TITLES.load("engines")()
    return one_line(titles.get(name, name))


def engines_of(arms: Iterable[ArmRecord]) -> str:
    """Name the engines of arms in words, with their devices if known: ``Transformers (CPU)``."""
    names = []
    for arm in arms:
        device = arm.ran.others().get("device") if arm.ran else None
        where = one_line(str(device or "")).partition(" (")[0].partition(":")[0].upper()
        names.append(f"{engine_title(arm.engine)}{f' ({where})' if where else ''}")
    known = [name for name in names if name.endswith(")")]
    return ", ".join(dict.fromkeys(name for name in names if not any(one.startswith(f"{name} (") for one in known)))


def status_line(outcome: Outcome) -> str:
    """Return ``failed: reason``, on one line."""
    return f"{STATUS[outcome.status]}: {one_line(outcome.reason or '')}"


def is_duplicate_reason(arm: ArmRecord | None, reason: str | None) -> bool:
    """Whether the reason is that of the whole arm, or the missing reference; each has a separate line."""
    own, whole = one_line(reason or ""), one_line((arm.reason if arm else "") or "")
    lost = arm is not None and not arm.measured and whole != ""
    return own.startswith(NO_REFERENCE) or (lost and (own in whole or whole in own))


def scored(value: float | None, interval: tuple[float, float] | None) -> Estimate:
    """Return a score (0-100) and its interval."""
    return Estimate(format_score(value), format_range(interval)) if value is not None else Estimate()


def plain(value: Any) -> str:
    """Return text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def fact_of(value: Any) -> str:
    """Return a fact that is one word or number; absent if it is none, or holds others."""
    if value is None or value == "" or isinstance(value, dict | list):
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return one_line(value)
    return format_figure(value, "" if value % 1 else "count")


def shared(lines: Iterable[tuple[str, str]], between: str = ": ") -> list[str]:
    """(arm, line) → lines that begin with the names of their arms; equal lines are merged."""
    owners: dict[str, list[str]] = {}
    for name, line in lines:
        owners.setdefault(line, []).append(name)
    return [f"{', '.join(names)}{between}{line}" for line, names in owners.items()]
