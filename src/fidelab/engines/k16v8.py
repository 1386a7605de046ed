"""K16/V8 and other format pairs in fidelab, and the package k16v8 that adds them to engines.

The package is a candidate like any other and not part of fidelab: ``pip install k16v8``.  It is imported when an arm
requests it, after a check with :func:`missing`.  Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fidelab.core import Arm, FormatSpec, KVSpec
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.engines.cache_formats import CacheFormat, Codes
from fidelab.engines.checkpoint import skip_refusal

K16V8 = "k16v8"  # the format, the package, its attention in Transformers, its backends in vLLM and SGLang
PLUGIN = K16V8  # entry point in vLLM and SGLang
SWITCH = "K16V8"  # environment variable that switches its plug-ins on
NATIVE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "f16": "float16", "float16": "float16"}  # keys → compute type
SIDES = ("bf16", "f16", "fp8_e4m3", "fp8_e4m3fnuz", "int8", "int4")  # of a pair on vLLM and SGLang
_BITS = {"bf16": 16, "f16": 16, "fp8_e4m3": 8, "fp8_e4m3fnuz": 8, "int8": 8, "int4": 4}
_KERNEL_NAMES = {"bfloat16": "bf16", "float16": "f16"}  # engines' names of the kernels' formats
_PACKAGE_ONLY = ("fp8_e4m3fnuz", "int8", "int4")  # that engines lack: also the package's if both sides have it
_INTEGERS = ("int8", "int4")
_NATIVE_ALONE = {"vllm": ("bf16", "f16"), "sglang": ("f16",)}  # names that the engines themselves lack
_PER_HEAD = (("scale", "per-token-head"),)
_KERNELS = (("kernels", K16V8),)  # 16 bits for both: measures the package's attention alone
_WORDS = {"fp8_e4m3": "1", "fp8_e4m3[scale=per-token-head]": "per-token-head"}  # of the switch, with native keys


def meaning(kv: KVSpec, native: str) -> KVSpec:
    """Return a KV spec with ``k16v8`` replaced by native 16-bit keys and saturating fp8_e4m3 values, scale 1.0.

    Raises:
        UsageError: If ``k16v8`` has options.
    """

    def side(fmt: FormatSpec, name: str) -> FormatSpec:
        if fmt.name != K16V8:
            return fmt
        if fmt.options:
            raise UsageError(
                f"KV format {fmt}: k16v8 takes no options; write K/V, as in '{native}/fp8_e4m3[scale=per-token-head]'"
            )
        return FormatSpec(name)

    return replace(kv, k=side(kv.k, native), v=side(kv.v, "fp8_e4m3"))


# ------------------------------------------------------------------------------------- pairs on vLLM and SGLang


def is_pair(kv: KVSpec) -> bool:
    """Whether keys and values are stored by the package's plug-in, and not by vLLM or SGLang itself.

    The plug-in stores pairs whose sides differ, and formats that the engines do not have: integers with a scale for
    each token and head, and FP8 with such scales.  ``fp8_e4m3`` for both is the engine's own, and so is a 16-bit format
    except ``bf16[kernels=k16v8]``, which separates the kernels' cost from a format's.
    """
    return not kv.same or kv.k.name in _PACKAGE_ONLY or kv.k.options in (_PER_HEAD, _KERNELS)


def check_pair(kv: KVSpec, engine: str) -> bool:
    """Return :func:`is_pair` after checking that the spec is valid on this engine.

    Raises:
        UsageError: If the kernels lack the format of a side, or the format lacks an option.
    """
    if not is_pair(kv):
        skips = bool(kv.skipped) and (engine != "vllm" or kv.k.name in ("auto", *NATIVE))
        if kv.k.options or skips:
            raise UsageError(
                f"KV format {kv.label!r}: formats of engine {engine} take no options; pairs do, as in "
                "bf16/int8[skip-layers=0,4-29] or bf16[kernels=k16v8]"
            )
        if kv.k.name in SIDES and kv.k.name in _NATIVE_ALONE.get(engine, ()):
            raise UsageError(
                f"KV format {kv.label!r}: on engine {engine} it is a side of a pair, as in {kv.k.name}/int8; for both "
                "write auto"
            )
        return False
    if kv.skip_kinds:
        raise UsageError(f"KV format {kv.label!r}: a pair takes layer numbers in skip-layers, not {kv.skip_kinds[0]}")
    for side in (kv.k, kv.v):
        name, options = kernel_name(side), dict(side.options)
        if name not in SIDES:
            raise UsageError(
                f"KV format {kv.label!r}: a pair on engine {engine} is made of {', '.join(SIDES)}, by the plug-in of "
                f"package k16v8, not of {side.name}"
            )
        known = {"scale"} if name.startswith("fp8") else {"group"} if name in _INTEGERS else {"kernels"}
        if unknown := sorted(options.keys() - known):
            raise UsageError(f"KV format {kv.label!r}: {name} takes no {unknown[0]} on engine {engine}")
        if options.get("scale", "none") not in ("none", "per-token-head"):
            raise UsageError(f"KV format {kv.label!r}: scale={options['scale']} is neither none nor per-token-head")
        if not options.get("group", "1").isdecimal():
            raise UsageError(f"KV format {kv.label!r}: group={options['group']} is not a number of values")
        if options.get("kernels", K16V8) != K16V8:
            raise UsageError(f"KV format {kv.label!r}: kernels={options['kernels']} is not {K16V8}")
    if {kernel_name(kv.k), kernel_name(kv.v)} <= {"bf16", "f16"} and not (kv.same and kv.k.options == _KERNELS):
        raise UsageError(
            f"KV format {kv.label!r}: both sides are of 16 bits; write auto, the engine's own cache, or "
            f"{kernel_name(kv.k)}[kernels={K16V8}] for the package's kernels"
        )
    return True


def pair_refusal(arm: Arm, head_dim: int | None, layers: int | None) -> str:
    """Return the reason why the paged kernels cannot hold an arm's pair in its model; empty if none is known."""
    kv, compute = arm.kv, _KERNEL_NAMES.get(arm.dtype)
    for side in (kv.k, kv.v):
        name, group = kernel_name(side), dict(side.options).get("group")
        wide = _BITS[name] == 16
        if compute is None or (wide and name != compute):
            wanted = next(dtype for dtype, short in _KERNEL_NAMES.items() if not wide or short == name)
            does = f"keeps {'keys' if side is kv.k else 'values'} as {wanted}" if wide else "is for 16 bits"
            return f"{kv.label} {does}, the model computes in {arm.dtype}: pass --dtype {wanted}"
        if head_dim is not None and group is not None and int(group) < head_dim:
            return f"{kv.label}: the paged kernels have one scale for each token and head: write {name}"
        if head_dim is not None and _BITS[name] * head_dim % 8:
            return f"{kv.label}: {name} packs two values into a byte; a head dimension of {head_dim} is not a multiple"
    if head_dim is not None and arm.device != "cpu" and head_dim not in (known := _gpu_head_dims()):
        sizes = ", ".join(map(str, known))
        return f"{kv.label}: the GPU kernels take head dimensions of {sizes}; this model's is {head_dim}"
    return skip_refusal(kv, layers)


