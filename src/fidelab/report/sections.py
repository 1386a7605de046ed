"""Sections of a report: one :class:`Section` per axis and per bench, all of the same form.

A section takes the measurements of one name from all arms and lays them side by side: tables of metrics, charts that
arms share (:class:`Curves` and :class:`BarGroup`, grouped by their key), and what each arm shows by itself
(:class:`ShownPart`: heat maps, tables, texts).  Nothing here knows an axis or a bench by name.  All words are ready to
be shown: on one line (texts keep their lines), without control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from fidelab.report.cells import fact_of, is_duplicate_reason, shared, status_line
from fidelab.report.tables import Notes, TextTable, leading_of, matrices_of, tables_of
from fidelab.results.measurement import Measurement
from fidelab.results.numbers import ABSENT, one_line, printable
from fidelab.results.plots import Bars, Choice, Curve, Heatmap, Places, TablePlot, TextPair, Texts
from fidelab.results.record import ArmRecord, Report
from fidelab.results.values import Record

_Words = TypeVar("_Words", bound=Record)
_Shared = TypeVar("_Shared", Curve, Bars)
Role = Literal["reference", "control", "candidate", "floor"]


@dataclass(frozen=True)
class ReportArm:
    """Arm that lines, bars and rows belong to.

    ``name`` is unique among the arms of a report.  ``id`` identifies the arm in all charts and legends: ``reference``,
    ``control``, ``control1`` (of other kernel paths), ``candidate0``, ``floor``; ``number`` counts candidates, and
    controls, from 0 on.
    """

    name: str
    role: Role
    number: int = 0

    @property
    def id(self) -> str:
        """Key of the arm's lines and legend entries."""
        return arm_id(self.role, self.number)


@dataclass(frozen=True)
class Curves:
    """Curves of one key, which share a chart with a line per arm, and per series of an arm.

    Title, labels, scales and caption are those of the first line's curve, ``lines[0][1]``.
    """

    key: str
    title: str
    caption: str
    lines: tuple[tuple[ReportArm, Curve], ...]


@dataclass(frozen=True)
class BarGroup:
    """Bars of one key, which share a chart."""

    key: str
    title: str
    caption: str
    bars: tuple[tuple[ReportArm, Bars], ...]


@dataclass(frozen=True)
class ShownPart:
    """Plots of a single arm."""

    arm: ReportArm
    heatmaps: tuple[Heatmap, ...]
    tables: tuple[TablePlot, ...]
    texts: tuple[Texts, ...]
    places: tuple[Places, ...] = ()


@dataclass(frozen=True)
class Section:
    """One axis or one bench, for all arms. In reading order: notes, lines, tables with footnotes, charts, shown."""

    kind: Literal["axis", "bench"]
    name: str
    """As the record names it, on one line; not for an anchor or a file name."""
    title: str
    notes: tuple[str, ...]
    """Reasons of arms without metrics: ``arm: failed: reason``; not where the whole arm failed, or the reference."""
    lines: tuple[str, ...]
    """Flags of whole measurements, after the arms' names."""
    sources: tuple[str, ...]
    """Settings and facts, after the arms' names; they may name servers and are not for publication."""
    tables: tuple[TextTable, ...]
    """Arm × cell: metrics.  One per set of coordinates, the first one first to be read."""
    matrices: tuple[TextTable, ...]
    """Leading figures of a bench over two coordinates, a table per figure."""
    footnotes: tuple[str, ...]
    """``1: text``, as the tables' column ``notes`` counts them."""
    doubts: tuple[str, ...]
    """The same for a place without tables: ``arm, arm: text``."""
    legend: tuple[str, ...]
    """``name: definition`` of the metrics that have a definition."""
    curves: tuple[Curves, ...]
    bars: tuple[BarGroup, ...]
    shown: tuple[ShownPart, ...]

    @property
    def found(self) -> bool:
        """Whether there is something to show."""
        return any((self.notes, self.lines, self.tables, self.curves, self.bars, self.shown))


def arm_id(role: str, number: int = 0) -> str:
    """Return the key of an arm's points, lines and legend entries: its role, for candidates with their number."""
    return f"{role}{number}" if role == "candidate" or number else role


