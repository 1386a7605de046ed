"""Report → plain rows.

Text and HTML lay out the same :class:`View`, which holds finished strings and the few raw numbers that a chart needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fidelab.core import Status
from fidelab.report.capacity import capacity_notes, gib_estimate, gib_heading, memory_lines
from fidelab.report.cells import (
    STATUS,
    Estimate,
    confident_flips_of,
    engines_of,
    estimate_of,
    excess_of,
    is_duplicate_reason,
    kld_of,
    plain,
    shared,
    status_line,
    text_of,
    top_token_estimate,
)
from fidelab.report.sections import Section, arm_id, arms_of, sections_of
from fidelab.report.summary import (
    Performance,
    attribution_of,
    bench_headlines,
    concentration_of,
    contexts_of,
    describe_other_tests,
    distribution_of,
    engine_remarks_of,
    groups_of,
    joined,
    kinds_by_depth_of,
    other_tests_table,
    partings_of,
    performance_of,
    remarks_of,
    titled,
    truth_line,
    ways_of,
)
from fidelab.report.tables import NAME, TextTable, cache_layers_of, runtime_table, timing_of
from fidelab.report.weights import weights_of
from fidelab.results.decision_record import Recommendation
from fidelab.results.measurement import DECIDING, Measurement, label
from fidelab.results.numbers import ABSENT, MIB, MINUS, counted, format_amount, format_bytes, one_line
from fidelab.results.rates import decode_rate_of, format_rate
from fidelab.results.record import NO_REFERENCE, ArmRecord, Comparison, Report
from fidelab.results.sizes import Sizes

__all__ = ["Answer", "ArmRow", "Estimate", "FrontierPoint", "Performance", "TextTable", "View", "arm_id", "build_view"]


CACHE_SIZE = "cache bytes per token"


@dataclass(frozen=True)
class FrontierPoint:
    """One arm in the frontier: mean KL (nats) against its size, in ``unit``; ``gib``: GiB at the report's context."""

    name: str
    size: float
    mean: float
    interval: tuple[float, float] | None
    key: str
    arm: str = ""
    unit: str = CACHE_SIZE
    gib: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Answer:
    """The recommendation in words.

    ``name``: the chosen candidate, empty where there is none.  ``saving``: ``47% smaller KV cache than bf16``.
    ``memory``: GiB at the report's context, users that fit; they precede the saving, which GiB at a context state, too.
    ``figures``: ``KLD 0.0003``, ``same top token 98.8%`` and how often it was chosen.  ``lines``: how sure that is, a
    line each.  ``untested``: what was not measured.  ``risks``: what it costs, shown with the details.
    """

    head: str
    name: str
    confidence: str
    saving: str
    memory: tuple[str, ...]
    figures: tuple[str, ...]
    lines: tuple[str, ...]
    untested: str
    command: str
    note: str
    risks: tuple[str, ...]

    @property
    def facts(self) -> tuple[str, ...]:
        """Lines below the head."""
        untested = f"not tested: {self.untested}" if self.untested else ""
        saving = () if self.memory and self.name else (self.saving,)
        return tuple(filter(None, (*self.memory, *saving, " · ".join(self.figures), *self.lines, untested)))


