"""The record of a run: ``report.json``, schema ``fidelab.report/1``: arms × metrics, plots, verdicts.

Units: scores 0-100, KL divergences in nats, intervals 95%, memory in bytes, throughput in tok/s, shares 0-1.
Absent is ``null``; NaN and infinities are refused when a record is built, so they cannot be written.
``python -m fidelab.results.record`` prints the JSON Schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import (
    AwareDatetime,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from fidelab.core import LAYER_KINDS, KVSpec, Status, read_file, strict_json, write_atomically
from fidelab.core.errors import InputError, UnknownNameError, UsageError
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.core.serial import from_json, to_json
from fidelab.results import FACES
from fidelab.results.capacity_record import ArmCapacity, Capacity
from fidelab.results.decision_record import Certificate, DocumentSums, Recommendation
from fidelab.results.measurement import DECIDING, Measurement, Metric
from fidelab.results.numbers import without_folders
from fidelab.results.values import Count, Document, Free, FreeDict, Interval, Outcome, Positive, Record, Score

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Final = "fidelab.report/1"

NO_REFERENCE: Final = "the reference has no answer"
"""Begins the reason of a test that cannot be scored for want of the reference's capture."""
STOCK: Final = "stock"
"""``provenance`` of a package whose Python files are as released."""

_MAX_REPORT_BYTES = 128 << 20  # of a report's file

BandName = Literal["EXCELLENT", "PASS", "DEGRADED", "FAIL"]


# ------------------------------------------------------------------------------------------------- arms


KV = Annotated[
    KVSpec,
    PlainValidator(lambda value: value if isinstance(value, KVSpec) else from_json(KVSpec, value)),
    PlainSerializer(to_json),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                **{name: {"type": "string"} for name in ("label", "k", "v")},
                "skip_layers": {"type": "array", "items": {"type": "integer"}},
                "skip_kinds": {"type": "array", "items": {"enum": list(LAYER_KINDS)}},
            },
            "required": ["label", "k", "v", "skip_layers"],
        }
    ),
]
"""A KV spec as :meth:`~fidelab.core.KVSpec.record` writes it."""


def _sequence(value: Any) -> SequenceBytes:
    return value if isinstance(value, SequenceBytes) else from_json(SequenceBytes, value)


_STORE_COUNTS = ("sinks", "tail", "block", "window")
_STORE_BYTES = ("encoded_token", "exact_token", "packed_token", "fitted")

Sequence = Annotated[
    SequenceBytes,
    PlainValidator(_sequence),
    PlainSerializer(to_json),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "stores": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            **{name: {"type": "number", "minimum": 0} for name in _STORE_BYTES},
                            **{name: {"type": "integer", "minimum": 0} for name in _STORE_COUNTS},
                        },
                        "required": ["encoded_token"],
                    },
                },
                "state": {"type": "number", "minimum": 0},
            },
            "required": ["stores"],
        }
    ),
]
"""Bytes of a sequence as :class:`~fidelab.core.sequence.SequenceBytes` has them."""


