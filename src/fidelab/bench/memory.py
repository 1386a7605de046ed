"""What an arm takes: bytes of cache per token, the pool that is set aside, the peak against the length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from fidelab.bench.base import Answers, Bench, BenchInputs, Facts, LiveSettings, Question, Sizes
from fidelab.bench.cells import outcome_of
from fidelab.core import Status
from fidelab.results import bench_record
from fidelab.results.axis_record import Outcome
from fidelab.results.bench_record import MemoryPoint

__all__ = ["Memory", "MemorySettings"]


class MemorySettings(LiveSettings):
    """Settings of bench ``memory``: the questions are put once, in ascending length."""

    repeats: int = Field(default=1, ge=1, le=1, description="one: a peak never falls")
    max_warmup: int = Field(default=0, ge=0, le=0, description="none")
    lengths: Sizes = Field(default=(128, 512, 1024), description="tokens of the prompts")


class Memory(Bench):
    """Measured bytes; peaks are those of the worker's processes up to the end of each answer.

    See docs/metrics.md#memory.
    """

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "How much memory does it take?"
    Settings = MemorySettings
    served: ClassVar[str] = "a server's memory is not to be seen from outside"

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        shapes = sorted((batch * n, batch, n) for batch in self.settings.batch for n in self.settings.lengths)
        return tuple(
            Question.make(inputs, self.settings, self.name, part=f"{n}.b{batch}", tokens=n, batch=batch, n=0)
            for _, batch, n in shapes
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> bench_record.Memory:
        good = [answer for answer in answers.values() if answer.status is Status.OK]
        ran = good[-1].ran if good else facts.ran
        return bench_record.Memory(
            **outcome_of([_Ended(**answer.outcome()) for answer in answers.values()]),
            kv_bytes_per_token=ran.get("cache_bytes_per_token"),
            expected_bytes_per_token=ran.get("expected_bytes_per_token"),
            state_bytes_per_sequence=ran.get("state_bytes_per_sequence"),
            reserved_bytes=ran.get("cache_bytes"),
            reserved_tokens=ran.get("cache_tokens"),
            weights_bytes=facts.weights_bytes or None,
            loaded_host_bytes=ran.get("loaded_host_bytes"),
            peak_host_bytes=ran.get("peak_host_bytes"),
            peak_device_bytes=ran.get("peak_device_bytes"),
            points=tuple(_point(answer) for answer in good),
        )


class _Ended(Outcome):
    """How one question ended."""


def _point(answer: Answers) -> MemoryPoint:
    asked, ran = answer.question, answer.ran
    per_token: Any = ran.get("cache_bytes_per_token")
    return MemoryPoint(
        tokens=asked.tokens,
        batch=asked.batch,
        kv_bytes=None if per_token is None else per_token * asked.tokens * asked.batch,
        peak_host_bytes=ran.get("peak_host_bytes"),
        peak_device_bytes=ran.get("peak_device_bytes"),
    )