@dataclass(frozen=True)
class ArmRow:
    """One configuration; ``role`` is reference, control or candidate.

    ``same``: share of positions with the reference's top token, ``flips``: share whose top token changes although the
    reference clearly preferred its own, ``size``: bytes against those of a 16-bit cache or the reference's.
    ``gib``: GiB at the report's context.  ``modified``: what ran besides packages as released.  ``why``: why it is not
    recommended, and what is open.
    """

    role: str
    name: str
    engine: str
    model: str
    band: str
    at_best: str
    at_worst: str
    status: str
    reason: str
    kld: Estimate
    excess: Estimate
    same: Estimate
    flips: Estimate
    size: Estimate
    gib: Estimate
    cache_bytes: str
    sentence: str
    because: tuple[str, ...]
    too_close: bool
    mean: float
    """Mean KL in nats, infinite where there is none."""
    key: str
    """Word for a stylesheet: role, band in lower case, ``identical``, ``none`` or ``broken``."""
    text: str = ""
    """Data of its KLD: ``8 windows, 2 documents``."""
    others: tuple[str, ...] = ()
    """Results of the other axes, in words: ``rniah: lost 9 of 36``."""
    why: str = ""
    rate: Estimate = field(default_factory=Estimate)
    """Decode rate of one sequence, tok/s."""
    chosen: bool = False
    preliminary: bool = False
    modified: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Text of the verdict column."""
        if self.role != "candidate":
            return self.role
        if self.status == "identical":
            return self.status
        if self.band != ABSENT:
            return self.band.lower()
        if self.status == "ok":
            return "cannot tell" if self.at_worst else "no verdict"
        return self.status

    @property
    def mark(self) -> str:
        """Verdict, with ``?`` if more data may change it."""
        open_ = self.band != ABSENT and (self.preliminary or self.at_best)
        return f"{self.verdict}{'?' if open_ else ''}"

    @property
    def cells(self) -> tuple[str, ...]:
        """Figures of the main table, in the order of :attr:`View.columns`."""
        kld, interval = self.kld.value, self.kld.margin
        figures = (self.same, self.flips, self.size, self.rate, self.gib)
        return (kld, interval, *(figure.value for figure in figures))


FIGURES = ("KLD", "95% interval", "same top token", "confident flips", "size", "tok/s", "GiB")
"""Figures of the main table; :attr:`View.headings` has their headings."""


@dataclass(frozen=True)
class View:
    """Everything a report shows, in reading order; ``beside``: tables below the main one; ``remarks``: remarks of axes
    on single arms, which sections repeat; ``engine_remarks``: remarks of engines on how single arms ran.
    """

    title: str
    """Model, engine and what was compared."""
    facts: tuple[str, ...]
    """Reference, context and size of the sample."""
    run_id: str
    created: str
    version: str
    answer: Answer | None
    """The recommendation; ``None`` in reports without."""
    subject: str
    """Heading of the configurations' names: ``KV cache`` where they differ in nothing else."""
    failures: tuple[str, ...]
    modified: tuple[str, ...]
    rows: tuple[ArmRow, ...]
    gib_heading: str
    """Heading of the GiB: ``GiB at 32k``, or ``cache GiB at 32k`` where weights are unknown."""
    memory_notes: tuple[str, ...]
    """What GiB at a context and users leave out, a sentence each."""
    floor: str
    control: str
    weights: str
    ranking: str
    tables: tuple[TextTable, ...]
    beside: tuple[TextTable, ...]
    remarks: tuple[str, ...]
    engine_remarks: tuple[str, ...]
    truth: str
    points: tuple[FrontierPoint, ...]
    run_details: tuple[tuple[str, str], ...]
    settings: str
    comparability: str
    """Conditions that compared reports must share, as JSON."""
    command: str
    serve_commands: tuple[tuple[str, str], ...]
    """Reference and candidates whose engines have servers: name, and the command line of that server."""
    ignored: str
    """Parts of a pasted command that no arm uses, with the reasons."""
    text: str
    reference: FrontierPoint | None
    performance: Performance | None
    headlines: tuple[str, ...]
    summarized: bool
    """Whether the only configuration has a sentence for its benches, so that no table of headlines is needed."""
    """Results of the benches, a sentence each."""
    partings: tuple[str, ...]
    """Which serving paths diverge, a sentence each."""
    sections: tuple[Section, ...]
    fidelity: bool
    """Something was compared with the reference, or nothing else was measured."""

    @property
    def candidates(self) -> tuple[ArmRow, ...]:
        """Rows that have a verdict, the best first."""
        rows = (row for row in self.rows if row.role == "candidate")
        return tuple(sorted(rows, key=lambda row: (_ORDER.index(row.key), row.mean)))

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the :data:`FIGURES` that any candidate has. The KLD is always included."""
        cells = [row.cells for row in self.candidates]
        return tuple(n for n in range(len(FIGURES)) if n == 0 or any(row[n] != ABSENT for row in cells))

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of the :data:`FIGURES`."""
        return (*FIGURES[:-1], self.gib_heading)

    @property
    def reasons(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Reasons why candidates are not recommended, and open questions → their names."""
        owners: dict[str, list[str]] = {}
        for row in self.candidates:
            owners.setdefault(row.why, []).append(row.name)
        return tuple((why, tuple(names)) for why, names in owners.items() if why)

    @property
    def axes(self) -> tuple[Section, ...]:
        """Sections of axes that measured something."""
        return tuple(section for section in self.sections if section.kind == "axis" and section.tables)

    @property
    def benches(self) -> tuple[Section, ...]:
        """Sections of benches that measured something."""
        return tuple(section for section in self.sections if section.kind == "bench" and section.tables)


def build_view(report: Report) -> View:
    """Build the rows, lines and tables of a report."""
    arms = [("reference", report.reference)]
    controls = [*([report.control] if report.control else []), *report.controls]
    arms += [("control", arm) for arm in controls]
    arms += [("candidate", arm) for arm in report.candidates]
    sizes = Sizes.of(report.reference, report.candidates, [report.control] if report.control else [])
    size, unit = _size(sizes, report.reference)
    performance = performance_of(arms_of(report))
    fidelity = performance is None or any((report.floor, *(arm.axes for _, arm in arms)))
    rows = tuple(_row(role, arm, report, sizes) for role, arm in arms)
    title = f"{one_line(report.reference.model)} · {engines_of((report.reference, *report.candidates))}"
    if performance is not None and not fidelity:  # with benches alone, the measured quantity comes first
        title = f"{performance.measured[:1].upper()}{performance.measured[1:]} · {title}"
    caches_alone = report.candidates and all(
        arm.kv is not None and arm.name in (arm.kv_text, arm.kv.label) for arm in report.candidates
    )
    costs = [_control(arm) for arm in controls]
    if any(arm.measured for arm in controls):
        costs.append("The excess over the control is the paired difference to it")
    details = [
        ("run", report.run_id),
        ("created", report.created.isoformat(timespec="seconds")),
        *_flat("", report.environment),
    ]
    return View(
        title=title,
        facts=_sample(report) if len(arms) > 1 or fidelity else (),
        run_id=one_line(report.run_id),
        created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
        version=one_line(report.fidelab_version),
        answer=_answer(report),
        subject="KV cache" if caches_alone else "configuration",
        failures=tuple(
            shared((one_line(arm.name), line) for role, arm in arms for line in _failures(role, arm, fidelity))
        ),
        modified=tuple(
            shared((one_line(arm.name), f"ran with {', '.join(names)}") for _, arm in arms if (names := _modified(arm)))
        ),
        rows=rows,
        gib_heading=gib_heading(report),
        memory_notes=tuple(capacity_notes(report)),
        floor=". ".join([_floor(report.floor), *_without_floor(report.candidates)]),
        control=". ".join(costs) or "Control: none",
        weights=_weights([arm for _, arm in arms]),
        ranking=_ranking(report.comparisons),
        tables=_present(
            runtime_table(arm for _, arm in arms),
            cache_layers_of(arm for _, arm in arms),
            timing_of(arm for _, arm in arms),
            attribution_of(report),
            _figures(rows) if fidelity else None,
        ),
        beside=_present(
            weights_of(report, {row.name: row.mark for row in rows if row.role == "candidate"}),
            contexts_of(report),
            distribution_of(report),
            concentration_of(report),
            groups_of(report, "domain"),
            kinds_by_depth_of(report),
            groups_of(report, "structure"),
            other_tests_table(report),
            ways_of(report),
        ),
        remarks=remarks_of(report),
        engine_remarks=engine_remarks_of(report),
        truth=truth_line(report),
        points=(
            *(_points(sizes, "control", report.control, report) if report.control else ()),
            *(
                replace(point, chosen=report.recommendation is not None and report.recommendation.arm == arm.name)
                for number, arm in enumerate(report.candidates)
                for point in _points(sizes, "candidate", arm, report, number)
            ),
        ),
        run_details=tuple(
            (one_line(name).removeprefix("packages.").replace("_", " ").replace(".", " "), one_line(value))
            for name, value in details
        ),
        settings=json.dumps(report.settings, indent=2, ensure_ascii=False, allow_nan=False),
        comparability=json.dumps(report.comparability_key, indent=2, ensure_ascii=False, allow_nan=False),
        command=report.command,
        serve_commands=tuple(
            (one_line(arm.name), one_line(arm.serve_command))
            for arm in (report.reference, *report.candidates)
            if arm.serve_command
        ),
        ignored=_ignored(report),
        text=_text(report),
        reference=None
        if size is None
        else FrontierPoint(one_line(report.reference.name), size, 0.0, None, "reference", unit=unit),
        performance=performance,
        headlines=bench_headlines(arms_of(report)),
        summarized=not report.candidates and any(bench.summary for bench in report.reference.benches.values()),
        partings=partings_of(report),
        sections=tuple(section for section in sections_of(report) if section.found),
        fidelity=fidelity,
    )


def _sample(report: Report) -> tuple[str, ...]:
    """``reference f32``, ``512 tokens``, ``27 documents``, as far as they are known."""
    arms = [*report.candidates, *([report.control] if report.control else [])]
    kld = next((axis for arm in arms if (axis := arm.deciding) and axis.n_items), None)
    facts = [f"reference {one_line(report.reference.name)}"]
    if kld is not None:
        sizes = [c["n_ctx"] for c in _scored_at(kld)] or [kld.facts.get("n_ctx")]
        known = [f"{n:,}" for n in sizes if isinstance(n, int)]
        facts += [f"{joined(known)} tokens"] if known else []
        facts += [text_of(kld).rpartition(", ")[2] or counted(kld.n_items or 0, "position")]
    return tuple(facts)


def _answer(report: Report) -> Answer | None:
    found = report.recommendation
    if found is None:
        return None
    head, _, saving = found.text.partition(": ") if found.arm is not None else (found.text, "", "")
    figures, *lines = found.evidence if found.arm is not None else ("", *found.evidence)
    return Answer(
        head=one_line(head),
        name=one_line(found.arm or ""),
        confidence=found.confidence or "",
        saving=one_line(saving),
        memory=memory_lines(report),
        figures=tuple(figures.split(" · ")) if figures else (),
        lines=tuple(map(one_line, filter(None, (*lines, found.more)))),
        untested=", ".join(map(one_line, found.untested)),
        command=one_line(found.command or ""),
        note=one_line(found.command_note) if found.arm is not None else "",
        risks=tuple(map(one_line, found.risks)),
    )


def _present(*tables: TextTable | None) -> tuple[TextTable, ...]:
    return tuple(table for table in tables if table is not None)


def _ignored(report: Report) -> str:
    serve = report.settings.get("serve")
    reasons = serve.get("ignored") if isinstance(serve, dict) else None
    if not isinstance(reasons, dict) or not reasons:
        return ""
    by_reason: dict[str, list[str]] = {}
    for words, reason in reasons.items():
        by_reason.setdefault(one_line(str(reason)), []).append(one_line(str(words)))
    said = "; ".join(f"{', '.join(words)} ({reason})" for reason, words in by_reason.items())
    return f"Ignored flags of the pasted command: {said}"


def _row(role: str, arm: ArmRecord, report: Report, sizes: Sizes) -> ArmRow:
    kld, composite, found = arm.deciding, arm.composite, report.recommendation
    judged = arm.verdict if role == "candidate" else None
    chosen = judged is not None and found is not None and found.arm == arm.name
    sentence = _sentence(arm, report.reference)
    # The facts that set the band; not the reason why an arm did not run, which its sentence says
    facts = arm.verdict.because if arm.verdict is not None else ()
    size = Estimate()
    if role == "candidate" and (saving := sizes.saving(arm.name)) is not None:
        sign = "" if round(100 * saving) == 0 else MINUS if saving > 0 else "+"
        size = Estimate(f"{sign}{abs(100 * saving):.0f}%", order=f"{-saving:g}")
    return ArmRow(
        role=role,
        name=one_line(arm.name),
        engine=one_line(arm.engine),
        model=one_line(arm.model),
        band=(arm.verdict.band if arm.verdict else None) or ABSENT,
        at_best=((judged.at_best if judged else None) or "").lower(),
        at_worst=((judged.at_worst if judged else None) or "").lower(),
        status=STATUS[arm.status],
        reason=one_line(arm.reason or ""),
        kld=kld_of(kld),
        excess=excess_of(kld),
        same=top_token_estimate(kld),
        flips=confident_flips_of(kld),
        size=size,
        gib=gib_estimate(arm, report),
        cache_bytes=format_bytes(arm.ran.cache_bytes_per_token if arm.ran else None),
        sentence=sentence,
        because=tuple(one_line(fact) for fact in facts if arm.measured or fact != arm.reason),
        too_close=composite.too_close_to_call if composite else False,
        key=_key(role, arm),
        text=text_of(kld),
        others=(*map(one_line, judged.notes if judged else ()), *describe_other_tests(arm)),
        why="; ".join(_open(arm, sentence, found)) if role == "candidate" else "",
        rate=_rate(arm),
        chosen=chosen,
        preliminary=judged is not None and judged.preliminary,
        modified=_modified(arm),
        mean=(kld.value("mean", {}) if kld else None) or (math.inf if kld_of(kld).absent else 0.0),
    )


def _rate(arm: ArmRecord) -> Estimate:
    """Return the decode rate of one sequence, tok/s."""
    rate = decode_rate_of(arm)
    if rate is None or rate.value is None:
        return Estimate()
    return Estimate(format_rate(rate.value), order=f"{rate.value:g}")


def _open(arm: ArmRecord, sentence: str, found: Recommendation | None) -> Iterator[str]:
    """Reason why a candidate is not recommended, unless its row has it, and the data needed to decide."""
    name, verdict = one_line(arm.name), arm.verdict
    if not arm.measured:
        yield sentence.removeprefix("not running: ").removeprefix("not supported: ")
    elif arm.deciding is None:  # its verdict rests on other tests
        yield from filter(None, (sentence, *map(one_line, verdict.notes if verdict else ())))
    elif found is not None:
        own = (one_line(line) for line in found.others)
        reason = next((line.removeprefix(f"{name}: ") for line in own if line.startswith(f"{name}: ")), "")
        yield from (reason,) if reason and reason != f"verdict {verdict.band if verdict else None}" else ()
    if verdict is not None and verdict.at_best:
        best, worst = verdict.at_best.lower(), verdict.band or verdict.at_worst
        yield f"inconclusive between {best} and {worst.lower()}" if worst else f"at best {best}"
    if verdict is not None and verdict.preliminary:
        yield "preliminary, too few documents"


def _figures(rows: Sequence[ArmRow]) -> TextTable:
    """All arms with the intervals of their figures, the excess over the control and the data they were measured on."""
    columns: dict[str, list[str]] = {
        "KLD, nats": [str(row.kld) for row in rows],
        "excess over the control": [str(row.excess) for row in rows],
        "same top token": [str(row.same) for row in rows],
        "confident flips": [str(row.flips) for row in rows],
        "cache bytes per token": [row.cache_bytes for row in rows],
        "measured on": [row.text or ABSENT for row in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cell != ABSENT for cell in cells)}
    if len({row.text for row in rows if row.text}) < 2:
        kept.pop("measured on", None)
    names = ((row.name, row.verdict) for row in rows)
    cells = tuple((*name, *line) for name, *line in zip(names, *kept.values(), strict=True))
    return TextTable("figures", "Figures with their 95% intervals", (NAME, "verdict", *kept), cells, 2)


def _modified(arm: ArmRecord) -> tuple[str, ...]:
    return tuple(map(one_line, arm.ran.modified)) if arm.ran else ()


def _weights(arms: Sequence[ArmRecord]) -> str:
    """The size of each arm's weights, arms of one size together; empty where none is recorded."""
    sizes: dict[str, list[str]] = {}
    for arm in arms:
        if arm.ran is not None and (size := arm.ran.size):
            how = "simulated" if arm.ran.simulated_weight_bytes else "as stored"
            sizes.setdefault(f"{how}: {format_amount(size / MIB)} MiB", []).append(one_line(arm.name))
    if len(sizes) == 1 and all(arm.ran is None or arm.ran.size for arm in arms):
        return f"Weights, {next(iter(sizes))} in each configuration"
    return ". ".join(f"Weights of {', '.join(names)}, {size}" for size, names in sizes.items())


def _windows_read(arms: Sequence[ArmRecord]) -> str:
    """``windows read: 8 by a and b, 32 by c``; empty where all arms read as many."""
    read: dict[int, list[str]] = {}
    for arm in arms:
        facts = kld.facts if (kld := arm.deciding) is not None and kld.measured else {}
        if isinstance(n := facts.get("windows"), int) and "at_most" in facts:
            read.setdefault(n, []).append(one_line(arm.name))
    if len(read) < 2:
        return ""
    return "windows read: " + ", ".join(f"{n:,} by {joined(names)}" for n, names in sorted(read.items()))


def _text(report: Report) -> str:
    """``4,080 positions (32 windows, 31 documents)``, of several contexts one after the other; empty without text."""
    arms = [*report.candidates, *([report.control] if report.control else [])]
    measured = [axis for arm in arms if (axis := arm.deciding) and axis.n_items]
    if not measured:
        return ""
    kld = max(measured, key=lambda axis: axis.n_items or 0) if "at_most" in measured[0].facts else measured[0]
    contexts = _scored_at(kld)
    if len(contexts) < 2:
        found = _positions(kld.n_items, text_of(kld))
    else:
        sizes = [(_positions(c["n_positions"], text_of(kld, c)), f"{c['n_ctx']:,}") for c in contexts]
        if len({words for words, _ in sizes}) == 1:
            found = f"{sizes[0][0]} at each of {joined([n for _, n in sizes])} tokens"
        else:
            found = ", ".join(f"{words} at {n} tokens" for words, n in sizes)
    return f"{found}; {read}" if (read := _windows_read(arms)) else found


def _scored_at(axis: Measurement) -> list[Mapping[str, Any]]:
    """Scores of an axis at each context; empty where its facts do not have the form of KLD's."""
    contexts = axis.facts.get("contexts")
    known = isinstance(contexts, list) and all(
        isinstance(c, dict) and isinstance(c.get("n_ctx"), int) and isinstance(c.get("n_positions"), int)
        for c in contexts
    )
    return contexts if known and isinstance(contexts, list) else []


def _positions(n: int | None, text: str) -> str:
    return f"{n or 0:,} positions ({text})" if text else f"{n or 0:,} positions of text"


_ORDER = ("excellent", "identical", "pass", "degraded", "fail", "none", "broken")


def _key(role: str, arm: ArmRecord) -> str:
    if role != "candidate":
        return role
    if arm.verdict is not None and arm.verdict.band is not None:
        return arm.verdict.band.lower()
    return {Status.OK: "none", Status.IDENTICAL: "identical"}.get(arm.status, "broken")


def _sentence(arm: ArmRecord, reference: ArmRecord) -> str:
    """Advice on an arm; the reference's reason for not running is not repeated."""
    reason = "" if arm.measured else one_line(arm.reason or "")
    if not reference.measured and arm is not reference:
        if reason and reason == one_line(reference.reason or ""):
            return "not running, for the same reason as the reference"
        if reason.startswith(NO_REFERENCE):
            return f"not compared: {NO_REFERENCE}"
    if arm.verdict is None:
        return status_line(arm) if reason else ""
    sentence = one_line(arm.verdict.sentence)
    return sentence if reason in sentence else f"{sentence} ({reason})"


def _failures(role: str, arm: ArmRecord, fidelity: bool) -> list[str]:
    """Unusable items, axes and benches without a number, in words; ``fidelity``: candidates have separate lines."""
    if (role == "reference" or not fidelity) and not arm.measured:
        return [status_line(arm)]
    broken = {name: bench for name, bench in arm.benches.items() if not bench.measured and arm.measured}
    lines = [f"{one_line(name)} {status_line(bench)}" for name, bench in broken.items()]
    lines += [one_line(fault) for bench in arm.benches.values() for fault in (*bench.fails, *bench.downgrades)]
    for name, axis in arm.axes.items():
        if not axis.measured:
            if not is_duplicate_reason(arm, axis.reason):
                lines.append(f"{one_line(name)} {status_line(axis)}")
        elif axis.n_failed:
            total = f" of {axis.n_items:,}" if axis.n_items is not None else ""
            lines.append(f"{axis.n_failed:,}{total} items failed ({one_line(name)})")
        lines += [
            f"{one_line(name)}, {label(cell.at)}: {status_line(cell)}" for cell in axis.cells if not cell.measured
        ]
    return lines


# ---------------------------------------------------------------------------------------------- floor and control

_IDENTICAL_VALUES = {"max": 0.0, "exact_match": 1.0}
"""Metrics whose value alone proves that nothing differed."""


def _repeats(measurement: Measurement) -> bool:
    """The reference repeated itself exactly."""
    return measurement.status is Status.IDENTICAL or any(
        measurement.value(key, {}) == value for key, value in _IDENTICAL_VALUES.items()
    )


def _floor(floor: Mapping[str, Measurement]) -> str:
    """Count of repeated items; else the distance of the reference from itself."""
    measured = [(one_line(name), axis) for name, axis in floor.items() if axis.measured]
    same = []
    for name, axis in measured:
        if _repeats(axis):
            n = sum(context["n_positions"] for context in _scored_at(axis)) or axis.n_items
            same.append(name if n is None else f"{name} ({n - (axis.n_failed or 0):,} of {n:,} items)")
    parts = [_repeatability_text(name, axis) for name, axis in measured if not _repeats(axis)]
    if same:
        verb = "are" if len(same) > 1 else "is"
        parts = [f"{joined(same)} {verb} deterministic on this machine", *parts]
    parts += [
        f"{one_line(name)} {status_line(axis)}"
        for name, axis in floor.items()
        if not (axis.measured or axis.status is Status.NOT_MEASURABLE or (axis.reason or "").startswith(NO_REFERENCE))
    ]
    return f"Run-to-run noise (reference against itself): {'; '.join(filter(None, parts)) or 'not measured'}"


def _without_floor(arms: Sequence[ArmRecord]) -> list[str]:
    """Reasons why rounding noise was not measured; equal reasons are merged."""
    reasons = [
        (one_line(arm.name), one_line(arm.floor.reason or "").removeprefix("not measured: "))
        for arm in arms
        if arm.measured and arm.floor is not None
    ]
    missing, text = [(name, why) for name, why in reasons if why], "Rounding noise was not measured"
    if missing == reasons and len({why for _, why in missing}) == 1:
        return [f"{text}: {missing[0][1]}"]
    return [f"{text} for {line}" for line in shared(missing)]


def _repeatability_text(name: str, measurement: Measurement) -> str:
    """Figures of the difference between the two captures."""
    heads = [
        f"{titled(name, metric)} {estimate_of(metric)}" for metric in measurement.headlines if metric.value is not None
    ]
    exact, n = measurement.value("exact_match", {}), measurement.n_items
    if exact is not None and n is not None:
        heads.insert(0, f"{name}: {round(exact * (n - (measurement.n_failed or 0))):,} of {n:,} items repeat")
    return ", ".join(heads) or f"{name}: measured"


def _control(arm: ArmRecord) -> str:
    name = one_line(arm.name)
    if not arm.measured:
        return f"Control {name}: {status_line(arm)}"
    parts = [STATUS[arm.status]] if arm.status is Status.IDENTICAL else []
    if not (cost := kld_of(arm.deciding)).absent:
        parts.append(f"KLD {cost} nats")
    return f"Control {name}: {', '.join(parts) or 'not measured'}"


def _ranking(comparisons: Sequence[Comparison]) -> str:
    """Candidates by mean KL, best first, by the paired difference of neighbours."""
    if not comparisons:
        return ""
    signs = ["<" if pair.differs else "≈" if pair.equivalent else "?" for pair in comparisons]
    names = " ".join(
        [
            one_line(comparisons[0].better),
            *(f"{sign} {one_line(pair.worse)}" for sign, pair in zip(signs, comparisons, strict=True)),
        ]
    )
    meant = "; ".join(f"{sign}: {meaning}" for sign, meaning in _SIGNS.items() if sign in signs)
    return f"Ranking by KLD (paired test): {names}{f' ({meant})' if meant else ''}"


_SIGNS = {"≈": "equal within 10%", "?": "no difference shown"}


def _size(sizes: Sizes, arm: ArmRecord) -> tuple[float | None, str]:
    """The size by which arms of this report are compared, and its unit: of caches, of weights, or of both."""
    size = sizes.of_arm(arm)
    if sizes.what == "cache":
        return size, f"{CACHE_SIZE} at {sizes.n_ctx:,} tokens" if sizes.by_length else CACHE_SIZE
    cache = f" and of cache at {sizes.n_ctx or 0:,} tokens" if sizes.what == "total" else ""
    return size and size / MIB, f"MiB of weights{cache}"


def _points(sizes: Sizes, role: str, arm: ArmRecord, report: Report, number: int = 0) -> list[FrontierPoint]:
    mean = arm.axes[DECIDING].metric("mean", {}) if DECIDING in arm.axes else None
    size, unit = _size(sizes, arm)
    if mean is None or mean.value is None or size is None or mean.bound:
        return []
    name, key, place = one_line(arm.name), _key(role, arm), arm_id(role, number)
    gib = gib_estimate(arm, report)
    words = "" if gib.absent or report.capacity is None else f"{gib.value} {gib_heading(report)}"
    return [FrontierPoint(name, size, mean.value, mean.interval, key, place, unit, words)]


def _flat(prefix: str, tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += _flat(f"{prefix}{name}.", value)
        else:
            lines.append((f"{prefix}{name}", plain(value)))
    return lines
