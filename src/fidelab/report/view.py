"""Report → plain rows.

Text and HTML lay out the same :class:`View`; it holds finished strings, and the few raw numbers that a chart needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fidelab.core import Status
from fidelab.report.cells import (
    STATUS,
    Estimate,
    changed_of,
    estimate_of,
    excess_of,
    flips_of,
    kld_of,
    kv_of,
    plain,
    run_of,
    shared,
    status_line,
    text_of,
    told_already,
)
from fidelab.report.sections import Section, arm_id, arms_of, sections_of
from fidelab.report.summary import (
    Performance,
    attribution_of,
    bench_headlines,
    contexts_of,
    engine_remarks_of,
    groups_of,
    joined,
    others_in_words,
    others_of,
    partings_of,
    performance_of,
    remarks_of,
    speculation_of,
    titled,
    truth_line,
    ways_of,
)
from fidelab.report.tables import TextTable, ran_of, timing_of
from fidelab.results.decision_record import Recommendation
from fidelab.results.measurement import DECIDING, Measurement, label
from fidelab.results.numbers import ABSENT, MIB, format_amount, format_bytes, one_line
from fidelab.results.recommend import Sizes, bytes_in_16_bits
from fidelab.results.record import NO_REFERENCE, ArmRecord, Comparison, Report

__all__ = [
    "ArmRow",
    "Estimate",
    "FrontierPoint",
    "Performance",
    "TextTable",
    "VerdictGroup",
    "View",
    "arm_id",
    "build_view",
]


CACHE_SIZE = "cache bytes per token"


@dataclass(frozen=True)
class FrontierPoint:
    """One arm in the frontier: mean KL (nats) against its size, in ``unit``."""

    name: str
    size: float
    mean: float
    interval: tuple[float, float] | None
    key: str
    arm: str = ""
    unit: str = CACHE_SIZE


@dataclass(frozen=True)
class VerdictGroup:
    """Candidates with one verdict; ``key`` as in :class:`ArmRow`."""

    verdict: str
    key: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class ArmRow:
    """One arm in the main table; ``role`` is reference, control or candidate.

    ``changed``: how many of the most likely tokens change, ``flips``: how many of those were no near tie, ``run``:
    expected tokens until the first change.  ``modified``: what ran besides packages as released.
    """

    role: str
    name: str
    engine: str
    model: str
    band: str
    at_best: str
    status: str
    reason: str
    kld: Estimate
    excess: Estimate
    changed: Estimate
    flips: Estimate
    run: Estimate
    cache_bytes: str
    sentence: str
    because: tuple[str, ...]
    too_close: bool
    key: str
    """Word for a stylesheet: role, band in lower case, ``identical``, ``none`` or ``broken``."""
    text: str = ""
    """What its KLD was measured on: ``8 windows, 2 documents``."""
    others: tuple[str, ...] = ()
    """What each other axis found, in words: ``rniah: lost 9 of 36``."""
    saving: str = ""
    """Cache bytes against a 16-bit cache's, in words; empty where either is unknown."""
    preliminary: bool = False
    modified: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The text of the verdict column."""
        if self.role != "candidate":
            return self.role
        if self.band != ABSENT:
            return self.band
        return "no verdict" if self.status == "ok" else self.status

    @property
    def note(self) -> str:
        """The second line of the verdict column.

        Whether the verdict is preliminary, the best one possible, the status, whether packages are modified.
        """
        early = "preliminary" if self.preliminary else ""
        best = f"at best {self.at_best}" if self.at_best else ""
        status = self.status if self.status not in ("ok", self.verdict) else ""
        return ", ".join(part for part in (early, best, status, "modified" if self.modified else "") if part)


_FIGURES: Mapping[str, Callable[[ArmRow], Estimate]] = {
    "KLD, nats": lambda row: row.kld,
    "measured on": lambda row: Estimate(row.text or ABSENT),
    "over control": lambda row: row.excess,
    "changed tokens": lambda row: row.changed,
    "real flips": lambda row: row.flips,
    "tokens to flip": lambda row: row.run,
    "cache bytes per token": lambda row: Estimate(row.cache_bytes),
}


@dataclass(frozen=True)
class View:
    """Everything a report shows, in reading order; ``beside``: tables below the main one, ``remarks``: what axes say
    of single arms, which sections repeat; ``engine_remarks``: what engines say of how single arms ran.
    """

    title: str
    subtitle: str
    run_id: str
    created: str
    version: str
    advice: tuple[str, ...]
    """The recommendation and what it rests on, a line each; empty in reports without."""
    advice_command: str
    """The command line that turns the recommended arm on."""
    failures: tuple[str, ...]
    modified: tuple[str, ...]
    rows: tuple[ArmRow, ...]
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
    command: str
    serve_commands: tuple[tuple[str, str], ...]
    """Reference and candidates whose engines have servers: name, and the command line of that server."""
    ignored: str
    """What of a pasted command went into no arm, with the reasons; empty where there is nothing."""
    compared: str
    text: str
    reference: FrontierPoint | None
    performance: Performance | None
    headlines: tuple[str, ...]
    """What the benches found, and which ways of serving part, a sentence each."""
    sections: tuple[Section, ...]
    fidelity: bool
    """Something was compared with the reference, or nothing else was measured."""

    @property
    def candidates(self) -> tuple[ArmRow, ...]:
        """The rows that have a verdict."""
        return tuple(row for row in self.rows if row.role == "candidate")

    @property
    def figures(self) -> dict[str, tuple[Estimate, ...]]:
        """Heading → a figure for each row, of those that any arm has; the KLD always."""
        columns = {heading: tuple(map(figure, self.rows)) for heading, figure in _FIGURES.items()}
        return {
            heading: cells
            for heading, cells in columns.items()
            if heading == "KLD, nats" or not all(cell.absent for cell in cells)
        }

    @property
    def benches(self) -> tuple[Section, ...]:
        """The sections of benches that measured something."""
        return tuple(section for section in self.sections if section.kind == "bench" and section.tables)

    @property
    def summary(self) -> tuple[VerdictGroup, ...]:
        """Candidates by verdict, the best first."""
        groups: dict[tuple[str, str], list[str]] = {}
        for row in self.candidates:
            groups.setdefault((row.verdict, row.key), []).append(row.name)
        order = sorted(groups, key=lambda group: _ORDER.index(group[1]))
        return tuple(VerdictGroup(verdict, key, tuple(groups[verdict, key])) for verdict, key in order)


def build_view(report: Report) -> View:
    """The rows, lines and tables of a report."""
    arms = [("reference", report.reference)]
    controls = [*([report.control] if report.control else []), *report.controls]
    arms += [("control", arm) for arm in controls]
    arms += [("candidate", arm) for arm in report.candidates]
    sized = _sized(report)
    size, unit = sized(report.reference)
    records = [arm for _, arm in arms]
    performance = performance_of(arms_of(report))
    fidelity = performance is None or any((report.floor, *(arm.axes for _, arm in arms)))
    engines = dict.fromkeys(one_line(arm.engine) for _, arm in arms)
    what = f"{one_line(report.reference.model)} on {', '.join(engines)}"
    role = "reference " if len(arms) > 1 or fidelity else ""
    return View(
        title=what if fidelity or performance is None else f"{_capital(performance.measured)}: {what}",
        subtitle=f"{role}{one_line(report.reference.name)} ({kv_of(report.reference)})",
        run_id=one_line(report.run_id),
        created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
        version=one_line(report.fidelab_version),
        advice=_advice(report.recommendation),
        advice_command=one_line((report.recommendation.command if report.recommendation else None) or ""),
        failures=tuple(
            shared((one_line(arm.name), line) for role, arm in arms for line in _failures(role, arm, fidelity))
        ),
        modified=tuple(
            shared((one_line(arm.name), f"ran with {', '.join(names)}") for _, arm in arms if (names := _modified(arm)))
        ),
        rows=tuple(_row(role, arm, report.reference, _saving(arm, records)) for role, arm in arms),
        floor="; ".join([_floor(report.floor), *_without_floor(report.candidates)]),
        control=_controls(controls),
        weights=_weights([arm for _, arm in arms]),
        ranking=_ranking(report.comparisons),
        tables=_present(ran_of(arm for _, arm in arms), timing_of(arm for _, arm in arms), attribution_of(report)),
        beside=_present(
            contexts_of(report),
            groups_of(report, "domain"),
            groups_of(report, "structure"),
            speculation_of(report),
            others_of(report),
            ways_of(report),
        ),
        remarks=remarks_of(report),
        engine_remarks=engine_remarks_of(report),
        truth=truth_line(report),
        points=(
            *(_points(sized, "control", report.control) if report.control else ()),
            *(p for number, arm in enumerate(report.candidates) for p in _points(sized, "candidate", arm, number)),
        ),
        run_details=tuple(_run_details(report)),
        settings=json.dumps(report.settings, indent=2, ensure_ascii=False, allow_nan=False),
        command=report.command,
        serve_commands=tuple(
            (one_line(arm.name), one_line(arm.serve_command))
            for arm in (report.reference, *report.candidates)
            if arm.serve_command
        ),
        ignored=_ignored(report),
        compared=_compared(report, performance, fidelity),
        text=_text(report),
        reference=None
        if size is None
        else FrontierPoint(one_line(report.reference.name), size, 0.0, None, "reference", unit=unit),
        performance=performance,
        headlines=(*bench_headlines(arms_of(report)), *partings_of(report)),
        sections=tuple(section for section in sections_of(report) if section.found),
        fidelity=fidelity,
    )


def _advice(found: Recommendation | None) -> tuple[str, ...]:
    if found is None:
        return ()
    lines = (
        one_line(found.text),
        *map(one_line, found.evidence),
        f"risk: {' · '.join(map(one_line, found.risks))}" if found.risks else "",
        f"not tested: {', '.join(map(one_line, found.untested))}" if found.untested else "",
        one_line(found.command_note) if found.arm is not None else "",
        *map(one_line, found.others),
        one_line(found.more),
    )
    return tuple(line for line in lines if line)


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
    return f"of the pasted command, in no arm: {said}"


def _row(role: str, arm: ArmRecord, reference: ArmRecord, saving: str) -> ArmRow:
    kld, composite = arm.deciding, arm.composite
    judged = arm.verdict if role == "candidate" else None
    return ArmRow(
        role=role,
        name=one_line(arm.name),
        engine=one_line(arm.engine),
        model=one_line(arm.model),
        band=(arm.verdict.band if arm.verdict else None) or ABSENT,
        at_best=(judged.at_best if judged else None) or "",
        status=STATUS[arm.status],
        reason=one_line(arm.reason or ""),
        kld=kld_of(kld),
        excess=excess_of(kld),
        changed=changed_of(kld),
        flips=flips_of(kld),
        run=run_of(kld),
        cache_bytes=format_bytes(arm.ran.cache_bytes_per_token if arm.ran else None),
        sentence=_sentence(arm, reference),
        because=_because(arm),
        too_close=composite.too_close_to_call if composite else False,
        key=_key(role, arm),
        text=text_of(kld),
        others=(*map(one_line, judged.notes if judged else ()), *others_in_words(arm)),
        saving="" if role == "reference" else saving,
        preliminary=judged is not None and judged.preliminary,
        modified=_modified(arm),
    )


def _modified(arm: ArmRecord) -> tuple[str, ...]:
    return tuple(map(one_line, arm.ran.modified)) if arm.ran else ()


def _saving(arm: ArmRecord, arms: Sequence[ArmRecord]) -> str:
    """The cache's bytes against those of a 16-bit cache, of the same engine if any arm tells them."""
    sizes = [(other.engine != arm.engine, size) for other in arms if (size := bytes_in_16_bits(other))]
    own = arm.ran.cache_bytes_per_token if arm.ran else None
    if own is None or not sizes:
        return ""
    percent = 100 * own / min(sizes)[1]
    return f"cache {f'{percent:.0f}%' if percent >= 1 else 'under 1%'} of a 16-bit cache"


