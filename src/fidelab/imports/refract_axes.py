"""The four axes of a REFRACT report, computed again from what it holds per prompt, cell or chunk.

Each axis gives three values of its score: the file's, that of REFRACT's definition, and that of fidelab
(docs/metrics/). A value that the file does not hold the data for is None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fidelab.axes.base import SCORE
from fidelab.axes.kld import KLD_METRICS
from fidelab.axes.trajectory import TRAJECTORY_METRICS, survival_plot
from fidelab.core import Estimator, Status
from fidelab.imports.json_file import Node, metrics_of
from fidelab.imports.refract_file import RefractFile
from fidelab.imports.write_run import window_blocks
from fidelab.metrics.agreement import (
    PairAgreement,
    exact_match_rate,
    first_divergence,
    median_first_divergence,
    positional_agreement,
    survival_curve,
    trajectory_score,
)
from fidelab.metrics.divergence import kld_score
from fidelab.metrics.drift import LOWEST_CELL, cell_scores, sign_test
from fidelab.metrics.intervals import RatioItems, ratio_estimate, ratio_interval, standard_error
from fidelab.metrics.retrieval import Cells, retrieval_interval, retrieval_score
from fidelab.results.measurement import Definition, Measurement, key_of
from fidelab.results.plots import Grid, Heatmap, Plot, TablePlot

TOPK_BACKENDS = ("vllm", "sglang")
"""Backends through which REFRACT sees only the most likely tokens."""
_ROUNDING = 1e-6  # relative: the files hold doubles, some of them made from figures of seven digits


@dataclass(frozen=True)
class RefractLine:
    """One figure three times: as stated in the file, by REFRACT's definition, and by fidelab's."""

    name: str
    stated: float | str | None
    again: float | str | None
    ours: float | str | None

    @property
    def agrees(self) -> bool | None:
        """Whether the stated figure equals the recomputed one; None if one of the two is missing."""
        if self.stated is None or self.again is None:
            return None
        if isinstance(self.stated, str) or isinstance(self.again, str):
            return self.stated == self.again
        return math.isclose(self.stated, self.again, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


@dataclass(frozen=True)
class RecomputedAxis:
    """One axis: its record, its lines (the score first), and remarks."""

    record: Measurement
    lines: tuple[RefractLine, ...]
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------- trajectory


def _trajectory(file: RefractFile, axis: Node, seed: int) -> RecomputedAxis:
    """Recompute axis A from each prompt's token ids, or from its prefix and lengths."""
    stated, prompts = file.score("trajectory"), axis["per_prompt"].items()
    n_predict = axis["n_tokens_each"].count()
    known = [_agreement(prompt) for prompt in prompts]
    pairs = [pair for pair in known if pair is not None]
    if not pairs or len(pairs) < len(known):
        reason = "the file holds neither token ids nor prefix lengths of every prompt"
        record = Measurement(status=Status.NOT_MEASURABLE, reason=reason, facts={"n_predict": n_predict})
        return RecomputedAxis(record, (RefractLine("trajectory score", stated, None, None),))
    usable = np.array([not pair.failed for pair in pairs])
    items = RatioItems.of(
        [float(pair.prefix) for pair in pairs], [float(pair.longest) for pair in pairs], np.arange(len(pairs))
    )
    items = RatioItems(items.num[usable], items.den[usable], items.clusters[usable])
    score, refract_score = trajectory_score(pairs), trajectory_score(pairs, compat="refract")
    with_ids = all(prompt["ref_token_ids"].value is not None for prompt in prompts)
    rate, median = exact_match_rate(pairs), median_first_divergence(pairs)
    figures = {
        "score": score,
        "score_ci": ratio_interval(items, seed, transform=_percent, bounds=(0.0, 1.0), proportion=True),
        "exact_match_rate": rate,
        "positional_agreement": positional_agreement(pairs) if with_ids else None,
        "median_first_divergence": median,
        "score_refract": refract_score,
    }
    rows = tuple(
        (prompt["id"].text(), prompt["category"].text(), pair.prefix, pair.ref_length, pair.test_length, text[:120])
        for prompt, pair in zip(prompts, pairs, strict=True)
        for text in (prompt["prompt"].text(),)
    )
    columns = ("prompt", "category", "equal tokens", "reference's tokens", "candidate's tokens", "text")
    record = Measurement(
        status=Status.OK if usable.any() else Status.FAILED,
        reason=None if usable.any() else "no prompt has a token on either side",
        metrics=tuple(metrics_of(figures, TRAJECTORY_METRICS)),
        plots=(
            survival_plot(survival_curve(pairs).tolist()),
            TablePlot(title="Trajectory by prompt", columns=columns, rows=rows),
        ),
        n_items=len(pairs),
        n_failed=int((~usable).sum()),
        facts={"n_predict": n_predict},
    )
    lines = (
        RefractLine("trajectory score", stated, refract_score, score),
        RefractLine("exact match rate", axis["full_match_rate"].number(), rate, rate),
        RefractLine("median first divergence", axis["median_first_divergence"].number(), median, median),
    )
    return RecomputedAxis(record, lines, _contradictions(prompts, pairs))


