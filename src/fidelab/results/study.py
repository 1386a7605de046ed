"""Record of a study, ``study.json``: one question with many answers, one row for each.

Studies are the sensitivity of weights and of keys and values, comparisons by layer and by engine, profiles, and
speculation with quantization.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import AwareDatetime, Field

from fidelab.core import Status, read_file, strict_json, write_atomically
from fidelab.core.errors import InputError
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.results.measurement import Coordinates, Measurement, Metric
from fidelab.results.numbers import counted, one_line
from fidelab.results.plots import Curve, Heatmap
from fidelab.results.record import KV, RuntimeRecord
from fidelab.results.values import Count, Document, FreeDict, Outcome, Positive, Record

SCHEMA: Final = "fidelab.study/0"
STUDY: Final = "study.json"
_MAX_BYTES = 256 << 20
PART: Final = "part"
"""Coordinate of rows that stand in tables of their own, one for each of its values."""
StudyKind = Literal["sensitivity", "kv-sensitivity", "layers", "cross-engine", "profile", "speculation"]


class StudyRow(Measurement):
    """One row of the table: what was measured, and what it came to."""

    at: Coordinates
    """Subject of the row: a group of weights and its format, a side of the cache and its width, a layer."""


class StudyArm(Outcome):
    """A configuration of the study, and its outcome."""

    name: str
    """Name of the configuration."""
    engine: str
    """Engine that runs it."""
    model: str
    """The model as the user knows it."""
    dtype: str
    """Compute type."""
    kv: KV
    """Requested cache format."""
    ran: RuntimeRecord | None = None
    """Runtime; null where nothing was opened."""


class StudyPlan(Record):
    """A format for every group within a budget, and its measured cost."""

    unit: Literal["bytes", "bits per value"]
    """Unit of the sizes: bytes of all weights of decoder layers, or bits per stored value of the cache."""
    budget: Positive
    """The most that the plan may take."""
    size: Positive
    """Size of the plan, scales included."""
    bits: Positive
    """The same in bits per weight or value."""
    formats: dict[str, str]
    """Group → format; ``native`` is the model's own."""
    option: str
    """The plan in one text: the option ``weights`` of a configuration, or rules of layers for keys and values."""
    kv: str | None = None
    """The plan as the KV format of the engine that it is for; null where the engine has no such format."""
    exchanges: Count = 0
    """Groups whose format the second round changed."""
    unrefined: Positive | None = None
    """Mean KL of the plan before the second round, nats, on the windows of the rows; null: no second round."""
    predicted: Positive
    """Sum of the mean KLs of its rows, nats."""
    measured_there: Measurement
    """Loss on the windows of the rows; as predicted if losses add up."""
    measured: Measurement
    """Loss on windows that were not used to choose it."""
    uniform: str | None = None
    """The best on these windows of the single formats that fit the budget; null: none does."""
    uniform_size: Positive | None = None
    """Size of the uniform format."""
    uniform_measured: Measurement | None = None
    """Loss of the uniform format on the same windows."""
    difference: Metric | None = None
    """Plan minus uniform, paired by clusters; below 0 the plan is better."""


class Study(Document):
    """Everything that was found."""

    schema_name: Literal["fidelab.study/0"] = Field(alias="schema")
    """Name and version of this schema."""
    run_id: str
    """Name of its folder; empty where it was only printed."""
    created: AwareDatetime
    """Time at which it was started."""
    fidelab_version: str
    """Version that made it."""
    command: str
    """The command that was given."""
    settings: FreeDict = Field(default_factory=dict)
    """Settings, defaults included."""
    kind: StudyKind
    """The question."""
    title: str
    """The question in words."""
    windows: Count | None = None
    """Windows of text that all rows rest on; null where they rest on different ones."""
    n_rows: Count | None = None
    """Positions of these windows that were compared."""
    documents: Count | None = None
    """Documents that these are from, over which intervals are resampled; null where there are no intervals."""
    arms: dict[str, StudyArm] = Field(default_factory=dict)
    """Role → configuration."""
    facts: FreeDict = Field(default_factory=dict)
    """Remarks on the model and the settings."""
    columns: tuple[str, ...]
    """Coordinates, facts and metrics that a table shows, as far as its rows have them."""
    shown: Count | None = None
    """First rows that a terminal shows; null: all."""
    bar: str = ""
    """Metric that a terminal shows as bars; empty: none."""
    rows: tuple[StudyRow, ...] = ()
    """The answers."""
    findings: tuple[Metric, ...] = ()
    """Figures over several rows, by name and ``cell``."""
    sentences: tuple[str, ...] = ()
    """Findings, in words."""
    note: str = ""
    """Explanation of the table."""
    commands: dict[str, str] = Field(default_factory=dict)
    """Purpose → command lines that follow from the study."""
    plan: StudyPlan | None = None
    """Null without a budget."""
    heatmap: Heatmap | None = None
    """The rows as a heat map."""
    curves: tuple[Curve, ...] = ()
    """The rows as lines of one chart."""

    @property
    def sample(self) -> str:
        """Basis of the figures: ``8 windows, 4,080 rows of 3 documents``, and whether intervals are preliminary.

        Empty if rows rest on different windows.
        """
        if self.windows is None:
            return ""
        text = f"{counted(self.windows, 'window')}, {self.n_rows or 0:,} rows"
        if self.documents is None:
            return text
        few = f"; intervals over fewer than {MIN_STUDENTIZED_CLUSTERS} documents are preliminary"
        text += f" of {counted(self.documents, 'document')}"
        return text + (few if self.documents < MIN_STUDENTIZED_CLUSTERS else "")

    @property
    def faults(self) -> list[str]:
        """Return a line for each row and each compared arm that failed.

        A row that is not supported or not measurable is a finding, not a fault.
        """
        arms = [(arm.name, arm) for role, arm in self.arms.items() if role in ("reference", "candidate")]
        rows = [(" ".join(str(value) for value in row.at.values()), row) for row in self.rows]
        failed = [(name, row) for name, row in rows if row.status in (Status.FAILED, Status.NOT_ENGAGED)]
        return [f"{name} failed: {one.reason}" for name, one in (*arms, *failed) if not one.measured]

    def row(self, **at: int | float | str) -> StudyRow | None:
        """Return the first row with these coordinates. It may have further coordinates."""
        return next((row for row in self.rows if at.items() <= row.at.items()), None)

    def write(self, folder: Path) -> Path:
        """Write ``study.json`` into a folder.

        Raises:
            OutputError: If it cannot be written.
        """
        return write_atomically(folder / STUDY, self.to_json())

    def to_json(self) -> str:
        """Return strict JSON, indented. Fields at their default are left out, as there are thousands of metrics."""
        plain = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``study.json`` of a folder.

        Raises:
            InputError: If it cannot be read.
        """
        path = folder / STUDY
        try:
            return cls.model_validate(strict_json(read_file(path, _MAX_BYTES)))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {one_line(str(error))[:200]}") from None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the output of :meth:`to_json`."""
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
        return {**head, **cls.model_json_schema(by_alias=True), "title": SCHEMA}
