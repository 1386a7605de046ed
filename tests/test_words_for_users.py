"""One word for one concept on screens and in documents for users: "configuration", not "arm"; "test", not "axis"."""

from __future__ import annotations

import ast
import html
import io
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fidelab.cli.check import decide, read_policy
from fidelab.core import Status
from fidelab.report.check import render_check_markdown, render_junit
from fidelab.report.diff import render_diff, render_diff_markdown
from fidelab.report.html import render_html
from fidelab.report.markdown import render_markdown
from fidelab.report.study import study_markdown
from fidelab.report.text import render_text
from fidelab.results.compare import compare
from fidelab.results.measurement import Definition
from fidelab.results.record import Report
from fidelab.results.study import PART, StudyRow
from fidelab.studies.study import new_study
from tests.report.sample import candidate, sample_report
from tests.report.sample_benches import rich_report

ROOT = Path(__file__).parents[1]
WORD = re.compile(r"\b(?:arm|axis|axe)s?\b", re.IGNORECASE)

# Names that a user types or reads as data keep the short words.
NAMES = re.compile(
    r"--axes\b|\baxes(?:\.(?=[\w{]|$)|=)|^axes: |'axes'|`axes`|`axes:|\baxes: ?\{"  # an option, keys, a keyword
    r"|\baxis=channel\b"  # an option of a format
)
MATHEMATICS = (  # an axis of a chart or of an array
    "drawn on axes of matplotlib",
    "HQQ groups along axis 0",
)
# In documents: keys of JSON and YAML, and paths of tests
KEYS = re.compile(r"`(?:arm|arms|axis|axes|captures/[^`]*|tests/[^`]*|arms\.[^`]*)`|\barm: \w")

FOR_DEVELOPERS = ("design.md",)
KINDS = ("UnknownNameError", "Registry")  # their first argument is a word of messages


def refused(text: str) -> list[str]:
    """Return the refused words of a text."""
    for known in MATHEMATICS:
        text = text.replace(known, "")
    return [found[0] for found in WORD.finditer(NAMES.sub(" ", text))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that may reach a user: constants with a blank, and kinds of names.

    Docstrings are left out.  Those that reach users are read in the pages and schemas that are made of them.
    """
    tree = ast.parse(path.read_text("utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            if " " in node.value:
                yield node.lineno, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS:
            kinds = [kind.value for kind in node.args[:1] if isinstance(kind, ast.Constant)]
            yield from ((node.lineno, kind) for kind in kinds if isinstance(kind, str) and " " not in kind)


def faults(path: Path) -> list[str]:
    return [f"{path.name}:{line}: {word!r} in {text!r}" for line, text in prose(path) for word in refused(text)]


def descriptions(node: Any) -> Iterator[str]:
    """Yield the descriptions in a JSON schema."""
    if isinstance(node, dict):
        if isinstance(text := node.get("description"), str):
            yield text
        for value in node.values():
            yield from descriptions(value)
    elif isinstance(node, list):
        for value in node:
            yield from descriptions(value)


@pytest.mark.parametrize("source", ["src", "checkpoints/src"])
def test_no_message_help_or_heading_says_arm_or_axis(source: str) -> None:
    files = sorted((ROOT / source).rglob("*.py"))
    assert files
    found = [fault for path in files for fault in faults(path)]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("path", sorted((ROOT / "schema").glob("*.json")), ids=lambda path: path.name)
def test_no_description_of_a_schema_says_arm_or_axis(path: Path) -> None:
    texts = list(descriptions(json.loads(path.read_text("utf-8"))))
    assert texts
    assert [text for text in texts if refused(text)] == []


def test_no_document_for_users_says_arm_or_axis() -> None:
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in FOR_DEVELOPERS]
    pages += [ROOT / "README.md", *sorted((ROOT / "examples").glob("*.md")), *sorted((ROOT / "action").glob("*"))]
    texts = [(path, path.read_text("utf-8").splitlines()) for path in pages if path.is_file()]
    assert len(texts) > 20
    found = [
        f"{path.name}:{number}: {word!r}"
        for path, lines in texts
        for number, line in enumerate(lines, 1)
        for word in refused(KEYS.sub(" ", line))
    ]
    assert found == [], "\n".join(found)


def test_no_option_of_a_command_is_named_after_arms() -> None:
    pages = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs/reference").glob("*.md")))
    assert re.findall(r"`--[\w-]*\barms?\b[\w-]*", pages) == []
    assert "`--configuration NAME`" in pages


def shown(report: Report) -> Iterator[str]:
    """Yield what a report shows: terminal, Markdown, the page's text, a comparison and a check."""
    for render in (partial(render_text, report, details=True), partial(render_diff, compare(report, report))):
        file = io.StringIO()
        render(Console(file=file, width=200))
        yield file.getvalue()
    yield render_markdown(report)
    text = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", render_html(report))
    yield re.sub(r'"\w+":', " ", html.unescape(text))  # without the keys of the settings, which are JSON
    fewer = report.model_copy(update={"candidates": report.candidates[:1]})
    yield render_diff_markdown(compare(report, fewer))
    found = decide(report, read_policy(None, {"kld.mean": {"max": 0.001}}, ["kld"]), report.candidates)
    yield from (render_check_markdown(found, "fidelab check"), render_junit(found, report, "fidelab check"))


@pytest.mark.parametrize("report", [sample_report(), rich_report()], ids=["tests", "benches"])
def test_no_screen_page_or_table_of_a_report_says_arm_or_axis(report: Report) -> None:
    texts = list(shown(report))
    assert all(len(text) > 100 for text in texts)
    assert [found for text in texts for found in refused(text)] == []


def test_a_comparisons_table_and_a_studys_are_headed_by_configuration() -> None:
    before = sample_report()
    worse = candidate(before.candidates[0].name, 0.3, "FAIL", 1, "worse")
    after = before.model_copy(update={"candidates": (worse, *before.candidates[1:])})
    assert "| outcome | configuration |" in render_diff_markdown(compare(before, after))
    rows = (StudyRow(status=Status.OK, at={PART: "arm", "arm": "q8_0"}, metrics=(Definition("kld")(0.5),)),)
    sizes = {"windows": 1, "n_rows": 1, "documents": 1}
    study = new_study(kind="speculation", title="x", command="", columns=("arm", "kld"), rows=rows, **sizes)
    assert "configuration:\n\n| configuration | kld |" in study_markdown(study)


@pytest.mark.parametrize(
    "planted",
    [
        *('raise UsageError(f"unknown axis {name}")', 'note("every arm failed")', 'Option(help="N or an AXIS")'),
        *('raise UnknownNameError("arm", name, known)', 'AXES = Registry("axis", {})'),
    ],
)
def test_each_planted_word_is_found(planted: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(planted + "\n")
    assert len(faults(tmp_path / "planted.py")) == 1


@pytest.mark.parametrize(
    "allowed",
    [
        "use --axes kld",
        "raise axes.gsm8k.n_predict",
        "axes: name one",
        "[axis=channel,group=8] of uint4",
        'row["axis"]',
    ],
)
def test_names_that_a_user_types_are_no_fault(allowed: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(f"x = {allowed!r}\n" if " " in allowed else f"{allowed}\n")
    assert faults(tmp_path / "planted.py") == []
