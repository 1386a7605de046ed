"""Whether quantization and speculative decoding multiply: four measured arms, told from their reports.

See docs/metrics.md#speculation.

A flag does not make a server speculate: that it did, or did not, is read from what its ``/metrics`` counted while the
arm was measured.  An arm of which that is not known gives no ρ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from fidelab.core import Status
from fidelab.errors import InputError, MismatchError, UsageError
from fidelab.metrics.speculation import ARMS, compose
from fidelab.results.bench_record import SpeedCell
from fidelab.results.bench_values import Flag
from fidelab.results.record import ArmRecord, Report
from fidelab.results.serving_record import Arrival, Composition, LoadCell, Server
from fidelab.results.store import REPORT

__all__ = ["compose_runs"]

_SPECULATIVE = ("speculative", "both")
_TELLING = ("vllm", "sglang")  # they have counters whenever they speculate
_WELL = (Status.OK, Status.IDENTICAL)
_MAY_DIFFER = ("tokenizer", "weights", "dtype", "goodput")  # by what quantizing changes, or no matter of rates
_SHAPE = ("arrival", "context", "output", "concurrency", "request_rate")


@dataclass(frozen=True)
class _Shape:
    """What makes two cells alike."""

    arrival: Arrival | None
    context: int | None
    output: int | None
    concurrency: int | None
    request_rate: float | None

    def __str__(self) -> str:
        told = ((name.replace("_", " "), getattr(self, name)) for name in _SHAPE)
        return ", ".join(f"{name} {value}" for name, value in told if value is not None)


@dataclass(frozen=True)
class _Cell:
    """One arm under one load: its repeats (tok/s), or why there are none."""

    rates: tuple[float, ...]
    flags: tuple[Flag, ...]
    server: Server | None
    reason: str | None = None


@dataclass(frozen=True)
class _Arm:
    """One of the four: where and how it was measured, and its cells."""

    where: str
    protocol: Mapping[str, object]
    cells: Mapping[_Shape, _Cell]


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
        ours, theirs = one.protocol.get(key), other.protocol.get(key)
        if ours != theirs:
            raise MismatchError(
                f"{first} was measured with {key} {ours}, {second} with {theirs}: measure all four alike"
            )
    missing = next((shape for shape in one.cells if shape not in other.cells), None)
    if missing is not None:
        raise MismatchError(
            f"{second} ({other.where}) has no cell with {missing}, as {first} has: measure all four with the same flags"
        )


def _composition(shape: _Shape, arms: Mapping[str, _Arm]) -> Composition:
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
    told = {name: cell.server.speculation for name, cell in cells.items() if cell.server}
    return Composition(
        arms={name: arm.where for name, arm in arms.items()},
        **vars(shape),
        rates={name: geometric_mean(cell.rates) for name, cell in cells.items() if cell.rates},
        acceptance_lengths={
            name: said.acceptance_length for name, said in told.items() if said and said.acceptance_length
        },
        rho=None if composed is None else composed.rho,
        ci=None if composed is None else composed.interval,
        kind="cannot tell" if composed is None else composed.kind,
        flags=(*faults, *flags),
    )


def _doubt(name: str, cell: _Cell) -> str | None:
    """Why it is not known that an arm speculated, or that it did not; ``None`` where its server showed it."""
    server, wanted = cell.server, name in _SPECULATIVE
    unknown = f"so nothing shows {'that it speculated' if wanted else 'that it did not speculate'}"
    if server is None:
        return f"no server told what it counted, {unknown}"
    said = server.speculation
    if said is None:
        return (
            None if not wanted and server.kind in _TELLING else f"its server has no counters of speculation, {unknown}"
        )
    if wanted:
        return None if said.engaged else f"it did not speculate: {_count(said.drafted)} draft tokens, none accepted"
    if said.engaged or said.drafted:
        return f"it was to run without speculation and speculated: {_count(said.drafted)} draft tokens"
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
    measured = [arm for arm in arms if arm.benches.serving or arm.benches.decode]
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
    bench = "serving" if arm.benches.serving else "decode"
    key = report.comparability_key.get(f"benches.{bench}")
    told = key if isinstance(key, Mapping) else {}
    return {"bench": bench, **{name: value for name, value in told.items() if name not in _MAY_DIFFER}}


def _split(where: str) -> tuple[Path, str | None]:
    """``RUN:NAME`` → path and arm; names may hold colons, too."""
    path = Path(where)
    if not path.exists():
        for at in (i for i, char in enumerate(where) if char == ":" and i):
            if Path(where[:at]).exists():
                return Path(where[:at]), where[at + 1 :]
    return path, None


def _why(arm: ArmRecord) -> str:
    outcome = arm.benches.serving or arm.benches.decode
    return (outcome and outcome.reason) or arm.reason or arm.status.value


def _cells(arm: ArmRecord) -> dict[_Shape, _Cell]:
    """By the load's shape."""
    if serving := arm.benches.serving:
        pairs = [(_Shape(*(getattr(cell, name) for name in _SHAPE)), _loaded(cell)) for cell in serving.cells]
    else:
        cells = arm.benches.decode.cells if arm.benches.decode else ()
        pairs = [(_Shape(None, cell.tokens, cell.n, cell.batch, None), _decoded(cell)) for cell in cells]
    found: dict[_Shape, _Cell] = {}
    for shape, cell in pairs:
        if shape in found:
            raise InputError(f"{arm.name} has two cells with {shape}: they cannot be told apart")
        found[shape] = cell
    return found


def _loaded(cell: LoadCell) -> _Cell:
    """A cell of a server."""
    rates = tuple(rate for rate in cell.repeats.get("output_rate", (cell.output_rate,)) if rate)
    fine = cell.status in _WELL and cell.valid and rates
    return _Cell(rates, cell.flags, cell.server, None if fine else cell.reason or "not valid")


def _decoded(cell: SpeedCell) -> _Cell:
    """A cell of an engine by itself, which no server speaks of."""
    rates = cell.rate.repeats if cell.rate is not None and cell.status in _WELL else ()
    return _Cell(rates, cell.flags, None, None if rates else cell.reason or "not measured")
