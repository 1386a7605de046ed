"""Loss and size of the weights of several files: a row per file, as publishers put it on a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from fidelab.report.cells import kld_of, top_token_estimate
from fidelab.report.tables import NAME, TextTable
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import ABSENT, one_line
from fidelab.results.record import ArmRecord, Report

_GIB = 2**30
_REFERENCE = "reference"


def weights_of(report: Report, verdicts: Mapping[str, str]) -> TextTable | None:
    """Return file, GiB, bits per weight, KLD, same top token and verdict of each configuration.

    ``None`` unless a candidate has other weights than the reference and its bits per weight are known.
    ``verdicts``: the words of the main table by configuration.
    """
    base = report.reference
    others = [arm for arm in report.candidates if arm.model != base.model]
    if not any(_bits(arm) for arm in others):
        return None
    rows = (_row(arm, verdicts.get(one_line(arm.name), ABSENT)) for arm in report.candidates)
    columns = (NAME, "file", "GiB", "bits per weight", "KLD", "same top", "verdict")
    return TextTable("weights", "Weights", columns, (_row(base, _REFERENCE), *rows), 2)


def _row(arm: ArmRecord, verdict: str) -> tuple[str, ...]:
    size, bits, kld = arm.ran and arm.ran.weight_bytes, _bits(arm), arm.axes.get(DECIDING)
    judged = verdict != _REFERENCE
    return (
        one_line(arm.name),
        one_line(PurePath(arm.model).name),
        ABSENT if not size else _gibibytes(size),
        ABSENT if bits is None else f"{bits:.2f}",
        kld_of(kld).value if judged else ABSENT,
        top_token_estimate(kld).value if judged else ABSENT,
        verdict,
    )


def _gibibytes(size: int) -> str:
    amount = size / _GIB
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.3g}"


def _bits(arm: ArmRecord) -> float | None:
    return arm.ran.bits_per_weight if arm.ran else None
