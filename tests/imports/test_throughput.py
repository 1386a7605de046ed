"""Recorded throughput comes in with its errors flagged, in our units, and nothing corrected."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fidelab.bench.base import CellResult
from fidelab.core import Status
from fidelab.errors import InputError, UsageError
from fidelab.imports.leave import Imported
from fidelab.imports.throughput import import_throughput, speed_ratios
from fidelab.results.measurement import Cell, Measurement
from fidelab.results.record import Report
from tests.imports.recorded import cells, row, step, sweeps
from tests.runs.harness import cli

DATA = Path(__file__).parents[3] / "shared" / "data"
RDNA4, KLD = DATA / "rdna4", DATA / "kld"

rdna4 = pytest.mark.skipif(not RDNA4.is_dir(), reason="the recorded sweeps are not beside this checkout")
kld = pytest.mark.skipif(not KLD.is_dir(), reason="the recorded cells are not beside this checkout")

# Output tok/s as the guide on quantized models prints them (context 0, median of the server's gauge).
AT = (1, 8, 16, 32, 64)
AWQ = (152.0, 665.0, 976.0, 1516.0, 1662.0)
NVFP4 = (132.0, 581.0, 852.0, 1191.0, 1202.0)


def write(folder: Path, content: Any, name: str = "recorded.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def imported(folder: Path, *contents: Any, **more: Any) -> Imported:
    paths = [write(folder, content, f"file{index}.json") for index, content in enumerate(contents)]
    return import_throughput(paths, folder / "runs", **more)


def benches(result: Imported, index: int = 0) -> dict[str, Measurement]:
    return [result.report.reference, *result.report.candidates][index].benches


def serving(result: Imported, index: int = 0) -> Measurement:
    return benches(result, index)["serving"]


def parts(found: Measurement) -> list[CellResult]:
    """Each cell with its metrics."""
    every = found.metrics
    return [CellResult(one, tuple(metric for metric in every if metric.cell == one.at)) for one in found.cells]


def loads(found: Measurement) -> list[CellResult]:
    """Without the cells that saturation stands in."""
    return [load for load in parts(found) if "arrival" in load.cell.at]


def load(found: Measurement, concurrency: int, context: int | str = 0) -> CellResult:
    return next(one for one in loads(found) if shape(one) == (context, concurrency))


def shape(one: CellResult) -> tuple[object, object]:
    return one.cell.at["context"], one.cell.at["concurrency"]


def saturations(found: Measurement) -> list[tuple[float | None, Any]]:
    """The concurrency of each context, and what the next step adds."""
    cells = [one for one in found.cells if "arrival" not in one.at]
    return [(found.value("saturation", one.at), one.facts["gain"]) for one in cells]


def kinds(found: Cell | Measurement) -> list[str]:
    return [flag.kind for flag in found.flags]


def from_file(path: Path, folder: Path) -> Measurement:
    return serving(import_throughput([path], folder / "runs"))


# ------------------------------------------------------------------------------------------------- reading


def test_a_file_with_sweeps_comes_in_whole_and_without_a_flag(tmp_path: Path) -> None:
    found = imported(tmp_path, sweeps(loads=[{"concurrency": 4, "throughput": 160.0, "tpot_ms": 25.0, "ttft_ms": 0}]))
    serve = serving(found)
    assert [shape(one) for one in loads(serve)] == [(1024, 1), (32768, 1), ("mixed", 4)]
    assert all(c.valid and not c.flags and c.status is Status.OK for c in serve.cells)
    assert not serve.flags
    first, _, loaded = loads(serve)
    assert (first.value("context counted"), first.cell.at["output"]) == (1020, 50)
    assert (first.value("TPOT mean"), first.value("TTFT mean")) == (20.0, 100.0)
    assert first.value("output rate") == pytest.approx(50 / 1.08)
    assert (loaded.value("output rate"), loaded.value("TTFT mean")) == (160.0, None)  # a TTFT of 0 is an empty field
    decode = parts(benches(found)["decode"])
    depths = [(one.cell.at["depth"], one.value("isolated"), one.cell.facts["n"]) for one in decode]
    assert depths == [(1020, 50.0, 49), (32700, 25.0, 49)]


def test_a_file_with_cells_comes_in_by_context_and_concurrency_in_milliseconds(tmp_path: Path) -> None:
    found = imported(tmp_path, cells(row(2, 190.0, 16384), row(2, 200.0), row(1, 100.0)))
    serve = serving(found)
    rates = [(*shape(one), one.value("output rate")) for one in loads(serve)]
    assert rates == [(0, 1, 100.0), (0, 2, 200.0), (16384, 2, 190.0)]
    first = loads(serve)[0]
    assert [first.value(f"TTFT {part}") for part in ("mean", "p50", "p99")] == pytest.approx([50, 40, 200])
    assert first.cell.facts["measured"] == {"seconds": 30.0, "output_tokens": 3000, "completed": 1}
    assert (first.cell.facts["server"]["kind"], first.cell.facts["server"]["kv_usage_mean"]) == ("vllm", 0.25)
    assert first.cell.facts["client over server"] == 1.0
    assert all(c.valid and not c.flags for c in serve.cells)
    [prefill] = parts(benches(found)["prefill"])
    assert (prefill.cell.at["tokens"], prefill.value("rate"), prefill.cell.flags) == (8192, 16384.0, ())


def test_newer_cells_count_tokens_by_usage_over_the_measured_part_alone(tmp_path: Path) -> None:
    new = {
        "client_output_tokens": 3000,
        "total_tokens": 3600,
        "measurement_seconds": 30.0,
        "wall_time": 36.0,
        "aggregate_source": "usage",
        "inter_token_latency_avg": 0.01,
        "chunk_inter_token_latency_avg": 0.027,
        "request_latency_avg": 20.0,
        "input_seq_len_avg": 16000.0,
        "effective_concurrency": 1,
    }
    [found] = loads(serving(imported(tmp_path, cells(row(1, 100.0, 16384, server_gen_throughput=99.9, **new)))))
    assert (found.value("output rate"), found.value("context counted")) == (100.0, 16000.0)
    assert found.cell.facts["measured"]["seconds"] == 30.0
    assert [found.value(f"{name} mean") for name in ("TPOT", "ITL", "E2E")] == [10.0, 27.0, 20000.0]
    assert found.cell.valid
    assert not found.cell.flags


def test_the_first_file_is_the_reference_and_the_run_folder_says_where_all_came_from(tmp_path: Path) -> None:
    found = imported(tmp_path, cells(), sweeps())
    report = Report.from_json(found.folder / "report.json")
    assert (report.reference.name, [arm.name for arm in report.candidates]) == ("file0", ["file1"])
    files = report.settings["imported"]["files"]
    assert [(file["file"], file["form"]) for file in files] == [("file0.json", "cells"), ("file1.json", "sweeps")]
    assert "Tiny-397B" in (found.folder / "report.html").read_text()
    verdict = report.candidates[0].verdict
    assert verdict is not None
    assert (verdict.band, "no fidelity" in verdict.sentence) == (None, True)
    assert found.report == report


def test_a_run_of_ours_stands_beside_recorded_files(tmp_path: Path) -> None:
    ours = imported(tmp_path / "own", cells(row(1, 100.0), row(2, 190.0)))
    other = write(tmp_path, cells(row(1, 125.0), row(2, 190.0)), "theirs.json")
    both = import_throughput([ours.folder, other], tmp_path / "runs")
    assert benches(both, 0) == benches(ours, 0)
    assert speed_ratios(serving(both, 1), serving(both, 0)) == {(0, 1): 1.25, (0, 2): 1.0}


def test_files_of_one_name_are_told_apart_by_their_folders_or_by_names(tmp_path: Path) -> None:
    paths = [write(tmp_path, cells(), f"{place}/x.results.json") for place in ("old", "new")]
    report = import_throughput(paths, tmp_path / "runs").report
    assert [report.reference.name, report.candidates[0].name] == ["old/x", "new/x"]
    report = import_throughput(paths, tmp_path / "runs", names=["a", "b"]).report
    assert [report.reference.name, report.candidates[0].name] == ["a", "b"]
    with pytest.raises(UsageError, match="1 names for 2 files"):
        import_throughput(paths, tmp_path / "runs", names=["a"])
    with pytest.raises(UsageError, match="two arms are named 'a'"):
        import_throughput(paths, tmp_path / "runs", names=["a", "a"])


# ------------------------------------------------------------------------------------- one error, one flag


@pytest.mark.parametrize(("length", "off"), [(512, True), (970, True), (980, False), (1100, True)])
def test_a_depth_off_by_more_than_5_percent_is_flagged_and_invalid(length: int, off: bool, tmp_path: Path) -> None:
    found = serving(imported(tmp_path, sweeps([step(1024, length, 20.0), step(2048, 2048, 22.0)], [])))
    first, second = found.cells
    assert (first.valid, kinds(first)) == ((False, ["depth"]) if off else (True, []))
    assert second.valid


def test_a_sweep_whose_inputs_are_half_of_each_context_says_so_with_figures(tmp_path: Path) -> None:
    found = serving(imported(tmp_path, sweeps([step(128, 64, 20.0), step(1024, 512, 30.0)], [])))
    flag = found.cells[1].flags[0]
    assert flag.text.startswith("stands for a context of 1,024 tokens, but prompts of 512 were requested")
    assert "0.50×" in flag.text
    assert loads(found)[1].value("context counted") is None  # nothing was measured


def test_decode_stands_at_the_counted_depth_and_is_doubtful_only_where_nothing_was_counted(tmp_path: Path) -> None:
    def flagged(length: int) -> list[tuple[int, list[str]]]:
        found = benches(imported(tmp_path, sweeps([step(1024, length, 20.0)], [])))["decode"]
        return [(int(one.at["depth"]), [flag.kind for flag in one.flags]) for one in found.cells]

    assert flagged(900) == [(900, [])]
    assert flagged(512) == [(512, ["depth"])]


def test_counted_prompts_off_their_context_are_flagged_in_cells_too(tmp_path: Path) -> None:
    found = serving(imported(tmp_path, cells(row(1, 100.0, 16384, input_seq_len_avg=8192.0)))).cells[0]
    assert (found.valid, kinds(found)) == (False, ["depth"])


def test_a_flat_curve_is_suspicious_only_where_no_server_counted_the_prompts(tmp_path: Path) -> None:
    contexts = (128, 1024, 8192)
    halved = serving(imported(tmp_path, sweeps([step(n, n // 2, 30.0) for n in contexts], [])))
    unknown = serving(imported(tmp_path, sweeps([step(n, None, 30.0) for n in contexts], [])))
    counted = serving(imported(tmp_path, sweeps([step(n, n - 1, 30.0) for n in contexts], [])))
    falling = serving(imported(tmp_path, sweeps([step(n, None, 30.0 + n / 100) for n in contexts], [])))
    assert [kinds(found) for found in (halved, unknown, counted, falling)] == [["inconsistent"], ["depth"], [], []]
    assert "64 to 4,096 tokens, 64× the length" in halved.flags[0].text


def test_stream_events_counted_as_tokens_are_told_from_a_server_that_differs(tmp_path: Path) -> None:
    def flagged(share: float, ratio: float) -> tuple[bool, list[str]]:
        counted = row(4, 400.0, total_tokens=round(30 * 400 * ratio), server_spec_accept_rate=share)
        found = serving(imported(tmp_path, cells(counted))).cells[0]
        return found.valid, kinds(found)

    assert flagged(0.6, 0.4) == (False, ["stream-events"])
    assert flagged(0.0, 0.4) == (True, ["server-mismatch"])
    assert flagged(0.6, 0.85) == (True, ["server-mismatch"])
    assert flagged(0.6, 1.15) == (True, ["server-mismatch"])
    assert flagged(0.6, 0.91) == (True, [])


def test_speculation_is_also_read_from_the_name_and_nomtp_is_none(tmp_path: Path) -> None:
    content = cells(row(1, 100.0, total_tokens=1200))
    for name, kind in (("vllm_x_mtp.json", "stream-events"), ("vllm_x_nomtp.json", "server-mismatch")):
        assert kinds(from_file(write(tmp_path, content, name), tmp_path).cells[0]) == [kind]


def test_an_acceptance_rate_that_counts_is_flagged_once(tmp_path: Path) -> None:
    counting = [row(c, 100.0 * c, server_spec_accept_rate=2000.0 * c) for c in (1, 2)]
    found = serving(imported(tmp_path, cells(*counting)))
    assert kinds(found) == ["inconsistent"]
    assert "2,000 in the first row and 4,000 in the last" in found.flags[0].text
    assert all(c.valid for c in found.cells)


def test_throughput_that_the_latencies_do_not_make_is_inconsistent(tmp_path: Path) -> None:
    loads = [
        {"concurrency": 32, "throughput": 166.0, "tpot_ms": 96.3},  # 32 · 1000 / 96.3 = 332
        {"concurrency": 16, "throughput": 160.8, "tpot_ms": 85.31, "ttft_ms": 796.15},
        {"concurrency": 8, "tok_per_sec": 120.0, "tpot_ms": 80.0},
    ]
    found = serving(imported(tmp_path, sweeps([], loads)))
    assert [c.valid for c in found.cells] == [False, True, False]
    assert found.cells[0].flags[0].text.startswith("166.0 tok/s at C = 32, but 32 streams with TPOT 96.3 ms make 332.3")
    assert found.cells[2].flags[0].text.endswith("make 100.0 at most")


def test_one_stream_slower_than_its_own_latencies_is_inconsistent(tmp_path: Path) -> None:
    found = serving(imported(tmp_path, sweeps([step(1024, 1024, 20.0, throughput=4.8)], []))).cells[0]
    assert (found.valid, kinds(found)) == (False, ["inconsistent"])
    assert "1 stream of 50 tokens with TTFT 100 ms and TPOT 20 ms makes 46.3" in found.flags[0].text


def test_a_decode_rate_that_is_not_its_own_tpot_is_inconsistent(tmp_path: Path) -> None:
    found = imported(tmp_path, sweeps([step(1024, 1024, 20.0, tok_per_sec=30.0, throughput=None)], []))
    assert kinds(serving(found).cells[0]) == ["inconsistent"]
    assert benches(found)["decode"].cells[0].flags[0].text == "30.0 tok/s, but TPOT 20 ms is 50.0"


def test_100_tokens_in_4_1_seconds_stated_as_16_are_flagged(tmp_path: Path) -> None:
    stated = row(1, 16.0, total_tokens=100, wall_time=4.1, server_gen_throughput=None)
    [found] = loads(serving(imported(tmp_path, cells(stated))))
    assert found.value("output rate") == pytest.approx(24.4, abs=0.05)
    assert (found.cell.valid, kinds(found.cell)) == (False, ["inconsistent"])
    assert found.cell.flags[0].text == "100 tokens in 4.1 s are 24.4 tok/s, not 16.0"


def test_prefill_that_is_not_its_tokens_over_its_time_is_flagged(tmp_path: Path) -> None:
    content = cells(prefill={"4096": {"ttft_seconds": 1.0, "tok_per_sec": 8192.0}})
    found = benches(imported(tmp_path, content))["prefill"]
    assert [flag.kind for flag in found.cells[0].flags] == ["inconsistent"]
    assert "4,096 prompt tokens in 1 s are 4096.0 tok/s, not 8192.0" in found.cells[0].flags[0].text


def test_166_against_332_tokens_per_second_of_one_model_at_32_are_flagged_on_both_sides(tmp_path: Path) -> None:
    peak = sweeps([], [{"concurrency": 16, "throughput": 160.81}, {"concurrency": 32, "throughput": 166.34}])
    table = sweeps([], [{"concurrency": 16, "throughput": 193.2}, {"concurrency": 32, "throughput": 332.3}])
    found = imported(tmp_path, peak, table)
    for index, figures in enumerate((("166.3", "file1.json says 332.3"), ("332.3", "file0.json says 166.3"))):
        assert kinds(serving(found, index)) == ["inconsistent"]
        text = serving(found, index).flags[0].text
        assert all(figure in text for figure in (*figures, "at C = 32"))
    for here, there in (("2x card", "another card"), ("", "")):  # machines that differ, or are not known
        apart = imported(tmp_path, {**peak, "hardware": here}, {**table, "hardware": there})
        assert not serving(apart, 0).flags


def test_failed_requests_and_cells_that_were_not_full_are_flagged(tmp_path: Path) -> None:
    found = serving(
        imported(
            tmp_path,
            cells(
                row(32, 100.0, num_completed=31, num_errors=1),
                row(64, 100.0, num_completed=60, num_errors=4),
                row(128, 100.0, avg_running_reqs=100),
                row(256, 100.0, avg_running_reqs=None, underfilled=True),
            ),
        )
    )
    assert [(kinds(c), c.valid) for c in found.cells if "arrival" in c.at] == [
        (["errors"], True),
        (["errors"], False),
        (["underfilled"], False),
        (["underfilled"], False),
    ]
    assert found.cells[1].facts["errors"] == {"unspecified": 4}


def test_a_share_of_the_cache_above_one_is_left_out(tmp_path: Path) -> None:
    [found] = loads(serving(imported(tmp_path, cells(row(1, 100.0, server_utilization=25.0)))))
    assert (found.cell.facts["server"]["kv_usage_mean"], found.value("server's output rate")) == (None, 100.0)


def test_a_load_that_failed_keeps_its_reason_and_an_empty_one_says_so(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"concurrency": 1, "tok_per_sec": 0, "error": "OOM"},
        {"concurrency": 2, "tok_per_sec": 0, "tpot_ms": 0.0, "error": " "},
    ]
    found = serving(imported(tmp_path, sweeps([], steps)))
    failed, empty = found.cells
    assert (failed.status, failed.reason, failed.valid) == (Status.FAILED, "OOM", False)
    assert (empty.status, found.value("output rate"), empty.valid) == (Status.NOT_MEASURABLE, None, False)
    assert "throughput_sweep[1]" in (empty.reason or "")


# ------------------------------------------------------------------------------------------------ analysis


def test_awq_is_1_15_times_nvfp4_alone_and_1_38_times_at_64_where_only_nvfp4_is_saturated(tmp_path: Path) -> None:
    def gauge(rates: tuple[float, ...]) -> dict[str, Any]:
        rows = [row(c, rate, total_tokens=None, wall_time=None) for c, rate in zip(AT, rates, strict=True)]
        return cells(*rows)

    found = imported(tmp_path, gauge(NVFP4), gauge(AWQ), names=["NVFP4", "AWQ"])
    ratios = speed_ratios(serving(found, 1), serving(found, 0))
    assert [round(ratios[0, c], 2) for c in (1, 64)] == [1.15, 1.38]
    assert any("AWQ over NVFP4, context 0: 1.15× at C = 1" in note for note in found.notes)
    (nvfp4,), (awq,) = (saturations(serving(found, index)) for index in (0, 1))
    assert nvfp4 == (32, pytest.approx(0.009, abs=5e-4))
    assert awq == (None, pytest.approx(0.096, abs=5e-4))


def test_invalid_cells_enter_neither_saturation_nor_ratios(tmp_path: Path) -> None:
    broken = row(4, 100.0, total_tokens=1000, server_spec_accept_rate=0.5)
    found = imported(tmp_path, cells(row(1, 100.0), row(2, 190.0), row(4, 380.0)), cells(row(2, 190.0), broken))
    assert speed_ratios(serving(found, 1), serving(found, 0)) == {(0, 2): 1.0}
    assert not saturations(serving(found, 1))


# ----------------------------------------------------------------------------------------------- real files


@rdna4
@pytest.mark.parametrize("path", sorted(RDNA4.glob("seed_era/*.results.json")), ids=lambda path: path.name)
def test_every_sweep_of_the_first_era_stands_for_twice_its_depth(path: Path, tmp_path: Path) -> None:
    found = from_file(path, tmp_path)
    swept = [one.cell for one in loads(found) if shape(one)[0] not in (0, "mixed")]
    assert len(swept) >= 6
    for one in swept:
        assert not one.valid
        assert "0.50×" in next(flag.text for flag in one.flags if flag.kind == "depth")
    assert kinds(found) == ["inconsistent"]  # all six curves are flat


@rdna4
def test_later_sweeps_that_counted_their_prompts_are_not_called_flat(tmp_path: Path) -> None:
    found = [from_file(path, tmp_path) for path in sorted(RDNA4.glob("results/*.results.json"))]
    assert [serve.facts["target"] for serve in found if serve.flags] == ["qwen3.6-vl-reap-26b-a3b-awq.results.json"]
    doubled = [serve.facts["target"] for serve in found if any("0.50×" in f.text for c in serve.cells for f in c.flags)]
    assert doubled == ["devstral-24b-awq-131k.results.json", "qwen3.6-vl-reap-26b-a3b-awq.results.json"]


@rdna4
def test_coder_30b_at_32_is_no_figure_to_be_used(tmp_path: Path) -> None:
    peak = json.loads((RDNA4 / "baselines.json").read_text())["coder-30b"]["peak_throughput"]
    first = RDNA4 / "seed_era" / "coder-30b-awq.results.json"
    table = json.loads(first.read_text())
    table["throughput_sweep"] = [{"concurrency": 32, "throughput": 332.3}]  # as the lab's own page has it
    found = import_throughput([first, write(tmp_path, table, "page.json")], tmp_path / "runs")
    assert load(serving(found), 32, "mixed").value("output rate") == peak == 166.34
    assert any("166.3" in flag.text and "332.3" in flag.text for flag in serving(found).flags)
    later = load(from_file(RDNA4 / "results" / "coder-30b-awq.results.json", tmp_path), 32, "mixed")
    assert (later.cell.valid, kinds(later.cell), later.value("output rate")) == (False, ["inconsistent"], 288.67)
    assert later.cell.flags[0].text.endswith("make 430.0")


@kld
@pytest.mark.parametrize("name", ["awq", "lukealonso_nvfp4", "nvidia_nvfp4"])
def test_with_mtp_stream_events_were_counted_and_the_acceptance_rate_is_a_counter(name: str, tmp_path: Path) -> None:
    found = from_file(KLD / "throughput" / f"vllm_{name}_mtp.json", tmp_path)
    events = [c for c in found.cells if "stream-events" in kinds(c)]
    assert len(loads(found)) == 40
    assert len(events) >= 39
    assert not any(c.valid for c in events)
    shallow = [c.facts["client over server"] for c in events if c.at["context"] == 0]
    assert 0.38 < min(shallow) <= max(shallow) < 0.43  # 2.4 to 2.6 tokens an event
    assert kinds(found) == ["inconsistent"]
    assert "running count" in found.flags[0].text
    plain = from_file(KLD / "throughput" / f"vllm_{name}_nomtp.json", tmp_path)
    assert {kind for c in plain.cells for kind in kinds(c)} == {"server-mismatch"}
    assert not any(one.cell.flags for one in loads(plain) if shape(one)[0] == 0)
    assert not plain.flags


@kld
def test_a_gauge_s_median_is_not_what_the_clients_received(tmp_path: Path) -> None:
    found = from_file(KLD / "throughput" / "results_awq.json", tmp_path)
    assert [(one.cell.at["concurrency"], kinds(one.cell)) for one in loads(found)] == [
        (1, ["server-mismatch"]),
        (4, ["server-mismatch"]),
        (16, []),
        (32, ["server-mismatch"]),
    ]
    assert load(found, 1).cell.flags[0].text == "147.5 tok/s by the client's count is 1.18 of the server's 124.8"


@kld
def test_on_the_cells_that_were_kept_nvfp4_saturates_and_awq_does_not(tmp_path: Path) -> None:
    names = ("lukealonso_nvfp4", "nvidia_nvfp4", "awq")
    found = import_throughput([KLD / "throughput" / f"results_{name}.json" for name in names], tmp_path / "runs")
    points = [saturations(serving(found, index))[0] for index in range(3)]
    assert [concurrency for concurrency, _ in points] == [16, 16, None]
    assert [gain for _, gain in points] == pytest.approx([-0.001, 0.030, 0.512], abs=1e-3)
    awq, nvfp4 = (load(serving(found, index), 32).value("server's output rate") for index in (2, 0))
    assert awq is not None
    assert nvfp4 is not None
    assert round(awq / nvfp4, 2) == 1.38


@kld
def test_the_newer_form_counts_by_usage_and_its_speculation_is_no_fault(tmp_path: Path) -> None:
    found = from_file(KLD / "glm51" / "decode-matrix_glm-dcp1-mtp1.json", tmp_path)
    assert len(loads(found)) == 12
    assert all(c.valid and not c.flags for c in found.cells)
    first = loads(found)[0]
    assert first.value("output rate") == pytest.approx(95.58, abs=0.01)
    means = first.value("TPOT mean"), first.value("ITL mean")
    assert means == pytest.approx((10.525, 27.133), abs=1e-3)  # 2.6 tokens an event
    assert load(found, 1, 32768).value("context counted") == 32338


# ------------------------------------------------------------------------------------------------ bad files

BAD: list[tuple[Any, str]] = [
    ('{"metadata": {}, "results": [', "line 1, column 30"),
    ([1, 2], "expected an object of results, found list"),
    ({"single": 1}, "neither context_sweep nor throughput_sweep nor results (with metadata) is there, found 'single'"),
    ({"results": []}, "holds no row of results"),
    ({"results": {"a": 1}}, " results: expected a list"),
    (cells(row(1, 1.0), {"concurrency": 2, "wall_time": "long"}), "results[1].wall_time: expected a number in 0"),
    (cells({"aggregate_tps": 5}), "results[0].concurrency: expected a whole number from 1 on, found None"),
    (cells(row(1, 1.0, num_errors=0.5)), "results[0].num_errors: expected a whole number"),
    (cells(row(1, 1.0, aggregate_tps=-1.0)), "results[0].aggregate_tps: expected a number in 0"),
    (cells(prefill={"long": {}}), "prefill: expected lengths in tokens as names, found 'long'"),
    (cells(prefill=[1]), "prefill: expected an object"),
    (sweeps([step(0, 5, 20.0)]), "context_sweep[0].context: expected a whole number from 1 on"),
    (sweeps([step(8, 8, 20.0, tpot_ms=True)]), "context_sweep[0].tpot_ms: expected a number"),
    ({**sweeps(), "throughput_sweep": [7]}, "throughput_sweep[0]: expected an object"),
    ({"one\ntwo": 1}, "found 'one\\ntwo'"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_what_is_wrong_is_said_on_one_line_with_file_and_field(content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as caught:
        import_throughput([path], tmp_path / "runs")
    said = str(caught.value)
    assert message in said
    assert (str(path) in said, "\n" in said) == (True, False)
    assert not (tmp_path / "runs").exists()


NUMBERS = st.sampled_from([0, 1, 2, 3.5, 1e-300, 1e-7, 0.99, 900_000_000, 10**400]) | st.integers() | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from([" ", "\ud800", "\x1b[31m", "a\nb"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
SAMPLES = [
    cells(row(1, 100.0, 16384, input_seq_len_avg=16000.0, inter_token_latency_avg=0.01), row(2, 190.0)),
    sweeps([step(1024, 1020, 20.0), step(32768, 16384, 40.0)], [{"concurrency": 4, "tok_per_sec": 9.0, "error": "x"}]),
]


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, entry in entries for place in _places(entry, (*at, key)))]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_file_there_is_a_report_or_an_input_error(data: st.DataObject, tmp_path: Path) -> None:
    sample = copy.deepcopy(data.draw(st.sampled_from(SAMPLES)))
    for *way, last in data.draw(st.lists(st.sampled_from(_places(sample)[1:]), min_size=1, max_size=3)):
        holder = sample
        try:
            for key in way:
                holder = holder[key]
            holder[last] = data.draw(JSON)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    found = _outcome(write(tmp_path, sample), tmp_path / "runs")
    if isinstance(found, str):
        assert "\n" not in found
    else:
        assert Report.from_json(found.folder / "report.json") == found.report


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.sampled_from([json.dumps(sample) for sample in SAMPLES]), data=st.data())
def test_a_file_cut_anywhere_is_an_input_error(text: str, data: st.DataObject, tmp_path: Path) -> None:
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(InputError):
        import_throughput([write(tmp_path, text[:end])], tmp_path / "runs")


def _outcome(path: Path, output_dir: Path) -> Imported | str:
    try:
        return import_throughput([path], output_dir)
    except InputError as error:
        return str(error)


# ------------------------------------------------------------------------------------------ the command line


def test_the_command_leaves_a_run_and_says_what_is_wrong_with_the_figures(tmp_path: Path) -> None:
    write(tmp_path, sweeps([step(1024, 512, 20.0)], []), "a.results.json")
    write(tmp_path, cells(), "b.json")
    done = cli("import", "throughput", "a.results.json", "b.json", cwd=tmp_path)
    assert done.code == 0
    assert done.folder.name.endswith("import-throughput")
    assert "fidelab: a: depth (1 of 1 cells): stands for a context of 1,024 tokens" in done.err
    assert done.report["reference"]["name"] == "a"
    assert (done.folder / "report.html").is_file()
    as_json = cli("import", "throughput", "b.json", "--name", "mine", "--json", cwd=tmp_path)
    assert json.loads(as_json.out)["reference"]["name"] == "mine"


def test_a_file_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    write(tmp_path, '{"results": [', "cut.json")
    for name, message in (("cut.json", "cut.json: line 1"), ("none.json", "none.json: cannot read the file")):
        done = cli("import", "throughput", name, cwd=tmp_path)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
        assert len(done.err.strip().splitlines()) == 1