def _agreement(prompt: Node) -> PairAgreement | None:
    """One prompt, by its token ids; else by its prefix and lengths, from which later matches are not known."""
    ref, test = prompt["ref_token_ids"].token_ids(), prompt["cand_token_ids"].token_ids()
    if ref is not None and test is not None:
        return first_divergence(ref, test)
    prefix, n_ref, n_test = (prompt[name].count() for name in ("prefix_agreement_length", "ref_length", "cand_length"))
    if prefix is None or n_ref is None or n_test is None:
        return None
    if prefix > min(n_ref, n_test):
        raise prompt["prefix_agreement_length"].error(f"at most {min(n_ref, n_test)}, the shorter answer's length")
    return PairAgreement(prefix if prefix < max(n_ref, n_test) else None, prefix, prefix, n_ref, n_test)


def _contradictions(prompts: Sequence[Node], pairs: Sequence[PairAgreement]) -> tuple[str, ...]:
    """A note on prompts whose token ids contradict their stated lengths."""
    wrong = [
        prompt["id"].text() or str(index)
        for index, (prompt, pair) in enumerate(zip(prompts, pairs, strict=True))
        if any(
            stated is not None and stated != found
            for stated, found in (
                (prompt["prefix_agreement_length"].count(), pair.prefix),
                (prompt["ref_length"].count(), pair.ref_length),
                (prompt["cand_length"].count(), pair.test_length),
            )
        )
    ]
    if not wrong:
        return ()
    shown = ", ".join(wrong[:5]) + (" …" if len(wrong) > 5 else "")
    return (f"lengths stated for {len(wrong)} of {len(pairs)} prompts are not those of their token ids: {shown}",)


# -------------------------------------------------------------------------------------------------- kld


def _kld(file: RefractFile, axis: Node, seed: int) -> RecomputedAxis:
    """Recompute axis B from the file's distributions.

    An interval needs values per chunk (``per_chunk``: numbers, or objects with ``mean_kld`` and ``n_positions``).
    """
    stated, mean = file.score("kld"), axis["mean_kld"].number(0.0)
    if mean is None:
        record = Measurement(status=Status.FAILED, reason="the mean KL of the file is not a number")
        return RecomputedAxis(record, (RefractLine("KLD score", stated, None, None),))
    if file.backend.lower() in TOPK_BACKENDS:
        reason = f"REFRACT's {file.backend} backend sees only the most likely tokens, not the full vocabulary"
        record = Measurement(status=Status.NOT_MEASURABLE, reason=f"{reason} (its figure: {mean:.6g} nats)")
        return RecomputedAxis(record, (RefractLine("KLD score", stated, kld_score(mean), None),), notes=(reason,))
    chunks, notes = _chunks(axis, mean)
    bounds = (0.0, math.inf)
    same, rms = axis["same_topp_pct"].number(0.0, 100.0), axis["rms_dp_pct"].number(0.0, 100.0)
    figures = {
        "mean": mean,
        "mean_ci": ratio_interval(chunks, seed, bounds=bounds) if chunks else None,
        "stderr": standard_error(chunks) if chunks else None,
        "top1": None if same is None else same / 100,
        "rms_dp": None if rms is None else rms / 100,
        "score": kld_score(mean),
        "score_ci": ratio_interval(chunks, seed, transform=kld_score, bounds=bounds) if chunks else None,
    }
    record = Measurement(
        status=Status.OK,
        metrics=tuple(metrics_of(figures, KLD_METRICS)),
        n_clusters=len(np.unique(chunks.clusters)) if chunks else None,
        cluster="block" if chunks else "",
        facts={
            "n_clusters": len(np.unique(chunks.clusters)) if chunks else None,
            "estimator": str(Estimator.LOGPROBS) if file.backend != "unknown" else None,
        },
    )
    return RecomputedAxis(record, (RefractLine("KLD score", stated, kld_score(mean), kld_score(mean)),), notes=notes)


