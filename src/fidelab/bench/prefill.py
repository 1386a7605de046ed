"""Prefill speed: tokens per second at a list of lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fidelab.bench.base import (
    Answers,
    Bench,
    BenchInputs,
    CellResult,
    Facts,
    LiveSettings,
    Question,
    Sizes,
    against,
    complete,
    joined,
    largest,
    unsteady,
)
from fidelab.metrics.latency import prefill_rate
from fidelab.results.measurement import Definition, Measurement

RATE = Definition(
    "rate",
    "tok/s",
    "higher",
    "Prompt tokens of the whole batch over the time to the first token, with a cold prefix cache.",
)


class PrefillSettings(LiveSettings):
    """Settings of bench ``prefill``."""

    lengths: Sizes = Field(default=(128, 512), description="tokens of the prompts")


class PrefillBench(Bench):
    """Prompt length divided by the time to the first token, with a cold prefix cache.

    See docs/metrics/speed.md#prefill-speed.
    """

    name: ClassVar[str] = "prefill"
    title: ClassVar[str] = "How fast are prompts read?"
    Settings = PrefillSettings

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        return tuple(
            Question.make(inputs, self.settings, self.name, part=f"{n}.b{batch}", tokens=n, batch=batch, n=0)
            for batch in self.settings.batch
            for n in self.settings.lengths
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        found = joined((_rate(answer, facts) for answer in answers.values()), self.title)
        plots = against(
            found,
            RATE.key,
            key="prefill",
            title="Prefill against prompt length",
            x_label="prompt, tokens",
            y_label="tok/s",
            caption="Median of the repeats; shaded from the slowest to the fastest.",
        )
        return complete(found, [largest(found, RATE.key)], plots)


def _rate(answer: Answers, facts: Facts) -> CellResult:
    asked, at = answer.question, answer.at()
    if answer.seconds is None:
        return CellResult(answer.cell(at))
    rate = prefill_rate(answer.seconds, asked.tokens * asked.batch)
    flags = unsteady(f"{asked.tokens} tokens × {asked.batch}", rate.steady, facts.loads)
    return CellResult(answer.cell(at, flags), (RATE.repeated(rate.repeats, cell=at),))
