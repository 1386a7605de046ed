"""The records of sensitivities: of weights (``fidelab.sensitivity/0``) and of keys and values.

A cell is one group of weights in one format, all others native; its loss is the mean KL from the native model.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.results.numbers import counted
from fidelab.results.record import ExperimentReport
from fidelab.results.values import Count, Outcome, Positive, Record

__all__ = [
    "SCHEMA",
    "Asymmetry",
    "CliffRecord",
    "KVCell",
    "KVPlan",
    "KVSensitivityReport",
    "Loss",
    "Predictor",
    "SensitivityCell",
    "SensitivityReport",
    "WeightPlan",
    "sample_words",
]

SCHEMA: Final = "fidelab.sensitivity/0"


class Loss(Record):
    """What a rounding costs."""

    kld: Positive
    """Mean KL(native‖rounded), nats."""
    kld_interval: tuple[float, float] | None = None
    """95%, over clusters; null with fewer than two."""
    top1: Positive | None = None
    """Share of rows whose most likely token is the same."""
    delta_nll: float | None = None
    """Mean change of the negative log-likelihood of the text, nats."""


class SensitivityCell(Outcome):
    """One group in one format."""

    group: str
    """Pattern that names it: ``model.layers.3.mlp.down_proj``, ``3`` or ``down_proj``."""
    layer: Count | None = None
    """Its layer; null of groups over several."""
    kind: str | None = None
    """Its kind of weight; null of groups over several."""
    format: str
    """The format."""
    parameters: Count
    """Weights that are rounded."""
    bytes: Count
    """What they take in the format."""
    loss: Loss | None = None
    """Null where it was not measured."""


class WeightPlan(Record):
    """A format for every group within a budget, and what it really costs."""

    budget: Count
    """Bytes of all weights of decoder layers, at most."""
    bytes: Count
    """What the plan takes."""
    bits_per_weight: Positive
    """Of these weights."""
    formats: dict[str, str]
    """Group → format; ``native`` is the checkpoint's own."""
    weights: str
    """The same as the option ``weights`` of an arm."""
    predicted: Positive
    """Sum of the losses of its cells, nats."""
    measured_there: Loss
    """What it costs on the windows of the cells: as much as predicted where losses add up."""
    measured: Loss
    """On windows that were not used to choose it."""
    uniform: str | None = None
    """The best on these windows of the single formats that fit the budget; null: none does."""
    uniform_bytes: Count | None = None
    """What that takes."""
    uniform_loss: Loss | None = None
    """What it costs on the same windows."""
    difference: float | None = None
    """Plan minus uniform, nats; below 0 the plan is better."""
    difference_interval: tuple[float, float] | None = None
    """95%, paired by clusters."""
    tensor_types: tuple[str, ...] = ()
    """``--tensor-type`` arguments of llama-quantize, where it has all formats."""


