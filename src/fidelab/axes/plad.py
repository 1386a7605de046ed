"""Axis D, PLAD: whether a small change to a prompt changes the candidate's answer more than the reference's.

See docs/metrics/generated-text.md#drift-under-perturbation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from fidelab.axes.base import (
    OVER_CONTROL,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    greedy_request,
    notes_of,
    request_of,
    select_groups,
    texts,
)
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Request, Tokens
from fidelab.core import canonical_json
from fidelab.core.errors import InputError, UnknownNameError
from fidelab.inputs.perturb import PERTURBATIONS, differences, perturb_prompt
from fidelab.inputs.prompts import Prompt
from fidelab.metrics.drift import LOWEST_CELL, cell_scores, commonest, drift, ignores_prompts, sign_test
from fidelab.metrics.intervals import RatioItems, paired_difference
from fidelab.results.measurement import Definition
from fidelab.results.numbers import format_share
from fidelab.results.plots import TablePlot, TextPair

_MAX_SHOWN_CELLS = 8  # cells per arm for which the report shows the answers
_MAX_SHOWN_TOKENS = 96  # tokens shown of each answer

_UNPERTURBED = ""
_UNRELATED_DRIFT = 0.9  # from this drift on, two answers to the same prompt share little

_EXCESS = Definition("excess_drift", "share", "lower", "Drift of the candidate minus the reference's, paired.")
_SIGN = Definition("sign_test", "p", None, "Sign test of prompts that drift more against less than the reference's.")
_REF_DRIFT = Definition(
    "drift_of_the_reference", "share", None, "Share of the reference's answer that changes with its prompt."
)
_DRIFT = Definition(
    "drift_of_the_candidate", "share", "lower", "Share of the candidate's answer that changes with its prompt."
)
_FREQUENT = Definition(
    "prompts_with_the_most_frequent_answer",
    "share",
    None,
    "Share of unperturbed prompts that get the candidate's most frequent answer.",
)
_UNLIKE_SHARE = Definition(
    "prompts_answered_unlike_the_reference",
    "share",
    None,
    "Share of unperturbed prompts whose two answers have almost no tokens in common.",
)
_SKIPPED = Definition("skipped", "count", None, "Perturbations that leave a prompt as it is.")


class PLADSettings(AxisSettings):
    """Prompts and perturbations; part of the comparability key except for ``batch``."""

    n_predict: int = Field(default=64, ge=1, description="tokens generated per answer")
    limit: int | None = Field(default=None, ge=1, description="first prompts only")
    perturbations: tuple[str, ...] = Field(
        default=PERTURBATIONS, min_length=1, description=f"some of: {', '.join(PERTURBATIONS)}"
    )
    seed: int = Field(default=42, ge=0, description="which words are changed; the prompt's number is added")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="prompts decoded together")

    @field_validator("perturbations")
    @classmethod
    def _order_perturbations(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names in the order of the table, each once."""
        for name in names:
            if name not in PERTURBATIONS:
                raise UnknownNameError("perturbation", name, PERTURBATIONS)
        return tuple(name for name in PERTURBATIONS if name in names)


