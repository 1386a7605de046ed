"""Weights × KV cache at equal bytes: measured losses, joined with the limits of memory and bandwidth.

A cell is a format of the weights with a format of the keys and one of the values.  Its loss, the mean KL over the
reference, is *measured* where an arm ran so, and else *predicted* from arms that differ from the reference in parts of
it: ``KL(w, kv) ≈ KL(w) + KL(kv)``, and ``KL(kv) ≈ KL(k) + KL(v)``, with as few terms as the arms allow.

For small errors the KL is quadratic in the change of the logits, so that it behaves like the square of a length:
``KL(a, b) = KL(a) + KL(b) + 2ρ·sqrt(KL(a)·KL(b))`` with a correlation ρ between -1 and 1.  Adding up means ρ = 0; the
interval of a prediction is that of all ρ.  See docs/speed.md#weights-and-cache-together.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fidelab.core import FormatSpec, KVSpec, Status
from fidelab.core.errors import FidelabError, InputError, UsageError
from fidelab.formats import create
from fidelab.physics.devices import Device
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model
from fidelab.results.measurement import DECIDING, Coordinates, Definition
from fidelab.results.numbers import counted, format_tokens
from fidelab.results.recommend import serve_command
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import RUNS, RunFolder, find_run
from fidelab.results.study import Study, StudyRow
from fidelab.studies.study import new_study

KIND = "advice"
NATIVE = "native"
_MOST_ROWS = 24  # that a terminal shows
_FLOATS = ("f32", "f16", "bf16")


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
        """KV format as ``--kv`` takes it."""
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
        cache = {side: getattr(self, side) if side in kept else _FLOATS[-1] for side in "kv"}
        return Pair(self.weights if "w" in kept else NATIVE, **cache, skip=self.skip if kept & {"k", "v"} else ())

    @property
    def factors(self) -> tuple[str, ...]:
        """Formats that differ from the model's 16-bit type."""
        named = (("w", self.weights != NATIVE), ("k", self.k not in _FLOATS), ("v", self.v not in _FLOATS))
        return tuple(name for name, differs in named if differs)


@dataclass(frozen=True)
class Measured:
    """Loss of one arm in nats, with its 95% interval, where several documents or blocks gave one."""

    mean: float
    interval: tuple[float, float] | None
    arm: str = ""
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


def loss_of(pair: Pair, measured: Mapping[Pair, Measured]) -> Loss:
    """The loss of a pair: its own figure, or the sum of the fewest parts that were measured."""
    if (own := measured.get(pair)) is not None:
        return Loss(own.mean, *(own.interval or (0.0, math.inf)), "measured", (own,))
    for blocks in _partitions(pair.factors):
        found = [_part(pair.only(block), measured) for block in blocks]
        parts = tuple(part for part in found if part is not None)
        if len(parts) == len(found):
            lows, highs = zip(*(part.interval or (0.0, math.inf) for part in parts), strict=True) if parts else ((), ())
            roots = [math.sqrt(low) for low in lows]
            low = max(0.0, 2 * max(roots, default=0.0) - sum(roots)) ** 2  # what the largest leaves over
            return Loss(sum(part.mean for part in parts), low, sum(map(math.sqrt, highs)) ** 2, "predicted", parts)
    return Loss(math.inf, 0.0, math.inf, "unknown")


def _part(pair: Pair, measured: Mapping[Pair, Measured]) -> Measured | None:
    """The measurement of a pair, where sides with 16 bits may have been measured with 32."""
    sides = [(_FLOATS[::-1] if side in _FLOATS else (side,)) for side in (pair.k, pair.v)]
    return next((measured[one] for k, v in product(*sides) if (one := replace(pair, k=k, v=v)) in measured), None)


