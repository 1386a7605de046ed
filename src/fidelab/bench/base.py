"""The bench interface: a bench defines timed questions and turns the answers into metrics and plots.

Each question is put to every arm in turn and repeated with fresh prompts, so that drift of the machine affects all arms
equally; answers before an arm reached a steady state are discarded.  A bench never sees an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fidelab.bench import BENCHES
from fidelab.captures.requests import Request, Timed, Tokens
from fidelab.config.load import validate_as
from fidelab.core import Status
from fidelab.results.measurement import Cell, Coordinates, Flag, Measurement, Metric, label
from fidelab.results.plots import Curve, Plot
from fidelab.results.values import Outcome

Floats = NDArray[np.float64]

_DOUBTFUL = frozenset({"depth", "not-engaged", "inconsistent", "cache"})  # flags: the figure describes something else
_LOG_FROM = 10**1.5  # largest over smallest abscissa, from which the axis is logarithmic


def _several(value: Any) -> Any:
    """Split ``"128,512"`` into a list, and wrap ``512`` in one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value


Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_several), Field(min_length=1)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_several), Field(min_length=1)]


class BenchSettings(BaseModel):
    """Settings that every bench has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repeats: int = Field(default=5, ge=1, description="measured answers to each question")
    seed: int = Field(default=1, ge=0, description="seed of the prompts")


class LiveSettings(BenchSettings):
    """Settings of benches that ask loaded models."""

    batch: Sizes = Field(default=(1,), description="sequences answered together")
    max_warmup: int = Field(default=8, ge=1, description="unmeasured answers at most, until three agree within 5%")
    interleave: Literal["auto", "live", "loads"] = Field(
        default="auto",
        description="live: configurations in turn; loads: repeats spread over loads; auto: live where memory allows",
    )


@dataclass(frozen=True)
class BenchInputs:
    """Source of the prompts.  ``prompts(length, count, seed)`` returns distinct prompts of exact length."""

    prompts: Callable[[int, int, int], tuple[Tokens, ...]]
    max_positions: int | None


@dataclass(frozen=True)
class Question:
    """One shape of work: ``batch`` prompts of ``tokens`` tokens, and ``n`` tokens decoded after the first one.

    It needs ``repeats`` measured answers and up to ``max_warmup`` warm-ups, each with its own prompts. ``impossible``:
    reason why it cannot be asked.
    """

    bench: str
    part: str
    tokens: int
    batch: int
    n: int
    repeats: int
    max_warmup: int
    prompts: tuple[Tokens, ...] = field(repr=False, default=())
    impossible: str = ""

    @classmethod
    def make(cls, inputs: BenchInputs, settings: LiveSettings, bench: str, **shape: Any) -> Question:
        """Build a question with prompts for all answers.

        It is marked as impossible if it exceeds the model's positions.
        """
        shape = {"repeats": settings.repeats, "max_warmup": settings.max_warmup, **shape}
        tokens, n = max(1, shape["tokens"]), shape["n"]  # at depth 0 a prompt still has one token
        limit = inputs.max_positions
        beyond = limit is not None and tokens + n > limit
        impossible = f"{tokens + n} tokens are beyond the model's {limit} positions" if beyond else ""
        wanted = shape["batch"] * (shape["repeats"] + shape["max_warmup"])
        prompts = () if impossible else inputs.prompts(tokens, wanted, settings.seed)
        return cls(bench, prompts=prompts, impossible=impossible, **shape)

    @property
    def name(self) -> str:
        """Name of the captures of this question."""
        return f"{self.bench}.{self.part}"

    def request(self, number: int) -> Timed:
        """Return the request with this number; negative numbers are warm-ups."""
        at = (number if number >= 0 else self.repeats - 1 - number) * self.batch
        settings = tuple(sorted({"tokens": self.tokens, "number": number}.items()))
        prompts = self.prompts[at : at + self.batch]
        return Timed(self.name, prompts, n=self.n, batch=self.batch, settings=settings)


@dataclass(frozen=True)
class Answers:
    """Answers of one arm to one question: ``seconds`` [repeats, 1 + n], or the reason why there are none.

    ``warmups``: largest number of unmeasured answers of any load.  ``ran``: what the engine reported about itself.
    ``facts``: what each answer reports, such as its counts of drafts.
    """

    question: Question
    seconds: Floats | None
    warmups: int = 0
    ran: Mapping[str, Any] = field(default_factory=dict)
    status: Status = Status.OK
    reason: str | None = None
    facts: Sequence[Mapping[str, Any]] = ()

    def at(self, length: str = "tokens") -> Coordinates:
        """Coordinates of this shape of work.  ``length`` is the name of its token count."""
        return {length: self.question.tokens, "batch": self.question.batch}

    def cell(self, at: Coordinates, flags: Sequence[Flag] = (), **facts: Any) -> Cell:
        """Return the outcome of this shape of work."""
        facts = {} if self.seconds is None else {"warmups": self.warmups, **facts}
        return Cell(status=self.status, reason=self.reason, at=at, flags=tuple(flags), facts=facts)


@dataclass(frozen=True)
class Facts:
    """Facts about an arm besides its answers.

    ``weights_bytes``: of the checkpoint.  ``loads``: number of processes over which the repeats are spread; 1 means
    that all arms were asked in turn.  ``starts``: of each fresh process its kind (cold, warm) and seconds by part.
    """

    ran: Mapping[str, Any] = field(default_factory=dict)
    weights_bytes: int = 0
    loads: int = 1
    starts: Sequence[tuple[str, Mapping[str, float]]] = ()


class Bench(ABC):
    """One bench with its settings."""

    name: ClassVar[str]
    title: ClassVar[str]
    Settings: ClassVar[type[BenchSettings]]
    fresh: ClassVar[bool] = False
    """Every repeat in a process of its own."""
    covers: ClassVar[str] = ""
    """What a user wants to know that it answers, as for an axis: ``speed``."""
    first: ClassVar[bool] = False
    """Its questions are put before those of other benches."""
    loads: ClassVar[bool] = False
    """It puts load on a server instead of asking questions."""
    not_on_servers: ClassVar[str] = ""
    """Reason why it cannot measure a server that somebody else started; empty if it can."""

    protocol: ClassVar[tuple[str, ...]] = ()
    """Settings that must agree before two figures of a cell are compared; lists of cells need not."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        """Return the questions, in order."""

    def traffic(self) -> tuple[Request, ...]:
        """Return requests equivalent to the load of :attr:`loads`; used only to estimate time."""
        return ()

    @abstractmethod
    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Measurement:
        """Return the measurement of one arm, from its answers by part."""


# ------------------------------------------------------------------------------------------------ measurements


def unsteady(what: str, steady: bool | None, loads: int) -> tuple[Flag, ...]:
    """Return the flags that warn about unsteady repeats, or repeats over several loads of the model."""
    flags = []
    if steady is False:
        flags.append(Flag(kind="unsteady", text=f"{what}: the last three repeats differ by 5% or more"))
    if loads > 1:
        flags.append(Flag(kind="loads", text=f"{what}: repeats are spread over {loads} loads of the model"))
    return tuple(flags)


def outcome_of(cells: Sequence[Outcome]) -> dict[str, Any]:
    """Return the status and reason of a measurement.

    It is OK if some cell is OK and none failed.  Otherwise it is the outcome of the first bad cell.  Impossible cells
    (longer than the model's positions) do not affect the others.
    """
    failed = next((cell for cell in cells if cell.status is Status.FAILED), None)
    other = failed or next((cell for cell in cells if cell.status is not Status.OK), None)
    if other is None or (failed is None and any(cell.status is Status.OK for cell in cells)):
        return {"status": Status.OK}
    return {"status": other.status, "reason": other.reason}


@dataclass(frozen=True)
class CellResult:
    """One shape of work: how it ended, whether it counts, and its metrics."""

    cell: Cell
    metrics: tuple[Metric, ...] = ()

    def value(self, key: str) -> float | None:
        """Return the value of a metric, or ``None`` if it is absent."""
        return next((metric.value for metric in self.metrics if metric.key == key), None)


def joined(results: Iterable[CellResult], title: str, **more: Any) -> Measurement:
    """Combine the results of all shapes of work.  ``more``: further fields, such as another status."""
    every = list(results)
    cells = tuple(result.cell for result in every)
    metrics = tuple(metric for result in every for metric in result.metrics)
    return Measurement(**{**outcome_of(cells), **more}, title=title, metrics=metrics, cells=cells)


def complete(found: Measurement, heads: Iterable[Metric | None], plots: Iterable[Plot]) -> Measurement:
    """Return the measurement with its plots, and with ``heads`` marked as its headline metrics."""
    marked = {id(head) for head in heads}
    metrics = tuple(m.model_copy(update={"headline": True}) if id(m) in marked else m for m in found.metrics)
    return found.model_copy(update={"metrics": metrics, "plots": tuple(plots)})


def largest(found: Measurement, key: str, length: str = "tokens") -> Metric | None:
    """Return the metric with this key at the largest length of the smallest batch."""
    measured = (metric for metric in found.metrics if metric.key == key and metric.cell)
    return max(measured, key=lambda m: (-float(m.cell["batch"]), float(m.cell[length])), default=None)


def doubt_of(cell: Cell | None) -> str:
    """Return why the figures of a cell do not count; empty if they do."""
    if cell is None:
        return ""
    if cell.status is not Status.OK:
        return cell.reason or cell.status.value
    texts = "; ".join(flag.text for flag in cell.flags if not cell.valid or flag.kind in _DOUBTFUL)
    return texts if cell.valid else texts or "not valid"


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve, with the spread of its ordinate.  ``doubt``: why it does not count."""

    x: float
    y: float
    span: tuple[float, float] | None = None
    doubt: str = ""
    name: str = ""


def curves(series: Mapping[str, Sequence[CurvePoint]], **shape: Any) -> list[Curve]:
    """Return a curve per series; ``shape`` holds the fields that all of them share."""
    above = [point.x for points in series.values() for point in points if point.x > 0]
    log = bool(above) and max(above) / min(above) >= _LOG_FROM
    plotted = []
    for name, unsorted in series.items():
        points = sorted(unsorted, key=lambda point: point.x)
        spans = [point.span or (None, None) for point in points] if any(point.span for point in points) else []
        plotted.append(
            Curve(
                series=name,
                x=tuple(point.x for point in points),
                y=tuple(point.y for point in points),
                low=tuple(low for low, _ in spans),
                high=tuple(high for _, high in spans),
                doubts=tuple(p.doubt for p in points) if any(p.doubt for p in points) else (),
                names=tuple(p.name for p in points) if any(p.name for p in points) else (),
                log_x=log,
                **shape,
            )
        )
    return plotted


def against(
    found: Measurement, metric_key: str, length: str = "tokens", *, scale: float = 1.0, **shape: Any
) -> list[Curve]:
    """Return curves of the metrics with this key against the length, one for each batch size."""
    measured = [metric for metric in found.metrics if metric.key == metric_key and length in metric.cell]
    several = len({metric.cell["batch"] for metric in measured}) > 1
    series: dict[str, list[CurvePoint]] = {}
    for metric in measured:
        if metric.value is not None:
            batch = label({"batch": metric.cell["batch"]}) if several else ""
            span = metric.span and (scale * metric.span[0], scale * metric.span[1])
            point = CurvePoint(
                float(metric.cell[length]), scale * metric.value, span, doubt_of(found.cell(metric.cell))
            )
            series.setdefault(batch, []).append(point)
    return curves(series, **shape)


def load_bench(name: str, values: Mapping[str, object]) -> Bench:
    """Load a bench with its settings.

    Raises:
        UnknownNameError: If there is no such bench.
        ConfigError: If it has no such setting, or the value is invalid.
    """
    cls: type[Bench] = BENCHES.load(name)
    return cls(validate_as(cls.Settings, values, "settings", f"benches.{name}"))
