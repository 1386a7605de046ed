"""The notebook's fragment stays inside its element, and no text from outside becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from fidelab.report.html import render_notebook
from fidelab.results.numbers import one_line, printable
from fidelab.results.record import Report
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import OUTCOMES, sample_report


class Fragment(HTMLParser):
    """What a browser would see: elements with attributes, the root elements, text and style."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.roots: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.style = ""
        self.feed(render_notebook(report))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if not self.open:
            self.roots.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
        else:
            self.text += data


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_adds_no_element_and_no_attribute(text: str) -> None:
    assert Fragment(hostile_report(text)).tags == Fragment(sample_report()).tags


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_is_shown_as_text(text: str) -> None:
    shown = Fragment(hostile_report(text)).text
    assert f"{one_line(text)} · {one_line(text)}" in shown
    assert printable(text) in shown  # the command, on its lines


def test_one_well_formed_element_holds_everything() -> None:
    fragment = Fragment(sample_report())
    assert (fragment.roots, fragment.open) == (["div"], [])
    assert fragment.tags[0] == ("div", {"class": "fidelab-report"})


def test_nothing_runs_and_nothing_is_fetched() -> None:
    fragment = Fragment(sample_report())
    assert not {tag for tag, _ in fragment.tags} & {"script", "link", "iframe", "img", "html", "head", "body", "meta"}
    harmless = {"class", "scope", "tabindex", "role", "aria-label"}
    assert {name for _, attributes in fragment.tags for name in attributes} == harmless
    assert not re.search(r"url\(|@import|https?:|javascript:", render_notebook(sample_report()))


def test_every_style_rule_stays_in_its_element() -> None:
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", Fragment(sample_report()).style)
    selectors = [selector for rule in rules for selector in re.split(r",(?![^(]*\))", rule)]
    assert len(selectors) > 20
    assert [
        selector for selector in selectors if not re.search(r"(^|\s)\.fidelab-report( |\.|$)", selector.strip())
    ] == []


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    style = Fragment(sample_report()).style
    assert "color-scheme: light dark;" in style
    assert "#" not in re.sub(r"light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\)", "", style)


@pytest.mark.parametrize("word", OUTCOMES)
def test_every_outcome_is_shown(word: str) -> None:
    assert word in Fragment(sample_report()).text


def test_sentences_figures_failures_floor_control_and_command_are_shown() -> None:
    report = sample_report()
    text = Fragment(report).text
    assert [arm.name for arm in report.candidates if arm.verdict and arm.verdict.sentence not in text] == []
    for shown in (
        "0.000712",
        "0.00057–0.00085",
        "12 of 8,160 items failed",
        "Run-to-run noise (reference",
        "Control bf16",
        report.command,
    ):
        assert shown in text


def test_an_empty_report_renders() -> None:
    assert "Control: none" in Fragment(sample_report(candidates=(), control=None)).text


def test_notebooks_show_the_fragment() -> None:
    report = sample_report()
    assert report._repr_html_() == render_notebook(report)
