"""Requests to an engine, as plain data.  Standard library and numpy only.

Fields that all requests have:

- ``axis``: the axis that asks, or one of its parts (``perplexity.2048``).
- ``settings``: pairs of name and value that must agree before two answers are compared.
- ``notes``: empty, or one text per item, in JSON, that the axis needs for scoring and engines ignore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np

from fidelab.core import canonical_json, digest

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class _Request:
    """Base of the requests.

    ``kind``: the name of the class in small letters.  ``_PER_ITEM``: the fields that hold one entry per item; items are
    compared by the first one.
    """

    kind: ClassVar[str]
    _PER_ITEM: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()

    def items(self) -> tuple[Tokens, ...]:
        """Token ids that identify the items (windows or prompts), by which two captures are matched."""
        items: tuple[Tokens, ...] = getattr(self, self._PER_ITEM[0])
        return items

    def select(self, indices: Sequence[int]) -> Self:
        """Return the request cut down to some of its items, such as the quarter for run-to-run noise."""
        chosen = {name: _chosen(getattr(self, name), indices) for name in (*self._PER_ITEM, "notes")}
        if found := chosen.get("positions"):
            chosen |= {"first": min(own[0] for own in found), "last": max(own[-1] for own in found)}
        return replace(self, **chosen)


def _chosen(values: Sequence[Any], indices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[i] for i in indices) if values else ()


class _Rows(_Request):
    """Base of the requests for rows ``first`` … ``last`` of windows."""

    first: int
    last: int

    @property
    def n_rows(self) -> int:
        """Stored rows per window."""
        return self.last - self.first + 1

    @property
    def total_rows(self) -> int:
        """Stored rows of all windows."""
        return len(self.items()) * self.n_rows


@dataclass(frozen=True)
class Prefill(_Rows):
    """Request for next-token distributions of whole windows, each through a fresh cache.

    ``windows``: token ids; rows ``first`` … ``last`` (inclusive, 0-based input positions) of each are stored: the row
    of position i predicts token i + 1.  ``units``: for each window the resampling cluster of each stored row.

    ``positions``: where they are given, the rising positions of the rows that are stored of each window.  Windows may
    differ in length then, and ``first`` and ``last`` are the smallest and the largest position of all.
    """

    axis: str
    windows: tuple[Tokens, ...]
    first: int
    last: int
    units: tuple[Tokens, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    positions: tuple[Tokens, ...] = ()
    _PER_ITEM = ("windows", "units", "positions")

    def rows_of(self, item: int) -> Sequence[int]:
        """Return the positions of the stored rows of one window, in order."""
        return self.positions[item] if self.positions else range(self.first, self.last + 1)

    def last_of(self, item: int) -> int:
        """Return the last stored position of one window: no later token can change its rows."""
        return self.rows_of(item)[-1]

    @property
    def total_rows(self) -> int:
        """Stored rows of all windows."""
        return sum(map(len, self.positions)) if self.positions else super().total_rows


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: ``temperature`` above 0, the nucleus ``top_p``, and a seed."""

    temperature: float
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Generate(_Request):
    """Request for greedy continuations: the generated ids and, with ``rows``, the state after each of them.

    ``stop`` ids end a sequence and are part of it; ``batch`` prompts are decoded together, left-padded.  Settings
    ``temperature``, ``top_p`` and ``sampling_seed`` ask for :attr:`sampling` instead of the most likely token.
    """

    axis: str
    prompts: tuple[Tokens, ...]
    max_tokens: int
    stop: Tokens
    batch: int = 16
    settings: tuple[tuple[str, Any], ...] = ()
    rows: bool = True
    notes: tuple[str, ...] = ()
    _PER_ITEM = ("prompts",)

    @property
    def sampling(self) -> Sampling | None:
        """Sampling settings; ``None`` means greedy.

        Raises:
            ValueError: If the settings are invalid.
        """
        settings = dict(self.settings)
        temperature = settings.get("temperature", 0.0)
        if not temperature:
            return None
        found = Sampling(float(temperature), float(settings.get("top_p", 1.0)), int(settings.get("sampling_seed", 0)))
        if not (0 < found.temperature < 1e3 and 0 < found.top_p <= 1):
            raise ValueError(f"temperature {found.temperature} and top_p {found.top_p} are no way to sample")
        return found


