"""Shared nouns: arms, KV specs, probes, statuses.  Standard library and numpy only.

Everything here is frozen and has a canonical JSON form, because captures are found again by the
fingerprints of these records, in this process and in engine processes of other environments.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.errors import UsageError

__all__ = [
    "Arm",
    "Estimator",
    "Forced",
    "FormatSpec",
    "Generate",
    "KVSpec",
    "Prefill",
    "Probe",
    "Status",
    "Timed",
    "Vocabulary",
    "canonical_json",
    "digest",
    "finite",
    "probe_from_record",
    "slug",
    "usable_cores",
]


class Status(StrEnum):
    """The outcome of an arm, an axis or a bench."""

    OK = "ok"
    IDENTICAL = "identical"  # same output as the reference, with positive proof that the format ran
    FAILED = "failed"
    NOT_ENGAGED = "not_engaged"  # evidence that the format ran is absent or contradicting
    NOT_SUPPORTED = "not_supported"
    NOT_MEASURABLE = "not_measurable"


class Estimator(StrEnum):
    """How a next-token distribution was obtained, best first (METRICS, axis B)."""

    HIDDEN = "hidden"
    LOGPROBS = "logprobs"
    TOPK = "topk"


_LONGEST_SLUG = 60  # three of them and two digests make a folder's name; file systems allow 255 bytes


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal records give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(*parts: bytes | str) -> str:
    """SHA-256 over the parts, each preceded by its length, as hexadecimal text."""
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()


def slug(text: str) -> str:
    """Text fit for a file name: of a path the last part; other characters than [A-Za-z0-9._-] as '_'; cut at 60."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(text).name if Path(text).is_absolute() else text).strip("_") or "x"
    return name if len(name) <= _LONGEST_SLUG else f"{name[: _LONGEST_SLUG - 9]}-{digest(text)[:8]}"


def finite(value: Any) -> Any:
    """Plain data as strict JSON can hold it: NaN and infinities become ``None``, tuples lists."""
    match value:
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def usable_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------- KV spec

_FORMAT = re.compile(r"^(?P<name>[A-Za-z0-9_.\-]+)(?:\[(?P<options>[^\[\]]*)\])?$")


