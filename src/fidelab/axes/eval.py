"""Short questions: does the candidate still answer those that the reference answers?

See docs/metrics/generated-text.md#eval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

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
from fidelab.axes.graded import ACCURACY, MAX_SHOWN_ITEMS, GradedItem, graded_score, share_of
from fidelab.axes.right_answers import AnswersAxis
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Tokens
from fidelab.core import canonical_json
from fidelab.core.errors import CaptureError, InputError
from fidelab.inputs.questions.calls import read_reply
from fidelab.inputs.questions.graders import grade, validate_check, validate_tools
from fidelab.inputs.questions.load import LENGTHS, load_questions, retrieval_questions
from fidelab.inputs.questions.question import KINDS, Grade, Question, Reply
from fidelab.inputs.tokens import Template
from fidelab.results.measurement import Definition, Metric
from fidelab.results.plots import Plot, TablePlot, TextPair, Texts

TEXT_KINDS = tuple(kind for kind in KINDS if kind != "images")
"""Kinds of questions that need no picture: those that token ids can ask."""
_MAX_SHOWN_CHARS = 2000  # of a text in the report
_NO_ANSWER = Grade(False, "no answer")

_REASONING = Definition("reasoning_alone", "count", None, "Answers that end before their reasoning does.")


class EvalSettings(AxisSettings):
    """Questions and prompt format; part of the comparability key except for ``batch``."""

    kinds: tuple[str, ...] = Field(
        default=TEXT_KINDS, min_length=1, description=f"kinds of questions: {', '.join(TEXT_KINDS)}"
    )
    retrieval: int = Field(
        default=1024, ge=LENGTHS[0], description="tokens of the longest text of questions of kind retrieval, about"
    )
    limit: int | None = Field(default=None, ge=1, description="first questions of each kind only; null: all")
    n_predict: int = Field(default=150, ge=1, description="tokens generated per question")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="questions decoded together")
    signed: int = Field(
        default=64, ge=0, description="right answers of the reference that all configurations read; 0: none"
    )

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        if "images" in kinds:
            raise ValueError("kind images needs a server that reads pictures: leave it out here")
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"unknown kind {unknown[0]!r}: kinds are {', '.join(TEXT_KINDS)}")
        return tuple(kind for kind in TEXT_KINDS if kind in kinds)


class Eval(AnswersAxis):
    """Accuracy of greedy answers to short questions; the score is the candidate's, in percent.

    See docs/metrics/generated-text.md#eval.
    """

    name: ClassVar[str] = "eval"
    title: ClassVar[str] = "Eval: are short questions still answered?"
    Settings: ClassVar[type[AxisSettings]] = EvalSettings
    covers: ClassVar[str] = "tasks"
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 2}
    settings: EvalSettings

    def request(self, inputs: AxisInputs) -> Generate:
        s, tokenizer = self.settings, inputs.tokenizer
        used: Template = "raw" if s.template == "raw" else tokenizer.template
        asked: list[tuple[Question, Tokens]] = []
        for question in self._questions(used):
            prompt = _prompt(inputs, question, used)
            if inputs.max_positions is None or len(prompt) + s.n_predict <= inputs.max_positions:
                asked.append((question, prompt))
            elif not question.context:  # long texts are as many as fit
                raise InputError(
                    f"eval: question {question.id} has {len(prompt)} tokens; with n_predict {s.n_predict} that is "
                    f"beyond the model's limit of {inputs.max_positions} positions: use a smaller axes.eval.n_predict"
                )
        if not asked:
            raise InputError(f"eval: no question of kind {', '.join(s.kinds)} can be asked: use other axes.eval.kinds")
        settings = (("n_predict", s.n_predict), ("template", used))
        notes = tuple(canonical_json(_note(question)) for question, _ in asked)
        prompts = tuple(prompt for _, prompt in asked)
        return greedy_request(inputs, self.name, prompts, s, settings, notes=notes)

    def available(self, inputs: AxisInputs) -> int:
        kinds = [question.kind for question in self._all(inputs.tokenizer.template)]
        return max(map(kinds.count, kinds), default=0)

    def score(self, pair: Pair, seed: int) -> AxisScore:
        items, notes = [], notes_of(pair.ref)
        for r, t in pair.items:
            question = _noted(pair.ref, notes, r)
            items.append(_Item(r, _answer(pair.ref, r, question), _answer(pair.test, t, question), question))
        return graded_score(
            items,
            seed,
            noun="question",
            verb="answers",
            name="eval accuracy",
            unfinished="end before their reasoning does: raise axes.eval.n_predict",
            more=_metrics([item for item in items if not item.failed]),
            plots=_plots(items),
        )

    def _questions(self, template: Template) -> list[Question]:
        """The first questions of each kind."""
        chosen = self._all(template)
        taken: dict[str, int] = {}
        found = []
        for question in chosen:
            taken[question.kind] = taken.get(question.kind, 0) + 1
            if self.settings.limit is None or taken[question.kind] <= self.settings.limit:
                found.append(question)
        return found

    def _all(self, template: Template) -> list[Question]:
        """Questions of the chosen kinds, tools only with a chat template: plain text offers none."""
        kinds = {kind for kind in self.settings.kinds if kind != "tools" or template == "chat"}
        lengths = [length for length in LENGTHS if length <= self.settings.retrieval] if "retrieval" in kinds else []
        return [question for question in (*load_questions(), *retrieval_questions(lengths)) if question.kind in kinds]

    def right(self, capture: Capture) -> Iterator[tuple[int, Tokens]]:
        """The reference's right answers."""
        notes = notes_of(capture)
        for item in range(len(capture.items)):
            answer = _answer(capture, item, _noted(capture, notes, item))
            if answer.right:
                yield item, tuple(map(int, answer.ids))


