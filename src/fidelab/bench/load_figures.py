"""Metrics of a load on a server, and the measurement of all loads of one server, with saturation and plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.bench.base import CellResult, CurvePoint, complete, curves, doubt_of, joined
from fidelab.core import Status
from fidelab.metrics.serving import percentiles, saturation
from fidelab.results.measurement import Cell, Coordinates, Definition, Measurement, Metric, key_of, label
from fidelab.results.numbers import format_amount
from fidelab.results.plots import Curve

TITLE = "How fast is it behind its server?"

OUTPUT_RATE = Definition(
    "output_rate", "tok/s", "higher", "Output tokens over the measured part, by the server's usage."
)
TOTAL_RATE = Definition("total_rate", "tok/s", "higher", "Input and output tokens over the measured part.")
COMPLETED_RATE = Definition("completed_rate", "req/s", "higher", "Requests answered whole, over the measured part.")
SERVER_RATE = Definition(
    "server_output_rate", "tok/s", "higher", "Generated tokens as the server counts them.", name="server's output rate"
)
PROMPT_RATE = Definition(
    "prompt_rate",
    "tok/s",
    "higher",
    "Prompt tokens over the time to the first token (p50), with one request in flight.",
)
GOODPUT = Definition("goodput", "req/s", "higher", "Requests that met every target, over the measured part.")
GOOD_REQUESTS = Definition("good_requests", "share", "higher", "Share of all requests sent that met every target.")
FAILED_REQUESTS = Definition("failed_requests", "share", "lower", "Share of all requests sent that failed.")
IN_FLIGHT = Definition("effective_concurrency", "count", None, "Requests in flight, averaged over time.")
ACCEPTANCE = Definition(
    "acceptance_length",
    "tokens",
    "higher",
    "Tokens per verification of drafts, its own one included: 1 + accepted / drafts.",
    limit="slowdown",
)
COUNTED_CONTEXT = Definition("context_counted", "tokens", None, "Mean prompt tokens by the server's usage.")
REQUESTS = Definition("requests", "count", None, "Requests sent in the measured part.")
ERRORS = Definition("errors", "count", None, "Of these, failed.")
_SATURATION = Definition(
    "saturation", "count", None, "Smallest concurrency whose next step adds less than 5% to the output rate."
)

_LATENCIES = {
    "ttft": ("TTFT", "Time to the first token"),
    "tpot": ("TPOT", "(last − first token) / (tokens − 1), per request"),
    "itl": ("ITL", "Gaps between stream events that carry tokens"),
    "e2el": ("E2E", "From sending a request to its last token"),
}
_THRESHOLD = 0.05  # relative gain of the output rate below which one more step of concurrency counts as saturated
_PERCENTILES = (50, 95, 99)
_MIN_BEYOND_PERCENTILE = 10  # values that must lie beyond a percentile if there are no repeats

Values = Mapping[Definition, float | None]


def latency(name: str, part: str) -> Definition:
    """Return the definition of a statistic (``mean``, ``p50`` …) of ``ttft``, ``tpot``, ``itl`` or ``e2el``."""
    word, about = _LATENCIES[name]
    return Definition(key_of(f"{word} {part}"), "ms", "lower", f"{about}; {part}.", name=f"{word} {part}")


def server_median(name: str) -> Definition:
    """Return the definition of the server's own median of a latency, which no comparison uses."""
    word, _ = _LATENCIES[name]
    about = f"{word} by the server's histogram; p50, interpolated in its bucket."
    return Definition(key_of(f"server {word} p50"), "ms", None, about, name=f"server's {word} p50")


@dataclass(frozen=True)
class Latency:
    """Summary in milliseconds over ``n`` requests (``itl``: over gaps between tokens).

    ``server``: the median as the server counts it, or ``None``.
    """

    name: str
    n: int
    mean: float
    percentiles: Mapping[str, float] = field(default_factory=dict)
    server: float | None = None

    @classmethod
    def over(cls, name: str, values: NDArray[np.float64], server: float | None = None) -> Latency:
        """Summarize one value or more; percentiles are interpolated linearly."""
        return cls(name, len(values), float(values.mean()), percentiles(values, _PERCENTILES), server)

    def values(self) -> dict[Definition, float | None]:
        """Return the metrics of this summary, with the server's median behind them."""
        ours = {latency(self.name, part): value for part, value in {"mean": self.mean, **self.percentiles}.items()}
        return {**ours, server_median(self.name): self.server}

    def caveats(self) -> dict[str, str]:
        """Return, for each metric that rests on few values, the key and the number of values."""
        beyond = {f"p{rank}": self.n * (1 - rank / 100) for rank in _PERCENTILES}
        return {
            latency(self.name, part).key: f"{few:.3g} of {self.n} beyond"
            for part, few in beyond.items()
            if few < _MIN_BEYOND_PERCENTILE
        }


