"""GSM8K: does the candidate still solve the word problems that the reference solves?

See docs/metrics/generated-text.md#gsm8k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from fidelab.axes.base import (
    OVER_CONTROL,
    AxisInputs,
    AxisScore,
    AxisSettings,
    answer_text,
    greedy_request,
    notes_of,
    written_text,
)
from fidelab.axes.graded import MAX_SHOWN_ITEMS, GradedItem, graded_score
from fidelab.axes.right_answers import AnswersAxis
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Tokens
from fidelab.core import canonical_json
from fidelab.core.errors import InputError
from fidelab.core.paths import expand
from fidelab.inputs.gsm8k import ask, extract_answer, load_problems, load_shots, truncate_answer
from fidelab.metrics.intervals import (
    RatioItems,
    ratio_estimate,
    ratio_interval,
)
from fidelab.results.measurement import Definition, Metric
from fidelab.results.plots import Plot, TablePlot, TextPair, Texts

_DIGITS = 24  # characters of a number in the table

_NO_NUMBER = Definition("no_number", "count", None, "Answers of the configuration without a number that can be read.")
_LENGTH = Definition(
    "length_at_equal_answer",
    "ratio",
    "lower",
    "Tokens of the configuration over the reference's where both give the same number.",
    null_value=1.0,
)
_REASONING = Definition(
    "numbers_in_the_reasoning_alone", "count", None, "Answers that end before their reasoning does."
)


class GSM8KSettings(AxisSettings):
    """Problems and prompt format; part of the comparability key except for ``batch``.

    The default template is ``raw``: base and instruct models both continue worked examples in plain text.  With
    ``chat`` instruct models answer in fewer tokens and end by themselves.
    """

    data: str = Field(default="gsm8k", min_length=1, description="gsm8k (the hub's test set) or a JSONL file")
    limit: int | None = Field(default=200, ge=1, description="first problems only; null: all")
    shots: int = Field(default=8, ge=0, le=8, description="worked examples before each problem")
    n_predict: int = Field(default=256, ge=1, description="tokens generated per problem")
    template: Literal["chat", "raw"] = Field(default="raw", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="problems decoded together")
    signed: int = Field(
        default=64, ge=0, description="right answers of the reference that all configurations read; 0: none"
    )

    @field_validator("data")
    @classmethod
    def _from_any_folder(cls, name: str) -> str:
        return name if name == "gsm8k" else str(expand(name))


class GSM8K(AnswersAxis):
    """Accuracy of greedy chain-of-thought answers; the score is the candidate's, in percent.

    See docs/metrics/generated-text.md#gsm8k.
    """

    name: ClassVar[str] = "gsm8k"
    title: ClassVar[str] = "GSM8K: are word problems still solved?"
    Settings: ClassVar[type[AxisSettings]] = GSM8KSettings
    covers: ClassVar[str] = "tasks"
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 20}
    settings: GSM8KSettings

    def request(self, inputs: AxisInputs) -> Generate:
        s, tokenizer = self.settings, inputs.tokenizer
        used = "raw" if s.template == "raw" else tokenizer.template
        problems, shots = load_problems(s.data, s.limit), load_shots(s.shots)
        prompts = tuple(tokenizer.chat(ask(problem, shots, used), used) for problem in problems)
        longest = max(map(len, prompts))
        if inputs.max_positions is not None and longest + s.n_predict > inputs.max_positions:
            raise InputError(
                f"gsm8k: a prompt with shots: {s.shots} has {longest} tokens; with n_predict {s.n_predict} that is "
                f"beyond the model's limit of {inputs.max_positions} positions: use fewer axes.gsm8k.shots"
            )
        settings = (("n_predict", s.n_predict), ("shots", s.shots), ("template", used))
        notes = tuple(canonical_json({"gold": str(problem.gold), "id": problem.id}) for problem in problems)
        return greedy_request(inputs, self.name, prompts, s, settings, notes=notes)

    def available(self, inputs: AxisInputs) -> int:
        return len(load_problems(self.settings.data))

    def score(self, pair: Pair, seed: int) -> AxisScore:
        items, notes = [], notes_of(pair.ref)
        for r, t in pair.items:
            gold = Decimal(notes[r]["gold"])
            sides = _answer(pair.ref, r, gold), _answer(pair.test, t, gold)
            items.append(_Item(r, *sides, notes[r]["id"], gold))
        return graded_score(
            items,
            seed,
            noun="problem",
            verb="solves",
            name="GSM8K accuracy",
            unfinished="have numbers only in their reasoning: raise axes.gsm8k.n_predict",
            more=_metrics([item for item in items if not item.failed], seed),
            plots=_plots(items),
        )

    def right(self, capture: Capture) -> Iterator[tuple[int, Tokens]]:
        """The reference's right answers, each up to the end of its own words."""
        for item, note in enumerate(notes_of(capture)):
            answer = _answer(capture, item, Decimal(note["gold"]))
            if answer.right:
                yield item, tuple(map(int, answer.ids[: answer.length or len(answer.ids)]))


