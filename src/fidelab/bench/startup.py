"""Time to the first token: process start → interpreter, import, weights, warm-up, first token.

Cold means that the weight files were evicted from the page cache before.  Compiled kernels and libraries may still be
warm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fidelab.bench.base import (
    Answers,
    Bench,
    BenchInputs,
    BenchSettings,
    Facts,
    LiveSettings,
    Question,
    complete,
    unsteady,
)
from fidelab.results.measurement import Definition, Flag, Measurement, Metric, key_of
from fidelab.results.plots import Bars

COLD, WARM = "cold", "warm"
_PROMPT = 16  # tokens

TOTAL = Definition("total", "s", "lower", "From the process' start to the first token.")


def part(name: str) -> Definition:
    """Return the metric for one part of the time."""
    about = f"The part of the start-up called {name}; what an engine cannot tell apart stands under the later part."
    return Definition(key_of(name), "s", "lower", about, name=name)


class StartupSettings(BenchSettings):
    """Settings of bench ``startup``."""

    repeats: int = Field(default=3, ge=1, description="warm starts")
    cold: int = Field(default=1, ge=0, description="cold starts before them")


class Startup(Bench):
    """Time to the first token: every repeat is a fresh process, asked for one token after a prompt of 16.

    See docs/metrics/speed.md#start-up-time.
    """

    name: ClassVar[str] = "startup"
    title: ClassVar[str] = "How long until the first token?"
    Settings = StartupSettings
    fresh: ClassVar[bool] = True
    not_on_servers: ClassVar[str] = "the server was started before"

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        shape = LiveSettings(repeats=self.settings.repeats + self.settings.cold, max_warmup=1, seed=self.settings.seed)
        return (Question.make(inputs, shape, self.name, part="first", tokens=_PROMPT, batch=1, n=0),)

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        [answer] = answers.values()
        measurement = Measurement(status=answer.status, reason=answer.reason, title=self.title)
        if answer.seconds is None:
            return measurement
        starts = {kind: [parts for of, parts in facts.starts if of == kind] for kind in (COLD, WARM)}
        metrics: list[Metric] = []
        for kind, known in starts.items():
            if known:
                times = {TOTAL: [sum(parts.values()) for parts in known]}
                shared = [name for name in known[0] if all(name in parts for parts in known)]
                times |= {part(name): [parts[name] for parts in known] for name in shared}
                metrics += [make.repeated(seconds, cell={"start": kind}) for make, seconds in times.items()]
        warm = next((m for m in metrics if m.key == TOTAL.key and m.cell["start"] == WARM), None)
        flags = unsteady("warm starts", warm.steady if warm else None, 1)
        if self.settings.cold and not starts[COLD]:
            text = "no cold start: the weight files could not be put out of the page cache"
            flags = (*flags, Flag(kind="cache", text=text))
        return _complete(measurement.model_copy(update={"metrics": tuple(metrics), "flags": flags}))


def _complete(found: Measurement) -> Measurement:
    """Add bars of the parts, with the warm start as headline if there is one."""
    totals = {str(m.cell["start"]): m for m in found.metrics if m.key == TOTAL.key}
    names = {m.key: m.name for m in found.metrics if m.key != TOTAL.key}
    bars = Bars(
        key="startup",
        title="Where the start-up time goes",
        y_label="seconds",
        labels=tuple(totals),
        parts={
            name: tuple(found.value(key, total.cell) or 0.0 for total in totals.values()) for key, name in names.items()
        },
        totals=tuple(total.value or 0.0 for total in totals.values()),
        caption="From the process' start to the first token, medians of the parts. Cold: the weight files were not in "
        "the page cache. The figure is the median of the whole, which the parts' medians need not sum up to.",
    )
    return complete(found, [totals.get(WARM, totals.get(COLD))], [bars] if names else [])
