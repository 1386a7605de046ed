"""Number formats of the KV cache and of weights: what a value costs in bytes and loses in precision.

``base.py`` is the interface, ``weights.py`` applies formats to a checkpoint's matrices, and each other format file
holds one family.  A table target is a callable ``(spec: FormatSpec) -> Format``; importing this package does not import
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import Registry

if TYPE_CHECKING:
    from fidelab.formats.base import Format

__all__ = ["FORMATS", "K_QUANTS", "create"]

K_QUANTS = ("q6_k", "q5_k", "q4_k", "q3_k", "q2_k")  # only for weights: see weights.py

FORMATS = Registry(
    "KV format",
    {
        **dict.fromkeys(("f32", "f16", "bf16"), "fidelab.formats.native:create"),
        **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"), "fidelab.formats.fp8:create"),
        **dict.fromkeys(("nvfp4", "mxfp4"), "fidelab.formats.fp4:create"),
        **dict.fromkeys((f"int{bits}" for bits in range(8, 1, -1)), "fidelab.formats.intn:create"),
        **dict.fromkeys((f"uint{bits}" for bits in range(8, 1, -1)), "fidelab.formats.uintn:create"),
        **dict.fromkeys((f"lloyd{bits}" for bits in range(4, 0, -1)), "fidelab.formats.lloyd:create"),
        **dict.fromkeys(("q8_0", "q5_1", "q5_0", "q4_1", "q4_0"), "fidelab.formats.block:create"),
        "iq4_nl": "fidelab.formats.iq4:create",
    },
    group="fidelab.formats",
)


def create(spec: FormatSpec) -> Format:
    """Return the format that ``spec`` names, with its options.

    Raises:
        UnknownNameError: If no table has this name.
        UsageError: If the format lacks an option, or does not accept its value.
    """
    factory: Callable[[FormatSpec], Format] = FORMATS.load(spec.name)
    given = dict(spec.options).keys()
    if given & {"sinks", "tail"}:
        from fidelab.formats import excepted  # imports torch

        return excepted.excepted(spec, create(spec.without(*excepted.OPTIONS)))
    if given & {"rotate", "seed"}:
        from fidelab.formats import rotated

        return rotated.rotated(spec, factory(spec.without(*rotated.OPTIONS)))
    return factory(spec)
