"""Result of an axis or a bench for one arm: metrics and plots, all that reports show.

A :class:`Definition` describes a metric where it is defined: its key, name and unit, which side is better, and how
several values become one.  A :class:`Metric` is one value of it.  A :class:`Measurement` is all that one axis or bench
found on one arm.  Tables, charts, data frames, ``check``, baselines and sample sizes read these and know no axis and no
bench by name: those of a third party are treated like built-in ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, StringConstraints, model_validator

from fidelab.metrics.latency import is_steady
from fidelab.results.plots import Plot
from fidelab.results.values import Count, FreeDict, OpenInterval, Outcome, Record

Better = Literal["higher", "lower"]
Unit = Literal["", "nats", "points", "share", "tok/s", "req/s", "ms", "s", "bytes", "tokens", "count", "ratio", "p"]
Limit = Literal["slowdown", "memory", "kld", "score", "none"]
"""Which allowance of a comparison holds; ``none``: any change for the worse counts."""

_LIMITS: Mapping[str, Limit] = {
    **dict.fromkeys(("tok/s", "req/s", "ms", "s"), "slowdown"),
    **{"bytes": "memory", "nats": "kld", "points": "score", "share": "score"},
}

MetricKey = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]*$")]

DECIDING = "kld"
"""The test by whose mean, in nats, configurations are judged and ordered."""

DOMAIN = "domain"
"""Coordinate of metrics over one kind of text."""

Coordinates = dict[str, int | float | str]
"""The shape of work that a metric holds for, by name: ``{"tokens": 512, "batch": 1}``; empty where there is one."""


class Flag(Record):
    """Something that makes a figure doubtful, or that must be known to read it."""

    kind: str
    """A word for programs: ``unsteady``, ``noise``, ``underfilled``, ..."""
    text: str
    """One sentence for people, with figures."""


class Metric(Record):
    """One number, with what is needed to show it and to judge a change of it."""

    key: MetricKey
    """Key by which code looks it up (``confident_flips``).  Unique within a measurement, together with ``cell``."""
    name: str
    """Name in a few words: a column heading, which may change from version to version."""
    value: float | None = None
    """The number; null where it could not be measured."""
    unit: Unit = ""
    """``share`` is 0-1, ``points`` are of a score or percentage, ``p`` a p-value, ``ratio`` has no unit."""
    better: Better | None = None
    """Which side is better; null: neither, a change of it is shown and judges nothing."""
    null_value: float | None = 0.0
    """Value of a configuration that does as well as the reference: 0 for differences and divergences, 1 for ratios.

    An interval wholly on its worse side speaks against the candidate. No interval of a quantity that is never negative
    lies below 0.  null: the quantity compares nothing with the reference."""
    cell: Coordinates = Field(default_factory=dict)
    """The shape of work that it holds for; empty where there is one."""
    ci: OpenInterval | None = None
    """95% interval over items; its upper end is null where nothing bounds it."""
    repeats: tuple[float, ...] = ()
    """Every repeat, where the measurement was repeated.

    ``value`` is their median. Of loads, it is the figure over all their requests; of whole runs (``compare --runs``),
    the first run's.
    """
    limit: Limit | None = None
    """Which allowance holds where two reports are compared; null: the one that follows from the unit."""
    exact: bool = False
    """Has no noise: counts, and bytes of storage."""
    bound: bool = False
    """Only a lower bound of the quantity is known: shown with ≥, and a change of it judges nothing."""
    optional: bool = False
    """Noise alone can make it unmeasurable: its absence is not a loss."""
    banded: bool = False
    """A mean KL that the bands of the verdict judge, as they judge that of test kld."""
    noise: float = 0.0
    """Change that the last bits of the arithmetic may cause, in its own unit."""
    headline: bool = False
    """It stands for its measurement in summaries.  Without such a metric, the first one does."""
    caveat: str = ""
    """Reason why the value alone, without interval and repeats, does not prove a change."""
    rests_on: tuple[str, ...] = ()
    """Tests whose settings it depends on, where these are not its own alone."""
    flags: tuple[Flag, ...] = ()
    """Reasons to doubt it."""
    about: str = ""
    """Definition in one sentence."""

    @property
    def allowance(self) -> Limit:
        """Kind of allowance that applies when two reports are compared."""
        return self.limit if self.limit is not None else _LIMITS.get(self.unit, "none")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval, if both ends are known."""
        if self.ci is None or self.ci[1] is None:
            return None
        return self.ci[0], self.ci[1]

    @property
    def steady(self) -> bool | None:
        """Whether the last three repeats are within 5% of their median; null for fewer than three."""
        return is_steady(self.repeats) if self.repeats else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest repeat; null for fewer than two."""
        return (min(self.repeats), max(self.repeats)) if len(self.repeats) > 1 else None


@dataclass(frozen=True)
class Definition:
    """Definition of a metric, made once by its test or bench.

    Calling the definition makes a :class:`Metric` from a value; a non-finite value becomes null. By default ``name`` is
    the key with spaces for underscores.
    """

    key: str
    unit: Unit = ""
    better: Better | None = None
    about: str = ""
    limit: Limit | None = None
    exact: bool = False
    optional: bool = False
    name: str = ""
    null_value: float | None = 0.0
    banded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.key.replace("_", " "))

    def __call__(
        self,
        value: float | None,
        ci: tuple[float, float | None] | None = None,
        *,
        cell: Coordinates | None = None,
        bound: bool = False,
        headline: bool = False,
        caveat: str = "",
        flags: Sequence[Flag] = (),
        repeats: Sequence[float] = (),
    ) -> Metric:
        """Build the metric of a value that was measured once, or estimated over items with its 95% interval."""
        return Metric(
            **vars(self) | {"better": None if bound else self.better},
            value=None if value is None or not np.isfinite(value) else float(value),
            cell=cell or {},
            ci=ci,
            repeats=tuple(map(float, repeats)),
            bound=bound,
            headline=headline,
            caveat=caveat,
            flags=tuple(flags),
        )

    def repeated(
        self,
        repeats: Sequence[float],
        *,
        cell: Coordinates | None = None,
        headline: bool = False,
        flags: Sequence[Flag] = (),
    ) -> Metric:
        """Build the metric of repeated measurements: their median, with every repeat."""
        return self(float(np.median(repeats)), cell=cell, headline=headline, flags=flags, repeats=repeats)


class Cell(Outcome):
    """Outcome of one shape of work, where there is more than its metrics."""

    at: Coordinates
    """The shape of work, as in :attr:`Metric.cell`."""
    valid: bool = True
    """Whether its metrics may stand in a comparison; ``flags`` say why not."""
    flags: tuple[Flag, ...] = ()
    """Reasons to doubt all its metrics."""
    facts: FreeDict = Field(default_factory=dict)
    """Facts besides metrics: error counts, warm-ups, the server's own report."""


