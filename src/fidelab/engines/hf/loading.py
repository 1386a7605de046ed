"""Which configurations may share one load of their model.  Known without importing torch."""

from __future__ import annotations

from fidelab.core import Arm, FormatSpec, canonical_json
from fidelab.engines.hf import kernels
from fidelab.engines.hf.weights import WEIGHTS

_OWN = (WEIGHTS, "device-map", "tp-plan", "quantization-config")  # they change all weights, or their device
_AFTER = "jitter"  # changes a few pages of a process' own copy


def turn_key(arm: Arm) -> str | None:
    """Return the key of the model that an arm on a GPU loads; those with equal keys may use one process in turn.

    ``None``: the arm has a process of its own, since its options change weights or attention.
    """
    options = dict(arm.options)
    changed = {*_OWN, _AFTER} & options.keys() or options.get("attention") == kernels.NAME
    if changed or has_exceptions(arm.kv.k) or has_exceptions(arm.kv.v):
        return None
    return canonical_json([arm.path, arm.weights, arm.dtype, arm.device, *sorted(map(list, options.items()))])


def load_key(arm: Arm) -> str | None:
    """Return the key of the model that an arm loads; arms with equal keys may share one load before they are forked.

    ``None``: the arm loads its own, since a GPU survives no fork, or its options change weights or attention.
    """
    options = dict(arm.options)
    changed = {*_OWN} & options.keys() or options.get("attention") == kernels.NAME
    if arm.device != "cpu" or changed or has_exceptions(arm.kv.k) or has_exceptions(arm.kv.v):
        return None
    kept = sorted([name, value] for name, value in options.items() if name != _AFTER)
    return canonical_json([arm.path, arm.weights, arm.dtype, *kept])


def has_exceptions(spec: FormatSpec) -> bool:
    """Return whether a format keeps some tokens exact, for which attention has to be another one."""
    options = dict(spec.options)
    return bool({"sinks", "tail"} & options.keys()) or options.get("axis") == "channel"
