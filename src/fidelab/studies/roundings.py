"""Studies of roundings: one model answers the same windows under many roundings. A budget gives a plan.

Only one group is rounded at a time; all others are native. With a budget, the plan is chosen on every second window and
measured on the others, next to the best single format of that size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fidelab.axes.rows import compare_many
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, RoundedCache, RoundedWeights
from fidelab.core import Status, digest
from fidelab.core.errors import EngineError, InputError, UsageError
from fidelab.engines.hf.weights import NATIVE
from fidelab.metrics.allocation import Floats, allocate, exchanges
from fidelab.metrics.divergence import RowComparison
from fidelab.metrics.intervals import RatioItems, paired_difference, ratio_interval
from fidelab.plan.prepare import PreparedRun
from fidelab.results.measurement import Coordinates, Definition, Measurement, Metric
from fidelab.results.numbers import counted, format_figure, format_kld, format_layers, format_span, one_line
from fidelab.results.outcomes import ArmResult
from fidelab.results.plots import Grid, Heatmap
from fidelab.results.study import Study, StudyKind, StudyPlan, StudyRow
from fidelab.studies.study import OpenStudy, why_none, with_requests

KLD = Definition("kld", "nats", "lower", "mean KL(native‖rounded)")
TOP1 = Definition("top1", "share", "higher", "share of rows whose most likely token is the same")
NLL_CHANGE = Definition("delta_nll", "nats", None, "mean change of the negative log-likelihood of the text, per token")
NLL = Definition("nll", "nats", "lower", "negative log-likelihood of the text, per token")
DIFFERENCE = Definition("plan_minus_uniform", "nats", "lower", "difference of mean KLs")

Say = Callable[[str], None]
Columns = np.ndarray[Any, np.dtype[np.intp]]
_OPEN = 256  # captures that are open at a time
_PROGRESS_SECONDS = 30.0  # seconds
_EXCHANGES = 16  # measured in the second round


@dataclass(frozen=True)
class Cell:
    """A requested row: the text of its rounding, its coordinates, and facts that are known beforehand."""

    text: str
    at: Coordinates
    known: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class Rows:
    """KL and agreement of all rows of an answer, with the clusters of the rows."""

    rows: RowComparison
    clusters: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def items(self) -> RatioItems:
        return RatioItems.of(self.rows.kl, np.ones(len(self.rows)), self.clusters)

    @property
    def mean(self) -> float:
        return float(self.rows.kl.mean())

    def metrics(self) -> tuple[Metric, ...]:
        """Return mean KL, agreement, and the change of the likelihood of the text."""
        change = self.rows.nll_test - self.rows.nll_ref
        known = np.isfinite(change)
        interval = ratio_interval(self.items, bounds=(0.0, float("inf")))
        moved = None
        if known.any():
            moved = ratio_interval(RatioItems.of(change[known], np.ones(int(known.sum())), self.clusters[known]))
        return (
            KLD(max(0.0, self.mean), interval and (float(interval[0]), float(interval[1]))),
            TOP1(float(self.rows.top1.mean())),
            NLL_CHANGE(_mean(change), moved),
            NLL(_mean(self.rows.nll_test)),
        )

    def measurement(self) -> Measurement:
        """Return the metrics in the form of the record."""
        return Measurement(status=Status.OK, metrics=self.metrics())


Found = Mapping[str, Rows | str]
"""Text of a rounding → its rows, or why there are none."""


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class Answers:
    """Captures of one set of windows, by the text of their roundings."""

    request: Prefill
    result: ArmResult
    axis: str

    def rows(self, texts: Sequence[str], say: Say = lambda text: None) -> dict[str, Rows | str]:
        """Return all rows of each answer against the native one, or the reason why there are none."""
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
                if time.monotonic() - said >= _PROGRESS_SECONDS:
                    share = (start + len(some) * index / len(self.request.windows)) / len(found)
                    say(f"scoring {len(found)} answers: {share:.0%}")
                    said = time.monotonic()
                after = list(window[low:high])
                targets = np.array(after + [-1] * (self.request.n_rows - len(after)), dtype=np.int64)
                parts.append(compare_many(native, [(c, index) for c in captures], index, targets, kl_only=True))
            for text, each in zip(some, zip(*parts, strict=True), strict=True):
                rows = RowComparison.concat(each)
                failed = int(rows.failed.sum())
                why = f"{failed} of {len(rows)} rows are no distributions"
                answers[text] = why if failed else Rows(rows, clusters)
        return answers


def _name(axis: str, text: str) -> str:
    return f"{axis}.{digest(text)[:10]}"


def ask(
    study: OpenStudy,
    request: Prefill,
    axis: str,
    texts: Sequence[str],
    log: str,
    kind: type[RoundedWeights] | type[RoundedCache],
) -> Answers:
    """Ask one process for the native answer and all roundings, of weights or of keys and values.

    Raises:
        EngineError: If the native answer itself failed.
    """
    [job] = study.prepared.plan.jobs
    places = request.windows, request.first, request.last, request.units
    every = dict.fromkeys((NATIVE, *texts))
    requests = [kind(_name(axis, text), *places, text, request.settings) for text in every]
    [result] = study.run([with_requests(study.prepared, job, requests)], log)
    if _name(axis, NATIVE) not in result.captures:
        raise EngineError(f"the native model came to no answer: {why_none(result)}")
    return Answers(request, result, axis)


def windows_of(prepared: PreparedRun, *, halves: bool) -> tuple[Prefill, Prefill | None]:
    """Return the windows of the rows, and with ``halves`` those on which a plan is measured.

    Raises:
        UsageError: If there are too few for two halves.
    """
    [job] = prepared.plan.jobs
    [asked] = [capture.request for capture in job.captures]
    assert isinstance(asked, Prefill)
    n = len(asked.windows)
    if not halves:
        return asked, None
    if n < 2:
        raise UsageError("a plan is chosen on one half of the windows and measured on the other: --windows 2 or more")
    return asked.select(range(0, n, 2)), asked.select(range(1, n, 2))


# ---------------------------------------------------------------------------------------------- the study


@dataclass(frozen=True)
class Choices:
    """Choices of a plan: a format for every group.

    ``texts``: (group, format) → the cell that measured it; a native group costs nothing.  ``sizes``: [groups, formats];
    ``per``: divisor for showing them in ``unit``.  ``option``: formats by group → the plan as one text. ``rivals``:
    single formats that fit → their text and their size.  ``together``: sets of formats, of which a plan has one; empty:
    all go together.  ``refined``: exchanges around the plan are measured.  ``kv``: formats by group → the plan as a KV
    format.  ``commands``: the plan and the best single format as KV formats → commands that follow.
    """

    unit: Literal["bytes", "bits per value"]
    budget: float
    groups: Sequence[str]
    formats: Sequence[str]
    texts: Mapping[tuple[str, str], str]
    sizes: np.ndarray[Any, np.dtype[np.float64]]
    per: float
    values: int
    option: Callable[[Mapping[str, str]], str]
    rivals: Mapping[str, tuple[str, float]]
    together: Sequence[Sequence[str]] = ()
    refined: bool = False
    kv: Callable[[Mapping[str, str]], str | None] = lambda formats: None
    commands: Callable[[str, str], Mapping[str, str]] = lambda kv, uniform: {}

    def columns(self, costs: Floats) -> tuple[np.ndarray[Any, np.dtype[np.intp]], Floats]:
        """Return the cheapest choice within the budget, and the costs with incompatible formats at infinity.

        Raises:
            ValueError: If even the smallest choices exceed the budget.
        """
        found = list[tuple[float, int, Columns, Floats]]()
        for names in self.together or [self.formats]:
            allowed = np.where([name in names for name in self.formats], costs, np.inf)
            try:
                columns = allocate(allowed, self.sizes, self.budget * self.per)
            except ValueError as error:
                why = error
            else:
                found.append((float(allowed[np.arange(len(columns)), columns].sum()), len(found), columns, allowed))
        if not found:
            raise why
        return min(found, key=lambda one: one[:2])[2:]


@dataclass(frozen=True)
class Question(ABC):
    """Particulars of one study of roundings; ``by``: the unit that is rounded at a time."""

    kind: ClassVar[StudyKind]
    request: ClassVar[type[RoundedWeights] | type[RoundedCache]]
    columns: ClassVar[tuple[str, ...]]
    title: str
    by: str

    @property
    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Return all cells of the study."""

    @abstractmethod
    def facts(self, found: Found) -> dict[str, Any]:
        """Return facts about the model that the study needs."""

    @abstractmethod
    def findings(self, found: Found) -> tuple[Metric, ...]:
        """Return figures over several rows."""

    @abstractmethod
    def sentences(self, rows: Sequence[StudyRow], findings: Sequence[Metric]) -> Iterator[str]:
        """Return the findings in words."""

    @abstractmethod
    def heatmap(self, rows: Sequence[StudyRow]) -> Heatmap:
        """Return a heat map of the losses."""

    @abstractmethod
    def arranged(self, rows: Sequence[StudyRow]) -> tuple[Sequence[StudyRow], int]:
        """Return the rows in the order of the table, and how many of them a terminal shows."""


