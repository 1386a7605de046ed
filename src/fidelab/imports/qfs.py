"""``fidelab import qfs``: comparison receipts and registry rows of quant-fidelity-suite (malaiwah) as a run of ours.

Read are ``comparison-receipt.json`` (schema ``malaiwah.fidelity-comparison-receipt.v1``) and lines of the registry's
``measurements.jsonl`` (``quant-fidelity-registry/v1``).  Figures, intervals and protocol are kept as the file has them.
Where a receipt has no interval but the mean of each context, the interval is computed by resampling contexts; a
registry row has no contexts, and gets no interval that it does not state.  See docs/metrics.md#imported-results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.axes.kld import KLD_METRICS
from fidelab.core import Status
from fidelab.errors import InputError, MismatchError, UsageError
from fidelab.imports.leave import Imported, Source, kld_verdict, leave_run
from fidelab.imports.upgrade import metrics_of
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.results.measurement import Measurement
from fidelab.results.record import ArmRecord, KVFormats

__all__ = ["import_receipts"]

_RECEIPT, _ROW = "malaiwah.fidelity-comparison-receipt.v1", "quant-fidelity-registry/v1"
_MOST = 256 << 20  # bytes of a file
_PERCENTILES = {"median": "median", "p95": "p95", "p99": "p99", "p99_9": "p999", "max": "max"}
_METRIC, _FORWARD = "mean_tokenwise_kld", "reference_to_candidate"


@dataclass(frozen=True)
class _Result:
    """One comparison: the file's record, and where it stands."""

    where: str
    record: Mapping[str, Any]

    @property
    def reference(self) -> str:
        return _text(_side(self.record, "reference").get("dataset_sha256")) or _text(self.record.get("reference_ref"))

    @property
    def panel(self) -> str:
        panel = _side(self.record, "panel")
        return _text(panel.get("panel_id")) or _text(self.record.get("panel_ref"))

    @property
    def name(self) -> str:
        weights = _side(_side(self.record, "candidate"), "weights")
        said = _text(weights.get("artifact_ref")) or _text(weights.get("repository"))
        return said or _text(self.record.get("artifact_ref")) or _text(_side(self.record, "candidate").get("label"))


def import_receipts(
    files: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    seed: int = 42,
    command: str = "",
) -> Imported:
    """Read receipts or registry rows, a candidate each, and leave a run folder.

    Args:
        names: of the candidates, one per comparison; what the files call them by default.
        seed: of the bootstrap over contexts.

    Raises:
        InputError: a file that is neither, a damaged one, or another metric; the message names the place.
        MismatchError: comparisons with different references or panels.
        UsageError: names that do not fit.
    """
    results = [result for file in files for result in _read(file)]
    labels = list(names) if names is not None else _labels(results)
    if len(labels) != len(results) or len(set(labels)) < len(labels):
        raise UsageError(f"the files hold {len(results)} comparisons: give --name once for each, each another one")
    first = results[0]
    for other in results[1:]:
        for what in ("reference", "panel"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise MismatchError(
                    f"{other.where}: its {what} is {theirs or 'not said'}, that of {first.where} is "
                    f"{ours or 'not said'}: import them one by one"
                )
    arms = [_arm(result, label, seed) for result, label in zip(results, labels, strict=True)]
    facts = {label: _facts(result) for label, result in zip(labels, results, strict=True)}
    source = Source("qfs", facts, facts, {"qfs": {"reference": first.reference, "panel": first.panel}})
    reference = ArmRecord(status=Status.OK, name="reference", **_bare(_side(first.record, "reference")))
    report, folder = leave_run(source, reference, arms, output_dir, command)
    return Imported(report, folder, tuple(note for result in results for note in _notes(result)))


def _read(path: Path) -> list[_Result]:
    try:
        if path.stat().st_size > _MOST:
            raise InputError(f"{path} has more than {_MOST >> 20} MiB: that is no receipt of quant-fidelity-suite")
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no text: name a comparison-receipt.json or a measurements.jsonl") from None
    try:
        records = [("", json.loads(text))]
    except (ValueError, RecursionError):
        records = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    records.append((f", line {number}", json.loads(line)))
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}, line {number} is no JSON ({error})") from None
    results = [_Result(f"{path}{place}", _known(record, f"{path}{place}")) for place, record in records]
    if not results:
        raise InputError(f"{path} is empty")
    return results


def _known(record: Any, where: str) -> Mapping[str, Any]:
    """The record, if it is one that is read here."""
    said = (record.get("schema") or record.get("schema_version")) if isinstance(record, dict) else None
    if said not in (_RECEIPT, _ROW):
        found = f"its schema is {said!r}" if said else "it says no schema"
        raise InputError(f"{where} is no result of quant-fidelity-suite ({found}); read are {_RECEIPT} and {_ROW}")
    metric = _side(record, "metric")
    if metric.get("name") != _METRIC or metric.get("units") != "nats" or metric.get("direction") != _FORWARD:
        raise InputError(
            f"{where} has the metric {metric.get('name')!r} ({metric.get('direction')!r}, {metric.get('units')!r}); "
            f"read is {_METRIC} in nats, {_FORWARD}"
        )
    if _number(metric.get("value")) is None or float(metric["value"]) < 0:
        raise InputError(f"{where}: metric.value {metric.get('value')!r} is no KL divergence")
    return dict(record)


