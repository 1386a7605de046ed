"""Answers are read for what they say."""

from __future__ import annotations

import signal

import pytest

from fidelab.inputs.gsm8k import extract_answer
from fidelab.inputs.reasoning import (
    REASONING,
    after_reasoning,
)
from fidelab.metrics.retrieval import judged, returned


@pytest.mark.parametrize(("begin", "end"), REASONING, ids=[begin for begin, _ in REASONING])
def test_reasoning_is_not_a_part_of_an_answer_in_any_notation(begin: str, end: str) -> None:
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
UNITS = ("1,11,", "1/1,", "Paris not ", "not 7421 ", "<function=", "<parameter=a> ", "[[", "<think> ")


@pytest.mark.parametrize("unit", UNITS)
def test_no_answer_is_long_to_read(unit: str) -> None:
    """A guard against readers whose time grows with the square of an answer: they would take minutes."""
    text = unit * (LONG // len(unit))

    def stop(_number: int, _frame: object) -> None:
        raise AssertionError("an answer takes longer to read than it can")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        for read in (after_reasoning, extract_answer, judged):
            read(text)
        returned(text, ["7421"])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
