"""Speed, memory and serving stand beside fidelity, arm by arm, and doubts are said in words."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from fidelab.core import Status
from fidelab.report.bench_charts import bench_plots
from fidelab.report.bench_tables import ratio_of
from fidelab.report.benches import performance_of
from fidelab.report.text import render_text
from fidelab.report.view import build_view
from fidelab.results.axis_record import Axes
from fidelab.results.bench_record import Benches, Decode, Memory, Prefill, SpeedCell, Timing
from fidelab.results.bench_values import Flag, Spread
from fidelab.results.numbers import format_amount, format_mib, format_ratio, format_tokens
from fidelab.results.record import Report
from fidelab.results.serving_record import Saturation, Server
from tests.report.sample import HOSTILE, arm, broken, sample_report
from tests.report.sample_benches import (
    MIB,
    bench_report,
    hostile_benches,
    load_cell,
    memory,
    prefill,
    rich_report,
    serving,
    spread,
)


def printed(report: Report, width: int = 100) -> str:
    """The report as text."""
    console = Console(file=io.StringIO(), width=width)
    render_text(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def two(first: Benches, second: Benches) -> Report:
    """Reference and one candidate, with benches and no axes."""
    return sample_report(
        reference=arm("bf16", benches=first), candidates=(arm("k16v8", benches=second),), control=None, floor=Axes()
    )


def only(**benches: object) -> Benches:
    """Such benches."""
    return Benches.model_validate(benches)


def rates(*cells: tuple[int, int, float]) -> Prefill:
    """(tokens, batch, tok/s)."""
    found = [SpeedCell(status=Status.OK, tokens=n, batch=batch, rate=spread(rate)) for n, batch, rate in cells]
    return Prefill(status=Status.OK, cells=tuple(found))


def summary(report: Report) -> dict[str, list[str]]:
    """Column → cells of all arms."""
    found = build_view(report).performance
    assert found is not None
    return {name: [str(row[n]) for row in found.rows] for n, name in enumerate(found.columns)}


def table(report: Report, key: str) -> list[dict[str, str]]:
    """Rows of a bench's first table."""
    found = build_view(report).performance
    assert found is not None
    shown = next(bench for bench in found.benches if bench.key == key).tables[0]
    return [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]


# ------------------------------------------------------------------------------------------------------ numbers


def test_amounts_have_three_digits_and_no_more_than_whole_ones_from_a_thousand_on() -> None:
    values = (None, 0, 0.0123, 24.39, 331.6, 999.6, 12345.6)
    assert [format_amount(value) for value in values] == ["–", "0", "0.0123", "24.4", "332", "1,000", "12,346"]


def test_ratios_and_mebibytes_and_lengths_read_as_people_write_them() -> None:
    assert [format_ratio(value) for value in (None, 1.0, 0.987, 12.3)] == ["–", "1.00×", "0.99×", "12.3×"]
    assert format_mib(1536 * MIB) == "1,536"
    assert [format_tokens(n) for n in (0, 100, 1024, 1000, 131072)] == ["0", "100", "1k", "1,000", "128k"]


# -------------------------------------------------------------------------------------------------- the summary


def test_the_summary_takes_the_largest_length_at_the_smallest_batch_and_the_ratio_to_the_reference() -> None:
    report = two(
        only(prefill=rates((128, 1, 500), (2048, 1, 400), (2048, 4, 1600))),
        only(prefill=rates((128, 1, 600), (2048, 1, 500), (8192, 1, 300))),
    )
    assert summary(report) == {"prefill tok/s, 2k tokens": ["400", "500 (1.25×)"]}


def test_an_arm_without_the_cell_has_no_figure_and_none_to_compare_with() -> None:
    absent = two(only(prefill=rates((128, 1, 500))), only(memory=memory(100)))
    assert summary(absent)["prefill tok/s, 128 tokens"] == ["500", "–"]
    lone = two(only(memory=memory(100)), only(prefill=rates((128, 1, 500))))
    assert summary(lone)["prefill tok/s, 128 tokens"] == ["–", "500"]