def _weights(arms: Sequence[ArmRecord]) -> str:
    """The size of each arm's weights, arms of one size together; empty where none is recorded."""
    sizes: dict[str, list[str]] = {}
    for arm in arms:
        if arm.ran is not None and (size := arm.ran.size):
            how = "simulated" if arm.ran.simulated_weight_bytes else "as stored"
            sizes.setdefault(f"{how}: {format_amount(size / MIB)} MiB", []).append(one_line(arm.name))
    if len(sizes) == 1 and all(arm.ran is None or arm.ran.size for arm in arms):
        return f"weights, {next(iter(sizes))} in each arm"
    return "; ".join(f"weights of {', '.join(names)}, {size}" for size, names in sizes.items())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _compared(report: Report, performance: Performance | None, fidelity: bool) -> str:
    """One line: how many configurations were compared or measured, and on what."""
    n = len(report.candidates)
    if performance is not None and not fidelity:
        name = f"reference {one_line(report.reference.name)}" if n else one_line(report.reference.name)
        beside = f" and {n} other configuration{'' if n == 1 else 's'}" if n else ""
        return f"{_capital(performance.measured)} of {name}{beside}"
    arms = [*report.candidates, *([report.control] if report.control else [])]
    what = [text] if (text := _text(report)) else []
    for name in dict.fromkeys(name for arm in arms for name in arm.axes if name != DECIDING):
        n_items = next((axis.n_items for arm in arms if (axis := arm.axes.get(name)) and axis.n_items), None)
        what.append(one_line(name) + (f" ({n_items:,} item{'' if n_items == 1 else 's'})" if n_items else ""))
    line = f"{n} configuration{'' if n == 1 else 's'} compared with reference {one_line(report.reference.name)}"
    if not report.reference.measured:
        return line.replace("compared", "to be compared", 1)
    line = f"{line} on {joined(what)}" if what else line
    return f"{line}; {read}" if (read := _windows_read(arms)) else line


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
        return _positions(kld.n_items, text_of(kld))
    return ", ".join(f"{_positions(c['n_positions'], text_of(kld, c))} at {c['n_ctx']:,} tokens" for c in contexts)


