"""Axis A, trajectory: how long greedy decodes stay together.  See docs/metrics/generated-text.md#trajectory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fidelab.axes.base import (
    OVER_CONTROL,
    SCORE,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    answered,
    greedy_request,
    prompt_ids,
    texts,
)
from fidelab.axes.drafts import speculated
from fidelab.axes.rows import margin
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Generate
from fidelab.metrics.agreement import (
    NEAR_TIE,
    PairAgreement,
    exact_match_rate,
    first_divergence,
    median_first_divergence,
    near_tie_share,
    positional_agreement,
    survival_curve,
    trajectory_score,
)
from fidelab.results.measurement import Definition
from fidelab.results.plots import Curve, TextPair

_MAX_SHOWN_DIVERGENCES = 16  # divergences per arm for which the report shows the text
_BEFORE, _AFTER = 32, 48  # tokens of that text before and after the divergence

TRAJECTORY_METRICS = {
    "score": SCORE,
    "exact_match_rate": Definition(
        "exact_match", "share", "higher", "Share of prompts with equal token ids throughout."
    ),
    "positional_agreement": Definition(
        "positional_agreement", "share", "higher", "Share of positions with equal tokens, also after a divergence."
    ),
    "median_first_divergence": Definition(
        "median_first_divergence",
        "tokens",
        None,
        "Median index of the first differing token over the prompts whose texts diverge.",
    ),
    "near_tie_share": Definition(
        "near_ties", "share", None, f"Share of divergences where the reference's margin is under {NEAR_TIE} nats."
    ),
    "score_refract": Definition(
        "score_refract", "points", "higher", "The score by REFRACT's definition.", name="score (REFRACT)"
    ),
}
"""The axis's metrics by the name of the function that computes the value."""


class TrajectorySettings(AxisSettings):
    """Prompt format and length of the continuation; part of the comparability key except for ``batch``."""

    n_predict: int = Field(default=64, ge=1, description="tokens generated per prompt")
    limit: int | None = Field(default=None, ge=1, description="first prompts only")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="prompts decoded together")
    compat: Literal["refract"] | None = Field(default=None, description="REFRACT's score")


