"""Device table: memory, bandwidth, compute and links, as published and, if available, as measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fidelab.core import read_file, state_dir
from fidelab.core.errors import InputError, UsageError, nearest_first

_MAX_FILE_BYTES = 2**20
_FIELDS = {"memory", "reported", "bandwidth", "sustained", "compute", "links", "verified", "source"}


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
        verified: how the row was measured; empty if it was never checked on a device.
    """

    name: str
    memory: float
    peak_bandwidth: float
    reported: float | None = None
    sustained: float | None = None
    compute: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    verified: str = ""

    @property
    def usable(self) -> float:
        """Bytes that programs can use: as the driver reports them, else as advertised."""
        return self.memory if self.reported is None else self.reported

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
    shipped: dict[str, Any] = yaml.safe_load(files("fidelab.physics").joinpath("devices.yaml").read_text("utf-8"))
    rows = {name: _device(name, row, "devices.yaml") for name, row in shipped.items()}
    own = user_table()
    return rows | {name: _device(name, row, str(own)) for name, row in _read(own).items()}


def find_device(name: str) -> Device:
    """Find a row by its name, in any case.

    Raises:
        UsageError: If there is no such device. The message lists the devices of the table.
    """
    table = devices()
    found = next((device for key, device in table.items() if key.lower() == name.strip().lower()), None)
    if found is None:
        known = ", ".join(nearest_first(name, table))
        raise UsageError(f"unknown device {name!r}; known: {known}; own rows go into {user_table()}")
    return found


def device_of(told: str) -> Device | None:
    """Return the row of a device by the name that its driver gives; ``None`` if the table has none.

    Raises:
        InputError: As :func:`devices`.
    """
    table = devices()

    def padded_words(text: str) -> str:
        return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "

    found = [name for name in table if padded_words(name) in padded_words(told)]
    return table[max(found, key=len)] if found else None  # what was measured on it has its full name


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

    sustained, reported = row.get("sustained"), row.get("reported")
    return Device(
        name=name,
        memory=1e9 * number(row.get("memory"), "memory"),
        peak_bandwidth=1e9 * number(row.get("bandwidth"), "bandwidth"),
        reported=None if reported is None else 1e9 * number(reported, "reported"),
        sustained=None if sustained is None else 1e9 * number(sustained, "sustained"),
        compute=rates("compute", 1e12),
        links=rates("links", 1e9),
        verified=str(row.get("verified") or ""),
    )