def _scored_at(axis: Measurement) -> list[Mapping[str, Any]]:
    """What an axis scored at each context; empty where its facts do not have the form of KLD's."""
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


def _because(arm: ArmRecord) -> tuple[str, ...]:
    """The facts that set the band; not the reason why an arm did not run, which its sentence says."""
    facts = arm.verdict.because if arm.verdict is not None else ()
    return tuple(one_line(fact) for fact in facts if arm.measured or fact != arm.reason)


def _sentence(arm: ArmRecord, reference: ArmRecord) -> str:
    """What to do with an arm; why the reference did not run is not repeated."""
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
    """Unusable items, axes and benches without a number, in words; ``fidelity``: candidates have lines of their own."""
    if (role == "reference" or not fidelity) and not arm.measured:
        return [status_line(arm)]
    broken = {name: bench for name, bench in arm.benches.items() if not bench.measured and arm.measured}
    lines = [f"{one_line(name)} {status_line(bench)}" for name, bench in broken.items()]
    for name, axis in arm.axes.items():
        if not axis.measured:
            if not told_already(arm, axis.reason):
                lines.append(f"{one_line(name)} {status_line(axis)}")
        elif axis.n_failed:
            total = f" of {axis.n_items:,}" if axis.n_items is not None else ""
            lines.append(f"{axis.n_failed:,}{total} items failed ({one_line(name)})")
        lines += [
            f"{one_line(name)}, {label(cell.at)}: {status_line(cell)}" for cell in axis.cells if not cell.measured
        ]
    return lines


