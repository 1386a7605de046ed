"""Twins: arms with other last bits, which show the rounding noise of a format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fidelab.core import Arm
from fidelab.engines.base import engine_class
from fidelab.engines.hf.weights import rounding_of

_JITTER = "jitter"  # the option of engines that have twins


def family(arm: Arm) -> tuple[str, ...]:
    """Return the key of an arm's family: engine, weights, compute type and formats. A family shares one twin."""
    return arm.engine, arm.weights, rounding_of(arm), arm.dtype, arm.kv.k.name, arm.kv.v.name


def twins_of(arms: Sequence[Arm]) -> dict[str, Arm]:
    """Return, by the name of each family's first arm, a twin with other last bits, if its engine can make one."""
    first = {family(arm): arm for arm in reversed(arms) if _JITTER not in dict(arm.options)}
    named = {arm.name: arm for arm in first.values() if engine_class(arm.engine).has_jitter}
    return {
        arm.name: replace(arm, options=tuple(sorted({**dict(arm.options), _JITTER: "1"}.items())))
        for arm in arms
        if arm.name in named
    }