def arms_of(report: Report) -> list[tuple[ReportArm, ArmRecord]]:
    """Return reference, controls and candidates. A reference named like a candidate is prefixed with its role."""
    names = [one_line(arm.name) for arm in report.candidates]
    first = one_line(report.reference.name)
    arms = [(ReportArm(f"reference {first}" if first in names else first, "reference"), report.reference)]
    controls = [*([report.control] if report.control else []), *report.controls]
    arms += [(ReportArm(f"control {one_line(arm.name)}", "control", n), arm) for n, arm in enumerate(controls)]
    return arms + [(ReportArm(names[n], "candidate", n), arm) for n, arm in enumerate(report.candidates)]


def sections_of(report: Report) -> list[Section]:
    """Return the axes, then the benches, each in the order in which arms name them."""
    arms = arms_of(report)
    axes = [*((arm, record.axes) for arm, record in arms), (ReportArm("run-to-run noise", "floor"), report.floor)]
    benches = [(arm, record.benches) for arm, record in arms]
    records = {arm.id: record for arm, record in arms}
    return [*_sections("axis", axes, records), *_sections("bench", benches, records)]


def leading_tables(report: Report) -> Iterator[TextTable]:
    """Return the leading figures of all benches, of one arm without its name."""
    arms = [(arm, record) for arm, record in arms_of(report) if record.benches]
    for name in dict.fromkeys(name for _, record in arms for name in record.benches):
        own = [(arm.name, record.benches[name]) for arm, record in arms if name in record.benches]
        for table in leading_of(name, own):
            yield table.without_name() if len(own) == 1 else table


def benches_of(arms: Sequence[tuple[ReportArm, ArmRecord]]) -> list[Section]:
    """Return the benches of arms of any reports, without ratios to a reference."""
    records = {arm.id: record for arm, record in arms}
    sections = _sections("bench", [(arm, record.benches) for arm, record in arms], records)
    return [section for section in sections if section.found]


def table_of(plot: TablePlot) -> TextTable:
    """Return a plot's cells as text: numbers with three significant digits, whole ones in full."""
    rows = tuple(tuple(map(fact_of, row)) for row in plot.rows)
    words = all(isinstance(cell, str) for row in plot.rows for cell in row)
    columns = tuple(one_line(name) for name in plot.columns)
    return TextTable("plot", one_line(plot.title), columns, rows, named=len(columns) if words else 1)


def _sections(
    kind: Literal["axis", "bench"],
    arms: Sequence[tuple[ReportArm, Mapping[str, Measurement]]],
    records: Mapping[str, ArmRecord],
) -> Iterable[Section]:
    # candidates have every axis, in its order
    candidates_first = sorted(arms, key=lambda entry: entry[0].role != "candidate")
    for name in dict.fromkeys(name for _, measurements in candidates_first for name in measurements):
        yield _section(kind, name, [(arm, part[name]) for arm, part in arms if name in part], records)


def _section(
    kind: Literal["axis", "bench"],
    name: str,
    arms: Sequence[tuple[ReportArm, Measurement]],
    records: Mapping[str, ArmRecord],
) -> Section:
    title = one_line(next((measurement.title for _, measurement in arms if measurement.title), name))
    base = next((measurement for arm, measurement in arms if arm.role == "reference"), None)
    notes = Notes()
    tables = tables_of(one_line(name), title, [(arm.name, measurement) for arm, measurement in arms], base, notes)
    drawn = [(arm, measurement) for arm, measurement in arms if arm.role in ("candidate", "floor") or arm.number == 0]
    return Section(
        kind=kind,
        name=one_line(name),
        title=title,
        notes=tuple(
            shared(
                (arm.name, status_line(measurement))
                for arm, measurement in arms
                if not measurement.measured and not is_duplicate_reason(records.get(arm.id), measurement.reason)
            )
        ),
        lines=tuple(shared((arm.name, one_line(flag.text)) for arm, measurement in arms for flag in measurement.flags)),
        sources=tuple(shared((arm.name, line) for arm, measurement in arms if (line := _facts(measurement)))),
        tables=tuple(tables),
        matrices=tuple(
            matrices_of(name, [(arm.name, measurement) for arm, measurement in arms]) if kind == "bench" else ()
        ),
        footnotes=tuple(notes.numbered()),
        doubts=tuple(notes.named()),
        legend=tuple(
            dict.fromkeys(
                f"{one_line(m.name)}: {one_line(m.about)}"
                for _, measurement in arms
                for m in measurement.metrics
                if m.about
            )
        ),
        curves=tuple(
            Curves(key, lines[0][1].title, lines[0][1].caption, lines)
            for key, lines in _by_key(drawn, Curve, _lined).items()
        ),
        bars=tuple(
            BarGroup(key, bars[0][1].title, bars[0][1].caption, bars)
            for key, bars in _by_key(drawn, Bars, _lined_bars).items()
        ),
        shown=tuple(shown for arm, measurement in arms if (shown := _select_plots(arm, measurement)) is not None),
    )


