"""Capability checks: does the model keep its abilities? See docs/metrics.md#capability-checks.

Greedy answers to a set of questions with one right answer each, read by parsing; code is run in a sandbox when scoring.
A check that the model, its template or the engine cannot take, or that this machine cannot judge, is ``not
applicable`` with the reason.  It is never passed, and not in the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fidelab.axes.base import (
    OVER_CONTROL,
    SCORE,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    image_files,
    image_messages,
    lost_and_gained,
    part_name,
)
from fidelab.axes.capability.checks import CHECKS, KINDS, SET_VERSION, TOOL, Check, CheckKind, long_prompt
from fidelab.axes.capability.results import ORDER, PARTS, WITHOUT, CheckResult, read_results
from fidelab.axes.capability.template import NotApplicable, thinking_prompt, tool_prompt
from fidelab.axes.capability.vision import QUESTIONS
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Generate, ImageGenerate, Tokens
from fidelab.core import Status, canonical_json
from fidelab.core.errors import InputError
from fidelab.inputs.images import draw, png, tokens_around
from fidelab.metrics.intervals import PairedDifference, RatioItems, mcnemar_exact, paired_difference
from fidelab.results.measurement import Cell, Definition
from fidelab.results.plots import Plot, TablePlot, TextPair, Texts

_HARM_POINTS = -5.0  # points; a paired interval wholly below costs a band; see docs/metrics.md#verdicts
_BATCH = 8
_PARALLEL_TOKENS = 32
_SHORTEST_LONG = 256  # minimum tokens of a long prompt
_CELL, _TEXT = 80, 1000  # characters of an answer in a table and next to another one

_LOST = Definition("lost", "count", None, "Checks that the reference alone passes.")
_GAINED = Definition("gained", "count", None, "Checks that the arm alone passes.")
_PASSED = Definition("passed", "share", "higher", "Share of the checks that the arm passes.")
_REFERENCE = Definition("reference_passed", "share", None, "Share of the checks that the reference passes.")
_DIFFERENCE = Definition("difference", "points", "higher", "Checks passed minus the reference's, in percent, paired.")
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of checks lost against gained.", name="McNemar p")
_APPLICABLE = Definition("applicable", "count", None, "Checks that could be asked and judged.")
_NOT_APPLICABLE = Definition("not_applicable", "count", None, "Checks that could not be asked or judged.")


@dataclass(frozen=True)
class _Item:
    """One prompt, and the image that it shows."""

    ids: Tokens
    note: str
    image: bytes | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


class CapabilitySettings(AxisSettings):
    """Kinds of checks and length of answers; part of the comparability key."""

    kinds: tuple[CheckKind, ...] = Field(default=KINDS, min_length=1, description="kinds of checks")
    limit: int | None = Field(default=None, ge=1, description="first checks of each kind only")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    n_predict: int = Field(default=48, ge=1, description="tokens generated for a short answer")
    code_tokens: int = Field(default=256, ge=1, description="tokens generated for a program or a tool call")
    thinking_tokens: int = Field(default=1024, ge=1, description="tokens within which thinking and answer must end")
    long: int = Field(
        default=2048, ge=_SHORTEST_LONG, description="tokens of the long prompt, where the model has them"
    )


class Capability(Axis):
    """Share of the applicable checks that the candidate passes, with its losses against the reference.

    See docs/metrics.md#capability-checks.
    """

    name: ClassVar[str] = "capability"
    title: ClassVar[str] = "Capability: what can the model still do?"
    Settings: ClassVar[type[AxisSettings]] = CapabilitySettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"long": 512, "code_tokens": 160}
    settings: CapabilitySettings

    def requests(self, inputs: AxisInputs) -> dict[str, Generate]:
        """One request per length of answer; the parallel checks are asked twice, one by one and in one batch.

        Raises:
            InputError: no check of the chosen kinds can be asked.
        """
        s = self.settings
        asked: dict[str, list[_Item]] = {}
        without: dict[str, str] = {}
        for check in (check for kind in KINDS if kind in s.kinds for check in _of_kind(kind)[: s.limit]):
            try:
                found = self._items(check, inputs)
            except NotApplicable as reason:
                without[f"{WITHOUT}{check.id}"] = str(reason)
                continue
            for part, item in found.items():
                asked.setdefault(part, []).append(item)
        if not asked:
            raise InputError(f"capability: nothing can be asked: {'; '.join(dict.fromkeys(without.values()))}")
        used = "raw" if s.template == "raw" else inputs.tokenizer.template
        common = {"kinds": ", ".join(k for k in KINDS if k in s.kinds), "set": SET_VERSION, "template": used, **without}
        if s.limit is not None:
            common["limit"] = str(s.limit)
        requests = {}
        for part, items in asked.items():
            request = Generate(
                axis=part_name(self.name, part),
                prompts=tuple(item.ids for item in items),
                max_tokens=self._budget(part),
                stop=inputs.tokenizer.stop_ids,
                batch=1 if part == "single" else _BATCH,
                settings=tuple(sorted({**common, "n_predict": self._budget(part)}.items())),
                rows=False,
                notes=tuple(item.note for item in items),
            )
            requests[part] = _with_images(request, inputs, items) if items[0].image is not None else request
        return requests

    def failed_part_cell(self, part: str, reason: str) -> Cell | None:
        if part not in PARTS["vision"]:
            return None
        return Cell(at={"part": part}, status=Status.NOT_MEASURABLE, reason=reason)

    def available(self, inputs: AxisInputs) -> int:
        return max(map(len, map(_of_kind, self.settings.kinds)))

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        results = read_results(pairs)
        counted = [result for result in results if result.applicable]
        usable = np.array([result.usable for result in counted], dtype=bool)
        score = AxisScore.percent(
            [bool(result.test.passed) for result in counted],
            [CHECKS.index(result.check) for result in counted],
            usable,
            identical=bool(usable.size and usable.all()) and all(result.same for result in counted),
        )
        return _with_metrics(score, results, [result for result in counted if result.usable], seed)

    # ------------------------------------------------------------------------------------------ asking

    def _budget(self, part: str) -> int:
        s = self.settings
        tokens = {"code": s.code_tokens, "tool": s.code_tokens, "thinking": s.thinking_tokens}
        return _PARALLEL_TOKENS if part in ("single", "batch") else tokens.get(part, s.n_predict)

    def _items(self, check: Check, inputs: AxisInputs) -> dict[str, _Item]:
        """Prompts of a check, by part.

        Raises:
            NotApplicable: the check cannot be asked.
        """
        if check.kind != "vision":
            return dict.fromkeys(PARTS[check.kind], self._item(check, inputs))
        if inputs.no_images:
            raise NotApplicable(inputs.no_images)
        content = [{"type": "image"}, {"type": "text", "text": check.prompt}]
        messages = ({"role": "user", "content": content},)
        try:
            ids = tokens_around(inputs.tokenizer, messages, self.settings.template, inputs.placeholder)
        except InputError as error:
            raise NotApplicable(str(error)) from None
        question = next(question for question in QUESTIONS if question.text == check.prompt)
        images = dict(zip(PARTS["vision"], (question.image, question.control), strict=True))
        note = canonical_json({"id": check.id})
        return {
            part: _Item((*ids.images, *ids.rest), note, png(draw(*shown)), messages) for part, shown in images.items()
        }

    def _item(self, check: Check, inputs: AxisInputs) -> _Item:
        """A check's prompt and note.

        Raises:
            NotApplicable: the check cannot be asked.
        """
        note = {"id": check.id}
        messages = ({"role": "user", "content": check.prompt},)
        if check.kind in ("tool call", "thinking") and self.settings.template == "raw":
            raise NotApplicable("needs the chat template; the settings say raw")
        room = None if inputs.max_positions is None else inputs.max_positions - self._budget(PARTS[check.kind][0])
        if check.kind == "tool call":
            ids = tool_prompt(inputs.tokenizer, messages, TOOL)
        elif check.kind == "thinking":
            ids, note["ends"] = thinking_prompt(inputs.tokenizer, messages)
        elif check.id == "edge-long":
            ids = self._long_prompt_tokens(
                inputs, self.settings.long if room is None else min(self.settings.long, room)
            )
        else:
            ids = inputs.tokenizer.chat(messages, self.settings.template)
        if not ids:
            raise NotApplicable("without a chat template an empty prompt has no tokens")
        if room is not None and len(ids) > room:
            raise NotApplicable(f"prompt and answer do not fit the model's {inputs.max_positions} positions")
        return _Item(ids, canonical_json(note))

    def _long_prompt_tokens(self, inputs: AxisInputs, most: int) -> Tokens:
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


def _with_images(request: Generate, inputs: AxisInputs, items: Sequence[_Item]) -> ImageGenerate:
    """The request with the images of its items."""
    images, shows = image_files([() if item.image is None else (item.image,) for item in items])
    return ImageGenerate(
        **{field.name: getattr(request, field.name) for field in fields(request) if field.init},
        images=images,
        shows=shows,
        messages=tuple(image_messages(inputs, item.messages) for item in items),
    )


def _of_kind(kind: CheckKind) -> list[Check]:
    return [check for check in CHECKS if check.kind == kind]


# -------------------------------------------------------------------------------------------- reporting


def _with_metrics(
    score: AxisScore, results: Sequence[CheckResult], good: Sequence[CheckResult], seed: int
) -> AxisScore:
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
    whole = score.score(seed) if measured else SCORE(None, headline=True)
    return replace(score, not_measurable=not_measurable).with_measurement(
        metrics=(
            whole,
            _LOST(lost),
            _GAINED(gained),
            _PASSED(score.mean(), whole.interval and (whole.interval[0] / 100, whole.interval[1] / 100)),
            _REFERENCE(had / n if n else None),
            _DIFFERENCE(change.estimate, change.interval),
            _P(mcnemar_exact(lost, gained)),
            _APPLICABLE(len(counted)),
            _NOT_APPLICABLE(outcomes.count("not applicable")),
        ),
        plots=tuple(_plots(results)),
        facts={"set": SET_VERSION},
        n_items=len(counted),
        n_failed=int((~score.usable).sum()),
        cluster="check",
        summary=lost_and_gained([(bool(result.ref.passed), bool(result.test.passed)) for result in good]),
        reference_summary=f"passes {had} of {n}" if n else "",
        downgrades=_lowers(good, seed) if measured else (),
    )


def _change(good: Sequence[CheckResult], seed: int) -> PairedDifference:
    """Candidate minus reference, points."""
    checks = [CHECKS.index(result.check) for result in good]
    test = RatioItems.of([bool(result.test.passed) for result in good], 1.0, checks)
    ref = RatioItems.of([bool(result.ref.passed) for result in good], 1.0, checks)
    return paired_difference(test, ref, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)


def _lowers(good: Sequence[CheckResult], seed: int) -> tuple[str, ...]:
    """Sentence that lowers the verdict for a loss of right answers beyond chance.

    Differences between a batch and single requests are left out: greedy paths fork at near ties, and a chaotic
    result does not set the verdict.  See docs/metrics.md#verdicts.
    """
    answered = [result for result in good if result.check.judge is not None]
    interval = _change(answered, seed).interval if answered else None
    if interval is None or interval[1] >= _HARM_POINTS:
        return ()
    lost, had = sum(r.outcome == "lost" for r in answered), sum(bool(r.ref.passed) for r in answered)
    return (
        f"capability checks: {lost} of the {had} that the reference answers right are lost "
        f"({-interval[1]:.0f}–{-interval[0]:.0f} points of all {len(answered)})",
    )


def _plots(results: Sequence[CheckResult]) -> Iterator[Plot]:
    by_kind = [(kind, [r.outcome for r in results if r.check.kind == kind]) for kind in KINDS]
    yield TablePlot(
        title="Checks by kind",
        columns=("kind", "lost", "gained", "both pass", "both fail", "unusable", "not applicable"),
        rows=tuple(
            (kind, *map(outcomes.count, ("lost", "gained", "both pass", "both fail", "unusable", "not applicable")))
            for kind, outcomes in by_kind
            if outcomes
        ),
        note="Lost: the reference passes, the candidate does not.",
    )
    yield TablePlot(
        title="All checks",
        columns=("check", "outcome", "expected", "reference", "candidate", "reason"),
        rows=tuple(
            (result.check.id, result.outcome, result.check.expected, *map(_cell, result.answers), _reason(result))
            for result in sorted(results, key=lambda result: ORDER.index(result.outcome))
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
                note=f"{result.outcome}; expected: {result.check.expected}; "
                f"{(result.test if result.ref.passed else result.ref).reason[:200]}",
            )
            for result in sorted(changed, key=lambda result: ORDER.index(result.outcome))
        )
        yield Texts(title="Lost and gained", pairs=pairs)


def _reason(result: CheckResult) -> str:
    if result.outcome == "unusable":
        return "a side gave no usable answer"
    side = result.ref if result.ref.passed is None else result.test
    return side.reason[:200]


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CELL else f"{line[: _CELL - 1]}…"
