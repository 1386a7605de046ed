"""Evaluates one model on a server: serving checks, then questions, within a time limit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fidelab.bench.eval.asker import Asker, Failure, Outcome, reason_of
from fidelab.bench.eval.chat import NO_CHAT, Ask, Chat, ChatAnswer
from fidelab.bench.eval.checks import CheckResult, context, loops, pictures, serving_checks, template
from fidelab.bench.eval.settings import SERVING, EvalSettings
from fidelab.core.errors import EngineError
from fidelab.engines.openai.dialects import mapping
from fidelab.engines.openai.http import Client, Refused
from fidelab.engines.openai.server import Server, identify, other_models, why_blind
from fidelab.inputs.questions.graders import grade
from fidelab.inputs.questions.load import load_questions, retrieval_questions
from fidelab.inputs.questions.pictures import data_url, picture
from fidelab.inputs.questions.question import KINDS, Question

State = Literal["right", "wrong", "not tested", "not reached"]

RETRIEVAL, IMAGES, TOOLS = "retrieval", "images", "tools"
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Approximate tokens of the texts in which a fact is looked for."""

_FREE_CONTEXT = 8192  # tokens up to which retrieval is asked whatever the time
_GROWTH = 1.5  # time of a prompt twice as long, over twice the time: attention grows with the square
_TOO_LONG = re.compile(
    r"context|max_model_len|maximum.{0,20}(length|token)|too (long|many tokens)|exceed|longer than", re.IGNORECASE
)
_ABOUT_TOOLS = re.compile(r"tool|function", re.IGNORECASE)
_REFUSED = (400, 413, 422, 500, 501)
_SHOWN_CHARACTERS = 400  # of an answer in the record


@dataclass(frozen=True)
class QuestionResult:
    """Result of one question: the answer, and what is wrong with it, or why there is none."""

    question: Question
    state: State
    answer: str = ""
    fault: str = ""