class RuntimeRecord(Record):
    """Runtime facts, as the engine reports them; engines may add their own keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Free] = Field(init=False)

    k_dtype: str | None = None
    """Type of the stored keys."""
    v_dtype: str | None = None
    """Type of the stored values."""
    attention: str | None = None
    """Attention backend or kernel."""
    cache_bytes_per_token: Positive | None = None
    """Bytes of KV cache of one more encoded token, all layers, with the scales that belong to the token."""
    state_bytes_per_sequence: Positive | None = None
    """Bytes of recurrent and convolution states, whatever the length."""
    sequence: Sequence | None = None
    """Bytes of a sequence by its length; null where they are the bytes per token times the length, and the states."""
    weight_bytes: Count | None = None
    """Bytes of the weights in the checkpoint's files; null where a server holds them."""
    bits_per_weight: Positive | None = None
    """Bits per weight of a GGUF model, from its header; null of other checkpoints."""
    simulated_weight_bytes: Count | None = None
    """Bytes that the weights would take in the formats to which they were rounded; null where none was."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Package → version, in the engine's environment."""
    observed: dict[str, tuple[int, int]] | None = None
    """Extent of the proof of engagement, pairs (observed, all): ``layers`` with the asked format, ``prefills``
    and ``steps`` (decode); what is not there was not counted."""
    remarks: tuple[str, ...] = ()
    """Remarks for readers of the configuration's figures on how it ran, a sentence each."""

    def bytes_of_sequence(self, n_tokens: int, kv_scale: float = 1.0) -> float | None:
        """Return the bytes of cache by which arms are compared; ``None`` if the engine reports none.

        Codes of emulated formats count as packed without gaps.  ``kv_scale``: factor of keys and values.  See
        docs/metrics/bytes.md#bytes-of-a-sequence.
        """
        sequence = self.sequence_bytes
        return None if sequence is None else sequence.bytes_of_sequence(n_tokens, packed=True, kv_scale=kv_scale)

    @property
    def sequence_bytes(self) -> SequenceBytes | None:
        """Bytes of a sequence by its length; ``None`` if the engine reports none."""
        if self.sequence is not None or self.cache_bytes_per_token is None:
            return self.sequence
        packed = self.others().get("packed_bytes_per_token")
        packed_token = float(packed) if isinstance(packed, int | float) else None
        store = StoreBytes(self.cache_bytes_per_token, packed_token=packed_token)
        return SequenceBytes((store,), self.state_bytes_per_sequence or 0.0)

    def others(self) -> dict[str, Any]:
        """Keys of the engine itself."""
        return dict(self.__pydantic_extra__)

    @property
    def size(self) -> int | None:
        """Bytes of the weights in the formats to which they were rounded, else as stored."""
        return self.simulated_weight_bytes or self.weight_bytes

    @property
    def modified(self) -> tuple[str, ...]:
        """Components other than released packages, in words: from ``provenance``, and shims from ``pythonpath``."""
        provenance, shims = self.__pydantic_extra__.get("provenance"), self.__pydantic_extra__.get("pythonpath")
        packages = provenance.items() if isinstance(provenance, dict) else ()
        folders = [shim for shim in shims if isinstance(shim, dict)] if isinstance(shims, list) else []
        return (
            *(f"{name} {without_folders(str(text))}" for name, text in packages if text != STOCK),
            *(f"shim {shim.get('folder') or '.'} (sha256 {str(shim.get('sha256'))[:8]})" for shim in folders),
        )


class Composite(Record):
    """Harmonic mean of the tests measured; shown, never a verdict."""

    value: Score | None = None
    """0-100."""
    ci: Interval | None = None
    """95% interval."""
    axes: tuple[str, ...] = ()
    """The tests whose scores it is the mean of."""
    band: BandName | None = None
    """Null unless all tests that belong to it were measured."""
    too_close_to_call: bool = False
    """The interval crosses the edge of a band."""


class Verdict(Record):
    """Verdict on a candidate."""

    band: BandName | None = None
    """Band by the upper 95% bound of the mean KL; null is "no verdict"."""
    at_best: BandName | None = None
    """The best band still possible: where there is no verdict, and where the interval of the mean KL reaches into a
    better band than that of its upper end; else null."""
    at_worst: BandName | None = None
    """FAIL where the upper end of the mean KL alone is that of FAIL, and the mean itself is not: there is no verdict,
    and anything from `at_best` to it is possible; else null."""
    preliminary: bool = False
    """The interval that gave the band rests on fewer than six resampling clusters."""
    by_kld: bool = True
    """Nothing but the mean KL gave the band: no position failed, and no other test lowered it. A limit that the user
    sets may go over such a band alone."""
    sentence: str
    """Advice, in two clauses at most."""
    notes: tuple[str, ...] = ()
    """Further remarks, the most useful first."""
    because: tuple[str, ...] = ()
    """The facts that set or lowered the band."""
    modified: tuple[str, ...] = ()
    """Packages that are not as released, and shims: what the verdict holds for."""


class NoiseFloor(Record):
    """Effect of changing the last bit of some of the first layer's weights: KL(candidate ‖ twin).

    Two machines, or two versions of a library, round as differently.  They do not resolve smaller effects.
    """

    of: str
    """Name of the candidate whose twin was computed: the first one of the same engine, checkpoint and formats."""
    mean: Positive | None = None
    """Nats per position; null where it was not measured."""
    ci: Interval | None = None
    """95% interval of the mean."""
    n_positions: Count | None = None
    """Positions scored."""
    reason: str | None = None
    """Reason why there is no mean."""


class Timing(Record):
    """Time of a configuration's worker for its captures."""

    load_seconds: Positive | None = None
    """Seconds from the job's arrival in the worker to the loaded model, without the imports that workers share."""
    seconds: Positive | None = None
    """The whole job."""