class PLAD(Axis):
    """Excess drift: how much more a candidate's greedy answers change with the prompt than the reference's.

    An arm that gives the same answer to every prompt would show no drift.  It fails, and has no score. See
    docs/metrics/generated-text.md#drift-under-perturbation.
    """

    name: ClassVar[str] = "plad"
    title: ClassVar[str] = "PLAD: how much more do answers drift when a prompt is perturbed?"
    Settings: ClassVar[type[AxisSettings]] = PLADSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    in_composite: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"limit": 16, "n_predict": 32}
    settings: PLADSettings

    def request(self, inputs: AxisInputs) -> Generate:
        s, tokenizer = self.settings, inputs.tokenizer
        prompts = inputs.prompts[: s.limit]
        asked = [item for index, prompt in enumerate(prompts) for item in self._questions(inputs, index, prompt)]
        if not asked:
            raise InputError(
                f"plad: of {', '.join(s.perturbations)} none applies to any of {len(prompts)} prompts; "
                "set axes.plad.perturbations or take other prompts"
            )
        longest, note = max(asked, key=lambda item: len(item[0]))
        if inputs.max_positions is not None and len(longest) + s.n_predict > inputs.max_positions:
            raise InputError(
                f"plad: prompt {note['id']!r} has {len(longest)} tokens; with axes.plad.n_predict {s.n_predict} that "
                f"is beyond the model's limit of {inputs.max_positions} positions"
            )
        settings = (
            ("n_predict", s.n_predict),
            ("perturbations", ",".join(s.perturbations)),
            ("prompts", len(prompts)),
            ("seed", s.seed),
            ("template", "raw" if s.template == "raw" else tokenizer.template),
        )
        notes = tuple(canonical_json(note) for _, note in asked)
        return greedy_request(inputs, self.name, tuple(ids for ids, _ in asked), s, settings, notes=notes)

    def _questions(self, inputs: AxisInputs, index: int, prompt: Prompt) -> list[tuple[Tokens, dict[str, str | int]]]:
        """Return the token ids and notes of a prompt, unperturbed and perturbed.

        The result is empty if no perturbation changes the prompt's tokens.
        """
        s, tokenizer = self.settings, inputs.tokenizer
        plain = tokenizer.chat(prompt.messages, s.template, prompt.tools)
        if not plain:
            raise InputError(f"plad: prompt {prompt.id!r} has no tokens")
        note: dict[str, str | int] = {"prompt": index, "id": prompt.id}
        questions = [(plain, {**note, "perturbation": _UNPERTURBED})]
        for name in s.perturbations:
            changed = perturb_prompt(prompt, name, s.seed + index)
            ids = plain if changed is None else tokenizer.chat(changed.messages, s.template, changed.tools)
            if changed is not None and ids != plain:
                change = "" if inputs.private else differences(prompt, changed)
                questions.append((ids, {**note, "perturbation": name, "change": change}))
        return questions if len(questions) > 1 else []

    def repeated(self, request: Request, share: float) -> Request | None:
        """Return a share of the prompts, each with all its perturbations."""
        if not isinstance(request, Generate):
            return super().repeated(request, share)
        return select_groups(request, [json.loads(note)["prompt"] for note in request.notes], share)

    def score(self, pair: Pair, seed: int) -> AxisScore:
        cells = _cells(pair)
        # Both sides' answers to the unperturbed prompts, without failed ones and duplicate prompts
        request, notes = request_of(pair.ref, Generate), notes_of(pair.ref)
        asked = {
            n["prompt"]: ids for n, ids in zip(notes, request.prompts, strict=True) if n["perturbation"] == _UNPERTURBED
        }
        good = {cell.prompt: (cell.ref[0], cell.test[0]) for cell in cells if not cell.failed}
        answers = {asked[prompt]: sides for prompt, sides in good.items()}.values()
        plain = [ref for ref, _ in answers], [test for _, test in answers]
        constant: tuple[str, ...] = ()
        if ignores_prompts(*plain):
            what = "answers do not depend on the prompt: PLAD finds the same one for"
            same = f"{commonest(plain[1])} of {len(plain[1])} prompts (reference: {commonest(plain[0])})"
            constant = (f"{what} {same}",)
        counted = [] if constant else cells
        usable = [not (cell.failed or constant) for cell in cells]
        score = AxisScore(
            num=cell_scores([cell.ref_drift for cell in cells], [cell.test_drift for cell in cells]) / 100.0,
            den=np.ones(len(cells)),
            clusters=np.array([cell.prompt for cell in cells], dtype=np.int64),
            usable=np.array(usable, dtype=bool),
            transform=lambda ratio: 100.0 * ratio,
            bounds=(LOWEST_CELL / 100.0, 1.0),
            identical=all(usable) and all(cell.ref == cell.test for cell in cells),
            proportion=True,
            scale=100.0,
        ).with_measurement(fails=constant)
        asked = pair.ref.manifest["settings"]
        summary = _Summary.of(counted, seed)
        # For each perturbation the number of prompts that it does not change
        names = [note["perturbation"] for note in notes_of(pair.ref)]
        settings = pair.ref.manifest["settings"]
        skipped = {name: settings["prompts"] - names.count(name) for name in settings["perturbations"].split(",")}
        moved = [cell for cell in counted if not cell.failed and cell.excess > 0]
        shown = sorted(moved, key=lambda cell: -cell.excess)[:_MAX_SHOWN_CELLS]
        pairs = (
            TextPair(
                label=f"prompt {cell.prompt} ({cell.id}), {cell.perturbation}",
                reference=_two_answers(pair.ref, *cell.ref),
                candidate=_two_answers(pair.test, *cell.test),
                note=f"{cell.change}; drift {cell.ref_drift:.0%} in the reference, {cell.test_drift:.0%} here",
            )
            for cell in shown
        )
        return score.with_measurement(
            metrics=(
                score.score(seed),
                _EXCESS(summary.excess, summary.interval),
                _SIGN(summary.p),
                _REF_DRIFT(summary.ref),
                _DRIFT(summary.test),
                _FREQUENT(commonest(plain[1]) / len(plain[1]) if plain[1] else None),
                # prompts whose two answers have almost no tokens in common
                _UNLIKE_SHARE(
                    float(np.mean([drift(*sides) >= _UNRELATED_DRIFT for sides in answers])) if answers else None
                ),
                _SKIPPED(sum(skipped.values())),
            ),
            cluster="prompt",
            summary="" if summary.test is None else f"drift {format_share(summary.test)}",
            reference_summary="" if summary.ref is None else f"drift {format_share(summary.ref)}",
            plots=(_table(counted, skipped, seed), *texts("Largest excess drift", pairs)),
            facts={name: asked[name] for name in ("n_predict", "prompts", "seed", "template")},
            n_failed=sum(cell.failed for cell in cells),
        )


