"""Evaluations of the scripted chat server, and answers made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fidelab.bench.eval import SERVING, EvalSettings, Evaluated, evaluate
from fidelab.bench.eval.asker import Asker, Outcome
from fidelab.bench.eval.chat import Ask, Chat, ChatAnswer
from fidelab.bench.eval.checks import CheckResult
from fidelab.bench.eval.measure import CONTEXTS
from fidelab.engines.openai.http import Client
from fidelab.inputs.questions.load import load_questions, retrieval_questions
from fidelab.inputs.questions.pictures import data_url, picture
from fidelab.inputs.questions.question import KINDS, Question
from tests.bench.eval.chat_server import ChatServer, serving

ALL = (SERVING, *KINDS)


@cache
def known_questions() -> tuple[Question, ...]:
    """All questions that an evaluation asks."""
    return (*load_questions(), *retrieval_questions(CONTEXTS))


@cache
def _url(question_id: str) -> str:
    return next(data_url(picture(one.image)) for one in known_questions() if one.id == question_id)


def chat_server(**about: Any) -> ChatServer:
    """A server that knows the answers of all questions."""
    return ChatServer.of(known_questions(), lambda question: _url(question.id), **about)


def evaluated(*kinds: str, settings: dict[str, Any] | None = None, **about: Any) -> Evaluated:
    """Evaluate a scripted server; without kinds, by all of them."""
    with serving(chat_server(**about)) as server:
        return evaluate(EvalSettings(base_url=server.url, kinds=kinds or ALL, **settings or {}))


def check_of(found: Evaluated, name: str) -> CheckResult:
    return next(check for check in found.checks if check.name == name)


def wrong(found: Evaluated) -> list[str]:
    """Questions that were answered wrong."""
    return [one.question.id for one in found.questions if one.state == "wrong"]


class Scripted(Asker):
    """Gets these outcomes in turn, without a server."""

    def __init__(self, outcomes: Sequence[Outcome], parallel: int = 1) -> None:
        super().__init__(Chat(Client("http://127.0.0.1:9", None, 1.0), "none", 0), parallel, 1.0, 60.0)
        self._outcomes = iter(outcomes)
        self.sent: list[Ask] = []

    def one(self, ask: Ask) -> Outcome:
        self.sent.append(ask)
        outcome = next(self._outcomes)
        if isinstance(outcome, ChatAnswer):
            self.asked.append((ask, outcome))
        return outcome