class ArmRecord(Outcome):
    """One thing that was run, or was to be run."""

    name: str
    """Short name, unique among the candidates."""
    engine: str
    """Engine that runs it."""
    model: str
    """The model as the user knows it."""
    weights_sha256: str | None = None
    """SHA-256 of the content of the local checkpoint; null of imported figures, and in earlier reports."""
    kv: KV | None = None
    """Requested cache format; null of imported figures that do not state it."""
    forced: bool = False
    """Run although its engine warned (``force=yes``)."""
    wider_keys: str | None = None
    """The format of native keys and values of about this width; null where the engine has one format for both."""
    serve_command: str | None = None
    """Command line of the engine's own server with this configuration, to be copied; null where it has none."""
    ran: RuntimeRecord | None = None
    """Runtime; null where nothing was opened."""
    axes: dict[str, Measurement] = Field(default_factory=dict)
    """Test → fidelity against the reference; of the reference itself its figures alone, where nothing was compared."""
    floor: NoiseFloor | None = None
    """Effect of last bits alone on a candidate; null unless that was asked for (``twins``)."""
    control: str | None = None
    """Name of the control that the metrics ``over control`` refer to; null where there is none."""
    benches: dict[str, Measurement] = Field(default_factory=dict)
    """Bench → speed, start-up, memory, serving."""
    timing: Timing | None = None
    """Time of the captures; depends on what was on disk already, so nothing compares it."""
    composite: Composite | None = None
    """Harmonic mean of the test scores, as REFRACT combines them."""
    verdict: Verdict | None = None
    """Candidates have one, also when nothing ran."""
    certificates: dict[str, Certificate] = Field(default_factory=dict)
    """Test → whether a candidate is shown to lose less than its margins; of tests with right and wrong answers."""
    documents: tuple[DocumentSums, ...] = ()
    """Sums by document of test kld, a record per context: what paired differences and resamples are computed from."""
    capacity: ArmCapacity | None = None
    """Memory at the report's context; null where the bytes of the cache are unknown."""
    measure_elsewhere: str | None = None
    """fidelab command that measures the same format on an engine with a server; null where its own has one."""

    @property
    def deciding(self) -> Measurement | None:
        """The measurement by which the arm is judged."""
        return self.axes.get(DECIDING)

    @property
    def kld(self) -> float:
        """Mean KL divergence from the reference, nats.

        Raises:
            UsageError: If it was not measured.
        """
        return self._deciding("mean")

    @property
    def kld_interval(self) -> tuple[float, float] | None:
        """95% interval of :attr:`kld`, nats; ``None`` where a single document was read."""
        mean = self.deciding.metric("mean") if self.deciding else None
        return None if mean is None else mean.interval

    @property
    def top1(self) -> float:
        """Share of positions whose most likely token is the reference's, 0-1.

        Raises:
            UsageError: If it was not measured.
        """
        return self._deciding("top1")

    def _deciding(self, key: str) -> float:
        value = None if self.deciding is None else self.deciding.value(key)
        if value is None:
            why = (self.reason or (self.deciding and self.deciding.reason) or "test kld has no figure").strip()
            raise UsageError(f"{self.name} has no KLD: {why}")
        return value

    @property
    def banded(self) -> tuple[tuple[str, Measurement, Metric], ...]:
        """Mean KLs of other axes that the verdict judges by the same bands: axis, its measurement, the metric."""
        return tuple(
            (name, axis, metric)
            for name, axis in self.axes.items()
            if name != DECIDING and axis.measured
            for metric in axis.metrics
            if metric.banded and not metric.bound and metric.value is not None
        )

    @property
    def kv_text(self) -> str:
        """The requested formats in words."""
        return self.kv.text if self.kv else "unstated"

    @field_validator("status")
    @classmethod
    def _arm_status(cls, status: Status) -> Status:
        if status is Status.NOT_MEASURABLE:
            raise ValueError("'not_measurable' is the outcome of a test, not of a configuration")
        return status


# ----------------------------------------------------------------------------------------------- report


class Comparison(Record):
    """Two candidates next to each other in a test's order, by their paired difference."""

    axis: str
    """Which test."""
    better: str
    """Name of the candidate with the smaller cost."""
    worse: str
    """Name of the candidate with the larger cost."""
    difference: float
    """Cost of ``worse`` minus cost of ``better``, in the test's own unit (KLD: nats)."""
    ci: Interval | None = None
    """95% interval of the paired difference; null with a single unit."""
    differs: bool = False
    """The interval excludes 0: the order is more than chance."""
    equivalent: bool = False
    """The interval lies within ± 10% of the larger mean: shown to cost the same.  Neither this nor ``differs``: it
    is undecided."""


class AttributionPart(Record):
    """The mean KL (nats) of one configuration over its own reference."""

    arm: str
    """Name of the configuration."""
    mean: float | None = None
    """Nats; null where it was not measured."""
    ci: Interval | None = None
    """95% interval."""
    reason: str | None = None
    """Reason why there is no mean."""