def load_at(
    arrival: str, context: int, output: int, concurrency: int | None = None, rate: float | None = None
) -> Coordinates:
    """Return the coordinates of a load; ``None`` as concurrency or rate means no limit."""
    at: Coordinates = {"context": context, "output": output, "arrival": arrival}
    limits = {"concurrency": concurrency, "rate": rate}
    return at | {name: limit for name, limit in limits.items() if limit is not None}


def load_metrics(
    at: Coordinates,
    rates: Values,
    latencies: Sequence[Latency] = (),
    more: Values | None = None,
    repeats: Mapping[str, Sequence[float]] | None = None,
) -> tuple[Metric, ...]:
    """Return the known metrics of one load, in this order; ``repeats``: key → value of each repeat."""
    every, caveats = dict(rates), dict[str, str]()
    for times in latencies:
        every |= times.values()
        caveats |= times.caveats()
    return tuple(
        make(value, cell=at, caveat=caveats.get(make.key, ""), repeats=(repeats or {}).get(make.key, ()))
        for make, value in {**every, **(more or {})}.items()
        if value is not None
    )


def serving_measurement(loads: Sequence[CellResult], facts: Mapping[str, Any], **outcome: Any) -> Measurement:
    """Return the measurement of all loads of one server.

    Its headline is the highest load at the smallest context.  ``facts``: target, model, endpoint, settings.
    ``outcome``: status and reason.
    """
    every = [*loads, *_saturations(loads)]
    measurement = joined(every, TITLE, **{"status": Status.OK, **outcome}, facts=dict(facts))

    def height(metric: Metric) -> tuple[float, ...]:
        load = (float(metric.cell.get(name, 0)) for name in ("concurrency", "rate"))
        return (-float(metric.cell["context"]), *load)

    valid = [load for load in loads if load.cell.valid and load.cell.status is Status.OK]
    rates = [metric for load in valid for metric in load.metrics if metric.key == OUTPUT_RATE.key]
    targets = facts.get("settings", {}).get("goodput", {})
    return complete(measurement, [max(rates, key=height, default=None)], _plots(loads, targets))


_LATE = ("lag", "rate")  # flags of a client that could not keep up

_ANSWER = (  # of one load; the second figure is added in parentheses
    ("{} tok/s{at}", OUTPUT_RATE, None),
    ("first token {} ms", latency("ttft", "p50"), latency("ttft", "p99")),
    ("{} ms per token", latency("tpot", "p50"), None),
)


def answer(found: Measurement) -> str:
    """Return the figures of the highest load: ``702 tok/s at 4 users, first token 6 ms (p99 19), 5.5 ms per token``.

    Where the client itself was late, that comes first.  Empty without a valid load.
    """
    late = [cell for cell in found.cells if any(flag.kind in _LATE for flag in cell.flags)]
    loads = sum("arrival" in cell.at for cell in found.cells)
    text = ""
    if late:
        text = f"The client was late at {len(late)} of {loads} loads: these figures are doubtful. "
    rate = next((metric for metric in found.headlines if metric.key == OUTPUT_RATE.key), None)
    if rate is None:
        return text.strip()
    users, asked = rate.cell.get("concurrency"), rate.cell.get("rate")
    at = f" at {float(asked):g} requests/s" if asked is not None else ""
    if users is not None:
        at = f" at {users} user{'' if users == 1 else 's'}"
    parts = []
    for words, first, second in _ANSWER:
        value = found.value(first.key, rate.cell)
        if value is not None:
            tail = found.value(second.key, rate.cell) if second is not None else None
            parts.append(
                words.format(format_amount(value), at=at)
                + (f" (p99 {format_amount(tail)})" if tail is not None else "")
            )
    return text + ", ".join(parts)


def _saturations(loads: Sequence[CellResult]) -> Iterator[CellResult]:
    """Find for each context and output the load from which more requests no longer pay.

    This needs at least two valid closed-loop cells.
    """
    rates: dict[str, dict[int, float]] = {}
    shapes: dict[str, Coordinates] = {}
    for shape, load in _by_context(loads):
        at, rate = load.cell.at, load.value(OUTPUT_RATE.key)
        if load.cell.valid and at["arrival"] == "closed" and "concurrency" in at and rate:
            shapes[label(shape)] = shape
            rates.setdefault(label(shape), {}).setdefault(int(at["concurrency"]), rate)
    for name, curve in rates.items():
        if len(curve) > 1:
            concurrency, gain = saturation(list(curve), list(curve.values()), _THRESHOLD)
            at = shapes[name]
            cell = Cell(status=Status.OK, at=at, facts={"gain": gain, "threshold": _THRESHOLD})
            yield CellResult(cell, (_SATURATION(concurrency, cell=at),))