@dataclass(frozen=True)
class _Answer:
    """Output of one side: its ids, its text up to the first question that it invents, and the number that it gives.

    ``unfinished``: only its reasoning has numbers.  ``length``: tokens of its own words, reasoning included; ``None``
    if they were cut at the token budget.
    """

    ids: Sequence[int]
    text: str
    value: Decimal | None
    right: bool
    unfinished: bool = False
    length: int | None = None


@dataclass(frozen=True)
class _Item(GradedItem[_Answer]):
    """One problem on both sides."""

    id: str
    gold: Decimal


def _answer(capture: Capture, item: int, gold: Decimal) -> _Answer:
    """One side's answer; a failed item has no ids."""
    if capture.items[item]["failed"] is not None or "ids" not in capture.names(item):
        return _Answer((), "", None, False)
    ids = capture.ints(item, "ids")
    whole, text = written_text(capture, item), truncate_answer(answer_text(capture, item))
    value = extract_answer(text)
    unfinished = value is None and extract_answer(truncate_answer(whole)) is not None
    # The length is the number of tokens of the first `own` characters; `None` if the budget cut them
    own = len(truncate_answer(whole))
    request = capture.request
    length: int | None
    if own < len(whole):
        ends = accumulate(len(capture.text([token])) for token in ids)
        length = next((n for n, end in enumerate(ends, 1) if end >= own), len(ids))
    else:
        assert isinstance(request, Generate)
        length = None if len(ids) == request.max_tokens and ids[-1] not in request.stop else len(ids)
    return _Answer(ids, whole if unfinished else text, value, value == gold, unfinished, length)


def _metrics(usable: Sequence[_Item], seed: int) -> tuple[Metric, ...]:
    same = [item for item in usable if item.ref.value is not None and item.ref.value == item.test.value]
    lengths = [(item.test.length, item.ref.length) for item in same if item.test.length and item.ref.length]
    length: tuple[Metric, ...] = ()  # at equal answer
    if lengths:
        test, ref = (np.array(side, dtype=np.float64) for side in zip(*lengths, strict=True))
        items = RatioItems(test, ref, np.arange(len(lengths)))
        length = (_LENGTH(ratio_estimate(items), ratio_interval(items, seed)),)
    return (
        *length,
        _NO_NUMBER(sum(item.test.value is None for item in usable)),
        _REASONING(sum(item.test.unfinished for item in usable)),
    )


def _plots(items: Sequence[_Item]) -> tuple[Plot, ...]:
    rows = [
        (
            item.id,
            _format_number(item.gold),
            _format_number(item.ref.value),
            _format_number(item.test.value),
            item.outcome,
        )
        for item in items
    ]
    lost = [item for item in items if item.outcome == "lost"]
    table = TablePlot(
        title="GSM8K, problem by problem",
        columns=("id", "right answer", "reference", "candidate", "outcome"),
        rows=tuple(rows),
        note="The number read from each answer; – where there is no number that can be read.",
    )
    if not lost:
        return (table,)
    pairs = [
        TextPair(
            label=f"problem {item.id}",
            reference=item.ref.text.strip(),
            candidate=item.test.text.strip(),
            note=f"right: {_format_number(item.gold)}, candidate: {_format_number(item.test.value)}",
        )
        for item in lost[:MAX_SHOWN_ITEMS]
    ]
    count = f"{len(lost)}" if len(lost) <= MAX_SHOWN_ITEMS else f"first {MAX_SHOWN_ITEMS} of {len(lost)}"
    return table, Texts(title=f"Problems lost ({count})", pairs=tuple(pairs))


def _format_number(value: Decimal | None) -> str:
    if value is None:
        return "–"
    text = f"{value:f}"
    return text if len(text) <= _DIGITS else f"{value:.6e}"