@dataclass(frozen=True)
class _Answer:
    """Output of one side: its ids, its text, and its grade; ``unfinished``: all of it is reasoning."""

    ids: Sequence[int]
    text: str = ""
    grade: Grade = _NO_ANSWER
    unfinished: bool = False

    @property
    def right(self) -> bool:
        return self.grade.right


@dataclass(frozen=True)
class _Item(GradedItem[_Answer]):
    """One question on both sides."""

    question: Question


def _prompt(inputs: AxisInputs, question: Question, template: Template) -> Tokens:
    """A question as token ids.  Where a template knows no system message, it is the beginning of the question."""
    tokenizer, messages = inputs.tokenizer, question.messages
    try:
        return tokenizer.chat(messages, template, question.tools)
    except InputError:
        if messages[0]["role"] != "system":
            raise
    joined = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return tokenizer.chat((joined, *messages[2:]), template, question.tools)


def _note(question: Question) -> dict[str, Any]:
    """Parts of a question that its grader reads."""
    tools = {"tools": list(question.tools)} if question.tools else {}
    return {"id": question.id, "kind": question.kind, "check": dict(question.check), **tools}


def _noted(capture: Capture, notes: Sequence[Mapping[str, Any]], item: int) -> Question:
    try:
        note = notes[item]
        check, tools = validate_check(note["check"]), validate_tools(note.get("tools", []))
        return Question(str(note["id"]), str(note["kind"]), (), 1, check, "", tools)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CaptureError(
            f"capture {capture.folder}: the note of item {item} is not a question ({error}); capture again"
        ) from None


def _answer(capture: Capture, item: int, question: Question) -> _Answer:
    """One side's answer; a failed item has no ids."""
    if capture.items[item]["failed"] is not None or "ids" not in capture.names(item):
        return _Answer(())
    ids = capture.ints(item, "ids")
    whole, text = written_text(capture, item), answer_text(capture, item)
    reply = read_reply(text) if question.tools else Reply(text)
    return _Answer(ids, whole, grade(question, reply), bool(whole.strip()) and not text.strip())


def _metrics(usable: Sequence[_Item]) -> tuple[Metric, ...]:
    kinds = dict.fromkeys(item.question.kind for item in usable)
    return (
        _REASONING(sum(item.test.unfinished for item in usable)),
        *(
            ACCURACY(*share_of([item.test for item in usable if item.question.kind == kind]), cell={"kind": kind})
            for kind in kinds
        ),
    )


def _plots(items: Sequence[_Item]) -> tuple[Plot, ...]:
    table = TablePlot(
        title="Eval, question by question",
        columns=("id", "reference", "candidate", "outcome"),
        rows=tuple(
            (item.question.id, _shown(item.ref), _shown(item.test), item.outcome)
            for item in items
            if item.outcome != "both right"
        ),
        note="Questions that both answer are left out. A wrong answer is shown by its fault.",
    )
    lost = [item for item in items if item.outcome == "lost"]
    if not lost:
        return (table,)
    pairs = tuple(
        TextPair(
            label=f"question {item.question.id}",
            reference=item.ref.text.strip()[:_MAX_SHOWN_CHARS],
            candidate=item.test.text.strip()[:_MAX_SHOWN_CHARS],
            note=item.test.grade.fault,
        )
        for item in lost[:MAX_SHOWN_ITEMS]
    )
    count = f"{len(lost)}" if len(lost) <= MAX_SHOWN_ITEMS else f"first {MAX_SHOWN_ITEMS} of {len(lost)}"
    return table, Texts(title=f"Questions lost ({count})", pairs=pairs)


def _shown(answer: _Answer) -> str:
    return "right" if answer.right else answer.grade.fault
