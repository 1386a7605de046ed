"""The set of checks: right answers pass, near misses do not."""

from __future__ import annotations

import numpy as np
import pytest

from fidelab.axes.capability import code, sandbox
from fidelab.axes.capability.checks import CHECKS
from fidelab.axes.capability.vision import QUESTIONS
from fidelab.inputs.images import draw

confined = pytest.mark.skipif(bool(sandbox.unavailable()), reason=sandbox.unavailable() or "sandbox available")

PROGRAMS = {
    "is_even": "def is_even(n):\n    return n % 2 == 0",
    "double_all": "def double_all(numbers):\n    return [2 * n for n in numbers]",
    "count_vowels": "def count_vowels(text):\n    return sum(c in 'aeiou' for c in text.lower())",
    "clamp": "def clamp(x, low, high):\n    return max(low, min(x, high))",
    "digit_sum": "def digit_sum(n):\n    return sum(map(int, str(n)))",
    "reverse_words": "def reverse_words(text):\n    return ' '.join(reversed(text.split()))",
    "unique_sorted": "from typing import List\ndef unique_sorted(items: List) -> List:\n    return sorted(set(items))",
    "is_balanced": (
        "def is_balanced(text):\n    stack = []\n    pairs = {')': '(', ']': '[', '}': '{'}\n"
        "    for c in text:\n        if c in '([{':\n            stack.append(c)\n"
        "        elif c in pairs and (not stack or stack.pop() != pairs[c]):\n            return False\n"
        "    return not stack"
    ),
}

_BY_ID = {check.id: check for check in CHECKS}


def judged(check: str, text: str) -> bool | None:
    found = _BY_ID.get(check)
    assert found is not None
    assert found.judge is not None
    return found.judge(text).passed


def test_minus_seven_modulo_three_is_two_and_not_in_twelve() -> None:
    assert judged("arithmetic-5", "2") is True
    assert judged("arithmetic-5", "-7 % 3 = 2") is True
    assert judged("arithmetic-5", "12") is False
    assert judged("arithmetic-5", "-1") is False


@pytest.mark.parametrize("number", range(1, 9))
def test_the_expected_sums_are_right(number: int) -> None:
    results = [17 + 25, 84 - 97, 23 * 17, 144 / 12, -7 % 3, 2**10, 0.35, 6 * 8 - 15]
    check = _BY_ID.get(f"arithmetic-{number}")
    assert check is not None
    assert float(check.expected) == results[number - 1]


@pytest.mark.parametrize("check", [c for c in CHECKS if c.kind in ("arithmetic", "knowledge", "edge", "thinking")])
def test_the_expected_answer_passes_and_silence_does_not(check: object) -> None:
    assert isinstance(check, type(CHECKS[0]))
    answer = check.expected.rpartition("then ")[2]
    assert judged(check.id, answer) is True
    assert judged(check.id, "") is False


def test_a_wrong_name_beside_the_right_one_does_not_pass() -> None:
    assert judged("knowledge-1", "Canberra or Sydney") is False
    assert judged("knowledge-5", "Autumn") is False


def test_the_same_words_over_and_over_are_no_answer() -> None:
    assert judged("edge-empty", "help " * 30) is False
    assert judged("edge-empty", "\ufffd\ufffd help") is False
    assert judged("edge-empty", "Hello! How can I help you today? Ask me anything you like.") is True


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris, France"}}</tool_call>', True),
        ('{"name": "get_weather", "arguments": {"city": "Lyon"}}', False),
        ('{"name": "get_weather", "arguments": {}}', False),
        ('{"name": "weather", "arguments": {"city": "Paris"}}', False),
        ("The weather in Paris: get_weather", False),
    ],
)
def test_the_tool_is_called_by_its_name_with_the_city(text: str, passed: bool) -> None:
    assert judged("tool-call", text) is passed


# ------------------------------------------------------------------------------------------------ code


@confined
@pytest.mark.parametrize("task", code.TASKS, ids=lambda task: task.name)
def test_a_right_program_passes(task: code.Task) -> None:
    assert code.run_task(task, f"```python\n{PROGRAMS[task.name]}\n```\nThis works.") == (True, "")


@confined
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def is_even(n):\n    return n % 2", "is_even(4) gave 0, not True"),
        ("def is_even(n):\n    return int(n % 2 == 0)", "is_even(4) gave 1, not True"),
        ("def is_even(n):\n    return 1 / 0", "is_even(4) raised 'ZeroDivisionError', not True"),
        ("def is_odd(n):\n    return n % 2", "no function is_even"),
        ("```python\ndef is_even(n) return\n```", "SyntaxError"),
        ("import sys\nsys.exit(0)\ndef is_even(n): pass", "SystemExit"),
        ("import os\nos._exit(0)", "no result"),
        ("print('[[true, true]]')\ndef is_even(n): pass", "is_even(4) gave None, not True"),
        ("```\nn = int(input())\ndef is_even(n): return n % 2 == 0\n```", "EOFError"),
        ("It is easy.", "no code"),
    ],
)
def test_a_wrong_program_fails_with_its_reason(text: str, reason: str) -> None:
    assert code.run_task(code.TASKS[0], text) == (False, reason)


@confined
def test_prose_behind_a_program_is_left_out() -> None:
    text = f"{PROGRAMS['is_even']}\n\nThis function returns True if the number"
    assert code.run_task(code.TASKS[0], text) == (True, "")


def test_without_a_sandbox_code_is_not_judged_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "unavailable", lambda: "no sandbox on this planet")
    monkeypatch.setattr(sandbox, "run", None)
    for text in ("def is_even(n):\n    return n % 2 == 0  # unseen", "no code at all, unseen"):
        assert code.run_task(code.TASKS[0], text) == (None, "no sandbox on this planet")


# ---------------------------------------------------------------------------------------------- vision


def _runs(row: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Stretches of True."""
    return int((np.diff(np.concatenate([[False], row]).astype(int)) == 1).sum())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_as_many_shapes_are_drawn_as_asked(count: int) -> None:
    image = draw("blue", "square", count)
    assert _runs((image[len(image) // 2] != 255).any(axis=-1)) == count


def test_shapes_have_their_areas_and_color() -> None:
    reach, size = 0.35 * 224, 224
    areas = {shape: int((draw("red", shape, 1, size) != 255).any(axis=-1).sum()) for shape in ("circle", "square")}
    triangle = int((draw("red", "triangle", 1, size) != 255).any(axis=-1).sum())
    assert areas["square"] == pytest.approx(4 * reach**2, rel=0.03)
    assert areas["circle"] == pytest.approx(np.pi * reach**2, rel=0.03)
    assert triangle == pytest.approx(2 * reach**2, rel=0.03)
    assert {tuple(pixel) for pixel in draw("red", "circle", 1).reshape(-1, 3).tolist()} == {
        (255, 255, 255),
        (214, 40, 40),
    }


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.right)
def test_the_wrong_image_calls_for_another_answer(question: object) -> None:
    assert isinstance(question, type(QUESTIONS[0]))
    words = {1: "one", 2: "two", 3: "three"}

    def facts(image: tuple[str, str, int]) -> set[str]:
        return {image[0], image[1], words[image[2]]}

    assert question.right in facts(question.image) - facts(question.control)
    assert facts(question.control) & set(question.wrong)
