"""What smaller weights cost: a row per file, as publishers put it on a model card."""

from __future__ import annotations

from pathlib import PurePath

from fidelab.report.cells import kld_of, top_token_estimate
from fidelab.report.tables import NAME, TextTable
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import ABSENT, one_line
from fidelab.results.record import ArmRecord, Report

_GIB = 2**30


def weights_of(report: Report) -> TextTable | None:
    """Return file, GiB, bits per weight, KLD, same top token and verdict of each configuration.

    ``None`` unless candidates have other weights than the reference, and bits per weight are known of one.
    """
    base = report.reference
    others = [arm for arm in report.candidates if arm.model != base.model]
    if not any(_bits(arm) for arm in others):
        return None
    rows = (_row(arm, base) for arm in (base, *report.candidates))
    columns = (NAME, "file", "GiB", "bits per weight", "KLD", "same top", "verdict")
    return TextTable("weights", "Weights", columns, tuple(rows), 2)


def _row(arm: ArmRecord, base: ArmRecord) -> tuple[str, ...]:
    size, bits, kld = arm.ran and arm.ran.weight_bytes, _bits(arm), arm.axes.get(DECIDING)
    judged = arm is not base
    band = arm.verdict.band if judged and arm.verdict else None
    status = arm.status.value.replace("_", " ")
    return (
        one_line(arm.name),
        one_line(PurePath(arm.model).name),
        ABSENT if not size else f"{size / _GIB:.2f}",
        ABSENT if bits is None else f"{bits:.2f}",
        str(kld_of(kld)) if judged else ABSENT,
        top_token_estimate(kld).value if judged else ABSENT,
        ("reference" if not judged else band.lower() if band else status if status != "ok" else ABSENT),
    )


def _bits(arm: ArmRecord) -> float | None:
    return arm.ran.bits_per_weight if arm.ran else None