# ---------------------------------------------------------------------------------------------- floor and control

_SAME = {"max": 0.0, "exact_match": 1.0}
"""Metrics whose value alone proves that nothing differed."""


def _repeats(measurement: Measurement) -> bool:
    """The reference repeated itself exactly."""
    return measurement.status is Status.IDENTICAL or any(
        measurement.value(key, {}) == value for key, value in _SAME.items()
    )


def _floor(floor: Mapping[str, Measurement]) -> str:
    """What repeats, counted; else how far the reference is from itself."""
    measured = [(one_line(name), axis) for name, axis in floor.items() if axis.measured]
    same = [_repeated(name, axis) for name, axis in measured if _repeats(axis)]
    parts = [_apart(name, axis) for name, axis in measured if not _repeats(axis)]
    if same:
        verb = "repeat" if len(same) > 1 else "repeats"
        parts = [f"{joined(same)} {verb}, on this machine and thread count", *parts]
    parts += [
        f"{one_line(name)} {status_line(axis)}"
        for name, axis in floor.items()
        if not (axis.measured or axis.status is Status.NOT_MEASURABLE or (axis.reason or "").startswith(NO_REFERENCE))
    ]
    return f"noise floor (reference against itself): {'; '.join(part for part in parts if part) or 'not measured'}"


