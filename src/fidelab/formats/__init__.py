"""Number formats of the KV cache: what a value costs in bytes and loses in precision.

``base.py`` is the contract, each other format file one family.  A table target is a callable
``(spec: FormatSpec) -> Format``; importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.registry import Registry

if TYPE_CHECKING:
    from fidelab.formats.base import Format

__all__ = ["FORMATS", "create"]

FORMATS = Registry(
    "KV format",
    {
        "f32": "fidelab.formats.native:create",
        "f16": "fidelab.formats.native:create",
        "bf16": "fidelab.formats.native:create",
        "fp8_e4m3": "fidelab.formats.fp8:create",
        "fp8_e5m2": "fidelab.formats.fp8:create",
        "fp8_e4m3fnuz": "fidelab.formats.fp8:create",
        "fp8_e5m2fnuz": "fidelab.formats.fp8:create",
        "nvfp4": "fidelab.formats.fp4:create",
        "mxfp4": "fidelab.formats.fp4:create",
        "int8": "fidelab.formats.intn:create",
        "int7": "fidelab.formats.intn:create",
        "int6": "fidelab.formats.intn:create",
        "int5": "fidelab.formats.intn:create",
        "int4": "fidelab.formats.intn:create",
        "int3": "fidelab.formats.intn:create",
        "int2": "fidelab.formats.intn:create",
        "q8_0": "fidelab.formats.block:create",
        "q5_1": "fidelab.formats.block:create",
        "q5_0": "fidelab.formats.block:create",
        "q4_1": "fidelab.formats.block:create",
        "q4_0": "fidelab.formats.block:create",
        "iq4_nl": "fidelab.formats.iq4:create",
    },
    group="fidelab.formats",
)


def create(spec: FormatSpec) -> Format:
    """The format that ``spec`` names, with its options.

    Raises:
        UnknownNameError: no table has this name.
        UsageError: an option that the format lacks, or a value that it does not take.
    """
    factory: Callable[[FormatSpec], Format] = FORMATS.load(spec.name)
    return factory(spec)
