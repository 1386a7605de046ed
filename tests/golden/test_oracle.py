"""The independent program finds the figures of the golden rows, and it is independent."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden import oracle
from tests.golden.regenerate import ROWS
from tests.golden.rows import Row, differences, number, read_rows
from tests.golden.runs import BY_ORDER, RUNS

GOLDEN = {row.key: row for row in read_rows(ROWS)}
FILES = sorted(Path(oracle.__file__).parent.glob("oracle*.py"))

NOT_RECOMPUTED: Mapping[str, str] = {
    "kld: std. error": "belongs to the intervals",
    "kld: top-k KLD": "a figure of another program, kept for comparison with its records",
    "perplexity: std. error": "belongs to the intervals",
    "forced: prompts where KL rises for good": "a test of significance, Pettitt's",
    "forced: rises at token": "a test of significance, Pettitt's",
    "rniah: score expected by chance": "a mean over random draws",
    "plad: sign test": "a test of significance",
    "gsm8k: margin of error": "belongs to the intervals",
    "gsm8k: length at equal answer": "rests on where an answer asks a question of its own",
    "gsm8k: no number": "rests on every notation of a number",
    "gsm8k: numbers in the reasoning alone": "rests on how reasoning is marked",
    "plad: prompts answered unlike the reference": "rests on a limit of the axis",
    "plad: prompts with the most frequent answer": "rests on which prompts count once",
    "paths: n_failed": "counts over ways",
    "paths: n_items": "counts over ways",
    "paths: mean KL": "a mean over ways that are weighted by what each adds",
    "paths: parts at": "a decision",
    "paths: ways that part": "a decision",
}
"""Figures of axes with KL, agreement, perplexity, retrieval or generated text that are not recomputed, and why."""
NOT_READ = {
    "degeneration": "onsets are defined by a model of bigrams",
    "eval": "each question has a grader of its own; accuracies are those of gsm8k",
    "toolcalls": "calls are judged by their schemas; accuracies are those of gsm8k, rows those of forced",
}
"""Axes that are not recomputed, and why."""
Figure = tuple[str, str, str, str, str, float]  # run, arm, source, figure, cell, value


@pytest.fixture(scope="module")
def found() -> Mapping[tuple[str, ...], float]:
    """All figures of all runs."""
    return {figure[:5]: figure[5] for run in RUNS for figure in oracle.figures(run)}


def _figures() -> dict[str, list[Row]]:
    """Rows of numbers that an axis gave, by ``axis: figure``; without counts of clusters, curves and bit noise."""
    axes = {name for run in RUNS.values() for name in run.experiment["axes"]}
    rows = [row for row in GOLDEN.values() if row.source in axes and row.kind != "text"]
    rows = [row for row in rows if row.figure != "n_clusters" and not row.figure.startswith("curve: ")]
    rows = [row for row in rows if not row.figure.endswith(": rounding noise")]
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(f"{row.source}: {row.figure}", []).append(row)
    return grouped


def test_the_independent_program_finds_the_golden_figures(found: Mapping[tuple[str, ...], float]) -> None:
    rows = [row for key, row in GOLDEN.items() if key in found and row.value]
    golden = [replace(row, low="", high="") for row in rows]
    computed = [replace(row, value=number(found[row.key])) for row in golden]
    changed = differences(golden, computed)
    assert not changed, "\n".join(changed)
    assert len(rows) > 1900


def test_it_finds_nothing_that_the_golden_rows_lack(found: Mapping[tuple[str, ...], float]) -> None:
    unknown = (key for key in found if key not in GOLDEN or not GOLDEN[key].value)
    assert sorted(key for key in unknown if key[3] not in BY_ORDER) == []


def test_every_figure_is_recomputed_or_named_with_a_reason(found: Mapping[tuple[str, ...], float]) -> None:
    named = {name for name in _figures() if name.partition(":")[0] not in NOT_READ}
    recomputed = {f"{source}: {figure}" for _, _, source, figure, _ in found}
    missing = named - recomputed
    assert missing == {*NOT_RECOMPUTED}
    assert len(recomputed & named) / len(named) >= 0.8


def test_most_rows_of_figures_that_are_recomputed_are_recomputed(found: Mapping[tuple[str, ...], float]) -> None:
    skipped = {*NOT_RECOMPUTED}
    rows = [row for name, rows in _figures().items() if name not in skipped for row in rows if row.value]
    rows = [row for row in rows if row.source not in NOT_READ]
    lost = sorted(", ".join(row.key) for row in rows if row.key not in found)
    assert len(lost) / len(rows) < 0.05, "\n".join(lost)


def test_it_imports_nothing_of_fidelab_and_is_short() -> None:
    own = {f"tests.golden.{path.stem}" for path in FILES}
    for path in FILES:
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 300
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module in own or module.partition(".")[0] in {"numpy", *sys.stdlib_module_names}, module
