"""Measure the loss of each group of weights in each format, and choose the best plan within a budget of bytes.

See docs/metrics/causes.md#weight-sensitivity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fidelab.captures.requests import RoundedWeights
from fidelab.config.schema import Experiment
from fidelab.core import FormatSpec
from fidelab.core.amounts import parse_bytes
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.engines.base import engine_class
from fidelab.engines.hf.weights import NATIVE, ModelWeight, parse_rules, weights_of
from fidelab.formats import K_QUANTS
from fidelab.formats.weights import WeightFormat, weight_format
from fidelab.plan.prepare import prepare
from fidelab.results.measurement import Definition, Metric
from fidelab.results.numbers import format_kld, public_name
from fidelab.results.plots import Heatmap
from fidelab.results.store import RunFolder
from fidelab.results.study import Study, StudyRow
from fidelab.run.runner import Listener
from fidelab.studies.roundings import KLD, Cell, Choices, Found, Question, Say, heatmap, measure, windows_of
from fidelab.studies.study import OpenStudy

By = Literal["module", "layer", "kind"]

BYTES = Definition("bytes", "bytes", "lower", "what the group takes in the format", exact=True)
PARAMETERS = Definition("parameters", "count", None, "weights that are rounded", exact=True)
_TABLE_ROWS = 15  # rows in the terminal
_GROUP_SIZES = (16, 32, 64, 128, 256)  # of integer formats that a plan of any size is compared with
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_BITS = re.compile(r"(?P<bits>[0-9]*\.?[0-9]+)\s*(bpw|bits?)", re.IGNORECASE)
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
class _Weights(Question):
    """The question: every group in every format."""

    kind = "sensitivity"
    request = RoundedWeights
    columns = ("group", "format", "kld", "top1", "bytes")
    groups: Sequence[_Group]
    specs: Mapping[FormatSpec, WeightFormat]

    @property
    def cells(self) -> list[Cell]:
        """Return the cells by format, in the order of the model's layers."""
        return [
            Cell(
                _text(spec, (group.pattern,)),
                {
                    "group": group.pattern,
                    **({} if self.by == "kind" else {"layer": group.weights[0].layer or 0}),
                    **({} if self.by == "layer" else {"kind": group.weights[0].kind}),
                    "format": str(spec),
                },
                (BYTES(group.nbytes(fmt)), PARAMETERS(group.parameters)),
            )
            for spec, fmt in self.specs.items()
            for group in self.groups
        ]

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    def facts(self, _found: Found) -> dict[str, Any]:
        return {"native_bytes": sum(group.nbytes(None) for group in self.groups), "parameters": self.parameters}

    def findings(self, found: Found) -> tuple[Metric, ...]:
        """Return the losses of all groups added up, by format."""
        sums: dict[str, float] = {}
        for cell in self.cells:
            if not isinstance(rows := found[cell.text], str):
                name = str(cell.at["format"])
                sums[name] = sums.get(name, 0.0) + max(0.0, rows.mean)
        return tuple(KLD(total, cell={"format": name}) for name, total in sums.items())

    def sentences(self, _rows: Sequence[StudyRow], findings: Sequence[Metric]) -> Iterator[str]:
        if findings:
            sums = ", ".join(f"{found.cell['format']} {format_kld(found.value)}" for found in findings)
            yield f"Losses of all {self.by}s added up, in nats: {sums}."

    def heatmap(self, rows: Sequence[StudyRow]) -> Heatmap:
        """Draw layer × kind, one grid per format. Groups of whole layers or kinds have a single column or row."""
        values = {
            (str(row.at["format"]), str(row.at.get("layer", "all")), str(row.at.get("kind", "all"))): row.value("kld")
            for row in rows
        }
        return heatmap("mean KL of each group by itself, nats", "kind of weight", "layer", values)

    def arranged(self, rows: Sequence[StudyRow]) -> tuple[Sequence[StudyRow], int]:
        """Return the rows, failed ones first, then the costliest first."""
        losses = [(row.value("kld"), row) for row in rows]
        ordered = sorted(losses, key=lambda each: float("-inf") if each[0] is None else -each[0])
        return [row for _, row in ordered], _TABLE_ROWS

    def choices(self, limit: int, named: FormatSpec | None) -> Choices:
        """Choose a format for each group within a budget of bytes."""
        formats = [NATIVE, *map(str, self.specs)]
        return Choices(
            unit="bytes",
            budget=limit,
            groups=[group.pattern for group in self.groups],
            formats=formats,
            texts={(g.pattern, str(spec)): _text(spec, (g.pattern,)) for spec in self.specs for g in self.groups},
            sizes=np.array([[g.nbytes(fmt) for fmt in (None, *self.specs.values())] for g in self.groups], dtype=float),
            per=1,
            values=self.parameters,
            option=lambda chosen: _plan_text(chosen, [*self.specs]),
            rivals={
                str(spec): (_text(spec, [group.pattern for group in self.groups]), float(size))
                for spec, size in _rivals([*self.specs], named, self.groups, limit).items()
            },
        )


