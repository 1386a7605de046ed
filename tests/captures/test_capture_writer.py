"""Writing: whole or not at all, in bounded memory, whatever kills it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import fidelab.captures.writer as writer_module
from fidelab.captures.container import TensorFile
from fidelab.captures.manifest import PARTIAL
from fidelab.captures.reader import Capture, find_captures, is_complete
from fidelab.captures.requests import Prefill
from fidelab.captures.store import drop_part_rows
from fidelab.captures.writer import abandoned, store_head, store_vocabulary
from fidelab.core.errors import CaptureError
from tests.captures import sample

DIES_WHILE_WRITING = """
import os, sys, time
from pathlib import Path
import fidelab.captures.writer as w
from tests.captures import sample
w.PART_BYTES = 1
store, moment = Path(sys.argv[1]), sys.argv[2]
out = sample.writer(store)
stop = lambda *a, **k: (print("now", flush=True), time.sleep(600))
if moment == "start":
    stop()
out.add(0, sample.rows(0))
if moment == "part":
    stop()
for item in (1, 2):
    out.add(item, sample.rows(item))
if moment == "manifest":
    w.dump_manifest = stop
if moment == "rename":
    Path.rename = stop
out.finish("logprobs", {}, {})
"""


def partials(store: Path) -> list[Path]:
    return list(store.rglob(f"{PARTIAL}*"))


@pytest.mark.parametrize("moment", ["start", "part", "manifest", "rename"])
def test_a_writer_killed_anywhere_leaves_no_capture_and_the_next_one_cleans_up(moment: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", DIES_WHILE_WRITING, str(tmp_path), moment], stdout=subprocess.PIPE, cwd=root
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(partials(tmp_path)) == 1
    assert list(find_captures(tmp_path)) == []
    target = sample.write(tmp_path)
    assert partials(tmp_path) == []
    assert list(find_captures(tmp_path)) == [target]


def test_nothing_counts_as_a_capture_before_finish_and_abort_leaves_nothing(tmp_path: Path) -> None:
    out = sample.writer(tmp_path)
    out.add(0, sample.rows(0))
    out.abort()
    assert partials(tmp_path) == []
    out = sample.writer(tmp_path)
    for item in range(3):
        out.add(item, sample.rows(item))
    assert list(find_captures(tmp_path)) == []
    target = out.finish("logprobs", {}, {})
    assert is_complete(target)


def test_a_living_writer_of_the_same_capture_is_left_alone(tmp_path: Path) -> None:
    arm_folder = sample.write(tmp_path).parent
    living = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = arm_folder / f"{PARTIAL}{next(find_captures(arm_folder)).name}-{writer_module._host()}-{living.pid}"
        other.mkdir()
        sample.write(tmp_path)
        assert other.is_dir()
    finally:
        living.kill()
        living.wait()
    sample.write(tmp_path)
    assert not other.exists()


def test_no_proc_file_system_is_needed_to_tell_the_living_from_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / f"{PARTIAL}x-{writer_module._host()}-{os.getppid()}"
    mine.mkdir()
    monkeypatch.setattr(Path, "exists", lambda _path: False)
    assert not abandoned(mine)


def test_a_writer_on_another_host_is_left_alone_for_a_day(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PARTIAL}x-elsewhere-1"
    theirs.mkdir()
    assert not abandoned(theirs)
    yesterday = time.time() - 90_000
    os.utime(theirs, (yesterday, yesterday))
    assert abandoned(theirs)


def test_a_finished_capture_replaces_a_damaged_one(tmp_path: Path) -> None:
    target = sample.write(tmp_path)
    (target / "part-00000.safetensors").write_bytes(b"")
    assert not is_complete(target)
    assert sample.write(tmp_path) == target
    assert is_complete(target)
    assert partials(tmp_path) == []


def test_two_writers_of_one_capture_both_end_well(tmp_path: Path) -> None:
    first = sample.writer(tmp_path)
    folder = first._folder.rename(first._folder.with_name(f"{PARTIAL}racing"))
    first._folder = folder
    second = sample.writer(tmp_path)
    for out in (first, second):
        for item in range(3):
            out.add(item, sample.rows(item))
        target = out.finish("logprobs", {}, {})
    assert is_complete(target)
    assert partials(tmp_path) == []


def test_memory_stays_at_a_part_and_an_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PART_BYTES", 1 << 20)
    request = Prefill("kld", tuple((i, 1, 2) for i in range(200)), 0, 1, tuple((0, 0) for _ in range(200)))
    out = sample.writer(tmp_path, request=request)
    tracemalloc.start()
    for item in range(200):  # 20 MiB in all
        out.add(item, {"logprobs": np.zeros((2, 13_000), np.float32)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * (1 << 20)
    assert len(Capture(out.finish("logprobs", {}, {})).manifest["files"]) > 15


def test_an_engine_may_use_an_answers_memory_again(tmp_path: Path) -> None:
    out, buffer = sample.writer(tmp_path), np.empty((2, 8), np.float32)
    for item in range(3):
        buffer[:] = item
        out.add(item, {"logprobs": buffer})
    capture = Capture(out.finish("logprobs", {}, {}))
    assert [float(capture.floats(item, "logprobs", 0, 1)[0, 0]) for item in range(3)] == [0, 1, 2]


def test_unanswered_items_and_second_or_empty_answers_are_refused_with_their_number(tmp_path: Path) -> None:
    out = sample.writer(tmp_path)
    out.add(1, sample.rows(1))
    with pytest.raises(CaptureError, match="left 2 of 3 items unanswered, first 0"):
        out.finish("logprobs", {}, {})
    out = sample.writer(tmp_path)
    out.add(0, sample.rows(0))
    with pytest.raises(CaptureError, match="item 0 was answered twice"):
        out.add(0, sample.rows(0))
    with pytest.raises(CaptureError, match="item 0 was answered with nothing"):
        sample.writer(tmp_path).add(0, {})


@pytest.mark.parametrize("item", [-1, 3])
def test_an_answer_to_no_question_is_refused(item: int, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=rf"answered item {item} of 3"):
        sample.writer(tmp_path).add(item, sample.rows(0))


def test_a_failed_item_needs_no_answer_and_keeps_its_reason(tmp_path: Path) -> None:
    out = sample.writer(tmp_path)
    for item in (0, 2):
        out.add(item, sample.rows(item))
    out.fail(1, "time-out")
    assert Capture(out.finish("logprobs", {}, {})).items[1]["failed"] == "time-out"


def test_one_head_of_one_content_is_kept_once_and_replaced_when_damaged(tmp_path: Path) -> None:
    head = {"weight": np.eye(4, dtype=np.float32)}
    first, second = store_head(tmp_path, head, 30.0, 2.0), store_head(tmp_path, head, 30.0, 2.0)
    assert first == second
    assert [path.name for path in (tmp_path / "heads").iterdir()] == [first["file"]]
    head = {"weight": np.eye(4, dtype=np.float32)}
    record = store_head(tmp_path, head, None, 1.0)
    path = tmp_path / "heads" / record["file"]
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    store_head(tmp_path, head, None, 1.0)
    weight = TensorFile(path).get("weight")
    assert isinstance(weight, np.ndarray)
    np.testing.assert_array_equal(weight, head["weight"])


def test_what_a_killed_writer_left_of_a_head_goes(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / "heads" / f"{PARTIAL}head-{writer_module._host()}-{gone.pid}"
    left.parent.mkdir()
    left.write_bytes(b"half")
    store_head(tmp_path, {"weight": np.eye(2, dtype=np.float32)}, None, 1.0)
    assert not left.exists()


def test_the_vocabulary_is_stored_as_it_is(tmp_path: Path) -> None:
    pieces = ["a", "", "Ġb", "</s>"]
    store_vocabulary(tmp_path, sample.vocabulary(pieces), pieces)
    [file] = (tmp_path / "vocabularies").iterdir()
    assert json.loads(gzip.decompress(file.read_bytes())) == pieces


def test_equal_answers_give_equal_bytes_but_for_the_time(tmp_path: Path) -> None:
    first, second = (sample.tree(sample.write(tmp_path / name)) for name in ("a", "b"))
    assert {k: v for k, v in first.items() if k != "manifest.json"} == {
        k: v for k, v in second.items() if k != "manifest.json"
    }


class _Comparing:
    """Puts figures in the place of rows, except in the parts ``kept``; counts the parts that hold rows."""

    def __init__(self, kept: tuple[int, ...] = ()) -> None:
        self.with_rows: list[int] = []
        self.n_results = 0
        self._kept, self._new = kept, ("", 0)

    def begin(self, folder: Path, part: int, items: list[int]) -> None:
        self.with_rows.append(sum("logprobs" in str(TensorFile(path).names()) for path in folder.glob("part-*")))
        capture = Capture(folder, verify=False)
        for item in items:
            capture.items[item] |= {"failed": None, "parts": part + 1}
        figures = {item: {"kl": np.full(2, float(item))} for item in items}
        self._new = ("", 0) if part in self._kept else drop_part_rows(capture, part, figures)

    def result(self) -> tuple[str, int]:
        self.n_results += 1
        return self._new


def test_at_most_one_part_on_disk_holds_rows_that_were_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PART_BYTES", 1)
    comparing = _Comparing()
    out = sample.writer(tmp_path, comparer=comparing)
    for item in (2, 0, 1):
        out.add(item, sample.rows(item))
    capture = Capture(out.finish("logprobs", {}, {}))
    assert comparing.with_rows == [1, 1, 1]
    assert capture.against == sample.AGAINST
    assert [capture.names(item) for item in range(3)] == [["figures.kl"]] * 3
    assert [np.asarray(capture.array(item, "figures.kl"))[0] for item in range(3)] == [0, 1, 2]


def test_a_part_that_could_not_be_compared_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PART_BYTES", 1)
    out = sample.writer(tmp_path, comparer=_Comparing(kept=(1,)))
    for item in range(3):
        out.add(item, sample.rows(item))
    target = out.finish("logprobs", {}, {})
    assert [Capture(target).names(item) for item in range(3)] == [["figures.kl"], ["logprobs"], ["figures.kl"]]
    assert is_complete(target)


def test_a_capture_that_is_given_up_leaves_no_result_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PART_BYTES", 1)
    comparing = _Comparing()
    out = sample.writer(tmp_path, comparer=comparing)
    out.add(0, sample.rows(0))
    out.abort()
    assert comparing.n_results == len(comparing.with_rows) == 1
    assert partials(tmp_path) == []


@pytest.mark.parametrize("first", [True, False])
def test_of_a_writer_of_rows_and_one_of_figures_the_second_leaves_what_the_first_wrote(
    first: bool, tmp_path: Path
) -> None:
    """Either serves both, and one may be read already."""
    for compared in (first, not first):
        out = sample.writer(tmp_path, comparer=_Comparing() if compared else None)
        for item in range(3):
            out.add(item, sample.rows(item))
        target = out.finish("logprobs", {}, {})
    assert Capture(target).has_rows() is not first
