"""An axis as a package besides fidelab brings it: one file, and one line in its entry points.

Does a candidate write as much as the reference?  Nothing in fidelab knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from fidelab.extend import (
    OVER_CONTROL,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    Curve,
    Definition,
    Generate,
    Pair,
)

SAME = Definition(
    "same_length", "share", "higher", "Share of prompts whose answer has as many tokens as the reference's."
)
TOKENS = Definition("tokens", "tokens", None, "Mean tokens of an answer.")


class LengthSettings(AxisSettings):
    """How prompts are put; part of the comparability key."""

    n_predict: int = Field(default=64, ge=1, description="tokens generated per prompt")
    limit: int | None = Field(default=None, ge=1, description="first prompts only")


class Length(Axis):
    """Share of prompts whose answers are as long as the reference's."""

    name: ClassVar[str] = "length"
    title: ClassVar[str] = "Length: does it write as much?"
    Settings: ClassVar[type[AxisSettings]] = LengthSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 4}
    settings: LengthSettings

    def request(self, inputs: AxisInputs) -> Generate:
        prompts = inputs.prompts[: self.settings.limit]
        return Generate(
            axis=self.name,
            prompts=tuple(inputs.tokenizer.chat(prompt.messages, "raw") for prompt in prompts),
            max_tokens=self.settings.n_predict,
            stop=inputs.tokenizer.stop_ids,
            settings=(("n_predict", self.settings.n_predict),),
            rows=False,
        )

    def score(self, pair: Pair, seed: int) -> AxisScore:
        ref, test = (
            np.array([len(side.ids(item[n])) for item in pair.items], dtype=np.float64)
            for n, side in enumerate((pair.ref, pair.test))
        )
        score = AxisScore(
            num=(ref == test).astype(np.float64),
            den=np.ones(len(ref)),
            clusters=np.array([r for r, _ in pair.items], dtype=np.int64),
            usable=(ref > 0) & (test > 0),
            transform=lambda share: 100.0 * share,
            bounds=(0.0, 1.0),
            identical=all(pair.ref.ids(r) == pair.test.ids(t) for r, t in pair.items),
            proportion=True,
            scale=100.0,
        )
        return score.with_measurement(
            metrics=(
                score.score(seed),
                SAME(score.mean(), score.mean_interval(seed)),
                TOKENS(float(ref.mean()), cell={"side": "reference"}),
                TOKENS(float(test.mean()), cell={"side": "arm"}),
            ),
            plots=(
                Curve(
                    key="length",
                    title="Tokens of each answer",
                    x_label="prompt",
                    y_label="tokens",
                    x=tuple(map(float, range(len(test)))),
                    y=tuple(test.tolist()),
                ),
            ),
            facts=pair.ref.manifest["settings"],
        )