def test_peaks_are_of_the_device_only_where_all_arms_have_one() -> None:
    both = two(only(memory=memory(100, device=True)), only(memory=memory(50, device=True)))
    mixed = two(only(memory=memory(100, device=True)), only(memory=memory(50)))
    assert "peak MiB, device" in summary(both)
    assert "peak MiB, host" in summary(mixed)
    assert summary(both)["KV bytes per token"] == ["100", "50 (0.50×)"]


def test_a_ratio_that_the_repeats_cannot_tell_is_marked() -> None:
    base = spread(100, 0.1)
    assert ratio_of(spread(150, 0.1), base) == "1.50×"
    assert ratio_of(spread(60, 0.1), base) == "0.60×"
    assert ratio_of(spread(115, 0.1), base) == ratio_of(spread(115, 0.1), spread(100, 0.2)) == "≈ 1.15×"
    single = Spread(median=200, low=200, high=200, repeats=(200,))
    assert ratio_of(single, base) == "≈ 2.00×"
    assert ratio_of(None, base) == ratio_of(base, None) == ratio_of(base, spread(0)) == "–"


def test_a_reference_that_shares_its_name_is_told_from_the_candidate() -> None:
    report = bench_report("bf16", "bf16", "int8", prefill=prefill())
    assert list(dict.fromkeys(row["arm"] for row in table(report, "prefill"))) == ["reference bf16", "bf16", "int8"]
    assert "| `reference bf16` |" in report.to_markdown()
    assert printed(report).count("reference bf16 ") >= 2
    assert bench_plots(report)["prefill"][0].legend[0][0] == "reference bf16"


def test_every_column_of_the_rich_sample_is_there() -> None:
    assert list(summary(rich_report())) == [
        *("prefill tok/s, 8k tokens", "decode tok/s, depth 16k", "KV bytes per token", "start-up s, warm"),
        *("peak MiB, host", "served tok/s, 64 at once, context 128"),
    ]


def test_an_invalid_cell_is_no_figure_of_the_summary() -> None:
    cells = (load_cell(128, 1), load_cell(128, 2, valid=False))
    report = two(only(serving=serving().model_copy(update={"cells": cells})), only(serving=serving(2.0)))
    assert list(summary(report)) == ["served tok/s, 1 at once, context 128"]


def test_time_taken_alone_is_no_bench() -> None:
    arms = [("reference", arm("bf16", benches=Benches(timing=Timing(load_seconds=2, seconds=9))))]
    assert performance_of(arms) is None
    view = build_view(sample_report(reference=arms[0][1], candidates=(), control=None, floor=Axes()))
    assert view.fidelity
    assert [table.rows for table in view.tables if table.key == "timing"] == [(("bf16", "2.00", "9.00"),)]


# -------------------------------------------------------------------------------------------------- per bench


def test_a_speed_has_its_spread_its_ratio_and_says_whether_it_is_steady() -> None:
    cells = (
        SpeedCell(status=Status.OK, tokens=128, rate=spread(200, 0.1, steady=False)),
        SpeedCell(status=Status.OK, tokens=512, rate=spread(100, 0)),
    )
    first, second = only(prefill=Prefill(status=Status.OK, cells=cells)), only(prefill=rates((128, 1, 250)))
    rows = table(two(first, second), "prefill")
    assert [row["tok/s"] for row in rows] == ["200", "100", "250"]
    assert [row["low–high"] for row in rows] == ["180–220", "100–100", "240–260"]
    assert [row["steady"] for row in rows] == ["not steady", "steady", "steady"]
    assert [row["× ref."] for row in rows] == ["–", "–", "1.25×"]


def test_subtraction_stands_beside_the_isolated_rate_and_is_labelled() -> None:
    cell = SpeedCell(status=Status.OK, tokens=64, n=32, rate=spread(50), by_subtraction=spread(45))
    rows = table(two(only(decode=Decode(status=Status.OK, cells=(cell,))), only()), "decode")
    assert (rows[0]["isolated tok/s"], rows[0]["by subtraction tok/s"], rows[0]["depth"]) == ("50.0", "45.0", "64")


