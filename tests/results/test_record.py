"""The record is strict JSON, says what it refuses, and is written in one step."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from fidelab.core import Status, write_atomically
from fidelab.core.errors import InputError, OutputError
from fidelab.results.measurement import Definition, Measurement, Metric
from fidelab.results.plots import Curve
from fidelab.results.record import ArmRecord, Composite, Report, RuntimeRecord
from fidelab.results.values import Record
from tests.report.sample import HOSTILE, arm, candidate, sample_report

SCHEMA_FILE = Path(__file__).parents[2] / "schema" / "fidelab.report-1.schema.json"


def edited(tmp_path: Path, edit: dict[str, Any]) -> Path:
    """A written sample with some top-level keys replaced."""
    path = sample_report().write(tmp_path / "report.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    return path


def test_a_report_and_hostile_text_survive_the_round_trip(tmp_path: Path) -> None:
    for report in (sample_report(), sample_report(command=HOSTILE, settings={HOSTILE: [HOSTILE]})):
        assert Report.from_json(report.write(tmp_path / "report.json")) == report


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (Metric, {"key": "mean", "name": "mean", "value": ...}),
        (Metric, {"key": "mean", "name": "mean", "ci": (0, ...)}),
        (Metric, {"key": "rate", "name": "rate", "cell": {"rate": ...}}),
        (Curve, {"key": "k", "title": "t", "x_label": "", "y_label": "", "x": [1], "y": [...]}),
        (Measurement, {"status": "ok", "facts": {"a": [...]}}),
        (RuntimeRecord, {"scale": ...}),
        (RuntimeRecord, {"scale": {"layers": [...]}}),
    ],
)
def test_numbers_that_json_lacks_are_refused(model: type[BaseModel], fields: dict[str, Any], value: float) -> None:
    def put(tree: Any, value: float) -> Any:
        if isinstance(tree, dict):
            return {key: put(item, value) for key, item in tree.items()}
        if isinstance(tree, list | tuple):
            return [put(item, value) for item in tree]
        return value if tree is ... else tree

    model.model_validate(put(fields, 0.5))
    with pytest.raises(ValidationError):
        model.model_validate(put(fields, value))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"settings": {"x": float("nan")}}, "NaN is not JSON"),
        ({"schema": "fidelab.report/7", "new": 1}, r"has schema 'fidelab\.report/7'; .* reads 'fidelab\.report/1'"),
    ],
    ids=["NaN", "another schema"],
)
def test_a_file_that_is_not_a_report_of_this_version_is_refused(
    tmp_path: Path, edit: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        Report.from_json(edited(tmp_path, edit))


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValidationError, match="surrogates not allowed"):
        sample_report(settings={"log": "\ud800"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((text, "not a fidelab report") for text in (b"[]", b"3", b"{}", b'{"schema": null}')),
        (b'{\n "schema": oops}', "line 2, column 12"),
        (b"{\xff}", "byte 1"),
        (None, "cannot read"),
    ],
)
def test_what_is_not_a_report_says_why(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        Report.from_json(path)


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        ({"colour": "red"}, "colour"),
        ({"command": 3}, "command"),
        ({"created": "2026-05-04T12:00:00"}, "created"),
        ({"reference": {"name": "x"}}, "reference.status"),
        ({"floor": {"kld": {"status": "ok", "mean": 0.1}}}, "floor.kld.mean"),
        (
            {"floor": {"kld": {"status": "ok", "metrics": [{"key": "mean", "name": "mean", "value": "0.1"}]}}},
            "floor.kld.metrics.0.value",
        ),
    ],
)
def test_malformed_reports_are_refused_by_place(tmp_path: Path, edit: dict[str, Any], place: str) -> None:
    with pytest.raises(InputError, match=rf"report\.json: {place}: "):
        Report.from_json(edited(tmp_path, edit))


@pytest.mark.parametrize("status", ["failed", "not_engaged", "not_supported"])
def test_a_bad_status_needs_a_reason(status: str) -> None:
    with pytest.raises(ValidationError, match="needs a reason"):
        arm("bf16", status=status, reason=" ")


def test_an_arm_is_measurable_composites_lie_between_0_and_100_and_no_interval_is_upside_down() -> None:
    with pytest.raises(ValidationError, match="outcome of a test"):
        arm("bf16", status=Status.NOT_MEASURABLE, reason="x")
    for score, said in ((-0.1, "equal to 0"), (100.1, "equal to 100")):
        with pytest.raises(ValidationError, match=said):
            Composite(value=score)
    with pytest.raises(ValidationError, match="lies above"):
        Metric(key="mean", name="mean", ci=(0.2, 0.1))


def test_two_metrics_of_one_name_and_shape_are_refused() -> None:
    rate = Definition("rate", "tok/s", "higher")
    two = (rate(1, cell={"batch": 1}), rate(1, cell={"batch": 2}))
    assert len(Measurement(status=Status.OK, metrics=two).metrics) == 2
    with pytest.raises(ValidationError, match="two metrics have the key 'rate' at batch 1"):
        Measurement(status=Status.OK, metrics=(rate(1, cell={"batch": 1}), rate(2, cell={"batch": 1})))


def test_two_candidates_of_one_name_are_refused() -> None:
    twin = candidate("fp8_e4m3", 0.01, "PASS", 1, "safe")
    with pytest.raises(ValidationError, match="named 'fp8_e4m3'"):
        sample_report(candidates=(twin, twin))


def test_a_kv_spec_is_read_as_it_was_written() -> None:
    written = arm("int4[group=32,skip-layers=0,29]/f16")
    assert ArmRecord.model_validate_json(written.model_dump_json(), strict=True) == written


def test_the_stored_schema_is_current() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == Report.json_schema()


def test_the_sample_is_valid_under_the_stored_schema() -> None:
    jsonschema.validate(json.loads(sample_report().to_json()), json.loads(SCHEMA_FILE.read_text()))


def test_every_field_says_what_it_is() -> None:
    definitions = Report.json_schema()["$defs"]
    bare = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, about in definition.get("properties", {}).items()
        if not about.get("description")
    ]
    assert bare == []


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.txt"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("x.txt", "two")]


STOPPED = """
import os, sys, time
from fidelab import core
def stop(number):
    print("written", flush=True)
    time.sleep(600)
os.fsync = stop
if sys.argv[2]:
    del os.O_TMPFILE
core.write_atomically(sys.argv[1], "half")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_a_writer_that_is_killed_leaves_nothing_of_a_new_file(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path / "x"), ""], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        assert [*tmp_path.iterdir()] == []
        writer.kill()


def test_the_next_write_removes_what_a_killed_writer_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    line = [sys.executable, "-c", STOPPED, str(path), "named"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        write_atomically(path, "one")
        assert len([*tmp_path.iterdir()]) == 2
        writer.kill()
    write_atomically(path, "two")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x", "two")]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x.txt", "old")]


def test_a_place_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        sample_report().write(tmp_path / "file" / "report.json")


def test_threads_may_be_the_first_to_use_a_record() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):

            class Inner(Record):
                x: int = 1

            class Outer(Record):
                inner: Inner | None = None
                by_name: dict[str, Inner] | None = None

            began = threading.Barrier(8)

            def used(kind: type[Outer] = Outer, began: threading.Barrier = began) -> int:
                began.wait()
                return len(kind.model_validate({"inner": {"x": 2}, "by_name": {"a": {}}}).model_dump_json())

            with ThreadPoolExecutor(8) as pool:
                found = {result.result() for result in [pool.submit(used) for _ in range(8)]}
            assert len(found) == 1
    finally:
        sys.setswitchinterval(before)