def measure(
    study: OpenStudy, question: Question, chosen: Prefill, held_out: Prefill | None, choices: Choices | None, say: Say
) -> Study:
    """Ask for all cells and write the record. With ``choices``, also choose a plan, measure it and write it.

    Raises:
        EngineError: If the model gave no answer.
        InputError: If the cells that failed leave no plan within the budget.
    """
    texts = [cell.text for cell in question.cells]
    found = ask(study, chosen, question.kind, texts, "cells", question.request).rows(texts, say)
    cells = [
        StudyRow(status=Status.FAILED, reason=told, at=cell.at, metrics=cell.known)
        if isinstance(told := found[cell.text], str)
        else StudyRow(status=Status.OK, at=cell.at, metrics=(*told.metrics(), *cell.known))
        for cell in question.cells
    ]
    findings = question.findings(found)
    rows, shown = question.arranged(cells)
    failed = [f"{n} of {len(rows)} rows failed."] if (n := sum(not row.measured for row in rows)) else []
    fields: dict[str, Any] = {
        "kind": question.kind,
        "title": question.title,
        "windows": len(chosen.windows),
        "n_rows": len(chosen.windows) * chosen.n_rows,
        "documents": len({unit for units in chosen.units for unit in units}),
        "facts": {"by": question.by, **question.facts(found)},
        "columns": question.columns,
        "rows": tuple(rows),
        "shown": shown,
        "findings": findings,
        "sentences": (*question.sentences(cells, findings), *failed),
        "heatmap": question.heatmap(cells),
    }
    record = study.write(**fields)
    if choices is not None and held_out is not None:
        plan = _plan(study, question, found, choices, chosen, held_out)
        fields["sentences"] = (_verdict(plan), *_plan_sentences(plan, question.by), *fields["sentences"])
        commands = choices.commands(plan.kv, plan.uniform) if plan.kv and plan.uniform else {}
        record = study.write(**fields, plan=plan, commands=dict(commands))
    return record