@dataclass(frozen=True)
class FormatSpec:
    """One number format by name, with its options as sorted ``(key, value)`` text pairs."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}[{','.join(f'{k}={v}' for k, v in self.options)}]"


@dataclass(frozen=True)
class KVSpec:
    """K format and V format, and the layers that keep the compute type.

    ``label`` is what the user wrote (``k16v8``); ``k`` and ``v`` are what it means.
    """

    label: str
    k: FormatSpec
    v: FormatSpec
    skip_layers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> KVSpec:
        """Read ``name``, ``K/V`` and options in brackets: ``int4[group=32,skip-layers=0,29]``.

        Names are not checked here: only the engine knows which it has.

        Raises:
            UsageError: the text does not have that form.
        """
        label = text.strip()
        sides = label.split("/")
        if len(sides) > 2:
            raise UsageError(f"KV format {text!r}: expected one name or K/V, found {len(sides)} parts")
        parsed = [_parse_side(side, label) for side in sides]
        (k, k_skip), (v, v_skip) = parsed[0], parsed[-1]
        return cls(label=label, k=k, v=v, skip_layers=tuple(sorted({*k_skip, *v_skip})))

    @property
    def same(self) -> bool:
        """K and V are of one format."""
        return self.k == self.v

    def content(self) -> dict[str, Any]:
        """What the spec means, without the label: the part that fingerprints see."""
        return {"k": str(self.k), "v": str(self.v), "skip_layers": list(self.skip_layers)}

    def record(self) -> dict[str, Any]:
        """The form that job files carry."""
        return {"label": self.label, **self.content()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> KVSpec:
        """The inverse of :meth:`record`."""
        return cls(
            label=record["label"],
            k=_parse_side(record["k"], record["k"])[0],
            v=_parse_side(record["v"], record["v"])[0],
            skip_layers=tuple(record["skip_layers"]),
        )


def _parse_side(side: str, whole: str) -> tuple[FormatSpec, list[int]]:
    match = _FORMAT.match(side.strip())
    if match is None:
        raise UsageError(
            f"KV format {whole!r}: write a name, K/V, or options in brackets, as in 'int4[group=32]' or 'f16/q8_0'"
        )
    options: dict[str, list[str]] = {}
    key = ""
    for item in filter(None, (piece.strip() for piece in (match["options"] or "").split(","))):
        head, eq, value = item.partition("=")
        if eq:
            key = head.strip().replace("_", "-")
            options.setdefault(key, []).append(value.strip())
        elif key:  # "skip-layers=0,29": a piece without "=" continues the list before it
            options[key].append(item)
        else:
            raise UsageError(f"KV format {whole!r}: option {item!r} has no value; write key=value")
    layers = []
    for number in options.pop("skip-layers", []):
        if not (number.isascii() and number.isdigit()):
            raise UsageError(f"KV format {whole!r}: skip-layers takes layer numbers from 0, not {number!r}")
        layers.append(int(number))
    pairs = tuple(sorted((k, ",".join(v)) for k, v in options.items()))
    return FormatSpec(match["name"], pairs), layers


# -------------------------------------------------------------------------------------------------- arm


@dataclass(frozen=True)
class Arm:
    """One thing that can be run: engine + model + KV spec + engine options.

    ``weights`` is the hash of the checkpoint's content, ``model`` the name a user knows it by and ``path`` where
    it lies on this machine; the fingerprint sees only the hash.
    """

    name: str
    engine: str
    model: str
    path: str
    weights: str
    kv: KVSpec
    dtype: str
    device: str
    threads: int
    options: tuple[tuple[str, str], ...] = ()

    def fingerprint(self) -> str:
        """SHA-256 of what the arm computes: not its name, nor where its files lie."""
        return digest(
            canonical_json(
                {
                    "engine": self.engine,
                    "weights": self.weights,
                    "kv": self.kv.content(),
                    "dtype": self.dtype,
                    "device": self.device,
                    "threads": self.threads,
                    "options": dict(self.options),
                }
            )
        )

    def record(self) -> dict[str, Any]:
        """Plain data for job files and manifests."""
        return {**asdict(self), "kv": self.kv.record(), "options": dict(self.options)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Arm:
        """The inverse of :meth:`record`."""
        fields = dict(record)
        fields["kv"] = KVSpec.from_record(fields["kv"])
        fields["options"] = tuple(sorted(fields["options"].items()))
        return cls(**fields)


@dataclass(frozen=True)
class Vocabulary:
    """The strings behind the token ids, by their hash; the list itself lies beside the captures."""

    size: int
    sha256: str


# ----------------------------------------------------------------------------------------------- probes
#
# ``axis`` names who asks: an axis, or one of its parts (``perplexity.2048``).  ``settings`` must agree before two
# answers are compared.  ``notes``: none, or for each item what the axis needs to score it (JSON, not for engines).

Tokens = tuple[int, ...]


def _chosen(values: Sequence[Any], indices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[i] for i in indices) if values else ()


@dataclass(frozen=True)
class Prefill:
    """Next-token distributions of whole windows, each through a fresh cache.

    ``windows``: token ids; rows ``first`` … ``last`` (inclusive, 0-based input positions) of each are stored: the row
    of position i predicts token i + 1.  ``units``: for each window the resampling unit of each stored row.
    """

    axis: str
    windows: tuple[Tokens, ...]
    first: int
    last: int
    units: tuple[Tokens, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = field(default="prefill", init=False)

    @property
    def n_rows(self) -> int:
        """Stored rows per window."""
        return self.last - self.first + 1

    def items(self) -> tuple[Tokens, ...]:
        """What is compared one by one: the windows."""
        return self.windows

    def select(self, indices: Sequence[int]) -> Prefill:
        """The probe cut down to some of its windows (the floor's quarter)."""
        return replace(
            self,
            windows=_chosen(self.windows, indices),
            units=_chosen(self.units, indices),
            notes=_chosen(self.notes, indices),
        )


@dataclass(frozen=True)
class Generate:
    """Greedy continuations: the generated ids and, with ``rows``, the state behind each of them.

    ``stop`` ids end a sequence and are part of it; ``batch`` prompts are decoded together, left-padded.
    """

    axis: str
    prompts: tuple[Tokens, ...]
    max_tokens: int
    stop: Tokens
    batch: int = 16
    settings: tuple[tuple[str, Any], ...] = ()
    rows: bool = True
    notes: tuple[str, ...] = ()
    kind: str = field(default="generate", init=False)

    def items(self) -> tuple[Tokens, ...]:
        """What is compared one by one: the prompts."""
        return self.prompts

    def select(self, indices: Sequence[int]) -> Generate:
        """The probe cut down to some of its prompts (the floor's quarter)."""
        return replace(self, prompts=_chosen(self.prompts, indices), notes=_chosen(self.notes, indices))


@dataclass(frozen=True)
class Forced:
    """Given continuations, fed token by token through the cache: the state behind each of their tokens."""

    axis: str
    prompts: tuple[Tokens, ...]
    continuations: tuple[Tokens, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = field(default="forced", init=False)

    def items(self) -> tuple[Tokens, ...]:
        """What is compared one by one: prompt and continuation together."""
        return tuple((*p, *c) for p, c in zip(self.prompts, self.continuations, strict=True))

    def select(self, indices: Sequence[int]) -> Forced:
        """The probe cut down to some of its prompts (the floor's quarter)."""
        return replace(
            self,
            prompts=_chosen(self.prompts, indices),
            continuations=_chosen(self.continuations, indices),
            notes=_chosen(self.notes, indices),
        )


@dataclass(frozen=True)
class Timed:
    """Timestamps of prompts answered one after another, each through a fresh cache; never reused by another run.

    ``n``: tokens decoded greedily behind each prompt, stop tokens ignored; 0 times the prefill alone.  ``warmup``: so
    many of the first groups are answered once before, unmeasured.  ``batch``: consecutive prompts, of equal length
    then, that are answered together as a group; the items are the groups.  The answer to a group is ``seconds``
    [1 + n] float64 since it was handed over: when all its prompts were read and the first token of each was known,
    then when each further token of all of them was.
    """

    axis: str
    prompts: tuple[Tokens, ...]
    n: int = 0
    warmup: int = 1
    batch: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = field(default="timed", init=False)

    def groups(self) -> tuple[tuple[Tokens, ...], ...]:
        """The prompts by ``batch``; the last group may be smaller."""
        return tuple(self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch))

    def items(self) -> tuple[Tokens, ...]:
        """What is timed one by one: the groups, each as its tokens in a row."""
        return tuple(tuple(chain.from_iterable(group)) for group in self.groups())

    def select(self, indices: Sequence[int]) -> Timed:
        """The probe cut down to some of its groups."""
        groups = self.groups()
        prompts = tuple(chain.from_iterable(groups[i] for i in indices))
        return replace(self, prompts=prompts, notes=_chosen(self.notes, indices))


Probe = Prefill | Generate | Forced | Timed
_PROBES: dict[str, type[Prefill] | type[Generate] | type[Forced] | type[Timed]] = {
    "prefill": Prefill,
    "generate": Generate,
    "forced": Forced,
    "timed": Timed,
}


def probe_record(probe: Probe) -> dict[str, Any]:
    """Plain data, as job files carry it."""
    return {**asdict(probe), "settings": dict(probe.settings)}


def probe_hash(probe: Probe) -> str:
    """SHA-256 over everything that the answer depends on."""
    return digest(canonical_json(probe_record(probe)))


def probe_from_record(record: Mapping[str, Any]) -> Probe:
    """The inverse of :func:`probe_record`."""
    fields = dict(record)
    cls = _PROBES[fields.pop("kind")]
    fields["settings"] = tuple(sorted(fields["settings"].items()))
    for key in ("windows", "prompts", "continuations", "units"):
        if key in fields:
            fields[key] = tuple(tuple(ids) for ids in fields[key])
    for key in ("stop", "notes"):
        if key in fields:
            fields[key] = tuple(fields[key])
    return cls(**fields)


def token_hashes(items: Sequence[Tokens]) -> list[str]:
    """One short hash per item, to match the items of two captures."""
    return [digest(np.asarray(item, dtype="<i4").tobytes())[:16] for item in items]
