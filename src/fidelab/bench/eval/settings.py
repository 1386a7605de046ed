"""Settings of ``fidelab eval``."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fidelab.config.load import explain_validation
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.inputs.questions.question import KINDS

SERVING = "serving"
"""Name of the serving checks among the kinds."""


class EvalSettings(BaseModel):
    """Questions to ask, requests at once, and the time for them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str | None = Field(default=None, description="name of the model on the server; null: the only one served")
    kinds: tuple[str, ...] = Field(default=(SERVING, *KINDS), description="kinds of questions, and serving")
    parallel: int = Field(default=4, ge=1, le=1024, description="requests in flight")
    time_limit: float = Field(default=600.0, gt=0, description="seconds for all requests")
    timeout: float = Field(default=120.0, gt=0, description="seconds for one request")
    seed: int = Field(default=0, ge=0, description="seed of sampling, for servers that do not answer greedily")

    @classmethod
    def of(cls, **given: object) -> Self:
        """Build settings from flags.

        Raises:
            UsageError: one line for the first thing that is wrong.
            UnknownNameError: If there is no such kind.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise UsageError(explain_validation(error, "eval", cls)) from None

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in (SERVING, *KINDS):
                raise UnknownNameError("kind of question", kind, (SERVING, *KINDS))
        if not kinds:
            raise ValueError("name a kind")
        return tuple(dict.fromkeys(kinds))
