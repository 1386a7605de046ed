"""Findings that speak against a candidate although its KLD is small.

They are read from every metric that has a better side and an interval, so that the tests of other packages count as
fidelab's own do.  See docs/metrics/verdicts.md#findings-against-a-candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fidelab.core import Status
from fidelab.metrics.composite import Band, is_worse, kl_band
from fidelab.results.measurement import DECIDING, DOMAIN, Metric, label
from fidelab.results.numbers import format_amount, format_figure, format_interval, format_nats, format_span, one_line
from fidelab.results.rates import EQUAL_RATE_SHARE, rate_ratios
from fidelab.results.record import ArmRecord


@dataclass(frozen=True)
class Finding:
    """Something that speaks against a candidate.

    ``text``: one line.  ``fidelity``: it concerns what the candidate answers, not how fast, so that the KLD alone no
    longer stands for all tests.
    """

    text: str
    fidelity: bool = True


def adverse(arm: ArmRecord, reference: ArmRecord) -> tuple[Finding, ...]:
    """Return what speaks against a candidate: a test or a kind of text that is worse, failed tests, lower rates, noise.

    A test is worse if the whole 95% interval of one of its metrics lies on the worse side of what the reference has
    (:attr:`~fidelab.results.measurement.Metric.null_value`).  Divergences always do; they are worse if the lower end
    lies in a worse band than the verdict.
    """
    failed = ((name, axis) for name, axis in arm.axes.items() if axis.status is Status.FAILED and name != DECIDING)
    reasons = ((name, axis.reason or "no reason was recorded") for name, axis in failed)
    others = [Finding(f"{one_line(name)} failed: {one_line(reason)}") for name, reason in reasons]
    # of several whole runs the worst, if its mean KL lies in a worse band than the verdict, which is the first run's
    mean, band = arm.deciding.metric("mean", {}) if arm.deciding is not None else None, _band(arm)
    worst = max(mean.repeats, default=None) if mean is not None else None
    if worst is not None and band is not None and is_worse(found := kl_band(worst), band):
        others.append(Finding(f"another run is {found.value.lower()}: KLD {format_nats(worst)}"))
    slowest = next((found for found in rate_ratios(arm, reference) if found.seen), None)
    if slowest is not None and slowest.ratio < EQUAL_RATE_SHARE:
        rates = f"{format_amount(slowest.own)} of {format_amount(slowest.other)} tok/s"
        text = f"slower: {slowest.ratio:.2f}× the reference in {one_line(slowest.where)} ({rates})"
        others.append(Finding(text, fidelity=False))
    return (*_worse_tests(arm), *_worse_texts(arm), *others, *_noise(arm))


def is_shown_worse(metric: Metric, band: Band | None) -> bool:
    """Whether a metric's whole interval lies on the worse side; of nats, in a worse band than ``band``."""
    if metric.ci is None or metric.better is None or metric.null_value is None or metric.bound:
        return False
    low, high = metric.ci
    if metric.better == "higher":
        return high is not None and high < metric.null_value
    if metric.unit == "nats":
        return band is not None and is_worse(kl_band(low - metric.null_value), band)
    return low > metric.null_value


def _band(arm: ArmRecord) -> Band | None:
    return Band(arm.verdict.band) if arm.verdict is not None and arm.verdict.band is not None else None


def _worse_tests(arm: ArmRecord) -> Iterator[Finding]:
    """One finding per test: its first metric that is shown to be worse, figures over all shapes of work first."""
    for name, axis in arm.axes.items():
        if name == DECIDING or not axis.measured:
            continue
        ordered = sorted(axis.metrics, key=lambda metric: bool(metric.cell))
        found = next((metric for metric in ordered if is_shown_worse(metric, _band(arm))), None)
        if found is not None:
            # ``lost 9 of 36, accuracy difference −23.0 points (−42.0 to −4.0)``
            at = f" at {one_line(label(found.cell))}" if found.cell else ""
            unit = {"points": " points", "nats": " nats"}.get(found.unit, "")
            value = format_figure(found.value, found.unit, signed=found.unit != "nats")
            counts = f"{one_line(axis.summary)}, " if axis.summary else ""
            figure = f"{counts}{one_line(found.name)}{at} {value}{unit} ({format_interval(found.ci, found.unit)})"
            yield Finding(f"{one_line(name)} is worse: {figure}")


def _worse_texts(arm: ArmRecord) -> Iterator[Finding]:
    """Kinds of text whose mean KL lies in a worse band than the verdict, the worst first."""
    kld, band = arm.deciding, _band(arm)
    if kld is None or band is None:
        return
    kinds = [
        m for m in kld.metrics if m.key == "mean" and {*m.cell} == {DOMAIN} and m.value is not None and not m.bound
    ]
    for metric in sorted(kinds, key=lambda m: -(m.value or 0.0)):
        if is_worse(found := kl_band(metric.value or 0.0), band):
            kind = one_line(str(metric.cell[DOMAIN]))
            span = "" if metric.interval is None else f" ({format_span(metric.interval)})"
            yield Finding(f"{kind} is {found.value.lower()}: KLD {format_nats(metric.value)}{span}")


def _noise(arm: ArmRecord) -> Iterator[Finding]:
    kld, noise = arm.deciding, arm.floor.mean if arm.floor is not None else None
    mean = kld.value("mean", {}) if kld is not None else None
    if mean is not None and noise is not None and noise > mean:
        figures = f"{format_nats(noise)} nats"
        yield Finding(
            f"rounding noise is larger than the loss: last bits of weights alone move {figures}", fidelity=False
        )