def heatmap(title: str, x_label: str, y_label: str, values: Mapping[tuple[str, str, str], float | None]) -> Heatmap:
    """Return a heat map of (grid, y, x) → value, with labels in the order of their first appearance."""
    names, ys, xs = (list(dict.fromkeys(place[n] for place in values)) for n in range(3))
    return Heatmap(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x=tuple(xs),
        y=tuple(ys),
        low=0.0,
        high=max((value for value in values.values() if value is not None), default=0.0) or 1.0,
        grids=tuple(
            Grid(name=name, values=tuple(tuple(values.get((name, y, x)) for x in xs) for y in ys)) for name in names
        ),
    )


# --------------------------------------------------------------------------------------------------- plan


def _plan(
    study: OpenStudy, question: Question, found: Found, choices: Choices, chosen: Prefill, held_out: Prefill
) -> StudyPlan:
    costs = np.full(choices.sizes.shape, np.inf)
    for place, group in enumerate(choices.groups):
        for column, name in enumerate(choices.formats):
            rows = None if name == NATIVE else found[choices.texts[group, name]]
            if not isinstance(rows, str):
                costs[place, column] = 0.0 if rows is None else rows.mean
    try:
        first, costs = choices.columns(costs)
    except ValueError as error:
        raise InputError(f"no plan: {error}") from None

    def measured_there(some: Sequence[Columns]) -> list[Rows | str]:
        plans = [choices.option(_formats(choices, columns)) for columns in some]
        answers = ask(study, chosen, question.kind, plans, "plan", question.request).rows(plans)
        return [answers[plan] for plan in plans]

    limit = choices.budget * choices.per
    around = exchanges(first, costs, choices.sizes, limit, _EXCHANGES) if choices.refined else []
    there, *others = measured_there([first, *around])
    columns, unrefined = first, None
    if around and isinstance(there, Rows):
        unrefined = there.mean
        columns, there = refine([first, *around], [there, *others], measured_there, choices.sizes, limit)
    places = np.arange(len(choices.groups)), columns
    size = float(choices.sizes[places].sum()) / choices.per
    formats = _formats(choices, columns)
    text, rivals = choices.option(formats), choices.rivals
    texts = [*dict.fromkeys([text, *(each for each, _ in rivals.values())])]
    answers = ask(study, held_out, f"{question.kind}-check", texts, "check", question.request).rows(texts)
    rows = answers[text]
    if isinstance(rows, str) or isinstance(there, str):
        raise EngineError(f"the plan came to no answer: {rows if isinstance(rows, str) else there}")
    measured = {name: one for name, (each, _) in rivals.items() if isinstance(one := answers[each], Rows)}
    best = min(measured, key=lambda name: measured[name].mean, default=None)
    difference = None if best is None else paired_difference(rows.items, measured[best].items)
    return StudyPlan(
        unit=choices.unit,
        budget=choices.budget,
        size=size,
        bits=8 * size / choices.values if choices.unit == "bytes" else size,
        formats=formats,
        option=text,
        kv=choices.kv(formats),
        exchanges=int((columns != first).sum()),
        unrefined=unrefined,
        predicted=float(costs[places].sum()),
        measured_there=there.measurement(),
        measured=rows.measurement(),
        uniform=best,
        uniform_size=None if best is None else rivals[best][1],
        uniform_measured=None if best is None else measured[best].measurement(),
        difference=None if difference is None else DIFFERENCE(difference.estimate, difference.interval),
    )