def _chunks(axis: Node, mean: float) -> tuple[RatioItems | None, tuple[str, ...]]:
    """KL per chunk as items for an interval, in blocks of adjacent chunks, if they average to the stated mean."""
    entries = axis["per_chunk"].items()
    if not entries:
        return None, ()
    means: list[float] = []
    sizes: list[float] = []
    for entry in entries:
        whole = isinstance(entry.value, dict)
        value = (entry["mean_kld"] if whole else entry).number(0.0)
        size = entry["n_positions"].count() if whole else None
        if value is None:
            return None, ("a chunk's KL is not a number: no interval of the mean KL",)
        means.append(value)
        sizes.append(1.0 if size is None else float(size))
    items = RatioItems.of(np.multiply(means, sizes), sizes, window_blocks(len(means)))
    average = ratio_estimate(items)
    if average is None or not math.isclose(average, mean, rel_tol=1e-3, abs_tol=1e-6):
        return None, (f"the chunks' mean KL is {average}, the file says {mean:g}: no interval of the mean KL",)
    return items, ()


# ------------------------------------------------------------------------------------------------ rniah


def _rniah(file: RefractFile, axis: Node, _seed: int) -> RecomputedAxis:
    """Recompute axis C from its cells.

    fidelab counts the cells in which the reference finds the needle.

    The file holds the hits of each side, not their trials; the exact bound needs only the hits.
    """
    entries = axis["cells"].items()
    known = [
        _Cell(cell["length"].count() or 0, cell["position"].number() or 0.0, cell["n_trials"].count(10_000), ref, test)
        for cell in entries
        for ref, test in ((cell["base_acc"].number(0, 1), cell["cand_acc"].number(0, 1)),)
        if ref is not None and test is not None
    ]
    n_trials = [max(1, cell.n_trials or 1) for cell in known]
    refs, tests = np.array([cell.ref for cell in known]), np.array([cell.test for cell in known])
    base, cand, cell = (np.repeat(values, n_trials) for values in (refs, tests, np.arange(len(known))))
    trials = Cells(base, cand, cell)
    score, refract_score = retrieval_score(trials), retrieval_score(trials, compat="refract")
    counted = all(cell.n_trials for cell in known)
    reason = "the reference finds the needle in no cell" if known else "the file has no cell"
    accuracy = (
        Definition("reference_accuracy", "share", name="reference's accuracy"),
        Definition("candidate_accuracy", "share", name="candidate's accuracy"),
    )
    sides = (values.mean() if known else None for values in (refs, tests))
    record = Measurement(
        status=Status.NOT_MEASURABLE if score is None else Status.OK,
        reason=reason if score is None else None,
        metrics=(
            *([] if score is None else [SCORE(score, retrieval_interval(trials) if counted else None, headline=True)]),
            *(define(side) for define, side in zip(accuracy, sides, strict=True)),
            Definition("informative_cells", "count")((refs > 0).sum()),
        ),
        plots=_cells_plots(known),
        n_items=len(entries),
        n_failed=len(entries) - len(known),
        facts={"needle": axis["needle"].text(), "skipped cells": len(axis["skipped_cells"].items())},
    )
    return RecomputedAxis(record, (RefractLine("R-NIAH score", file.score("rniah"), refract_score, score),))


@dataclass(frozen=True)
class _Cell:
    """Tokens of context, position of the needle (0-1), trials, and each side's share of hits."""

    length: int
    position: float
    n_trials: int | None
    ref: float
    test: float