def _partitions(factors: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to divide up to three factors, fewest blocks first; keys and values stay together where they can."""
    if not factors:
        yield []  # nothing differs: no loss, since the 16-bit cache counts as the 32-bit one
        return
    yield [tuple(factors)]
    if len(factors) == 3:
        yield from ([("w",), ("k", "v")], [("w", "k"), ("v",)], [("w", "v"), ("k",)])
    if len(factors) > 1:
        yield [(factor,) for factor in factors]


# ------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Runs:
    """Data of reports about a model: losses, bytes of weights, the arms themselves, and what is unusable."""

    losses: Mapping[Pair, Measured] = field(default_factory=dict)
    weight_bytes: Mapping[str, float] = field(default_factory=dict)
    token_bytes: Mapping[Pair, float] = field(default_factory=dict)
    arms: Mapping[Pair, ArmRecord] = field(default_factory=dict)
    reports: Mapping[Path, Report] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
            found = _loss_of(arm, report)
            if found is not None and (pair not in losses or found[0] > losses[pair][0]):
                losses[pair], arms[pair] = found, arm
    if len({str(report.comparability_key) for report in reports.values()}) > 1:
        notes.append(
            "the runs differ in text, windows or estimator: figures joined from several of them are not a paired sum"
        )
    return Runs({pair: one for pair, (_, one) in losses.items()}, weights, tokens, arms, reports, tuple(notes))


def _pair(arm: ArmRecord, reference: ArmRecord, native: str) -> Pair | None:
    """Formats that an arm ran; ``None`` for arms that change something else as well, or whose formats are unknown."""
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
        return str(seen) if lower == "auto" and seen in _FLOATS else native if lower in ("auto", NATIVE) else "bf16"
    if _known(spec) or not isinstance(seen, str) or not _known(FormatSpec(seen)):
        return str(spec)
    return seen


def _known(spec: FormatSpec) -> bool:
    try:
        create(spec)
    except FidelabError:
        return False
    return True


def _loss_of(arm: ArmRecord, report: Report) -> tuple[tuple[Any, ...], Measured] | None:
    """Rank of an arm's figure by its reliability, and the figure. The reference loses nothing against itself."""
    if arm is report.reference:
        return (math.inf,), Measured(0.0, (0.0, 0.0), arm.name)
    kld = arm.deciding
    metric = kld.metric("mean", {}) if kld is not None and kld.measured else None
    if kld is None or metric is None or metric.value is None:
        return None
    n_ctx = kld.facts.get("n_ctx")
    worth = (not metric.bound, n_ctx if isinstance(n_ctx, int) else 0, kld.n_clusters or 0, report.created)
    ends = None if metric.bound else metric.interval  # the top tokens alone were seen: nothing bounds the loss
    return worth, Measured(metric.value, ends, arm.name, metric.bound)


# ------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Option:
    """A pair as it would run: bytes on one device, the decode ceiling against the 16-bit pair, and its loss."""

    pair: Pair
    bytes: float
    speedup: float
    loss: Loss


def ranked(options: Sequence[Option], memory: float, max_kld: float | None = None) -> tuple[list[Option], bool]:
    """The options, best first, and whether the first may be run: it fits, and its loss is known and within the limit.

    With ``max_kld``, options whose interval ends below it come first, by their ceiling. The others follow by loss.
    Options that do not fit into ``memory`` bytes come last.
    """

    def order(one: Option) -> tuple[float, ...]:
        within = max_kld is not None and one.loss.high <= max_kld
        values = (-one.speedup, one.bytes, one.loss.mean) if within else (one.loss.mean, one.bytes)
        return (one.bytes > memory, not within, *values)

    found = sorted(options, key=order)
    best = found[0]
    return found, best.bytes <= memory and math.isfinite(best.loss.mean) and best.loss.high <= (max_kld or math.inf)


# ------------------------------------------------------------------------------------------------- advice


_BYTES = Definition("bytes", "bytes", "lower", "Bytes on one device: weights, caches, overhead.")
_SPEEDUP = Definition(
    "speedup",
    "ratio",
    "higher",
    "Decode ceiling: time of a step of the 16-bit pair over that of this pair.",
    name="at most",
)
_LOSS = Definition("kld", "nats", "lower", "Mean KL over the reference.", name="KL")
_COLUMNS = ("weights", "kv", "bytes", "fits", "speedup", "kld", "loss is")
_NOTE = "at most: decode speed-up over 16 bits; predicted (n): the sum of n measured losses"


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
    """Join losses with bytes, and rank.

    Args:
        model: as the user names it, for commands.
        context, batch: tokens per sequence, sequences.
        memory: bytes of each device, instead of the table's.
        max_kld: mean KL in nats; ``None``: the least loss that fits.
        native: the model's own 16-bit type.
        tp, overhead: devices that share the model, and the engine's own bytes on each.
        command: the one that was given.

    Returns:
        A row for each pair, the best first.  ``facts["recommended"]`` is the first one's, if it may be run.

    Raises:
        UsageError: a size that cannot be, a context beyond the model's, or memory that no pair fits into.
        InputError: the runs measured no format.
    """
    for what, value in (("batch", batch), ("context", context), ("tp", tp)):
        if value < 1:
            raise UsageError(f"--{what} must be at least 1, not {value:,}")
    if max_kld is not None and not 0 < max_kld < math.inf:
        raise UsageError(f"--max-kld must be a mean KL above 0 nats, such as 0.01, not {max_kld:g}")
    if geometry.max_positions is not None and context > geometry.max_positions:
        raise UsageError(f"--context {context:,}: {model} takes at most {geometry.max_positions:,} tokens")
    if not any(pair.factors for pair in runs.losses):
        starts = f"fidelab compare {shlex.quote(model)} --kv q8_0 --candidate 'weights=int4[group=64]'"
        raise InputError("; ".join((f"no run measured a format of {model}", *runs.notes)) + f": first {starts}")
    room = device.usable if memory is None else memory
    two_each = 2.0 * geometry.parameters
    sizes = {NATIVE: two_each, **runs.weight_bytes}
    sizes[NATIVE] = min(sizes[NATIVE], two_each)
    shape = _Shape(geometry, device, context, batch, native, tp, overhead)
    base = Pair(NATIVE, native, native)
    options: list[Option] = []
    notes = list(runs.notes)
    for pair in _grid(runs, sizes, base, geometry):
        try:
            options.append(shape.option(pair, sizes, base, loss_of(pair, runs.losses), runs.token_bytes.get(pair)))
        except FidelabError as error:
            notes.append(f"left out: {error}")
    smallest = min(options, key=lambda one: one.bytes)
    if smallest.bytes > room:
        raise UsageError(
            f"no pair fits into {_gb(room)} at {context:,} tokens × {batch:,}: the smallest, {_words(smallest.pair)}, "
            f"takes {_gb(smallest.bytes)}; use a shorter --context, a smaller --batch or more --memory"
        )
    options, is_shown = ranked(options, room, max_kld)
    best = options[0]
    notes += _notes(runs, context, sizes)
    if best.loss.source == "measured" and best.pair in runs.arms:
        run, why = serve_command(runs.arms[best.pair])
    else:
        run, why = _measuring(model, best.pair, runs), "its loss is predicted: this measures it first"
    return new_study(
        command=command,
        kind=KIND,
        title=f"{model} on {device.name}, {format_tokens(context)} tokens × {batch:,}, {room / 1e9:,.1f} GB: "
        f"{counted(len(options), 'pair')} of weights and cache",
        columns=_COLUMNS,
        rows=tuple(_row(one, room) for one in options),
        shown=_MOST_ROWS if len(options) > _MOST_ROWS else None,
        sentences=(_answer(best, is_shown, max_kld), *(f"note: {note}" for note in notes)),
        note=_NOTE,
        commands={f"run ({why})" if why else "run": run} if is_shown and run else {},
        facts={
            "model": model,
            "device": device.name,
            "context": context,
            "batch": batch,
            "memory": room,
            "max_kld": max_kld,
            "runs": [str(path) for path in runs.reports],
            "recommended": _at(best.pair) if is_shown else None,
        },
    )


def _at(pair: Pair) -> Coordinates:
    return {"weights": pair.weights, "kv": pair.kv}


def _row(one: Option, room: float) -> StudyRow:
    loss = one.loss
    ends = (loss.low, loss.high) if math.isfinite(loss.high) else None
    return StudyRow(
        status=Status.OK,
        at=_at(one.pair),
        metrics=(
            _BYTES(one.bytes),
            _SPEEDUP(one.speedup),
            *([_LOSS(loss.mean, ends)] if math.isfinite(loss.mean) else []),
        ),
        facts={
            "fits": "yes" if one.bytes <= room else "no",
            "loss is": loss.source + (f" ({len(loss.parts)})" if loss.source == "predicted" else ""),
            "source": loss.source,
            "parts": [part.arm for part in loss.parts],
        },
    )


def _notes(runs: Runs, context: int, sizes: Mapping[str, float]) -> Iterator[str]:
    """Limits of the figures."""
    arms = [arm for report in runs.reports.values() for arm in report.candidates]
    reach = [n for arm in arms if arm.deciding and isinstance(n := arm.deciding.facts.get("n_ctx"), int)]
    if reach and max(reach) < context:
        yield f"losses were measured at up to {max(reach):,} tokens, not at {context:,}"
    if lacking := sorted({pair.weights for pair in runs.losses} - sizes.keys()):
        yield f"left out, as the bytes of the weights are not known: {', '.join(lacking)}"
    if bounds := [one.arm for one in runs.losses.values() if one.bound]:
        yield f"only a lower bound of the loss is known of {', '.join(bounds)}: never shown to qualify"
    if any(arm.ran is not None and arm.ran.simulated_weight_bytes for arm in runs.arms.values()):
        yield "weights=… rounds without calibration: a checkpoint quantized with it costs less"


def _grid(runs: Runs, sizes: Mapping[str, float], base: Pair, geometry: Geometry) -> Iterator[Pair]:
    """All weights with all caches: those measured, and keys with values where each side was measured alone."""
    caches = dict.fromkeys([base, *(replace(pair, weights=NATIVE) for pair in runs.losses)])
    alone = [pair for pair in runs.losses if len(pair.factors) == 1 and not pair.skip]
    keys, values = ([getattr(base, s), *(getattr(one, s) for one in alone if one.factors == (s,))] for s in "kv")
    caches |= dict.fromkeys(Pair(NATIVE, k, v) for k, v in product(keys, values))
    latent = any(layer.latent for layer in geometry.kv)
    for weights in sizes:
        for cache in caches:
            wide_only = {cache.k, cache.v} <= set(_FLOATS)
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
        """With weights of ``size`` bytes, for a step's reads; other weights stay in 16 bits."""
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


def _gb(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"


def _words(pair: Pair) -> str:
    return f"{'weights as they are' if pair.weights == NATIVE else pair.weights} with cache {pair.kv}"


def _answer(best: Option, is_shown: bool, max_kld: float | None) -> str:
    loss = best.loss
    if is_shown:
        end = f"95% {loss.low:.2g} to {loss.high:.2g}" if math.isfinite(loss.high) else "no interval"
        within = "the least loss that fits" if max_kld is None else f"within {max_kld:g} nats"
        return (
            f"run {_words(best.pair)}: {_gb(best.bytes)}, at most {best.speedup:.2f} times as fast, "
            f"{loss.source} loss {loss.mean:.3g} nats ({end}); {within}"
        )
    end = f"at most {loss.high:.3g} nats" if math.isfinite(loss.high) else "without a bound"
    limit = "a finite loss" if max_kld is None else f"less than {max_kld:g} nats"
    return f"no pair that fits is shown to lose {limit}: the first, {_words(best.pair)}, {end}"


def _measuring(model: str, pair: Pair, runs: Runs) -> str:
    """The command line that measures a pair as the newest of the runs measured its own."""
    words = ["fidelab", "compare", model, "--axes", DECIDING]
    newest = max(runs.reports.values(), key=lambda report: report.created)
    words += ["--engine", newest.reference.engine]
    dtype, reference = newest.settings.get("dtype"), newest.settings.get("reference")
    kv = reference.get("kv") if isinstance(reference, dict) else None
    words += ["--dtype", str(dtype)] if dtype not in (None, "auto") else []
    words += ["--reference", str(kv)] if kv else []
    key = "model" if Path(pair.weights).exists() or "/" in pair.weights else "weights"
    weights = "" if pair.weights == NATIVE else f"{key}={pair.weights},"
    return shlex.join([*words, "--candidate", f"{weights}kv={pair.kv}"])
