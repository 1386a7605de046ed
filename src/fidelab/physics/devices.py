"""Device table: memory, bandwidth, compute and links, as published and, if available, as measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fidelab.core import read_file, state_dir
from fidelab.core.errors import InputError, UsageError, nearest_first

_LENT_BY_MACOS = ((36, 2 / 3), (math.inf, 3 / 4))
"""Largest memory in GB, and the share of it that macOS lends to the GPU by default; source in devices.yaml."""
_MAKERS = frozenset({"nvidia", "geforce", "amd", "radeon", "intel", "apple", "gpu"})
_OTHER_MODELS = frozenset({"ti", "super", "laptop", "mobile", "d", "xt", "gre", "pro", "max", "ultra"})
"""Words after a name in the table that make it the name of another device."""
_MAX_FILE_BYTES = 2**20
_FIELDS = {"memory", "reported", "bandwidth", "sustained", "compute", "links", "verified", "source", "sizes", "also"}


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        memory: bytes, as advertised.
        reported: bytes that the driver reports to programs; ``None``: unknown.  GiB are advertised as GB, and firmware
            keeps some.
        peak_bandwidth: bytes per second between memory and processor, as published.
        sustained: measured bandwidth of a copy; ``None``: not measured.
        compute: operations per second by type, dense.
        links: bytes per second to other devices and to the host, by name.
        source: where the published figures are from.
        sizes: bytes of the options of a memory that processor and GPU share, on macOS; the largest is ``memory``.
        also: further names.
        verified: how the row was measured; empty if it was never checked on a device.
    """

    name: str
    memory: float
    peak_bandwidth: float
    reported: float | None = None
    sustained: float | None = None
    compute: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    sizes: tuple[float, ...] = ()
    also: tuple[str, ...] = ()
    verified: str = ""

    @property
    def usable(self) -> float:
        """Bytes that programs can use: as the driver reports them, on macOS what it lends the GPU, else as advertised.

        Where processor and GPU share their memory, advertised GB are GiB.
        """
        if self.reported is not None:
            return self.reported
        if not self.sizes:
            return self.memory
        share = next(share for most, share in _LENT_BY_MACOS if self.memory <= most * 1e9)
        return share * self.memory / 1e9 * 2**30

    @property
    def bandwidth(self) -> float:
        """Bandwidth for rooflines: the published one, or the measured one if it is higher."""
        return max(self.peak_bandwidth, self.sustained or 0.0)

    def flops(self, dtype: str) -> float:
        """Return operations per second with this type; infinite if the table has no figure."""
        return self.compute.get(dtype, math.inf)


def user_table() -> Path:
    """Return the path of the user's table, whose rows take precedence over those of the package."""
    return state_dir() / "devices.yaml"


def devices() -> dict[str, Device]:
    """Return all rows by name.

    Raises:
        InputError: If the user's table cannot be read, or a row of it is wrong.
    """
    own = user_table()
    return _shipped() | {name: _device(name, row, str(own)) for name, row in _read(own).items()}


@cache
def _shipped() -> dict[str, Device]:
    """Return the rows of the package's own table."""
    text = files("fidelab.physics").joinpath("devices.yaml").read_text("utf-8")
    parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML has it, is seven times faster
    rows: dict[str, Any] = yaml.load(text, parser)
    return {name: _device(name, row, "devices.yaml") for name, row in rows.items()}


def find_device(name: str) -> Device:
    """Find a row by its name in any spelling: ``RTX-4090``, ``4090``, ``rtx 4090``, ``RTX4090``, ``M3 Max``.

    The size may follow where a device has several: ``M3 Max 64GB``.

    Raises:
        UsageError: If there is no such device, several are meant, or it has no memory of that size.
    """
    table = devices()
    if found := _matches(name, table):
        return _only(name, found, table)
    size = re.search(r"[\s-]*([0-9]+)\s*GB?$", name.strip(), re.IGNORECASE)
    found = _matches(name.strip()[: size.start()], table) if size else []
    if size is None or not found:
        close = ", ".join(nearest_first(name, table)[:3])
        raise UsageError(f"unknown device {name!r}: the closest are {close}; fidelab estimate devices lists all")
    device, memory = _only(name, found, table), float(size[1]) * 1e9
    sizes = device.sizes or (device.memory,)
    if memory not in sizes:
        listed = ", ".join(f"{one / 1e9:,.0f}" for one in sizes)
        raise UsageError(f"device {name!r}: {device.name} has {listed} GB")
    return replace(device, name=f"{device.name}-{size[1]}GB", memory=memory) if device.sizes else device


