"""Weights × KV cache at equal bytes: losses that runs measured, joined with what memory and bandwidth allow.

A cell is a format of the weights with a format of the keys and one of the values.  Its loss, the mean KL over the
reference, is *measured* where an arm ran so, and else *predicted* from arms that differ from the reference in parts of
it: ``KL(w, kv) ≈ KL(w) + KL(kv)``, and ``KL(kv) ≈ KL(k) + KL(v)``, with as few terms as the arms allow.

For small errors the KL is quadratic in the change of the logits, so that it behaves like the square of a length:
``KL(a, b) = KL(a) + KL(b) + 2ρ·sqrt(KL(a)·KL(b))`` with a correlation ρ between -1 and 1.  Adding up means ρ = 0.
Cells that were measured and could have been predicted tell ρ, and with it how far predictions may be wrong; without
any the interval of a prediction is that of all ρ.  See docs/advise.md.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fidelab.core import FormatSpec, KVSpec, Status
from fidelab.core.errors import FidelabError, InputError, UsageError
from fidelab.core.registry import require
from fidelab.formats import create
from fidelab.formats.weights import weight_format
from fidelab.metrics.intervals import RatioItems, critical_value, paired_difference
from fidelab.physics.devices import Device
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model
from fidelab.results.measurement import DECIDING, Coordinates, Definition
from fidelab.results.numbers import counted, format_tokens
from fidelab.results.recommend import serve_command
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import RUNS, RunFolder, find_run
from fidelab.results.study import PART, Study, StudyRow
from fidelab.studies.study import new_study

KIND = "advice"
NATIVE = "native"
_MOST_ROWS = 24  # that a terminal shows, besides the frontier
_WIDE = ("f32", "f16", "bf16")
_NEXT, _ENOUGH = 5, 3  # cells that are proposed; cells that a correlation is estimated from
_EIGHT = (7.5, 9.0)  # bits per element, scales included, of a cache "at 8 bits"
_UNMEASURED = (("int8", "int4[group=64]"), ("k16v8", "fp8_e4m3", "q8_0", "q4_0"))  # shown where nothing is measured


# ------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True, order=True)
class Pair:
    """A format of the weights, one of the keys, one of the values, and the layers whose cache is left alone."""

    weights: str
    k: str
    v: str
    skip: tuple[int, ...] = ()

    @property
    def kv(self) -> str:
        """As ``--kv`` takes it."""
        if not self.skip:
            return self.k if self.k == self.v else f"{self.k}/{self.v}"
        layers = f"skip-layers={','.join(map(str, self.skip))}"
        sides = [f"{side[:-1]},{layers}]" if side.endswith("]") else f"{side}[{layers}]" for side in (self.k, self.v)]
        return sides[0] if self.k == self.v else "/".join(sides)

    @property
    def spec(self) -> KVSpec:
        """The cache's formats."""
        return KVSpec.parse(self.kv)

    def only(self, factors: Iterable[str]) -> Pair:
        """This pair with some of ``w``, ``k`` and ``v`` alone."""
        kept = frozenset(factors)
        cache = {side: getattr(self, side) if side in kept else _WIDE[-1] for side in "kv"}
        return Pair(self.weights if "w" in kept else NATIVE, **cache, skip=self.skip if kept & {"k", "v"} else ())

    @property
    def factors(self) -> tuple[str, ...]:
        """What differs from the model's own 16 bits."""
        named = (("w", self.weights != NATIVE), ("k", self.k not in _WIDE), ("v", self.v not in _WIDE))
        return tuple(name for name, differs in named if differs)


@dataclass(frozen=True)
class Measured:
    """What one arm lost: nats, with its 95% interval, where several documents or blocks gave one."""

    mean: float
    interval: tuple[float, float] | None
    arm: str = ""
    run: Path | None = field(default=None, compare=False)
    bound: bool = False


