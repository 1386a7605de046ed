"""What keys and values cost at each width: apart and together, in all layers, in one layer, in one head.

One model is loaded once (engine hf) and answers the same windows under many roundings of its cache; every answer is a
capture, found again when the command is repeated.  See docs/metrics.md#sensitivity-of-keys-and-values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fidelab
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, Recached, Tokens
from fidelab.checkpoints.kv_scales import refuse_unscalable, write_kv_scales
from fidelab.config.load import dump
from fidelab.config.schema import Experiment
from fidelab.core import FormatSpec, Status, slug
from fidelab.engines.hf.weights import NATIVE
from fidelab.errors import EngineError, InputError, NotSupportedError, UsageError
from fidelab.formats import create
from fidelab.metrics.allocation import allocate
from fidelab.metrics.cliff import asymmetry, cliff, rank_correlation
from fidelab.metrics.intervals import RatioItems, paired_difference, ratio_interval
from fidelab.results.sensitivity_record import (
    Asymmetry,
    CliffRecord,
    KVCell,
    KVPlan,
    KVSensitivityReport,
    Predictor,
)
from fidelab.results.store import RunFolder
from fidelab.runs.prepare import Prepared, prepare
from fidelab.runs.runner import Listener
from fidelab.runs.sensitivity import Rows, ask

__all__ = ["Place", "calibrate", "kv_sensitivity"]

Place = Literal["cache", "layer", "head"]
Side = Literal["k", "v", "both"]

_AXIS, _CHECK, _STATISTICS = "kv-sensitivity", "kv-sensitivity-check", "kv-statistics"
_WIDTHS = range(2, 9)
_SIDES: tuple[Side, ...] = ("k", "v", "both")
_CALIBRATED = (1, 4, 16)  # windows
_FP8, _TOP = "fp8_e4m3", 448.0
_PREDICTED = 4  # bits, where that is among the widths


@dataclass(frozen=True)
class _Question:
    """A cell that is asked for: the rules of its request, and what they mean."""

    rules: str
    place: str
    side: Side
    format: str
    bits: int | None = None


@dataclass(frozen=True)
class _Statistics:
    """What one window says of keys and values: arrays by layer."""

    windows: list[dict[str, Any]]
    k_bias: list[float | None]

    @property
    def layers(self) -> list[int]:
        """Layers with keys and values in the cache."""
        return [int(layer) for layer in self.windows[0]["layers"]]

    def heads(self, place: int) -> int:
        """KV heads of the layer at this place of :attr:`layers`."""
        return len(self.windows[0]["k_amax"][place])

    def amax(self, side: str, place: int, windows: int) -> float:
        """The largest magnitude over the first windows."""
        return float(max(max(window[f"{side}_amax"][place]) for window in self.windows[:windows]))


def kv_sensitivity(
    experiment: Experiment,
    bits: Sequence[int],
    *,
    by: Place = "cache",
    group: int = 32,
    budget: float | None = None,
    command: str = "",
    listener: Listener | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[KVSensitivityReport, RunFolder]:
    """Measure the grid; the new run folder gets ``kv-sensitivity.json``.

    Args:
        experiment: the model on engine hf; of the axes ``kld``, whose windows and scored rows are taken.
        bits: widths of symmetric integers, 2 to 8.
        by: besides the whole cache, single layers, or single heads.
        group: values that share a scale.
        budget: bits per stored value, scales included: a plan layer by layer is made and measured on every second
            window, which the cells do not use.

    Raises:
        FidelabError: before anything ran.  EngineError: the model came to no answer.
        KeyboardInterrupt: stopped; finished captures are kept and found again.
    """
    if experiment.engine.name != "hf":
        raise NotSupportedError(f"engine {experiment.engine.name} cannot round single layers; leave out --engine")
    widths = _widths(bits)
    if budget is not None and by != "layer":
        raise UsageError("--budget with --bits is a plan of layers: add --by layer")
    prepared = prepare(experiment, only="reference")
    [job] = prepared.plan.jobs
    [asked] = [capture.request for capture in job.captures]
    assert isinstance(asked, Prefill)
    if budget is not None and len(asked.windows) < 2:
        raise UsageError("a plan is chosen on one half of the windows and measured on the other: --windows 2 or more")
    n = len(asked.windows)
    chosen = asked if budget is None else asked.select(range(0, n, 2))
    created = datetime.now(UTC).replace(microsecond=0)
    config = dump(prepared.settings.experiment, {"command": command, "created": created.isoformat()})
    name = slug(f"kv-sensitivity-{Path(experiment.model).name}")
    folder = RunFolder.create(prepared.settings.output_dir, name, f"{config}kind: kv-sensitivity\n")
    statistics = _statistics(prepared, len(asked.windows[0]), listener, folder)
    questions = [*_grid(widths, group), *_fp8(statistics), *_single(widths, group, by, statistics)]
    texts = [question.rules for question in questions]
    found = ask(prepared, chosen, _AXIS, [NATIVE, *texts], listener, folder, "cells", Recached).rows(texts, say)
    report = KVSensitivityReport(
        run_id=folder.run_id,
        created=created,
        fidelab_version=fidelab.__version__,
        command=command,
        settings=prepared.settings.experiment.model_dump(mode="json"),
        windows=len(chosen.windows),
        rows=len(chosen.windows) * chosen.n_rows,
        documents=len({unit for units in chosen.units for unit in units}),
        native_nll=next((_mean(rows.rows.nll_ref) for rows in found.values() if isinstance(rows, Rows)), None),
        cells=tuple(_cell(question, found[question.rules]) for question in questions),
        cliffs=tuple(_cliff(side, questions, found, prepared.settings.reference.dtype) for side in _SIDES),
        asymmetries=tuple(filter(None, (_asymmetry(width, questions, found) for width in widths))),
        predictors=tuple(_predictors(questions, found, statistics, widths, by)),
    )
    report.write(folder.path)
    if budget is not None:
        held_out = asked.select(range(1, n, 2))
        plan = _plan(prepared, questions, found, statistics, budget, chosen, held_out, listener, folder, group)
        report = report.model_copy(update={"plan": plan})
        report.write(folder.path)
    return report, folder


def calibrate(
    experiment: Experiment, target: Path, *, windows: int = 16, n_ctx: int = 512, listener: Listener | None = None
) -> list[dict[str, float]]:
    """Write a copy of a model with static scales of an FP8 KV cache: ``amax / 448`` over windows of the prompts.

    Returns:
        A row per layer: ``layer``, ``k_amax``, ``v_amax``, ``k_scale``, ``v_scale``.

    Raises:
        FidelabError: before anything ran.  EngineError: the model came to no answer.
        InputError: the prompts are too short, a layer's keys or values are all 0 or not finite.
    """
    prepared = prepare(experiment, only="reference")
    path = str(prepared.settings.reference.path)
    refuse_unscalable(path)
    if target.exists():
        raise UsageError(f"{target} exists; name a folder that does not, nothing is overwritten")
    config = dump(prepared.settings.experiment, {"command": "", "created": datetime.now(UTC).isoformat()})
    folder = RunFolder.create(prepared.settings.output_dir, slug(f"calibrate-{Path(experiment.model).name}"), config)
    found = _statistics(prepared, n_ctx, listener, folder, windows)
    if len(found.windows) < windows:
        raise InputError(
            f"the prompts make {len(found.windows)} windows of {n_ctx} tokens: ask for fewer --windows, or give more "
            "--prompts"
        )
    rows = []
    for place, layer in enumerate(found.layers):
        k, v = (found.amax(side, place, windows) for side in ("k", "v"))
        for side, amax in (("keys", k), ("values", v)):
            if not 0 < amax < float("inf"):
                raise InputError(f"layer {layer}: the largest of its {side} is {amax:g}, which gives no scale")
        rows.append({"layer": layer, "k_amax": k, "v_amax": v, "k_scale": k / _TOP, "v_scale": v / _TOP})
    notes = {
        "method": "static, per tensor: amax / 448",
        "windows": windows,
        "n_ctx": n_ctx,
        "prompts": prepared.settings.experiment.prompts,
        "weights": prepared.settings.reference.weights,
        "fidelab": fidelab.__version__,
        "layers": rows,
    }
    write_kv_scales(path, target, {int(row["layer"]): (row["k_scale"], row["v_scale"]) for row in rows}, notes)
    return rows


def _widths(bits: Sequence[int]) -> list[int]:
    """The widths, widest first.

    Raises:
        UsageError: none, one twice, or one that there is no format for.
    """
    for width in bits:
        if width not in _WIDTHS:
            raise UsageError(f"--bits: {width} is not one of {', '.join(map(str, reversed(_WIDTHS)))}")
    if not bits or len({*bits}) != len(bits):
        raise UsageError("--bits: name each width once: 8,7,6,5,4,3,2")
    return sorted(bits, reverse=True)


# ------------------------------------------------------------------------------------------------- cells


def _pair(side: Side, fmt: str) -> str:
    return {"k": f"{fmt}/{NATIVE}", "v": f"{NATIVE}/{fmt}", "both": f"{fmt}/{fmt}"}[side]


def _int(width: int, group: int) -> str:
    return f"int{width}" if group == 32 else f"int{width}[group={group}]"


def _grid(widths: Sequence[int], group: int) -> list[_Question]:
    """All layers at each width: keys, values, both."""
    create(FormatSpec.parse(_int(widths[0], group)))
    return [
        _Question(f"*:{_pair(side, _int(width, group))}", "all", side, _int(width, group), width)
        for width in widths
        for side in _SIDES
    ]


def _fp8(statistics: _Statistics) -> list[_Question]:
    """FP8 of keys and of values: without scales, with one per token and head, with calibrated ones per tensor."""
    questions = []
    sides: tuple[Side, ...] = ("k", "v")
    for side in sides:
        for fmt in (_FP8, f"{_FP8}[scale=per-token-head]"):
            questions.append(_Question(f"*:{_pair(side, fmt)}", "all", side, fmt))
        for windows in sorted({min(windows, len(statistics.windows)) for windows in _CALIBRATED}):
            rules = []
            for place, layer in enumerate(statistics.layers):
                scale = statistics.amax(side, place, windows) / _TOP
                rules.append(f"{layer}:{_pair(side, f'{_FP8}[scale={scale:.9g}]' if scale > 0 else _FP8)}")
            name = f"{_FP8}, calibrated on {windows} window{'s' if windows > 1 else ''}"
            questions.append(_Question(";".join(rules), "all", side, name))
    return questions


def _single(widths: Sequence[int], group: int, by: Place, statistics: _Statistics) -> list[_Question]:
    """One layer, or one head, at a time."""
    if by == "cache":
        return []
    places = [
        [str(layer)] if by == "layer" else [f"{layer}.{head}" for head in range(statistics.heads(number))]
        for number, layer in enumerate(statistics.layers)
    ]
    sides: tuple[Side, ...] = ("k", "v")
    return [
        _Question(f"{place}:{_pair(side, _int(width, group))}", place, side, _int(width, group), width)
        for width in widths
        for side in sides
        for place in (one for layer in places for one in layer)
    ]


def _statistics(
    prepared: Prepared, n_ctx: int, listener: Listener | None, folder: RunFolder, most: int = max(_CALIBRATED)
) -> _Statistics:
    """Magnitudes of keys and values over windows of the prompts, which are another text than the one that is scored.

    Raises:
        EngineError: the model came to no answer, or keeps no keys and values.
    """
    tokenizer, prompts = prepared.inputs.tokenizer, prepared.inputs.prompts
    ids: list[int] = []
    for prompt in prompts:
        ids += tokenizer.chat(prompt.messages, "chat", prompt.tools)
        if len(ids) >= n_ctx * most:
            break
    starts = range(0, max(len(ids) - n_ctx, 0) + 1, n_ctx)
    windows: tuple[Tokens, ...] = tuple(tuple(ids[at : at + n_ctx]) for at in starts)[:most]
    last = len(windows[0]) - 1
    request = Prefill(_STATISTICS, windows, last, last, tuple((i,) for i in range(len(windows))))
    answers = ask(prepared, request, _STATISTICS, [NATIVE], listener, folder, "statistics", Recached)
    [path] = answers.result.captures.values()
    facts = Capture(path).manifest["facts"]
    found = facts.get("statistics")
    if not found or not found[0]["layers"]:
        raise EngineError("the model wrote no keys and values into its cache")
    return _Statistics(found, facts["k_bias"])


def _cell(question: _Question, rows: Rows | str) -> KVCell:
    why = rows if isinstance(rows, str) else None
    loss, nll, interval = None, None, None
    if isinstance(rows, Rows):
        loss, nll = rows.loss(), _mean(rows.rows.nll_test)
        known = np.isfinite(rows.rows.nll_test - rows.rows.nll_ref)
        changes = (rows.rows.nll_test - rows.rows.nll_ref)[known]
        if len(changes):
            interval = ratio_interval(RatioItems.of(changes, np.ones(len(changes)), rows.clusters[known]))
    return KVCell(
        status=Status.OK if why is None else Status.FAILED,
        reason=why,
        place=question.place,
        side=question.side,
        format=question.format,
        bits=question.bits,
        loss=loss,
        nll=nll,
        delta_nll_interval=interval,
    )


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _whole(side: Side, questions: Sequence[_Question], found: dict[str, Rows | str]) -> dict[int, Rows]:
    """Width → rows, of the whole cache."""
    return {
        question.bits: rows
        for question in questions
        if question.bits is not None and question.place == "all" and question.side == side
        if isinstance(rows := found[question.rules], Rows)
    }


def _cliff(side: Side, questions: Sequence[_Question], found: dict[str, Rows | str], dtype: str) -> CliffRecord:
    whole = _whole(side, questions, found)
    if not whole:
        return CliffRecord(side=side)
    losses = np.stack([rows.rows.nll_test - rows.rows.nll_ref for rows in whole.values()])
    clusters = next(iter(whole.values())).clusters
    result = cliff([*whole], losses, clusters, native=32 if dtype == "float32" else 16)
    return CliffRecord(side=side, bits=result.bits, interval=result.interval)


def _asymmetry(width: int, questions: Sequence[_Question], found: dict[str, Rows | str]) -> Asymmetry | None:
    k, v = _whole("k", questions, found).get(width), _whole("v", questions, found).get(width)
    if k is None or v is None:
        return None
    ratio = asymmetry(k.rows.nll_ref, k.rows.nll_test, v.rows.nll_test, k.clusters)
    return Asymmetry(bits=width, ratio=ratio and ratio[0], interval=ratio and ratio[1])


def _predictors(
    questions: Sequence[_Question],
    found: dict[str, Rows | str],
    statistics: _Statistics,
    widths: Sequence[int],
    by: Place,
) -> list[Predictor]:
    """Rank correlations of one window's statistics, and of biases, with the KL of single layers or heads."""
    if by == "cache":
        return []
    width = _PREDICTED if _PREDICTED in widths else widths[len(widths) // 2]
    first, known = statistics.windows[0], dict[str, dict[str, float]]()
    for number, layer in enumerate(statistics.layers):
        for name, key in (("amax of K", "k_amax"), ("channel kurtosis of K", "k_kurtosis"), ("amax of V", "v_amax")):
            values = first[key][number]
            heads = {str(layer): max(values)} if by == "layer" else {f"{layer}.{h}": x for h, x in enumerate(values)}
            known.setdefault(name, {}).update(heads)
        bias = statistics.k_bias[layer] if layer < len(statistics.k_bias) else None
        if bias is not None and by == "layer":
            known.setdefault("largest bias of K", {})[str(layer)] = bias
    predictors = []
    for name, values in known.items():
        side: Literal["k", "v"] = "v" if name.endswith("V") else "k"
        pairs = [
            (values[question.place], rows.mean)
            for question in questions
            if (question.side, question.bits) == (side, width) and question.place in values
            if isinstance(rows := found[question.rules], Rows)
        ]
        result = rank_correlation([x for x, _ in pairs], [y for _, y in pairs])
        predictors.append(
            Predictor(
                name=name,
                side=side,
                bits=width,
                places=len(pairs),
                correlation=result and result[0],
                interval=result and result[1],
            )
        )
    return predictors


# -------------------------------------------------------------------------------------------------- plan


def _plan(
    prepared: Prepared,
    questions: Sequence[_Question],
    found: dict[str, Rows | str],
    statistics: _Statistics,
    budget: float,
    chosen: Prefill,
    held_out: Prefill,
    listener: Listener | None,
    folder: RunFolder,
    group: int,
) -> KVPlan:
    """Choose a width for keys and values of each layer, and measure that beside single pairs that fit.

    Raises:
        InputError: nothing fits the budget.
    """
    widths = sorted({question.bits for question in questions if question.bits is not None}, reverse=True)
    sides: tuple[Side, ...] = ("k", "v")
    groups = [(number, layer, side) for number, layer in enumerate(statistics.layers) for side in sides]
    losses = {
        (question.place, question.side, question.bits): rows.mean
        for question in questions
        if question.place != "all" and isinstance(rows := found[question.rules], Rows)
    }
    dims = statistics.windows[0]["head_dim"]
    values = [statistics.heads(number) * dims[number][side == "v"] for number, _, side in groups]
    wide = 8 * {"float32": 4}.get(prepared.settings.reference.dtype, 2)

    def size(width: int | None, number: int, side: str) -> float:
        """Bits of one token of a layer's side."""
        dim, heads = dims[number][side == "v"], statistics.heads(number)
        if width is None:
            return float(heads * dim * wide)
        return 8.0 * heads * create(FormatSpec.parse(_int(width, group))).packed_token_bytes(dim)

    choices = [None, *widths]
    sizes = np.array([[size(width, number, side) for width in choices] for number, _, side in groups])
    costs = np.array(
        [
            [0.0 if width is None else losses.get((str(layer), side, width), np.inf) for width in choices]
            for _, layer, side in groups
        ]
    )
    total = float(sum(values))
    try:
        columns = allocate(costs, sizes, budget * total)
    except ValueError:
        least = sizes.min(axis=1).sum() / total
        raise InputError(
            f"--budget {budget:g}: bits per value; the smallest of these widths takes {least:.3g}"
        ) from None
    picked = {(layer, side): choices[c] for (_, layer, side), c in zip(groups, columns, strict=True)}
    names = {None: NATIVE} | {width: _int(width, group) for width in widths}
    rules = ";".join(f"{layer}:{names[picked[layer, 'k']]}/{names[picked[layer, 'v']]}" for layer in statistics.layers)
    pairs = {
        f"{names[k]}/{names[v]}": sum(size(k if side == "k" else v, number, side) for number, _, side in groups) / total
        for k in choices
        for v in choices
    }
    fitting = {pair: bits for pair, bits in pairs.items() if bits <= budget and pair != f"{NATIVE}/{NATIVE}"}
    best = sorted(fitting, key=lambda pair: -fitting[pair])[:_RIVALS]
    texts = [rules, *(f"*:{pair}" for pair in best)]
    there = ask(prepared, chosen, _AXIS, [NATIVE, rules], listener, folder, "plan", Recached).rows([rules])[rules]
    answers = ask(prepared, held_out, _CHECK, [NATIVE, *texts], listener, folder, "check", Recached).rows(texts)
    rows = answers[rules]
    if isinstance(rows, str) or isinstance(there, str):
        raise EngineError(f"the plan came to no answer: {rows if isinstance(rows, str) else there}")
    measured = {pair: one for pair in best if isinstance(one := answers[f"*:{pair}"], Rows)}
    uniform = min(measured, key=lambda pair: measured[pair].mean, default=None)
    difference = None if uniform is None else paired_difference(rows.items, measured[uniform].items)
    return KVPlan(
        budget=budget,
        bits_per_value=float(sizes[np.arange(len(groups)), columns].sum()) / total,
        rules=rules,
        predicted=float(costs[np.arange(len(groups)), columns].sum()),
        measured_there=there.loss(),
        measured=rows.loss(),
        uniform=uniform,
        uniform_bits=None if uniform is None else fitting[uniform],
        uniform_loss=None if uniform is None else measured[uniform].loss(),
        difference=None if difference is None else difference.estimate,
        difference_interval=None if difference is None else difference.interval,
    )


_RIVALS = 6  # pairs of formats that a plan has to beat: those that take the most of the budget
