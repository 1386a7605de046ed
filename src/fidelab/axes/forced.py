"""Forced decode KLD: the reference's own greedy text, fed token by token through each arm's cache.

See docs/metrics.md#forced-decode-kld.

Prefill KLD reads a cache that one forward filled.  Here every token enters the cache in a forward of its own, as in
generation, and all arms are given the same tokens: one changed token does not change all that follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fidelab.axes.base import Axis, AxisInputs, AxisScore, AxisSettings, part_name
from fidelab.axes.rows import LowerBound, compare_item, estimator_of, not_measurable
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Generate, Probe
from fidelab.core import Estimator
from fidelab.errors import CaptureError, InputError
from fidelab.metrics.degeneration import change_point
from fidelab.metrics.divergence import RowComparison, kl_by_position, kld_score, summarise_kl
from fidelab.results.axis_record import Figure
from fidelab.results.panels import Curve

__all__ = ["ForcedDecode", "greedy_probe"]

_BINS = 32
_PATH, _KL = "path", "kl"


class ForcedSettings(AxisSettings):
    """Whose text is forced, and how much of it; part of the comparability key, the batch excepted."""

    n_predict: int = Field(default=64, ge=1, description="tokens of the reference's greedy text per prompt")
    limit: int | None = Field(default=16, ge=1, description="first prompts only")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="prompts that the reference continues together")


class ForcedDecode(Axis):
    """KL(reference ‖ candidate), nats, at every position of the reference's greedy text.

    The row of token i is the distribution from which the reference drew it: prompt and i tokens are in the cache.
    See docs/metrics.md#forced-decode-kld.
    """

    name: ClassVar[str] = "forced"
    title: ClassVar[str] = "Forced decode: KL while the reference's own text is fed token by token"
    Settings: ClassVar[type[AxisSettings]] = ForcedSettings
    quick: ClassVar[Mapping[str, Any]] = {"limit": 4, "n_predict": 32}
    follows: ClassVar[bool] = True
    reference_only: ClassVar[tuple[str, ...]] = (_PATH,)
    settings: ForcedSettings

    def probes(self, inputs: AxisInputs) -> Mapping[str, Probe]:
        s = self.settings
        return {
            _PATH: greedy_probe(inputs, part_name(self.name, _PATH), s.n_predict, s.limit, s.template, batch=s.batch)
        }

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Probe]:
        path = reference.get(_PATH)
        if path is None or not isinstance(path.probe, Generate):
            raise CaptureError("the reference left no greedy text to force; capture again")
        ids = (path.ids(i) if item["failed"] is None else [] for i, item in enumerate(path.items))
        return {
            _KL: Forced(
                axis=part_name(self.name, _KL),
                prompts=path.probe.prompts,
                continuations=tuple(map(tuple, ids)),
                settings=path.probe.settings,
            )
        }

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        if _KL not in pairs or not isinstance(pairs[_KL].ref.probe, Forced):
            raise CaptureError("no forced rows: the reference's greedy text was not put to both arms; capture again")
        return self.score(pairs[_KL], seed)

    def score(self, pair: Pair, seed: int) -> AxisScore:
        if (nothing := not_measurable([pair])) is not None:
            return nothing
        parts = [compare_item(pair, r, t, _targets(pair.ref.probe, r)) for r, t in pair.items]
        bound = estimator_of(pair) is Estimator.TOPK
        rows, lengths = RowComparison.concat(parts), [len(part) for part in parts]
        score = (LowerBound if bound else AxisScore)(
            figures={},
            num=rows.kl,
            den=np.ones(len(rows)),
            units=np.repeat(np.array([r for r, _ in pair.items], dtype=np.int64), lengths),
            usable=~rows.failed,
            transform=None if bound else kld_score,
            bounds=(0.0, float("inf")),
            identical=not bound and not rows.failed.any() and bool((rows.kl == 0.0).all()),
        )
        positions = np.concatenate([np.arange(n) for n in lengths])
        summary = summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)
        jumps = [at for part in parts if (at := change_point(part.kl)) is not None]
        figures: dict[str, Any] = {
            "score": score.score(),
            "ci": score.score_interval(seed),
            "n_items": summary.n_positions,
            "n_failed": summary.n_failed,
            "figures": (
                Figure(
                    name="mean KL, at least" if bound else "mean KL",
                    value=summary.mean,
                    ci=AxisScore.mean_interval(score, seed),
                    unit="nats",
                ),
                Figure(name="median KL", value=summary.median, unit="nats"),
                Figure(name="99th percentile", value=summary.p99, unit="nats"),
                Figure(name="largest KL", value=summary.max, unit="nats"),
                Figure(name="same top token", value=summary.top1, unit="share"),
                Figure(name="prompts", value=len(parts), unit="count"),
                Figure(name="prompts where KL rises for good", value=len(jumps), unit="count"),
                Figure(name="rises at token", value=float(np.median(jumps)) if jumps else None, unit="tokens"),
            ),
            "panels": _curve(positions, rows.kl),
            "details": {"settings": dict(pair.ref.manifest["settings"])},
        }
        return replace(score, figures=figures)


def greedy_probe(
    inputs: AxisInputs, axis: str, n_predict: int, limit: int | None, template: Literal["chat", "raw"], *, batch: int
) -> Generate:
    """Greedy continuations of the first prompts, ids only.

    Raises:
        InputError: a prompt without tokens, or one that is too long for the model; names the setting to change.
    """
    tokenizer = inputs.tokenizer
    prompts = inputs.prompts[:limit]
    ids = tuple(tokenizer.chat(prompt.messages, template) for prompt in prompts)
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise InputError(f"prompt {prompt.id!r} has no tokens")
        if inputs.max_positions is not None and len(tokens) + n_predict > inputs.max_positions:
            setting = f"axes.{axis.split('.', 1)[0]}.n_predict={n_predict}"
            raise InputError(
                f"prompt {prompt.id!r} has {len(tokens)} tokens; with {setting} that is beyond the model's limit of "
                f"{inputs.max_positions} positions"
            )
    return Generate(
        axis=axis,
        prompts=ids,
        max_tokens=n_predict,
        stop=tokenizer.stop_ids,
        batch=batch,
        settings=(("n_predict", n_predict), ("template", "raw" if template == "raw" else tokenizer.template)),
        rows=False,
    )


def _targets(probe: Probe, item: int) -> NDArray[np.int64]:
    return np.asarray(probe.continuations[item] if isinstance(probe, Forced) else (), dtype=np.int64)


def _curve(positions: NDArray[np.int64], kl: NDArray[np.float64]) -> tuple[Curve, ...]:
    bins = kl_by_position(positions, kl, min(_BINS, int(positions.max()) + 1))
    middle = (np.asarray(bins.edges[:-1]) + np.asarray(bins.edges[1:]) - 1) / 2
    return (
        Curve(
            key="forced-kl",
            title="KL along the reference's text",
            x_label="generated token",
            y_label="mean KL, nats",
            x=tuple(middle.tolist()),
            y=tuple(mean or None for mean in bins.means),  # 0 has no place on a logarithmic axis
            log_y=True,
        ),
    )
