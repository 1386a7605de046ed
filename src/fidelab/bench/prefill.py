"""How fast prompts are read: tokens per second at a list of lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fidelab.bench.base import Answers, Bench, BenchInputs, Facts, LiveSettings, Question, Sizes, unsteady
from fidelab.bench.cells import outcome_of
from fidelab.metrics.latency import prefill_rate
from fidelab.results import bench_record
from fidelab.results.bench_record import SpeedCell
from fidelab.results.bench_values import Spread

__all__ = ["Prefill", "PrefillSettings"]


class PrefillSettings(LiveSettings):
    """Settings of bench ``prefill``."""

    lengths: Sizes = Field(default=(128, 512), description="tokens of the prompts")


class Prefill(Bench):
    """n / time to the first token, cold prefix cache. See docs/metrics.md#prefill-speed."""

    name: ClassVar[str] = "prefill"
    title: ClassVar[str] = "How fast are prompts read?"
    Settings = PrefillSettings

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        return tuple(
            Question.make(inputs, self.settings, self.name, part=f"{n}.b{batch}", tokens=n, batch=batch, n=0)
            for batch in self.settings.batch
            for n in self.settings.lengths
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> bench_record.Prefill:
        cells = tuple(_cell(answer, facts) for answer in answers.values())
        return bench_record.Prefill(**outcome_of(cells), cells=cells)


def _cell(answer: Answers, facts: Facts) -> SpeedCell:
    asked = answer.question
    shape = {"tokens": asked.tokens, "batch": asked.batch, **answer.outcome()}
    if answer.seconds is None:
        return SpeedCell(**shape)
    rate = prefill_rate(answer.seconds, asked.tokens * asked.batch)
    flags = unsteady(f"{asked.tokens} tokens × {asked.batch}", rate.steady, facts.loads)
    return SpeedCell(**shape, rate=Spread.of(rate), warmups=answer.warmups, flags=flags)
