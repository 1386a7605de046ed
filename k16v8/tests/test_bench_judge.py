"""The kernel bench: ratios, ceilings, goals, and how they are shown."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from k16v8.bench.judge import judge
from k16v8.bench.shapes import Cell
from k16v8.cli.bench_tables import render


def _result(name: str, formats: str, role: str, microseconds: float | None, cell: Cell) -> dict[str, Any]:
    status = "measured" if microseconds else "wrong"
    seconds = microseconds and microseconds / 1e6
    moved = cell.moved_bytes(formats)
    found = {"name": name, "formats": formats, "role": role, "status": status, "seconds": seconds}
    return {**found, "moved_bytes": moved, "run": 0, "graph": True, "reason": ""}


def _record(
    times: dict[str, dict[tuple[str, str, str], float | None]],
    device: str = "cuda",
    copy: float = 1e12,
    capability: str = "8.0",
    loose: str = "",
) -> dict[str, Any]:
    """``times``: shape and size of a cell → contender → µs; ``loose``: the contender that no graph held."""
    found = []
    for key, results in times.items():
        kind, shape, batch, tokens, *queries = key.split()
        heads, kv_heads, dim = map(int, shape.split("/"))
        many = int(queries[0][1:]) if queries else 1
        cell = Cell(kind, (heads, kv_heads, dim), int(batch[1:]), int(tokens[1:]), many)  # type: ignore[arg-type]
        assert cell.key == key
        rows = [_result(*who, microseconds, cell) for who, microseconds in results.items()]
        for row in rows:
            row["graph"] = row["name"] != loose
        found.append({"key": key, **asdict(cell), "shape": [heads, kv_heads, dim], "results": rows})
    record = {"device": {"type": device, "capability": capability}, "runs": [{"copy_bandwidth": copy}], "cells": found}
    judge(record)
    return record


OURS_16, OURS_168, OURS_8 = (("k16v8", pair, "ours") for pair in ("16/16", "16/8", "8/8"))
FLASH_2, SDPA = ("flash-attn-2", "16/16", "rival"), ("sdpa-flash", "16/16", "rival")
FLASHINFER_8 = ("flashinfer", "8/8", "rival")
AT = "decode 28/4/128 B32 T32768"


def test_ratios_are_to_the_fastest_16_bit_kernel_that_is_right_ours_among_them() -> None:
    record = _record({AT: {OURS_16: 100, OURS_168: 80, SDPA: 125, FLASH_2: None, FLASHINFER_8: 60}})
    cell = record["cells"][0]
    assert (cell["best_16"], cell["best_fp8"]) == ("k16v8", "flashinfer")
    assert [one.get("speedup") for one in cell["results"]] == [1, 1.25, 0.8, None, pytest.approx(100 / 60)]


def test_rates_are_bytes_over_time() -> None:
    record = _record({"decode 28/4/128 B1 T16": {OURS_168: 2}})
    one = record["cells"][0]["results"][0]
    moved = 16 * 4 * 128 * 3 + 2 * 2 * 28 * 128
    assert one["bytes_per_second"] == pytest.approx(moved / 2e-6)
    assert one["of_best_rival"] is None  # none was measured


def test_a_speed_up_above_what_bytes_allow_is_flagged() -> None:
    record = _record({AT: {SDPA: 140, OURS_168: 100, OURS_8: 69}})
    _, k16v8, k8v8 = record["cells"][0]["results"]
    assert (k16v8["ceiling"], k8v8["ceiling"]) == (pytest.approx(4 / 3), 2)
    assert k16v8["above_ceiling"]
    assert not k8v8["above_ceiling"]


def _at_goals(**changed: float) -> dict[str, dict[tuple[str, str, str], float | None]]:
    speeds = {"k16v8": 1.3, "native": 0.96, "k8v8": 1.5, "one": 1.01, "extend": 0.7, **changed}
    found: dict[str, dict[tuple[str, str, str], float | None]] = {}
    for shape in ("28/4/128", "32/8/128"):
        heads = {OURS_16: 100 / speeds["native"], OURS_168: 100 / speeds["k16v8"], OURS_8: 100 / speeds["k8v8"]}
        found[f"decode {shape} B32 T32768"] = {SDPA: 100, **heads}
        found[f"decode {shape} B1 T32768"] = {SDPA: 100, OURS_168: 100 / speeds["one"]}
        found[f"extend {shape} B1 T2560 Q512"] = {FLASH_2: 100, OURS_168: 100 / speeds["extend"]}
    return found


def test_goals_are_met_by_their_worst_cell() -> None:
    goals = _record(_at_goals())["goals"]
    assert [goal["verdict"] for goal in goals] == ["met"] * 6
    assert [round(goal["found"], 2) for goal in goals] == [1.3, 0.98, 0.96, 1.01, 1.5, 0.7]


@pytest.mark.parametrize(
    ("changed", "missed"),
    [({"k16v8": 1.27}, [0, 1]), ({"native": 0.94}, [2]), ({"one": 0.99}, [3]), ({"k8v8": 1.44}, [4])],
)
def test_a_goal_that_one_figure_falls_short_of_is_missed(changed: dict[str, float], missed: list[int]) -> None:
    goals = _record(_at_goals(**changed))["goals"]
    assert [at for at, goal in enumerate(goals) if goal["verdict"] == "missed"] == missed


def test_slow_extend_is_missed() -> None:
    goals = _record(_at_goals(extend=0.59))["goals"]
    assert [goal["verdict"] for goal in goals] == ["met"] * 5 + ["missed"]


def test_the_rate_is_compared_with_rivals_alone_also_where_our_16_bit_kernel_is_the_fastest() -> None:
    goals = _record(_at_goals(k16v8=1.3, native=1.1))["goals"]
    assert [goal["verdict"] for goal in goals[:2]] == ["missed", "met"]


def test_goals_without_a_figure_are_unmeasured_and_say_where() -> None:
    times = _at_goals()
    times[AT].pop(SDPA)  # ours alone is not a comparison
    goal = _record(times)["goals"][0]
    assert (goal["verdict"], goal["found"]) == ("unmeasured", None)
    assert goal["reason"] == f"no figure for {AT}"


FLASH_3, XQA = ("flash-attn-3", "16/16", "rival"), ("xqa", "16/16", "rival")
CUDNN = ("sdpa-cudnn", "16/16", "rival")


def _with_rivals(microseconds: dict[tuple[str, str, str], float | None]) -> dict[str, Any]:
    times = _at_goals()
    for key, results in times.items():
        results |= {who: time for who, time in microseconds.items() if who is not XQA or key.startswith("decode")}
    return times


@pytest.mark.parametrize(
    ("rivals", "lacking"),
    [
        ({}, "sdpa-cudnn, flash-attn-3, flash-attn-3 paged"),
        ({XQA: 100}, "sdpa-cudnn, flash-attn-3, flash-attn-3 paged"),
        ({FLASH_3: None, XQA: 9}, "flash-attn-3 (wrong: )"),
    ],
)
def test_beating_slow_rivals_alone_meets_no_goal_on_hopper(
    rivals: dict[tuple[str, str, str], float | None], lacking: str
) -> None:
    for goal in _record(_with_rivals(rivals), capability="9.0")["goals"][:5]:
        assert goal["verdict"] == "unmeasured"
        assert f"none of its rivals was measured: {lacking}" in goal["reason"]


def test_cudnn_which_torch_brings_is_rival_enough_in_decode_on_hopper() -> None:
    goals = _record(_with_rivals({CUDNN: 101}), capability="9.0")["goals"]
    assert [goal["verdict"] for goal in goals] == ["met"] * 5 + ["unmeasured"]


def test_the_layout_that_no_engine_serves_decides_no_goal() -> None:
    times = _with_rivals({CUDNN: 101})
    faster = {("k16v8, tokens first", pair, "variant"): 50.0 for pair in ("16/16", "16/8", "8/8")}
    for key in [key for key in times if key.startswith("decode")]:
        times[key] |= faster
    goals = _record(_with_rivals({CUDNN: 101}))["goals"]
    assert _record(times)["goals"] == goals


def test_a_result_is_compared_with_the_rate_at_which_the_best_rival_reads() -> None:
    record = _record({AT: {OURS_16: 100, OURS_168: 80, SDPA: 125}})
    ours, narrow, rival = record["cells"][0]["results"]
    assert (ours["of_best_rival"], rival["of_best_rival"]) == (1.25, 1)
    assert narrow["of_best_rival"] == pytest.approx(125 / 80 * narrow["moved_bytes"] / rival["moved_bytes"])


def test_on_hopper_goals_are_judged_without_xqa_which_pip_does_not_bring() -> None:
    met = _record(_with_rivals({FLASH_3: 101}), capability="9.0")["goals"]
    assert [goal["verdict"] for goal in met] == ["met"] * 6


def test_on_hopper_the_fastest_rival_that_was_measured_decides() -> None:
    missed = _record(_with_rivals({FLASH_3: 101, XQA: 90}), capability="9.0")["goals"]
    assert [goal["verdict"] for goal in missed] == ["missed"] * 5 + ["met"]


@pytest.mark.parametrize("loose", ["k16v8", "sdpa-flash"])
def test_a_cell_with_a_kernel_that_no_graph_held_leaves_the_goals(loose: str) -> None:
    goal = _record(_at_goals(), loose=loose)["goals"][0]
    assert goal["verdict"] == "unmeasured"
    assert f"not replayed from a graph: {loose} 16/" in goal["reason"]


def test_no_goal_is_claimed_on_a_cpu() -> None:
    goals = _record(_at_goals(), device="cpu")["goals"]
    assert {(goal["verdict"], goal["found"]) for goal in goals} == {("unmeasured", None)}


def test_wrong_results_flags_and_wide_spreads_are_seen_in_the_table() -> None:
    record = _record({AT: {SDPA: 140, OURS_16: None, OURS_168: 100, OURS_8: 80}})
    for one in record["cells"][0]["results"]:
        seconds = one["seconds"] or 0.0
        wide = one["formats"] == "8/8"
        one |= {
            "p10": seconds * (0.9 if wide else 1),
            "p90": seconds * 1.09,
            "caches": 1,
            "error": 0.002,
            "reason": "r",
        }
    record |= {"geometries": ["qwen2.5-7b", "llama-3.1-8b", "mistral-7b"], "left_out": 2}
    record["device"]["name"], record["runs"][0]["read_bandwidth"] = "GPU", 1e12
    text = "\n".join(render(record))
    (line,) = (line.split() for line in text.splitlines() if "32,768" in line)
    share = f"{100 * record['cells'][0]['results'][2]['of_best_rival']:.0f}%"
    assert line[:8] == ["32", "32,768", "sdpa-flash", "140.0", "wrong", "100.0", "1.40×^", share]
    assert "80.0~" in line
    assert "k16v8 16/16 wrong: r" in text
    assert "mistral-7b: the attention of llama-3.1-8b, and its figures" in text
    assert "2 measurements were left out" in text
