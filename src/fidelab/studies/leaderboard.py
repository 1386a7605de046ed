"""Many reports → one ranking for each set of conditions, in which indistinguishable arms share a rank.

A row ranks only with rows that agree in all that :func:`~fidelab.results.comparability.fields` requires. Other figures
are omitted if their conditions differ from most of their column.  See docs/metrics.md#leaderboards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fidelab.core import Status, canonical_json
from fidelab.core.errors import InputError
from fidelab.results.comparability import fields
from fidelab.results.measurement import DECIDING, Better, Coordinates, Definition, Measurement, Metric, key_of, label
from fidelab.results.numbers import ABSENT, counted, heading, one_line, public_name
from fidelab.results.record import ArmRecord, Report
from fidelab.results.study import PART, Study, StudyRow
from fidelab.results.table import BENCH, CACHE, tabulate
from fidelab.results.values import NEEDS_REASON
from fidelab.studies.study import new_study

UNRANKED = "not ranked"
"""Table of the arms without a figure."""
_NOTE = (
    "Ranks follow from 95% intervals (of repeats: smallest to largest): a configuration is tied with those whose "
    "intervals overlap with its own, and its rank is a range. A table holds only figures measured alike."
)
_BEFORE = ("arm", "rank", "model", "reference", "engine", "version", "KV cache", "verdict")
_CACHE = Definition("cache_bytes_per_token", "bytes", exact=True, name="cache per token")
_WEIGHTS = Definition("weight_bytes", "bytes", exact=True, name="weights")
_MAX_CONDITION_CHARS = 60  # characters of a condition: lists are long

_Column = tuple[str, str, str]
"""Axis or ``benches.<bench>``, shape of work, key of the metric there."""


@dataclass(frozen=True)
class _Entry:
    """One arm of one report, with all its figures under the keys of the table."""

    report: Report
    role: str
    arm: ArmRecord
    figures: dict[_Column, Metric]
    conditions: dict[_Column, dict[str, Any]]


def rank(
    reports: Sequence[Report],
    by: str = DECIDING,
    command: str = "",
) -> Study:
    """Rank the candidates of all reports by the first headline of an axis or bench; for a bench also references.

    Ranks follow from intervals: an arm is better than another if its interval lies wholly on the better side of the
    other's, so its best rank is one more than the number of arms that are better, its worst the number of those that
    are not worse.  The interval of repeats is from the smallest to the largest, and an exact figure is an interval of
    width 0. The facts of each ranked row include ``best`` and ``worst``.

    Raises:
        InputError: If no report has such a figure, or neither side of it is better. The message names the figures that
            exist.
    """
    names = {group for report in reports for group in _groups(report)}
    found: dict[str, tuple[_Column, list[_Entry]]] = {}
    unranked = []
    for entry in (entry for report in reports for entry in _entries(report, names, by)):
        group = entry.arm.axes.get(by) or entry.arm.benches.get(by.removeprefix(BENCH))
        headline = next(_headlines(by, group), None) if group is not None else None
        if headline is None or headline not in entry.figures:
            unranked.append(_unranked(entry.report, entry.arm, _why_not(entry.arm, group, by)))
        else:
            alike = canonical_json([headline, entry.conditions[headline]])
            found.setdefault(alike, (headline, []))[1].append(entry)
    if not found:
        raise InputError(f"no report has a figure of {by}; there are: {', '.join(sorted(names - {CACHE})) or 'none'}")
    groups = sorted(found.values(), key=lambda group: -len(group[1]))
    conditions = [entries[0].conditions[ranked] for ranked, entries in groups]
    columns, rows, remarks = dict[str, None](), list[StudyRow](), list[str]()
    titles = dict[str, dict[str, Any]]()
    for (ranked, entries), own in zip(groups, conditions, strict=True):
        title = _title(ranked, entries, own, conditions)
        if title in titles:  # they differ in what is too long to be shown
            title = f"{title} ({len(titles) + 1})"
        titles[title] = own
        figures, placed, left_out = _group(title, ranked, entries)
        columns |= dict.fromkeys(figures)
        rows += placed
        remarks += left_out
    return new_study(
        command=command,
        settings={"by": by},
        kind="leaderboard",
        title=f"leaderboard by {by}",
        facts={"conditions": titles},
        columns=(*_BEFORE, *columns, _CACHE.key, _WEIGHTS.key, "run", "date", "why"),
        rows=(*rows, *unranked),
        sentences=(f"{counted(len(rows), 'arm')} of {counted(len({row.at['run'] for row in rows}), 'run')}", *remarks),
        note=_NOTE,
    )


def _unranked(report: Report, arm: ArmRecord, why: str) -> StudyRow:
    at: Coordinates = {PART: UNRANKED, "run": report.run_id, "arm": arm.name}
    return StudyRow(status=Status.NOT_MEASURABLE, reason=why, at=at, facts={"why": why})


def _title(ranked: _Column, entries: Sequence[_Entry], own: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """The ranked metric, with the conditions that the other tables do not share."""
    differing = [name for name in own if len({canonical_json(other.get(name)) for other in others}) > 1]
    said = ", ".join(f"{one_line(name)} {_shorten(own[name])}" for name in differing)
    metric = entries[0].figures[ranked]
    what = heading(_name(ranked, metric), metric.unit)
    return ": ".join(filter(None, (what, counted(len(entries), "arm"), said)))


def _groups(report: Report) -> set[str]:
    asked = report.settings.get("axes")
    named = {key.group for key in tabulate(report).metrics}
    return named | set(asked if isinstance(asked, dict) else ())


def _entries(report: Report, names: set[str], by: str) -> Iterator[_Entry]:
    table = tabulate(report).metrics
    arms = [("candidate", arm) for arm in report.candidates]
    if by.startswith(BENCH):
        arms.insert(0, ("reference", report.reference))
    for role, arm in arms:
        figures, conditions = {}, {}
        for key, metric in table.items():
            if key[:2] == (role, arm.name):
                place = (key.group, _place(metric), key.metric)
                figures[place] = metric
                conditions[place] = fields(report, key, metric, names)
        yield _Entry(report, role, arm, figures, conditions)


def _headlines(group: str, measurement: Measurement) -> Iterator[_Column]:
    for metric in measurement.headlines:
        yield group, _place(metric), metric.key


def _place(metric: Metric) -> str:
    """The shape of work in words, whatever the order in which a file names its coordinates."""
    return label(dict(sorted(metric.cell.items())))


def _why_not(arm: ArmRecord, group: Measurement | None, by: str) -> str:
    if arm.status in NEEDS_REASON:
        return arm.reason or arm.status.value
    if group is None:
        return f"{by} was not measured"
    return group.reason or f"{by} has no figure"


def _group(title: str, ranked: _Column, entries: Sequence[_Entry]) -> tuple[list[str], list[StudyRow], list[str]]:
    """Keys of the metrics of a table, its rows from the best to the worst, and the omitted rows."""
    better = entries[0].figures[ranked].better
    if better is None:
        raise InputError(f"{ranked[0]}, {ranked[2]}: neither side of it is better, so nothing can be ranked by it")
    columns = [ranked, *_other_columns(ranked, entries)]
    common = {column: _commonest([entry.conditions.get(column) for entry in entries]) for column in columns}
    order = sorted(entries, key=lambda entry: _cost(entry.figures[ranked], better))
    spans = [_span(entry.figures[ranked], better) for entry in order]
    rows = []
    for entry, place in zip(order, _ranks(spans), strict=True):
        shown = [
            entry.figures[column].model_copy(
                update={"key": _key(column), "name": _name(column, entry.figures[column]), "cell": {}}
            )
            for column in columns
            if column in entry.figures and canonical_json(entry.conditions[column]) == common[column]
        ]
        rows.append(_row(title, entry, place, shown))
    return [_key(column) for column in columns], rows, [*_omitted_runs(columns, entries, common)]


def _key(column: _Column) -> str:
    return key_of(" ".join(column))


def _name(column: _Column, metric: Metric) -> str:
    group, cell, _ = column
    return f"{group.removeprefix(BENCH)}: {metric.name}{f' ({cell})' if cell else ''}"


def _other_columns(ranked: _Column, entries: Sequence[_Entry]) -> list[_Column]:
    """The headlines of all other axes and benches that any entry has."""
    columns: dict[_Column, None] = {}
    for entry in entries:
        benches = {BENCH + name: bench for name, bench in entry.arm.benches.items()}
        for name, measurement in {**entry.arm.axes, **benches}.items():
            for headline in _headlines(name, measurement):
                if headline in entry.figures and headline != ranked:
                    columns[headline] = None
    return list(columns)


def _commonest(conditions: Sequence[dict[str, Any] | None]) -> str:
    counts = Counter(canonical_json(one) for one in conditions if one is not None)
    return counts.most_common(1)[0][0]


def _omitted_runs(columns: Sequence[_Column], entries: Sequence[_Entry], common: dict[_Column, str]) -> Iterator[str]:
    for column in columns:
        others = [
            entry
            for entry in entries
            if column in entry.conditions and canonical_json(entry.conditions[column]) != common[column]
        ]
        if others:
            runs = ", ".join(dict.fromkeys(entry.report.run_id for entry in others))
            where = f" ({column[1]})" if column[1] else ""
            yield f"{column[0]}{where}: measured under other conditions in {runs}, and left out there"


def _cost(metric: Metric, better: Better | None) -> float:
    value = 0.0 if metric.value is None else metric.value
    return -value if better == "higher" else value


def _span(metric: Metric, better: Better | None) -> tuple[float, float] | None:
    """The interval of a figure as a cost; ``None`` where there is none."""
    value = metric.value
    known = metric.interval or metric.span or ((value, value) if metric.exact and value is not None else None)
    if known is None or metric.bound:
        return None
    return (-known[1], -known[0]) if better == "higher" else known


def _ranks(spans: Sequence[tuple[float, float] | None]) -> Iterator[tuple[int, int] | None]:
    """The best and the worst rank of each; ``None`` without an interval."""
    known = [span for span in spans if span is not None]
    for span in spans:
        if span is None:
            yield None
        else:
            better = sum(other[1] < span[0] for other in known)
            worse = sum(other[0] > span[1] for other in known)
            yield better + 1, len(known) - worse


def _row(title: str, entry: _Entry, place: tuple[int, int] | None, shown: Sequence[Metric]) -> StudyRow:
    arm, ran, report = entry.arm, entry.arm.ran, entry.report
    sizes = [] if ran is None else [(_CACHE, ran.cache_bytes_per_token), (_WEIGHTS, ran.size)]
    ranks = dict(zip(("best", "worst"), place, strict=True)) if place else {}
    facts = {
        "rank": "–".join(dict.fromkeys(map(str, place))) if place else ABSENT,
        **ranks,
        "model": public_name(arm.model),
        "reference": f"{public_name(report.reference.model)}, {report.reference.kv_text}",
        "engine": arm.engine,
        "version": _version({} if ran is None else ran.versions, arm.engine),
        "KV cache": arm.kv_text,
        "verdict": arm.verdict.band if arm.verdict else None,
        "weights_sha256": arm.weights_sha256,
        "date": report.created.date().isoformat(),
    }
    return StudyRow(
        status=Status.OK,
        at={PART: title, "run": report.run_id, "arm": arm.name},
        metrics=(*shown, *(of(size) for of, size in sizes if size is not None)),
        facts={name: value for name, value in facts.items() if value},
    )


_BESIDE = ("python", "torch", "triton", "openai")  # versions that are not the engine's own


def _version(versions: Mapping[str, str], engine: str) -> str:
    """The engine's own version, with the name of its package where that is another: ``transformers 5.24.0``."""
    name = next((name for name in (engine, *versions) if name in versions and name not in _BESIDE), None)
    if name is None:
        return ""
    return versions[name] if name.startswith(engine) else f"{name} {versions[name]}"


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return one_line(text if len(text) <= _MAX_CONDITION_CHARS else f"{text[: _MAX_CONDITION_CHARS - 1]}…")
