"""Short questions with exact graders: their form, and the answers that graders read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS: Mapping[str, str] = {
    "arithmetic": "sums, products, fractions and percentages",
    "word-problems": "arithmetic in a few sentences",
    "sql": "a query that runs on a small SQLite database in memory",
    "json": "an object that a JSON schema accepts",
    "program-output": "the output of a short program, which is not run",
    "reasoning": "a puzzle with one short answer",
    "instructions": "constraints on the form of an answer",
    "tools": "a call of a function that is offered",
    "retrieval": "a fact in a long text",
    "images": "colours, digits, counts and places in a picture",
}
"""Kinds of questions, and the subject of each."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: unique name, the kind with a number: ``sql-3``.
        kind: one of :data:`KINDS`.
        messages: chat messages with ``role`` and ``content``, which is text.
        max_tokens: tokens that an answer may have, reasoning excluded.
        check: the grader and what it needs: ``{"number": "391"}``; see :mod:`fidelab.inputs.questions.graders`.
        answer: an answer that is right.
        tools: functions that are offered, in OpenAI's form.
        image: description of a picture; see :mod:`fidelab.inputs.questions.pictures`.
        context: approximate tokens of the text that the question is about; 0 unless it is long.
    """

    id: str
    kind: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    check: Mapping[str, Any]
    answer: str
    tools: tuple[Mapping[str, Any], ...] = ()
    image: Mapping[str, Any] = field(default_factory=dict)
    context: int = 0


@dataclass(frozen=True)
class Call:
    """A call of a tool as the model wrote it; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """An answer without its reasoning: text and calls of tools."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Grade:
    """``right``, and in a few words what is wrong otherwise: ``expected 391, found 381``."""

    right: bool
    fault: str = ""
