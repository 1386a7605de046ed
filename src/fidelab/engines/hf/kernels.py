"""Format pairs that k16v8's attention kernels store exactly as fidelab defines them."""

from __future__ import annotations

from typing import Any

from fidelab.core import Arm, FormatSpec, KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.engines import k16v8
from fidelab.engines.checkpoint import shape_of

ATTENTION, AUTO = "attention", "auto"  # the engine option, and what omitting it is called
NAME = k16v8.K16V8  # attention=k16v8
THEIRS = "transformers"  # attention=transformers: Transformers' own choice, also on a GPU
DEQUANT = ("fused", "unpack")  # engine option dequant: in the kernel's registers, or the whole cache before attention
_NATIVES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_FLOAT8 = ("fp8_e4m3", "fp8_e4m3fnuz")
_INTEGERS = ("int8", "int4")
_GROUP = 32  # of integers, by default


def options_of(kv: KVSpec) -> dict[str, Any]:
    """Return formats and scalings in the form of :class:`k16v8.plugins.transformers.cache.PagedKVCache`.

    Raises:
        NotSupportedError: If the kernels do not hold this format as it is defined.
    """
    if kv.skip_kinds:
        raise NotSupportedError(f"attention={NAME} takes layer numbers in skip-layers, not {kv.skip_kinds[0]}")
    k, v = _scaling(kv.k), _scaling(kv.v)
    return {"k_format": kv.k.name, "v_format": kv.v.name, "k_scaling": k, "v_scaling": v}


def refusal(arm: Arm) -> str | None:
    """Return the reason why the kernels cannot run an arm, as far as known without loading its model."""
    if reason := k16v8.missing():
        return f"attention={NAME} {reason}"
    try:
        options_of(arm.kv)
    except NotSupportedError as error:
        return str(error)
    for spec in (arm.kv.k, arm.kv.v):
        if _NATIVES.get(spec.name, arm.dtype) != arm.dtype:
            return f"attention={NAME} copies {spec.name} as it is, the model computes in {arm.dtype}"
        head_dim = shape_of(arm.path).head_dim
        group = int(dict(spec.options).get("group", _GROUP))
        if spec.name in _INTEGERS and head_dim is not None and group < head_dim:
            return f"attention={NAME} holds {spec.name} with one group per head: write {spec.name}[group={head_dim}]"
    return None


def dequant_refusal(arm: Arm) -> str | None:
    """Return the reason why an arm's option ``dequant`` cannot be used; ``None`` if it can."""
    options = dict(arm.options)
    if options.get("dequant") != "fused" or options.get("attention") == NAME:
        return None
    return f"dequant=fused needs attention={NAME}: any other attention reads a cache that was decoded before"


def _scaling(spec: FormatSpec) -> str:
    options = dict(spec.options)
    if options.get("rotate", "none") != "none":
        raise NotSupportedError(f"attention={NAME} does not hold {spec}: its kernels have no rotation")
    if kept := [key for key in ("sinks", "tail") if key in options]:
        raise NotSupportedError(f"attention={NAME} does not hold {spec}: its kernels have no {kept[0]}")
    if spec.name in _NATIVES:
        return "none"
    if spec.name in _INTEGERS:  # where the group is as large as a head: seen at the first write
        return "per-token-head"
    scale = options.get("scale", "none")
    if spec.name in _FLOAT8 and scale in ("none", "per-token-head"):
        return scale
    raise NotSupportedError(
        f"attention={NAME} does not hold {spec}; it holds {', '.join(_NATIVES)}, {' and '.join(_FLOAT8)} with scale "
        f"none or per-token-head, {' and '.join(_INTEGERS)} with one group per head"
    )
