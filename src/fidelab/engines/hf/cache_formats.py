"""Formats of Transformers' own ``QuantizedCache``, as ``generate(cache_implementation="quantized")`` runs it: 5.24.

The first forward of a sequence is stored quantized as a whole, and attention of that forward reads its keys and values
as they were computed.  Later tokens stay in the compute type until ``tail`` of them are there, Transformers'
``residual_length``.  Then everything is quantized again, from what the stored codes stand for.  The fp8 cache has no
such tail.  Its scale is that of the first forward, and every later forward reads all tokens quantized.

Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fidelab.core import KVSpec
from fidelab.core.errors import UsageError
from fidelab.engines.cache_formats import CacheFormat, Codes, table
from fidelab.engines.installed import versions_of

Backend = Literal["quanto", "hqq", "fp8"]

_PACKAGES: Mapping[Backend, str] = {"quanto": "optimum-quanto", "hqq": "hqq"}
_BITS: Mapping[Backend, tuple[int, ...]] = {"quanto": (4, 2), "hqq": (8, 4, 3, 2, 1)}
_FP8 = "transformers_fp8"
_GROUP, _TAIL = 64, 128  # defaults of Transformers
_NAME = re.compile(r"(?P<backend>quanto|hqq)_int(?P<bits>[1-8])")
_MOST = 1 << 20  # of an option
_SCALE = 4  # bytes of the fp8 cache's scale of a layer's keys, and of its values
_COMPUTE = 2  # numbers of the compute type per group: its scale and its zero point


@dataclass(frozen=True)
class Quantized:
    """One of Transformers' quantized caches.

    Attributes:
        backend: as ``QuantizedCache`` takes it.
        bits: of a code; group: of values with one scale; tail: tokens that wait to be quantized.  0: fp8 has none.
    """

    backend: Backend
    bits: int = 8
    group: int = 0
    tail: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``QuantizedCache``, which ``generate`` takes as ``cache_config``."""
        if self.backend == "fp8":
            return {"backend": self.backend}
        lengths = {"q_group_size": self.group, "residual_length": self.tail}
        return {"backend": self.backend, "nbits": self.bits, **lengths}

    def quantized_tokens(self, first: int, later: int) -> int:
        """Return how many tokens are quantized after a first forward of some, and later ones one by one."""
        return first + (later // self.tail * self.tail if self.tail else later)

    def code_bytes(self, values: int) -> int:
        """Return the bytes of the packed codes of so many values of a layer's keys, or of its values."""
        if self.backend == "fp8":
            return values
        groups = values // self.group
        if self.backend == "quanto":  # bytes hold codes of several groups; the last ones may stay half empty
            return math.ceil(groups / (8 // self.bits)) * self.group
        return groups * _packed_group(self.bits, self.group)

    def side_bytes(self, values: int, exact: int, native: int) -> int:
        """Return the bytes of a layer's keys, or of its values, in one cache.

        Args:
            values: how many numbers are quantized, over all sequences, heads and tokens.
            exact: how many are in the compute type; ``native``: bytes of one.
        """
        groups = 0 if self.backend == "fp8" else values // self.group
        if groups == 1 and self.backend == "quanto":  # takes a lone group for a tensor, and each of its values for one
            groups = self.group
        scales = groups * _COMPUTE * native or _SCALE
        return self.code_bytes(values) + scales + exact * native

    def padding(self, values: int) -> int:
        """Return the bytes of codes that stay empty, because a byte has room for more groups than there are."""
        if self.backend != "quanto":
            return 0
        return self.code_bytes(values) - values * self.bits // 8

    def refusal(self, values: int) -> str:
        """Return the reason why a token of so many values in a layer cannot be stored; empty if it can."""
        if self.group and values % self.group:
            return f"groups of {self.group} do not divide the {values} values of a token in a layer: write group=N"
        return ""


def quantized_of(kv: KVSpec) -> Quantized | None:
    """Return the cache of Transformers that a format means; ``None`` for fidelab's own formats.

    Raises:
        UsageError: If keys and values differ, layers are skipped or an option is unknown.
    """
    named = [side.name for side in (kv.k, kv.v) if side.name in CACHE_FORMATS]
    if not named:
        return None
    if not kv.same:
        raise UsageError(
            f"KV format {kv.label!r}: Transformers' QuantizedCache has one format for keys and values: write {named[0]}"
        )
    if kv.skipped:
        raise UsageError(
            f"KV format {kv.label!r}: Transformers' QuantizedCache has one format for all layers, no skip-layers"
        )
    options = dict(kv.k.options)
    match = _NAME.fullmatch(named[0])
    if match is None:
        if options:
            raise UsageError(f"KV format {kv.label!r}: {_FP8} takes no options, since its scale is one per layer")
        return Quantized("fp8")
    if unknown := sorted(options.keys() - {"group", "tail"}):
        raise UsageError(f"KV format {kv.label!r}: {named[0]} has no option {unknown[0]!r}; it has group and tail")
    group, tail = (_count(kv, options, key, default) for key, default in (("group", _GROUP), ("tail", _TAIL)))
    if group % 8:
        raise UsageError(f"KV format {kv.label!r}: group={group} is not a multiple of 8")
    backend: Backend = "quanto" if match["backend"] == "quanto" else "hqq"
    return Quantized(backend, int(match["bits"]), group, tail)


def _count(kv: KVSpec, options: Mapping[str, str], key: str, default: int) -> int:
    text = options.get(key, str(default))
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST):
        raise UsageError(f"KV format {kv.label!r}: {key}={text} is not a whole number from 1 to {_MOST:,}")
    return int(text)


def missing_package(kv: KVSpec) -> str:
    """Return what to install before a format can run; empty if nothing is missing."""
    found = quantized_of(kv)
    package = "" if found is None else _PACKAGES.get(found.backend, "")
    if not package or package in versions_of(package):
        return ""
    return f"--kv {kv.label} needs {package}: pip install {package}"


def packages_of(kv: KVSpec) -> tuple[str, ...]:
    """Return the distributions that compute a format."""
    found = quantized_of(kv)
    return () if found is None or found.backend not in _PACKAGES else (_PACKAGES[found.backend],)


def _packed_group(bits: int, group: int) -> int:
    """Bytes of the codes of one group of HQQ: 3 bits are packed by ten into 32, all others without gaps."""
    return 4 * math.ceil(group / 10) if bits == 3 else group * bits // 8


def _codes(backend: Backend, bits: int, group: int) -> Codes:
    width = bits if backend == "quanto" else 8 * _packed_group(bits, group) / group
    return Codes(width, group, params=_COMPUTE)


def _row(backend: Backend, bits: int) -> CacheFormat:
    return CacheFormat.both(
        f"{backend}_int{bits}",
        _codes(backend, bits, _GROUP),
        scales=f"a scale and a zero point in the compute type per {_GROUP} values, when quantized",
        needs=f"{_PACKAGES[backend]}, full attention in all layers",
    )


CACHE_FORMATS: Mapping[str, CacheFormat] = table(
    CacheFormat.both(
        _FP8,
        Codes(8),
        scales="one per layer for keys and one for values, from the first forward",
        needs="full attention in all layers",
    ),
    *(_row(backend, bits) for backend, widths in _BITS.items() for bits in widths),
)


def format_of(kv: KVSpec) -> CacheFormat | None:
    """Return what is known of a format of Transformers' own cache, with its options; ``None`` for fidelab's own."""
    if not kv.same or kv.k.name not in CACHE_FORMATS:
        return None
    row = CACHE_FORMATS[kv.k.name]
    found = quantized_of(replace(kv, skip_layers=(), skip_kinds=()))
    if found is None or not found.group:
        return row
    codes = _codes(found.backend, found.bits, found.group)
    return replace(
        row, k=codes, v=codes, latent=codes, scales=row.scales.replace(f"per {_GROUP}", f"per {found.group}")
    )