def _formats(choices: Choices, columns: Columns) -> dict[str, str]:
    return {group: choices.formats[column] for group, column in zip(choices.groups, columns, strict=True)}


def refine(
    plans: Sequence[Columns],
    answers: Sequence[Rows | str],
    measured: Callable[[Sequence[Columns]], Sequence[Rows | str]],
    sizes: Floats,
    budget: float,
) -> tuple[Columns, Rows]:
    """Return the best plan and its rows, among a plan, its neighbours, and combinations of helpful neighbours.

    Losses of single groups do not add up, so the plan with the least sum need not be the best one. Exchanges that help
    are combined one after another, from the best on, as long as they change different groups.

    Args:
        plans, answers: the plan, [groups], followed by those that differ from it in few groups, and the answer of each.
        measured: function that asks for the rows of further plans.
        sizes, budget: sizes of the formats, and the largest size of a plan.
    """
    found = [(one.mean, n, one) for n, one in enumerate(answers) if isinstance(one, Rows)]
    ranked = sorted(found, key=lambda one: one[:2])
    start, (_, at, best_rows) = plans[0], ranked[0]
    best = combined = plans[at]
    for _, n, _ in ranked[1 : [n for _, n, _ in ranked].index(0)]:
        changed = plans[n] != start
        joined = np.where(changed, plans[n], combined)
        if (combined == start)[changed].all() and sizes[np.arange(len(joined)), joined].sum() <= budget:
            combined = joined
    if combined is not best:
        [together] = measured([combined])
        if isinstance(together, Rows) and together.mean < best_rows.mean:
            return combined, together
    return best, best_rows