def _by_context(loads: Sequence[CellResult]) -> Iterator[tuple[Coordinates, CellResult]]:
    """Label each load by its context, and by its output if that varies."""
    names = ("context", "output") if len({load.cell.at["output"] for load in loads}) > 1 else ("context",)
    for load in loads:
        yield {name: load.cell.at[name] for name in names}, load


# ------------------------------------------------------------------------------------------------------ plots


def _plots(loads: Sequence[CellResult], targets: Mapping[str, float]) -> Iterator[Curve]:
    """Plot rate and latencies against concurrency (closed loop) and request rate (open loop), and rate against
    latency.  Latencies of one context have their p99, and a line at the target of the goodput.
    """
    tpot, ttft, itl = (latency(name, "p50").key for name in ("tpot", "ttft", "itl"))
    figures = (
        ("throughput", "Throughput", "output tok/s", OUTPUT_RATE.key),
        ("ttft", "Time to the first token", "TTFT, ms", ttft),
        ("tpot", "Time per output token", "TPOT, ms", tpot),
        ("itl", "Gap between tokens", "ITL, ms", itl),
    )
    several = len({load.cell.at["context"] for load in loads}) > 1
    opened = [load for load in loads if "rate" in load.cell.at]
    closed = [load for load in loads if "rate" not in load.cell.at]
    for some, suffix, x, word, x_label in (
        (closed, "", "concurrency", "concurrency", "requests at once"),
        (opened, "-rate", "rate", "request rate", "requests asked per second"),
    ):
        for key, what, y_label, y in figures:
            title, series = f"{what} against {word}", _series(some, x, y)
            if key in _LATENCIES:
                if several:
                    y_label = f"{y_label.partition(',')[0]} p50, ms"
                else:
                    tails = _series(some, x, latency(key, "p99").key).values()
                    series = {"p50": [*chain(*series.values())], "p99": [*chain(*tails)]}
                if (target := targets.get(key)) is not None:
                    places = sorted({point.x for points in series.values() for point in points})
                    series[f"target {format_amount(target)} ms"] = [CurvePoint(at, target) for at in places]
            shown = {name: points for name, points in series.items() if points}
            yield from curves(shown, key=f"{key}{suffix}", title=title, x_label=x_label, y_label=y_label)
    yield from curves(
        _by_concurrency(closed) if len({load.cell.at["context"] for load in closed}) > 1 else {},
        key="rate-context",
        title="Output rate against context",
        x_label="prompt tokens",
        y_label="output tok/s",
    )
    first = all(load.value(tpot) is None for load in loads)  # no answer had two tokens
    yield from curves(
        _series(loads, ttft if first else tpot, OUTPUT_RATE.key, named=True),
        key="ttft-throughput" if first else "latency-throughput",
        title="Throughput against latency",
        x_label=f"{'TTFT' if first else 'TPOT'} p50, ms",
        y_label="output tok/s",
        caption="A point per load, named by its requests at once (or per second). Further up is more throughput, "
        "further left less waiting.",
    )


def _by_concurrency(loads: Sequence[CellResult]) -> dict[str, list[CurvePoint]]:
    """Return the output rates of closed loops by concurrency, along the contexts."""
    series: dict[str, list[CurvePoint]] = {}
    for load in loads:
        rate, at = load.value(OUTPUT_RATE.key), load.cell.at
        if rate is not None:
            name = label({"concurrency": at["concurrency"]}) if "concurrency" in at else ""
            series.setdefault(name, []).append(CurvePoint(float(at["context"]), rate, doubt=doubt_of(load.cell)))
    return series


def _series(loads: Sequence[CellResult], x: str, y: str, *, named: bool = False) -> dict[str, list[CurvePoint]]:
    """Return the points by context; ``x`` is a coordinate of the load, or a metric like ``y``."""
    series: dict[str, list[CurvePoint]] = {}
    for shape, load in _by_context(loads):
        at = load.cell.at
        abscissa, value, limit = at.get(x, load.value(x)), load.value(y), at.get("rate", at.get("concurrency"))
        if abscissa is not None and value is not None:
            name = f"{float(limit):g}" if named and limit is not None else ""
            point = CurvePoint(float(abscissa), value, doubt=doubt_of(load.cell), name=name)
            series.setdefault(label(shape), []).append(point)
    return series
