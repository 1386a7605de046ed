"""Settings of a load: its requests, their concurrency or rate, and the metrics to read."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fidelab.bench.load_cell import LoadCell
from fidelab.config.load import explain_validation
from fidelab.core.errors import UsageError
from fidelab.results.speculation import Arrival

Tokens = Annotated[int, Field(ge=1)]

_MIN_REQUESTS = 8  # requests of a cell
_MAX_TIMED_REQUESTS = 10_000  # most requests for a load that is limited by time
_TOKENS = 20_000_000  # most tokens of these requests together


class ServingSettings(BaseModel):
    """All of it.  Lengths in tokens, times in seconds, targets of the goodput in milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    base_url: str
    model: str | None = Field(default=None, description="as the user knows it; null: the only one served")
    served_model_name: str | None = Field(default=None, description="as the server knows it; null: model")
    tokenizer: str | None = Field(default=None, description="a model's name or folder; null: model, which must be here")
    endpoint: Literal["completions", "chat"] = "completions"
    prompts: Literal["auto", "ids", "text"] = "auto"
    contexts: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(1024,), min_length=1, description="0: the shortest prompt that can be made for this server"
    )
    output: Tokens = 128
    concurrency: tuple[Tokens, ...] = Field(default=(), description="cells; empty: no limit")
    request_rate: float | None = Field(default=None, gt=0, description="null: as fast as possible")
    arrival: Literal["constant", "poisson"] = "poisson"
    num_prompts: int | None = Field(default=None, ge=1, description="requests of a cell; null: twice its concurrency")
    duration: float | None = Field(default=None, gt=0)
    warmup: int = Field(default=2, ge=0, description="requests of each cell that are sent first and not measured")
    repeats: int = Field(default=1, ge=1)
    goodput: dict[Literal["ttft", "tpot", "e2el"], Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0)
    timeout: float = Field(default=600.0, gt=0)
    ignore_eos: bool = True
    fit: bool = Field(default=True, description="cells whose requests the cache cannot hold together are left out")

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
    def _check_values(self) -> Self:
        for name, values in (("concurrency", self.concurrency), ("contexts", self.contexts)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names one value twice")
        return self

    @property
    def kind(self) -> Arrival:
        """How requests arrive."""
        return "closed" if self.request_rate is None else self.arrival

    def cells(self) -> list[LoadCell]:
        """Return the loads, by context, then concurrency."""
        return [
            LoadCell(
                arrival=self.kind,
                context=context,
                output=self.output,
                concurrency=concurrency,
                request_rate=self.request_rate,
                whole=self.ignore_eos,
                targets={str(name): limit for name, limit in self.goodput.items()},
            )
            for context in self.contexts
            for concurrency in (self.concurrency or (None,))
        ]

    def count(self, asked: LoadCell) -> int:
        """Measured requests of a cell: as given, else twice the concurrency, else as many as the duration may take."""
        if self.num_prompts is not None:
            return self.num_prompts
        if self.duration is not None and self.request_rate is not None:
            return max(1, math.ceil(self.duration * self.request_rate))
        if self.duration is not None:
            return max(_MIN_REQUESTS, min(_MAX_TIMED_REQUESTS, _TOKENS // max(1, asked.context)))
        return max(_MIN_REQUESTS, 2 * (asked.concurrency or 0))