def _verdict(plan: StudyPlan) -> str:
    """Whether the plan pays, in one sentence."""
    if plan.uniform is None or plan.uniform_measured is None or plan.difference is None or plan.uniform_size is None:
        return "No single format fits this budget everywhere: the plan has nothing to be compared with."
    if plan.uniform in ({*plan.formats.values()} if len({*plan.formats.values()}) == 1 else {plan.kv}):
        return f"No better than {plan.uniform} everywhere, which is the plan itself."
    interval = plan.difference.interval
    if interval is None or interval[0] <= 0 <= interval[1]:
        verdict = f"No better than {plan.uniform} everywhere"
    elif interval[1] < 0:
        verdict = f"Better than {plan.uniform} everywhere"
    else:
        verdict = f"Worse than {plan.uniform} everywhere"
    said = "" if interval is None else f", 95% {format_span(interval)}"
    return (
        f"{verdict}, the best single format within the budget: {format_kld(plan.measured.value('kld'))} against "
        f"{format_kld(plan.uniform_measured.value('kld'))} nats "
        f"(difference {format_kld(plan.difference.value, signed=True)}{said})."
    )


def _plan_sentences(plan: StudyPlan, by: str) -> Iterator[str]:
    chosen = [*plan.formats.values()]
    counts = ", ".join(f"{chosen.count(name)} × {name}" for name in dict.fromkeys(chosen))
    size = f" in {plan.size / 2**20:.1f} MiB" if plan.unit == "bytes" else ""
    yield f"Plan of {plan.bits:.3f} bits per value{size}: {counts}."
    # Which groups get which format, a sentence each: `int8: down_proj of layers 0–3, 7; q_proj of layer 2.`
    found: dict[str, dict[str, list[int]]] = {}
    for group, name in plan.formats.items():
        parts = group.split(".")
        layers = [int(part) for part in parts if part.isdecimal()]
        kind = "" if parts[-1].isdecimal() else parts[-1]
        found.setdefault(name, {}).setdefault(one_line(kind), []).extend(layers)
    for name, kinds in found.items():
        words = (f"{kind}{' of ' if kind and layers else ''}{format_layers(layers)}" for kind, layers in kinds.items())
        yield f"{one_line(name)}: {'; '.join(words)}."
    there = format_kld(plan.measured_there.value("kld"))
    yield (
        f"It costs {_cost(plan.measured)} on windows that it was not chosen on. On the others its rows add up to "
        f"{format_kld(plan.predicted)}, and together they cost {there}."
    )
    if plan.unrefined is not None:
        kept = f"{counted(plan.exchanges, 'format')} changed, from {format_kld(plan.unrefined)} to {there}"
        yield f"Second round, plans around it measured: {kept if plan.exchanges else 'none is better'}."
    if plan.uniform in ({*chosen} if len({*chosen}) == 1 else {plan.kv}):
        smaller = "" if by == "module" else " Smaller groups (--by module) differ more." if plan.unit == "bytes" else ""
        yield f"No mixture of these formats promises less in this budget.{smaller}"
    elif plan.uniform is not None and plan.uniform_measured is not None and plan.uniform_size is not None:
        more, in_bytes = plan.uniform_size - plan.size, plan.unit == "bytes"
        amount = f"{abs(more) / 1024:,.0f} KiB" if in_bytes else f"{format_figure(abs(more), '')} bits"
        than = f"{amount} {'more' if more > 0 else 'less'} than the plan"
        size = than if more else f"the same {'bytes' if in_bytes else 'bits'}"
        yield f"{plan.uniform} everywhere takes {size} and costs {_cost(plan.uniform_measured)}."


def _cost(found: Measurement) -> str:
    interval = found.ci("kld")
    return f"{format_kld(found.value('kld'))} nats{'' if interval is None else f' ({format_span(interval)})'}"
