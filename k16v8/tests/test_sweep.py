"""The sweep of knobs: what is launched alike is measured once, wrong numbers have no time, the best is the fastest."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import forked
from k16v8.bench.sweep import KNOBS_TRIED, best, main, settings_tried, tried_of
from k16v8.errors import UsageError

CELLS = ("decode 4/2/64 B2 T128", "decode 4/2/64 B1 T128")


def result(cell: str, seconds: float | None, **knobs: int) -> dict[str, Any]:
    status = "measured" if seconds else "wrong"
    return {"cell": cell, "knobs": {"stages": 0, "tokens": 0, **knobs}, "status": status, "seconds": seconds}


def test_every_combination_is_tried_and_the_one_that_turns_nothing_comes_first() -> None:
    found = [*settings_tried()]
    assert not any(found[0].values())
    assert len(found) == len({tuple(one.items()) for one in found}) == 2 * 2 * 2 * 4
    assert {name: tuple(dict.fromkeys(one[name] for one in found)) for name in KNOBS_TRIED} == KNOBS_TRIED


def test_the_best_is_the_largest_geometric_mean_over_all_cells() -> None:
    results = [result(CELLS[0], 10), result(CELLS[1], 10)]
    assert best(results) == {"knobs": {}, "speedup": 1.0, "cells": {}}
    results += [result(CELLS[0], 5, stages=7), result(CELLS[1], 20, stages=7)]  # 2 and 1/2: no gain
    results += [result(CELLS[0], 8, tokens=32), result(CELLS[1], 10, tokens=32)]
    found = best(results)
    assert (found["knobs"], found["cells"]) == ({"tokens": 32}, {CELLS[0]: 1.25, CELLS[1]: 1.0})
    assert found["speedup"] == pytest.approx(1.25**0.5)


def test_a_setting_that_is_wrong_or_missing_in_a_cell_is_not_the_best_and_a_twin_takes_its_time() -> None:
    results = [result(CELLS[0], 10), result(CELLS[1], 10)]
    results += [result(CELLS[0], 1, stages=7), result(CELLS[1], None, stages=7), result(CELLS[0], 1, stages=3)]
    assert best(results)["knobs"] == {}
    twin = {"cell": CELLS[1], "knobs": {"stages": 3, "tokens": 0}, "status": "same", "as": 1}
    assert best([*results, twin])["cells"] == {CELLS[0]: 10, CELLS[1]: 1}


def test_what_is_tried_can_be_named() -> None:
    assert tried_of([]) == KNOBS_TRIED
    assert tried_of(["merge_stages=0,1", "stages=0,7,7"]) == {"merge_stages": (0, 1), "stages": (0, 7)}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stages", "write NAME=NUMBER"),
        ("stages=0,x", "write NAME=NUMBER"),
        ("stages=5,7", "add it"),
        ("depth=0,7", "no knob depth"),
        ("tokens=0,48", "a power of two"),
    ],
)
def test_what_cannot_be_tried_is_named(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tried_of([word])


# of 128 tokens splits of 256 and 512 are one
TRIED = ["--try", "stages=0,7", "--try", "split_tokens=0,64,256,512"]


@pytest.mark.full
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_sweep_under_the_interpreter_measures_each_launch_once_and_keeps_its_record(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    words = ["--device", "cpu", "--geometry", "tiny", "--lengths", "128", "--batch", "1", "--seconds", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_INTERPRET": "1"}
    done = forked.run(["-m", "k16v8.bench.sweep", *words, *TRIED, "--output", str(path)], environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    results = record["results"]
    assert len(results) == 8
    assert {one["caches"] for one in results if one["status"] == "measured"} == {1}  # of the interpreter: no rotation
    measured = [one for one in results if one["status"] == "measured"]
    launches = [tuple(sorted(one["launch"].items())) for one in measured]
    assert len(launches) == len(set(launches))
    same = [one for one in results if one["status"] == "same"]
    assert {(one["knobs"]["stages"], one["knobs"]["split_tokens"]) for one in same} >= {(0, 512), (7, 512)}
    assert all(results[one["as"]]["launch"] == one["launch"] for one in same)
    assert f"{len(measured)} measured, {len(same)} same" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "gpu"), "--device 'gpu': there are cpu and cuda"),
        (("--device", "cpu", "--lengths", "100"), "--lengths 100: not a multiple of the page, 64 tokens"),
        (("--device", "cpu", "--batch", "x"), "write whole numbers"),
        (("--device", "cpu", "--formats", "4/4"), "--formats 4/4: there are"),
        (("--device", "cpu", "--geometry", "none"), "unknown geometry 'none'"),
    ],
)
def test_what_cannot_be_swept_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("k16v8.bench.sweep.load_triton", lambda interpret: None)
    assert main([*words, "--output", str(tmp_path / "x.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "x.json").exists()
