"""Capability checks: does the model still do what it could? (METRICS §7)

Greedy answers to a set of questions with one right answer each, read by parsing; code is run in a sandbox when scoring.
What the model, its template or the engine cannot be asked, and what cannot be judged on this machine, is ``not
applicable`` with the reason: it is never passed, and not in the score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fidelab.axes.base import Axis, AxisInputs, AxisScore, AxisSettings, part_name
from fidelab.capability.checks import CHECKS, KINDS, SET_VERSION, TOOL, Check, Judged, Kind, long_prompt
from fidelab.capability.parse import after_thinking
from fidelab.capability.template import NotApplicable, thinking_prompt, tool_prompt
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.core import canonical_json
from fidelab.errors import CaptureError, InputError
from fidelab.metrics.intervals import PairedDifference, RatioItems, mcnemar_exact, paired_difference
from fidelab.probes import Generate, Timed, Tokens
from fidelab.results.axis_record import Figure
from fidelab.results.panels import Panel, TablePanel, TextPair, Texts

__all__ = ["Capability"]

_WORSE = -5.0  # points; a paired interval wholly below costs a band (METRICS §6)
_BATCH = 8
_PARALLEL_TOKENS = 32
_SHORTEST_LONG = 256  # tokens; what is shorter is not a long prompt
_CELL, _TEXT = 80, 1000  # characters of an answer in a table and beside another one
_WITHOUT = "without "  # settings of this prefix say why a check, or a kind of checks, was not asked

_PARTS: Mapping[Kind, tuple[str, ...]] = {
    "arithmetic": ("short",),
    "code": ("code",),
    "knowledge": ("short",),
    "edge": ("short",),
    "parallel": ("single", "batch"),
    "vision": (),
    "tool call": ("tool",),
    "thinking": ("thinking",),
}


class CapabilitySettings(AxisSettings):
    """Which checks, and how long answers may be; part of the comparability key."""

    kinds: tuple[Kind, ...] = Field(default=KINDS, min_length=1, description="kinds of checks")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    n_predict: int = Field(default=48, ge=1, description="tokens generated for a short answer")
    code_tokens: int = Field(default=256, ge=1, description="tokens generated for a program or a tool call")
    thinking_tokens: int = Field(default=1024, ge=1, description="tokens within which thinking and answer must end")
    long: int = Field(
        default=2048, ge=_SHORTEST_LONG, description="tokens of the long prompt, where the model has them"
    )


class Capability(Axis):
    """Share of the applicable checks that the candidate passes; beside it what it lost against the reference."""

    name: ClassVar[str] = "capability"
    title: ClassVar[str] = "Capability: what can the model still do?"
    Settings: ClassVar[type[AxisSettings]] = CapabilitySettings
    quick: ClassVar[Mapping[str, Any]] = {"long": 512, "code_tokens": 160}
    settings: CapabilitySettings

    def probes(self, inputs: AxisInputs) -> dict[str, Generate]:
        """One probe per length of answer; the parallel checks are asked twice, one by one and in one batch.

        Raises:
            InputError: no check of the chosen kinds can be asked.
        """
        s = self.settings
        asked: dict[str, list[tuple[Tokens, str]]] = {}
        without: dict[str, str] = {}
        for check in CHECKS:
            if check.kind not in s.kinds:
                continue
            try:
                item = self._item(check, inputs)
            except NotApplicable as reason:
                without[f"{_WITHOUT}{check.id}"] = str(reason)
                continue
            for part in _PARTS[check.kind]:
                asked.setdefault(part, []).append(item)
        if not asked:
            raise InputError(f"capability: nothing can be asked: {'; '.join(dict.fromkeys(without.values()))}")
        used = "raw" if s.template == "raw" else inputs.tokenizer.template
        common = {"kinds": ", ".join(k for k in KINDS if k in s.kinds), "set": SET_VERSION, "template": used, **without}
        return {
            part: Generate(
                axis=part_name(self.name, part),
                prompts=tuple(ids for ids, _ in items),
                max_tokens=self._budget(part),
                stop=inputs.tokenizer.stop_ids,
                batch=1 if part == "single" else _BATCH,
                settings=tuple(sorted({**common, "n_predict": self._budget(part)}.items())),
                rows=False,
                notes=tuple(note for _, note in items),
            )
            for part, items in asked.items()
        }

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        results = _results(pairs)
        counted = [result for result in results if result.applicable]
        usable = np.array([result.usable for result in counted], dtype=bool)
        passed = np.array([bool(result.test.passed) for result in counted], dtype=np.float64)
        score = AxisScore(
            figures={},
            num=passed,
            den=np.ones(len(counted)),
            units=np.array([CHECKS.index(result.check) for result in counted], dtype=np.int64),
            usable=usable,
            transform=lambda share: 100.0 * share,
            bounds=(0.0, 1.0),
            identical=bool(usable.size and usable.all()) and all(result.same for result in counted),
            proportion=True,
            scale=100.0,
        )
        return _with_figures(score, results, [result for result in counted if result.usable], seed)

    # ------------------------------------------------------------------------------------------ asking

    def _budget(self, part: str) -> int:
        s = self.settings
        tokens = {"code": s.code_tokens, "tool": s.code_tokens, "thinking": s.thinking_tokens}
        return _PARALLEL_TOKENS if part in ("single", "batch") else tokens.get(part, s.n_predict)

    def _item(self, check: Check, inputs: AxisInputs) -> tuple[Tokens, str]:
        """A check's prompt and note.

        Raises:
            NotApplicable: it cannot be asked.
        """
        if not _PARTS[check.kind]:
            raise NotApplicable("no engine here takes images")
        note = {"id": check.id}
        messages = ({"role": "user", "content": check.prompt},)
        if check.kind in ("tool call", "thinking") and self.settings.template == "raw":
            raise NotApplicable("needs the chat template; the settings say raw")
        room = None if inputs.max_positions is None else inputs.max_positions - self._budget(_PARTS[check.kind][0])
        if check.kind == "tool call":
            ids = tool_prompt(inputs.tokenizer, messages, TOOL)
        elif check.kind == "thinking":
            ids, note["ends"] = thinking_prompt(inputs.tokenizer, messages)
        elif check.id == "edge-long":
            ids = self._long(inputs, self.settings.long if room is None else min(self.settings.long, room))
        else:
            ids = inputs.tokenizer.chat(messages, self.settings.template)
        if not ids:
            raise NotApplicable("without a chat template an empty prompt has no tokens")
        if room is not None and len(ids) > room:
            raise NotApplicable(f"prompt and answer do not fit the model's {inputs.max_positions} positions")
        return ids, canonical_json(note)

    def _long(self, inputs: AxisInputs, most: int) -> Tokens:
        """The longest of the long prompts that has at most ``most`` tokens."""
        if most < _SHORTEST_LONG:
            raise NotApplicable(f"the model has no room for a prompt of {_SHORTEST_LONG} tokens")

        def ids(lines: int) -> Tokens:
            message = {"role": "user", "content": long_prompt(lines)}
            return inputs.tokenizer.chat((message,), self.settings.template)

        fits, too_long = 0, most  # a line has more than one token
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if len(ids(middle)) <= most else (fits, middle)
        return ids(fits)


# ---------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class _Result:
    """One check on both sides.  ``answers``: what they wrote; ``same``: in the same tokens throughout."""

    check: Check
    ref: Judged
    test: Judged
    usable: bool = True
    same: bool = False
    answers: tuple[str, str] = ("", "")

    @property
    def applicable(self) -> bool:
        return self.ref.passed is not None and self.test.passed is not None

    @property
    def outcome(self) -> str:
        """In the order in which the report lists them: what was lost first."""
        if not self.applicable:
            return "not applicable"
        if not self.usable:
            return "unusable"
        both = {(True, False): "lost", (False, True): "gained", (False, False): "both fail", (True, True): "both pass"}
        return both[bool(self.ref.passed), bool(self.test.passed)]


_ORDER = ("unusable", "lost", "gained", "both fail", "both pass", "not applicable")


def _results(pairs: Mapping[str, Pair]) -> list[_Result]:
    """All checks of the chosen kinds, in the set's order; of a part of the captures (the floor) only those in it."""
    settings = next(iter(pairs.values())).ref.manifest["settings"]
    if settings.get("set") != SET_VERSION:
        raise CaptureError(
            f"captures hold check set {settings.get('set')}, this version scores set {SET_VERSION}; capture again"
        )
    found: dict[str, dict[str, tuple[Pair, int, int, dict[str, str]]]] = {}
    asked: set[str] = set()
    for part, pair in pairs.items():
        probe = pair.ref.probe
        notes = [] if isinstance(probe, Timed) else [json.loads(note) for note in probe.notes]
        asked.update(note["id"] for note in notes)
        for r, t in pair.items:
            found.setdefault(notes[r]["id"], {})[part] = (pair, r, t, notes[r])
    results = []
    for check in CHECKS:
        if check.id in found:
            results.append(_judged(check, found[check.id]))
        elif check.id not in asked and check.kind in settings["kinds"].split(", "):
            nothing = Judged(None, settings.get(f"{_WITHOUT}{check.id}", "not asked in these captures"))
            results.append(_Result(check, nothing, nothing))
    return results


