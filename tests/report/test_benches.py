"""Speed, memory and serving stand beside fidelity, arm by arm, and doubts are said in words."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console

from fidelab.core import Status
from fidelab.report.cells import ratio_of
from fidelab.report.html import render_html
from fidelab.report.tables import TextTable
from fidelab.report.text import render_text
from fidelab.report.view import build_view
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag, Measurement
from fidelab.results.numbers import format_amount, format_mib, format_ratio, format_tokens
from fidelab.results.plots import TablePlot
from fidelab.results.record import Report, Timing
from tests.report.sample import HOSTILE, arm, broken, sample_report
from tests.report.sample_benches import (
    ISOLATED,
    MIB,
    RATE,
    bench_report,
    decode,
    hostile_benches,
    load_cell,
    load_shape,
    memory,
    prefill,
    rich_report,
    serving,
    spread,
)

Found = dict[str, Measurement]


def printed(report: Report, width: int = 100) -> str:
    """The report as text."""
    console = Console(file=io.StringIO(), width=width)
    render_text(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def two(first: Found, second: Found) -> Report:
    """Reference and one candidate, with benches and no axes."""
    return sample_report(
        reference=arm("bf16", benches=first), candidates=(arm("k16v8", benches=second),), control=None, floor={}
    )


def rates(*cells: tuple[int, int, float], half: float = 0.02) -> Found:
    """Prefill: (tokens, batch, tok/s); the largest length at the smallest batch stands for it."""
    leading = max((-batch, tokens) for tokens, batch, _ in cells)
    metrics = [
        RATE.repeated(spread(rate, half), cell={"tokens": tokens, "batch": batch}, headline=(-batch, tokens) == leading)
        for tokens, batch, rate in cells
    ]
    return {"prefill": Measurement(status=Status.OK, metrics=tuple(metrics))}


def loads(*cells: tuple[int, int, bool], speed: float = 1.0) -> Found:
    """Serving: (context, requests at once, valid); the last valid load stands for it."""
    valid = [(context, n) for context, n, good in cells if good]
    metrics = [
        metric
        for context, n, _ in cells
        for metric in load_cell(context, n, speed, headline=(context, n) in valid[-1:])
    ]
    outcomes = [Cell(status=Status.OK, at=load_shape(context, n), valid=good) for context, n, good in cells]
    return {"serving": Measurement(status=Status.OK, metrics=tuple(metrics), cells=tuple(outcomes))}


def summary(report: Report) -> dict[str, list[str]]:
    """Column → cells of all arms."""
    found = build_view(report).performance
    assert found is not None
    return {name: [str(row[n]) for row in found.rows] for n, name in enumerate(found.columns)}


def table(report: Report, name: str, number: int = 0) -> list[dict[str, str]]:
    """Rows of a bench's table."""
    section = next(section for section in build_view(report).benches if section.name == name)
    shown = section.tables[number]
    return [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]


def column(report: Report, name: str, head: str) -> Sequence[str]:
    return [row[head] for row in table(report, name)]


def test_amounts_have_three_digits_and_no_more_than_whole_ones_from_a_thousand_on() -> None:
    values = (None, 0, 0.0123, 24.39, 331.6, 999.6, 12345.6)
    assert [format_amount(value) for value in values] == ["–", "0", "0.0123", "24.4", "332", "1,000", "12,346"]


def test_ratios_and_mebibytes_and_lengths_read_as_people_write_them() -> None:
    assert [format_ratio(value) for value in (None, 1.0, 0.987, 12.3)] == ["–", "1.00×", "0.99×", "12.3×"]
    assert format_mib(1536 * MIB) == "1,536"
    assert [format_tokens(n) for n in (0, 100, 1024, 1000, 131072)] == ["0", "100", "1k", "1,000", "128k"]


def test_the_summary_takes_what_stands_for_the_first_arm_and_the_ratio_to_the_reference() -> None:
    report = two(
        rates((128, 1, 500), (2048, 1, 400), (2048, 4, 1600)), rates((128, 1, 600), (2048, 1, 500), (8192, 1, 300))
    )
    assert summary(report) == {"prefill: rate, tok/s, tokens 2048, batch 1": ["400", "500 (1.25×)"]}
    alike = two(rates((128, 1, 500), (512, 1, 500)), {})  # a coordinate that never differs is not told
    assert list(summary(alike)) == ["prefill: rate, tok/s, tokens 512"]