def _gpu_head_dims() -> tuple[int, ...]:
    """Head dimensions that the package's GPU kernels take; its CPU path takes any."""
    from k16v8.kernels.dispatch import HEAD_DIMS

    return HEAD_DIMS


def kernel_names(kv: KVSpec) -> tuple[str, str]:
    """Return the kernels' names for the formats of a pair."""
    return kernel_name(kv.k), kernel_name(kv.v)


def kernel_name(side: FormatSpec) -> str:
    """Return the kernels' name for the format of a side."""
    return _KERNEL_NAMES.get(side.name, side.name)


def _has_scales(side: FormatSpec) -> bool:
    """A float16 for each token and head."""
    return side.name in _INTEGERS or side.options == _PER_HEAD


def pair_format(kv: KVSpec) -> CacheFormat:
    """Return a pair as a cache format: codes, and a float16 scale for each token and head where it has one."""
    k, v = (Codes(_BITS[kernel_name(side)], scale=2 * _has_scales(side)) for side in (kv.k, kv.v))
    scaled = _has_scales(kv.k) or _has_scales(kv.v)
    return CacheFormat(
        *(kv.label, k, v),
        scales="one float16 per token and head, when written" if scaled else "1.0",
        needs="the package k16v8",
    )


def scales_of(kv: KVSpec) -> dict[str, str]:
    """Return the source of a pair's scales, and how many values share one, for the record."""
    if _has_scales(kv.k) or _has_scales(kv.v):
        return {"scale_source": "dynamic", "scale_granularity": "per token and head"}
    return {"scale_source": "default 1.0", "scale_granularity": "per tensor"}