@dataclass(frozen=True)
class Forced(_Request):
    """Request for the states after each token of given continuations, fed token by token through the cache."""

    axis: str
    prompts: tuple[Tokens, ...]
    continuations: tuple[Tokens, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    _PER_ITEM = ("prompts", "continuations")

    def items(self) -> tuple[Tokens, ...]:
        """Return each prompt followed by its continuation."""
        return tuple((*p, *c) for p, c in zip(self.prompts, self.continuations, strict=True))


@dataclass(frozen=True)
class Timed(_Request):
    """Request for the times of prompts answered one after another, each through a fresh cache.

    Another run never reuses the answers.

    ``n``: tokens decoded greedily after each prompt, stop tokens ignored; 0 times only the prefill.  ``batch``: number
    of consecutive prompts of equal length that are answered together as a group; the items are the groups.  The answer
    to a group is ``seconds`` [1 + n] (float64) since the group was handed over.  The first time is when all prompts
    were read and the first token of each was known.  The others are when each further token of all prompts was known.
    """

    axis: str
    prompts: tuple[Tokens, ...]
    n: int = 0
    batch: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def groups(self) -> tuple[tuple[Tokens, ...], ...]:
        """The prompts in groups of ``batch``; the last group may be smaller."""
        return tuple(self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch))

    def items(self) -> tuple[Tokens, ...]:
        """The groups, each as the tokens of its prompts in a row."""
        return tuple(tuple(chain.from_iterable(group)) for group in self.groups())

    def select(self, indices: Sequence[int]) -> Self:
        """Return the request cut down to some of its groups."""
        groups = self.groups()
        prompts = tuple(chain.from_iterable(groups[i] for i in indices))
        return replace(self, prompts=prompts, notes=_chosen(self.notes, indices))


