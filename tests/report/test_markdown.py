"""The model card's section: no text from outside becomes markup, whatever reads it."""

from __future__ import annotations

import functools
import io
import re
from itertools import chain

import markdown  # type: ignore[import-untyped]
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console

from fidelab.core import Status
from fidelab.report.cells import estimate_of
from fidelab.report.markdown import render_markdown
from fidelab.report.text import render_text
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.numbers import MIB, one_line
from fidelab.results.record import Report
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import arm, candidate, kld_axis, sample_report, trajectory_axis
from tests.report.sample_benches import rich_report

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


def printed(report: Report, width: int) -> str:
    """The details in a terminal."""
    file = io.StringIO()
    render_text(report, Console(file=file, width=width), details=True)
    return file.getvalue()


def kinds(seen: list[Token]) -> set[str]:
    return {re.sub(r"_(open|close)$", "", token.type) for token in seen}


def tables(report: Report) -> list[list[list[str]]]:
    """Tables by the letter: lines cut at pipes that no backslash precedes."""
    blocks = [block for block in render_markdown(report).split("\n\n") if block.startswith("| ")]
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
    table, _, others, *whole = shown = tables(report)
    assert [len(cells) for cells in table] == [COLUMNS] * (2 + len(report.candidates))
    assert [len(cells) for cells in others] == [len(others[0])] * (2 + 2 + 4)  # reference, control, measured arms
    assert len(whole) == 4  # an axis each
    assert all(len(cells) == len(one[0]) for one in shown for cells in one)
    # read in two ways by readers
    assert not re.search(r"\\\\\|", "\n".join("|".join(row) for one in shown for row in one))
    cells = sum(len(row) for one in shown for row in (one[0], *one[2:]))
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


def metrics_of(report: Report) -> set[tuple[str, str]]:
    """Name and value of each metric, as tables show them; percentiles of one stem share a column."""
    arms = (report.reference, *([report.control] if report.control else []), *report.candidates)
    measured = [one for record in arms for one in (*record.axes.values(), *record.benches.values())]
    shown = [metric for one in measured for metric in one.metrics if metric.value is not None]
    return {(m.name, estimate_of(m, mib=m.unit == "bytes" and (m.value or 0) >= MIB).value) for m in shown}


@pytest.mark.parametrize("width", [0, 80, 200])
def test_each_metric_of_a_record_occurs_in_markdown_and_details(width: int) -> None:
    report = rich_report()
    text = printed(report, width) if width else render_markdown(report)
    flat = re.sub(r"\\|&lt;", lambda found: "<" if found[0] == "&lt;" else "", text)
    values = set(re.split(r"[\s|/()*]+", flat))
    for name, value in metrics_of(report):
        assert value in values or value in flat, (name, value)
        stem = re.sub(r" (mean|p\d+)$", "", name)
        assert all(word in flat for word in stem.split()), name


def test_a_table_of_many_figures_has_a_row_for_each_of_them() -> None:
    blocks = render_markdown(sample_report()).split("\n\n")
    figures = blocks[blocks.index("KL divergence from the reference:") + 1].split("\n")
    assert figures[0].startswith("| figure | control bf16 | k16v8 | fp8_e4m3 | int4")
    assert figures[0].endswith(" | f16/f16 | run-to-run noise |")
    assert "| p95, nats | 0.000120 | 0.00285 | 0.125 | 0.604 | 0 | 0 |" in figures


def test_perplexity_stands_at_each_of_its_contexts() -> None:
    ppl = Definition("ppl", "", "lower", name="PPL")
    measured = Measurement(
        status=Status.OK,
        title="Perplexity",
        metrics=tuple(ppl(value, cell={"context": n}) for n, value in ((64, 31.5), (128, 24.7))),
    )
    report = sample_report(candidates=(arm("q4", axes={"kld": kld_axis(0.02, 0.001), "perplexity": measured}),))
    assert "| `q4` | 64 | 31.5 |\n| `q4` | 128 | 24.7 |" in render_markdown(report)
    details = [line.split() for line in printed(report, 80).splitlines()]
    assert ["q4", "64", "31.5"] in details
    assert ["128", "24.7"] in details  # the name is that of the row above


@pytest.mark.parametrize("title", ["1. one", "12) twelve", "> quote", "# head", "- item", "+ item"])
def test_a_title_begins_no_list_quote_or_heading(title: str) -> None:
    measured = Measurement(status=Status.OK, title=f"{title} kld", metrics=(Definition("n", "count")(1),))
    report = sample_report(candidates=(arm("q4", axes={title: measured}),), control=None, floor={})
    found = [token for token in tokens(report) if token.type == "inline" and "kld" in token.content]
    assert any(token.content.replace("\\", "").startswith(title) for token in found)
    assert kinds(tokens(report)) <= MARKUP


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