def test_an_arm_without_the_cell_has_no_figure_and_none_to_compare_with() -> None:
    absent = two(rates((128, 1, 500)), {"memory": memory(100)})
    assert summary(absent)["prefill: rate, tok/s"] == ["500", "–"]
    lone = two({"memory": memory(100)}, rates((128, 1, 500)))
    assert summary(lone)["prefill: rate, tok/s"] == ["–", "500"]


def test_bytes_are_mebibytes_where_they_are_many() -> None:
    found = summary(two({"memory": memory(100)}, {"memory": memory(50)}))
    assert found["memory: KV bytes per token"] == ["100", "50 (0.50×)"]
    assert found["memory: peak host, MiB"] == ["621", "621 (1.00×)"]


def test_a_ratio_that_the_repeats_cannot_tell_is_marked() -> None:
    base = RATE.repeated(spread(100, 0.1))
    assert ratio_of(RATE.repeated(spread(150, 0.1)), base) == "1.50×"
    assert ratio_of(RATE.repeated(spread(60, 0.1)), base) == "0.60×"
    near, wide = RATE.repeated(spread(115, 0.1)), RATE.repeated(spread(100, 0.2))
    assert ratio_of(near, base) == ratio_of(near, wide) == "≈ 1.15×"
    assert ratio_of(RATE.repeated([200]), base) == ratio_of(RATE(200), base) == "≈ 2.00×"
    assert ratio_of(None, base) == ratio_of(base, None) == ratio_of(base, RATE(0)) == "–"
    size = Definition("kv", "bytes", "lower", exact=True, name="KV")  # measured once by its nature
    assert ratio_of(size(50), size(100)) == ratio_of(RATE(50), RATE(100)) == "0.50×"


def test_a_reference_that_shares_its_name_is_told_from_the_candidate() -> None:
    report = bench_report("bf16", "bf16", "int8", prefill=prefill())
    assert list(dict.fromkeys(column(report, "prefill", "configuration"))) == ["reference bf16", "bf16", "int8"]
    assert "| `reference bf16` |" in report.to_markdown()
    assert printed(report).count("reference bf16 ") >= 2


def test_every_column_of_the_rich_sample_is_there() -> None:
    assert list(summary(rich_report())) == [
        "startup: total, s, start warm",
        "prefill: rate, tok/s, tokens 8192, batch 1",
        "decode: isolated, tok/s, depth 16384, batch 1",
        "memory: KV bytes per token",
        "memory: peak host, MiB",
        "serving: output rate, tok/s, context 128, concurrency 64",
    ]


def test_an_invalid_cell_is_not_a_figure_of_the_summary_and_has_no_ratio() -> None:
    both = two(loads((128, 1, True), (128, 2, False)), loads((128, 1, False), (128, 2, True), speed=2.0))
    assert summary(both) == {"serving: output rate, tok/s, concurrency 1": ["59.7", "–"]}
    report = two(loads((128, 1, True)), loads((128, 1, False)))
    assert {row.get("× ref.", "–") for row in table(report, "serving")} == {"–"}


def test_time_taken_alone_is_not_a_bench() -> None:
    timed = arm("bf16", timing=Timing(load_seconds=2, seconds=9))
    view = build_view(sample_report(reference=timed, candidates=(), control=None, floor={}))
    assert view.performance is None
    assert view.fidelity
    assert [table.rows for table in view.tables if table.key == "timing"] == [(("bf16", "2.00", "9.00"),)]


def test_a_speed_has_its_spread_its_ratio_and_says_where_it_is_not_steady() -> None:
    first = Measurement(
        status=Status.OK,
        metrics=(
            RATE.repeated(spread(200, 0.1), cell={"tokens": 128, "batch": 1}),
            RATE.repeated(spread(100, 0), cell={"tokens": 512, "batch": 1}),
        ),
    )
    report = two({"prefill": first}, rates((128, 1, 250)))
    assert column(report, "prefill", "rate, tok/s") == ["200 (180–220)", "100 (100–100)", "250 (245–255)"]
    assert column(report, "prefill", "× ref.") == ["–", "–", "1.25×"]
    assert column(report, "prefill", "notes") == ["1", "", ""]
    [section] = build_view(report).benches
    assert section.footnotes == ("1: not steady: the last three repeats of rate differ by 5% or more",)


