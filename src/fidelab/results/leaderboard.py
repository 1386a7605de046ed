"""Many reports → one ranking for each set of conditions, in which arms that cannot be told apart share a rank.

A row ranks only with rows that agree in all that :func:`~fidelab.results.comparability.fields` asks for; figures beside
the ranked one are left out where they were measured under other conditions than most of their column.  See
docs/metrics.md#leaderboards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import AwareDatetime, Field

from fidelab.core import canonical_json
from fidelab.core.errors import InputError
from fidelab.results.comparability import fields
from fidelab.results.measurement import DECIDING, Better, Measurement, Metric, Unit, label
from fidelab.results.numbers import public_name
from fidelab.results.record import ArmRecord, BandName, Report
from fidelab.results.table import BENCH, CACHE, tabulate
from fidelab.results.values import NEEDS_REASON, Count, Document, FreeDict, OpenInterval, Positive, Record

SCHEMA: Final = "fidelab.leaderboard/0"


class LeaderboardFigure(Record):
    """One number."""

    value: float
    """The number, in its column's unit."""
    ci: OpenInterval | None = None
    """95% interval; of repeats the smallest and the largest."""
    bound: bool = False
    """Only a lower bound is known."""


class LeaderboardColumn(Record):
    """One metric."""

    group: str
    """The axis, or ``benches.<bench>``."""
    cell: str
    """The shape of work; empty where there is one."""
    metric: str
    """Its name there."""
    unit: Unit
    """Unit of its figures."""
    better: Better | None
    """Which side is; null: neither."""


class LeaderboardRow(Record):
    """One arm of one run."""

    best: Count | None
    """The best rank that its interval allows, from 1; null where it has no interval and cannot be ranked."""
    worst: Count | None
    """The worst one; as many other rows as it is below ``best`` cannot be told from this one."""
    run_id: str
    """Its run."""
    created: AwareDatetime
    """When that was started."""
    arm: str
    """Name of the arm."""
    model: str
    """Its model."""
    reference: str
    """Model and KV formats of what it was compared with."""
    engine: str
    """Its engine."""
    version: str
    """The engine's version; empty where it is not known."""
    kv: str
    """Formats of keys and values."""
    weights_sha256: str | None
    """Of the checkpoint."""
    weight_bytes: Count | None
    """Bytes of the weights."""
    cache_bytes_per_token: Positive | None
    """Bytes of the KV cache per token."""
    band: BandName | None
    """Its verdict; null: none."""
    figures: tuple[LeaderboardFigure | None, ...]
    """One for each column of the group; null: not measured, or under other conditions."""


class LeaderboardGroup(Record):
    """Rows that may stand in one ranking."""

    conditions: FreeDict
    """What they agree in, as path → value."""
    columns: tuple[LeaderboardColumn, ...]
    """The ranked metric, then those beside it."""
    rows: tuple[LeaderboardRow, ...]
    """The best first."""
    remarks: tuple[str, ...]
    """What was left out."""


class Unranked(Record):
    """An arm without a figure."""

    run_id: str
    """Its run."""
    arm: str
    """Its name."""
    reason: str
    """Why it has none."""


