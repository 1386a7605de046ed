"""Proof of engagement: whether the requested format ran.  See docs/metrics/verdicts.md#proof-of-engagement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fidelab.core import Arm, Status
from fidelab.results.outcomes import ArmResult

_BYTES_TOLERANCE = 1e-3  # of the bytes per token that the formats take
_REFUTED = "refuted: "
_QUESTIONS = ("received", "stored", "named")  # of the proof of engagement, in the order of reasons


def engaged(result: ArmResult) -> tuple[Status, str | None]:
    """Whether there is proof that the requested format ran.  See docs/metrics/verdicts.md#proof-of-engagement."""
    if result.status is not Status.OK or result.ran is None:
        return result.status, result.reason
    ran, kv = result.ran, result.arm.kv
    proof = ran.get("proof") or {}  # a manifest has its keys in another order
    # what attention received says more than what was stored, and that than a name
    ranks = {question: rank for rank, question in enumerate(_QUESTIONS)}
    answers = [str(proof[question]) for question in sorted(proof, key=lambda one: ranks.get(one, len(ranks)))]
    refuted = next((text.removeprefix(_REFUTED) for text in answers if text.startswith(_REFUTED)), None)
    for side, asked in (("k", kv.k), ("v", kv.v)):
        stored = ran.get(f"{side}_format")
        if stored is None:
            unproven = f"the engine gave no evidence that {side.upper()} was stored as {asked}"
            return Status.NOT_ENGAGED, refuted or unproven
        if stored != str(asked):
            return Status.NOT_ENGAGED, f"asked for {side.upper()} = {asked}, the engine stored {stored}"
    if refuted:
        return Status.NOT_ENGAGED, refuted
    held, expected = ran.get("cache_bytes_per_token"), ran.get("expected_bytes_per_token")
    if held and expected and abs(held - expected) > _BYTES_TOLERANCE * expected:
        return Status.NOT_ENGAGED, f"the cache holds {held:g} bytes per token, the asked format takes {expected:g}"
    return result.status, result.reason


def select_runtime_info(arm: Arm, rans: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Select the runtime info of the captures by which the arm is judged.

    Captures of a run that was stopped and resumed are from several processes, each of which has its own evidence.  So a
    record that contradicts the format takes precedence over the last one, and so does one that shows changed numbers in
    attention (:meth:`Scorer._unmoved`).  A record without evidence contradicts nothing.
    """
    asked = {"k_format": str(arm.kv.k), "v_format": str(arm.kv.v)}

    def refutes(ran: Mapping[str, Any]) -> bool:
        record = {**ran, **{side: ran.get(side) or name for side, name in asked.items()}}
        return engaged(ArmResult("", arm, Status.OK, ran=record))[0] is Status.NOT_ENGAGED

    def changes(ran: Mapping[str, Any]) -> bool:
        return bool(ran.get("k_changed") or ran.get("v_changed"))

    latest = list(reversed(rans))
    return next((ran for tells in (refutes, changes) for ran in latest if tells(ran)), latest[0] if latest else None)