class SensitivityReport(ExperimentReport):
    """Everything that was found."""

    file_name: ClassVar[str] = "sensitivity.json"

    schema_name: Literal["fidelab.sensitivity/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    by: Literal["module", "layer", "kind"]
    """What a group is."""
    windows: Count
    """Windows that the cells were measured on."""
    rows: Count
    """Scored rows of them."""
    documents: Count
    """Documents that the rows are from, over which intervals are resampled."""
    native: Outcome
    """The native model's own answer."""
    native_bytes: Count
    """Bytes of the weights of decoder layers as they are."""
    parameters: Count
    """Of these."""
    cells: tuple[SensitivityCell, ...] = ()
    """In the order of the model, format by format."""
    plan: WeightPlan | None = None
    """Null without a budget."""


# ------------------------------------------------------------------------------------------- keys and values


class KVCell(Outcome):
    """Rounded keys or values of some layers, all else native."""

    place: str
    """``all`` layers, one (``3``), or one head of one (``3.0``)."""
    side: Literal["k", "v", "both"]
    """What is rounded."""
    format: str
    """The format; of calibrated scales ``fp8_e4m3, calibrated on 4 windows``."""
    bits: Count | None = None
    """Its width, of the grid of widths."""
    loss: Loss | None = None
    """Null where it was not measured."""
    nll: float | None = None
    """Negative log-likelihood of the text, nats per token."""
    delta_nll_interval: tuple[float, float] | None = None
    """95% of the loss's ``delta_nll``, over clusters."""


class CliffRecord(Record):
    """Where removing one more bit costs 0.1 nats per token or more."""

    side: Literal["k", "v", "both"]
    """What is rounded."""
    bits: Count | None = None
    """The widest such width; null: none of those measured."""
    interval: tuple[int, int] | None = None
    """95%; 0: none."""


class Asymmetry(Record):
    """ΔPPL with rounded keys over ΔPPL with rounded values."""

    bits: Count
    """The width of both."""
    ratio: float | None = None
    """Null: the values' ΔPPL is within noise."""
    interval: tuple[float, float] | None = None
    """95%."""


class Predictor(Record):
    """How well a number that needs no measurement orders the losses of layers or heads."""

    name: str
    """What is known beforehand."""
    side: Literal["k", "v"]
    """Whose losses it is held against."""
    bits: Count
    """Their width."""
    places: Count
    """Layers or heads."""
    correlation: float | None = None
    """Spearman's; null where something does not vary."""
    interval: tuple[float, float] | None = None
    """95%."""


class KVPlan(Record):
    """Formats of keys and values layer by layer within a budget, and what they really cost."""

    budget: Positive
    """Bits per stored value, scales included, at most."""
    bits_per_value: Positive
    """What the plan takes."""
    rules: str
    """Layer → K/V."""
    predicted: Positive
    """Sum of the losses of its cells, nats."""
    measured_there: Loss
    """What it costs on the windows of the cells: as much as predicted where losses add up."""
    measured: Loss
    """On windows that were not used to choose it."""
    uniform: str | None = None
    """The best on these windows of the single pairs of formats that fit the budget; null: none does."""
    uniform_bits: Positive | None = None
    """What that takes."""
    uniform_loss: Loss | None = None
    """What it costs on the same windows."""
    difference: float | None = None
    """Plan minus uniform, nats; below 0 the plan is better."""
    difference_interval: tuple[float, float] | None = None
    """95%, paired by clusters."""


class KVSensitivityReport(ExperimentReport):
    """What keys and values cost at each width."""

    file_name: ClassVar[str] = "kv-sensitivity.json"

    schema_name: Literal["fidelab.kv-sensitivity/0"] = Field(default="fidelab.kv-sensitivity/0", alias="schema")
    """Name and version of this schema."""
    windows: Count
    """Windows that the cells were measured on."""
    rows: Count
    """Scored rows of them."""
    documents: Count
    """Documents that the rows are from, over which intervals are resampled."""
    native_nll: float | None = None
    """Of the native model, nats per token."""
    cells: tuple[KVCell, ...] = ()
    """Width by width."""
    cliffs: tuple[CliffRecord, ...] = ()
    """Of keys, of values and of both."""
    asymmetries: tuple[Asymmetry, ...] = ()
    """At each width."""
    predictors: tuple[Predictor, ...] = ()
    """Of single layers or heads; empty without cells of these."""
    plan: KVPlan | None = None
    """Null without a budget."""


def sample_words(report: SensitivityReport | KVSensitivityReport) -> str:
    """What figures and intervals rest on: ``8 windows, 4,080 rows of 3 documents; intervals are preliminary``."""
    few = f"; intervals over fewer than {MIN_STUDENTIZED_CLUSTERS} documents are preliminary"
    text = f"{counted(report.windows, 'window')}, {report.rows:,} rows of {counted(report.documents, 'document')}"
    return text + (few if report.documents < MIN_STUDENTIZED_CLUSTERS else "")
