"""Axis paths: whether an arm gives the same distributions in every serving mode of a server.

See docs/metrics/distributions.md#paths.

There is one part per serving mode ("way").  Each way is compared with the cold prefill of the same arm.  The figure is
shown next to the reference's, whose ways are compared with its own cold prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median, median_low
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fidelab.axes.base import OVER_CONTROL, Axis, AxisInputs, AxisScore, AxisSettings, part_name, request_of
from fidelab.axes.rows import compare_item
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import WAYS, Request, Served
from fidelab.core import Estimator, Status
from fidelab.core.errors import CaptureError, InputError
from fidelab.metrics.divergence import parting
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag, Metric
from fidelab.results.numbers import counted
from fidelab.results.plots import Curve

_COLD = "cold"
_BLOCK = 128  # tokens: a multiple of the blocks of all engines
_TOKENS_AFTER_HIT = 9  # tokens after the last whole block of a prefix hit
_CHUNK = 64  # tokens per forward of the way "chunked", at most a quarter of the window
_READ = 16  # tokens that are prefilled at once before the rest is decoded
_SHORTEST, _LONGEST = 8, 104  # tokens of other requests

_MIN_ALLOWANCE = 1e-4  # nats: smallest allowance for rounding
_MIN_ALLOWANCE_WITHOUT_TWIN = 1e-2  # nats: smallest allowance if the reference is not a twin
_MARGIN = 4.0  # factor on the figure of the twin, or of the arm's other ways
_TAIL_QUANTILE = 0.9  # quantile of a figure over positions

_WORDS = {
    "chunked": "chunked prefill parts from a cold one",
    "decode": "decoding parts from prefill",
    "prefix": "prefill after a prefix hit parts from a cold one",
    "prefix-partial": "prefill after a hit within a block parts from a cold one",
    "prefix-other": "prefill after another request's prefix parts from a cold one",
    "prefix-generated": "prefill after a hit on generated tokens parts from a cold one",
    "batch": "prefill in a batch parts from prefill alone",
    "evicted": "prefill after eviction parts from a cold one",
}

_MEAN = Definition(
    "mean_kl",
    "nats",
    "lower",
    "Mean KL from the configuration's own cold prefill, over all ways and positions.",
    name="mean KL",
    null_value=None,
)
_KL = Definition(
    "kl_from_cold",
    "nats",
    "lower",
    "Mean KL per position from the configuration's own cold prefill.",
    name="KL from cold",
    null_value=None,
)
_TWIN = Definition(
    "reference", "nats", None, "The same of the reference, from its own cold prefill.", name="reference's"
)
_ADDED = Definition("added", "nats", "lower", "Excess over the reference, paired by position.")
_AT = Definition("parts_at", "tokens", None, "First position from which on the way has other distributions.")
_PARTED = Definition("ways_that_part", "count", "lower", "Ways that part and do not so in the reference.", exact=True)

Floats = NDArray[np.float64]


class PathsSettings(AxisSettings):
    """Windows and serving modes; part of the comparability key."""

    windows: int = Field(default=4, ge=1, description="windows, each answered in every way")
    n_ctx: int = Field(default=256, ge=32, description="tokens per window")
    ways: tuple[str, ...] = Field(
        default=tuple(way for way in WAYS if way != _COLD), min_length=1, description="ways besides the cold prefill"
    )
    others: tuple[int, ...] = Field(
        default=(1, 7, 31), min_length=1, description="other requests in a batch, a part per number"
    )

    @field_validator("ways", "others", mode="before")
    @classmethod
    def _listed(cls, asked: Any) -> Any:
        """Parse a flag's text, such as ``decode,prefix`` or ``7``."""
        if isinstance(asked, str):
            return tuple(asked.split(","))
        return (asked,) if isinstance(asked, int) else asked

    @field_validator("ways")
    @classmethod
    def _check_ways(cls, ways: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [way for way in ways if way not in WAYS]:
            raise ValueError(f"there is no way {unknown[0]!r}; there are {', '.join(WAYS)}")
        return tuple(way for way in WAYS if way in ways and way != _COLD)

    @field_validator("others")
    @classmethod
    def _positive(cls, others: tuple[int, ...]) -> tuple[int, ...]:
        if min(others) < 1 or max(others) > 255:
            raise ValueError("a batch has 1 to 255 other requests")
        return tuple(sorted({*others}))


class Paths(Axis):
    """KL(cold prefill ‖ way), nats, of one arm, at every position of a few windows.

    See docs/metrics/distributions.md#paths.
    """

    name: ClassVar[str] = "paths"
    title: ClassVar[str] = "Paths: does every way of serving give the same distributions?"
    Settings: ClassVar[type[AxisSettings]] = PathsSettings
    covers: ClassVar[str] = "serving paths"
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="nats", better="lower")
    quick: ClassVar[Mapping[str, Any]] = {"windows": 2, "others": (7,)}
    settings: PathsSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._own: dict[tuple[Path, Path], Floats] = {}  # (cold, way) → KL [windows, rows] of the reference

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        from fidelab.inputs.corpus import make_windows

        s = self.settings
        cut = make_windows(inputs.tokenizer, inputs.text, s.n_ctx, s.windows, "full")
        n = max(s.others)
        ids = inputs.tokenizer.encode(inputs.text.content)
        lengths = [_SHORTEST + 37 * i % (_LONGEST - _SHORTEST + 1) for i in range(n)]
        if sum(lengths) > len(ids):
            raise InputError(
                f"paths: {n} other requests need {sum(lengths)} tokens, but text {inputs.text.name} has {len(ids)}: "
                "fewer axes.paths.others or a longer text"
            )
        ends_of, end = [], len(ids)
        for length in lengths:
            ends_of.append(tuple(ids[end - length : end]))
            end -= length
        tails = tuple(ends_of)
        asked: dict[str, Request] = {}
        for part, way, size, first, n_others in self._plan():
            asked[part] = Served(
                axis=part_name(self.name, part),
                windows=cut.windows,
                first=first,
                last=s.n_ctx - 2,
                way=way,
                size=size,
                others=tails[:n_others],
                settings=(
                    ("bos", inputs.tokenizer.bos_id),
                    ("n_ctx", s.n_ctx),
                    ("others", n_others),
                    ("size", size),
                    ("way", way),
                ),
            )
        return asked

    def _plan(self) -> Iterator[tuple[str, str, int, int, int]]:
        """Yield (part, way, size, first row, other requests) for each request, with the cold prefill first."""
        n_ctx = self.settings.n_ctx
        block = _BLOCK if n_ctx >= 2 * _BLOCK else n_ctx // 32 * 16  # for a short window, half of it
        partial = block + _TOKENS_AFTER_HIT if block + _TOKENS_AFTER_HIT < n_ctx - 2 else block - _TOKENS_AFTER_HIT
        yield _COLD, _COLD, 0, 0, 0
        for way in self.settings.ways:
            match way:
                case "chunked":
                    yield way, way, min(_CHUNK, n_ctx // 4), 0, 0
                case "decode":
                    yield way, way, _READ, _READ, 0
                case "prefix-partial":
                    yield way, way, partial, partial, 0
                case "batch":
                    yield from ((f"{way}-{n}", way, 0, 0, n) for n in self.settings.others)
                case "evicted" | "prefix-other":
                    hit = 0 if way == "evicted" else block
                    yield way, way, hit, hit, 1 if way == "prefix-other" else max(self.settings.others)
                case _:
                    yield way, way, block, block, 0

    def repeated(self, request: Request, share: float) -> Request | None:
        return None  # every way is compared with the cold prefill

    def failed_part_cell(self, part: str, reason: str) -> Cell | None:
        return None if part == _COLD else Cell(at={"way": part}, status=Status.FAILED, reason=reason)

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        if _COLD not in pairs:
            raise CaptureError("there is no cold prefill to compare with; capture again")
        ref, test = {part: pair.ref for part, pair in pairs.items()}, {part: pair.test for part, pair in pairs.items()}
        lost = _unproven(test[_COLD])  # no way can be compared without the cold prefill
        unproven = {part: lost or _unproven(capture) for part, capture in test.items() if part != _COLD}
        proven = [part for part, why in unproven.items() if why is None]
        own = {part: _kl(test[_COLD], test[part]) for part in proven}
        twins: dict[str, Floats] = {}
        known = _unproven(ref[_COLD]) is None
        engines = {str(capture.manifest["asked"]["engine"]) for capture in (ref[_COLD], test[_COLD])}
        if known and len(engines) == 1:  # an arm with other kernels is not a twin
            for part in proven:
                if _unproven(ref[part]) is None:
                    key = ref[_COLD].folder, ref[part].folder
                    if key not in self._own:  # computed for the first arm
                        self._own[key] = _kl(ref[_COLD], ref[part])
                    twins[part] = self._own[key]
        theirs = _first_divergent_rows(twins, {}, 0.0)
        sound = {part: kl for part, kl in twins.items() if part not in theirs}
        cost = _kl(ref[_COLD], test[_COLD])
        ends = _first_divergent_rows(own, sound, _tail(cost) if known and np.isfinite(cost).any() else math.inf)
        first = {part: request_of(test[part], Served).first for part in proven}
        rows = np.concatenate([*(kl.ravel() for kl in own.values()), np.empty(0)])
        windows = np.concatenate([*(_windows(kl) for kl in own.values()), np.empty(0, dtype=np.int64)])
        added = {part: at for part, at in ends.items() if part not in theirs}
        bound = test[_COLD].estimator is Estimator.TOPK
        score = AxisScore(
            num=rows,
            den=np.ones(len(rows)),
            clusters=windows,
            usable=np.isfinite(rows),
            identical=bool((cost == 0).all())
            and all(_unproven(ref[part]) is None and (_kl(ref[part], test[part]) == 0).all() for part in proven),
            bound=bound,
            not_measurable="" if own else "; ".join(dict.fromkeys(why[1] for why in unproven.values() if why)),
        ).with_measurement(
            cluster="window",
            cells=tuple(
                _cell(part, why, test[part], first.get(part, 0), ends.get(part), theirs.get(part))
                for part, why in unproven.items()
            ),
            summary=_summary(added, first, len(own)),
            reference_summary=_summary(theirs, first, len(twins)) if twins else "",
            downgrades=tuple(_sentence(part, first[part] + at) for part, at in added.items()),
            facts={"windows": len(test[_COLD].items), "n_ctx": test[_COLD].manifest["settings"]["n_ctx"]},
        )
        if not own:
            return score
        mean = _MEAN(score.mean(), score.mean_interval(seed), bound=bound, headline=True)
        by_way = (m for part in own for m in _metrics(part, own[part], twins.get(part), ends.get(part), first, seed))
        return score.with_measurement(
            metrics=(mean, _PARTED(len(added)), *(m.model_copy(update={"bound": bound}) for m in by_way)),
            plots=tuple(_curve(part, kl, first[part]) for part, kl in own.items()),
        )


def _unproven(capture: Capture) -> tuple[Status, str] | None:
    """Return why the rows of a capture do not count (way unsupported, or not proven by counters), else ``None``."""
    facts = capture.manifest["facts"]
    if why := facts.get("not_supported"):
        return Status.NOT_SUPPORTED, str(why)
    if not facts.get("engaged"):
        return Status.NOT_ENGAGED, str(facts.get("not_engaged") or "the engine gave no counts that prove it")
    return None


def _kl(cold: Capture, way: Capture) -> Floats:
    """Return KL(cold ‖ way) [windows, rows of the way] in nats; NaN where a row failed."""
    pair, asked = Pair(cold, way, ()), request_of(way, Served)
    targets, skip = np.full(asked.n_rows, -1, dtype=np.int64), asked.first - request_of(cold, Served).first
    return np.stack([compare_item(pair, item, item, targets, skip).kl for item in range(len(way.items))])


def _windows(kl: Floats) -> NDArray[np.int64]:
    """Return the window of each row, in the order in which ``kl`` is ravelled."""
    return np.repeat(np.arange(kl.shape[0]), kl.shape[1])


def _tail(kl: Floats) -> float:
    """Return the 90th percentile of the rows; 0 without a usable row."""
    usable = kl[np.isfinite(kl)]
    return float(np.quantile(usable, _TAIL_QUANTILE)) if len(usable) else 0.0


def _first_divergent_rows(own: Mapping[str, Floats], twins: Mapping[str, Floats], cost: float) -> dict[str, int]:
    """First row at which a way diverges, by way, for those that do.

    The allowance rests on the twin's figure of the same way, or without a twin on the arm's other ways, and on
    ``cost``, the cost of the format: rounding to a format makes the last bits of another way as large as that.
    An unknown cost is infinite, and no way diverges.
    See docs/metrics/distributions.md#paths.
    """
    tails = {part: _tail(kl) for part, kl in own.items()}
    found = {}
    for part, kl in own.items():
        if part in twins:
            noise = max(_MIN_ALLOWANCE, _MARGIN * _tail(twins[part]))
        else:
            # One figure for each family of ways (prefix hits, batches), their lower median, so that a fault of
            # another family does not excuse this one. Families that equal the cold prefill are left out.
            families: dict[str, list[float]] = {}
            for other, tail in tails.items():
                families.setdefault(other.partition("-")[0], []).append(tail)
            middles = [median(values) for family, values in families.items() if family != part.partition("-")[0]]
            shown = [middle for middle in middles if middle > _MIN_ALLOWANCE]
            noise = max(_MIN_ALLOWANCE_WITHOUT_TWIN, _MARGIN * median_low(shown) if shown else 0.0)
        if (at := parting(kl, max(noise, cost))) is not None:
            found[part] = at
    return found


def _cell(
    part: str, why: tuple[Status, str] | None, capture: Capture, first: int, at: int | None, theirs: int | None
) -> Cell:
    """Return the outcome of a way, its counts, and the alarm."""
    if why is not None:
        return Cell(at={"way": part}, status=why[0], reason=why[1])
    counts = capture.manifest["facts"]["engaged"]
    flags = []
    if theirs is not None:
        text = f"in the reference itself, {_sentence(part, first + theirs)}"
        flags = [Flag(kind="reference", text=text)]
    elif at is not None:
        flags = [Flag(kind="parts", text=_sentence(part, first + at))]
    said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return Cell(at={"way": part}, status=Status.OK, flags=tuple(flags), facts={"engaged": said})


def _metrics(
    part: str, kl: Floats, twin: Floats | None, at: int | None, first: Mapping[str, int], seed: int
) -> Iterator[Metric]:
    cell: Coordinates = {"way": part}
    yield _KL(*_estimate(kl, seed), cell=cell)
    if twin is not None:
        yield _TWIN(*_estimate(twin, seed), cell=cell)
        yield _ADDED(*_estimate(kl - twin, seed), cell=cell)
    yield _AT(None if at is None else first[part] + at, cell=cell)


def _estimate(kl: Floats, seed: int) -> tuple[float | None, tuple[float, float] | None]:
    """Return the mean and its 95% interval over windows."""
    usable = np.isfinite(kl.ravel())
    if not usable.any():
        return None, None
    items = RatioItems.of(kl.ravel()[usable], 1.0, _windows(kl)[usable])
    return float(items.num.mean()), ratio_interval(items, seed)


def _sentence(part: str, position: int) -> str:
    """Return a sentence such as ``decoding parts from prefill at position 97``."""
    way, _, number = part.rpartition("-")
    return f"{_WORDS[part] if part in _WORDS else f'{_WORDS[way]} ({number} others)'} at position {position}"


def _summary(ends: Mapping[str, int], first: Mapping[str, int], n: int) -> str:
    """Name the way that diverges first, or say that none does."""
    if not ends:
        return f"{counted(n, 'way')} {'agrees' if n == 1 else 'agree'} with a cold prefill" if n else ""
    part = min(ends, key=lambda name: first[name] + ends[name])
    more = f", and {counted(len(ends) - 1, 'way')} more" if len(ends) > 1 else ""
    return f"{_sentence(part, first[part] + ends[part])}{more}"


def _curve(part: str, kl: Floats, first: int) -> Curve:
    """Return the mean KL over the windows by position."""
    means = [float(np.mean(usable)) if len(usable := column[np.isfinite(column)]) else None for column in kl.T]
    return Curve(
        key="paths",
        title="KL from the configuration's own cold prefill by position",
        x_label="position in the window, tokens",
        y_label="mean KL, nats",
        x=tuple(float(first + row) for row in range(kl.shape[1])),
        y=tuple(mean or None for mean in means),  # a logarithmic axis cannot show 0
        log_y=True,
        series=part,
    )
