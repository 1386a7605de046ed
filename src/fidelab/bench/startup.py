"""How long until the first token: process start → interpreter, import, weights, warm-up, first token.

Cold: the weight files were put out of the page cache before; compiled kernels and libraries may still be warm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from fidelab.bench.base import Answers, Bench, BenchInputs, BenchSettings, Facts, LiveSettings, Question, unsteady
from fidelab.results import bench_record
from fidelab.results.bench_record import StartupSplit
from fidelab.results.bench_values import Flag, Spread

__all__ = ["COLD", "WARM", "Startup", "StartupSettings"]

COLD, WARM = "cold", "warm"
_PROMPT = 16  # tokens


class StartupSettings(BenchSettings):
    """Settings of bench ``startup``."""

    repeats: int = Field(default=3, ge=1, description="warm starts")
    cold: int = Field(default=1, ge=0, description="cold starts before them")


class Startup(Bench):
    """Every repeat is a fresh process, asked for one token behind 16. See docs/metrics.md#start-up-time."""

    name: ClassVar[str] = "startup"
    title: ClassVar[str] = "How long until the first token?"
    Settings = StartupSettings
    fresh: ClassVar[bool] = True
    served: ClassVar[str] = "the server was started before"

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        shape = LiveSettings(repeats=self.settings.repeats + self.settings.cold, max_warmup=1, seed=self.settings.seed)
        return (Question.make(inputs, shape, self.name, part="first", tokens=_PROMPT, batch=1, n=0),)

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> bench_record.Startup:
        [answer] = answers.values()
        if answer.seconds is None:
            return bench_record.Startup(**answer.outcome())
        splits = {kind: _split([parts for of, parts in facts.starts if of == kind]) for kind in (COLD, WARM)}
        warm = splits[WARM]
        flags = unsteady("warm starts", warm.total.steady if warm else None, 1)
        if self.settings.cold and splits[COLD] is None:
            text = "no cold start: the weight files could not be put out of the page cache"
            flags = (*flags, Flag(kind="cache", text=text))
        return bench_record.Startup(**answer.outcome(), cold=splits[COLD], warm=warm, flags=flags)


def _split(starts: Sequence[Mapping[str, float]]) -> StartupSplit | None:
    if not starts:
        return None
    total = Spread.over([sum(parts.values()) for parts in starts])
    names = [name for name in starts[0] if all(name in parts for parts in starts)]
    return StartupSplit(total=total, parts={name: Spread.over([parts[name] for parts in starts]) for name in names})
