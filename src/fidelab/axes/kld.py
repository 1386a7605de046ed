"""Axis B: KL divergence over the full vocabulary at every scored position (METRICS §3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fidelab.axes.base import Axis, AxisInputs, AxisScore, AxisSettings
from fidelab.axes.rows import LowerBound, compare_item, estimator_of, not_measurable
from fidelab.captures.pair import Pair
from fidelab.core import Estimator
from fidelab.errors import CaptureError
from fidelab.metrics.divergence import (
    RowComparison,
    kl_by_confidence,
    kl_by_position,
    kld_score,
    summarise_flips,
    summarise_kl,
)
from fidelab.metrics.intervals import standard_error
from fidelab.probes import Prefill

__all__ = ["KLD"]


class KLDSettings(AxisSettings):
    """Windows and which of their rows count; part of the comparability key."""

    windows: int = Field(default=32, ge=1, description="number of windows")
    n_ctx: int = Field(default=512, ge=8, description="tokens per window")
    protocol: Literal["half", "full", "sliding"] = Field(default="half", description="which rows are scored")
    stride: int | None = Field(default=None, ge=1, description="sliding: tokens between windows; n_ctx / 4 by default")


class KLD(Axis):
    """KL(reference ‖ candidate), nats, after the same context through each arm's own cache.

    Of rows that hold the top tokens alone it is a lower bound, and has no score.
    """

    name: ClassVar[str] = "kld"
    Settings: ClassVar[type[AxisSettings]] = KLDSettings
    quick: ClassVar[Mapping[str, Any]] = {"windows": 8}
    settings: KLDSettings

    def probe(self, inputs: AxisInputs) -> Prefill:
        from fidelab.inputs.corpus import make_windows

        s = self.settings
        cut = make_windows(inputs.tokenizer, inputs.text, s.n_ctx, s.windows, s.protocol, s.stride)
        return Prefill(
            axis=self.name,
            windows=cut.windows,
            first=cut.first,
            last=cut.last,
            units=cut.units,
            settings=(
                ("bos", inputs.tokenizer.bos_id),
                ("n_ctx", s.n_ctx),
                ("protocol", s.protocol),
                ("stride", cut.stride),
            ),
        )

    def score(self, pair: Pair, seed: int) -> AxisScore:
        probe = pair.ref.probe
        if not isinstance(probe, Prefill):
            raise CaptureError(f"capture {pair.ref.folder} holds no prefill rows")
        if (nothing := not_measurable([pair])) is not None:
            return replace(nothing, figures={"mean": None})
        rows = RowComparison.concat([compare_item(pair, r, t, _targets(probe, r)) for r, t in pair.items])
        order = [r for r, _ in pair.items]
        windows = np.repeat(np.asarray(order, dtype=np.int32), probe.n_rows)
        positions = np.tile(np.arange(probe.first, probe.last + 1, dtype=np.int32), len(order))
        bound = estimator_of(pair) is Estimator.TOPK
        score = (LowerBound if bound else AxisScore)(
            figures={},
            num=rows.kl,
            den=np.ones(len(rows)),
            units=np.concatenate([np.asarray(probe.units[r], dtype=np.int64) for r in order]),
            usable=~rows.failed,
            transform=None if bound else kld_score,
            bounds=(0.0, float("inf")),
            identical=not bound and not rows.failed.any() and bool((rows.kl == 0.0).all()),
            positions={
                "window": windows,
                "position": positions,
                "kl": rows.kl,
                "top1_agrees": rows.top1,
                "reference_confidence": rows.confidence,
                "margin": rows.margin.astype(np.float32),
            },
        )
        return _with_figures(score, rows, positions, pair, seed)


def _targets(probe: Prefill, item: int) -> NDArray[np.int64]:
    """The actual next token of each row; -1 where the window has none."""
    after = [*probe.windows[item][probe.first + 1 : probe.last + 2]]
    return np.asarray(after + [-1] * (probe.n_rows - len(after)), dtype=np.int64)


def _with_figures(
    score: AxisScore, rows: RowComparison, positions: NDArray[np.int32], pair: Pair, seed: int
) -> AxisScore:
    summary = summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)
    figures: dict[str, Any] = {
        **vars(summary),
        **vars(summarise_flips(rows, score.units, seed)),
        "score": score.score(),
        "ci": score.score_interval(seed),
        "mean_ci": AxisScore.mean_interval(score, seed),  # of the bound itself, where it is one
        "stderr": standard_error(score.items()),
        "estimator": estimator_of(pair),
        "n_units": len(np.unique(score.units[score.usable])),
        "by_position": vars(kl_by_position(positions, rows.kl)),
        "by_confidence": vars(kl_by_confidence(rows.confidence, rows.kl)),
    }
    return replace(score, figures=figures)
