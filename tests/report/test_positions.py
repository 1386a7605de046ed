"""Tails and worst positions agree with counting by hand; a file that does not fit is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from fidelab.core.errors import InputError
from fidelab.report.html import render_html, write_html
from fidelab.report.plots import tail
from fidelab.report.positions import EDGES, N_WORST, Worst, read_positions
from fidelab.report.scales import Scale
from fidelab.report.sections import arms_of
from fidelab.results.record import Report
from tests.report.sample import positions_for, sample_report, write_positions
from tests.report.test_charts import ends, parts, path_of, points_of

N = 500


def columns(n: int = N, seed: int = 0, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    kl = rng.lognormal(-6, 3, n)
    kl[::7] = np.nan
    kl[1::9] = 0.0
    found = {
        "window": np.arange(n, dtype=np.int32) // 50,
        "position": np.arange(n, dtype=np.int32) % 50,
        "kl": kl,
        "top1_agrees": rng.random(n) < 0.5,
        "reference_confidence": rng.random(n),
    }
    return {**found, **changes}


def by_hand(table: dict[str, Any]) -> list[Worst]:
    rows = zip(
        *(table[name] for name in ("kl", "window", "position", "reference_confidence", "top1_agrees")), strict=True
    )
    return sorted((Worst(*row) for row in rows if row[0] > 0), reverse=True)[:N_WORST]


def test_the_tail_counts_the_positions_above_each_threshold(tmp_path: Path) -> None:
    table = columns(kl=np.concatenate([EDGES[10:20], columns(N - 10)["kl"]]))
    found = read_positions(write_positions(tmp_path, {"a": table}), {"a": N})["a"]
    usable = [value for value in table["kl"] if value == value]
    assert found.tail().tolist() == [sum(value > edge for value in usable) / len(usable) for edge in EDGES]


def test_the_worst_are_the_largest_in_order(tmp_path: Path) -> None:
    tables = {"a": columns(seed=1), "b": columns(seed=2), "few": columns(4, seed=3)}
    found = read_positions(write_positions(tmp_path, tables), dict.fromkeys(tables))
    assert {name: arm.worst for name, arm in found.items()} == {name: by_hand(table) for name, table in tables.items()}


def test_of_several_contexts_the_named_one_counts(tmp_path: Path) -> None:
    short, long = columns(seed=1), columns(40, seed=2)
    contexts = {"n_ctx": np.repeat(np.array([512, 2048], dtype=np.int32), [N, 40])}
    both = {name: np.concatenate([short[name], long[name]]) for name in short} | contexts
    path = write_positions(tmp_path, {"a": both})
    assert read_positions(path, {"a": 40}, {"a": 2048})["a"].worst == by_hand(long)
    assert read_positions(path, {"a": N}, {"a": 512})["a"].worst == by_hand(short)
    with pytest.raises(InputError, match="belongs to another run"):
        read_positions(path, {"a": 40}, {"a": 512})


def test_row_groups_and_arms_may_be_mixed(tmp_path: Path) -> None:
    tables = {"a": columns(seed=1), "b": columns(seed=2)}
    path = write_positions(tmp_path, tables)
    whole = read_positions(path, {"a": N, "b": N})
    rows = pyarrow.parquet.read_table(path)
    mixed = rows.take(np.random.default_rng(0).permutation(len(rows)))
    pyarrow.parquet.write_table(mixed, path, row_group_size=77)
    again = read_positions(path, {"a": N, "b": N})
    for name in tables:
        assert again[name].worst == whole[name].worst
        assert again[name].tail().tolist() == whole[name].tail().tolist()


def test_a_candidate_that_is_the_control_too_counts_once(tmp_path: Path) -> None:
    once = read_positions(write_positions(tmp_path, {"a": columns()}), {"a": N})["a"]
    rows = pyarrow.parquet.read_table(tmp_path / "positions.parquet")
    pyarrow.parquet.write_table(pyarrow.concat_tables([rows, rows]), tmp_path / "positions.parquet", row_group_size=N)
    twice = read_positions(tmp_path / "positions.parquet", {"a": N})["a"]
    assert (twice.worst, twice.tail().tolist()) == (once.worst, once.tail().tolist())


def test_positions_without_a_cost_are_not_the_worst(tmp_path: Path) -> None:
    path = write_positions(tmp_path, {"a": columns(kl=np.zeros(N))})
    assert read_positions(path, {"a": N})["a"].worst == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "no positions.parquet"),
        (lambda path: path.write_bytes(b"PAR1 no"), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-300]), "cannot be read"),
        (lambda path: write_positions(path.parent, {"b": columns()}), "another run"),
        (lambda path: write_positions(path.parent, {"a": columns(N - 1)}), "another run"),
        (lambda path: write_positions(path.parent, {"a": {"kl": columns()["kl"]}}), "it lacks position, reference"),
        (lambda path: write_positions(path.parent, {"a": columns(kl=np.array(["x"] * N))}), "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, spoil: Any, words: str) -> None:
    path = write_positions(tmp_path, {"a": columns()})
    spoil(path)
    with pytest.raises(InputError, match=words) as caught:
        read_positions(path, {"a": N})
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_the_page_is_made_without_the_file_and_names_the_remedy(tmp_path: Path) -> None:
    text = write_html(sample_report(), tmp_path / "report.html").read_text("utf-8")
    assert "fidelab report --rescore RUN_DIR" in text
    assert "How often a position costs more" not in text


def test_the_page_reads_the_file_beside_it(tmp_path: Path) -> None:
    report = sample_report()
    tables = positions_for(report)
    write_positions(tmp_path, tables)
    text = write_html(report, tmp_path / "report.html").read_text("utf-8")
    assert "fidelab report --rescore" not in text
    assert "How often a position costs more" in text
    assert f"<td>{by_hand(tables['k16v8'])[9].position}</td>" in text


def test_a_report_without_kl_misses_nothing() -> None:
    assert "fidelab report --rescore" not in render_html(sample_report(candidates=(), control=None))


def test_the_tail_is_drawn_from_where_all_lines_are_high_to_the_worst_position(tmp_path: Path) -> None:
    report: Report = sample_report()
    arms = [arm for arm, record in arms_of(report) if record.name in ("k16v8", "fp8_e4m3")]
    found = read_positions(write_positions(tmp_path, positions_for(report)), {arm.name: 8160 for arm in arms})
    plot = tail(arms, {arm.id: found[arm.name] for arm in arms})
    assert plot is not None
    assert [arm for _, arm, _ in plot.legend] == [arm.id for arm in arms]
    shares = {arm.id: found[arm.name].tail() for arm in arms}
    first = int((shares["candidate0"] >= 0.9).sum()) - 1
    last = int((shares["candidate1"] > 0).sum()) - 1
    left, right, top, bottom = ends(plot.charts[0])
    x, y = Scale(EDGES[first], EDGES[last], left, right, log=True), Scale(1 / 8160, 1, bottom, top, log=True)
    for stroke in parts(plot.charts[0], "g", "stroke"):
        share = shares[stroke.get("data-arm", "")]
        expected = [(x(EDGES[n]), y(share[n])) for n in range(first, last + 1) if share[n] > 0]
        assert points_of(path_of(stroke)) == expected
