"""The HTML file stands alone, and no text from outside becomes markup."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fidelab.core import Status
from fidelab.report.html import draw_chart, render_html, write_html
from fidelab.report.view import Point
from fidelab.results.record import Report, Verdict
from tests.report.sample import HOSTILE, OUTCOMES, arm, broken, candidate, sample_report


class Page(HTMLParser):
    """What a browser would see: tags with attributes, text, and the data block."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.data = ""
        self.feed(render_html(report))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data
        elif "style" not in self.open:
            self.text += data


def hostile_report() -> Report:
    ran = candidate("q8_0", 0.02, "PASS", 1, HOSTILE, name=HOSTILE, engine=HOSTILE, model=HOSTILE)
    return sample_report(
        run_id=HOSTILE,
        command=HOSTILE,
        fidelab_version=HOSTILE,
        settings={HOSTILE: HOSTILE},
        environment={HOSTILE: {HOSTILE: [HOSTILE]}},
        comparability_key={HOSTILE: HOSTILE},
        reference=arm("f32", name=HOSTILE, model=HOSTILE),
        control=arm("bf16", name=HOSTILE, status=Status.FAILED, reason=HOSTILE),
        candidates=(
            ran.model_copy(update={"verdict": Verdict(band="PASS", sentence=HOSTILE, because=(HOSTILE,))}),
            broken("q4_0", Status.FAILED, HOSTILE),
        ),
    )


def test_hostile_text_adds_no_tag() -> None:
    tags = Page(hostile_report()).tags
    assert [attributes for tag, attributes in tags if tag == "script"] == [
        {"type": "application/json", "id": "fidelab-report"}
    ]
    assert "img" not in [tag for tag, _ in tags]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]


def test_hostile_text_is_shown_as_text() -> None:
    assert "<img src=x onerror=alert(2)>" in Page(hostile_report()).text


@pytest.mark.parametrize("report", [sample_report(), hostile_report()], ids=["sample", "hostile"])
def test_the_data_block_is_the_record(report: Report) -> None:
    assert json.loads(Page(report).data) == json.loads(report.to_json())


def test_the_page_is_well_formed() -> None:
    assert Page(sample_report()).open == []


def test_nothing_is_fetched() -> None:
    page = Page(sample_report())
    assert not [tag for tag, attributes in page.tags if {"src", "href", "srcset"} & set(attributes)]
    assert not re.search(r"url\(|@import|https?:", render_html(sample_report()))


@pytest.mark.parametrize("word", OUTCOMES)
def test_every_outcome_is_shown(word: str) -> None:
    assert word in Page(sample_report()).text


def test_the_command_and_the_settings_are_shown() -> None:
    report = sample_report()
    text = Page(report).text
    assert report.command in text
    assert '"n_ctx": 512' in text


def test_an_empty_report_renders() -> None:
    page = Page(sample_report(candidates=(), control=None))
    assert "svg" not in [tag for tag, _ in page.tags]


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    path = write_html(sample_report(), tmp_path / "run" / "report.html")
    assert path.read_text(encoding="utf-8") == render_html(sample_report())


def test_a_tenfold_kl_is_one_step_on_the_axis() -> None:
    chart = draw_chart((Point("a", 100, 0.1, None, "pass"), Point("b", 50, 0.01, None, "pass")))
    assert chart is not None
    grid = chart.y_ticks[0].at - chart.y_ticks[1].at
    assert chart.marks[1].y - chart.marks[0].y == pytest.approx(grid, abs=0.2)


def test_zero_and_intervals_from_zero_stay_in_the_chart() -> None:
    chart = draw_chart((Point("a", 0, 0, (0, 0), "excellent"), Point("b", 9, 1e-7, (-1e-7, 3e-7), "pass")))
    assert chart is not None
    assert [mark.zero for mark in chart.marks] == [False, True]
    assert all(chart.top <= y <= chart.bottom for mark in chart.marks for y in (mark.y, mark.top, mark.bottom))


def test_labels_of_close_points_do_not_overlap() -> None:
    chart = draw_chart(tuple(Point(str(n), 100, 0.01 + n / 1e5, None, "pass") for n in range(6)))
    assert chart is not None
    heights = sorted(mark.label_y for mark in chart.marks)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14