@dataclass(frozen=True)
class Loss:
    """The mean KL of a pair, nats.

    Attributes:
        low, high: 95% interval; ``high`` is infinite where nothing bounds it.
        source: ``predicted`` from ``parts``, or measured by the one arm there; ``unknown``: a part was never measured.
    """

    mean: float
    low: float
    high: float
    source: Literal["measured", "predicted", "unknown"]
    parts: tuple[Measured, ...] = ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval, where both ends are known."""
        return (self.low, self.high) if math.isfinite(self.high) else None


_UNKNOWN = Loss(math.inf, 0.0, math.inf, "unknown")


class Losses:
    """Losses of all pairs, from those that were measured."""

    def __init__(self, measured: Mapping[Pair, Measured]) -> None:
        self.measured = dict(measured)

    def of(self, pair: Pair, *, predicted: bool = False) -> Loss:
        """The loss of a pair; ``predicted``: as if it had not been measured itself."""
        if not predicted and (own := self.measured.get(pair)) is not None:
            low, high = own.interval or (0.0, math.inf)
            return Loss(own.mean, low, high, "measured", (own,))
        parts = self._parts(pair, {pair} if predicted else set())
        if parts is None:
            return _UNKNOWN
        ends = [part.interval or (0.0, math.inf) for part in parts]
        means = [part.mean for part in parts]
        low, high = self.correlations if len(parts) > 1 else (0.0, 0.0)
        mean = sum(means)
        return Loss(
            mean,
            min(mean, max(0.0, _joined([end[0] for end in ends], low))),
            max(mean, _joined([end[1] for end in ends], high)),
            "predicted",
            tuple(parts),
        )

    def _parts(self, pair: Pair, without: set[Pair]) -> list[Measured] | None:
        """Measurements of disjoint factors that make up the pair, as few as there are; ``None`` without such."""
        for blocks in _partitions(pair.factors):
            found = [self._single(pair.only(block), without) for block in blocks]
            if all(part is not None for part in found):
                return [part for part in found if part is not None]
        return None

    def _single(self, pair: Pair, without: set[Pair]) -> Measured | None:
        """The measurement of a pair, where sides with 16 bits may have been measured with 32."""
        sides = [(_WIDE[::-1] if side in _WIDE else (side,)) for side in (pair.k, pair.v)]
        same = (replace(pair, k=k, v=v) for k, v in product(*sides))
        return next((self.measured[one] for one in same if one in self.measured and one not in without), None)

    @cached_property
    def checks(self) -> tuple[tuple[Pair, float, float, float], ...]:
        """Pairs that were measured and could be predicted: the pair, measured, added up, and ρ."""
        rows = []
        for pair, own in self.measured.items():
            parts = self._parts(pair, {pair}) if len(pair.factors) > 1 and not own.bound else None
            if parts is not None and len(parts) > 1 and min(part.mean for part in parts) > 0:
                added = sum(part.mean for part in parts)
                cross = _joined([part.mean for part in parts], 1.0) - added
                rows.append((pair, own.mean, added, (own.mean - added) / cross))
        return tuple(rows)

    @cached_property
    def correlations(self) -> tuple[float, float]:
        """ρ that the next pair may have: the 95% prediction interval from measured pairs, all of -1 … 1 without."""
        found = np.array([row[3] for row in self.checks])
        if len(found) < _ENOUGH:
            return -1.0, 1.0
        half = critical_value(len(found)) * float(found.std(ddof=1)) * math.sqrt(1 + 1 / len(found))
        return max(-1.0, float(found.mean()) - half), min(1.0, float(found.mean()) + half)


def _joined(losses: Sequence[float], rho: float) -> float:
    """``Σ x + 2ρ Σ_{i<j} sqrt(x_i·x_j)``, and of ρ = -1 the least that lengths allow: what the largest leaves over."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    cross = 2 * sum(math.sqrt(a * b) for a, b in combinations(losses, 2))
    roots = [math.sqrt(x) for x in losses]
    least = max(0.0, 2 * max(roots, default=0.0) - sum(roots)) ** 2
    return max(least, sum(losses) + rho * cross)