class Trajectory(Axis):
    """Share of greedily decoded tokens before the candidate leaves the reference's path.

    See docs/metrics/generated-text.md#trajectory.
    """

    name: ClassVar[str] = "trajectory"
    title: ClassVar[str] = "Trajectory: how long does greedy text stay the same?"
    Settings: ClassVar[type[AxisSettings]] = TrajectorySettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    in_composite: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"limit": 16, "n_predict": 32}
    settings: TrajectorySettings

    def request(self, inputs: AxisInputs) -> Generate:
        s, tokenizer = self.settings, inputs.tokenizer
        prompts = prompt_ids(inputs, s.limit, s.template, s.n_predict, f"--n-predict {s.n_predict}")
        template = "raw" if s.template == "raw" else tokenizer.template
        settings = (*((("compat", s.compat),) if s.compat else ()), ("n_predict", s.n_predict), ("template", template))
        return greedy_request(inputs, self.name, prompts, s, settings, rows=True)

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        answers = ((r, t, pair.ref.ids(r), pair.test.ids(t)) for r, t in pair.items)
        return ((t, {"margin": np.array([_margin(pair, r, t, first_divergence(a, b), b)])}) for r, t, a, b in answers)

    def score(self, pair: Pair, seed: int) -> AxisScore:
        answers = [(pair.ref.ids(r), pair.test.ids(t)) for r, t in pair.items]
        pairs = [first_divergence(ref, test) for ref, test in answers]
        compat = pair.ref.manifest["settings"].get("compat")
        usable = answered(pair) & np.array([not agreement.failed for agreement in pairs], dtype=bool)
        score = AxisScore.percent(
            [p.prefix for p in pairs],
            [r for r, _ in pair.items],
            usable,
            den=[p.test_length if compat else p.longest for p in pairs],
            identical=bool(usable.all()) and all(p.first_divergence is None for p in pairs),
        )
        good = [p for p, ok in zip(pairs, usable, strict=True) if ok]
        forks = [
            _Fork(r, agreement.first_divergence, _margin(pair, r, t, agreement, test), ref, test)
            for (r, t), agreement, (ref, test), ok in zip(pair.items, pairs, answers, usable, strict=True)
            if ok and agreement.first_divergence is not None
        ]
        speculation, flags = speculated(pair, [(fork.item, fork.at, fork.margin) for fork in forks])
        asked, define = pair.ref.manifest["settings"], TRAJECTORY_METRICS
        # The text of the divergences with the largest margins, since near ties say less
        ranked = sorted(forks, key=lambda fork: (math.isnan(fork.margin), -fork.margin, fork.item))
        shown = (
            divergence_texts(
                fork.item,
                fork.at,
                fork.margin,
                prompt=pair.ref.text(pair.ref.request.items()[fork.item][-_BEFORE:]),
                shared=pair.ref.text(fork.ref[max(0, fork.at - _BEFORE) : fork.at]),
                reference=pair.ref.text(fork.ref[fork.at : fork.at + _AFTER]),
                candidate=pair.test.text(fork.test[fork.at : fork.at + _AFTER]),
            )
            for fork in ranked[:_MAX_SHOWN_DIVERGENCES]
        )
        return score.with_measurement(
            metrics=(
                score.score(seed),
                define["exact_match_rate"](exact_match_rate(good)),
                define["positional_agreement"](positional_agreement(good)),
                define["median_first_divergence"](median_first_divergence(good)),
                define["near_tie_share"](near_tie_share([fork.margin for fork in forks])),
                define["score_refract"](trajectory_score(good, compat="refract")),
                *speculation,
            ),
            plots=(
                survival_plot(survival_curve(good, asked["n_predict"]).tolist()),
                *texts("First divergences", shown),
            ),
            cluster="prompt",
            flags=flags,
            summary=f"{sum(p.first_divergence is None for p in good)} of {len(good)} unchanged" if good else "",
            facts={"n_predict": asked["n_predict"], "template": asked["template"]},
        )


@dataclass(frozen=True)
class _Fork:
    """A divergence: the reference's item, the index, the margin (nats), and both sides' token ids."""

    item: int
    at: int
    margin: float
    ref: list[int]
    test: list[int]


def survival_plot(shares: Sequence[float]) -> Curve:
    """Return the curve of the share of prompts whose text still equals the reference's after 0 … n tokens.

    ``shares`` [n + 1]: each share, from 0 to 1.
    """
    return Curve(
        key="survival",
        title="How long greedy text stays the same",
        caption="Share of prompts whose text is still identical after n tokens. One changed token changes all that "
        "follow, so this ranks and does not judge; compare with the control, which should cost nothing.",
        x_label="tokens generated",
        y_label="still identical",
        x=tuple(map(float, range(len(shares)))),
        y=tuple(shares),
        stairs=True,
        percent=True,
    )


def divergence_texts(item: int, at: int, margin: float, **sides: str) -> TextPair:
    """Return the texts of both sides around the token ``at`` at which prompt ``item`` diverges.

    ``margin``: in nats, NaN if one side ends there.
    """
    ended = math.isnan(margin)
    return TextPair(
        label=f"prompt {item}, token {at}: {'one side ends' if ended else f'margin {margin:.3g} nats'}",
        tag="ended" if ended else "near tie" if margin < NEAR_TIE else "real",
        **sides,
    )


def _margin(pair: Pair, r: int, t: int, agreement: PairAgreement, test: list[int]) -> float:
    """Return the reference's top token minus the candidate's token at the divergence (nats); NaN if unknown."""
    at = agreement.first_divergence
    if at is None or at >= len(test):
        return float("nan")
    columns = pair.test.figures(t, pair.ref)
    return float(columns["margin"][0]) if "margin" in columns else margin(pair.ref, r, at, test[at])
