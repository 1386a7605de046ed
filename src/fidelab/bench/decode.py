"""Decode speed: tokens per second at a list of depths, by two methods.

Isolated: n / (last − first token).  By subtraction, as some other tools do: n / (whole answer − median of separate
prefills of the same length).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from fidelab.bench.base import (
    Answers,
    Bench,
    BenchInputs,
    CellResult,
    Counts,
    Facts,
    LiveSettings,
    Question,
    against,
    complete,
    joined,
    largest,
    unsteady,
)
from fidelab.metrics.latency import Rate, decode_rate_by_subtraction, decode_rate_isolated
from fidelab.results.measurement import Definition, Flag, Measurement
from fidelab.results.speculation import acceptance

ISOLATED = Definition(
    "isolated",
    "tok/s",
    "higher",
    "Tokens of the whole batch behind the first one, over the time from the first to the last.",
)
BY_SUBTRACTION = Definition(
    "by_subtraction",
    "tok/s",
    "higher",
    "The same tokens over the time of the whole answer less the median of separate prefills.",
    optional=True,
)

_NOISE = 0.1  # largest spread of the subtracted prefills, as a share of the difference
_PREFILL_SUFFIX = ".alone"  # the part of a depth that is only prefilled


class DecodeSettings(LiveSettings):
    """Settings of bench ``decode``."""

    depths: Counts = Field(default=(0, 512), description="tokens before the first decoded one")
    n: int = Field(default=32, ge=2, description="tokens decoded after the first")


class Decode(Bench):
    """Tokens per second after the first one, over the whole batch. See docs/metrics/speed.md#decode-speed."""

    name: ClassVar[str] = "decode"
    title: ClassVar[str] = "How fast are answers written?"
    Settings = DecodeSettings
    covers: ClassVar[str] = "speed"
    protocol: ClassVar[tuple[str, ...]] = ("n",)

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        return tuple(
            Question.make(
                inputs, self.settings, self.name, part=f"{depth}.b{batch}{end}", tokens=depth, batch=batch, n=n
            )
            for batch in self.settings.batch
            for depth in self.settings.depths
            for end, n in ((_PREFILL_SUFFIX, 0), ("", self.settings.n))
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        wholes = ((part, answer) for part, answer in answers.items() if not part.endswith(_PREFILL_SUFFIX))
        found = joined(
            (_rates(whole, answers.get(part + _PREFILL_SUFFIX), facts) for part, whole in wholes), self.title
        )
        plots = against(
            found,
            ISOLATED.key,
            "depth",
            key="decode",
            title="Decode against depth",
            x_label="tokens in the cache",
            y_label="tok/s",
            caption="Isolated: time between the first and the last token. Median of the repeats, shaded from slowest "
            "to fastest.",
        )
        return complete(found, [largest(found, ISOLATED.key, "depth")], plots)


def _rates(whole: Answers, alone: Answers | None, facts: Facts) -> CellResult:
    asked, at = whole.question, whole.at("depth")
    if whole.seconds is None:
        return CellResult(whole.cell(at))

    def total_rates(rate: Rate) -> list[float]:
        """Return the rates of all sequences together."""
        return [asked.batch * one for one in rate.repeats]

    what = f"depth {asked.tokens} × {asked.batch}"
    rate = decode_rate_isolated(whole.seconds)
    metrics, flags = [ISOLATED.repeated(total_rates(rate), cell=at)], [*unsteady(what, rate.steady, facts.loads)]
    # The draft counts that the engine reported while decoding
    if counted := [fact["speculation"] for fact in whole.facts if "speculation" in fact]:
        drafts, drafted, accepted = (
            sum(int(each[key]) for each in counted) for key in ("drafts", "drafted", "accepted")
        )
        metrics += acceptance(drafts, drafted, accepted, cell=at)
        tokens = f"{accepted:,} of {drafted:,} drafted tokens accepted"
        text = f"{what}: {tokens}, after random tokens; real text gives other rates"
        flags.append(Flag(kind="speculation", text=text))
    if alone is not None and alone.seconds is not None:
        first = alone.seconds[:, 0]
        subtracted = decode_rate_by_subtraction(whole.seconds[:, -1], first, asked.n)
        if subtracted is not None:
            metrics.append(BY_SUBTRACTION.repeated(total_rates(subtracted), cell=at))
        if doubt := _doubt(subtracted, float(np.ptp(first)), asked.n):
            flags.append(Flag(kind="noise", text=f"{what}: by subtraction {doubt}"))
    return CellResult(whole.cell(at, flags, n=asked.n), tuple(metrics))


def _doubt(subtracted: Rate | None, spread: float, n: int) -> str:
    """Return why subtraction says little, given the spread of the separate prefills (seconds)."""
    if subtracted is None:
        return "there is no figure: an answer took no longer than the prefill alone"
    left = n / subtracted.median
    if spread <= _NOISE * left:
        return ""
    return f"is rough: the prefills alone lie {spread:.2g} s apart, and {left:.2g} s are what is left for decoding"