def test_several_metrics_of_a_cell_stand_beside_each_other() -> None:
    at: Coordinates = {"depth": 64, "batch": 1}
    metrics = (ISOLATED.repeated(spread(50), cell=at), Definition("by_subtraction", "tok/s")(45, cell=at))
    cell = Cell(status=Status.OK, at=at, facts={"n": 32})
    found = {"decode": Measurement(status=Status.OK, metrics=metrics, cells=(cell,))}
    [row] = table(two(found, {}), "decode")
    assert (row["isolated, tok/s"], row["by subtraction, tok/s"], row["n"]) == ("50.0 (49.0–51.0)", "45.0", "32")


def test_equal_doubts_share_a_footnote_and_name_their_arms() -> None:
    first: Coordinates = {"tokens": 64, "batch": 1}
    flags = (Flag(kind="unsteady", text="differs by 8%"),)
    cells = (
        Cell(status=Status.OK, at=first, flags=flags),
        Cell(status=Status.FAILED, reason="out of memory", at={"tokens": 128, "batch": 1}),
    )
    found = {"prefill": Measurement(status=Status.OK, metrics=(RATE(50, cell=first),), cells=cells)}
    report = two(found, found)
    assert column(report, "prefill", "notes") == ["1", "2", "1", "2"]
    [section] = build_view(report).benches
    assert section.footnotes == ("1: differs by 8%", "2: failed: out of memory")
    assert section.doubts == ("bf16, k16v8: differs by 8%", "bf16, k16v8: failed: out of memory")


def test_start_up_tells_cold_from_warm_and_where_the_time_goes() -> None:
    rows = table(bench_report("bf16", "k16v8"), "startup")
    assert [(row["configuration"], row["start"]) for row in rows] == [
        (name, kind) for name in ("bf16", "k16v8") for kind in ("cold", "warm")
    ]
    assert rows[0]["weights, s"] == "2.20 (2.16–2.24)"
    assert rows[2]["× ref."] == f"≈ {format_ratio((2 * 1.1 / 1.1 + 3.2) / (2 * 1.1 + 3.2))}"


def test_a_table_leaves_out_what_nobody_measured() -> None:
    metrics = (
        Definition("kv_bytes_per_token", "bytes", "lower", exact=True, name="KV bytes per token")(100),
        Definition("weights", "bytes", "lower", exact=True)(None),
        Definition("pool", "bytes")(3 * MIB),
        Definition("pool_tokens", "tokens", "higher")(4096),
    )
    [row] = table(two({"memory": Measurement(status=Status.OK, metrics=metrics)}, {}), "memory")
    assert row == {"configuration": "bf16", "KV bytes per token": "100", "pool, MiB": "3.00", "pool tokens": "4,096"}


def test_a_load_shows_latencies_by_median_and_tail_and_whether_it_counts() -> None:
    report = two(loads((4096, 8, False), (4096, 16, True)), {})
    row, valid = table(report, "serving")
    assert (row["concurrency"], row["valid"], valid["valid"]) == ("8", "no", "yes")
    values = {metric.name: metric.value for metric in load_cell(4096, 8)}
    parts = ("p50", "p95", "p99", "mean")
    assert row["TTFT p50/p95/p99/mean, ms"] == "/".join(format_amount(values[f"TTFT {part}"]) for part in parts)
    assert not [head for head in row if head.startswith("TTFT") and head != "TTFT p50/p95/p99/mean, ms"]


def test_what_a_cell_says_besides_metrics_stands_beside_them_as_far_as_it_is_one_word_or_number() -> None:
    facts = {"server": "vllm", "queued": 3, "mean": 7.25, "ok": True, "none": None, "list": [1], "more": {"a": 1}}
    cells = tuple(Cell(status=Status.OK, at=load_shape(128, n), facts=facts if n == 8 else {}) for n in (8, 16))
    metrics = (*load_cell(128, 8), *load_cell(128, 16))
    rows = table(two({"serving": Measurement(status=Status.OK, metrics=metrics, cells=cells)}, {}), "serving")
    assert [row["queued"] for row in rows] == ["3", "–"]
    assert (rows[0]["server"], rows[0]["mean"], rows[0]["ok"]) == ("vllm", "7.25", "yes")
    assert not {"none", "list", "more"} & set(rows[0])


