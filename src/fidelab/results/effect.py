"""Whether a change of the configuration took effect, where no output changed.

Equal outputs of a changed configuration have two explanations: the change costs nothing, or nobody read it.  Only what
the engine reports of itself tells them apart.  See docs/metrics/verdicts.md#nothing-changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fidelab.core import Status
from fidelab.results.numbers import one_line
from fidelab.results.record import ArmRecord, RuntimeRecord

NOTHING_CHANGED = "nothing changed: is it read at all?"
"""Said of a candidate whose output is the reference's, and of whose change nothing shows an effect."""

_REQUESTED = frozenset({"k_options", "v_options", "variables", "pythonpath", "provenance", "remarks", "prompts"})
"""Runtime facts that repeat the request, or that come from fidelab: no evidence of an effect."""
_INCIDENTAL = frozenset(
    {"loaded_host_bytes", "peak_host_bytes", "peak_device_bytes", "observed", "proof", "k_changed", "v_changed"}
)
"""Runtime facts that differ between two processes of one configuration, or that only describe the observation."""
_FORMATS = frozenset({"k_format", "v_format", "k_dtype", "v_dtype"})
"""Runtime facts that engines without a proof repeat from the request."""
_SAME_SIZE = 0.05  # of a number: pools of caches follow the free memory, which differs between two starts


def effect_of(arm: ArmRecord, reference: ArmRecord) -> str:
    """Return what shows that an arm ran otherwise than the reference, such as ``attention sdpa``; empty if nothing.

    Evidence is what the engine reports: its version, kernels, resolved settings, types and bytes of the cache, and the
    weights that the worker itself loaded.  A variable or an option alone is a request, not an effect.
    """
    ran, base = arm.ran, reference.ran
    return "" if ran is None or base is None else ", ".join(_differences(arm, reference, ran, base))


def is_unchanged(arm: ArmRecord, reference: ArmRecord) -> bool:
    """Whether the output is identical to the reference's and nothing shows that the change took effect."""
    return arm.status is Status.IDENTICAL and not effect_of(arm, reference)


def is_proven(arm: ArmRecord) -> bool:
    """Whether all questions of the proof of engagement were answered "shown"."""
    return {*_proof(arm).values()} == {"shown"}


def _proof(arm: ArmRecord) -> dict[str, Any]:
    proof = arm.ran.others().get("proof") if arm.ran else None
    return proof if isinstance(proof, dict) else {}


def same_formats(arm: ArmRecord, reference: ArmRecord) -> bool:
    """Whether two arms asked for the same formats of keys and values, in the same layers."""
    return (arm.kv and arm.kv.content()) == (reference.kv and reference.kv.content())


def _differences(arm: ArmRecord, reference: ArmRecord, ran: RuntimeRecord, base: RuntimeRecord) -> Iterator[str]:
    if arm.engine != reference.engine:
        yield f"engine {one_line(arm.engine)}"
    loaded = ran.weight_bytes is not None and base.weight_bytes is not None
    if loaded and arm.weights_sha256 != reference.weights_sha256:
        yield "other weights"
    for name, version in ran.versions.items():
        if base.versions.get(name) not in (None, version):
            yield f"{one_line(name)} {one_line(version)}"
    own, theirs = ({**side.model_dump(), **side.others()} for side in (ran, base))
    skipped = {"versions", "weight_bytes", "simulated_weight_bytes", "bits_per_weight", *_REQUESTED, *_INCIDENTAL}
    if "shown" not in _proof(arm).values():
        skipped |= _FORMATS
    elif not same_formats(arm, reference):
        yield f"KV cache {one_line(arm.kv_text)}"
    for name, value in own.items():
        if name not in skipped and _differ(value, theirs.get(name)):
            text = ("off", "on")[value] if isinstance(value, bool) else one_line(str(value))[:40]
            yield f"{one_line(name.replace('_', ' '))} {text}"


def _differ(own: Any, other: Any) -> bool:
    """Whether two facts are known and differ; numbers by more than what two starts of one server differ."""
    if own is None or other is None:
        return False
    numbers = [isinstance(side, int | float) and not isinstance(side, bool) for side in (own, other)]
    if all(numbers):
        return bool(abs(own - other) > _SAME_SIZE * max(abs(own), abs(other)))
    return bool(own != other)