@dataclass
class Evaluated:
    """All results so far.

    Attributes:
        server: the server and the model on it.
        checks: serving checks, in order.
        questions: results in the order of the questions.
        notes: remarks on the server, a sentence each.
        seconds: time that the requests took.
        tokens: generated tokens as the server counts them.
    """

    server: Server
    checks: list[CheckResult] = field(default_factory=list)
    questions: list[QuestionResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    def of(self, kind: str) -> list[QuestionResult]:
        """Return the results of one kind."""
        return [one for one in self.questions if one.question.kind == kind]


class EvalWatch:
    """Callbacks that follow an evaluation; the base class ignores everything."""

    def reached(self, server: Server, url: str) -> None:
        """The server has answered."""

    def begin(self, name: str) -> None:
        """A check or a kind of questions begins."""

    def finished(self, evaluated: Evaluated) -> None:
        """A kind is done; receives all results so far."""


def evaluate(settings: EvalSettings, key: str | None = None, *, watch: EvalWatch | None = None) -> Evaluated:
    """Ask the server everything that the settings name.  Failed requests become results.

    ``key``: the API key, which is never shown.

    Raises:
        EngineError: If the server cannot be reached, refuses the key, does not serve the model, or answers as another.
        KeyboardInterrupt: If it is stopped.  ``watch`` has the results so far.
    """
    watch = watch or EvalWatch()
    client = Client(settings.base_url, key, settings.timeout)
    server = identify(client, settings.model)
    watch.reached(server, client.api)
    chat = Chat(client, server.model, settings.seed)
    asker = Asker(chat, settings.parallel, settings.timeout, settings.time_limit)
    return _Evaluation(settings, asker, Evaluated(server), watch).run()


class _Evaluation:
    def __init__(self, settings: EvalSettings, asker: Asker, evaluated: Evaluated, watch: EvalWatch) -> None:
        self._settings = settings
        self._asker = asker
        self._evaluated = evaluated
        self._watch = watch
        self._long: list[tuple[int, ChatAnswer]] = []  # characters of long prompts, and their answers

    def run(self) -> Evaluated:
        kinds = [kind for kind in KINDS if kind in self._settings.kinds]
        serving = SERVING in self._settings.kinds
        self._reach()
        if serving:
            self._evaluated.checks += serving_checks(self._asker, self._watch.begin)
            self._keep()
        blind = why_blind(self._asker.chat.client, self._evaluated.server)
        if IMAGES in kinds or serving:
            self._watch.begin("pictures")
            seen = pictures(self._asker, blind=blind)
            blind = blind or (seen.detail if seen.state == "not tested" else "")
            if serving:
                self._evaluated.checks.append(seen)
        questions = load_questions()
        for kind in (kind for kind in kinds if kind not in (RETRIEVAL, IMAGES)):
            self._watch.begin(kind)
            of_kind = [one for one in questions if one.kind == kind]
            if kind == TOOLS and self._asker.chat.plain:
                self._leave(of_kind, "not tested", "the server has no chat template")
            else:
                self._ask(of_kind)
        if IMAGES in kinds:
            self._watch.begin(IMAGES)
            asked = [one for one in questions if one.kind == IMAGES]
            if blind:
                self._leave(asked, "not tested", blind)
            else:
                self._ask(asked)
        if serving:  # on a slow server, the longest answer costs as much as all questions
            self._watch.begin("loops")
            self._evaluated.checks.append(loops(self._asker))
        if RETRIEVAL in kinds:
            self._retrieve()
        if serving:
            self._evaluated.checks += [
                context(self._long),
                template(answer for _, answer in self._asker.asked),
            ]
        self._remark()
        self._keep()
        return self._evaluated

    def _reach(self) -> None:
        """Ask once, so that a server without a chat template or with reasoning is known before anything counts.

        Raises:
            EngineError: If the server is gone, denies access, or has neither chat nor completions.
        """
        hello = Ask(({"role": "user", "content": "Say hello."},), 16)
        chat, limit = self._asker.chat, min(self._asker.timeout, self._asker.limit)
        try:
            answer = chat.ask(hello, limit)
        except Refused as error:
            if chat.plain and error.status in NO_CHAT:
                raise EngineError(str(error)) from None
            self._evaluated.notes.append(f"the first request failed: {reason_of(error)}")
            return
        if others := other_models(chat.client, self._evaluated.server):
            raise EngineError(
                f"{chat.client.api}: the server answered as model {others[0]}, not as {self._evaluated.server.model}: "
                "look what answers at this address, or correct the model"
            )
        self._asker.asked.append((hello, answer))
        # the budget of 16 tokens may have ended within the reasoning, without a word of it in the answer
        if not answer.written.strip() and not answer.calls and answer.finish == "length":
            chat.reasons = True

    # -------------------------------------------------------------------------------------------- questions

    def _ask(self, questions: Sequence[Question]) -> None:
        outcomes = self._asker.many([_request(one) for one in questions])
        for question, outcome in zip(questions, outcomes, strict=True):
            self._evaluated.questions.append(_graded(question, outcome))
        self._keep()

    def _leave(self, questions: Iterable[Question], state: State, why: str) -> None:
        self._evaluated.questions += [QuestionResult(one, state, fault=why) for one in questions]

    def _retrieve(self) -> None:
        """Ask for facts in longer and longer texts, until the server's limit or the time is reached."""
        state: State = "right"
        why, took, last = "", 0.0, 0
        for length in CONTEXTS:
            self._watch.begin(f"{RETRIEVAL} at {length:,} tokens")
            questions = retrieval_questions((length,))
            if not why and length > _FREE_CONTEXT and took * (length / last) * _GROWTH > self._asker.left:
                state, why = "not reached", f"about {took * length / last * _GROWTH:.0f} s, beyond --time-limit"
            if why:
                self._leave(questions, state, why)
                continue
            before = self._asker.spent
            outcomes = [self._asker.one(_request(one)) for one in questions]
            took, last = self._asker.spent - before, length
            for question, outcome in zip(questions, outcomes, strict=True):
                result = _graded(question, outcome)
                if isinstance(outcome, Failure) and outcome.status in _REFUSED and _TOO_LONG.search(outcome.reason):
                    state, why = "not tested", f"beyond the server's limit ({outcome.reason})"
                    result = QuestionResult(question, state, fault=why)
                elif isinstance(outcome, Failure) and outcome.missed and length > _FREE_CONTEXT:
                    state, why = "not reached", outcome.reason
                elif isinstance(outcome, ChatAnswer):
                    self._long.append((len(question.messages[-1]["content"]), outcome))
                self._evaluated.questions.append(result)
            self._keep()

    def _remark(self) -> None:
        """Sentences on what is unusual about the server, once each."""
        chat, notes = self._asker.chat, self._evaluated.notes
        if chat.plain:
            notes.append("the server has no chat template: messages were sent to /completions as plain text")
        inline = sum(answer.reasons and not answer.apart for _, answer in self._asker.asked)
        if inline:
            notes.append(
                f"{inline} of {len(self._asker.asked)} answers have their reasoning in the text: the server has no "
                "reasoning parser for this model; it was removed before grading"
            )
        elif chat.reasons:
            notes.append("the model reasons before it answers; answers may have 4,096 tokens more")
        if chat.refused:
            notes.append(f"the server refuses {', '.join(sorted(chat.refused))}, which was left out")
        if self._asker.gone:
            notes.append(f"the server is gone: {self._asker.gone}")

    def _keep(self) -> None:
        self._evaluated.seconds = self._asker.spent
        self._evaluated.tokens = self._asker.chat.generated
        self._watch.finished(self._evaluated)


def _request(question: Question) -> Ask:
    messages: list[Mapping[str, Any]] = [dict(message) for message in question.messages]
    if question.image:
        parts = [
            {"type": "text", "text": messages[-1]["content"]},
            {"type": "image_url", "image_url": {"url": data_url(picture(question.image))}},
        ]
        messages[-1] = {"role": messages[-1]["role"], "content": parts}
    return Ask(tuple(messages), question.max_tokens, tools=question.tools)


def _graded(question: Question, outcome: Outcome) -> QuestionResult:
    if isinstance(outcome, Failure):
        if outcome.missed:
            return QuestionResult(question, "not reached", fault=outcome.reason)
        untaken = question.kind == TOOLS and outcome.status in _REFUSED and _ABOUT_TOOLS.search(outcome.reason)
        return QuestionResult(question, "not tested" if untaken else "wrong", fault=outcome.reason)
    found = grade(question, outcome.reply)
    answer = outcome.text.strip() or "; ".join(f"{call.name}({call.arguments})" for call in outcome.calls)
    fault = found.fault
    if not found.right and not answer and outcome.reasons:
        fault = "the reasoning did not end"
    elif not found.right and not answer:
        fault = "an empty answer"
    elif not found.right and question.kind == TOOLS and not outcome.calls and _is_call(question, outcome):
        fault = "the call stands in the text: the server needs a tool parser for this model"
    state: State = "right" if found.right else "wrong"
    return QuestionResult(question, state, answer[:_SHOWN_CHARACTERS], fault)


def _is_call(question: Question, outcome: ChatAnswer) -> bool:
    """Whether a text names an offered function and looks like a call of it."""
    names = (mapping(tool, "function").get("name") for tool in question.tools)
    return "{" in outcome.text and any(isinstance(name, str) and name in outcome.text for name in names)