def sensitivity(
    experiment: Experiment,
    formats: Sequence[str],
    *,
    by: By = "module",
    budget: str | None = None,
    command: str = "",
    listener: Listener | None = None,
    say: Say = lambda text: None,
) -> tuple[Study, RunFolder]:
    """Measure every group in every format, and with a budget also the plan. The new run folder gets ``study.json``.

    Args:
        experiment: experiment on engine hf with the axis ``kld``, whose windows and scored rows are used.
        formats: formats of weights, such as ``int4[group=64]``, ``q4_k``.
        by: a group is one weight matrix, all of a layer, or all of one kind.
        budget: bytes of the decoder layers' weights: ``80MB``, ``4.5bpw``, or a format, for what that takes everywhere.
        say: called with a line now and then while answers are scored.

    Raises:
        FidelabError: If the run cannot start.
        EngineError: If the model gave no answer.
        KeyboardInterrupt: If stopped. Finished captures are kept, and the next call reuses them.
    """
    if RoundedWeights.kind not in engine_class(experiment.engine.name).kinds:
        raise NotSupportedError(f"engine {experiment.engine.name} cannot round single weights; leave out --engine")
    specs = _specs(formats)
    prepared = prepare(experiment, only="reference")
    groups = _groups(str(prepared.settings.reference.path), by)
    question = _Weights(f"Weight sensitivity of {public_name(experiment.model)}", by, groups, specs)
    choices = None if budget is None else question.choices(*_budget(budget, groups, specs))
    chosen, held_out = windows_of(prepared, halves=budget is not None)
    study = OpenStudy.begin("sensitivity", prepared, command, listener)
    return measure(study, question, chosen, held_out, choices, say), study.folder


def _specs(formats: Sequence[str]) -> dict[FormatSpec, WeightFormat]:
    """The formats by their specs.

    Raises:
        UsageError: If there is no format, or one occurs twice, is native or has patterns. Otherwise as
            ``weight_format``.
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
        NotSupportedError: If there are none.
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
    """Return the option ``weights`` that rounds only these groups."""
    return str(FormatSpec(spec.name, tuple(sorted((*spec.options, ("only", ",".join(patterns)))))))


def _budget(
    text: str, groups: Sequence[_Group], specs: Mapping[FormatSpec, WeightFormat]
) -> tuple[int, FormatSpec | None]:
    """Bytes that the weights of all groups may take, and the format that says so.

    Raises:
        UsageError: If it is neither a size with its unit nor a format, or below the smallest possible.
    """
    spec = None
    if match := _BITS.fullmatch(text.strip()):
        limit = float(match["bits"]) * sum(group.parameters for group in groups) / 8
    elif _NUMBER.fullmatch(text.strip()):
        raise UsageError(f"--budget {text} has no unit: write 4.5bpw (bits per weight), 80MB, or a format such as q4_k")
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
        kind = [f"int{bits}[group={size}]" for bits in range(2, 9) for size in _GROUP_SIZES]
    else:
        of_ggml = ("q8_0", *K_QUANTS) if any(name.endswith("_k") for name in names) else _BLOCKS
        kind = list(of_ggml) if all(_GGML.fullmatch(name) for name in names) else []
    sizes = {spec: _everywhere(spec, groups) for spec in map(FormatSpec.parse, kind)}
    closest = max((spec for spec in sizes if sizes[spec] <= limit), key=lambda spec: sizes[spec], default=None)
    sizes = {spec: _everywhere(spec, groups) for spec in (*specs, named, closest) if spec is not None}
    return {spec: nbytes for spec, nbytes in sizes.items() if nbytes <= limit}


def _plan_text(formats: Mapping[str, str], names: Sequence[FormatSpec]) -> str:
    """A plan as the option ``weights``: a rule per format, with the groups that have it."""
    parts = []
    for spec in names:
        if patterns := [pattern for pattern, found in formats.items() if found == str(spec)]:
            parts.append(_text(spec, patterns))
    return "+".join(parts) or NATIVE
