"""Test whether the speed-ups of quantization and speculation multiply, from four measured arms and their reports.

See docs/metrics/speed.md#speculation.

A flag does not prove that a server speculates. The counters of ``/metrics`` during the measurement do. An arm without
these counters gives no ρ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from fidelab.core import Status
from fidelab.core.errors import InputError, MismatchError, UsageError
from fidelab.engines.base import engines
from fidelab.metrics.speculation import ARMS, compose
from fidelab.results.measurement import Coordinates, Definition, Flag, label
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import REPORT
from fidelab.results.study import PART, Study, StudyRow
from fidelab.studies.study import new_study

KIND: Final = "speculation"
_RATE = Definition("rate", "tok/s", "higher", "Output rate: geometric mean of the repeats.")
_TIMES = Definition("speedup", "ratio", "higher", "Output rate relative to the plain configuration.")
_LENGTH = Definition("acceptance_length", "ratio", "higher", "Tokens per verification of drafts, by its server.")
_RHO = Definition("rho", "ratio", "higher", "S_both / (S_quantized * S_speculative).", name="ρ")
_FIGURES = ("arm", "rate", "speedup", "acceptance_length", "rho", "together")
_NOTE = (
    "speedup: over the plain configuration; acceptance length: tokens per verification, by the server; ρ below 0.9: "
    "worth less together than each by itself, above 1.1 more"
)
_SPECULATIVE = ("speculative", "both")
_MEASURED_STATUSES = (Status.OK, Status.IDENTICAL)
_MAY_DIFFER = ("tokenizer", "weights", "dtype", "goodput")  # by what quantizing changes, or no matter of rates
_RATES = {"serving": ("output_rate", "arrival"), "decode": ("isolated", "depth")}
"""Bench → the metric that is composed, and a coordinate that all its cells have; what is served goes first."""


@dataclass(frozen=True)
class _Cell:
    """One arm under one load: its repeats (tok/s), or why there are none; ``server``: what its server counted."""

    at: Coordinates
    rates: tuple[float, ...]
    flags: tuple[Flag, ...]
    server: Mapping[str, Any] | None
    reason: str | None = None

    @property
    def speculation(self) -> Mapping[str, Any] | None:
        """The server's counters of drafts; ``None`` where it has none."""
        return None if self.server is None else self.server.get("speculation")


@dataclass(frozen=True)
class _Arm:
    """One of the four: where and how it was measured, and its cells by their shape in words."""

    where: str
    protocol: Mapping[str, object]
    cells: Mapping[str, _Cell]


def compose_runs(where: Mapping[str, str], command: str = "") -> Study:
    """Return rows of the four arms, and their ratio, for each load that they share, in the order of the plain arm.

    Args:
        where: ``plain``, ``quantized``, ``speculative`` and ``both`` → a run's folder or its ``report.json``; followed
            by ``:NAME`` where a report has several arms.

    Raises:
        InputError: If a report or an arm does not exist, or an arm has neither of the benches ``serving`` and
            ``decode``.
        UsageError: If two of the four are the same arm, or an arm has to be named.
        MismatchError: If the arms were not measured alike. The message names the first cell that one of them lacks, or
            what else differs.
    """
    arms = {name: _read(name, where[name]) for name in ARMS}
    for first, arm in arms.items():
        for second in ARMS[ARMS.index(first) + 1 :]:
            if arm.where == arms[second].where:
                raise UsageError(f"--{first} and --{second} are the same configuration: {arm.where}")
    for name, arm in arms.items():
        _check_same_protocol("plain", arms["plain"], name, arm)
        _check_same_protocol(name, arm, "plain", arms["plain"])
    rows = [row for shape in arms["plain"].cells for row in _rows(shape, arms)]
    coordinates = dict.fromkeys(name for row in rows for name in row.at if name not in (PART, "arm"))
    return new_study(
        command=command,
        settings=dict(where),
        kind=KIND,
        title="do quantization and speculative decoding multiply",
        columns=(*coordinates, *_FIGURES),
        rows=rows,
        sentences=tuple(f"{name}: {arm.where}" for name, arm in arms.items()),
        note=_NOTE,
    )


def _check_same_protocol(first: str, one: _Arm, second: str, other: _Arm) -> None:
    for key in dict.fromkeys((*one.protocol, *other.protocol)):
        first_value, second_value = one.protocol.get(key), other.protocol.get(key)
        if first_value != second_value:
            raise MismatchError(
                f"{first} was measured with {key} {first_value}, {second} with {second_value}: "
                "measure all four with the same settings"
            )
    missing = next((shape for shape in one.cells if shape not in other.cells), None)
    if missing is not None:
        raise MismatchError(
            f"{second} ({other.where}) has no cell with {missing}, as {first} has: measure all four with the same flags"
        )