def _labels(results: Sequence[_Result]) -> list[str]:
    labels: list[str] = []
    for result in results:
        name = result.name or "candidate"
        labels.append(name if name not in labels else f"{name} #{len(labels) + 1}")
    return labels


def _arm(result: _Result, label: str, seed: int) -> ArmRecord:
    axis = _kld(result, seed)
    reason = "the file gives neither an interval nor the means of single contexts"
    return ArmRecord(
        status=Status.OK,
        name=label,
        axes={"kld": axis},
        verdict=kld_verdict(axis, reason),
        **_bare(_side(result.record, "candidate"), result),
    )


def _bare(side: Mapping[str, Any], result: _Result | None = None) -> dict[str, Any]:
    weights = _side(side, "weights")
    model = _text(weights.get("repository")) or (_text(result.record.get("model_ref")) if result else "")
    return {
        "engine": "quant-fidelity-suite",
        "model": model or "unstated model",
        "kv": KVFormats(k="unstated", v="unstated"),
    }


def _kld(result: _Result, seed: int) -> Measurement:
    record = result.record
    metric, scope = _side(record, "metric"), _side(record, "measurement_scope")
    percentiles, auxiliary = _side(record, "kl"), _side(record, "auxiliary_metrics")
    figures: dict[str, Any] = {"mean": float(metric["value"])}
    figures |= {ours: _number(percentiles.get(theirs)) for theirs, ours in _PERCENTILES.items()}
    figures["top1"] = _number(record.get("top1_agreement", auxiliary.get("top1_agreement")))
    clusters, unit, interval = _interval(record, seed)
    figures["mean_ci"] = interval
    positions = scope.get("scored_positions")
    return Measurement(
        status=Status.OK,
        title="KL divergence as quant-fidelity-suite recorded it",
        metrics=tuple(metrics_of({key: value for key, value in figures.items() if value is not None}, KLD_METRICS)),
        n_items=positions if isinstance(positions, int) else None,
        n_clusters=clusters,
        cluster=unit,
        facts={"estimator": "logprobs", "n_clusters": clusters},
    )


def _interval(record: Mapping[str, Any], seed: int) -> tuple[int | None, str, tuple[float, float] | None]:
    """Clusters, what one is, and the mean's interval: the file's own, else by contexts, else none."""
    said = _side(record, "uncertainty")
    low, high = (_number(said.get(name)) for name in ("ci95_low", "ci95_high"))
    if low is not None and high is not None and low <= high:
        clusters = said.get("clusters")
        return (
            clusters if isinstance(clusters, int) else None,
            _text(said.get("cluster_unit")) or "cluster",
            (low, high),
        )
    contexts = _contexts(record)
    if len(contexts) < 2:
        return None, "", None
    means, rows = np.array(contexts).T
    items = RatioItems(means * rows, rows, np.arange(len(rows)))
    return len(contexts), "context", ratio_interval(items, seed, bounds=(0.0, math.inf))


def _contexts(record: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Mean KL and scored rows of each context; none unless every context has both."""
    listed = record.get("per_context")
    pairs = [
        (_number(each.get("mean")), _number(each.get("scored_rows")))
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict)
    ]
    whole = [(mean, rows) for mean, rows in pairs if mean is not None and rows is not None and rows > 0]
    return whole if isinstance(listed, list) and len(whole) == len(listed) else []


def _facts(result: _Result) -> dict[str, Any]:
    """The protocol as the file has it."""
    record = result.record
    kept = ("comparison_kind", "estimator", "measurement_scope", "uncertainty", "determinism", "scope_digest")
    comparability = _side(record, "comparability")
    return {
        "file": Path(result.where).name,
        "schema": record.get("schema") or record.get("schema_version"),
        "reference": result.reference,
        "panel": result.panel,
        "comparability": {name: comparability.get(name) for name in ("class", "key", "usable_as_floor")},
        **{name: record[name] for name in kept if record.get(name) is not None},
    }


def _notes(result: _Result) -> Iterator[str]:
    record = result.record
    kind = record.get("comparison_kind")
    if kind not in (None, "measurement"):
        yield f"{result.where}: its comparison_kind is {kind!r}: it compares no candidate with a reference"
    said = _side(record, "uncertainty")
    if _number(said.get("ci95_low")) is None:
        if len(_contexts(record)) > 1:
            yield f"{result.where} states no interval; ours resamples its contexts, as if they were independent texts"
        else:
            yield f"{result.where} states no interval, and no means of contexts from which one could be computed"
    contexts = _contexts(record)
    if contexts:
        pooled = sum(mean * rows for mean, rows in contexts) / sum(rows for _, rows in contexts)
        value = float(_side(record, "metric")["value"])
        if not math.isclose(pooled, value, rel_tol=1e-6, abs_tol=1e-12):
            yield f"{result.where}: its contexts have a mean of {pooled:.6g} nats, its metric says {value:.6g}"
    for each in record.get("disclosures") or ():
        if isinstance(each, dict) and each.get("affects_comparability"):
            yield f"{result.where}: {_text(each.get('code'))}: {_text(each.get('detail'))}"


def _side(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
