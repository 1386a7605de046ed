"""Runtime facts reported by an engine: the record that messages, manifests and reports carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_type_hints

from fidelab.core.sequence import SequenceBytes
from fidelab.core.serial import OMIT, fits, to_json


@dataclass(frozen=True)
class Observed:
    """Coverage of a process by the proof of engagement: pairs (observed, all), or ``None`` if not counted.

    Attributes:
        layers: layers with the requested format whose content was compared with the written keys and values.
        prefills, steps: forwards that read several tokens of a sequence, and decode steps.
    """

    layers: tuple[int, int]
    prefills: tuple[int, int] | None = field(default=None, metadata=OMIT)
    steps: tuple[int, int] | None = field(default=None, metadata=OMIT)


@dataclass
class RuntimeInfo:
    """Runtime facts from the engine's own objects. Values are ``None`` if the engine does not report them.

    Attributes:
        k_format, v_format: formats that the cache was seen to store.
        k_dtype, v_dtype: element types of that storage.
        cache_bytes_per_token: bytes of one more encoded token, measured; ``expected_bytes_per_token`` follows from the
            requested formats.  Scales that belong to the sequence are in ``sequence``.
        state_bytes_per_sequence: states of recurrent and convolution layers, whatever the length; measured.
        sequence: bytes of a sequence by its length; ``None`` where they are ``cache_bytes_per_token`` times the length
            and ``state_bytes_per_sequence``.
        more: keys of single engines and, for all of them, ``proof``: the answers to ``stored`` (does the cache hold the
            encoding of the keys and values that were written?), ``received`` (did attention read what the cache
            decodes to?) and ``named`` (was the format identified from the stored content, not from the arm?).  Each
            is ``shown``, ``open: why`` or ``refuted: why``.  ``observed``: an :class:`Observed` as plain data.
    """

    versions: dict[str, str]
    device: str
    attention: str | None = None
    k_format: str | None = None
    v_format: str | None = None
    k_dtype: str | None = None
    v_dtype: str | None = None
    cache_bytes_per_token: float | None = None
    expected_bytes_per_token: float | None = None
    kv_layers: int | None = None
    layers_without_kv: int | None = None
    state_bytes_per_sequence: float | None = None
    sequence: SequenceBytes | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return plain data for messages and manifests."""
        fields = {key: value for key, value in self.__dict__.items() if key != "more"}
        return {**fields, "sequence": None if self.sequence is None else to_json(self.sequence), **self.more}


_MORE: Mapping[str, Any] = {
    "device": str | None,
    "ids": str | None,
    "observed": Mapping[str, tuple[int, int]] | None,
    "proof": Mapping[str, str] | None,
    "provenance": Mapping[str, str],
    "pythonpath": list[Mapping[str, Any]],
    "variables": Mapping[str, str],
    **dict.fromkeys(("k_changed", "v_changed"), float | None),
    **dict.fromkeys(("loaded_host_bytes", "peak_host_bytes", "peak_device_bytes"), float | None),
}
"""Fields that are read besides those of :class:`RuntimeInfo`."""


@cache
def _kinds() -> Mapping[str, Any]:
    return {**get_type_hints(RuntimeInfo), **_MORE}


def invalid_runtime_fields(ran: Mapping[str, Any]) -> Iterator[str]:
    """Yield the invalid fields of a record of runtime facts; unknown fields may have any value."""
    for name, kind in _kinds().items():
        if name not in ran:
            continue
        counts = (ran[name] or {}).values() if name == "observed" and fits(ran[name], kind) else ()
        if not fits(ran[name], kind) or any(some > every for some, every in counts):
            yield name