@dataclass(frozen=True)
class Layerwise(_Request):
    """Request for the states between decoder layers while whole windows are read, each through a fresh cache.

    ``states``: the input of the first layer and the output of each layer, at rows ``first`` … ``last`` (inclusive,
    0-based input positions): one array ``states`` [1 + layers, rows, d].  ``qkv``: the inputs of attention at every
    position, in the named ``layers`` (0-based; position embedding applied): arrays ``<layer>.q`` [heads, tokens, D],
    ``<layer>.k`` [KV heads, tokens, D] and ``<layer>.v`` [KV heads, tokens, Dv], keys and values as computed, before
    the cache.
    """

    axis: str
    windows: tuple[Tokens, ...]
    first: int
    last: int
    tensors: Literal["states", "qkv"] = "states"
    layers: tuple[int, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    _PER_ITEM = ("windows",)


WAYS: Mapping[str, str] = {
    "cold": "one prefill of the whole window, alone, through an empty cache",
    "chunked": "prefill in chunks of ``size`` tokens",
    "decode": "the first ``size`` tokens are read at once, all others one by one through the cache",
    "prefix": "after a hit of ``size`` tokens, whole blocks, in the prefix cache; the same window was read before",
    "prefix-partial": "after a hit of ``size`` tokens that ends within a block; the same window was read before",
    "prefix-other": "after a hit of ``size`` tokens that another request made, which continues with ``others`` instead",
    "prefix-generated": "after a hit of ``size`` tokens, of which the engine decoded the second half one by one",
    "batch": "together with ``others``, requests of other lengths",
    "evicted": "after the window was read, and its blocks were given to ``others``",
}
"""The ways in which a server may compute the same distributions, and what each of them means."""


@dataclass(frozen=True)
class Served(_Rows):
    """Request for next-token distributions of whole windows, computed in one of the :data:`WAYS` of servers.

    Rows ``first`` … ``last`` of each window are stored, as of :class:`Prefill`.  ``size``: tokens of a chunk, of the
    part that is read at once, or of the prefix that is hit; 0 if the way has no such number.  Nothing is computed for
    the tokens of a prefix hit, so ``first`` is at least ``size`` then.  ``others``: the prompts of the other requests,
    the same for each window.  An engine proves by its own counters that the answers were computed that way: the
    answer's facts have ``engaged``, the counts by name, or ``not_engaged``, the reason why not, and then the rows do
    not count.  Ways that an engine lacks are not requested (:attr:`Engine.ways <fidelab.engines.base.Engine.ways>`). If
    it only finds out when asked, it raises ``NotSupportedError``.  The facts then have ``not_supported``, the reason,
    and no item has rows.
    """

    axis: str
    windows: tuple[Tokens, ...]
    first: int
    last: int
    way: str
    size: int = 0
    others: tuple[Tokens, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    _PER_ITEM = ("windows",)

    @property
    def n_tokens(self) -> int:
        """Largest number of tokens that an engine processes."""
        again = 2 if self.way.startswith("prefix") or self.way == "evicted" else 1
        return again * sum(map(len, self.windows)) + len(self.windows) * sum(map(len, self.others))

    @property
    def n_stepped(self) -> int:
        """The number of tokens that are decoded one by one."""
        match self.way:
            case "decode":
                return sum(max(0, len(window) - self.size) for window in self.windows)
            case "prefix-generated":
                return len(self.windows) * (self.size - self.size // 2)
            case _:
                return 0


@dataclass(frozen=True)
class RoundedWeights(_Rows):
    """Request for next-token distributions, as of :class:`Prefill`, with other weights for this answer only.

    ``weights`` has the form of the option of that name (``int4[only=down_proj]``); ``native`` rounds nothing.  The
    weights are restored afterwards, so one loaded model answers many requests.
    """

    axis: str
    windows: tuple[Tokens, ...]
    first: int
    last: int
    units: tuple[Tokens, ...]
    weights: str
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    _PER_ITEM = ("windows", "units")


@dataclass(frozen=True)
class RoundedCache(_Rows):
    """Request for next-token distributions, as of :class:`Prefill`, with rounded keys and values in some layers.

    ``kv``: rules ``PLACE:K/V`` with semicolons between: ``*:int4/native``, ``3:int4/int4`` (a layer),
    ``3.0:int4/native`` (a layer and one of its heads); later rules override earlier ones.  ``kv=native`` rounds
    nothing; its facts describe the keys and values of each window (``statistics``).
    """

    axis: str
    windows: tuple[Tokens, ...]
    first: int
    last: int
    units: tuple[Tokens, ...]
    kv: str
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    _PER_ITEM = ("windows", "units")


Request = Prefill | Generate | Forced | Timed | Layerwise | Served | RoundedWeights | RoundedCache
KINDS: Mapping[str, type[Request]] = {cls.kind: cls for cls in get_args(Request)}
"""``kind`` → class."""

CUT_SHORT = "cut_short"
"""Fact of an answer: number of an item → how many of its rows count, where memory did not suffice for all of them."""

_MAX_TOKEN_ID = 1 << 31  # ids are hashed as 32-bit numbers
_TENSORS = ("states", "qkv")


def request_record(request: Request) -> dict[str, Any]:
    """Return the request as plain data, for job files."""
    values = {one.name: getattr(request, one.name) for one in fields(request)}  # asdict would copy every token
    if isinstance(request, Prefill) and not request.positions:
        del values["positions"]
    return {**values, "kind": request.kind, "settings": dict(request.settings)}


def request_hash(request: Request) -> str:
    """Return the SHA-256 over everything that the answer depends on."""
    return digest(canonical_json(request_record(request)))


def request_from_record(record: Mapping[str, Any]) -> Request:
    """Return the request of a record, as written by :func:`request_record`; the record may come from anybody.

    Raises:
        KeyError, TypeError, ValueError: If it is not such a record.
    """
    values = {key: _tuples(value) for key, value in record.items()}
    values["settings"] = tuple(sorted(record["settings"].items()))
    request = KINDS[values.pop("kind")](**values)
    if fault := next((f.name for f in fields(request) if not _is_sound(request, f.name)), None):
        raise ValueError(f"field {fault!r} of a {request.kind} request is not what it should be")
    return request


def _is_sound(request: Request, name: str) -> bool:
    """Return whether one field of a request has the type and the range that its class describes."""
    value = getattr(request, name)
    match name:
        case "settings":
            return True
        case "axis" | "weights" | "kv":
            return isinstance(value, str) and value != ""
        case "tensors":
            return value in _TENSORS
        case "way":
            return value in WAYS
        case "rows":
            return isinstance(value, bool)
        case "stop" | "layers":
            return _are_ids(value)
        case "max_tokens" | "n" | "batch" | "first" | "last" | "size":
            return _are_ids((value,)) and value >= (name in ("max_tokens", "batch"))
        case "notes":
            return value == () or (len(value) == len(request.items()) and all(isinstance(note, str) for note in value))
    if not (
        isinstance(value, tuple) and all(map(_are_ids, value))
    ):  # windows, positions, units, prompts, continuations, others
        return False
    match request, name:
        case Prefill(), "positions":
            return value == () or _are_positions(request)
        case Prefill(positions=positions), "units" if positions:
            return [*map(len, value)] == [*map(len, positions)]
        case Prefill(positions=positions), "windows" if positions:
            return True  # the positions are checked against the windows
        case _Rows(), "units":
            return len(value) == len(request.windows) and all(len(units) == request.n_rows for units in value)
        case ((_Rows() | Layerwise()), "windows"):
            rows = _are_ids((request.first, request.last)) and request.first <= request.last
            return rows and all(request.last < len(window) for window in value)
        case Forced(prompts=prompts), "continuations":
            return isinstance(prompts, tuple) and len(value) == len(prompts)
    return True


def _are_positions(request: Prefill) -> bool:
    """Return whether each window has rising positions within it, and first and last are those of all."""
    found, windows = request.positions, request.windows
    if len(found) != len(windows) or not all(found):
        return False
    ends = (min(own[0] for own in found), max(own[-1] for own in found))
    rising = all(a < b for own in found for a, b in pairwise(own))
    return (
        rising
        and ends == (request.first, request.last)
        and all(own[-1] < len(window) for own, window in zip(found, windows, strict=True))
    )


def _are_ids(value: Any) -> bool:
    """Return whether a value is a tuple of whole numbers from 0 to 2³¹ - 1."""
    if not isinstance(value, tuple) or {*map(type, value)} - {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < _MAX_TOKEN_ID)


def _tuples(value: Any) -> Any:
    """Turn lists, as which JSON stores tuples, into tuples again."""
    if not isinstance(value, list):
        return value
    return tuple(map(_tuples, value)) if list in map(type, value) else tuple(value)


def token_hashes(items: Sequence[Tokens]) -> list[str]:
    """Return one short hash per item, to match the items of two captures."""
    return [digest(np.asarray(item, dtype="<i4").tobytes())[:16] for item in items]