_FACTS = {
    "n_ctx": "context",
    "n_documents": "documents",
    "n_clusters": "independent samples",
    "at_most": "windows at most",
}
"""Names of facts as people know them."""


def _facts(measurement: Measurement) -> str:
    """``context 512, estimator hidden``: facts that are one word or number."""
    words = {
        _FACTS.get(name, one_line(name).replace("_", " ")): fact_of(value) for name, value in measurement.facts.items()
    }
    return ", ".join(f"{name} {word}" for name, word in words.items() if word != ABSENT)


def _by_key(
    arms: Sequence[tuple[ReportArm, Measurement]], kind: type[_Shared], lined: Callable[[_Shared], _Shared]
) -> dict[str, tuple[tuple[ReportArm, _Shared], ...]]:
    """The plots of one kind, grouped by the chart that they share."""
    plots = [(arm, lined(plot)) for arm, measurement in arms for plot in measurement.plots if isinstance(plot, kind)]
    keys = dict.fromkeys(plot.key for _, plot in plots)
    return {key: tuple((arm, plot) for arm, plot in plots if plot.key == key) for key in keys}


def _select_plots(arm: ReportArm, measurement: Measurement) -> ShownPart | None:
    heatmaps = tuple(
        _lined(plot).model_copy(update={"grids": tuple(map(_lined, plot.grids))})
        for plot in measurement.plots
        if isinstance(plot, Heatmap)
    )
    tables = tuple(plot for plot in measurement.plots if isinstance(plot, TablePlot))
    texts = tuple(_readable_texts(plot) for plot in measurement.plots if isinstance(plot, Texts))
    places = tuple(_readable_places(plot) for plot in measurement.plots if isinstance(plot, Places))
    return ShownPart(arm, heatmaps, tables, texts, places) if heatmaps or tables or texts or places else None


# ---------------------------------------------------------------------------------------------------------- words


def _lined(record: _Words) -> _Words:
    """A record with every text on one line; its keys are unchanged."""
    words: dict[str, object] = {}
    for name, value in record:
        if isinstance(value, str) and name not in ("kind", "key"):
            words[name] = one_line(value)
        elif isinstance(value, tuple) and all(isinstance(entry, str) for entry in value):
            words[name] = tuple(map(one_line, value))
    return record.model_copy(update=words)


def _lined_bars(plot: Bars) -> Bars:
    parts = {one_line(name): lengths for name, lengths in plot.parts.items()}
    return _lined(plot).model_copy(update={"parts": parts})


def _readable_places(plot: Places) -> Places:
    """Tokens on one line: line breaks and tabs have signs of their own."""

    def seen(text: str) -> str:
        return printable(text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥"))

    def choice(found: Choice | None) -> Choice | None:
        return found and found.model_copy(update={"text": seen(found.text.removeprefix(" ")) or "␣"})

    places = (
        place.model_copy(
            update={
                "before": seen(place.before),
                "actual": seen(place.actual),
                "reference": choice(place.reference),
                "candidate": choice(place.candidate),
            }
        )
        for place in plot.places
    )
    return _lined(plot).model_copy(update={"places": tuple(places)})


def _readable_texts(plot: Texts) -> Texts:
    """Texts keep their lines."""
    texts = ("reference", "candidate", "note", "prompt", "shared")

    def readable(pair: TextPair) -> TextPair:
        return _lined(pair).model_copy(update={name: printable(getattr(pair, name)) for name in texts})

    return _lined(plot).model_copy(update={"pairs": tuple(map(readable, plot.pairs))})
