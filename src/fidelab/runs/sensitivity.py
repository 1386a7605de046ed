"""What each group of weights costs in each format, and the plan that costs least within a budget of bytes.

One model is loaded once (engine hf) and answers the same windows under many roundings: only one group is rounded at a
time, all others are native.  Every answer is a capture, found again when the command is repeated.  Every second window
is kept for the plan: it is chosen on the others, and measured there, beside the best single format of that size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fidelab
from fidelab.axes.rows import compare_many
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, Recached, Reweighted
from fidelab.config.load import dump
from fidelab.config.schema import Experiment
from fidelab.core import FormatSpec, Status, digest, parse_bytes, slug
from fidelab.engines.hf.weights import NATIVE, ModelWeight, parse_rules, weights_of
from fidelab.errors import EngineError, InputError, NotSupportedError, UsageError
from fidelab.formats import K_QUANTS
from fidelab.formats.weights import WeightFormat, weight_format
from fidelab.metrics.allocation import allocate
from fidelab.metrics.divergence import RowComparison
from fidelab.metrics.intervals import RatioItems, paired_difference, ratio_interval
from fidelab.results.sensitivity_record import Loss, SensitivityCell, SensitivityReport, WeightPlan
from fidelab.results.store import RunFolder
from fidelab.results.values import Outcome
from fidelab.runs.layer_diff import run_jobs, with_requests
from fidelab.runs.pairing import ArmResult
from fidelab.runs.prepare import Prepared, prepare
from fidelab.runs.runner import Listener, Silent

__all__ = ["Answers", "By", "Rows", "ask", "recipe_of", "sensitivity"]

By = Literal["module", "layer", "kind"]

_AXIS, _CHECK = "sensitivity", "sensitivity-check"
_GROUPS = (16, 32, 64, 128, 256)  # of integer formats that a plan of any size is compared with
_OPEN = 256  # captures that are open at a time
_SAID_EVERY = 30.0  # seconds
_BITS = re.compile(r"(?P<bits>[0-9]*\.?[0-9]+)\s*(bpw|bits?)", re.IGNORECASE)
_LLAMA_CPP = {  # what llama.cpp calls the weights of a layer
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "o_proj": "attn_output",
}
_BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "q4_0")
_GGML = re.compile(r"q[2-8]_([01k])|iq4_nl")


@dataclass(frozen=True)
class _Group:
    """Weights that are rounded together; ``pattern`` names them."""

    pattern: str
    weights: tuple[ModelWeight, ...]

    @property
    def parameters(self) -> int:
        return sum(weight.tensor.numel() for weight in self.weights)

    def nbytes(self, fmt: WeightFormat | None) -> int:
        """Bytes in a format, or as they are."""
        if fmt is None:
            return sum(weight.tensor.nbytes for weight in self.weights)
        return sum(fmt.nbytes(tuple(weight.tensor.shape)) for weight in self.weights)


@dataclass(frozen=True)
class Rows:
    """KL and agreement of all rows of an answer, with the clusters that they belong to."""

    rows: RowComparison
    clusters: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def items(self) -> RatioItems:
        return RatioItems.of(self.rows.kl, np.ones(len(self.rows)), self.clusters)

    @property
    def mean(self) -> float:
        return float(self.rows.kl.mean())

    def loss(self) -> Loss:
        interval = ratio_interval(self.items, bounds=(0.0, float("inf")))
        nll = self.rows.nll_test - self.rows.nll_ref
        return Loss(
            kld=max(0.0, self.mean),
            kld_interval=None if interval is None else (float(interval[0]), float(interval[1])),
            top1=float(self.rows.top1.mean()),
            delta_nll=float(np.nanmean(nll)) if np.isfinite(nll).any() else None,
        )


def sensitivity(
    experiment: Experiment,
    formats: Sequence[str],
    *,
    by: By = "module",
    budget: str | None = None,
    exports: Literal["llama-quantize", "recipe"] | None = None,
    command: str = "",
    listener: Listener | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[SensitivityReport, RunFolder]:
    """Measure every group in every format, and with a budget the plan; the new run folder gets ``sensitivity.json``.

    Args:
        experiment: the model on engine hf; of the axes ``kld``, whose windows and scored rows are taken.
        formats: of weights: ``int4[group=64]``, ``q4_k``.
        by: a group is one weight matrix, all of a layer, or all of one kind.
        exports: refuse formats that this cannot have, before anything runs.
        budget: bytes of the decoder layers' weights: ``80MB``, ``4.5bpw``, or a format, for what that takes everywhere.
        say: gets a line now and then while answers are scored.

    Raises:
        FidelabError: before anything ran.  EngineError: the model came to no answer.
        KeyboardInterrupt: stopped; finished captures are kept and found again.
    """
    if experiment.engine.name != "hf":
        raise NotSupportedError(f"engine {experiment.engine.name} cannot round single weights; leave out --engine")
    specs = _specs(formats)
    if exports == "llama-quantize" and (lacking := [str(spec) for spec in specs if not _GGML.fullmatch(str(spec))]):
        raise UsageError(f"--export: llama-quantize has no {', '.join(lacking)}; it has q4_k, q6_k, q8_0 and others")
    if exports == "recipe" and (len(specs) != 1 or not _scheme(next(iter(specs)))):
        raise UsageError("--export: a recipe has one format beside 16 bits: pass a single --weights of int4 or int8")
    prepared = prepare(experiment, only="reference")
    groups = _groups(str(prepared.settings.reference.path), by)
    limit, named = (None, None) if budget is None else _budget(budget, groups, specs)
    [job] = prepared.plan.jobs
    [asked] = [capture.request for capture in job.captures]
    assert isinstance(asked, Prefill)
    if limit is not None and len(asked.windows) < 2:
        raise UsageError("a plan is chosen on one half of the windows and measured on the other: --windows 2 or more")
    n = len(asked.windows)
    chosen = asked if limit is None else asked.select(range(0, n, 2))
    created = datetime.now(UTC).replace(microsecond=0)
    config = dump(prepared.settings.experiment, {"command": command, "created": created.isoformat()})
    name = slug(f"sensitivity-{Path(experiment.model).name}")
    folder = RunFolder.create(prepared.settings.output_dir, name, f"{config}kind: sensitivity\n")
    texts = {(group.pattern, spec): _text(spec, (group.pattern,)) for spec in specs for group in groups}
    answers = ask(prepared, chosen, _AXIS, [NATIVE, *texts.values()], listener, folder, "cells")
    found = answers.rows([*texts.values()], say)
    cells, losses = [], {}
    for spec, fmt in specs.items():
        for group in groups:
            rows = found[texts[group.pattern, spec]]
            if isinstance(rows, Rows):
                losses[group.pattern, spec] = rows.mean
            cells.append(_cell(group, by, spec, fmt, rows))
    report = SensitivityReport(
        run_id=folder.run_id,
        created=created,
        fidelab_version=fidelab.__version__,
        command=command,
        settings=prepared.settings.experiment.model_dump(mode="json"),
        by=by,
        windows=len(chosen.windows),
        rows=len(chosen.windows) * chosen.n_rows,
        documents=len({unit for units in chosen.units for unit in units}),
        native=Outcome(status=Status.OK),
        native_bytes=sum(group.nbytes(None) for group in groups),
        parameters=sum(group.parameters for group in groups),
        cells=tuple(cells),
    )
    report.write(folder.path)
    if limit is not None:
        held_out = asked.select(range(1, n, 2))
        plan = _plan(prepared, groups, specs, losses, limit, named, chosen, held_out, listener, folder)
        report = report.model_copy(update={"plan": plan})
        report.write(folder.path)
    return report, folder


def _specs(formats: Sequence[str]) -> dict[FormatSpec, WeightFormat]:
    """The formats by their specs.

    Raises:
        UsageError: none, one twice, or one that is native or has patterns; and as ``weight_format``.
    """
    specs: dict[FormatSpec, WeightFormat] = {}
    for text in formats:
        rules = parse_rules(text)
        if len(rules) != 1 or rules[0].only or rules[0].skip or text == NATIVE:
            raise UsageError(f"--weights {text}: name one format, such as int4[group=64]; its weights are chosen here")
        spec = rules[0].format
        if spec in specs:
            raise UsageError(f"--weights {text} is there twice")
        specs[spec] = weight_format(spec)
    if not specs:
        raise UsageError("name the formats of weights: --weights int4[group=64] --weights int8")
    return specs


def _groups(path: str, by: By) -> list[_Group]:
    """The linear weights of decoder layers, grouped; their tensors have shapes and no content.

    Raises:
        NotSupportedError: there are none.
    """
    from fidelab.engines.hf.structure import skeleton

    module = skeleton(path)
    weights = [w for w in weights_of(module, module.config.get_text_config(decoder=True)) if w.usual]
    if not weights:
        raise NotSupportedError(f"{path} has no floating-point linear weights in decoder layers")
    members: dict[str, list[ModelWeight]] = {}
    for weight in weights:
        pattern = {"module": weight.name, "layer": str(weight.layer), "kind": weight.kind}[by]
        members.setdefault(pattern, []).append(weight)
    return [_Group(pattern, tuple(each)) for pattern, each in members.items()]


def _text(spec: FormatSpec, patterns: Sequence[str]) -> str:
    """The option ``weights`` that rounds these groups alone."""
    return str(FormatSpec(spec.name, tuple(sorted((*spec.options, ("only", ",".join(patterns)))))))


def _budget(
    text: str, groups: Sequence[_Group], specs: Mapping[FormatSpec, WeightFormat]
) -> tuple[int, FormatSpec | None]:
    """Bytes that the weights of all groups may take, and the format that says so.

    Raises:
        UsageError: it is no size and no format, or below the smallest possible.
    """
    spec = None
    if match := _BITS.fullmatch(text.strip()):
        limit = float(match["bits"]) * sum(group.parameters for group in groups) / 8
    elif text.strip()[:1].isdigit():
        limit = parse_bytes(text)
    else:
        spec = FormatSpec.parse(text)
        limit = float(_everywhere(spec, groups))
    least = sum(min(group.nbytes(fmt) for fmt in (None, *specs.values())) for group in groups)
    if limit < least:
        raise UsageError(f"--budget {text}: {limit:,.0f} bytes; the smallest of these formats takes {least:,}")
    return int(limit), spec


def _everywhere(spec: FormatSpec, groups: Sequence[_Group]) -> int:
    """Bytes of all groups in one format."""
    fmt = weight_format(spec)
    return sum(group.nbytes(fmt) for group in groups)


def _rivals(
    specs: Sequence[FormatSpec], named: FormatSpec | None, groups: Sequence[_Group], limit: int
) -> dict[FormatSpec, int]:
    """The single formats that a plan has to beat, with their bytes: none takes more than the budget.

    Those that the plan is made of, the one that named the budget, and of a plan of integers or of llama.cpp's formats
    the one of its kind that takes the most of the budget.
    """
    names = {str(spec) for spec in specs}
    if all(name.startswith("int") for name in names):
        kind = [f"int{bits}[group={size}]" for bits in range(2, 9) for size in _GROUPS]
    else:
        of_ggml = ("q8_0", *K_QUANTS) if any(name.endswith("_k") for name in names) else _BLOCKS
        kind = list(of_ggml) if all(_GGML.fullmatch(name) for name in names) else []
    sizes = {spec: _everywhere(spec, groups) for spec in map(FormatSpec.parse, kind)}
    closest = max((spec for spec in sizes if sizes[spec] <= limit), key=lambda spec: sizes[spec], default=None)
    sizes = {spec: _everywhere(spec, groups) for spec in (*specs, named, closest) if spec is not None}
    return {spec: nbytes for spec, nbytes in sizes.items() if nbytes <= limit}


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class Answers:
    """The captures of one set of windows, by the text of their roundings."""

    request: Prefill
    result: ArmResult
    axis: str

    def rows(self, texts: Sequence[str], say: Callable[[str], None] = lambda text: None) -> dict[str, Rows | str]:
        """All rows of each answer against the native one, or why there are none."""
        names = {text: _name(self.axis, text) for text in texts}
        paths = self.result.captures
        found = [text for text, name in names.items() if name in paths]
        answers: dict[str, Rows | str] = {
            text: self.result.failures.get(name) or self.result.reason or "not asked"
            for text, name in names.items()
            if name not in paths
        }
        native, said = Capture(paths[_name(self.axis, NATIVE)]), time.monotonic()
        clusters = np.concatenate([np.asarray(units, dtype=np.int64) for units in self.request.units])
        low, high = self.request.first + 1, self.request.last + 2
        for start in range(0, len(found), _OPEN):
            some = found[start : start + _OPEN]
            captures = [Capture(paths[names[text]]) for text in some]
            parts: list[list[RowComparison]] = []
            for index, window in enumerate(self.request.windows):
                if time.monotonic() - said >= _SAID_EVERY:
                    share = (start + len(some) * index / len(self.request.windows)) / len(found)
                    say(f"scoring {len(found)} answers: {share:.0%}")
                    said = time.monotonic()
                after = list(window[low:high])
                targets = np.array(after + [-1] * (self.request.n_rows - len(after)), dtype=np.int64)
                parts.append(compare_many(native, captures, index, targets))
            for text, each in zip(some, zip(*parts, strict=True), strict=True):
                rows = RowComparison.concat(each)
                failed = int(rows.failed.sum())
                why = f"{failed} of {len(rows)} rows are no distributions"
                answers[text] = why if failed else Rows(rows, clusters)
        return answers


def _name(axis: str, text: str) -> str:
    return f"{axis}.{digest(text)[:10]}"


def ask(
    prepared: Prepared,
    request: Prefill,
    axis: str,
    texts: Sequence[str],
    listener: Listener | None,
    folder: RunFolder,
    log: str,
    kind: type[Reweighted] | type[Recached] = Reweighted,
) -> Answers:
    """Ask one process for all roundings, of weights or of keys and values.

    Raises:
        EngineError: not even the native answer came.
    """
    [job] = prepared.plan.jobs
    requests = [
        kind(
            _name(axis, text),
            request.windows,
            request.first,
            request.last,
            request.units,
            text,
            request.settings,
        )
        for text in texts
    ]
    asked = with_requests(prepared, job, requests)
    [result] = run_jobs(prepared, [asked], listener or Silent(), lambda _role: folder.log(log), folder)
    if _name(axis, NATIVE) not in result.captures:
        reasons = result.reason or "; ".join(dict.fromkeys(result.failures.values()))
        raise EngineError(f"the native model came to no answer: {reasons or 'the engine left no capture'}")
    return Answers(request, result, axis)


def _cell(group: _Group, by: By, spec: FormatSpec, fmt: WeightFormat, rows: Rows | str) -> SensitivityCell:
    first = group.weights[0]
    why = rows if isinstance(rows, str) else None
    return SensitivityCell(
        status=Status.OK if why is None else Status.FAILED,
        reason=why,
        group=group.pattern,
        layer=None if by == "kind" else first.layer,
        kind=None if by == "layer" else first.kind,
        format=str(spec),
        parameters=group.parameters,
        bytes=group.nbytes(fmt),
        loss=None if isinstance(rows, str) else rows.loss(),
    )


# ---------------------------------------------------------------------------------------------------- plan


def _plan(
    prepared: Prepared,
    groups: Sequence[_Group],
    specs: Mapping[FormatSpec, WeightFormat],
    losses: Mapping[tuple[str, FormatSpec], float],
    limit: int,
    named: FormatSpec | None,
    chosen: Prefill,
    held_out: Prefill,
    listener: Listener | None,
    folder: RunFolder,
) -> WeightPlan:
    """Choose, and measure on other windows beside single formats that fit.

    Raises:
        InputError: cells that failed leave no plan within the budget.
    """
    names = [*specs]
    costs = np.array([[0.0, *(losses.get((g.pattern, spec), np.inf) for spec in names)] for g in groups])
    sizes = np.array([[g.nbytes(None), *(g.nbytes(fmt) for fmt in specs.values())] for g in groups], dtype=float)
    try:
        columns = allocate(costs, sizes, limit)
    except ValueError as error:
        raise InputError(f"no plan: {error}") from None
    size = int(sizes[np.arange(len(groups)), columns].sum())
    formats = {g.pattern: NATIVE if not c else str(names[c - 1]) for g, c in zip(groups, columns, strict=True)}
    text = _plan_text(formats, names)
    rivals = _rivals(names, named, groups, limit)
    everywhere = {spec: _text(spec, [g.pattern for g in groups]) for spec in rivals}
    texts = [*dict.fromkeys([NATIVE, text, *everywhere.values()])]
    there = ask(prepared, chosen, _AXIS, [NATIVE, text], listener, folder, "plan").rows([text])[text]
    answers = ask(prepared, held_out, _CHECK, texts, listener, folder, "check").rows([text, *everywhere.values()])
    rows = answers[text]
    if isinstance(rows, str) or isinstance(there, str):
        raise EngineError(f"the plan came to no answer: {rows if isinstance(rows, str) else there}")
    measured = {spec: one for spec, each in everywhere.items() if isinstance(one := answers[each], Rows)}
    best = min(measured, key=lambda spec: measured[spec].mean, default=None)
    difference = None if best is None else paired_difference(rows.items, measured[best].items)
    parameters = sum(group.parameters for group in groups)
    return WeightPlan(
        budget=limit,
        bytes=size,
        bits_per_weight=8 * size / parameters,
        formats=formats,
        weights=text,
        predicted=float(costs[np.arange(len(groups)), columns].sum()),
        measured_there=there.loss(),
        measured=rows.loss(),
        uniform=None if best is None else str(best),
        uniform_bytes=None if best is None else rivals[best],
        uniform_loss=None if best is None else measured[best].loss(),
        difference=None if difference is None else difference.estimate,
        difference_interval=None if difference is None else difference.interval,
        tensor_types=_tensor_types(groups, formats),
    )


def _plan_text(formats: Mapping[str, str], names: Sequence[FormatSpec]) -> str:
    """A plan as the option ``weights``: a rule per format, with the groups that have it."""
    parts = []
    for spec in names:
        if patterns := [pattern for pattern, found in formats.items() if found == str(spec)]:
            parts.append(_text(spec, patterns))
    return "+".join(parts) or NATIVE


def _scheme(spec: FormatSpec) -> dict[str, Any] | None:
    """The scheme of a recipe with this format; ``None``: there is none."""
    options = dict(spec.options)
    if spec.name not in ("int4", "int8") or set(options) - {"group"}:
        return None
    bits = spec.name.removeprefix("int")
    return {"format": f"W{bits}A16", "group": int(options.get("group", 128))}


def recipe_of(plan: WeightPlan) -> dict[str, Any] | None:
    """The plan as a recipe of ``fidelab quantize``: what is native in it is kept; ``None`` with other formats.

    Only plans of single matrices, whose names a recipe can have.
    """
    formats = {name for name in plan.formats.values() if name != NATIVE}
    schemes = [_scheme(FormatSpec.parse(name)) for name in formats]
    if len(schemes) != 1 or schemes[0] is None or any("." not in group for group in plan.formats):
        return None
    kept = [{"pattern": group, "matches": 1} for group, found in plan.formats.items() if found == NATIVE]
    return {"method": "rtn", "scheme": schemes[0], "keep": kept}


def _tensor_types(groups: Sequence[_Group], formats: Mapping[str, str]) -> tuple[str, ...]:
    """Arguments of llama-quantize; none where it lacks a format, or a weight's place in its files is not known."""
    arguments = []
    for group in groups:
        found = formats[group.pattern]
        if found == NATIVE:
            found = "f16"
        elif not _GGML.fullmatch(found):
            return ()
        for weight in group.weights:
            if weight.kind not in _LLAMA_CPP or weight.tensor.ndim != 2:
                return ()
            arguments.append(rf"--tensor-type blk\.{weight.layer}\.{_LLAMA_CPP[weight.kind]}={found}")
    return tuple(arguments)
