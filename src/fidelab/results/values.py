"""Base classes and field types of all records: strict frozen models, intervals, counts, outcomes."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fidelab.core import Status


class Record(BaseModel):
    """Frozen, strict, without NaN: the base of everything in ``report.json``."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,  # what is written names every field
        validate_by_name=True,
        validate_by_alias=True,
    )


class Document(Record):
    """A record that is written to a file of its own, or printed."""

    def to_json(self) -> str:
        """Return strict JSON, indented, ending in a newline."""
        plain = self.model_dump(mode="json", by_alias=True)
        return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError(f"the lower bound {interval[0]} lies above the upper bound {interval[1]}")
    return interval


def _open_ordered(interval: tuple[float, float | None]) -> tuple[float, float | None]:
    low, high = interval
    return (low, high) if high is None else _ordered((low, high))


def _strict_json(value: Any) -> Any:
    """Return the value as JSON would give it back (tuples become lists). Values that JSON cannot hold are refused."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # lone surrogates
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return json.loads(text)


Score = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Interval = Annotated[tuple[float, float], AfterValidator(_ordered)]
OpenInterval = Annotated[tuple[float, float | None], AfterValidator(_open_ordered)]
"""An interval whose upper end may be missing: without limit."""
Free = Annotated[Any, AfterValidator(_strict_json)]
FreeDict = Annotated[dict[str, Any], AfterValidator(_strict_json)]

NEEDS_REASON = frozenset({Status.FAILED, Status.NOT_ENGAGED, Status.NOT_SUPPORTED, Status.NOT_MEASURABLE})


class Outcome(Record):
    status: Status
    """Status at the end."""
    reason: str | None = None
    """Reason in one line; always present when the status is neither ok nor identical."""

    @model_validator(mode="after")
    def _explained(self) -> Self:
        if self.status in NEEDS_REASON and not (self.reason or "").strip():
            raise ValueError(f"status {self.status.value!r} needs a reason")
        return self

    @property
    def measured(self) -> bool:
        """Whether it ended well."""
        return self.status in (Status.OK, Status.IDENTICAL)
