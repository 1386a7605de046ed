"""What speculation is worth: forecast from the captures of a draft model, and with quantization together.

See docs/metrics.md#acceptance and docs/metrics.md#speculation, which is about four measured arms and their reports.

A flag does not make a server speculate: that it did, or did not, is read from what its ``/metrics`` counted while the
arm was measured.  An arm of which that is not known gives no ρ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fidelab.axes.drafts import COUNTED, SPECULATION, drafted_by, in_words
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.core import Status
from fidelab.engines import ENGINES
from fidelab.errors import FidelabError, InputError, MismatchError, UsageError
from fidelab.metrics.speculation import ARMS, compose
from fidelab.results.composition_record import Composition
from fidelab.results.measurement import Coordinates, Flag, Measurement, label
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import REPORT
from fidelab.runs.pairing import ArmResult

__all__ = ["compose_runs", "with_forecast"]

_ROWS = "forced.kl"  # the captures with rows along the reference's text
_SPECULATIVE = ("speculative", "both")
_TELLING = ("vllm", "sglang")  # they have counters whenever they speculate
_WELL = (Status.OK, Status.IDENTICAL)
_MAY_DIFFER = ("tokenizer", "weights", "dtype", "goodput")  # by what quantizing changes, or no matter of rates
_RATES = {"serving": ("output_rate", "arrival"), "decode": ("isolated", "depth")}
"""Bench → the metric that is composed, and a coordinate that all its cells have; what is served goes first."""


def with_forecast(found: Measurement, arm: ArmResult, reference: ArmResult, others: Iterable[ArmResult]) -> Measurement:
    """An arm's greedy text with the forecast for its draft model, where another arm of the run is that model.

    ``found``: what axis trajectory found on ``arm``.  Axis forced has the rows of both models along the reference's
    text.  Without such an arm, or such rows, a sentence says what gives a forecast.
    """
    speculation = ENGINES.load(arm.arm.engine).speculation(dict(arm.arm.options)) if arm.arm.draft else None
    if speculation is None or not found.measured:
        return found
    ran = (arm.ran or {}).get(SPECULATION) or {}
    tokens = speculation.tokens or ran.get("tokens")
    same = [other for other in (reference, *others) if other.arm.path == arm.arm.draft and not _speculates(other)]
    rows = next((other.captures[_ROWS] for other in same if _ROWS in other.captures), None)
    if rows is None or _ROWS not in reference.captures or not tokens:
        arms = f"--candidate model={speculation.draft} --axes trajectory,forced"
        hint = f"a forecast takes the draft model as an arm beside it: {arms}"
        return found.model_copy(update={"flags": (*found.flags, Flag(kind=COUNTED, text=hint))})
    try:
        forecast = drafted_by(Pair.match(Capture(reference.captures[_ROWS]), Capture(rows)), int(tokens))
    except FidelabError as error:
        return found.model_copy(update={"flags": (*found.flags, Flag(kind=COUNTED, text=f"no forecast: {error}"))})
    metrics = (*found.metrics, *forecast)
    said = Flag(kind=COUNTED, text=in_words(speculation.method, metrics))
    flags = tuple(said if flag.kind == COUNTED else flag for flag in found.flags)
    return found.model_copy(update={"metrics": metrics, "flags": flags})


def _speculates(result: ArmResult) -> bool:
    return ENGINES.load(result.arm.engine).speculation(dict(result.arm.options)) is not None


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


def compose_runs(where: Mapping[str, str]) -> list[Composition]:
    """One record for each load that the four arms share, in the order of the plain arm.

    Args:
        where: ``plain``, ``quantized``, ``speculative`` and ``both`` → a run's folder or its ``report.json``; where a
            report has several arms, with ``:NAME`` behind it.

    Raises:
        InputError: no report there, no such arm, or an arm without the benches ``serving`` or ``decode``.
        UsageError: two of the four are the same arm, or an arm has to be named.
        MismatchError: the arms were not measured alike; the message names the first cell that one of them lacks, or
            what else differs.
    """
    arms = {name: _read(name, where[name]) for name in ARMS}
    for first, arm in arms.items():
        for second in ARMS[ARMS.index(first) + 1 :]:
            if arm.where == arms[second].where:
                raise UsageError(f"--{first} and --{second} are the same arm: {arm.where}")
    for name, arm in arms.items():
        _check_alike("plain", arms["plain"], name, arm)
        _check_alike(name, arm, "plain", arms["plain"])
    return [_composition(shape, arms) for shape in arms["plain"].cells]


def _check_alike(first: str, one: _Arm, second: str, other: _Arm) -> None:
    for key in dict.fromkeys((*one.protocol, *other.protocol)):
        first_value, second_value = one.protocol.get(key), other.protocol.get(key)
        if first_value != second_value:
            raise MismatchError(
                f"{first} was measured with {key} {first_value}, {second} with {second_value}: measure all four alike"
            )
    missing = next((shape for shape in one.cells if shape not in other.cells), None)
    if missing is not None:
        raise MismatchError(
            f"{second} ({other.where}) has no cell with {missing}, as {first} has: measure all four with the same flags"
        )


def _composition(shape: str, arms: Mapping[str, _Arm]) -> Composition:
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
            Flag(kind="noise", text="an arm was measured once, so there is no interval; --repeats 3 gives one")
        )
    at = cells["plain"].at
    counts = {
        "context": at.get("context", at.get("depth")),
        "output": at.get("output"),
        "concurrency": at.get("concurrency", at.get("batch")),
    }
    lengths = {name: (cell.speculation or {}).get("acceptance_length") for name, cell in cells.items()}
    return Composition.model_validate(
        {
            "arms": {name: arm.where for name, arm in arms.items()},
            "arrival": at.get("arrival"),
            **{name: count for name, count in counts.items() if isinstance(count, int)},  # a mixture is told in words
            "request_rate": at.get("rate"),
            "rates": {name: geometric_mean(cell.rates) for name, cell in cells.items() if cell.rates},
            "acceptance_lengths": {name: length for name, length in lengths.items() if length},
            "rho": None if composed is None else composed.rho,
            "ci": None if composed is None else composed.interval,
            "kind": "cannot tell" if composed is None else composed.kind,
            "flags": (*faults, *flags),
        }
    )


def _doubt(name: str, cell: _Cell) -> str | None:
    """Why it is not known that an arm speculated, or that it did not; ``None`` where its server showed it."""
    server, drafts, wanted = cell.server, cell.speculation, name in _SPECULATIVE
    unknown = f"so nothing shows {'that it speculated' if wanted else 'that it did not speculate'}"
    if server is None:
        return f"no server told what it counted, {unknown}"
    if drafts is None:
        silent = not wanted and server.get("kind") in _TELLING
        return None if silent else f"its server has no counters of speculation, {unknown}"
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
            f"--{flag} {where}: no arm has the benches serving or decode; make one with: fidelab bench serve"
        )
    if not chosen:
        raise InputError(f"--{flag} {where}: no arm {name!r} with benches; there are: {names}")
    if len(chosen) > 1:
        raise UsageError(f"--{flag} {where}: the report has several arms ({names}); add one as {path}:{chosen[0].name}")
    cells = _cells(chosen[0])
    if not cells:
        raise InputError(f"--{flag} {where}: {chosen[0].name} has no cells: {_why(chosen[0])}")
    return _Arm(f"{file}:{chosen[0].name}", _protocol(report, chosen[0]), cells)


def _protocol(report: Report, arm: ArmRecord) -> dict[str, object]:
    """What must agree, besides the cells themselves."""
    bench = _bench(arm)
    key = report.comparability_key.get(f"benches.{bench}")
    agreed = key if isinstance(key, Mapping) else {}
    return {"bench": bench, **{name: value for name, value in agreed.items() if name not in _MAY_DIFFER}}


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


def _why(arm: ArmRecord) -> str:
    bench = _bench(arm)
    return (bench and arm.benches[bench].reason) or arm.reason or arm.status.value


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
        well = cell is None or (cell.status in _WELL and cell.valid)
        reason = None if well and rates else (cell and cell.reason) or ("not measured" if well else "not valid")
        cells[label(where)] = _Cell(where, rates, flags, facts.get("server"), reason)
    return cells
