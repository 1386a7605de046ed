"""Answers are read for what they say."""

from __future__ import annotations

import signal
from decimal import Decimal
from typing import Any

import pytest

from fidelab.axes.capability.parse import (
    REASONING,
    after_reasoning,
    after_thinking,
    find_names,
    first_number,
    json_value,
    lines_of,
    python_source,
    tool_call,
)
from fidelab.inputs.gsm8k import extract_answer
from fidelab.metrics.retrieval import judged, returned


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("12", "12"),
        ("-7 % 3 = 2", "2"),
        ("2 (since -7 = -3*3 + 2)", "2"),
        ("17 + 25 = 42.", "42"),
        ("17 plus 25 is 42", "42"),
        ("144 divided by 12 is 12", "12"),
        ("The answer is **1,024**.", "1024"),
        ("1,024,000", "1024000"),
        ("84-97=-13", "-13"),
        ("84 - 97", "97"),
        ("−13", "-13"),
        ("\u201113", "-13"),
        ("1\u202f024", "1024"),
        ("1 024", "1"),
        ("-13.5 degrees", "-13.5"),
        ("0.1 + 0.25 = 0.35", "0.35"),
        ("$.35", "0.35"),
        ("\\boxed{33}", "33"),
        ("1.024e3", "1024"),
        ("1e999999999", "1"),
        ("Sure!\n\n33 cups are left.\n\nIs 12 next?", "33"),
        ("July 20, 1969", "1969"),
        ("v1.5 of x2", None),
        ("forty-two", None),
        ("", None),
    ],
)
def test_a_number_is_the_one_that_a_text_answers_with(text: str, number: str | None) -> None:
    assert first_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Canberra", ["Canberra"]),
        ("The capital is canberra.", ["Canberra"]),
        ("Canberran", []),
        ("Sydney. Canberra is the capital.", ["Sydney"]),
        ("Sure! The capital is Canberra, near Sydney.", ["Canberra", "Sydney"]),
        ("It is not Sydney but Canberra", ["Canberra"]),
        ("It is not Canberra.", []),
        ("Cänberra", ["Canberra"]),
        ("", []),
    ],
)
def test_names_are_whole_words_of_the_sentence_that_answers(text: str, found: list[str]) -> None:
    assert find_names(text, ("Canberra", "Sydney")) == found


@pytest.mark.parametrize(
    ("text", "lines"),
    [("`a b`\n", ["a b"]), ("Sure:\n\n“é”", ["Sure:", "é"]), ("e\u0301", ["é"]), ("```\nx\n```", ["x"])],
)
def test_lines_are_compared_without_their_wrapping(text: str, lines: list[str]) -> None:
    assert lines_of(text) == lines


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -2.5]}', {"a": [1, -2.5]}),
        ('Here: ```json\n{"a": null}\n``` done', {"a": None}),
        ("{broken [1, 2]", [1, 2]),
        ("nothing", None),
        ("[" * 5000, None),
    ],
    ids=["plain", "fenced", "after a broken one", "none", "deep"],
)
def test_json_is_found_in_text(text: str, value: Any) -> None:
    assert json_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>',
        '{"name": "f", "parameters": {"x": "1"}}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "1"}}]',
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": \\"1\\"}"}}',
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    ],
    ids=["hermes", "llama", "mistral", "openai", "xml"],
)
def test_a_tool_call_is_read_in_every_notation(text: str) -> None:
    assert tool_call(text) == ("f", {"x": "1"})


@pytest.mark.parametrize("text", ["f(x=1)", "I would call f.", '{"x": "1"}', '{"name": 3}'])
def test_talk_about_a_call_is_no_call(text: str) -> None:
    assert tool_call(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\ndef f(x):\n    pass\n```\nThis", ("def f(x):\n    pass\n", True)),
        ("```\nx = 1\n```\n```py\ndef f(): 1\n```", ("def f(): 1\n", True)),
        ("```python\ndef f(x):\n    re", ("def f(x):\n    re", False)),
        ("Sure.\nimport re\ndef f(): 1\nDone.", ("import re\ndef f(): 1\nDone.", False)),
        ("I cannot.", None),
    ],
)
def test_a_program_is_the_block_that_defines_the_function(text: str, found: tuple[str, bool] | None) -> None:
    assert python_source(text, "f") == found


@pytest.mark.parametrize(
    ("text", "rest"), [("a </think> 43", "43"), ("a", None), ("a </think> ", None), ("</think>1</think>2", "2")]
)
def test_an_answer_follows_the_end_of_thinking(text: str, rest: str | None) -> None:
    assert after_thinking(text, "</think>") == rest


@pytest.mark.parametrize(("begin", "end"), REASONING, ids=[begin for begin, _ in REASONING])
def test_reasoning_is_no_part_of_an_answer_in_any_notation(begin: str, end: str) -> None:
    assert after_reasoning(f"{begin}It is 5.{end}It is 7.") == "It is 7."
    assert after_reasoning(f"It is 5.{end}It is 7.") == "It is 7."  # begun in the prompt
    assert after_reasoning(f"Well. {begin}It is 5, or") == "Well. "  # cut off
    assert after_reasoning("It is 5, or", f"user: how many? {begin}\n") == ""
    assert after_reasoning("It is 7.", f"user: how many? {begin}\n\n{end}\n\n") == "It is 7."  # switched off


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 7.", "It is 7."),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>a</think>", ""),
        ("2 < 3 and [think] so", "2 < 3 and [think] so"),
        (
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>commentary<|message|>6<|end|>"
            "<|start|>assistant<|channel|>final<|message|>7",
            "7",
        ),
    ],
)
def test_only_blocks_of_reasoning_go(text: str, answer: str) -> None:
    assert after_reasoning(text) == answer


LONG = 100_000  # characters
UNITS = ("1,11,", "1/1,", "Paris not ", "not 7421 ", "<function=", "<parameter=a> ", "```a", "```", "[[", "<think> ")


@pytest.mark.parametrize("unit", UNITS)
def test_no_answer_is_long_to_read(unit: str) -> None:
    """A guard against readers whose time grows with the square of an answer: they would take minutes."""
    text = unit * (LONG // len(unit))

    def stop(_number: int, _frame: object) -> None:
        raise AssertionError("an answer takes longer to read than it can")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        for read in (first_number, json_value, tool_call, after_reasoning, extract_answer, judged):
            read(text)
        find_names(text, ("Paris", "Rome"))
        python_source(text, "f")
        returned(text, ["7421"])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
