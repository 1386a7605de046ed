"""Base classes and field types of all records: strict frozen models, intervals, counts, outcomes."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import threading
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fidelab.core import Status

_BUILDING = threading.RLock()


class Record(BaseModel):
    """Frozen, strict, without NaN: the base of everything in ``report.json``."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,  # a command that reads one kind of record does not wait for the others
        json_schema_serialization_defaults_required=True,  # what is written names every field
        validate_by_name=True,
        validate_by_alias=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the class, as its first use does, by one thread at a time: pydantic before 2.13 does not ensure it."""
        depth = options.get("_parent_namespace_depth", 2)  # frames up to where names of the fields are looked up
        with _BUILDING:
            return super().model_rebuild(**{**options, "_parent_namespace_depth": depth + 1})

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field by the text below it.

        As ``use_attribute_docstrings`` does, but only for a schema: that reads the source of each class whenever the
        module is imported.
        """
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in _texts_of_fields(cls).items():
            field = properties.get(cls.model_fields[name].serialization_alias or name)
            if field is not None:
                field.setdefault("description", text)
        return made


def _texts_of_fields(kind: type[Record]) -> dict[str, str]:
    """Field → the string that follows it in the source of its class."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if base is Record or not issubclass(base, Record):
            continue
        [defined] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(defined, ast.ClassDef)
        for before, after in zip(defined.body, defined.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                match after:
                    case ast.Expr(ast.Constant(str() as text)):
                        found.setdefault(before.target.id, inspect.cleandoc(text))
    return found


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