class Leaderboard(Document):
    """Arms of several runs, ranked."""

    schema_name: Literal["fidelab.leaderboard/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    by: str
    """The axis or bench by whose figure rows are ranked."""
    groups: tuple[LeaderboardGroup, ...]
    """The largest first."""
    unranked: tuple[Unranked, ...]
    """Arms that stand in none."""


@dataclass(frozen=True)
class _Entry:
    """One arm of one report, with all its figures under the keys of the table."""

    report: Report
    role: str
    arm: ArmRecord
    figures: dict[tuple[str, str, str], Metric]
    conditions: dict[tuple[str, str, str], dict[str, Any]]


def rank(reports: Sequence[Report], by: str = DECIDING, superseded: Sequence[tuple[Report, str]] = ()) -> Leaderboard:
    """Rank the candidates of all reports by the first headline of an axis or bench; of a bench the references, too.

    Ranks follow from intervals: an arm is better than another if its interval lies wholly on the better side of the
    other's, so its best rank is one more than the number of arms that are better, its worst the number of those that
    are not worse.  The interval of repeats is from the smallest to the largest; exact figures are intervals of no
    width.

    Args:
        superseded: reports that were corrected, with what says so: their arms are named and not ranked.

    Raises:
        InputError: no report has such a figure, or neither side of it is better; names what there is.
    """
    names = {group for report in reports for group in _groups(report)}
    entries = [entry for report in reports for entry in _entries(report, names, by)]
    found: dict[str, list[tuple[tuple[str, str, str], _Entry]]] = {}
    unranked = []
    for entry in entries:
        group = entry.arm.axes.get(by) or entry.arm.benches.get(by.removeprefix(BENCH))
        headline = next(_headlines(by, group), None) if group is not None else None
        if headline is None or headline not in entry.figures:
            reason = _why_not(entry.arm, group, by)
            unranked.append(Unranked(run_id=entry.report.run_id, arm=entry.arm.name, reason=reason))
        else:
            found.setdefault(canonical_json([headline, entry.conditions[headline]]), []).append((headline, entry))
    unranked += [
        Unranked(run_id=report.run_id, arm=arm.name, reason=why)
        for report, why in superseded
        for arm in report.candidates
    ]
    if not found:
        raise InputError(f"no report has a figure of {by}; there are: {', '.join(sorted(names - {CACHE})) or 'none'}")
    groups = [_group(placed[0][0], [entry for _, entry in placed]) for placed in found.values()]
    groups.sort(key=lambda group: -len(group.rows))
    return Leaderboard(by=by, groups=tuple(groups), unranked=tuple(unranked))


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


def _headlines(group: str, measurement: Measurement) -> Iterator[tuple[str, str, str]]:
    for metric in measurement.headlines:
        yield group, _place(metric), metric.key


def _place(metric: Metric) -> str:
    """The shape of work in words, whatever the order in which a file names its coordinates: receipts sort them."""
    return label(dict(sorted(metric.cell.items())))


def _why_not(arm: ArmRecord, group: Measurement | None, by: str) -> str:
    if arm.status in NEEDS_REASON:
        return arm.reason or arm.status.value
    if group is None:
        return f"{by} was not measured"
    return group.reason or f"{by} has no figure"


def _group(ranked: tuple[str, str, str], entries: Sequence[_Entry]) -> LeaderboardGroup:
    first = entries[0].figures[ranked]
    if first.better is None:
        raise InputError(f"{ranked[0]}, {ranked[2]}: neither side of it is better, so nothing can be ranked by it")
    columns = [ranked, *_beside(ranked, entries)]
    common = {column: _commonest([entry.conditions.get(column) for entry in entries]) for column in columns}
    order = sorted(entries, key=lambda entry: _cost(entry.figures[ranked], first.better))
    spans = [_span(entry.figures[ranked], first.better) for entry in order]
    rows = []
    for entry, (best, worst) in zip(order, _ranks(spans), strict=True):
        figures = tuple(
            _figure(entry.figures[column])
            if column in entry.figures and canonical_json(entry.conditions[column]) == common[column]
            else None
            for column in columns
        )
        rows.append(_row(entry, best, worst, figures))
    return LeaderboardGroup(
        conditions=entries[0].conditions[ranked],
        columns=tuple(_column(column, entries) for column in columns),
        rows=tuple(rows),
        remarks=tuple(_left_out(columns, entries, common)),
    )


def _beside(ranked: tuple[str, str, str], entries: Sequence[_Entry]) -> list[tuple[str, str, str]]:
    """The headlines of all other axes and benches that any entry has."""
    columns: dict[tuple[str, str, str], None] = {}
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


def _left_out(
    columns: Sequence[tuple[str, str, str]], entries: Sequence[_Entry], common: dict[tuple[str, str, str], str]
) -> Iterator[str]:
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


def _ranks(spans: Sequence[tuple[float, float] | None]) -> Iterator[tuple[int | None, int | None]]:
    known = [span for span in spans if span is not None]
    for span in spans:
        if span is None:
            yield None, None
        else:
            better = sum(other[1] < span[0] for other in known)
            worse = sum(other[0] > span[1] for other in known)
            yield better + 1, len(known) - worse


def _figure(metric: Metric) -> LeaderboardFigure:
    assert metric.value is not None  # a table holds none without a value
    return LeaderboardFigure(value=metric.value, ci=metric.ci or metric.span, bound=metric.bound)


def _column(column: tuple[str, str, str], entries: Sequence[_Entry]) -> LeaderboardColumn:
    metric = next(entry.figures[column] for entry in entries if column in entry.figures)
    group, cell, _ = column
    return LeaderboardColumn(group=group, cell=cell, metric=metric.name, unit=metric.unit, better=metric.better)


def _row(
    entry: _Entry, best: int | None, worst: int | None, figures: tuple[LeaderboardFigure | None, ...]
) -> LeaderboardRow:
    arm, ran = entry.arm, entry.arm.ran
    versions = {} if ran is None else ran.versions
    return LeaderboardRow(
        best=best,
        worst=worst,
        run_id=entry.report.run_id,
        created=entry.report.created,
        arm=arm.name,
        model=public_name(arm.model),
        reference=f"{public_name(entry.report.reference.model)}, {entry.report.reference.kv_text}",
        engine=arm.engine,
        version=_version(versions, arm.engine),
        kv=arm.kv_text,
        weights_sha256=arm.weights_sha256,
        weight_bytes=None if ran is None else ran.size,
        cache_bytes_per_token=None if ran is None else ran.cache_bytes_per_token,
        band=arm.verdict.band if arm.verdict else None,
        figures=figures,
    )


_BESIDE = ("python", "torch", "triton", "openai")  # versions that are not the engine's own


def _version(versions: Mapping[str, str], engine: str) -> str:
    """The engine's own version, with the name of its package where that is another: ``transformers 5.24.0``."""
    name = next((name for name in (engine, *versions) if name in versions and name not in _BESIDE), None)
    if name is None:
        return ""
    return versions[name] if name.startswith(engine) else f"{name} {versions[name]}"