def test_loads_of_another_shape_have_a_table_of_their_own() -> None:
    rows = table(bench_report("bf16", serving=serving()), "serving", 1)
    assert [(row["context"], row["saturation"]) for row in rows] == [("128", "32"), ("32,768", "–")]


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize(
    "report", [rich_report(), bench_report("bf16", "k16v8"), bench_report()], ids=["rich", "two", "one"]
)
def test_no_line_is_wider_than_the_terminal(report: Report, width: int) -> None:
    assert max(cell_len(line.rstrip()) for line in printed(report, width).splitlines()) <= width


def test_a_bench_has_a_sentence_with_its_headline_and_the_ratio_to_the_reference() -> None:
    report = bench_report("bf16", "k16v8")
    lines = build_view(report).headlines
    assert len(lines) == len(report.reference.benches)
    assert all(": bf16 " in line and "; k16v8 " in line for line in lines)
    assert all(line in " ".join(printed(report, 400).split()) for line in lines)


def test_intervals_stand_behind_their_values_where_there_is_room_and_other_columns_below() -> None:
    report = bench_report("bf16", prefill=prefill())
    assert ["2,937 (2,879–2,996)" in printed(report, width) for width in (100, 30)] == [True, False]
    text = printed(bench_report("bf16", "k16v8"), 80)
    assert "left out" not in text
    assert all(word in text for word in ("goodput,", "p50/p95/p99/mean,", "notes"))


def test_an_arm_is_named_once_and_not_at_all_where_it_is_alone() -> None:
    several = printed(bench_report("bf16", "k16v8", decode=decode())).partition("Decode: tokens")[2]
    assert (several.count("bf16"), several.count("k16v8")) == (1, 1)
    assert "bf16" not in printed(bench_report("bf16", decode=decode())).partition("Decode: tokens")[2]


def test_speed_and_memory_of_an_arm_stand_in_one_row() -> None:
    lines = printed(rich_report()).splitlines()
    heads = next(n for n, line in enumerate(lines) if "prefill:" in line)
    row = next(line for line in lines[heads:] if "fp8_e4m3" in line)
    assert all(part in row for part in ("1,661", "19.5", "26,852"))


def test_benches_without_axes_have_no_verdicts_and_a_title_that_says_what_was_measured() -> None:
    report = bench_report("bf16", "k16v8", prefill=prefill(), memory=memory(100))
    text = printed(report)
    assert text.startswith("Prefill and memory · SmolLM2-135M-Instruct · Transformers · reference bf16")
    for word in ("verdict", "KLD", "floor", "control", "trajectory"):
        assert word not in text
    assert build_view(bench_report()).facts == ()


def test_arms_that_failed_and_what_concerns_all_metrics_of_a_bench_are_said_without_verdicts_too() -> None:
    lost = {"candidates": (broken("q8_0", Status.FAILED, "out of memory"),)}
    report = bench_report("bf16", prefill=prefill()).model_copy(update=lost)
    assert "q8_0: failed: out of memory" in printed(report)
    found = prefill().model_copy(update={"flags": (Flag(kind="cache", text="what should be cold was not"),)})
    assert "bf16: what should be cold was not" in printed(two({"prefill": found}, {}))


def test_a_bench_that_failed_is_said_once_for_all_arms() -> None:
    failed = Measurement(status=Status.NOT_SUPPORTED, reason="this engine answers no Timed probes")
    assert build_view(two({"prefill": failed}, {"prefill": failed})).failures == (
        "bf16, k16v8: prefill not supported: this engine answers no Timed probes",
    )


def test_hostile_text_is_literal_and_on_one_line() -> None:
    text = printed(hostile_benches(), 100)
    assert "[bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def matrix(report: Report, name: str, figure: str) -> TextTable:
    """The matrix of a bench's figure."""
    section = next(section for section in build_view(report).benches if section.name == name)
    return next(shown for shown in section.matrices if shown.title.startswith(f"{name}: {figure}"))


def test_a_sweep_has_a_matrix_of_contexts_by_concurrency_for_each_leading_figure() -> None:
    report = bench_report("bf16", serving=serving())
    [section] = build_view(report).benches
    assert [shown.title.partition(" (")[0] for shown in section.matrices] == [
        "serving: output rate, tok/s",
        *(f"serving: {name} p50, ms" for name in ("TTFT", "TPOT", "ITL", "E2E")),
    ]
    shown = matrix(report, "serving", "output rate")
    assert shown.columns == ("configuration", "context", "1", "2", "4", "8", "16", "32", "64")
    assert shown.rows[0] == ("bf16", "128", "59.7", "112", "199", "326", "478", "623", "735")
    assert "(context down, concurrency across; output 128, arrival closed" in shown.title