def _without_floor(arms: Sequence[ArmRecord]) -> list[str]:
    """Why the effect of a change of last bits alone was not measured; equal reasons are merged."""
    reasons = [
        (one_line(arm.name), one_line(arm.floor.reason or "").removeprefix("not measured: "))
        for arm in arms
        if arm.measured and arm.floor is not None
    ]
    missing, text = [(name, why) for name, why in reasons if why], "a change of last bits alone was not measured"
    if missing == reasons and len({why for _, why in missing}) == 1:
        return [f"{text}: {missing[0][1]}"]
    return [f"{text} for {line}" for line in shared(missing)]


def _repeated(name: str, measurement: Measurement) -> str:
    """What is the same in both captures."""
    n = sum(context["n_positions"] for context in _scored_at(measurement)) or measurement.n_items
    return name if n is None else f"{name} ({n - (measurement.n_failed or 0):,} of {n:,} items)"


def _apart(name: str, measurement: Measurement) -> str:
    """Figures of the difference between the two captures."""
    heads = [
        f"{titled(name, metric)} {estimate_of(metric)}" for metric in measurement.headlines if metric.value is not None
    ]
    exact, n = measurement.value("exact_match", {}), measurement.n_items
    if exact is not None and n is not None:
        heads.insert(0, f"{name}: {round(exact * (n - (measurement.n_failed or 0))):,} of {n:,} items repeat")
    return ", ".join(heads) or f"{name}: measured"


def _controls(arms: Sequence[ArmRecord]) -> str:
    """The cost of the control, and of the controls on other kernel paths."""
    tail = ["over control: paired differences"] if any(arm.measured for arm in arms) else []
    return "; ".join([*map(_control, arms), *tail]) or "control: none"


def _control(arm: ArmRecord) -> str:
    name = one_line(arm.name)
    if not arm.measured:
        return f"control {name}: {status_line(arm)}"
    parts = [STATUS[arm.status]] if arm.status is Status.IDENTICAL else []
    if not (cost := kld_of(arm.deciding)).absent:
        parts.append(f"KLD {cost} nats")
    return f"control {name}: {', '.join(parts) or 'not measured'}"


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
    return f"cost by paired KLD differences: {names}{f' ({meant})' if meant else ''}"


_SIGNS = {"≈": "shown to be equal within 10%", "?": "tied, cannot be told apart"}


Sized = Callable[[ArmRecord], tuple[float | None, str]]


def _sized(report: Report) -> Sized:
    """The size by which arms of this report are compared, and its unit: of caches, of weights, or of both."""
    controls = [report.control] if report.control else []
    sizes = Sizes.of(report.reference, report.candidates, controls)

    def size(arm: ArmRecord) -> tuple[float | None, str]:
        cache, weights = (arm.ran.packed_cache_bytes, arm.ran.size) if arm.ran else (None, None)
        match sizes.what:
            case "weights":
                return weights and weights / 2**20, "MiB of weights"
            case "total":
                both = None if cache is None or weights is None else weights + (sizes.n_ctx or 0) * cache
                return both and both / 2**20, f"MiB of weights and of cache at {sizes.n_ctx or 0:,} tokens"
            case _:
                return cache, CACHE_SIZE

    return size


def _points(sized: Sized, role: str, arm: ArmRecord, number: int = 0) -> list[FrontierPoint]:
    mean = arm.axes[DECIDING].metric("mean", {}) if DECIDING in arm.axes else None
    size, unit = sized(arm)
    if mean is None or mean.value is None or size is None or mean.bound:
        return []
    name, key, place = one_line(arm.name), _key(role, arm), arm_id(role, number)
    return [FrontierPoint(name, size, mean.value, mean.interval, key, place, unit)]


def _run_details(report: Report) -> list[tuple[str, str]]:
    lines = [
        ("run", report.run_id),
        ("created", report.created.isoformat(timespec="seconds")),
        ("fidelab", report.fidelab_version),
        *_flat("", report.environment),
        *_flat("comparability key: ", report.comparability_key),
    ]
    return [(one_line(name), one_line(value)) for name, value in lines]


def _flat(prefix: str, tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += _flat(f"{prefix}{name}.", value)
        else:
            lines.append((f"{prefix}{name}", plain(value)))
    return lines