def test_equal_doubts_share_a_footnote_and_name_their_arms() -> None:
    flags = (Flag(kind="unsteady", text="differs by 8%"),)
    cell = SpeedCell(status=Status.OK, tokens=64, rate=spread(50), flags=flags)
    other = SpeedCell(status=Status.FAILED, reason="out of memory", tokens=128)
    found = only(prefill=Prefill(status=Status.OK, cells=(cell, other)))
    report = two(found, found)
    assert [row["notes"] for row in table(report, "prefill")] == ["1", "2", "1", "2"]
    view = build_view(report)
    assert view.performance is not None
    notes = view.performance.benches[0].notes
    assert notes.numbered() == ["1: differs by 8%", "2: failed: out of memory"]
    assert notes.named() == ["bf16, k16v8: differs by 8%", "bf16, k16v8: failed: out of memory"]


def test_start_up_tells_cold_from_warm_and_where_the_time_goes() -> None:
    rows = table(bench_report("bf16", "k16v8"), "startup")
    assert [(row["arm"], row["start"]) for row in rows] == [
        (name, kind) for name in ("bf16", "k16v8") for kind in ("cold", "warm")
    ]
    assert rows[0]["weights"] == "2.20"
    assert rows[2]["× ref."] == f"≈ {format_ratio((2 * 1.1 / 1.1 + 3.2) / (2 * 1.1 + 3.2))}"


def test_memory_leaves_out_what_nobody_measured() -> None:
    plain = Memory(status=Status.OK, kv_bytes_per_token=100, reserved_bytes=3 * MIB, reserved_tokens=4096)
    [row] = table(two(only(memory=plain), only()), "memory")
    assert row == {"arm": "bf16", "KV bytes per token": "100", "pool MiB": "3.00", "pool tokens": "4,096"}


def test_a_serving_cell_shows_context_asked_and_measured_latencies_and_errors() -> None:
    cell = load_cell(4096, 8, errors={"timeout": 2, "http-500": 1}, valid=False, context_measured=4402.6)
    report = two(only(serving=serving().model_copy(update={"cells": (cell,)})), only())
    [row] = table(report, "serving")
    assert row["context asked/ measured"] == "4k/4,403"
    assert row["errors"] == "3"
    assert row["valid"] == "no"
    assert cell.ttft is not None
    assert row["TTFT ms p50/p99"] == "/".join(format_amount(cell.ttft.percentiles[p]) for p in ("p50", "p99"))
    assert "failed requests by kind: timeout 2, http-500 1" in printed(report)


def test_failed_requests_are_told_once() -> None:
    flag = Flag(kind="errors", text="3 of 64 requests failed: 2 timeout, 1 http-500")
    cell = load_cell(4096, 8, errors={"timeout": 2, "http-500": 1}, valid=False, flags=(flag,))
    shown = printed(two(only(serving=serving().model_copy(update={"cells": (cell,)})), only()))
    assert flag.text in shown
    assert "failed requests by kind" not in shown


def test_what_the_server_says_of_its_queue_and_cache_stands_beside_the_load() -> None:
    server = Server(kind="vllm", running_mean=7.25, running_max=8, waiting_max=3, kv_usage_mean=0.2, kv_usage_max=0.415)
    cells = (load_cell(128, 8, server=server), load_cell(128, 16, server=None))
    rows = table(two(only(serving=serving().model_copy(update={"cells": cells})), only()), "serving")
    assert [row["server running/ queued"] for row in rows] == ["7.25/3", "–"]
    assert [row["KV used"] for row in rows] == ["41.50%", "–"]


def test_invalid_cells_have_no_ratio() -> None:
    good, bad = load_cell(128, 1), load_cell(128, 1, valid=False)
    plain = serving()
    report = two(
        only(serving=plain.model_copy(update={"cells": (good,)})),
        only(serving=plain.model_copy(update={"cells": (bad,)})),
    )
    assert {row.get("× ref.", "–") for row in table(report, "serving")} == {"–"}


