"""Axis B: KL divergence over the full vocabulary at every scored position, at one or several contexts.

See docs/metrics.md#mean-kl-divergence and docs/metrics.md#windows-and-contexts.

``windows`` are those of the shortest context.  A longer one has fewer, so that about as many positions are scored, but
no fewer than six: what is resampled are documents, and a long window rarely touches more than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fidelab.axes.base import Axis, AxisInputs, AxisScore, AxisSettings, part_name
from fidelab.axes.rows import LowerBound, compare_item, estimator_of, not_measurable
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Prefill, Probe
from fidelab.core import Estimator
from fidelab.errors import CaptureError
from fidelab.metrics.composite import Band, verdict
from fidelab.metrics.divergence import (
    RowComparison,
    kl_by_confidence,
    kl_by_position,
    kld_score,
    summarise_flips,
    summarise_kl,
)
from fidelab.metrics.intervals import standard_error

__all__ = ["KLD"]

_DEFAULT_CONTEXTS = (512, 2048)
_LEAST_CONTEXT = 8  # tokens
_LEAST_WINDOWS = 6  # of a longer context: below six units intervals are wide and verdicts weak


class KLDSettings(AxisSettings):
    """Windows and which of their rows count; part of the comparability key."""

    windows: int = Field(default=32, ge=1, description="windows of the shortest context")
    n_ctx: int | tuple[int, ...] | None = Field(
        default=None, description="tokens per window, one number or several; 512 and 2048 where model and text allow"
    )
    protocol: Literal["half", "full", "sliding"] = Field(default="half", description="which rows are scored")
    stride: int | None = Field(default=None, ge=1, description="sliding: tokens between windows; n_ctx / 4 by default")
    place: Literal["spread", "start"] | None = Field(
        default=None, description="half, full: windows spread over the documents (default), or from the text's start"
    )

    @field_validator("n_ctx", mode="before")
    @classmethod
    def _rising(cls, asked: Any) -> Any:
        """Each context once, a single one as a number; ``512,2048`` is what a flag says."""
        values = asked.split(",") if isinstance(asked, str) else asked if isinstance(asked, list | tuple) else [asked]
        if asked is None:
            return None
        try:
            contexts = sorted({int(str(value)) for value in values})
        except ValueError:
            contexts = []
        if not contexts or contexts[0] < _LEAST_CONTEXT:
            raise ValueError(f"write tokens per window, at least {_LEAST_CONTEXT}, or several: 512,2048")
        return contexts[0] if len(contexts) == 1 else tuple(contexts)


class KLD(Axis):
    """KL(reference ‖ candidate), nats, after the same context through each arm's own cache; a part per context.

    A single context is the part ``""``.  An arm's figures and items are those of its worst context.  Of rows that hold
    the top tokens alone KL is a lower bound, and has no score.  See docs/metrics.md#mean-kl-divergence.
    """

    name: ClassVar[str] = "kld"
    Settings: ClassVar[type[AxisSettings]] = KLDSettings
    quick: ClassVar[Mapping[str, Any]] = {"windows": 8, "n_ctx": 512}
    settings: KLDSettings

    def probes(self, inputs: AxisInputs) -> Mapping[str, Probe]:
        sizes = self._sizes(inputs)
        parts = {n_ctx: "" if len(sizes) == 1 else str(n_ctx) for n_ctx in sizes}
        return {part: self._cut(inputs, part, n_ctx, sizes[n_ctx]) for n_ctx, part in parts.items()}

    def _sizes(self, inputs: AxisInputs) -> dict[int, int]:
        """Context → windows, the shortest first; of the default, what there is room for."""
        s = self.settings
        asked = (s.n_ctx,) if isinstance(s.n_ctx, int) else s.n_ctx or _DEFAULT_CONTEXTS
        sizes = {n_ctx: min(s.windows, max(_LEAST_WINDOWS, round(s.windows * asked[0] / n_ctx))) for n_ctx in asked}
        if s.n_ctx is not None:
            return sizes
        have, limit = len(inputs.tokenizer.encode(inputs.text.content)), inputs.max_positions
        return {
            n_ctx: windows
            for n_ctx, windows in sizes.items()
            if n_ctx == asked[0] or (n_ctx * windows <= have and (limit is None or n_ctx <= limit))
        }

    def _cut(self, inputs: AxisInputs, part: str, n_ctx: int, windows: int) -> Prefill:
        from fidelab.inputs.corpus import make_windows

        s = self.settings
        cut = make_windows(inputs.tokenizer, inputs.text, n_ctx, windows, s.protocol, s.stride, s.place)
        return Prefill(
            axis=part_name(self.name, part),
            windows=cut.windows,
            first=cut.first,
            last=cut.last,
            units=cut.units,
            settings=(
                ("bos", inputs.tokenizer.bos_id),
                ("n_ctx", n_ctx),
                ("place", cut.place),
                ("protocol", s.protocol),
                ("stride", cut.stride),
                ("unit", cut.unit),
            ),
        )

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        found = {part: self.score(pair, seed) for part, pair in pairs.items()}
        nothing = next((score for score in found.values() if score.not_measurable), None)
        if nothing is not None:
            return nothing
        parts = dict(sorted(found.items(), key=lambda item: int(item[1].figures["n_ctx"])))
        part, worst = max(parts.items(), key=lambda item: _badness(item[1]))
        contexts = [context for score in parts.values() for context in score.figures["contexts"]]
        columns = {name: [score.positions[name] for score in parts.values()] for name in worst.positions}
        return replace(
            worst,
            figures={**worst.figures, "contexts": contexts},
            identical=all(score.identical for score in parts.values()),
            positions={name: np.concatenate(values) for name, values in columns.items()},
            part=part,
            parts=parts,
        )

    def score(self, pair: Pair, seed: int) -> AxisScore:
        """One context."""
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
                "n_ctx": np.full(len(rows), len(probe.windows[0]), dtype=np.int32),
                "kl": rows.kl,
                "top1_agrees": rows.top1,
                "reference_confidence": rows.confidence,
                "margin": rows.margin.astype(np.float32),
            },
        )
        return _with_context(_with_figures(score, rows, positions, pair, seed), pair)


def _badness(score: AxisScore) -> tuple[int, float]:
    """The band by itself, failed positions included; the upper end of the mean KL (the mean, without an interval)."""
    mean, interval = score.figures["mean"], score.figures["mean_ci"]
    upper = interval[1] if interval is not None else math.inf if mean is None else mean
    band = verdict(upper, int((~score.usable).sum()), len(score.usable)).band
    assert band is not None
    return list(Band).index(band), upper


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


def _with_context(score: AxisScore, pair: Pair) -> AxisScore:
    """The figures with what they were measured over."""
    documents = pair.ref.manifest["settings"].get("unit") == "document"
    over = {"n_ctx": len(pair.ref.probe.items()[0]), "n_documents": score.figures["n_units"] if documents else None}
    summary = {name: score.figures[name] for name in ("mean", "mean_ci", "top1", "n_positions")}
    context = {**summary, **over, "windows": len(pair.items)}
    return replace(score, figures={**score.figures, **over, "contexts": [context]})
