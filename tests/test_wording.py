"""Plain English: the worst patterns of translated text stay out of docstrings, messages, comments and tests' names."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IN_DOCSTRINGS = re.compile(r"\AWhat (?!if\b)")
ANYWHERE = re.compile(
    r"\bgo(?:es|ne)? on with\b|\b(?:leave|leaves|left|leaving) (?:\S+ ){0,2}away\b|\bof ours\b|\bmend(?:s|ed|ing)?\b"
    r"|(?<!there )\bis no (?!longer|more|less|such|larger|smaller|better|worse)",
    re.IGNORECASE,
)


def _texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring, of every string that holds a word and a space."""
    tree = ast.parse(path.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    docstrings = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value, id(node) in docstrings


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _tests(path: Path) -> Iterator[tuple[int, str]]:
    """Line and words of each test's name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def faults(path: Path) -> list[str]:
    """Each bad pattern of a file with its line."""
    found = []
    for line, text in (*_comments(path), *_tests(path)):
        found += [f"{path.name}:{line}: {bad[0]!r}" for bad in ANYWHERE.finditer(text)]
    for line, text, documents in _texts(path):
        if documents and IN_DOCSTRINGS.search(text):
            found.append(f"{path.name}:{line}: docstring begins with 'What'")
        found += [f"{path.name}:{line}: {bad[0]!r}" for bad in ANYWHERE.finditer(text)]
    return found


TESTS = ("tests", "benchmarks", "checkpoints/tests", "k16v8/tests", "k16v8/benchmarks")


@pytest.mark.parametrize("source", ["src", "checkpoints/src", "k16v8/src", *TESTS])
def test_no_translated_pattern_is_in_docstrings_messages_comments_and_names_of_tests(source: str) -> None:
    files = [path for path in sorted((ROOT / source).rglob("*.py")) if path != Path(__file__)]
    assert files
    found = [fault for path in files for fault in faults(path)]
    if source in TESTS:  # their docstrings describe a promise or a script
        found = [fault for fault in found if "docstring begins" not in fault]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        *('"""What a run costs."""', 'raise ValueError("x is no number")', 'print("mend the file")'),
        *("x = 1  # it is no number", "def test_what_is_no_number() -> None: ..."),
        *('print("go on with --resume")', 'note = "the run is gone on with"', 'print("leave it away")'),
    ],
)
def test_each_planted_pattern_is_found(planted: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(planted + "\n")
    assert len(faults(tmp_path / "planted.py")) == 1
