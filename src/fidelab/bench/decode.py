"""How fast answers are written: tokens per second at a list of depths, by two methods.

Isolated: n / (last − first token).  By subtraction, another method in use: n / (whole answer − median of separate
prefills of the same length).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from fidelab.bench.base import Answers, Bench, BenchInputs, Counts, Facts, LiveSettings, Question, unsteady
from fidelab.bench.cells import outcome_of
from fidelab.metrics.latency import Rate, decode_rate_by_subtraction, decode_rate_isolated
from fidelab.results import bench_record
from fidelab.results.bench_record import SpeedCell
from fidelab.results.bench_values import Flag, Spread

__all__ = ["Decode", "DecodeSettings"]

_NOISE = 0.1  # share of the difference that the spread of what is subtracted may have
_ALONE = ".alone"  # the part of a depth that is read only


class DecodeSettings(LiveSettings):
    """Settings of bench ``decode``."""

    depths: Counts = Field(default=(0, 512), description="tokens before the first decoded one")
    n: int = Field(default=32, ge=2, description="tokens decoded behind the first")


class Decode(Bench):
    """Tokens per second behind the first one, over the whole batch. See docs/metrics.md#decode-speed."""

    name: ClassVar[str] = "decode"
    title: ClassVar[str] = "How fast are answers written?"
    Settings = DecodeSettings
    protocol: ClassVar[tuple[str, ...]] = ("n",)

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        return tuple(
            Question.make(
                inputs, self.settings, self.name, part=f"{depth}.b{batch}{end}", tokens=depth, batch=batch, n=n
            )
            for batch in self.settings.batch
            for depth in self.settings.depths
            for end, n in ((_ALONE, 0), ("", self.settings.n))
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> bench_record.Decode:
        cells = tuple(
            _cell(whole, answers.get(part + _ALONE), facts)
            for part, whole in answers.items()
            if not part.endswith(_ALONE)
        )
        return bench_record.Decode(**outcome_of(cells), cells=cells)


def _cell(whole: Answers, alone: Answers | None, facts: Facts) -> SpeedCell:
    asked = whole.question
    shape = {"tokens": asked.tokens, "batch": asked.batch, "n": asked.n, **whole.outcome()}
    if whole.seconds is None:
        return SpeedCell(**shape)
    what = f"depth {asked.tokens} × {asked.batch}"
    rate = _times(decode_rate_isolated(whole.seconds), asked.batch)
    flags = unsteady(what, rate.steady, facts.loads)
    subtracted = None
    if alone is not None and alone.seconds is not None:
        first = alone.seconds[:, 0]
        subtracted = decode_rate_by_subtraction(whole.seconds[:, -1], first, asked.n)
        if doubt := _doubt(subtracted, float(np.ptp(first)), asked.n):
            flags = (*flags, Flag(kind="noise", text=f"{what}: by subtraction {doubt}"))
    return SpeedCell(
        **shape,
        rate=Spread.of(rate),
        by_subtraction=None if subtracted is None else Spread.of(_times(subtracted, asked.batch)),
        warmups=whole.warmups,
        flags=flags,
    )


def _doubt(subtracted: Rate | None, spread: float, n: int) -> str:
    """Why the figure by subtraction means little, given how far the prefills alone lie apart (seconds)."""
    if subtracted is None:
        return "there is no figure: an answer took no longer than the prefill alone"
    left = n / subtracted.median
    if spread <= _NOISE * left:
        return ""
    return f"is rough: the prefills alone lie {spread:.2g} s apart, and {left:.2g} s are what is left for decoding"


def _times(rate: Rate, batch: int) -> Rate:
    """The rate of all sequences together."""
    return Rate(tuple(batch * one for one in rate.repeats))
