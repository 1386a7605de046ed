"""Studies as text and as a page: a table per part, what failed, commands to copy, and no markup from outside."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fidelab.core import Status
from fidelab.report.study import render_study, study_html, study_markdown
from fidelab.results.measurement import Cell, Coordinates, Definition, Measurement
from fidelab.results.record import Report
from fidelab.results.study import Study, StudyRow
from fidelab.studies.study import new_study
from tests.report.sample_benches import bench_report

LOSS, RATE = Definition("loss", "nats"), Definition("rate", "tok/s")
COMMAND = f"fidelab compare {'long-name/' * 12}model"
ROWS = (
    StudyRow(
        status=Status.OK, at={"name": "a", "part": "first"}, metrics=(LOSS(0.25, (0.2, 0.3)),), facts={"kv": "q8"}
    ),
    StudyRow(status=Status.NOT_SUPPORTED, reason="no such format", at={"name": "b", "part": "first"}),
    StudyRow(status=Status.OK, at={"name": "a", "part": "second"}, metrics=(RATE(64.0),)),
    StudyRow(
        status=Status.NOT_MEASURABLE, reason="skipped", at={"name": "c", "part": "third"}, facts={"why": "skipped"}
    ),
)


def study(**changes: object) -> Study:
    fields = {
        "kind": "profile",
        "title": "a question",
        "command": "fidelab x",
        "rows": ROWS,
        "commands": {"next": COMMAND},
    }
    return new_study(**{**fields, "columns": ("name", "kv", "loss", "rate", "why"), **changes})


def text_of(found: Study) -> str:
    out = io.StringIO()
    render_study(found, Console(file=out, width=80))
    return out.getvalue()


def test_each_part_has_a_table_with_the_columns_that_its_rows_have() -> None:
    headings = [line.split() for line in text_of(study()).splitlines() if line.startswith(" name")]
    assert headings == [
        ["name", "kv", "loss,", "nats", "outcome"],
        ["name", "rate,", "tok/s"],
        ["name", "why", "outcome"],
    ]
    page = study_html(study())
    assert [f"<h2>{part}</h2>" in page for part in ("first", "second", "third")] == [True] * 3


def test_what_all_rows_of_a_page_have_in_common_stands_above_the_table() -> None:
    rows = [
        StudyRow(status=Status.OK, at={"name": name}, metrics=(LOSS(0.1 * n),), facts={"kv": "q8"})
        for n, name in enumerate("abc", 1)
    ]
    page = study_html(study(rows=tuple(rows)))
    assert "In all rows: kv q8.</p>" in page
    assert "<td>q8</td>" not in page


def test_a_metric_stands_with_its_interval_and_a_fact_as_it_is() -> None:
    assert ["a", "q8", "0.250", "(0.20–0.30)", "ok"] in [line.split() for line in text_of(study()).splitlines()]


def test_why_a_row_has_no_figures_is_said_once() -> None:
    for shown in (text_of(study()), study_html(study())):
        assert "b first: not supported: no such format" in shown
        assert "c third: not measurable" not in shown  # its table has a column for it


def test_commands_are_in_one_piece() -> None:
    assert f"  {COMMAND}\n" in text_of(study())
    assert f'<pre id="command1">{COMMAND}</pre><button' in study_html(study())


@pytest.mark.parametrize("word", ["[red]x", "\x1b[31mx"])
def test_words_from_outside_are_no_markup(word: str) -> None:
    rows = (StudyRow(status=Status.FAILED, reason=word, at={"name": word}, facts={"kv": word}),)
    text = text_of(study(title=word, rows=rows, sentences=(word,)))
    assert "\x1b" not in text
    assert text.count("[31mx" if "\x1b" in word else "[red]x") == 6
    assert study_html(study(title="<script>", rows=rows)).count("<script") == 1  # the page's own


def test_markdown_has_every_row_as_a_table_and_no_markup_from_outside() -> None:
    hostile = StudyRow(status=Status.OK, at={"name": "<b>|x", "part": "first"}, metrics=(LOSS(1.0),))
    shown = study_markdown(study(rows=(*ROWS, hostile), shown=1, sentences=("a sentence", "- a *point*")))
    assert "first:\n\n| name | kv | loss, nats | outcome |\n| :-- | :-- | --: | :-- |\n" in shown
    assert "| a | q8 | 0.250 (0.20–0.30) | ok |" in shown
    assert r"| &lt;b>\|x | – | 1.00 | ok |" in shown
    assert "\n- a \\*point\\*\n" in shown
    assert f"next:\n\n    {COMMAND}\n" in shown
    assert "To repeat:\n\n    fidelab x\n" in shown
    assert "- b first: not supported: no such format" in shown


def stage(*concurrencies: int, contexts: tuple[int, ...] = (16,)) -> Report:
    """A report of a server whose rate is context × concurrency; one cell is not valid."""
    cells: list[Coordinates] = [
        {"context": context, "concurrency": number} for context in contexts for number in concurrencies
    ]
    metrics = [RATE(float(at["context"]) * float(at["concurrency"]), cell=at, headline=at is cells[0]) for at in cells]
    bench = Measurement(
        status=Status.OK,
        title="Load",
        metrics=tuple(metrics),
        cells=tuple(Cell(status=Status.OK, at=at, valid=at is not cells[-1]) for at in cells),
    )
    return bench_report("one", serving=bench)


def test_the_tables_of_a_profiles_stages_stand_below_its_own() -> None:
    stages: dict[str, Report | Study] = {"load": stage(1, 2, contexts=(16, 32)), "one": stage(1, 2), "other": study()}
    out = io.StringIO()
    render_study(study(), Console(file=out, width=100), stages=stages)
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    matrix = lines.index("load: serving: rate, tok/s (context down, concurrency across; * not valid)")
    assert [line.split() for line in lines[matrix + 1 : matrix + 5 : 1] if "─" not in line] == [
        ["context", "1", "2"],
        ["16", "16.0", "32.0"],
        ["32", "32.0", "64.0*"],
    ]
    single = lines.index("one: serving (context 16; * not valid)")
    assert [line.split() for line in lines[single + 1 : single + 5] if "─" not in line] == [
        ["concurrency", "rate,", "tok/s"],
        ["1", "16.0"],
        ["2", "32.0*"],
    ]
    assert "other: first" in lines
    assert "| concurrency | rate, tok/s |" in study_markdown(study(), stages)
    assert "one: serving (context 16; * not valid)" in study_html(study(), stages)
