"""K16/V8 in fidelab: the pair of formats, and the package of that name, which brings it to engines.

The package is a contender like any other and no part of fidelab: ``pip install k16v8``.  It is imported when an arm
asks for it, after a check with :func:`missing`.  Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

from fidelab.core import Arm, FormatSpec, KVSpec
from fidelab.errors import EngineError, NotSupportedError, UsageError

__all__ = [
    "FORMER_NAME",
    "K16V8",
    "NATIVE",
    "PLUGIN",
    "SWITCH",
    "Scaling",
    "content_bytes",
    "installed_version",
    "meaning",
    "missing",
    "pair_scaling",
    "set_switch",
    "switch_variables",
    "translated_errors",
    "versions_for",
]

Scaling = Literal["none", "per-token-head"]
K16V8 = "k16v8"  # the format, the package, its attention in Transformers, its backends in vLLM and SGLang
FORMER_NAME = "fidelab"  # of the attention
PLUGIN = K16V8  # entry point in vLLM and SGLang
SWITCH = "K16V8"  # environment variable that switches its plug-ins on
NATIVE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "f16": "float16", "float16": "float16"}  # keys → compute type
_SCALINGS: Mapping[str, Scaling] = {"fp8_e4m3": "none", "fp8_e4m3[scale=per-token-head]": "per-token-head"}


def meaning(kv: KVSpec, native: str) -> KVSpec:
    """A KV spec as arms have it: ``k16v8`` is keys in the model's native 16-bit type (``bf16``, ``f16``), values
    fp8_e4m3 with scale 1.0, saturating.

    Raises:
        UsageError: ``k16v8`` with options.
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


def pair_scaling(kv: KVSpec, engine: str) -> Scaling | None:
    """How the plug-in scales the values of this pair; ``None``: the cache is the engine's own.

    Raises:
        UsageError: a pair that is not K16/V8.
    """
    if kv.same:
        return None
    scaling = _SCALINGS.get(str(kv.v))
    if str(kv.k) not in NATIVE or scaling is None:
        raise UsageError(
            f"KV format {kv.label!r}: {engine} has one type for keys and values; the one pair is {K16V8} "
            "(or bfloat16/fp8_e4m3[scale=per-token-head]), by the plug-in of package k16v8"
        )
    return scaling


def content_bytes(head_dim: int, v_dim: int, scaling: Scaling) -> int:
    """Bytes that one head of one token takes: keys of two bytes, values of one, a float16 scale where there is one."""
    return 2 * head_dim + v_dim + (2 if scaling == "per-token-head" else 0)


def set_switch(scaling: Scaling | None) -> None:
    """Set the switch for this process and its children; an arm that is not K16/V8 must not inherit it."""
    os.environ[SWITCH] = {None: "0", "none": "1"}.get(scaling, str(scaling))


def switch_variables(scaling: Scaling | None) -> dict[str, str]:
    """The switch as a variable to start a server with; empty for an arm that is not K16/V8."""
    return {} if scaling is None else {SWITCH: {"none": "1"}.get(scaling, scaling)}


# -------------------------------------------------------------------------------------------- the package


def missing() -> str:
    """Why the package cannot be used in this interpreter; empty where it can."""
    return "" if installed_version() else "needs the package k16v8, which is not installed here: pip install k16v8"


def installed_version() -> str | None:
    """The package's version; ``None`` where it is not installed."""
    try:
        spec = find_spec(K16V8)
    except ImportError:
        return None
    if spec is None or spec.origin is None:  # a folder of that name is no package
        return None
    return str(import_module(K16V8).__version__)


def versions_for(arm: Arm) -> dict[str, str]:
    """The package's version where an arm may run on it: another version's answers are other answers."""
    if arm.engine == "hf":
        attention = dict(arm.options).get("attention")
        used = attention == K16V8 or (attention is None and arm.device.startswith("cuda"))
    else:
        used = arm.engine in ("vllm", "sglang") and not arm.kv.same
    version = installed_version() if used else None
    return {K16V8: version} if version else {}


@contextmanager
def translated_errors() -> Iterator[None]:
    """Translate the package's exceptions into fidelab's; raises NotSupportedError where it is not installed."""
    if reason := missing():
        raise NotSupportedError(f"this arm {reason}")
    from k16v8 import errors

    try:
        yield
    except errors.NotSupportedError as error:
        raise NotSupportedError(str(error)) from error
    except errors.UsageError as error:
        raise UsageError(str(error)) from error
    except errors.K16V8Error as error:
        raise EngineError(str(error)) from error
