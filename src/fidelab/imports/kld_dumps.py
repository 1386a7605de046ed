"""``fidelab import kld-dumps``: full-vocabulary log-probabilities that other tools wrote.

A dump is a folder of ``0.safetensors``, ``1.safetensors`` … as a patched server writes them, each with one tensor
``log_probs`` [rows, vocabulary]: the protocol ``sliding``, windows of 2048 tokens every 512, every row scored.  Row r
is the distribution after token r.  See docs/metrics/distributions.md#windows-and-contexts.  Or it is a file that
``llama-perplexity --kl-divergence-base`` wrote. Folders hold no tokens, so Δp of the actual token is not known; and
dumps do not show what ran, so rows that all equal the reference's prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.kld import KLD_METRICS, kl_curve
from fidelab.core import Estimator, Status, usable_cores
from fidelab.core.errors import UsageError
from fidelab.imports.dump_folder import Dump, open_folder, pair_windows
from fidelab.imports.json_file import metrics_of
from fidelab.imports.kld_base import BaseFile, is_base_file
from fidelab.imports.write_run import ImportedArm, Source, labels_of, window_blocks, write_run
from fidelab.metrics.composite import costs_equivalent
from fidelab.metrics.divergence import (
    RowComparison,
    compare_rows,
    kl_by_confidence,
    kl_by_position,
    kld_score,
    summarise_divergences,
    summarise_flips,
    summarise_kl,
)
from fidelab.metrics.intervals import RatioItems, paired_difference, ratio_estimate, ratio_interval, standard_error
from fidelab.results.measurement import Measurement
from fidelab.results.record import ArmRecord, Comparison, Composite
from fidelab.results.verdict import judge

Places = Mapping[str, NDArray[np.int32]]

_CHUNK_VALUES = 1 << 19  # elements of one side at a time: 2 MiB in float32, which a core's cache holds
_LEAST_SCORE = -80.0  # nats below the top: where float32 has nothing left of a probability
_BOUNDS = (0.0, math.inf)
_UNPROVEN = "every row equals the reference's, and dumps cannot prove that anything else ran"


@dataclass(frozen=True)
class _Arm:
    """One test folder against the reference: a row per position."""

    dump: Dump
    rows: RowComparison
    clusters: NDArray[np.int64]

    @property
    def usable(self) -> NDArray[np.bool_]:
        return ~self.rows.failed

    def items(self, among: NDArray[np.bool_] | None = None) -> RatioItems:
        keep = self.usable if among is None else self.usable & among
        return RatioItems.of(self.rows.kl[keep], 1.0, self.clusters[keep])


def import_dumps(
    ref: Path,
    tests: Sequence[Path],
    output_dir: Path,
    *,
    names: Sequence[str] | None = None,
    model: str | None = None,
    stride: int | None = None,
    seed: int = 42,
    command: str = "",
    progress: Callable[[str], None] = lambda _text: None,
) -> ImportedArm:
    """Compare dumps with a reference dump, and write a run folder.

    Args:
        names: of the candidates, one per test; the folders' names by default.
        model: what the report calls the model.
        stride: tokens between the starts of windows; a quarter of the rows by default (512 of 2048).
        seed: of the bootstrap over blocks of adjacent windows, which are no shorter than the windows that overlap.
        progress: called with the folder that is being compared.

    Raises:
        InputError: If something is not a dump, or rows are not log-probabilities.
        MismatchError: If folders have different windows.
        UsageError: If names do not fit, or the reference is also a test.
        OutputError: the run folder cannot be written.
    """
    labels = labels_of(ref, tests, names)
    reference, *dumps = (BaseFile.read(path) if is_base_file(path) else open_folder(path) for path in (ref, *tests))
    for dump in dumps:
        pair_windows(reference, dump)
    n_rows = [reference.shapes[number][0] for number in reference.numbers]
    n_ctx = reference.n_ctx or max(n_rows)
    step = (reference.stride or max(n_rows) // 4) if stride is None else stride
    if step < 1 or step > n_ctx:
        raise UsageError(f"--stride {step} with windows of {n_ctx} rows: from 1 to the rows, or tokens are left out")
    clusters = np.repeat(window_blocks(len(n_rows), math.ceil(n_ctx / step)), n_rows)
    arms = []
    for dump in dumps:
        progress(f"comparing {dump.path} with {ref}: {len(n_rows)} windows")
        rows = RowComparison.concat([compare_window(reference, dump, number) for number in reference.numbers])
        arms.append(_Arm(dump, rows, clusters))
    places = {
        "window": np.repeat(np.asarray(reference.numbers, np.int32), n_rows),
        "position": np.concatenate([reference.first + np.arange(n, dtype=np.int32) for n in n_rows]),
        "n_ctx": np.repeat(np.asarray([reference.n_ctx or n for n in n_rows], np.int32), n_rows),
    }
    bare: dict[str, Any] = {"engine": "unstated engine", "model": model or "unstated model"}
    records = [_record(arm, label, bare, places, seed) for arm, label in zip(arms, labels, strict=True)]
    positions = [(label, _columns(arm, places)) for arm, label in zip(arms, labels, strict=True)]
    report, folder = write_run(
        _source(reference, dumps, labels, step),
        ArmRecord(status=Status.OK, name=ref.resolve().name or "reference", **bare),
        records,
        output_dir,
        command,
        comparisons=tuple(_comparisons(arms, labels, seed)),
        positions=positions,
    )
    return ImportedArm(report, folder, tuple(_notes(reference, arms)))


# ------------------------------------------------------------------------------------------------- rows


def compare_window(ref: Dump, test: Dump, number: int, threads: int | None = None) -> RowComparison:
    """Compare all rows of one window.  The files are mapped; only some rows at a time are in memory as float32.

    ``threads``: all usable cores by default.
    """
    n, vocab = ref.shapes[number]
    first, second = ref.open(number), test.open(number)
    tokens = next((found for dump in (ref, test) if (found := dump.tokens(number)) is not None), None)
    targets = np.full(n, -1) if tokens is None else np.append(tokens, -1)[ref.first + 1 : ref.first + 1 + n]
    step = max(1, _CHUNK_VALUES // max(vocab, test.vocabulary))

    def compared(start: int) -> RowComparison:
        stop = min(start + step, n)
        p, q = first.rows(start, stop), second.rows(start, stop)
        if (unknown := first.unknown(start, stop)) is not None:
            _pool(q, unknown)
        return compare_rows(p, q, targets[start:stop])

    # numpy leaves the interpreter while it computes, so threads help
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        return RowComparison.concat(list(pool.map(compared, range(0, n, step))))


def _pool(scores: NDArray[np.float32], unknown: NDArray[np.bool_]) -> None:
    """Give tokens whose reference is known together alone their mean probability, in place.

    So KL becomes that of the distributions with these tokens as one, which is never above the KL of all of them.
    """
    common = min(scores.shape[1], unknown.shape[1])
    head, unknown = scores[:, :common], unknown[:, :common]
    peak = head.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.exp(head - peak)
        shares *= unknown
        count = np.count_nonzero(unknown, axis=-1)[:, None]
        mean = np.log(shares.sum(axis=-1, keepdims=True, dtype=np.float64) / count)
    np.copyto(head, np.maximum(mean + peak, _LEAST_SCORE).astype(np.float32), where=unknown)


def _columns(arm: _Arm, places: Places) -> dict[str, NDArray[Any]]:
    return {
        **places,
        "kl": arm.rows.kl,
        "top1_agrees": arm.rows.top1,
        "reference_confidence": arm.rows.confidence,
        "margin": arm.rows.margin.astype(np.float32),
    }


# ---------------------------------------------------------------------------------------------- records


def _record(arm: _Arm, label: str, bare: dict[str, Any], places: Places, seed: int) -> ArmRecord:
    axis = _axis(arm, places, seed)
    fields = {"name": label, "axes": {"kld": axis}, **bare}
    if axis.status is Status.IDENTICAL:
        unproven = ArmRecord(status=Status.NOT_ENGAGED, reason=_UNPROVEN, **fields)
        return unproven.model_copy(update={"verdict": judge(unproven)})
    reason = "the windows make a single block: no interval is possible; capture more windows"
    score = axis.value("score")
    composite = None if score is None else Composite(value=score, ci=axis.ci("score"), axes=("kld",))
    record = ArmRecord(status=Status.OK, composite=composite, **fields)
    return record.model_copy(update={"verdict": judge(record, reason=reason)})


def _axis(arm: _Arm, places: Places, seed: int) -> Measurement:
    rows, items = arm.rows, arm.items()
    facts = {"estimator": str(Estimator.LOGPROBS)}
    common: dict[str, Any] = {
        "title": "KL divergence of dumped distributions",
        "n_items": len(rows),
        "n_failed": int(rows.failed.sum()),
    }
    if not arm.usable.any():
        return Measurement(status=Status.FAILED, reason="no row was usable", facts=facts, **common)
    identical = bool((rows.kl == 0.0).all())
    divergences = vars(summarise_divergences(rows, arm.clusters, seed))
    figures = {
        **vars(summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)),
        **vars(summarise_flips(rows, arm.clusters, identical=identical)),
        **{name: value for name, (value, _) in divergences.items()},
        **{f"{name}_ci": interval for name, (_, interval) in divergences.items()},
        "mean_ci": ratio_interval(items, seed, bounds=_BOUNDS),
        "stderr": standard_error(items),
        "score": ratio_estimate(items, kld_score),
        "score_ci": ratio_interval(items, seed, transform=kld_score, bounds=_BOUNDS),
    }
    by_position, by_confidence = kl_by_position(places["position"], rows.kl), kl_by_confidence(rows.confidence, rows.kl)
    return Measurement(
        status=Status.IDENTICAL if identical else Status.OK,
        metrics=tuple(metrics_of(figures, KLD_METRICS)),
        plots=(
            kl_curve("position", by_position.edges, by_position.means),
            kl_curve("confidence", by_confidence.edges, by_confidence.means),
        ),
        n_clusters=len(np.unique(items.clusters)),
        cluster="block",
        facts={
            **facts,
            "n_clusters": len(np.unique(items.clusters)),
            "n_ctx": int(places["n_ctx"][0]) if len(np.unique(places["n_ctx"])) == 1 else None,
        },
        **common,
    )


def _comparisons(arms: Sequence[_Arm], labels: Sequence[str], seed: int) -> Iterator[Comparison]:
    """Candidates in the order of their mean KL, each against the next, by paired difference over common rows."""
    scored = [
        (float(arm.items().num.mean()), label, arm) for arm, label in zip(arms, labels, strict=True) if arm.usable.any()
    ]
    for (_, better, a), (mean, worse, b) in pairwise(sorted(scored, key=lambda entry: entry[0])):
        if not (a.usable & b.usable).any():
            continue
        difference = paired_difference(b.items(a.usable), a.items(b.usable), seed, bounds=_BOUNDS)
        yield Comparison(
            axis="kld",
            better=better,
            worse=worse,
            difference=difference.estimate,
            ci=difference.interval,
            differs=difference.excludes_zero,
            equivalent=costs_equivalent(difference.interval, mean),
        )


def _source(ref: Dump, tests: Sequence[Dump], labels: Sequence[str], stride: int) -> Source:
    facts: dict[str, Any] = {"reference": ref.facts()}
    facts |= {label: dump.facts() for label, dump in zip(labels, tests, strict=True)}
    rows = sorted({shape[0] for shape in ref.shapes.values()})
    protocol = "sliding" if ref.first == 0 else "half"
    settings = {"windows": len(ref.numbers), "rows": rows, "stride": stride, "protocol": protocol}
    key = {"kld": {**settings, "vocabulary": ref.vocabulary, "estimator": str(Estimator.LOGPROBS)}}
    return Source("kld-dumps", facts, {**settings, "folders": facts}, key)


def _notes(ref: Dump, arms: Sequence[_Arm]) -> Iterator[str]:
    broken = int(np.isnan(arms[0].rows.confidence).sum())
    if broken:
        yield f"{broken} rows of the reference itself ({ref.path}) are not finite, and failed for every candidate"
    for dump in (ref, *(arm.dump for arm in arms)):
        if "bfloat16" in dump.kind:
            yield f"{dump.path} keeps log-probabilities in bfloat16: its rounding alone makes about 1e-4 nats"
        if isinstance(dump, BaseFile):
            yield (
                f"{dump.path} keeps tokens 16 nats below the most likely one together alone: of a reference they are "
                "compared as one, so KL is a little low"
            )
        if dump.vocabulary != ref.vocabulary:
            common = min(dump.vocabulary, ref.vocabulary)
            yield (
                f"{dump.path} has {dump.vocabulary} ids, the reference {ref.vocabulary}: cut to the first {common} and "
                "renormalised; dumps cannot show that these ids mean the same"
            )