class Contrast(Record):
    """A paired difference of two mean KLs (nats)."""

    mean: float
    """First minus second."""
    ci: Interval | None = None
    """95% interval; null with a single unit."""


class Attribution(Record):
    """Sources of a candidate's KL.  KL is not additive: the parts need not sum up."""

    candidate: str
    """Name of the candidate."""
    here: AttributionPart | None = None
    """The candidate on its engine: format and kernel path together."""
    kernel: AttributionPart | None = None
    """The control on the engine: the kernel path without the format."""
    format: AttributionPart | None = None
    """The same format under exact attention, over a 32-bit cache there: the format without the kernel path."""
    native_queries: AttributionPart | None = None
    """The candidate on a kernel that leaves queries in the model's type, where the engine may quantize them."""
    here_minus_kernel: Contrast | None = None
    """``here`` minus ``kernel``."""
    here_minus_format: Contrast | None = None
    """``here`` minus ``format``."""
    format_minus_kernel: Contrast | None = None
    """``format`` minus ``kernel``."""
    here_minus_native_queries: Contrast | None = None
    """``here`` minus ``native_queries``."""
    floor: NoiseFloor | None = None
    """Effect of last bits alone on the candidate; a part below it is not evidence."""


class MachineDifference(Record):
    """Distance of a reference from itself on another machine."""

    mean: Positive
    """Mean KLD of the two, nats."""
    machines: tuple[str, str]
    """Processor and GPUs of both; the first one made the reference."""


class Borrowed(Record):
    """A packed reference that somebody else ran."""

    place: str
    """Place where it was found: a folder's name, or ``hf://owner/name@commit``."""
    sha256: str
    """SHA-256 of its manifest."""
    machine: str
    """Processor and GPUs that it ran on."""
    weights: str = ""
    """``dequantized from`` or ``quantized as``, and the formats below 16 bits of its checkpoint; empty: none."""
    difference: MachineDifference | None = None
    """Distance from itself on another machine: it widens the intervals of verdicts; null: not measured."""