def _cells_plots(cells: Sequence[_Cell]) -> tuple[Plot, ...]:
    places = {(cell.length, cell.position): (cell.ref, cell.test) for cell in cells}
    if not places:
        return ()
    lengths, depths = sorted({length for length, _ in places}), sorted({at for _, at in places})

    def grid(name: str, pick: Any, signed: bool = False) -> Grid:
        rows = ([places.get((length, at)) for length in lengths] for at in depths)
        values = tuple(tuple(None if cell is None else pick(*cell) for cell in row) for row in rows)
        return Grid(name=name, values=values, signed=signed)

    return (
        Heatmap(
            title="Needle found, by length and position",
            x_label="tokens of context",
            y_label="position of the needle",
            x=tuple(f"{length:g}" for length in lengths),
            y=tuple(f"{at:g}" for at in depths),
            low=0.0,
            high=1.0,
            grids=(
                grid("reference", lambda ref, _test: ref),
                grid("candidate", lambda _ref, test: test),
                grid("difference", lambda ref, test: test - ref, signed=True),
            ),
            note="cells in which the reference finds nothing do not measure the candidate",
        ),
    )


# ------------------------------------------------------------------------------------------------- plad


def _plad(file: RefractFile, axis: Node, seed: int) -> RecomputedAxis:
    """Recompute axis D from each prompt's drifts, with the signed excess and the one-sided score."""
    stated, entries = file.score("plad"), axis["per_prompt"].items()
    drifts = [
        (entry["prompt_id"].text(), entry["perturbation"].text(), ref, test)
        for entry in entries
        for ref, test in ((entry["ref_drift"].number(0, 1), entry["cand_drift"].number(0, 1)),)
        if ref is not None and test is not None
    ]
    if not drifts:
        reason = "the file has no drifts of prompts"
        record = Measurement(status=Status.NOT_MEASURABLE, reason=reason, n_items=len(entries), n_failed=len(entries))
        return RecomputedAxis(record, (RefractLine("PLAD score", stated, None, None),))
    prompts = np.array([prompt for prompt, _, _, _ in drifts])
    excess = np.array([test - ref for _, _, ref, test in drifts])
    cells = cell_scores([ref for _, _, ref, _ in drifts], [test for _, _, _, test in drifts])
    score = RatioItems.of(cells / 100, 1.0, prompts)
    signed = RatioItems.of(excess, 1.0, prompts)
    mean_score = float(cells.mean())
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, (_, kind, _, _) in enumerate(drifts):
        by_kind[kind].append(index)
    kinds = {kind: float(cells[rows].mean()) for kind, rows in by_kind.items()}
    interval = ratio_interval(score, seed, transform=_percent, bounds=(LOWEST_CELL / 100, 1.0), proportion=True)
    drift = Definition("excess_drift", "ratio", "lower")
    rows: list[tuple[str | float, ...]] = []
    for kind, places in by_kind.items():
        refs, tests = [drifts[place][2] for place in places], [drifts[place][3] for place in places]
        rows.append((kind, len(places), float(np.mean(refs)), float(np.mean(tests)), kinds[kind]))
    record = Measurement(
        status=Status.OK,
        metrics=(
            SCORE(mean_score, interval, headline=True),
            drift(excess.mean(), ratio_interval(signed, seed, bounds=(-1.0, 1.0))),
            Definition("sign_test", "p")(sign_test(signed.by_cluster().num)),
            *(Definition(key_of(kind), "points", name=kind)(value) for kind, value in kinds.items()),
        ),
        plots=(
            TablePlot(
                title="Perturbations",
                columns=("perturbation", "prompts", "reference's drift", "candidate's drift", "score"),
                rows=tuple(rows),
                note="drift: edits per token of the answer after a small change of the prompt",
            ),
        ),
        n_items=len(entries),
        n_failed=len(entries) - len(drifts),
    )
    stated_kinds = {kind: node.number() for kind, node in axis["per_perturbation_score"].entries()}
    per_kind = (RefractLine(f"PLAD, {kind}", stated_kinds.get(kind), value, value) for kind, value in kinds.items())
    return RecomputedAxis(record, (RefractLine("PLAD score", stated, mean_score, mean_score), *per_kind))


def _percent(ratio: float) -> float:
    return 100.0 * ratio


_AXES = {"trajectory": _trajectory, "kld": _kld, "rniah": _rniah, "plad": _plad}
AXES = tuple(_AXES)
"""The axes of REFRACT's composite."""


def recompute(file: RefractFile, seed: int) -> dict[str, RecomputedAxis]:
    """Compute every axis that was measured again."""
    return {name: read(file, axis, seed) for name, read in _AXES.items() if (axis := file.axis(name)) is not None}
