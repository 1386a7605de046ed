"""The leaderboard in a browser: filters, sorting, ties."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.report.leaderboard import render_leaderboard_html
from fidelab.results.leaderboard import rank
from fidelab.results.record import Report
from tests.browser.conftest import Open, Visit
from tests.ledger.test_leaderboard import arm, report

pytestmark = pytest.mark.browser

SHOWN = """() => [...document.querySelectorAll(".board tbody tr")].filter((row) => row.checkVisibility())
  .map((row) => row.cells[0].textContent)"""


def boards() -> list[Report]:
    """Two tables: three arms of which two are tied on two engines, and one arm at another context."""
    near, far = (0.002, (0.001, 0.004)), (0.5, (0.4, 0.6))
    return [
        report("r", arm("a", near), arm("b", (0.003, (0.002, 0.005)), engine="vllm"), arm("c", far, model="big")),
        report("s", arm("d", near), kld={"items": "a", "settings": {"n_ctx": 2048}}),
    ]


@pytest.fixture
def board(tmp_path: Path, open_page: Open) -> Visit:
    file = tmp_path / "leaderboard.html"
    file.write_text(render_leaderboard_html(rank(boards())), "utf-8")
    return open_page(file)


def test_filters_narrow_rows_hide_empty_tables_and_say_how_many_are_left(board: Visit) -> None:
    assert board(SHOWN) == ["a", "b", "c", "d"]
    board.page.get_by_label("engine").select_option("vllm")
    assert board(SHOWN) == ["b"]
    assert board.page.locator("#shown").text_content() == "1 of 4 arms shown"
    assert board.page.locator("section:has(.board):visible").count() == 1
    board.page.get_by_label("engine").select_option("")
    board.page.get_by_label("containing").fill("BIG c")
    assert board(SHOWN) == ["c"]
    board.page.get_by_label("model").select_option("m")
    assert board(SHOWN) == []
    board.page.get_by_label("model").select_option("")
    board.page.get_by_label("containing").fill("")
    assert board(SHOWN) == ["a", "b", "c", "d"]
    assert board.page.locator("#shown").text_content() == ""
    assert board.faults == []


def test_a_heading_sorts_its_own_table_down_up_and_back(board: Visit) -> None:
    heading = board.page.locator(".board").first.get_by_role("button", name="kld: mean, nats")
    for order in ("abc", "cba", "abc"):
        heading.click()
        assert board(SHOWN) == [*order, "d"]
    assert board.faults == []


def test_ties_are_ranges_that_say_with_how_many(board: Visit) -> None:
    ranks = board("() => [...document.querySelectorAll('.board tbody tr')].map((row) => row.cells[1].textContent)")
    assert ranks == ["1–2tied with 1", "1–2tied with 1", "3", "1"]


def test_each_table_says_in_what_it_differs(board: Visit) -> None:
    assert board.page.locator(".own").all_text_contents() == ["kld.settings.n_ctx 512", "kld.settings.n_ctx 2048"]