def test_the_saturation_line_says_where_and_by_how_much() -> None:
    found = (
        Saturation(context=128, concurrency=32, gain=0.009),
        Saturation(context=4096, gain=0.096),
        Saturation(context=8192, concurrency=4, gain=-0.02),
    )
    report = two(only(serving=serving().model_copy(update={"saturation": found})), only())
    view = build_view(report)
    assert view.performance is not None
    assert view.performance.benches[0].lines == (
        "bf16: context 128: saturated at 32 requests at once: the next step adds 0.9%, less than 5%",
        "bf16: context 4k: not saturated as far as was measured (the last step adds 9.6%)",
        "bf16: context 8k: saturated at 4 requests at once: the next step adds −2.0%, less than 5%",
    )


# ------------------------------------------------------------------------------------------------------ the text


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize(
    "report", [rich_report(), bench_report("bf16", "k16v8"), bench_report()], ids=["rich", "two", "one"]
)
def test_no_line_is_wider_than_the_terminal(report: Report, width: int) -> None:
    assert max(cell_len(line.rstrip()) for line in printed(report, width).splitlines()) <= width


def test_what_a_narrow_terminal_has_no_room_for_is_said() -> None:
    report = bench_report("bf16", "k16v8")
    assert "lag ms p99" in printed(report, 80).split("narrow terminal:")[1]
    assert "narrow terminal" not in printed(report, 400)


def test_fidelity_speed_and_memory_of_an_arm_stand_in_one_row() -> None:
    lines = printed(rich_report()).splitlines()
    heads = next(n for n, line in enumerate(lines) if "KLD nats" in line)
    row = next(line for line in lines[heads:] if "fp8_e4m3" in line)
    assert all(part in row for part in ("PASS", "0.0312", "1,661", "19.5", "26,852"))


def test_benches_without_axes_have_no_verdicts_and_a_title_that_says_what_was_measured() -> None:
    report = bench_report("bf16", "k16v8", prefill=prefill(), memory=memory(100))
    text = printed(report)
    assert text.startswith("Prefill and memory: SmolLM2-135M-Instruct on hf; reference bf16 (bf16)")
    for word in ("verdict", "KLD", "floor", "control", "traj."):
        assert word not in text
    assert build_view(bench_report()).subtitle == "bf16 (bf16)"


def test_arms_that_failed_are_said_without_verdicts_too() -> None:
    report = bench_report("bf16", prefill=prefill()).model_copy(
        update={"candidates": (broken("q8_0", Status.FAILED, "out of memory"),)}
    )
    assert "q8_0: failed: out of memory" in printed(report)


def test_a_bench_that_failed_is_said_once_for_all_arms() -> None:
    failed = only(prefill=Prefill(status=Status.NOT_SUPPORTED, reason="this engine answers no Timed probes"))
    assert build_view(two(failed, failed)).failures == (
        "bf16, k16v8: prefill not supported: this engine answers no Timed probes",
    )


def test_hostile_text_is_literal_and_on_one_line() -> None:
    text = printed(hostile_benches(), 100)
    assert "[bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


# ---------------------------------------------------------------------------------------------------- Markdown


def test_markdown_has_the_summary_and_names_no_server() -> None:
    text = bench_report("bf16", "k16v8").to_markdown()
    assert "| `k16v8` | 1,395 (1.10×) | 16.4 (1.10×) |" in text
    assert "Decode: bf16, k16v8: the last three repeats differ by 8%" in text
    assert "127.0.0.1" not in text
    assert "KLD" not in text


def test_markdown_of_hostile_benches_keeps_its_table_and_adds_no_markup() -> None:
    text = hostile_benches().to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert "\n<" not in text
    assert HOSTILE not in text


def test_notebooks_show_speed_and_leave_out_empty_verdicts() -> None:
    page = bench_report("bf16", "k16v8")._repr_html_()
    assert "1.10×" in page
    assert "verdict</th>" not in page
    assert "verdict</th>" in rich_report()._repr_html_()
