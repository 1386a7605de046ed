"""Where a candidate's KL comes from, as one table: the format's loss told from the kernel path's."""

from __future__ import annotations

from fidelab.report.cells import Estimate, kld_of, kv_of
from fidelab.report.tables import Table
from fidelab.results.numbers import ABSENT, format_kld, format_span, one_line
from fidelab.results.record import Attribution, Contrast, Part, Report

__all__ = ["attribution_of", "truth_line"]

_COLUMNS = (
    "arm",
    "format and kernel",
    "kernel alone",
    "format alone",
    "both − kernel",
    "both − format",
    "format − kernel",
)


def attribution_of(report: Report) -> Table | None:
    """Candidate × (three mean KLs, their paired differences), nats; ``None`` where that was not asked."""
    if not report.attribution:
        return None
    return Table(
        "attribution",
        "Format loss and kernel loss (mean KL, nats; KL is not additive: the parts need not sum up)",
        _COLUMNS,
        tuple(_row(found) for found in report.attribution),
    )


def truth_line(report: Report) -> str:
    """What the reference's own cache costs against 32 bits; empty where that was not asked."""
    truth = report.truth
    if truth is None:
        return ""
    kld = truth.axes.kld
    twin = f"32-bit twin of the reference ({kv_of(truth)})"
    if kld is None or kld.mean is None:
        return f"{twin}: not measured ({one_line(truth.reason or 'no KLD')})"
    return f"{twin}: {kld_of(kld)} nats away"


def _row(found: Attribution) -> tuple[str, ...]:
    return (
        one_line(found.candidate),
        _part(found.here),
        _part(found.kernel),
        _part(found.format),
        *(_contrast(c) for c in (found.here_minus_kernel, found.here_minus_format, found.format_minus_kernel)),
    )


def _part(part: Part | None) -> str:
    if part is None or part.mean is None:
        return ABSENT
    return str(Estimate(format_kld(part.mean), format_span(part.ci)))


def _contrast(contrast: Contrast | None) -> str:
    if contrast is None:
        return ABSENT
    return str(Estimate(format_kld(contrast.mean, signed=True), format_span(contrast.ci)))
