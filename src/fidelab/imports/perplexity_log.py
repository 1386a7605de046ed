"""``fidelab import llama-perplexity``: what llama-perplexity printed, with intervals that its own ± cannot give.

Read are the statistics at the end of a log of ``--kl-divergence``, and the final estimate of a plain perplexity run.
The ± that is printed takes positions of one chunk for independent.  The table above the statistics gives running means
after each chunk: their differences are the chunks' own means, from which the mean KL and the mean change of the
negative log-likelihood get intervals by blocks of chunks.  See docs/metrics.md#imported-results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.kld import KLD_METRICS
from fidelab.core import Status
from fidelab.errors import InputError, UsageError
from fidelab.imports.leave import Imported, Source, kld_verdict, leave_run, window_blocks
from fidelab.imports.upgrade import metrics_of
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, KVFormats

__all__ = ["import_logs"]

_MOST = 256 << 20  # bytes of a log
_NUMBER = r"(-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|nan|inf))"
_STATISTIC = re.compile(rf"(?P<name>\S.*?)\s*:\s*{_NUMBER}\s*%?(?:\s*(?:±|\+/-)\s*{_NUMBER})?\s*%?\s*$")
_ROW = re.compile(rf"\s*(\d+)\s+{_NUMBER}(?:\s*±\s*{_NUMBER})?\s+{_NUMBER}(?:\s*±\s*{_NUMBER})?\s+{_NUMBER}(?:\s|$)")
_COMPUTED = re.compile(r"over (\d+) chunks.*?n_ctx\s*=\s*(\d+)")
_FINAL = re.compile(rf"Final estimate: PPL = {_NUMBER} \+/- {_NUMBER}")
_SUMMARY, _TABLE = "Perplexity statistics", "KL Divergence"
_ROUNDING = 5e-6  # of the table's five decimals

_NAMES = {  # of the statistics → of the axis' figures; shares are printed as percentages
    **{"Mean    KLD": "mean", "Median  KLD": "median", "Maximum KLD": "max"},
    **{"90.0%   KLD": "p90", "95.0%   KLD": "p95", "99.0%   KLD": "p99", "99.9%   KLD": "p999"},
}
_SHARES = {"Same top p": "top1", "RMS Δp": "rms_dp"}
_PPL = Definition("perplexity", "", "lower", "Perplexity of the text, as printed.")
_BASE = Definition("reference perplexity", "", None, "Perplexity of the file that was compared with, as printed.")
_RATIO = Definition("ΔNLL", "nats", "lower", "Mean of ln(PPL(Q)/PPL(base)): negative log-likelihood added per token.")
_ERROR = Definition("printed std. error", "", None, "The ± that was printed, which takes positions for independent.")


@dataclass
class _Log:
    """One log: the statistics of its last run, their printed ±, and the table's running means."""

    path: Path
    found: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    running: list[tuple[int, float, float]] = field(default_factory=list)  # chunk, mean KL, mean change of NLL
    chunks: int | None = None
    n_ctx: int | None = None
    runs: int = 0

    @property
    def positions(self) -> int | None:
        """Scored positions: the second half of each chunk but its last token."""
        if self.chunks is None or self.n_ctx is None:
            return None
        return self.chunks * (self.n_ctx - 1 - self.n_ctx // 2)


def import_logs(
    logs: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    seed: int = 42,
    command: str = "",
) -> Imported:
    """Read logs, one per candidate, and leave a run folder.

    Args:
        names: of the candidates, one per log; the files' names by default.
        seed: of the bootstrap.

    Raises:
        InputError: a file that is no such log, or one that ends before its statistics.
        UsageError: names that do not fit.
    """
    labels = list(names) if names is not None else [log.stem for log in logs]
    if len(labels) != len(logs) or len(set(labels)) < len(labels):
        raise UsageError("give --name once per log, in their order, each another one")
    read = [_read(log) for log in logs]
    bare: dict[str, Any] = {
        "engine": "llama-perplexity",
        "model": "unstated model",
        "kv": KVFormats(k="unstated", v="unstated"),
    }
    records = [_record(log, label, bare, seed) for log, label in zip(read, labels, strict=True)]
    facts = {label: _facts(log) for label, log in zip(labels, read, strict=True)}
    key = {"n_ctx": sorted({log.n_ctx or 0 for log in read}), "chunks": sorted({log.chunks or 0 for log in read})}
    source = Source("llama-perplexity", facts, facts, {"llama-perplexity": key})
    reference = ArmRecord(status=Status.OK, name="base", **bare)
    report, folder = leave_run(source, reference, records, output_dir, command)
    return Imported(report, folder, tuple(note for log in read for note in _notes(log)))


def _read(path: Path) -> _Log:
    try:
        if path.stat().st_size > _MOST:
            raise InputError(f"{path} has more than {_MOST >> 20} MiB: that is no log of llama-perplexity")
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    log = _Log(path)
    in_table = in_summary = False
    for line in text.splitlines():
        if match := _COMPUTED.search(line):
            log.chunks, log.n_ctx = int(match[1]), int(match[2])
        elif match := _FINAL.search(line):
            log.found["PPL"], log.errors["PPL"] = float(match[1]), float(match[2])
        elif _TABLE in line and line.lstrip().startswith("chunk"):
            in_table, in_summary, log.running = True, False, []
        elif _SUMMARY in line:
            in_table, in_summary, log.found, log.errors = False, True, {}, {}
            log.runs += 1
        elif in_table and (match := _ROW.match(line)):
            log.running.append((int(match[1]), float(match[6]), float(match[4])))
        elif in_summary and (match := _STATISTIC.match(line)):
            log.found[match["name"]] = float(match[2])
            if match[3] is not None:
                log.errors[match["name"]] = float(match[3])
    if not log.found:
        what = "its table ends before the statistics: the run was cut off" if log.running else "no statistics"
        raise InputError(f"{path} holds {what}; name the output of llama-perplexity, its standard output included")
    return log


def _record(log: _Log, label: str, bare: dict[str, Any], seed: int) -> ArmRecord:
    axes = {}
    if "Mean    KLD" in log.found:
        axes["kld"] = _kld(log, seed)
    axes["perplexity"] = _perplexity(log, seed)
    reason = "the log has no table of chunks, so that nothing is known of the spread between them"
    return ArmRecord(status=Status.OK, name=label, axes=axes, verdict=kld_verdict(axes.get("kld"), reason), **bare)


def _kld(log: _Log, seed: int) -> Measurement:
    figures: dict[str, Any] = {name: log.found[printed] for printed, name in _NAMES.items() if printed in log.found}
    figures |= {name: log.found[printed] / 100 for printed, name in _SHARES.items() if printed in log.found}
    figures["stderr"] = log.errors.get("Mean    KLD")
    clusters, interval = _interval(log, 1, seed)
    figures["mean_ci"] = interval
    return Measurement(
        status=Status.OK,
        title="KL divergence as llama-perplexity printed it",
        metrics=tuple(metrics_of(figures, KLD_METRICS)),
        n_items=log.positions,
        n_clusters=clusters,
        cluster="block",
        facts={"estimator": "logprobs", "n_ctx": log.n_ctx, "n_clusters": clusters},
    )


def _perplexity(log: _Log, seed: int) -> Measurement:
    printed = "Mean PPL(Q)" if "Mean PPL(Q)" in log.found else "PPL"
    clusters, interval = _interval(log, 2, seed)
    return Measurement(
        status=Status.OK,
        title="perplexity as llama-perplexity printed it",
        metrics=(
            _PPL(log.found.get(printed)),
            _ERROR(log.errors.get(printed)),
            _BASE(log.found.get("Mean PPL(base)")),
            _RATIO(log.found.get("Mean ln(PPL(Q)/PPL(base))"), interval, headline=True),
        ),
        n_items=log.positions,
        n_clusters=clusters,
        cluster="block",
        facts={"n_ctx": log.n_ctx},
    )


def _chunk_means(log: _Log, column: int) -> NDArray[np.float64] | None:
    """The means of single chunks from the running ones; ``None`` where the table has not all of them from the first."""
    if [row[0] for row in log.running] != [*range(1, len(log.running) + 1)] or len(log.running) < 2:
        return None
    running = np.array([row[column] for row in log.running])
    sums = running * np.arange(1, len(running) + 1)
    return np.diff(sums, prepend=0.0) if np.isfinite(sums).all() else None


def _interval(log: _Log, column: int, seed: int) -> tuple[int | None, tuple[float, float] | None]:
    """Blocks of chunks, and the interval of a mean over them; none where rounding hides how chunks differ."""
    means = _chunk_means(log, column)
    if means is None:
        return None, None
    blocks = window_blocks(len(means))
    rounding = _ROUNDING * math.sqrt(2 / 3) * len(means)  # of a late chunk's mean: two running means times their number
    if not means.std() > 2 * rounding:
        return None, None
    items = RatioItems.of(means, 1.0, blocks)
    return len(np.unique(blocks)), ratio_interval(items, seed, bounds=(0.0, math.inf) if column == 1 else None)


def _facts(log: _Log) -> dict[str, Any]:
    return {"file": log.path.name, "chunks": log.chunks, "n_ctx": log.n_ctx, "statistics": log.found}


def _notes(log: _Log) -> Iterator[str]:
    if log.runs > 1:
        yield f"{log.path} holds the statistics of {log.runs} runs: the last one was taken"
    if log.running and "Mean    KLD" in log.found:
        last, mean = log.running[-1][1], log.found["Mean    KLD"]
        if abs(last - mean) > 2 * _ROUNDING:
            yield f"{log.path}: the table ends at {last:g} nats, the statistics say {mean:g}: they are not of one run"
    if log.chunks is not None and log.running and len(log.running) != log.chunks:
        yield f"{log.path}: the table has {len(log.running)} of {log.chunks} chunks"
    if not log.running and "Mean    KLD" in log.found:
        yield f"{log.path}: without the table of chunks there is no interval"
    elif log.running and _interval(log, 1, 0)[0] is None:
        yield f"{log.path}: the table's five decimals do not show how its {len(log.running)} chunks differ"