def _judged(check: Check, places: Mapping[str, tuple[Pair, int, int, dict[str, str]]]) -> _Result:
    if set(places) != set(_PARTS[check.kind]):
        nothing = Judged(None, "asked only one by one or only in a batch")
        return _Result(check, nothing, nothing)
    asked = [places[part] for part in _PARTS[check.kind]]
    ends = asked[0][3].get("ends")
    ref = [(pair.ref, r) for pair, r, _, _ in asked]
    test = [(pair.test, t) for pair, _, t, _ in asked]
    (judged, text), (other, other_text) = (_side(check, side, ends) for side in (ref, test))
    return _Result(
        check,
        judged,
        other,
        usable=_usable(ref) and _usable(test),
        same=[capture.ids(item) for capture, item in ref] == [capture.ids(item) for capture, item in test],
        answers=(text, other_text),
    )


def _usable(places: Sequence[tuple[Capture, int]]) -> bool:
    return all(capture.items[item]["failed"] is None for capture, item in places)


def _side(check: Check, places: Sequence[tuple[Capture, int]], ends: str | None) -> tuple[Judged, str]:
    """One side's verdict and what it wrote.  ``ends``: the marker behind which an answer follows its thinking."""
    text = _text(*places[0])
    if check.judge is None and not _usable(places):
        return Judged(False, "no usable answer"), text
    if check.judge is None:
        alone, batched = (capture.ids(item) for capture, item in places)
        if alone == batched:
            return Judged(True), text
        pairs = enumerate(zip(alone, batched, strict=False))
        fork = next((n for n, (a, b) in pairs if a != b), min(len(alone), len(batched)))
        return Judged(False, f"differs from token {fork} on"), f"alone: {text}\nin a batch: {_text(*places[1])}"
    if ends is None:
        return check.judge(text), text
    rest = after_thinking(text, ends)
    return Judged(False, "thinking did not end in an answer") if rest is None else check.judge(rest), text


