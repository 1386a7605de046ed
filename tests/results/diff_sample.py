"""Reports to compare: one candidate with metrics of axes and benches, and what a comparison says of one metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fidelab.core import Status
from fidelab.results.compare import compare
from fidelab.results.diff_record import Diff, MetricChange, Thresholds
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag, Measurement, Metric
from fidelab.results.record import Composite, Report
from tests.report.sample import candidate, sample_report

KEY = {"kld": {"items": "9f2c", "settings": {"n_ctx": 512}}, "trajectory.raw": {"n_predict": 64}}
COMPOSITE = Composite(value=88.1, ci=(84.2, 91.0), axes=("trajectory", "kld"))
RATE = Definition("rate", "tok/s", "higher")
ISOLATED = Definition("isolated", "tok/s", "higher")
BY_SUBTRACTION = Definition("by_subtraction", "tok/s", "higher", optional=True)
OUTPUT = Definition("output_rate", "tok/s", "higher")
STORED = Definition("kv_bytes_per_token", "bytes", "lower", exact=True, name="KV bytes per token")
PEAK = Definition("peak_host", "bytes", "lower")


def measured(*metrics: Metric, **fields: Any) -> Measurement:
    """What an axis or a bench found."""
    return Measurement(**{"status": Status.OK, "metrics": metrics, **fields})


def load(concurrency: int, rate: float, *, valid: bool = True, **changes: Metric) -> Measurement:
    """One load: rate, latency, tokens per verification; ``changes`` replace metrics by their first word."""
    at: Coordinates = {"context": 1024, "output": 64, "arrival": "closed", "concurrency": concurrency}
    found = {
        "output": OUTPUT(rate, cell=at),
        "TTFT": Definition("ttft_p50", "ms", "lower", name="TTFT p50")(50.5, cell=at),
        "failed": Definition("failed_requests", "share", "lower")(0.05, cell=at),
        "effective": Definition("effective_concurrency", "count")(3.5, cell=at),
        "acceptance": Definition("acceptance_length", "tokens", "higher", limit="slowdown")(2.75, cell=at),
    }
    flags = () if valid else (Flag(kind="depth", text="the server counted 512 tokens"),)
    metrics = {name: metric.model_copy(update={"cell": at}) for name, metric in {**found, **changes}.items()}
    return measured(*metrics.values(), cells=(Cell(status=Status.OK, at=at, valid=valid, flags=flags),))


def joined(*parts: Measurement) -> Measurement:
    """Cells of several loads in one measurement."""
    return measured(
        *(metric for part in parts for metric in part.metrics),
        cells=tuple(cell for part in parts for cell in part.cells),
    )


def decoded(slow: Mapping[Any, float] = {}) -> Measurement:
    """Two depths at two batch sizes; ``slow``: (depth, batch) → factor."""
    metrics = []
    for depth in (0, 1024):
        for batch in (1, 4):
            rates = [100 * batch - depth / 100 + i for i in range(3)]
            at: Coordinates = {"depth": depth, "batch": batch}
            metrics.append(ISOLATED.repeated([slow.get((depth, batch), 1.0) * rate for rate in rates], cell=at))
            metrics.append(BY_SUBTRACTION.repeated(rates, cell=at))
    return measured(*metrics)


def benches(**changes: Measurement) -> dict[str, Measurement]:
    """All kinds of benches."""
    start = Definition("total", "s", "lower")
    return {
        "startup": measured(*(start.repeated((5.5, 5.6, 5.7), cell={"start": kind}) for kind in ("cold", "warm"))),
        "prefill": measured(*(RATE.repeated((700, 710, 720), cell={"tokens": n, "batch": 1}) for n in (512, 2048))),
        "decode": decoded(),
        "memory": measured(STORED(23040), PEAK(23047), PEAK(23051, cell={"tokens": 512, "batch": 1})),
        "serving": joined(load(4, 400.5), load(8, 700.5)),
        **changes,
    }


def run(found: Mapping[str, Measurement] | None = None, **changes: Any) -> Report:
    """A report of one candidate with these benches."""
    fields: dict[str, Any] = {
        "candidates": (candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", benches=found or {}, composite=COMPOSITE),),
        "comparability_key": KEY,
    }
    return sample_report(**{**fields, **changes})


def with_axes(**axes: Measurement) -> Report:
    return run(candidates=(candidate("fp8_e4m3", 0.03, "PASS", 1, "safe", axes=axes),))


def one(diff: Diff, group: str, metric: str, cell: str = "", role: str = "candidate") -> MetricChange:
    [found] = [
        change
        for change in diff.changes
        if (change.role, change.group, change.metric) == (role, group, metric) and cell in change.cell
    ]
    return found


def outcome(was: Report, now: Report, *place: str, **limits: float) -> str:
    return one(compare(was, now, Thresholds.model_validate(limits)), *place).outcome


def decode(*repeats: float, by_subtraction: tuple[float, ...] = ()) -> Report:
    at: Coordinates = {"depth": 1024, "batch": 1}
    other = [BY_SUBTRACTION.repeated(by_subtraction, cell=at)] if by_subtraction else []
    return run({"decode": measured(ISOLATED.repeated(repeats, cell=at), *other)})


def serving(**changes: Any) -> Report:
    return run({"serving": load(4, 400.5, **changes)})