@dataclass(frozen=True)
class _Cell:
    """One prompt under one perturbation: each arm's answers to the original prompt and to the perturbed one."""

    prompt: int
    id: str
    perturbation: str
    change: str
    ref: tuple[list[int], list[int]]
    test: tuple[list[int], list[int]]
    failed: bool

    @cached_property
    def ref_drift(self) -> float:
        return drift(*self.ref)

    @cached_property
    def test_drift(self) -> float:
        return drift(*self.test)

    @property
    def excess(self) -> float:
        """Difference of the two drifts; above 0 the candidate's answer changed more than the reference's."""
        return self.test_drift - self.ref_drift


def _cells(pair: Pair) -> list[_Cell]:
    """Return all cells, in the order of the test side's notes.

    For run-to-run noise, only some prompts are repeated.
    """
    notes = notes_of(pair.test)
    places = {(note["prompt"], note["perturbation"]): place for note, place in zip(notes, pair.items, strict=True)}
    cells = []
    for note in notes:
        if note["perturbation"] != _UNPERTURBED:
            (r0, t0), (r1, t1) = places[note["prompt"], _UNPERTURBED], places[note["prompt"], note["perturbation"]]
            sides = [pair.ref.items[r0], pair.ref.items[r1], pair.test.items[t0], pair.test.items[t1]]
            cells.append(
                _Cell(
                    prompt=note["prompt"],
                    id=note["id"],
                    perturbation=note["perturbation"],
                    change=note["change"],
                    ref=(pair.ref.ids(r0), pair.ref.ids(r1)),
                    test=(pair.test.ids(t0), pair.test.ids(t1)),
                    failed=any(item["failed"] is not None for item in sides),
                )
            )
    return cells


@dataclass(frozen=True)
class _Summary:
    """Means over the usable cells (drifts and excess 0…1, the score 0…100); ``None`` without any.

    The cells of one prompt share an answer, so the interval resamples prompts, and the sign test counts them.
    """

    n: int = 0
    score: float | None = None
    ref: float | None = None
    test: float | None = None
    excess: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None

    @classmethod
    def of(cls, cells: Sequence[_Cell], seed: int) -> _Summary:
        good = [cell for cell in cells if not cell.failed]
        if not good:
            return cls()
        clusters = [cell.prompt for cell in good]
        ref = RatioItems.of([cell.ref_drift for cell in good], 1.0, clusters)
        test = RatioItems.of([cell.test_drift for cell in good], 1.0, clusters)
        difference = paired_difference(test, ref, seed, bounds=(0.0, 1.0), proportion=True)
        return cls(
            n=len(good),
            score=float(cell_scores(ref.num, test.num).mean()),
            ref=float(ref.num.mean()),
            test=float(test.num.mean()),
            excess=difference.estimate,
            interval=difference.interval,
            p=sign_test(test.by_cluster().num - ref.by_cluster().num),
        )


# ------------------------------------------------------------------------------------------------ plots


def _table(cells: Sequence[_Cell], skipped: Mapping[str, int], seed: int) -> TablePlot:
    rows = []
    for name, left in skipped.items():
        selected = [cell for cell in cells if cell.perturbation == name]
        summary = _Summary.of(selected, seed)
        low, high = summary.interval or (None, None)
        shares = (summary.ref, summary.test, summary.excess, low, high)
        percent = [None if share is None else 100.0 * share for share in shares]
        rows.append((name, summary.n, summary.score, *percent, summary.p, len(selected) - summary.n, left))
    return TablePlot(
        title="By perturbation",
        columns=(
            *("perturbation", "cells", "score", "reference drift, %", "candidate drift, %", "excess, points"),
            *("from", "to", "sign test p", "failed", "skipped"),
        ),
        rows=tuple(rows),
        note="drift: how much of the answer changes when the prompt does; excess: the candidate's minus the "
        "reference's, with its 95% interval; skipped: the perturbation changes nothing in the prompt",
    )


def _two_answers(capture: Capture, plain: Sequence[int], perturbed: Sequence[int]) -> str:
    def text(ids: Sequence[int]) -> str:
        return capture.text(ids[:_MAX_SHOWN_TOKENS]) + ("…" if len(ids) > _MAX_SHOWN_TOKENS else "") or "(empty)"

    return f"prompt as it is:\n{text(plain)}\n\nperturbed prompt:\n{text(perturbed)}"
