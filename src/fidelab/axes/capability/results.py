"""Results of the capability checks: the answers of both sides, read from captures and judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fidelab.axes.base import answer_text, written_text
from fidelab.axes.capability.checks import CHECKS, SET_VERSION, Check, CheckKind, Judged
from fidelab.axes.capability.parse import after_thinking
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Timed
from fidelab.core.errors import CaptureError

WITHOUT = "without "
"""Prefix of settings with the reason why a check, or a kind of checks, was not asked."""

PARTS: Mapping[CheckKind, tuple[str, ...]] = {
    "arithmetic": ("short",),
    "code": ("code",),
    "knowledge": ("short",),
    "edge": ("short",),
    "parallel": ("single", "batch"),
    "vision": ("image", "control"),
    "tool call": ("tool",),
    "thinking": ("thinking",),
}
"""Kind of checks → the parts of the axis that ask it."""


@dataclass(frozen=True)
class CheckResult:
    """One check on both sides.  ``answers``: their texts; ``same``: whether all tokens are the same."""

    check: Check
    ref: Judged
    test: Judged
    usable: bool = True
    same: bool = False
    answers: tuple[str, str] = ("", "")

    @property
    def applicable(self) -> bool:
        """Asked of both and judged on both."""
        return self.ref.passed is not None and self.test.passed is not None

    @property
    def outcome(self) -> str:
        """Outcome of the check, one of :data:`ORDER`."""
        if not self.applicable:
            return "not applicable"
        if not self.usable:
            return "unusable"
        both = {(True, False): "lost", (False, True): "gained", (False, False): "both fail", (True, True): "both pass"}
        return both[bool(self.ref.passed), bool(self.test.passed)]


ORDER = ("unusable", "lost", "gained", "both fail", "both pass", "not applicable")
"""Outcomes as the report lists them."""


def read_results(pairs: Mapping[str, Pair]) -> list[CheckResult]:
    """All checks of the chosen kinds in the set's order; for partial captures (repeats) only those in them."""
    settings = next(iter(pairs.values())).ref.manifest["settings"]
    if settings.get("set") != SET_VERSION:
        raise CaptureError(
            f"captures hold check set {settings.get('set')}, this version scores set {SET_VERSION}; capture again"
        )
    places: dict[str, dict[str, tuple[Pair, int, int, dict[str, str]]]] = {}
    asked: set[str] = set()
    for part, pair in pairs.items():
        request = pair.ref.request
        notes = [] if isinstance(request, Timed) else [json.loads(note) for note in request.notes]
        asked.update(note["id"] for note in notes)
        for r, t in pair.items:
            places.setdefault(notes[r]["id"], {})[part] = (pair, r, t, notes[r])
    results = []
    for check in CHECKS:
        if check.id in places:
            results.append(_judged(check, places[check.id]))
        elif check.id not in asked and check.kind in settings["kinds"].split(", "):
            unasked = None if "limit" in settings else "not asked in these captures"
            if reason := settings.get(f"{WITHOUT}{check.id}", unasked):
                nothing = Judged(None, reason)
                results.append(CheckResult(check, nothing, nothing))
    return results


def _judged(check: Check, places: Mapping[str, tuple[Pair, int, int, dict[str, str]]]) -> CheckResult:
    if set(places) != set(PARTS[check.kind]):
        nothing = Judged(None, "asked only one by one or only in a batch")
        return CheckResult(check, nothing, nothing)
    asked = [places[part] for part in PARTS[check.kind]]
    ends = asked[0][3].get("ends")
    ref = [(pair.ref, r) for pair, r, _, _ in asked]
    test = [(pair.test, t) for pair, _, t, _ in asked]
    side_of = _judge_vision if check.kind == "vision" else _side
    (judged, text), (other, other_text) = (side_of(check, side, ends) for side in (ref, test))
    return CheckResult(
        check,
        judged,
        other,
        usable=_usable(ref) and _usable(test),
        same=[capture.ids(item) for capture, item in ref] == [capture.ids(item) for capture, item in test],
        answers=(text, other_text),
    )


def _usable(places: Sequence[tuple[Capture, int]]) -> bool:
    return all(capture.items[item]["failed"] is None for capture, item in places)


def _judge_vision(check: Check, places: Sequence[tuple[Capture, int]], _ends: str | None) -> tuple[Judged, str]:
    """One side of a vision check: right to the image, and another answer to the control, which shows something else."""
    assert check.judge is not None
    image, control = (answer_text(*place) for place in places)
    judged = check.judge(image)
    if judged.passed and check.judge(control).passed:
        judged = Judged(False, "the same answer to another image")
    return judged, f"image: {image}\nother image: {control}"


def _side(check: Check, places: Sequence[tuple[Capture, int]], ends: str | None) -> tuple[Judged, str]:
    """One side's verdict and text.  ``ends``: the marker after which an answer follows its thinking."""
    text = written_text(*places[0])
    if check.judge is None and not _usable(places):
        return Judged(False, "no usable answer"), text
    if check.judge is None:
        alone, batched = (capture.ids(item) for capture, item in places)
        if alone == batched:
            return Judged(True), text
        pairs = enumerate(zip(alone, batched, strict=False))
        fork = next((n for n, (a, b) in pairs if a != b), min(len(alone), len(batched)))
        return Judged(False, f"differs from token {fork} on"), f"alone: {text}\nin a batch: {written_text(*places[1])}"
    if ends is None:
        return check.judge(answer_text(*places[0])), text
    rest = after_thinking(text, ends)
    return Judged(False, "thinking did not end in an answer") if rest is None else check.judge(rest), text