def read_back_layers(layers: Mapping[int, dict[str, Any]], skipped: Iterable[int]) -> dict[str, Any]:
    """Merge the package's findings on the pages of several layers; ``skipped``: layers that the plug-in skips.

    Formats are those of the layers that are not skipped.  ``matches`` is that of the worst layer, ``skip_layers``
    those that hold other formats.  ``counted``: saturated keys and values of all writes, with ``K16V8_COUNT=1``.
    """
    others = [layer for layer in layers if layer not in {*skipped}] or list(layers)
    named = layers[others[0]]
    counted = [found["counted"] for found in layers.values() if "counted" in found]
    return named | {
        "matches": min(found["matches"] for found in layers.values()),
        "disjoint": all(found["disjoint"] for found in layers.values()),
        "saturated": sum(found["saturated"] for found in layers.values()),
        **({"counted": [sum(side) for side in zip(*counted, strict=True)]} if counted else {}),
        "layers": len(layers),
        "skip_layers": [
            layer for layer, found in layers.items() if any(found[x] != named[x] for x in ("k_format", "v_format"))
        ],
    }


def holds_pair(kv: KVSpec, found: Mapping[str, Any]) -> bool:
    """Return whether the pages of all layers hold the written keys and values in this pair's formats."""
    formats = found.get("k_format"), found.get("v_format")
    return (
        found.get("matches") == 1.0
        and bool(found.get("disjoint"))
        and formats == kernel_names(kv)
        and found.get("skip_layers") == list(kv.skip_layers)
    )


def set_switch(kv: KVSpec) -> None:
    """Set the switch for this process and its children; an arm without a pair must not inherit it."""
    os.environ[SWITCH] = _switch(kv) if is_pair(kv) else "0"


def _switch(kv: KVSpec) -> str:
    if str(kv.k) in NATIVE and str(kv.v) in _WORDS and not kv.skip_layers:
        return _WORDS[str(kv.v)]
    sides = [replace(side, options=side.options if side.options == _PER_HEAD else ()) for side in (kv.k, kv.v)]
    k, v = (replace(side, name=kernel_name(side)) for side in sides)
    if not kv.skip_layers:
        return f"{k}/{v}"
    skip = (("skip-layers", ",".join(map(str, kv.skip_layers))),)
    return f"{k}/{replace(v, options=(*v.options, *skip))}"


def switch_variables(kv: KVSpec) -> dict[str, str]:
    """Return the variables that start a server with the switch; empty for an arm without a pair."""
    return {SWITCH: _switch(kv)} if is_pair(kv) else {}


# -------------------------------------------------------------------------------------------- the package


def missing() -> str:
    """Return the reason why the package cannot be used in this interpreter; empty if it can."""
    return "" if installed_version() else "needs the package k16v8, which is not installed here: pip install k16v8"


def installed_version() -> str | None:
    """Return the package's version; ``None`` if it is not installed."""
    try:
        spec = find_spec(K16V8)
    except ImportError:
        return None
    if spec is None or spec.origin is None:  # a folder of that name is not a package
        return None
    return str(import_module(K16V8).__version__)


def versions_for(arm: Arm) -> dict[str, str]:
    """Return the package's version for arms that may use it, since answers depend on the version."""
    if arm.engine == "hf":
        attention = dict(arm.options).get("attention")
        used = attention == K16V8 or (attention is None and arm.device.startswith("cuda"))
    else:
        used = arm.engine in ("vllm", "sglang") and is_pair(arm.kv)
    version = installed_version() if used else None
    return {K16V8: version} if version else {}


@contextmanager
def translated_errors() -> Iterator[None]:
    """Translate the package's exceptions into fidelab's. Raises NotSupportedError if it is not installed."""
    if reason := missing():
        raise NotSupportedError(f"this configuration {reason}")
    from k16v8 import errors

    try:
        yield
    except errors.NotSupportedError as error:
        raise NotSupportedError(str(error)) from error
    except errors.UsageError as error:
        raise UsageError(str(error)) from error
    except errors.K16V8Error as error:
        raise EngineError(str(error)) from error


def run_command(words: Sequence[str]) -> int:
    """Run ``k16v8 words…`` in this process, and return its exit code. See :func:`missing`."""
    return int(import_module(f"{K16V8}.cli").main(words))
