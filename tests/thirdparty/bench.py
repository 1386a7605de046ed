"""A bench as another package would add it, in one file: how long a reader waits for the first word of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from fidelab.extend import (
    Answers,
    Bench,
    BenchInputs,
    Curve,
    Definition,
    Facts,
    Flag,
    LiveSettings,
    Measurement,
    Question,
    outcome_of,
)

FIRST = Definition("first_word", "ms", "lower", "Median time to the first token.")
SLOWEST = Definition("slowest", "ms", "lower", "The longest wait.")


class FirstWordSettings(LiveSettings):
    """Settings of bench ``first_word``."""

    repeats: int = Field(default=3, ge=1, description="prompts asked")
    tokens: int = Field(default=12, ge=1, description="tokens of each prompt")


class FirstWord(Bench):
    """The time to the first token of short prompts, one after another."""

    name: ClassVar[str] = "first_word"
    title: ClassVar[str] = "How long until the first word?"
    Settings = FirstWordSettings
    protocol: ClassVar[tuple[str, ...]] = ("tokens",)

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        return (
            Question.make(inputs, self.settings, self.name, part="short", tokens=self.settings.tokens, batch=1, n=0),
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        [answer] = answers.values()
        if answer.seconds is None:
            return Measurement(**outcome_of([answer.cell({})]), title=self.title)
        waits = 1e3 * answer.seconds[:, 0]
        late = waits > 2 * np.median(waits)
        flags = [Flag(kind="late", text=f"{late.sum()} of {len(waits)} prompts waited twice the median")]
        curve = Curve(
            key="waits",
            title="Waits in the order of the prompts",
            x_label="prompt",
            y_label="ms",
            x=tuple(map(float, range(len(waits)))),
            y=tuple(map(float, waits)),
        )
        return Measurement(
            status=answer.status,
            title=self.title,
            metrics=(FIRST.repeated(waits.tolist(), headline=True), SLOWEST(float(waits.max()))),
            flags=tuple(flags) if late.any() else (),
            plots=(curve,),
            n_items=len(waits),
            facts={"tokens": self.settings.tokens},
        )