def test_a_decode_over_depths_and_batches_has_a_row_per_depth_of_each_arm() -> None:
    shown = matrix(bench_report("bf16", "k16v8"), "decode", "isolated, tok/s")
    assert shown.columns == ("configuration", "depth", "1", "4")
    assert shown.rows[:2] == (("bf16", "0", "42.0", "168"), ("bf16", "1,024", "37.7", "151"))
    assert [row[0] for row in shown.rows] == ["bf16"] * 5 + ["k16v8"] * 5


def test_a_matrix_marks_invalid_cells_and_names_failed_and_missing_ones() -> None:
    assert matrix(bench_report("bf16", serving=serving()), "serving", "output rate").rows[-1][-1] == "353*"
    assert matrix(bench_report("bf16"), "decode", "isolated").rows[-1] == ("bf16", "65,536", "failed", "–")
    titles = [matrix(bench_report("bf16"), name, "").title for name in ("serving", "decode")]
    assert ["* not valid" in title for title in titles] == [True, False]


@pytest.mark.parametrize(
    "cells", [((128, 1), (512, 1), (2048, 1)), ((128, 1), (512, 2)), ((128, 1),)], ids=["line", "diagonal", "one"]
)
def test_one_coordinate_with_several_values_makes_no_matrix(cells: tuple[tuple[int, int], ...]) -> None:
    report = two(rates(*((n, batch, 100.0) for n, batch in cells)), {})
    assert [section.matrices for section in build_view(report).benches] == [()]


@pytest.mark.parametrize("width", [40, 80])
def test_a_matrix_wider_than_the_terminal_goes_on_below_after_the_same_names(width: int) -> None:
    text = printed(bench_report("bf16", serving=serving()), width).partition("serving: output rate, tok/s (")[2]
    shown = text.partition("serving: TTFT p50")[0]
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    assert {"59.7", "112", "735", "28.7", "353*"} <= set(shown.split())


def test_the_page_has_the_matrices_above_the_cells() -> None:
    page = render_html(bench_report("bf16", serving=serving()))
    assert page.index("<h4>serving: output rate, tok/s (context down") < page.index(
        '<caption class="unseen">Serving: load'
    )


def test_markdown_prints_all_cells_of_a_bench() -> None:
    text = bench_report("bf16", serving=serving(), decode=decode(1.0, (1, 4))).to_markdown()
    assert "| 128 | 59.7 | 112 | 199 | 326 | 478 | 623 | 735 |" in text
    assert "| 16,384 | 14.9 | 59.6 |" in text
    assert text.count("\n| 4,096 | ") == 5 + 7 + 1 + 2  # matrices and cells of the sweep, then of the decode
    assert "- 1: 64 requests at once were asked, 11.2 were in flight" in text


def test_markdown_prints_tables_of_words_of_a_bench() -> None:
    words = TablePlot(
        title="Failed questions",
        columns=("question", "fault", "answered"),
        rows=(("sql-1", "no rows", "SELECT | FROM"), ("json-2", "", None)),
    )
    found = {"eval": Measurement(status=Status.OK, metrics=(RATE(1),), plots=(words,))}
    alone = bench_report("bf16", **found).to_markdown()
    assert "\nFailed questions:\n\n| question | fault | answered |\n| :-- | :-- | :-- |\n" in alone
    assert "| `sql-1` | no rows | SELECT \\| FROM |\n| `json-2` | – | – |" in alone
    assert "\nbf16: Failed questions:\n" in two(found, {}).to_markdown()


def test_markdown_has_the_summary_and_names_no_server() -> None:
    text = bench_report("bf16", "k16v8").to_markdown()
    assert "| 1,395 (1.10×) | 16.4 (1.10×) |" in text
    assert "- 1: the last three repeats differ by 8%" in text
    assert "127.0.0.1" not in text
    assert "KLD" not in text


def test_markdown_of_hostile_benches_keeps_its_table_and_adds_no_markup() -> None:
    text = hostile_benches().to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 + 6  # two arms with one figure, then two cells of each arm
    assert "\n<" not in text
    assert HOSTILE not in text