def _only(name: str, found: Sequence[str], table: Mapping[str, Device]) -> Device:
    if len(found) > 1:
        raise UsageError(f"device {name!r} can be any of {', '.join(found)}: write one of these")
    return table[found[0]]


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _MAKERS]


def _matches(name: str, table: Mapping[str, Device]) -> list[str]:
    """Return the rows that a name means: with all of its words, else those whose words end, or else contain it."""
    wanted = "".join(_words(name))
    spelled = {key: [_words(one) for one in (key, *device.also)] for key, device in table.items()}
    kinds: tuple[Callable[[list[str]], bool], ...] = (
        lambda words: "".join(words) == wanted,
        lambda words: any("".join(words[n:]) == wanted for n in range(len(words))),
        lambda words: any("".join(words[n:m]) == wanted for m in range(len(words)) for n in range(m)),
    )
    for kind in kinds:
        if wanted and (found := [key for key, names in spelled.items() if any(map(kind, names))]):
            return found
    return []


def device_of(told: str) -> Device | None:
    """Return the row of a device by the name that its driver gives; ``None`` if the table has none.

    Raises:
        InputError: As :func:`devices`.
    """
    table = devices()

    words = _words(told)

    def names_it(own: list[str]) -> bool:
        starts = (n for n in range(len(words)) if own and words[n : n + len(own)] == own)
        return any(not _OTHER_MODELS & {*words[n + len(own) : n + len(own) + 1]} for n in starts)

    found = {key: max(own, key=len) for key, device in table.items() if (own := _named(device, names_it))}
    return table[max(found, key=lambda key: len(found[key]))] if found else None  # what was measured has its full name


def _named(device: Device, names_it: Callable[[list[str]], bool]) -> list[list[str]]:
    return [own for name in (device.name, *device.also) if names_it(own := _words(name))]


def _read(path: Path) -> dict[str, Any]:
    try:
        table = yaml.safe_load(read_file(path, _MAX_FILE_BYTES)) or {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]:.200}; correct it or remove it") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: a table of devices maps names to rows; correct it or remove it")
    return table


def _device(name: str, row: Any, where: str) -> Device:
    """A row in the units of Python: bytes, bytes per second, operations per second.

    Raises:
        InputError: If a field is unknown, missing, or not above 0.
    """
    if not isinstance(row, Mapping) or (unknown := set(row) - _FIELDS):
        wrong = f"unknown field {min(unknown, key=str)!r:.60}" if isinstance(row, Mapping) else "not a row of fields"
        raise InputError(f"{where}: device {name!s:.60}: {wrong}; known: {', '.join(sorted(_FIELDS))}")

    def number(value: Any, what: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < 1e18):
            raise InputError(f"{where}: device {name!s:.60}: {what:.60} must be a number above 0, not {value!r:.60}")
        return float(value)

    def rates(what: str, scale: float) -> dict[str, float]:
        held = row.get(what) or {}
        if not isinstance(held, Mapping):
            raise InputError(f"{where}: device {name!s:.60}: {what} maps names to numbers")
        return {str(key): scale * number(value, f"{what} of {key}") for key, value in held.items()}

    sizes, also = row.get("sizes") or [], row.get("also") or []
    if not isinstance(sizes, list) or not isinstance(also, list):
        raise InputError(f"{where}: device {name!s:.60}: sizes and also are lists")
    sustained, reported = row.get("sustained"), row.get("reported")
    return Device(
        name=name,
        memory=1e9 * number(row.get("memory"), "memory"),
        peak_bandwidth=1e9 * number(row.get("bandwidth"), "bandwidth"),
        reported=None if reported is None else 1e9 * number(reported, "reported"),
        sustained=None if sustained is None else 1e9 * number(sustained, "sustained"),
        compute=rates("compute", 1e12),
        links=rates("links", 1e9),
        source=str(row.get("source") or ""),
        sizes=tuple(1e9 * number(size, "sizes") for size in sizes),
        also=tuple(map(str, also)),
        verified=str(row.get("verified") or ""),
    )