class Measurement(Outcome):
    """Findings of one test or bench on one configuration."""

    title: str = ""
    """The question that it answers, in a few words."""
    metrics: tuple[Metric, ...] = ()
    """Metrics, the most important first."""
    cells: tuple[Cell, ...] = ()
    """Shapes of work that have an outcome or a doubt of their own."""
    plots: tuple[Plot, ...] = ()
    """Plots, in order."""
    flags: tuple[Flag, ...] = ()
    """Flags that concern all its metrics."""
    n_items: Count | None = None
    """Items asked (positions, prompts, questions)."""
    n_failed: Count | None = None
    """Items that a failure made unusable; they are in no metric."""
    n_clusters: Count | None = None
    """Resampling clusters of the usable items: what intervals are computed over."""
    cluster: str = ""
    """The word for one of them: ``document``, ``block``, ``prompt``."""
    summary: str = ""
    """Result of the configuration in a few words, with counts: ``lost 9 of 36``."""
    reference_summary: str = ""
    """The same of the reference: ``finds 36 of 45``."""
    downgrades: tuple[str, ...] = ()
    """Reasons to lower the verdict by one band, a sentence each."""
    fails: tuple[str, ...] = ()
    """Reasons why the output is unusable."""
    reference_faults: tuple[str, ...] = ()
    """Reasons why the reference itself is unusable: with one, nothing that is compared with it is confirmed."""
    facts: FreeDict = Field(default_factory=dict)
    """Words and settings that say how the metrics came about: estimator, context, chat template."""

    @model_validator(mode="after")
    def _unique(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for metric in self.metrics:
            place = metric.key, label(metric.cell)
            if place in seen:
                raise ValueError(f"two metrics have the key {place[0]!r}{f' at {place[1]}' if place[1] else ''}")
            seen.add(place)
        return self

    def metric(self, key: str, cell: Coordinates | None = None) -> Metric | None:
        """Return the metric of a key: of a cell, or the first one."""
        return next((m for m in self.metrics if m.key == key and (cell is None or m.cell == cell)), None)

    def value(self, key: str, cell: Coordinates | None = None) -> float | None:
        """Return the value of a metric, or ``None`` if it is absent."""
        metric = self.metric(key, cell)
        return None if metric is None else metric.value

    def ci(self, key: str, cell: Coordinates | None = None) -> tuple[float, float] | None:
        """Return the 95% interval of a metric, if both ends are known."""
        metric = self.metric(key, cell)
        return None if metric is None else metric.interval

    @property
    def headlines(self) -> tuple[Metric, ...]:
        """Return the metrics that represent this measurement in summaries."""
        return tuple(metric for metric in self.metrics if metric.headline) or self.metrics[:1]

    def shapes(self) -> list[Coordinates]:
        """Return the shapes of work, in the order of the metrics, then those of cells without metrics."""
        cells = (*(metric.cell for metric in self.metrics), *(cell.at for cell in self.cells))
        return list({repr(at): at for at in cells}.values())

    def cell(self, at: Coordinates) -> Cell | None:
        """Return the outcome of a shape of work, if it has one."""
        return next((cell for cell in self.cells if cell.at == at), None)


def key_of(text: str) -> str:
    """Convert the name of another tool's metric to a key: ``p99.9`` → ``p99_9``."""
    return re.sub("[^a-z0-9]+", "_", text.lower()).strip("_") or "metric"


def label(at: Coordinates) -> str:
    """Describe a shape of work in words, such as ``tokens 512, batch 1``; empty if there is only one shape."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in at.items()
    )


def walk(measurements: Mapping[str, Measurement]) -> Iterator[tuple[str, Measurement, Metric]]:
    """Yield (name, measurement, metric) of all named measurements."""
    for name, measurement in measurements.items():
        for metric in measurement.metrics:
            yield name, measurement, metric