def _partitions(factors: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to divide up to three factors, fewest blocks first; keys and values stay together where they can."""
    if not factors:
        yield []  # nothing differs: no loss, as the 16-bit cache stands for the 32-bit one
        return
    yield [tuple(factors)]
    if len(factors) == 3:
        yield from ([("w",), ("k", "v")], [("w", "k"), ("v",)], [("w", "v"), ("k",)])
    if len(factors) > 1:
        yield [(factor,) for factor in factors]


# ------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Runs:
    """What reports know about a model: losses, bytes of weights, the arms themselves, and what could not be used."""

    losses: Losses = field(default_factory=lambda: Losses({}))
    weight_bytes: Mapping[str, float] = field(default_factory=dict)
    token_bytes: Mapping[Pair, float] = field(default_factory=dict)
    arms: Mapping[Pair, ArmRecord] = field(default_factory=dict)
    reports: Mapping[Path, Report] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """Some arm that differs from 16 bits has a loss."""
        return any(pair.factors for pair in self.losses.measured)


def read_runs(model: str, runs: Sequence[Path], output_dir: Path = RUNS, native: str = "bf16") -> Runs:
    """The reports that name this model as their reference's: of ``runs``, or without any all in ``output_dir``.

    ``runs``: run folders or ``report.json`` files.  ``native``: the model's own 16-bit type.  A pair that several
    reports measured counts as the one of the longest context, of these with the most documents.

    Raises:
        InputError: one of ``runs`` cannot be read, or is of another model.
    """
    reports: dict[Path, Report] = {}
    notes: list[str] = []
    for name in runs:
        path = find_run(name)
        report = RunFolder.open(path).read_report(name) if path.is_dir() else Report.from_json(path)
        if not _same_model(model, report.reference.model):
            raise InputError(f"{name} is of model {report.reference.model}, not {model}: leave it out")
        reports[path] = report
    others: set[str] = set()
    for path in () if runs else sorted(output_dir.glob("*/report.json")):
        try:
            folder = RunFolder.open(path.parent)
        except FidelabError:  # of another kind: layers, a sensitivity
            continue
        try:
            report = folder.read_report()
        except FidelabError as error:  # a damaged one takes no other down
            notes.append(f"left out: {error}")
            continue
        if _same_model(model, report.reference.model):
            reports[path.parent] = report
        else:
            others.add(report.reference.model)
    if others and not reports:
        notes.append(f"{output_dir} holds runs of {', '.join(sorted(others))} alone")
    return _joined_reports(reports, native, notes)


def _same_model(name: str, other: str) -> bool:
    """Two names of one model: equal, or paths to one place."""
    here, there = Path(name).expanduser(), Path(other).expanduser()
    return name == other or (here.exists() and there.exists() and here.samefile(there))


def _joined_reports(reports: Mapping[Path, Report], native: str, notes: list[str]) -> Runs:
    losses: dict[Pair, tuple[tuple[Any, ...], Measured]] = {}
    arms: dict[Pair, ArmRecord] = {}
    weights: dict[str, float] = {}
    tokens: dict[Pair, float] = {}
    for path, report in reports.items():
        origin = _pair(report.reference, report.reference, native)
        if origin is None or origin.factors:
            notes.append(f"left out: the reference of {path} did not run with native weights and a 16-bit cache")
            continue
        for arm in (report.reference, *filter(None, (report.control,)), *report.controls, *report.candidates):
            if (pair := _pair(arm, report.reference, native)) is None:
                continue
            if (size := _weight_bytes(arm)) is not None:
                weights.setdefault(pair.weights, size)
            if arm.ran is not None and arm.ran.cache_bytes_per_token:
                tokens.setdefault(pair, arm.ran.cache_bytes_per_token)
            found = _loss_of(arm, report, path)
            if found is not None and (pair not in losses or found[0] > losses[pair][0]):
                losses[pair], arms[pair] = found, arm
    if len({str(report.comparability_key) for report in reports.values()}) > 1:
        notes.append(
            "the runs differ in text, windows or estimator: what is joined of several of them is no paired sum"
        )
    return Runs(Losses({pair: one for pair, (_, one) in losses.items()}), weights, tokens, arms, reports, tuple(notes))


def _pair(arm: ArmRecord, reference: ArmRecord, native: str) -> Pair | None:
    """What an arm ran; ``None`` of arms that change something else as well, or whose formats nobody here knows."""
    if arm.kv is None or arm.engine != reference.engine or not arm.measured:
        return None
    others = arm.ran.others() if arm.ran else {}
    weights = NATIVE if arm.model == reference.model else arm.model
    if arm.ran is not None and arm.ran.simulated_weight_bytes:
        rounded = others.get("simulated_weights")
        names = [name for name in rounded if name != NATIVE] if isinstance(rounded, dict) else []
        weights = str(others.get("weights_option") or "+".join(names))
    k, v = (_side(side, others.get(f"{name}_format"), native) for name, side in (("k", arm.kv.k), ("v", arm.kv.v)))
    return Pair(weights, k, v, arm.kv.skip_layers)


def _weight_bytes(arm: ArmRecord) -> float | None:
    """Bytes of an arm's weights; what a simulation left alone counts 16 bits, also where it computed in 32."""
    if arm.ran is None or not arm.ran.size:
        return None
    counts = arm.ran.others().get("simulated_weights")
    if not arm.ran.simulated_weight_bytes or not isinstance(counts, dict) or NATIVE not in counts:
        return float(arm.ran.size)
    alone = counts[NATIVE]
    return float(arm.ran.size - max(0, alone["bytes"] - 2 * alone["parameters"]))


def _side(spec: FormatSpec, seen: Any, native: str) -> str:
    """One side's format under this package's name; the engine's own where it has none here."""
    lower = spec.name.lower()
    for wide, words in {"f32": ("f32", "float32", "fp32"), "f16": ("f16", "float16", "fp16", "half")}.items():
        if lower in words:
            return wide
    if lower in ("auto", NATIVE, "bf16", "bfloat16"):
        return str(seen) if lower == "auto" and seen in _WIDE else native if lower in ("auto", NATIVE) else "bf16"
    if _known(spec) or not isinstance(seen, str) or not _known(FormatSpec(seen)):
        return str(spec)
    return seen


def _known(spec: FormatSpec) -> bool:
    try:
        create(spec)
    except FidelabError:
        return False
    return True


def _loss_of(arm: ArmRecord, report: Report, path: Path) -> tuple[tuple[Any, ...], Measured] | None:
    """How much an arm's figure is worth, and the figure; the reference loses nothing against itself."""
    if arm is report.reference:
        return (math.inf,), Measured(0.0, (0.0, 0.0), arm.name, path)
    kld = arm.deciding
    metric = kld.metric("mean", {}) if kld is not None and kld.measured else None
    if kld is None or metric is None or metric.value is None:
        return None
    n_ctx = kld.facts.get("n_ctx")
    worth = (not metric.bound, n_ctx if isinstance(n_ctx, int) else 0, kld.n_clusters or 0, report.created)
    ends = metric.interval
    if metric.bound:  # the top tokens alone were seen: nothing bounds the loss
        ends = None
    return worth, Measured(metric.value, ends, arm.name, path, metric.bound)


# ------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Option:
    """A pair as it would run: bytes on one device, the decode ceiling against the 16-bit pair, and its loss."""

    pair: Pair
    bytes: float
    speedup: float
    loss: Loss


def frontier(options: Sequence[Option]) -> list[Option]:
    """The options of a known loss than which none is smaller without losing more, by size."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.bytes, one.loss.mean)):
        if math.isfinite(option.loss.mean) and (not kept or option.loss.mean < kept[-1].loss.mean):
            kept.append(option)
    return kept


def choose(options: Sequence[Option], memory: float, max_kld: float | None = None) -> Option | None:
    """The option to run within ``memory`` bytes; ``None`` where none qualifies.

    With ``max_kld`` the one of the highest ceiling whose interval ends below it, else the one of the least loss.
    """
    fitting = [one for one in options if one.bytes <= memory and math.isfinite(one.loss.mean)]
    if max_kld is None:
        return min(fitting, key=lambda one: (one.loss.mean, one.bytes), default=None)
    qualified = [one for one in fitting if one.loss.high <= max_kld]
    return max(qualified, key=lambda one: (one.speedup, -one.bytes, -one.loss.mean), default=None)


def next_cells(
    options: Sequence[Option], chosen: Option | None, memory: float, max_kld: float | None = None, most: int = _NEXT
) -> list[Option]:
    """The options that were not measured and whose measurement could change the choice, the likeliest first.

    The chosen one, then those that could take its place: with ``max_kld`` faster ones whose interval reaches below
    it, else those whose interval reaches below the upper end of the chosen one's.
    """
    found = [chosen] if chosen is not None and chosen.loss.source != "measured" else []

    def could(one: Option) -> bool:
        if one is chosen or one.loss.source == "measured" or one.bytes > memory:
            return False
        if chosen is None:
            return max_kld is None or one.loss.low <= max_kld
        if max_kld is None:
            return (one.loss.low, one.bytes) < (chosen.loss.high, chosen.bytes)
        ranks = ((x.speedup, -x.bytes, -loss) for x, loss in ((one, one.loss.low), (chosen, chosen.loss.high)))
        return one.loss.low <= max_kld and next(ranks) > next(ranks)

    def order(one: Option) -> tuple[float, ...]:
        if max_kld is None:
            return (one.loss.mean, one.bytes)
        return (one.loss.mean > max_kld, -one.speedup if one.loss.mean <= max_kld else one.loss.mean)

    return [*found, *sorted(filter(could, options), key=order)][:most]


# ------------------------------------------------------------------------------------------------- advice


_BYTES = Definition("bytes", "bytes", "lower", "Bytes on one device: weights, caches, overhead.")
_WEIGHTS = Definition("weight_bytes", "bytes", "lower", "Of these the weights.")
_SPEEDUP = Definition(
    "speedup",
    "ratio",
    "higher",
    "Decode ceiling: time of a step of the 16-bit pair over that of this pair.",
    name="at most",
)
_LONGEST = Definition(
    "longest_context", "tokens", "higher", "Tokens per sequence that fit at this batch; none: no limit."
)
_LOSS = Definition("kld", "nats", "lower", "Mean KL over the reference.", name="KL")
_DIFFERENCE = Definition(
    "difference", "nats", "lower", "Mean KL with the 8-bit cache minus that with the smaller weights."
)
_SAVED = tuple(
    Definition(f"saved_by_{side}", "bytes", "higher", f"Bytes saved by the {side}.") for side in ("cache", "weights")
)
_MEASURED = Definition("measured", "nats", "lower", "Mean KL of the pair.")
_PREDICTED = Definition("predicted", "nats", "lower", "The sum of the losses of its parts.")
_COLUMNS = (
    *("weights", "kv", "instead of", "bytes", "fits", "speedup", "longest_context", "kld", "loss is"),
    *("measured", "predicted", "difference", "saved_by_cache", "saved_by_weights", "cache is", "how"),
)
_NOTE = (
    "at most: decode speed-up over 16 bits; longest context: tokens that fit at this batch; predicted (n): the sum of "
    "n measured losses; frontier: no pair that is as small loses less"
)
_FRONTIER, _OTHERS, _LEVEL, _CHECK = "frontier", "other pairs", "8-bit cache instead of smaller weights", "check"


def advise(
    model: str,
    geometry: Geometry,
    device: Device,
    context: int,
    batch: int,
    runs: Runs,
    *,
    memory: float | None = None,
    max_kld: float | None = None,
    native: str = "bf16",
    tp: int = 1,
    overhead: float = 0.0,
    command: str = "",
) -> Study:
    """Join losses with bytes, and choose.

    Args:
        model: as the user names it, for commands.
        context, batch: tokens per sequence, sequences.
        memory: bytes of each device, instead of the table's.
        max_kld: mean KL in nats; ``None``: the least loss that fits.
        native: the model's own 16-bit type.
        tp, overhead: devices that share the model, and the engine's own bytes on each.
        command: the one that was given.

    Returns:
        Rows of the pairs on the frontier, of 8-bit caches against the next smaller weights, of predictions that were
        checked, and of all other pairs.  ``facts`` has what is recommended, what to measure next, and ρ.

    Raises:
        UsageError: a size that cannot be, a context beyond the model's, or memory that no pair fits into.
    """
    for what, value in (("batch", batch), ("context", context), ("tp", tp)):
        if value < 1:
            raise UsageError(f"--{what} must be at least 1, not {value:,}")
    if max_kld is not None and not 0 < max_kld < math.inf:
        raise UsageError(f"--max-kld must be a mean KL above 0 nats, such as 0.01, not {max_kld:g}")
    if geometry.max_positions is not None and context > geometry.max_positions:
        raise UsageError(f"--context {context:,}: {model} takes at most {geometry.max_positions:,} tokens")
    room = device.usable if memory is None else memory
    sizes, shape = _weight_sizes(geometry, runs), _Shape(geometry, device, context, batch, native, tp, overhead)
    base = Pair(NATIVE, native, native)
    options: list[Option] = []
    notes = list(runs.notes)
    for pair in _grid(runs, sizes, base, geometry):
        try:
            options.append(shape.option(pair, sizes, base, runs.losses.of(pair), runs.token_bytes.get(pair)))
        except FidelabError as error:
            notes.append(f"left out: {error}")
    options.sort(key=lambda one: (one.bytes, one.loss.mean))
    smallest = options[0]
    if smallest.bytes > room:
        raise UsageError(
            f"no pair fits into {_gb(room)} at {context:,} tokens × {batch:,}: the smallest, {_words(smallest.pair)}, "
            f"takes {_gb(smallest.bytes)}; use a shorter --context, a smaller --batch or more --memory"
        )
    is_measured = runs.measured
    chosen = choose(options, room, max_kld) if is_measured else None
    following = next_cells(options, chosen, room, max_kld) if is_measured else []
    edge = {id(one) for one in frontier(options)} if is_measured else set()

    def row(one: Option) -> StudyRow:
        loss, longest = one.loss, shape.longest(one.pair, sizes, room)
        parts = f" ({len(loss.parts)})" if loss.source == "predicted" else ""
        figures = [_BYTES(one.bytes), _WEIGHTS(sizes[one.pair.weights] / tp), _SPEEDUP(one.speedup)]
        figures += [_LONGEST(longest)] if longest is not None else []
        figures += [_LOSS(loss.mean, loss.interval)] if math.isfinite(loss.mean) else []
        return StudyRow(
            status=Status.OK,
            at={**_at(one.pair), PART: _FRONTIER if id(one) in edge else _OTHERS},
            metrics=tuple(figures),
            facts={
                "fits": "yes" if one.bytes <= room else "no",
                "loss is": f"{loss.source}{parts}",
                "source": loss.source,
                "parts": [part.arm for part in loss.parts],
            },
        )

    run, why = None, ""
    if chosen is not None and chosen.loss.source == "measured" and chosen.pair in runs.arms:
        run, why = serve_command(runs.arms[chosen.pair])
    elif chosen is not None:
        run, why = _measuring(model, [chosen.pair], runs), "its loss is predicted: this measures it first"
    starts = [replace(base, k=k, v=k) for k in ("q8_0", "fp8_e4m3")] + [
        replace(base, weights=w) for w in _UNMEASURED[0]
    ]
    reach = [n for report in runs.reports.values() for n in _contexts(report)]
    if reach and max(reach) < context:
        notes.append(f"losses were measured at up to {max(reach):,} tokens, not at {context:,}")
    if is_measured and not any("w" in pair.factors for pair in runs.losses.measured):
        notes.append("no format of the weights was measured: add arms such as --candidate 'weights=int4[group=64]'")
    if is_measured and not any({"k", "v"} & {*pair.factors} for pair in runs.losses.measured):
        notes.append("no format of the cache was measured: add arms such as --kv q8_0")
    if lacking := sorted({pair.weights for pair in runs.losses.measured} - sizes.keys()):
        notes.append(f"left out, as the bytes of the weights are not known: {', '.join(lacking)}")
    if bounds := [one.arm for one in runs.losses.measured.values() if one.bound]:
        notes.append(
            f"only a lower bound of the loss is known of {', '.join(bounds)}: without interval, never shown to qualify"
        )
    if any(arm.ran is not None and arm.ran.simulated_weight_bytes for arm in runs.arms.values()):
        notes.append("weights=… rounds without calibration: a checkpoint quantized with it costs less")
    pairs = [row(one) for one in options]
    best, others = ([one for one in pairs if one.at[PART] == part] for part in (_FRONTIER, _OTHERS))
    levels, checks = list(_level_down(options, sizes, base, runs)), [_check(*each) for each in runs.losses.checks]
    first = (*best, *levels, *checks)
    measuring = _measuring(model, [one.pair for one in following] if is_measured else starts, runs)
    commands = {"run" if not why else f"run ({why})": run, "to measure": measuring}
    return new_study(
        command=command,
        kind=KIND,
        title=f"{model} on {device.name}, {format_tokens(context)} tokens × {batch:,}, {room / 1e9:,.1f} GB: "
        f"{counted(len(options), 'pair')} of weights and cache",
        columns=_COLUMNS,
        rows=(*first, *others),
        shown=len(first) if best and len(pairs) > _MOST_ROWS else None,
        sentences=(
            _answer(chosen, options, room, max_kld, is_measured),
            *_doubts(options, following, runs),
            *(f"note: {note}" for note in notes),
        ),
        note=_NOTE,
        commands={name: line for name, line in commands.items() if line},
        facts={
            "model": model,
            "device": device.name,
            "context": context,
            "batch": batch,
            "memory": room,
            "max_kld": max_kld,
            "runs": [str(path) for path in runs.reports],
            "recommended": None if chosen is None else _at(chosen.pair),
            "next": [_at(one.pair) for one in following],
            "correlation": list(runs.losses.correlations),
        },
    )


def _at(pair: Pair) -> Coordinates:
    return {"weights": pair.weights, "kv": pair.kv}


def _check(pair: Pair, measured: float, added: float, _rho: float) -> StudyRow:
    """A pair that was measured and can be predicted from others."""
    return StudyRow(status=Status.OK, at={**_at(pair), PART: _CHECK}, metrics=(_MEASURED(measured), _PREDICTED(added)))


def _doubts(options: Sequence[Option], following: Sequence[Option], runs: Runs) -> Iterator[str]:
    """How far predictions were wrong, and what the choice hinges on."""
    ratios = sorted(measured / added for _, measured, added, _ in runs.losses.checks)
    if ratios:
        yield (
            f"predictions against measurements, {counted(len(ratios), 'pair')}: measured is {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f} times the sum"
        )
    elif any(one.loss.source == "predicted" for one in options):
        yield "no pair was measured that could be predicted: how far sums are wrong is not known here"
    if following:
        yield "the choice hinges on: " + "; ".join(f"{one.pair.weights} with {one.pair.kv}" for one in following)


def _contexts(report: Report) -> Iterator[int]:
    for arm in report.candidates:
        n_ctx = arm.deciding.facts.get("n_ctx") if arm.deciding else None
        if isinstance(n_ctx, int):
            yield n_ctx


def _weight_sizes(geometry: Geometry, runs: Runs) -> dict[str, float]:
    """Bytes of the weights by format: as the arms had them; unmeasured formats as if all weights had them."""
    two_each = 2.0 * geometry.parameters
    sizes = {NATIVE: min(runs.weight_bytes.get(NATIVE, two_each), two_each)}
    sizes |= {name: size for name, size in runs.weight_bytes.items() if name != NATIVE}
    if not runs.measured:
        rows = {name: weight_format(FormatSpec.parse(name)) for name in _UNMEASURED[0]}
        sizes |= {name: geometry.parameters * fmt.nbytes((1, 4096)) / 4096 for name, fmt in rows.items()}
    return sizes


def _grid(runs: Runs, sizes: Mapping[str, float], base: Pair, geometry: Geometry) -> Iterator[Pair]:
    """All weights with all caches: those measured, and keys with values where each side was measured alone."""
    measured = runs.losses.measured
    caches = dict.fromkeys([base, *(replace(pair, weights=NATIVE) for pair in measured)])
    if not runs.measured:
        specs = [KVSpec.parse(name) for name in _UNMEASURED[1]]
        wide = {"k16v8": (base.k, "fp8_e4m3")}
        caches |= dict.fromkeys(Pair(NATIVE, *wide.get(one.label, (str(one.k), str(one.v)))) for one in specs)
    sides = {
        side: dict.fromkeys(
            [getattr(base, side)]
            + [getattr(pair, side) for pair in measured if pair.factors == (side,) and not pair.skip]
        )
        for side in "kv"
    }
    caches |= dict.fromkeys(Pair(NATIVE, k, v) for k, v in product(sides["k"], sides["v"]))
    latent = any(layer.latent for layer in geometry.kv)
    for weights in sizes:
        for cache in caches:
            wide_only = {cache.k, cache.v} <= set(_WIDE)
            if not (latent and cache.k != cache.v) and (not wide_only or cache == base):
                yield replace(cache, weights=weights)


@dataclass(frozen=True)
class _Shape:
    """The model on the device at one context and batch."""

    geometry: Geometry
    device: Device
    context: int
    batch: int
    native: str
    tp: int
    overhead: float

    def _model(self, size: float) -> Model:
        """With weights of ``size`` bytes, for what a step reads: what it does not read stays in 16 bits."""
        geometry = self.geometry
        idle = geometry.idle_parameters
        read = (size - 2.0 * idle) / (geometry.parameters - idle)
        bits = 8 * (read if read > 0 else size / geometry.parameters)
        return Model(geometry, bits, self.tp, self.native, self.overhead)

    def option(
        self, pair: Pair, sizes: Mapping[str, float], base: Pair, loss: Loss, token_bytes: float | None
    ) -> Option:
        """Bytes and ceiling of a pair; ``token_bytes``: measured, where no format of this package is meant.

        Raises:
            UsageError: the cache's bytes are not known.
        """
        size, own = sizes[pair.weights], self._model(sizes[pair.weights])
        try:
            cache: float = own.cache_bytes(pair.spec, self.context, self.batch)
        except FidelabError:
            if token_bytes is None:
                raise
            cache = token_bytes * self.context * self.batch / self.tp
        before = self._model(sizes[base.weights]).step_seconds(base.spec, self.context, self.batch, self.device)[0]
        moved = own.read_bytes(self.batch) / self.tp + cache
        compute = own.step_flops(self.context, self.batch) / self.device.flops("bf16")
        after = max(moved / self.device.bandwidth, compute)
        return Option(pair, size / self.tp + cache + self.overhead, before / after, loss)

    def longest(self, pair: Pair, sizes: Mapping[str, float], room: float) -> int | None:
        """Tokens per sequence that fit at this batch, no more than the model takes."""
        own = Model(
            self.geometry, 8 * sizes[pair.weights] / self.geometry.parameters, self.tp, self.native, self.overhead
        )
        try:
            found = own.longest_context(pair.spec, self.batch, room)
        except FidelabError:
            return None
        limit = self.geometry.max_positions
        return limit if found is None else found if limit is None else min(found, limit)


def _level_down(options: Sequence[Option], sizes: Mapping[str, float], base: Pair, runs: Runs) -> Iterator[StudyRow]:
    """Each 8-bit cache against the next smaller weights, from the largest weights on, where both losses are known."""
    by_pair = {one.pair: one for one in options}
    levels = sorted(sizes, key=lambda name: -sizes[name])
    levels = levels[levels.index(NATIVE) :]
    caches = [one.pair for one in options if one.pair.weights == NATIVE and _bits(one.pair)]
    for above, below in pairwise(levels):
        for cache in caches:
            quantized = by_pair.get(replace(cache, weights=above))
            smaller, whole = (by_pair.get(replace(base, weights=name)) for name in (below, above))
            if quantized is None or smaller is None or whole is None:
                continue
            a, b = quantized.loss, smaller.loss
            if not (math.isfinite(a.mean) and math.isfinite(b.mean)):
                continue
            paired = _paired(a, b, runs)
            if paired is not None:
                difference, ends, how = paired
            else:
                difference, how = a.mean - b.mean, "from both intervals, not paired"
                ends = (a.low - b.high, a.high - b.low) if math.isfinite(a.high) and math.isfinite(b.high) else None
                if "predicted" in (a.source, b.source):
                    how += "; predicted"
            word = "cannot be told apart"
            if ends is not None and not ends[0] <= 0 <= ends[1]:
                word = "worse" if difference > 0 else "better"
            saved = (whole.bytes - quantized.bytes, whole.bytes - smaller.bytes)
            yield StudyRow(
                status=Status.OK,
                at={"weights": above, "kv": cache.kv, "instead of": below, PART: _LEVEL},
                metrics=(
                    _DIFFERENCE(difference, ends),
                    *(side(size) for side, size in zip(_SAVED, saved, strict=True)),
                ),
                facts={"cache is": word, "how": how},
            )


def _bits(pair: Pair) -> bool:
    """Keys and values both take about 8 bits per element."""
    if pair.skip:
        return False
    try:
        widths = [create(FormatSpec.parse(side)).packed_token_bytes(128) / 16 for side in (pair.k, pair.v)]
    except FidelabError:
        return False
    return all(_EIGHT[0] <= width <= _EIGHT[1] for width in widths)


def _paired(a: Loss, b: Loss, runs: Runs) -> tuple[float, tuple[float, float] | None, str] | None:
    """The difference of two arms of one run by its positions, and by what they are paired; ``None`` elsewhere."""
    if len(a.parts) != 1 or len(b.parts) != 1:
        return None
    (first,), (second,) = a.parts, b.parts
    if first.run is None or first.run != second.run or first.arm == second.arm:
        return None
    folder = first.run if first.run.is_dir() else first.run.parent
    file = RunFolder(folder).positions
    if not file.is_file():
        return None
    parquet = require("pyarrow.parquet", "the paired difference of two arms")  # without types
    rows = parquet.read_table(file, columns=["arm", "window", "position", "n_ctx", "kl"]).to_pandas()
    arms = [rows[rows["arm"] == one.arm].set_index(["n_ctx", "window", "position"])["kl"] for one in (first, second)]
    if not all(len(one) and one.index.is_unique for one in arms):
        return None
    both = arms[0].to_frame("a").join(arms[1].to_frame("b"), how="inner").dropna()
    windows = both.index.get_level_values("window").to_numpy()
    if not len(both):
        return None
    found = paired_difference(
        RatioItems.of(both["a"].to_numpy(), 1.0, windows), RatioItems.of(both["b"].to_numpy(), 1.0, windows)
    )
    report = runs.reports.get(first.run)
    kld = next((arm.deciding for arm in report.candidates if arm.name == first.arm), None) if report else None
    by_document = kld is not None and kld.cluster == "document" and kld.n_clusters == found.n_clusters
    return found.estimate, found.interval, f"paired by {'documents' if by_document else 'windows'} of one run"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"


def _words(pair: Pair) -> str:
    return f"{'weights as they are' if pair.weights == NATIVE else pair.weights} with cache {pair.kv}"


def _answer(chosen: Option | None, options: Sequence[Option], room: float, max_kld: float | None, known: bool) -> str:
    if not known:
        return "nothing was measured for this model: losses are unknown, and no pair is recommended"
    if chosen is not None:
        end = "no interval" if chosen.loss.interval is None else f"95% {chosen.loss.low:.2g} to {chosen.loss.high:.2g}"
        within = "the least loss that fits" if max_kld is None else f"within {max_kld:g} nats"
        return (
            f"run {_words(chosen.pair)}: {_gb(chosen.bytes)}, at most {chosen.speedup:.2f} times as fast, "
            f"{chosen.loss.source} loss {chosen.loss.mean:.3g} nats ({end}); {within}"
        )
    fitting = [one for one in options if one.bytes <= room]
    best = min(fitting, key=lambda one: (one.loss.high, one.loss.mean))
    end = f"at most {best.loss.high:.3g} nats" if math.isfinite(best.loss.high) else "without a bound"
    return f"no pair that fits is shown to lose less than {max_kld:g} nats: the surest, {_words(best.pair)}, {end}"


def _measuring(model: str, pairs: Sequence[Pair], runs: Runs) -> str | None:
    """The command line that measures pairs as the newest of the runs measured its own."""
    if not pairs:
        return None
    words = ["fidelab", "compare", model, "--axes", DECIDING]
    newest = max(runs.reports.values(), key=lambda report: report.created, default=None)
    if newest is not None:
        words += ["--engine", newest.reference.engine]
        dtype, reference = newest.settings.get("dtype"), newest.settings.get("reference")
        kv = reference.get("kv") if isinstance(reference, dict) else None
        words += ["--dtype", str(dtype)] if dtype not in (None, "auto") else []
        words += ["--reference", str(kv)] if kv else []
    for pair in pairs:
        key = "model" if Path(pair.weights).exists() or "/" in pair.weights else "weights"
        weights = "" if pair.weights == NATIVE else f"{key}={pair.weights},"
        words += ["--candidate", f"{weights}kv={pair.kv}"]
    return shlex.join(words)
