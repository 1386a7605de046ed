"""The model card's section: no text from outside becomes markup, whatever reads it."""

from __future__ import annotations

import functools
import re
from itertools import chain

import markdown  # type: ignore[import-untyped]
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fidelab.report.markdown import render_markdown
from fidelab.results.numbers import one_line
from fidelab.results.record import Report
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import arm, candidate, kld_axis, sample_report, trajectory_axis

COLUMNS = 7
MARKUP = {"paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list", "list_item", "inline"} | {
    "code_block",
    "text",
    "code_inline",
}


TEXT_TAGS = {"p", "ul", "ol", "li", "code", "pre", "strong", "em", "h1", "h2", "h3", "hr", "blockquote"}
TAGS = TEXT_TAGS | {"table", "thead", "tbody", "tr", "th", "td"}


@functools.cache
def hostile(text: str) -> Report:
    return hostile_report(text)


@functools.cache
def read(text: str) -> list[Token]:
    return tokens(hostile(text))


def tokens(report: Report) -> list[Token]:
    """What a CommonMark reader with tables, strikethrough and HTML sees; inline tokens follow their block."""
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    return list(
        chain.from_iterable((token, *(token.children or ())) for token in reader.parse(render_markdown(report)))
    )


def kinds(seen: list[Token]) -> set[str]:
    return {re.sub(r"_(open|close)$", "", token.type) for token in seen}


def tables(report: Report) -> list[list[list[str]]]:
    """Tables by the letter: lines cut at pipes that no backslash precedes."""
    blocks = [
        block for block in render_markdown(report).split("\n\n") if block.startswith(("| KV cache", "| configuration"))
    ]
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in table.split("\n")] for table in blocks]


def rows(report: Report) -> list[list[str]]:
    """The main table."""
    return tables(report)[0]


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_text_adds_no_markup(text: str) -> None:
    assert kinds(read(text)) <= MARKUP


@pytest.mark.parametrize("text", [*TEXTS, "<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"])
def test_hostile_text_adds_no_tag_in_python_markdown(text: str) -> None:
    page = markdown.markdown(render_markdown(hostile(text)), extensions=["tables"])
    assert {*re.findall(r"</?([a-zA-Z][\w-]*)", page)} <= TAGS


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_names_neither_add_nor_end_a_cell(text: str) -> None:
    report = hostile(text)
    table, others = tables(report)
    assert [len(cells) for cells in table] == [COLUMNS] * (2 + len(report.candidates))
    assert [len(cells) for cells in others] == [len(others[0])] * (2 + 2 + 4)  # reference, control, what was measured
    assert not re.search(
        r"\\\\\|", "\n".join("|".join(row) for row in (*table, *others))
    )  # read in two ways by readers
    cells = sum(len(row) for shown in (table, others) for row in (shown[0], *shown[2:]))
    assert sum(token.type in ("th_open", "td_open") for token in read(text)) == cells


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_names_are_shown_as_they_are(text: str) -> None:
    report = hostile(text)
    names = [one_line(arm.name).replace("\\|", "\\ |") for arm in (report.reference, *report.candidates)]
    assert set(names) <= {token.content.strip() for token in read(text) if token.type == "code_inline"}


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_sentences_are_shown_as_they_are(text: str) -> None:
    report = hostile(text)
    lines = ["".join(child.content for child in token.children or ()) for token in read(text) if token.children]
    arm = report.candidates[-1]
    assert not arm.measured
    said = f"{one_line(arm.name)}: {one_line(text)}".replace("\\|", "\\ |")
    assert any(line.replace("\\|", "\\ |").endswith(said) for line in lines)


@pytest.mark.parametrize("text", TEXTS)
def test_addresses_stand_only_where_no_reader_makes_links_of_them(text: str) -> None:
    plain = [token.content for token in read(text) if token.type == "text"]
    assert not re.search(r"://|www\.|@", "\n".join(plain))


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_is_one_block_whatever_it_holds(text: str) -> None:
    [block] = [token.content for token in read(text) if token.type == "code_block"]
    shown = "".join(char if char == "\n" or char.isprintable() else "\ufffd" for char in text.replace("\r\n", "\n"))
    assert block.rstrip("\n") == shown.rstrip("\n")


def test_the_section_has_no_heading_and_no_html() -> None:
    assert kinds(tokens(sample_report())) == MARKUP


def test_a_row_holds_the_figures_of_its_arm() -> None:
    axes = {"kld": kld_axis(0.0312, 0.00624, control=0.00003), "trajectory": trajectory_axis(70.3, 12.1)}
    [_, _, row] = rows(sample_report(candidates=(candidate("q8_0", 0.0312, "PASS", 23040, "safe", axes=axes),)))
    cells = ["pass", "0.0312", "0.025–0.037", "97.0%", "0.76%", "−50%"]
    assert [cell.strip() for cell in row[1:]] == cells


def test_one_sentence_says_what_was_compared() -> None:
    axes = {"kld": {"windows": 32, "n_ctx": 512, "protocol": "half"}, "trajectory": {"limit": None, "n_predict": 64}}
    opening = render_markdown(sample_report(settings={"text": "default", "axes": axes})).split("\n\n")[0]
    assert opening == (
        "7 configurations of `SmolLM2-135M-Instruct` on Transformers, compared with the reference `f32`: "
        "text `default`; KLD over 32 windows of 512 tokens (protocol `half`), 8,160 positions "
        "(32 windows, 31 documents); "
        "`trajectory`: 10 items, n_predict 64, template `chat`."
    )


@pytest.mark.parametrize(
    ("n_ctx", "said"),
    [
        ([512, 2048, 8192], "32 windows of 512 tokens and fewer of 2,048 and 8,192,"),
        (None, "32 windows of the shortest context,"),
    ],
)
def test_windows_are_those_of_the_shortest_context(n_ctx: object, said: str) -> None:
    axes = {"kld": {"windows": 32, "n_ctx": n_ctx}, "trajectory": {"n_predict": 64}}
    assert said in render_markdown(sample_report(settings={"axes": axes})).split("\n\n")[0]


def test_absolute_paths_are_shown_by_their_last_part() -> None:
    report = sample_report(
        reference=arm("f32", model="/home/somebody/m.gguf"), settings={"text": "/home/somebody/t.txt"}
    )
    opening = render_markdown(report).split("\n\n")[0]
    assert opening == "7 configurations of `m.gguf` on Transformers, compared with the reference `f32`: text `t.txt`."


@pytest.mark.parametrize("settings", [{}, {"axes": ["kld"]}, {"axes": {"kld": {}, "trajectory": {"limit": [1]}}}])
def test_settings_of_another_form_do_not_matter(settings: dict[str, object]) -> None:
    assert "compared with the reference `f32`" in render_markdown(sample_report(settings=settings))


def test_failures_floor_control_and_version_are_told() -> None:
    text = render_markdown(sample_report())
    for told in (
        "12 of 8,160 items failed",
        "- Control bf16",
        "- Run-to-run noise (reference",
        "fidelab 0.1.0 on 2026-05-04",
    ):
        assert told in text


def test_the_report_writes_its_section() -> None:
    report = sample_report()
    assert report.to_markdown() == render_markdown(report)