def _text(capture: Capture, item: int) -> str:
    """An answer without the token that ended it."""
    ids, probe = capture.ids(item), capture.probe
    ended = isinstance(probe, Generate) and ids and ids[-1] in probe.stop
    return capture.text(ids[:-1] if ended else ids)


# -------------------------------------------------------------------------------------------- reporting


def _with_figures(score: AxisScore, results: Sequence[_Result], good: Sequence[_Result], seed: int) -> AxisScore:
    outcomes = [result.outcome for result in results]
    lost, gained = outcomes.count("lost"), outcomes.count("gained")
    n, had = len(good), sum(bool(result.ref.passed) for result in good)
    counted = [result for result in results if result.applicable]
    reasons = "; ".join(dict.fromkeys(_reason(result) for result in results if not result.applicable))
    not_measurable = ""
    if not counted:
        not_measurable = f"no check is applicable: {reasons}"
    elif not any(result.ref.passed for result in counted):
        not_measurable = f"the reference passes none of the {len(counted)} applicable checks"
    measured = bool(n) and not not_measurable
    change = _change(good, seed) if measured else PairedDifference(math.nan, None, 0)
    interval = score.score_interval(seed) if measured else None
    figures = [
        Figure(name="lost", value=lost, unit="count"),
        Figure(name="gained", value=gained, unit="count"),
        Figure(name="passed", value=score.mean(), ci=interval and _shares(interval), unit="share"),
        Figure(name="reference passed", value=had / n if n else None, unit="share"),
        Figure(name="difference", value=change.estimate if measured else None, ci=change.interval, unit="points"),
        Figure(name="McNemar p", value=mcnemar_exact(lost, gained), unit="p"),
        Figure(name="applicable", value=len(counted), unit="count"),
        Figure(name="not applicable", value=outcomes.count("not applicable"), unit="count"),
    ]
    fields: dict[str, Any] = {
        "score": score.score() if measured else None,
        "ci": interval,
        "n_items": len(counted),
        "n_failed": int((~score.usable).sum()),
        "figures": figures,
        "panels": [*_panels(results)],
        "details": {"set": SET_VERSION},
    }
    return replace(score, figures=fields, not_measurable=not_measurable, lowers=_lowers(good, seed) if measured else ())