class Report(Document):
    """Everything a run found."""

    schema_name: Literal["fidelab.report/1"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    run_id: str
    """Name of the run's folder."""
    created: AwareDatetime
    """Time at which the report was made, with time zone."""
    fidelab_version: str
    """Version that made it."""
    command: str
    """The command that repeats the run."""
    environment: FreeDict = Field(default_factory=dict)
    """Device, driver, operating system, Python, packages."""
    settings: FreeDict = Field(default_factory=dict)
    """The resolved settings, defaults included."""
    covers: dict[str, str] = Field(default_factory=dict)
    """Test, or ``benches.<bench>`` → what a user wants to know that it answers; of all that could have been asked."""
    comparability_key: FreeDict = Field(default_factory=dict)
    """Settings that must agree before two numbers stand in one ranking."""
    reference: ArmRecord
    """The configuration that all others are compared with."""
    control: ArmRecord | None = None
    """The nearest configuration that should cost nothing: the noise of the kernel path."""
    controls: tuple[ArmRecord, ...] = ()
    """The same on other kernel paths, for the candidates that run there (engine hf: another ``attention``)."""
    candidates: tuple[ArmRecord, ...] = ()
    """The configurations in question."""
    comparisons: tuple[Comparison, ...] = ()
    """Candidates in the order of their mean KL, each with the next one."""
    attribution: tuple[Attribution, ...] = ()
    """Format loss separated from kernel loss, one per candidate; empty unless that was asked (control: full)."""
    truth: ArmRecord | None = None
    """The reference's 32-bit twin on the same engine, over the reference."""
    floor: dict[str, Measurement] = Field(default_factory=dict)
    """Test → the reference against a replicate of itself: repeatability."""
    borrowed: Borrowed | None = None
    """Origin of the reference, if this run did not run it."""
    capacity: Capacity | None = None
    """Context and memory that GiB and users refer to; null where none of them was asked for or found."""
    recommendation: Recommendation | None = None
    """Which candidate to run; null where nothing was compared, and in reports of earlier versions."""

    @property
    def reference_faults(self) -> tuple[str, ...]:
        """Reasons why the reference is unusable for anything, by what the axes saw of it."""
        arms = (*self.candidates, *([self.control] if self.control else []))
        faults = (fault for arm in arms for axis in arm.axes.values() for fault in axis.reference_faults)
        return tuple(dict.fromkeys(faults))

    @model_validator(mode="after")
    def _check_unique_names(self) -> Self:
        names = [arm.name for arm in self.candidates]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two candidates are named {twice[0]!r}")
        return self

    _folder: Path | None = PrivateAttr(default=None)

    def __getitem__(self, name: str) -> ArmRecord:
        """Return a configuration by its name: ``report["q8_0"]``.

        Raises:
            UnknownNameError: If there is none of this name.
        """
        arms = (*self.candidates, self.reference, *([self.control] if self.control else []), *self.controls)
        named = {arm.name: arm for arm in reversed(arms)}
        if name not in named:
            raise UnknownNameError("configuration", name, named)
        return named[name]

    @property
    def best(self) -> ArmRecord:
        """The recommended candidate.

        Raises:
            UsageError: If none is recommended.
        """
        found = self.recommendation
        if found is None or found.arm is None:
            raise UsageError(f"run {self.run_id} recommends no candidate: print(report) says why")
        return next(arm for arm in self.candidates if arm.name == found.arm)

    @property
    def path(self) -> Path:
        """The folder with the report's files.

        Raises:
            UsageError: If the report was neither read nor written here.
        """
        if self._folder is None:
            raise UsageError(f"report {self.run_id} is in no folder: write() it, or fidelab.load() its run")
        return self._folder

    def positions(self) -> pd.DataFrame:
        """Return one row per scored position and configuration: window, position, KL, margin, confidence.

        Raises:
            UsageError: If the report is in no folder.
            InputError: If the folder has no ``positions.parquet``.
            MissingPackageError: If the extra ``pandas`` is not installed.
        """
        frame: pd.DataFrame = FACES.load("positions")(self.path)
        return frame

    def plot(self) -> Any:
        """Draw KLD with its 95% interval against size, and return the axes of matplotlib.

        Raises:
            UsageError: If no candidate has a KLD.
            MissingPackageError: If the extra ``plot`` is not installed.
        """
        return FACES.load("plot")(self)

    def __eq__(self, other: object) -> bool:
        """Whether all figures are equal, wherever the files are."""
        return isinstance(other, Report) and self.__dict__ == other.__dict__

    def __str__(self) -> str:
        return str(FACES.load("notebook")(self)[0])

    def __repr__(self) -> str:
        """A line; the record itself is thousands of them."""
        found = self.recommendation
        return f"<Report {self.run_id}: {found.arm if found and found.arm else 'nothing'} recommended>"

    def _repr_markdown_(self) -> str:
        """The answer and the figures of the candidates, in a notebook."""
        return str(FACES.load("notebook")(self)[1])

    def _repr_html_(self) -> str:
        """The same with the chart."""
        return str(FACES.load("notebook")(self)[2])

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per arm, reference, control and floor included.  Columns: :mod:`fidelab.results.table`.

        Raises:
            MissingPackageError: If the extra ``pandas`` is not installed.
        """
        frame: pd.DataFrame = FACES.load("pandas")(self)
        return frame

    def to_markdown(self) -> str:
        """Return a section for a model card, in GitHub-flavoured Markdown, without headings."""
        return str(FACES.load("markdown")(self))

    @classmethod
    def from_json(cls, path: str | Path) -> Report:
        """Read a report file of this schema.

        Raises:
            InputError: If the file is unreadable, not JSON, of another schema, or malformed. The message names the
                place.
        """
        path = Path(path)
        try:
            text = read_file(path, _MAX_REPORT_BYTES).decode("utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot read the report: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
        text = _in_this_schema(path, text)
        try:
            report = cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            place = ".".join(str(part) for part in faults[0]["loc"]) or "the report"
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise InputError(f"{path}: {place:.300}: {faults[0]['msg']:.1000}{more}") from error
        report._folder = path.absolute().parent
        return report

    def write(self, path: str | Path) -> Path:
        """Write the file in one step: readers see either the old file or the whole new one.

        Raises:
            OutputError: If the file cannot be written.
        """
        written = write_atomically(path, self.to_json())
        self._folder = Path(path).absolute().parent
        return written

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the output of :meth:`write`."""
        schema = cls.model_json_schema(by_alias=True, mode="serialization")
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
        return {**head, **schema, "title": SCHEMA}


def _in_this_schema(path: Path, text: str) -> str:
    """Return the text if it is the JSON of a report of this schema."""
    try:
        plain = strict_json(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema is None:
        raise InputError(f"{path}: not a fidelab report (it names no schema)")
    if schema != SCHEMA:
        raise InputError(f"{path}: has schema {schema!r}; this fidelab reads {SCHEMA!r}")
    return text


if __name__ == "__main__":
    print(json.dumps(Report.json_schema(), indent=2))
