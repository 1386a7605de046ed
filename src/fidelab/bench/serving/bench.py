"""Load on the server of an arm, measured along with its fidelity.  Engines without a server cannot be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fidelab.bench.base import Answers, Bench, BenchInputs, BenchSettings, Facts, Question, Sizes
from fidelab.bench.load_figures import TITLE
from fidelab.captures.requests import Generate, Request
from fidelab.core import Status
from fidelab.results.measurement import Measurement


class LoadSettings(BenchSettings):
    """Settings of bench ``serving``: a sweep in a closed loop; ``fidelab bench serve`` has them all."""

    repeats: int = Field(default=1, ge=1, description="times that each cell is measured")
    contexts: Sizes = Field(default=(128,), description="tokens of prompts")
    concurrency: Sizes = Field(default=(1, 2, 4), description="requests in flight")
    output: int = Field(default=64, ge=1, description="tokens of answers")
    num_prompts: int | None = Field(default=None, ge=1, description="requests of a cell; twice its concurrency")


class Serving(Bench):
    """Cells by context and concurrency. See docs/metrics/speed.md#serving-rates."""

    name: ClassVar[str] = "serving"
    title: ClassVar[str] = TITLE
    Settings = LoadSettings
    covers: ClassVar[str] = "speed"
    loads: ClassVar[bool] = True
    protocol: ClassVar[tuple[str, ...]] = ("output",)
    settings: LoadSettings

    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        return ()

    def traffic(self) -> tuple[Request, ...]:
        s = self.settings
        return tuple(
            Generate(self.name, ((0,) * context,) * s.repeats * (s.num_prompts or max(8, 2 * n)), s.output, (), batch=n)
            for context in s.contexts
            for n in s.concurrency
        )

    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        """Return the measurement of an arm without a server; :mod:`fidelab.serving` measures the others."""
        reason = "this configuration has no server; measure a server with: fidelab bench serve --base-url URL"
        return Measurement(status=Status.NOT_SUPPORTED, reason=reason, title=TITLE)
