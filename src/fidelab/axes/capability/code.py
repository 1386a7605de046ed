"""Code checks: a function by its description.  The model's program is run on inputs; the results are judged here.

The program sees the inputs and never the right results, so it cannot pretend to pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fidelab.axes.capability import sandbox
from fidelab.axes.capability.parse import python_source


@dataclass(frozen=True, eq=False)
class Task:
    """A function to write: its signature, its description, and (arguments, result) of its tests."""

    signature: str
    does: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.signature.partition("(")[0]


TASKS = (
    Task(
        "is_even(n)",
        "returns True if the integer n is even and False if it is odd",
        (((4,), True), ((7,), False), ((0,), True), ((-3,), False), ((-8,), True)),
    ),
    Task(
        "double_all(numbers)",
        "returns a list with every number of the list doubled",
        ((([1, 2, 3],), [2, 4, 6]), (([],), []), (([-1, 0.5],), [-2, 1.0])),
    ),
    Task(
        "count_vowels(text)",
        "returns how many letters of the text are vowels (a, e, i, o, u), in upper or lower case",
        ((("hello",), 2), (("",), 0), (("AEIOU xyz",), 5), (("rhythm",), 0)),
    ),
    Task(
        "clamp(x, low, high)",
        "returns x, but at least low and at most high",
        (((5, 0, 10), 5), ((-1, 0, 10), 0), ((11, 0, 10), 10), ((3, 3, 3), 3)),
    ),
    Task(
        "digit_sum(n)",
        "returns the sum of the decimal digits of the integer n, which is not negative",
        (((0,), 0), ((7,), 7), ((123,), 6), ((90909,), 27)),
    ),
    Task(
        "reverse_words(text)",
        "returns the words of the text in reverse order, separated by single spaces",
        ((("one two three",), "three two one"), (("alone",), "alone"), (("",), ""), (("a  b",), "b a")),
    ),
    Task(
        "unique_sorted(items)",
        "returns a list of the distinct items of the list, in ascending order",
        ((([3, 1, 3, 2],), [1, 2, 3]), (([],), []), ((["b", "a", "b"],), ["a", "b"])),
    ),
    Task(
        "is_balanced(text)",
        "returns True if every bracket of ()[]{} in the text is closed by its partner in the right order, else False",
        (
            (("(a[b]{c})",), True),
            (("(]",), False),
            (("",), True),
            (("([)]",), False),
            (("((",), False),
            ((")(",), False),
        ),
    ),
)

# Prints a JSON list: per call [True, result] or [False, exception]; or a text: why nothing could be called.
# An answer without a clear end may have prose or half a line after the program: lines go until the rest compiles.
_HARNESS = """
import contextlib, io, json
source, complete, name, calls = json.loads({request!r})
lines = source.splitlines()
report, space, program = None, {{"__name__": "answer"}}, None
while lines:
    try:
        program = compile("\\n".join(lines) + "\\n", "answer", "exec")
        break
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        report = report or type(error).__name__
        if complete:
            break
        lines.pop()
with contextlib.redirect_stdout(io.StringIO()):
    if program is not None:
        report = None
        try:
            exec(program, space)
        except BaseException as error:
            report = type(error).__name__
        if report is None and not callable(space.get(name)):
            report = "no function " + name
    if report is None:
        report = []
        for arguments in calls:
            try:
                report.append([True, json.loads(json.dumps(space[name](*arguments)))])
            except BaseException as error:
                report.append([False, type(error).__name__])
print()
print(json.dumps(report))
"""


@lru_cache(maxsize=1024)
def run_task(task: Task, answer: str) -> tuple[bool | None, str]:
    """Run the program in an answer on the task's inputs: passed, or ``None`` if it cannot be run, and the reason."""
    if reason := sandbox.unavailable():
        return None, reason
    program = python_source(answer, task.name)
    if program is None:
        return False, "no code"
    source, complete = program
    request = json.dumps([source, complete, task.name, [arguments for arguments, _ in task.cases]])
    try:
        outcome = sandbox.run(_HARNESS.format(request=request))
    except sandbox.SandboxUnavailable as error:
        return None, str(error)
    if outcome.ended != "finished":
        return False, outcome.error.splitlines()[0][:120]
    return _judge(task, outcome.output)


def _judge(task: Task, output: str) -> tuple[bool, str]:
    try:
        report = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        return False, "no result"
    if not isinstance(report, list) or len(report) != len(task.cases):
        return False, str(report)[:60]
    for (arguments, expected), (returned, result) in zip(task.cases, report, strict=True):
        if not returned or not _is_equal(result, expected):
            call = f"{task.name}({', '.join(map(repr, arguments))})"
            return False, f"{call} {'gave' if returned else 'raised'} {_cut(repr(result))}, not {expected!r}"
    return True, ""


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two results are equal; truth values are not numbers."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
