"""The set of checks: questions, right answers, and how answers are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from fidelab.axes.capability import parse
from fidelab.axes.capability.code import TASKS, Task, run_task
from fidelab.axes.capability.vision import QUESTIONS

SET_VERSION = "1"
"""Changes with the questions: answers to another set are not scored with this one."""

CheckKind = Literal["arithmetic", "code", "knowledge", "edge", "parallel", "vision", "tool call", "thinking"]
KINDS: tuple[CheckKind, ...] = get_args(CheckKind)


@dataclass(frozen=True)
class Judged:
    """A verdict and its reason.  ``passed`` is ``None`` if the answer cannot be judged here."""

    passed: bool | None
    reason: str = ""


Judge = Callable[[str], Judged]


@dataclass(frozen=True)
class Check:
    """One question.

    ``expected`` is the right answer as people read it; ``judge`` reads a model's answer, and is ``None`` where two
    answers of one model are compared with each other.
    """

    id: str
    kind: CheckKind
    prompt: str
    expected: str
    judge: Judge | None


# --------------------------------------------------------------------------------------------- judges


def _number(value: str) -> Judge:
    def judge(text: str) -> Judged:
        number = parse.first_number(text)
        return Judged(number == Decimal(value), "no number" if number is None else f"read {number}")

    return judge


def _name(right: str, *wrong: str) -> Judge:
    """Whether the answer names the right one and none of the wrong ones."""

    def judge(text: str) -> Judged:
        names = parse.find_names(text, (right, *wrong))
        return Judged(names == [right], f"read {' and '.join(names)}" if names else "no answer recognised")

    return judge


def _line(expected: str) -> Judge:
    def judge(text: str) -> Judged:
        matches = expected in parse.lines_of(text)
        return Judged(matches, "" if matches else "no line equals it")

    return judge


def _json(expected: str) -> Judge:
    def judge(text: str) -> Judged:
        value = parse.json_value(text)
        return Judged(value == json.loads(expected), "no JSON" if value is None else f"read {value!r:.60}")

    return judge


def _judge_words(text: str) -> Judged:
    """Whether a text is neither noise nor a few repeated words."""
    words = re.findall(r"[^\W\d_]+", text.casefold())
    if not words:
        return Judged(False, "no word")
    if "\ufffd" in text.rstrip("\ufffd"):  # the last character may be cut
        return Judged(False, "bytes that are no text")
    kinds = len(set(words))
    return Judged(len(words) < 8 or kinds >= len(words) / 4, f"{kinds} different words of {len(words)}")


def _weather(text: str) -> Judged:
    call = parse.tool_call(text)
    if call is None:
        return Judged(False, "no call")
    name, arguments = call
    right = name == "get_weather" and [*arguments] == ["city"] and parse.find_names(str(arguments["city"]), ["Paris"])
    return Judged(bool(right), f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"[:80])


def _program(task: Task) -> Judge:
    return lambda text: Judged(*run_task(task, text))


# ------------------------------------------------------------------------------------------ questions

_NUMBER_ONLY = "Answer with the number only."
_ONE_WORD = "Answer with one word."
_REPEAT_INSTRUCTION = "Repeat the following exactly, and write nothing else:"
_PASSWORD = "harbor"
_UNICODE_SAMPLE = "naïve façade — 東京 · Ελλάδα · 🙂"
_MARKUP = '{"a": [1, -2.5], "b": null, "{{c}}": "<d>&amp;</d>"}'

_SUMS = (
    ("What is 17 + 25?", "42"),
    ("What is 84 - 97?", "-13"),
    ("What is 23 * 17?", "391"),
    ("What is 144 divided by 12?", "12"),
    ("What does the Python expression -7 % 3 evaluate to?", "2"),
    ("What is 2 to the power of 10?", "1024"),
    ("What is 0.1 + 0.25?", "0.35"),
    ("A shelf holds 6 boxes with 8 cups each. 15 cups break. How many cups are left?", "33"),
)
_FACTS = (
    ("What is the capital of Australia?", "Canberra", "Sydney", "Melbourne", "Perth", "Brisbane"),
    ("Which planet is closest to the Sun?", "Mercury", "Venus", "Earth", "Mars", "Jupiter"),
    ("Who wrote the play Hamlet?", "Shakespeare", "Marlowe", "Dickens", "Milton", "Chaucer"),
    ("Which ocean is the largest?", "Pacific", "Atlantic", "Indian", "Arctic", "Southern"),
    ("What is the chemical symbol of gold?", "Au", "Ag", "Gd", "Pt", "Cu"),
    ("In which language does 'gracias' mean 'thank you'?", "Spanish", "Portuguese", "Italian", "French", "Latin"),
)
_YEAR = "In which year did people first walk on the Moon?"
_SPACES = f" \r\n\t What\u00a0is \u200b3 +\t4 ?\n\n  {_NUMBER_ONLY} "
_TOPICS = (
    "Name three fruits.",
    "What is rain?",
    "Write one sentence about a dog.",
    "Count from one to ten in words.",
    "Give a short recipe for tea with milk.",
    "Explain in one sentence why the sky is blue on a clear day.",
    "List the days of the week, beginning with Monday, separated by commas.",
    "Write the first two sentences of a story about a lighthouse and the person who keeps it.",
)
_WEATHER_QUESTION = "What is the weather in Paris right now? Use the tool."
_TRAIN = f"A train has 4 cars with 12 seats each, and 5 seats are taken. How many are free? {_NUMBER_ONLY}"

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "name of the city"}},
            "required": ["city"],
        },
    },
}
"""The tool on offer in the tool-call check, as chat templates take it."""


def long_prompt(lines: int) -> str:
    """A password, ``lines`` numbered lines about something else, and the question for the password."""
    filler = "".join(f"Line {n}: the river runs past the old mill and on through the meadow.\n" for n in range(lines))
    return f"The password is {_PASSWORD}. Remember it.\n\n{filler}\nWhat is the password? {_ONE_WORD}"


def _write(task: Task) -> str:
    return f"Write a Python function `{task.signature}` that {task.does}. Answer with code only."


CHECKS: tuple[Check, ...] = (
    *(
        Check(f"arithmetic-{n}", "arithmetic", f"{question} {_NUMBER_ONLY}", answer, _number(answer))
        for n, (question, answer) in enumerate(_SUMS, 1)
    ),
    *(
        Check(f"code-{n}", "code", _write(task), f"{len(task.cases)} tests", _program(task))
        for n, task in enumerate(TASKS, 1)
    ),
    *(
        Check(f"knowledge-{n}", "knowledge", f"{question} {_ONE_WORD}", right, _name(right, *wrong))
        for n, (question, right, *wrong) in enumerate(_FACTS, 1)
    ),
    Check("knowledge-7", "knowledge", f"{_YEAR} {_NUMBER_ONLY}", "1969", _number("1969")),
    Check("edge-empty", "edge", "", "some words", _judge_words),
    Check("edge-long", "edge", long_prompt(0), _PASSWORD, _name(_PASSWORD, "river", "mill", "meadow")),
    Check("edge-unicode", "edge", f"{_REPEAT_INSTRUCTION} {_UNICODE_SAMPLE}", _UNICODE_SAMPLE, _line(_UNICODE_SAMPLE)),
    Check("edge-spaces", "edge", _SPACES, "7", _number("7")),
    Check("edge-markup", "edge", f"{_REPEAT_INSTRUCTION} {_MARKUP}", _MARKUP, _json(_MARKUP)),
    *(Check(f"parallel-{n}", "parallel", topic, "as when alone", None) for n, topic in enumerate(_TOPICS, 1)),
    *(
        Check(f"vision-{n}", "vision", question.text, question.right, _name(question.right, *question.wrong))
        for n, question in enumerate(QUESTIONS, 1)
    ),
    Check("tool-call", "tool call", _WEATHER_QUESTION, "get_weather(city='Paris')", _weather),
    Check("thinking", "thinking", _TRAIN, "an end, then 43", _number("43")),
)