def _change(good: Sequence[_Result], seed: int) -> PairedDifference:
    """Candidate minus reference, points."""
    units, ones = np.array([CHECKS.index(result.check) for result in good]), np.ones(len(good))
    test, ref = (
        RatioItems(np.array([float(bool(side.passed)) for side in sides]), ones, units)
        for sides in ([result.test for result in good], [result.ref for result in good])
    )
    return paired_difference(test, ref, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)


def _lowers(good: Sequence[_Result], seed: int) -> tuple[str, ...]:
    """A loss of right answers that is beyond chance.

    Whether a batch answers as single requests do is left out: greedy paths fork at near ties, and what is chaotic
    does not set the verdict (METRICS §6).
    """
    answered = [result for result in good if result.check.judge is not None]
    interval = _change(answered, seed).interval if answered else None
    if interval is None or interval[1] >= _WORSE:
        return ()
    lost, had = sum(r.outcome == "lost" for r in answered), sum(bool(r.ref.passed) for r in answered)
    return (
        f"capability checks: {lost} of the {had} that the reference answers right are lost "
        f"({-interval[1]:.0f}–{-interval[0]:.0f} points of all {len(answered)})",
    )


def _shares(interval: tuple[float, float]) -> tuple[float, float]:
    return interval[0] / 100, interval[1] / 100


def _panels(results: Sequence[_Result]) -> Iterator[Panel]:
    by_kind = [(kind, [r.outcome for r in results if r.check.kind == kind]) for kind in KINDS]
    yield TablePanel(
        title="Checks by kind",
        columns=("kind", "lost", "gained", "both pass", "both fail", "unusable", "not applicable"),
        rows=tuple(
            (kind, *map(outcomes.count, ("lost", "gained", "both pass", "both fail", "unusable", "not applicable")))
            for kind, outcomes in by_kind
            if outcomes
        ),
        note="Lost: the reference passes, the candidate does not.",
    )
    yield TablePanel(
        title="All checks",
        columns=("check", "outcome", "expected", "reference", "candidate", "reason"),
        rows=tuple(
            (
                result.check.id,
                result.outcome,
                result.check.expected,
                *map(_cell, result.answers),
                _reason(result),
            )
            for result in sorted(results, key=lambda result: _ORDER.index(result.outcome))
        ),
        note="Answers are cut to one line; the reason is the candidate's, or why a check is not applicable.",
    )
    changed = [result for result in results if result.outcome in ("lost", "gained")]
    if changed:
        pairs = tuple(
            TextPair(
                label=f"{result.check.id}: {_cell(result.check.prompt) or 'an empty prompt'}",
                reference=result.answers[0][:_TEXT],
                candidate=result.answers[1][:_TEXT],
                note=f"{result.outcome}; expected: {result.check.expected}; {_failing(result).reason[:200]}",
            )
            for result in sorted(changed, key=lambda result: _ORDER.index(result.outcome))
        )
        yield Texts(title="Lost and gained", pairs=pairs)


def _failing(result: _Result) -> Judged:
    return result.test if result.ref.passed else result.ref


def _reason(result: _Result) -> str:
    if result.outcome == "unusable":
        return "a side gave no usable answer"
    side = result.ref if result.ref.passed is None else result.test
    return side.reason[:200]


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CELL else f"{line[: _CELL - 1]}…"