def _rows(shape: str, arms: Mapping[str, _Arm]) -> Iterator[StudyRow]:
    """A row for each arm under one load, and one for all together."""
    cells = {name: arm.cells[shape] for name, arm in arms.items()}
    faults = [
        Flag(kind="not-engaged", text=f"{name}: {why}") for name, cell in cells.items() if (why := _doubt(name, cell))
    ]
    flags = [Flag(kind=flag.kind, text=f"{name}: {flag.text}") for name, cell in cells.items() for flag in cell.flags]
    flags += [
        Flag(kind="errors", text=f"{name}: {cell.reason}")
        for name, cell in cells.items()
        if cell.reason and not cell.flags
    ]
    usable = all(cell.rates and not cell.reason for cell in cells.values())
    composed = compose(*(cell.rates for cell in cells.values())) if usable and not faults else None
    if composed is not None and composed.interval is None:
        flags.append(
            Flag(kind="noise", text="a configuration was measured once, so there is no interval; --repeats 3 gives one")
        )
    at = cells["plain"].at
    rates = {name: geometric_mean(cell.rates) for name, cell in cells.items() if cell.rates}
    for name, cell in cells.items():
        metrics = [_RATE(rates[name], repeats=cell.rates)] if name in rates else []
        if name in rates and "plain" in rates and name != "plain":
            metrics.append(_TIMES(rates[name] / rates["plain"]))
        if length := (cell.speculation or {}).get("acceptance_length"):
            metrics.append(_LENGTH(length))
        lost = None if name in rates else cell.reason or "not measured"
        status = Status.NOT_MEASURABLE if lost else Status.OK
        yield StudyRow(status=status, reason=lost, at={**at, PART: "arm", "arm": name}, metrics=tuple(metrics))
    flags = [*faults, *flags]
    yield StudyRow(
        status=Status.NOT_MEASURABLE if composed is None else Status.OK,
        reason="; ".join(flag.text for flag in flags) if composed is None else None,
        at={**at, PART: "together"},
        metrics=() if composed is None else (_RHO(composed.rho, composed.interval),),
        facts={"together": "cannot tell" if composed is None else composed.kind},
        flags=tuple(flags),
    )


def _doubt(name: str, cell: _Cell) -> str | None:
    """Reason why it is unknown whether an arm speculated; ``None`` where its server showed it."""
    server, drafts, wanted = cell.server, cell.speculation, name in _SPECULATIVE
    unknown = f"so nothing shows {'that it speculated' if wanted else 'that it did not speculate'}"
    if server is None:
        return f"no server reported its counters, {unknown}"
    if drafts is None:
        metrics = [cls.server_metrics for cls in engines() if cls.server_metrics is not None]
        silent = not wanted and any(names.counts_drafts and names.server == server.get("kind") for names in metrics)
        return None if silent else f"its server has no speculation counters, {unknown}"
    drafted = drafts.get("drafted")
    engaged = (drafts.get("accepted") or 0) > 0 or (drafts.get("acceptance_length") or 0) > 1
    if wanted:
        return None if engaged else f"it did not speculate: {_count(drafted)} draft tokens, none accepted"
    if engaged or drafted:
        return f"it was to run without speculation and speculated: {_count(drafted)} draft tokens"
    return None


def _count(drafted: float | None) -> str:
    return "an unknown number of" if drafted is None else f"{drafted:,.0f}"


# -------------------------------------------------------------------------------------------- from reports


def _read(flag: str, where: str) -> _Arm:
    """The arm that ``where`` names; its cells by their shape."""
    path, name = _split(where)
    file = path / REPORT if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--{flag} {where}: there is no report; name a run's folder or its {REPORT}")
    report = Report.from_json(file)
    arms = [arm for arm in (report.reference, report.control, *report.candidates) if arm is not None]
    measured = [arm for arm in arms if _bench(arm)]
    chosen = [arm for arm in measured if name in (None, arm.name)]
    names = ", ".join(arm.name for arm in measured)
    if not measured:
        raise InputError(
            f"--{flag} {where}: no configuration has the benches serving or decode; run: fidelab bench serve"
        )
    if not chosen:
        raise InputError(f"--{flag} {where}: no configuration {name!r} with benches; available: {names}")
    if len(chosen) > 1:
        raise UsageError(
            f"--{flag} {where}: it has several configurations ({names}); add one as {path}:{chosen[0].name}"
        )
    [arm] = chosen
    cells, bench = _cells(arm), _bench(arm)
    if not cells:
        why = (bench and arm.benches[bench].reason) or arm.reason or arm.status.value
        raise InputError(f"--{flag} {where}: {arm.name} has no cells: {why}")
    key = report.comparability_key.get(f"benches.{bench}")
    agreed = key if isinstance(key, Mapping) else {}
    protocol = {"bench": bench, **{name: value for name, value in agreed.items() if name not in _MAY_DIFFER}}
    return _Arm(f"{file}:{arm.name}", protocol, cells)


def _split(where: str) -> tuple[Path, str | None]:
    """``RUN:NAME`` → path and arm; names may hold colons, too."""
    path = Path(where)
    if not path.exists():
        for at in (i for i, char in enumerate(where) if char == ":" and i):
            if Path(where[:at]).exists():
                return Path(where[:at]), where[at + 1 :]
    return path, None


def _bench(arm: ArmRecord) -> str | None:
    """The bench that is composed; ``None`` where the arm has none of that kind."""
    return next((name for name in _RATES if name in arm.benches), None)


def _cells(arm: ArmRecord) -> dict[str, _Cell]:
    """By the load's shape in words; of decoding, with the tokens decoded."""
    bench = _bench(arm)
    if bench is None:
        return {}
    measured, (rate, shape) = arm.benches[bench], _RATES[bench]
    cells = {}
    for at in measured.shapes():
        if shape not in at:
            continue
        cell, metric = measured.cell(at), measured.metric(rate, at)
        facts = cell.facts if cell else {}
        where: Coordinates = {**at, "output": facts["n"]} if "n" in facts else at
        rates = tuple(filter(None, metric.repeats or (metric.value,))) if metric else ()
        flags = tuple(dict.fromkeys((*(cell.flags if cell else ()), *(metric.flags if metric else ()))))
        well = cell is None or (cell.status in _MEASURED_STATUSES and cell.valid)
        reason = None if well and rates else (cell and cell.reason) or ("not measured" if well else "not valid")
        cells[label(where)] = _Cell(where, rates, flags, facts.get("server"), reason)
    return cells
