"""Settings of a load: which requests, how many at a time or per second, and what is read from them."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fidelab.bench.load_cell import LoadAsked
from fidelab.config.load import explain_validation
from fidelab.core.errors import UsageError
from fidelab.inputs.traffic import Trace, read_conversations, read_trace
from fidelab.metrics.serving import LATENCIES
from fidelab.results.speculation import Arrival

Latency = Literal["ttft", "tpot", "itl", "e2el"]
Tokens = Annotated[int, Field(ge=1)]

_FEWEST = 8  # requests of a cell
_MOST = 10_000  # requests made for a load that a duration ends
_TOKENS = 20_000_000  # and their tokens together


class ServingSettings(BaseModel):
    """All of it.  Lengths in tokens, times in seconds, targets of the goodput in milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    base_url: str
    model: str | None = Field(default=None, description="as the user knows it; null: the only one served")
    served_model_name: str | None = Field(default=None, description="as the server knows it; null: model")
    tokenizer: str | None = Field(default=None, description="a model's name or folder; null: model, where it is here")
    endpoint: Literal["completions", "chat"] = "completions"
    prompts: Literal["auto", "ids", "text"] = "auto"
    contexts: tuple[Tokens, ...] = Field(default=(1024,), min_length=1)
    output: Tokens = 128
    concurrency: tuple[Tokens, ...] = Field(default=(), description="cells; empty: no limit")
    request_rate: float | None = Field(default=None, gt=0, description="null: as fast as possible")
    arrival: Literal["constant", "poisson"] = "poisson"
    dataset: Literal["random", "sharegpt"] = "random"
    dataset_path: str | None = Field(default=None, description="sharegpt: its file")
    dataset_output: Tokens | None = Field(default=None, description="sharegpt: tokens of answers; null: the file's")
    trace: str | None = None
    trace_unit: Literal["ms", "s"] = "ms"
    num_prompts: int | None = Field(default=None, ge=1, description="requests of a cell; null: twice its concurrency")
    duration: float | None = Field(default=None, gt=0)
    warmup: int = Field(default=2, ge=0, description="requests of each cell that are sent first and not measured")
    ramp: float = Field(default=0.0, ge=0)
    repeats: int = Field(default=1, ge=1)
    goodput: dict[Literal["ttft", "tpot", "e2el"], Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    percentile_metrics: tuple[Latency, ...] = LATENCIES  # type: ignore[assignment]  # the same words
    metric_percentiles: tuple[Annotated[float, Field(ge=0, le=100)], ...] = (50, 95, 99)
    seed: int = Field(default=0, ge=0)
    timeout: float = Field(default=600.0, gt=0)
    ignore_eos: bool = True
    fit: bool = Field(default=True, description="cells whose requests the cache cannot hold together are left out")
    temperature: float = Field(default=0.0, ge=0)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Build settings from flags or keys.

        Raises:
            UsageError: one line for the first thing that is wrong.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise UsageError(explain_validation(error, "bench serve", cls)) from None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.trace is not None and self.request_rate is not None:
            raise ValueError("a trace has its own times: give no request rate")
        if self.trace is not None and len(self.concurrency) > 1:
            raise ValueError("a trace is one load: give one concurrency at most")
        if (self.dataset == "sharegpt") != (self.dataset_path is not None):
            raise ValueError("dataset sharegpt and the path of its file go together: give both or neither")
        if self.dataset == "sharegpt" and self.trace is not None:
            raise ValueError("a trace has requests of its own: give no dataset")
        for name, values in (("concurrency", self.concurrency), ("contexts", self.contexts)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names one value twice")
        return self

    @cached_property
    def recorded(self) -> Trace | None:
        """The trace's requests.

        Raises:
            InputError: the file is none.
        """
        return (
            None if self.trace is None else read_trace(Path(self.trace), unit=self.trace_unit, limit=self.num_prompts)
        )

    @cached_property
    def conversations(self) -> tuple[tuple[str, str], ...]:
        """Prompts and answers of the dataset, in the order that the seed gives.

        Raises:
            InputError: the file is none.
        """
        if self.dataset_path is None:
            return ()
        read = read_conversations(Path(self.dataset_path))
        return tuple(read[n] for n in np.random.default_rng(self.seed).permutation(len(read)))

    @property
    def mixed(self) -> bool:
        """Every request has lengths of its own."""
        return self.trace is not None or self.dataset != "random"

    @property
    def kind(self) -> Arrival:
        """Arrival of requests."""
        if self.trace is not None:
            return "trace"
        return "closed" if self.request_rate is None else self.arrival

    def cells(self) -> list[LoadAsked]:
        """The loads, by context, then concurrency."""
        contexts = [None] if self.mixed else list(self.contexts)
        return [
            LoadAsked(
                arrival=self.kind,
                context=context,
                output=None if self.mixed else self.output,
                concurrency=concurrency,
                request_rate=self.request_rate,
                ramp=self.ramp,
                whole=self.ignore_eos,
                targets={str(name): limit for name, limit in self.goodput.items()},
                shown=self.percentile_metrics,
                percentiles=self.metric_percentiles,
            )
            for context in contexts
            for concurrency in (self.concurrency or (None,))
        ]

    def count(self, asked: LoadAsked) -> int:
        """Measured requests of a cell: as given, else twice the concurrency, else as many as the duration may take."""
        if self.recorded is not None:
            return len(self.recorded.input)
        if self.num_prompts is not None:
            return self.num_prompts
        if self.duration is not None and self.request_rate is not None:
            return max(1, math.ceil(self.duration * self.request_rate))
        if self.duration is not None:
            return max(_FEWEST, min(_MOST, _TOKENS // (asked.context or 1)))
        return max(_FEWEST, 2 * (asked.concurrency or 0))
