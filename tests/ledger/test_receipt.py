"""Receipts: one altered digit is found, and so is a chain made anew around figures that the captures do not give."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fidelab.captures.manifest import dump_manifest
from fidelab.core import canonical_json
from fidelab.ledger import receipt as ledger
from fidelab.ledger.receipt import Verified, json_schema
from fidelab.results.record import Report
from fidelab.results.study import Study
from fidelab.run.conduct import recompute
from fidelab.studies.leaderboard import rank
from tests.run.harness import Done, cli

Lines = list[dict[str, Any]]
SCHEMA_FILE = Path(__file__).parents[2] / "schema" / "fidelab.receipt-0.schema.json"


@pytest.fixture
def receipt(runs: Path) -> Path:
    done = cli("share", "publish", "latest", "-o", "receipt.jsonl", cwd=runs)
    assert (done.code, done.out, done.err) == (0, "receipt.jsonl\n", "")
    return runs / "receipt.jsonl"


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def forge(path: Path, change: Callable[[Lines], None]) -> None:
    """Alter a receipt and make its chain anew, as somebody would who knows how."""
    lines, previous = lines_of(path), None
    change(lines)
    for n, line in enumerate(lines):
        bare = {**{key: value for key, value in line.items() if key != "hash"}, "n": n, "previous": previous}
        bare |= {"lines": n} if bare["kind"] == "end" else {}
        previous = hashlib.sha256(canonical_json(bare).encode()).hexdigest()
        line.clear()
        line.update(bare, hash=previous)
    path.write_text("".join(canonical_json(line) + "\n" for line in lines))


def candidate(lines: Lines) -> dict[str, Any]:
    return next(line["arm"] for line in lines if line["kind"] == "arm" and line["role"] == "candidate")


def kld(lines: Lines, name: str) -> dict[str, Any]:
    return next(metric for metric in candidate(lines)["axes"]["kld"]["metrics"] if metric["name"] == name)


def verify(path: Path, run: Path | None = None) -> Verified:
    return ledger.verify(path, lambda *given: recompute(*given).report, run)


def faults(path: Path, run: Path | None = None) -> str:
    return "\n".join(verify(path, run).faults)


def run_of(cwd: Path) -> Path:
    [path] = (cwd / "runs").glob("2*")
    return path


# ------------------------------------------------------------------------------------------------- what it says


def test_an_untouched_receipt_is_verified_and_its_numbers_are_computed_again(receipt: Path, runs: Path) -> None:
    done = cli("share", "verify", "receipt.jsonl", "--json", cwd=runs)
    [entry] = json.loads(done.out)["receipts"]
    assert (done.code, entry["verdict"], entry["faults"], entry["remarks"]) == (0, "verified", [], [])
    numbers = len(re.findall(r'"value":-?\d', receipt.read_text()))
    assert entry["recomputed"] > numbers > 50


def test_a_receipt_that_nobody_computed_again_is_not_verified(receipt: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(receipt, tmp_path / "elsewhere")
    done = cli("share", "verify", "receipt.jsonl", cwd=tmp_path / "elsewhere")
    assert done.code == 3
    assert "receipt.jsonl: consistent, not verified: " in done.out


def test_every_line_holds_to_the_schema_which_is_the_one_in_its_folder(receipt: Path) -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()
    validator = jsonschema.Draft202012Validator(json_schema())
    for line in lines_of(receipt):
        validator.validate(line)


def test_it_holds_the_figures_of_the_report_and_the_hashes_of_its_captures(receipt: Path, runs: Path) -> None:
    lines, report = lines_of(receipt), json.loads((run_of(runs) / "report.json").read_text())
    assert kld(lines, "mean") == next(
        m for m in report["candidates"][0]["axes"]["kld"]["metrics"] if m["name"] == "mean"
    )
    manifests = [json.loads(path.read_text()) for path in (runs / "runs" / "captures").glob("*/*/manifest.json")]
    listed = {line["manifest"]: line["files"] for line in lines if line["kind"] == "capture"}
    assert listed == {
        manifest["checksum"]: [{key: file[key] for key in ("name", "sha256", "bytes")} for file in manifest["files"]]
        for manifest in manifests
    }


def test_no_text_and_no_folder_of_this_machine_is_in_it(receipt: Path, runs: Path) -> None:
    text = receipt.read_text()
    assert str(runs.parent.parent) not in text
    assert "text.txt" in text
    assert all(found["plots"] == [] for found in candidate(lines_of(receipt))["axes"].values())


# ------------------------------------------------------------------------------------------------- what is caught


def test_any_altered_digit_is_caught(receipt: Path, tmp_path: Path) -> None:
    text = receipt.read_text()
    digits = [match.start() for match in re.finditer(r"\d", text)]
    copy = tmp_path / "elsewhere.jsonl"
    for place in random.Random(7).sample(digits, 60):
        copy.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
        assert faults(copy), text[place - 40 : place + 20]


def test_a_digit_that_no_float_can_tell_is_caught(receipt: Path) -> None:
    forge(receipt, lambda lines: kld(lines, "mean").update(noise=0.30000000000000004))
    text = receipt.read_text()
    assert float("0.30000000000000005") == 0.30000000000000004
    receipt.write_text(text.replace("0.30000000000000004", "0.30000000000000005"))
    assert "line 3 (arm tilt[q=0.6] as candidate) was altered" in faults(receipt)


@pytest.mark.parametrize("harm", ["cut", "removed", "swapped", "added", "noise"])
def test_lines_that_are_cut_removed_moved_or_added_are_caught(harm: str, receipt: Path) -> None:
    lines = receipt.read_text().splitlines(keepends=True)
    harmed = {
        "cut": lines[:-1],
        "removed": lines[:2] + lines[3:],
        "swapped": [lines[0], lines[2], lines[1], *lines[3:]],
        "added": [*lines, lines[-1]],
        "noise": [*lines[:3], "{}\n", *lines[3:]],
    }
    receipt.write_text("".join(harmed[harm]))
    assert faults(receipt)


def test_a_line_of_another_receipt_in_the_place_of_one_is_caught(receipt: Path) -> None:
    own = receipt.read_text().splitlines(keepends=True)
    forge(receipt, lambda lines: kld(lines, "median").update(value=0.001))
    other = receipt.read_text().splitlines(keepends=True)
    receipt.write_text("".join([*own[:2], other[2], *own[3:]]))  # its number and its own hash are right
    assert "line 4 (arm tilt[q=0.9] as candidate) does not follow" in faults(receipt)


def test_a_fault_exits_with_1_and_names_file_and_line(receipt: Path, runs: Path) -> None:
    receipt.write_text(receipt.read_text().replace('"usable_cores":', '"usable_core5":', 1))
    done = cli("share", "verify", receipt, cwd=runs)
    assert done.code == 1
    assert "receipt.jsonl: line 1 (head) was altered" in done.err


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines: candidate(lines)["verdict"].update(band="EXCELLENT"), "verdict: EXCELLENT is better than"),
        (lambda lines: kld(lines, "score").update(value=99.9), "is not 100 · exp"),
        (lambda lines: candidate(lines)["composite"].update(value=99.9), "is not the harmonic mean"),
        (
            lambda lines: candidate(lines)["benches"]["decode"]["metrics"][0].update(value=640.0),
            "is not the median of its repeats",
        ),
        (lambda lines: lines[0]["recommendation"].update(arm="int1"), "which is not a candidate"),
        (lambda lines: lines.pop(1), "0 references"),
    ],
    ids=["verdict", "score", "composite", "speed", "recommendation", "reference"],
)
def test_figures_that_contradict_each_other_are_caught_without_captures(
    change: Callable[[Lines], None], fault: str, receipt: Path, tmp_path: Path
) -> None:
    forge(receipt, change)
    assert fault in faults(receipt, None)


def test_a_forged_chain_without_contradictions_is_caught_by_the_captures_alone(receipt: Path, runs: Path) -> None:
    def change(lines: Lines) -> None:
        metric = kld(lines, "median")
        metric["value"] *= 0.99

    forge(receipt, change)
    assert faults(receipt) == ""
    assert "kld, metrics, median, value: the receipt says" in faults(receipt, run_of(runs))


def test_a_receipt_is_told_from_one_of_another_run(receipt: Path, runs: Path, made: Done) -> None:
    capture = next((runs / "runs" / "captures").glob("*/kld-*"))
    manifest = json.loads((capture / "manifest.json").read_text())
    manifest["facts"]["seconds"] = 123.0  # other captures with the same answers
    (capture / "manifest.json").write_text(dump_manifest(manifest))
    assert re.search(r"capture kld of \S+, manifest: the receipt says", faults(receipt, run_of(runs)))
    assert faults(receipt, made.folder) == ""


def test_captures_that_are_gone_cannot_be_computed_again_and_that_is_a_fault_where_they_were_named(
    receipt: Path, runs: Path
) -> None:
    shutil.rmtree(runs / "runs" / "captures")
    assert "cannot be computed again" in faults(receipt, run_of(runs))
    elsewhere = verify(receipt)
    assert (elsewhere.faults, elsewhere.recomputed) == ((), None)
    assert "not available" in elsewhere.remarks[0]


def test_verifying_writes_nothing(receipt: Path, runs: Path) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run_of(runs).rglob("*")}

    before = state()
    verify(receipt, run_of(runs))
    assert state() == before


def test_what_is_no_receipt_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    done = cli("share", "verify", "x", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "its first line does not name schema fidelab.receipt/0" in done.err
    (tmp_path / "x").write_text("")
    assert cli("share", "verify", "x", cwd=tmp_path).code == 2


# --------------------------------------------------------------------------------------------------- corrections


def test_a_receipt_is_never_replaced(receipt: Path, runs: Path) -> None:
    before = receipt.read_bytes()
    done = cli("share", "publish", "latest", "-o", "receipt.jsonl", cwd=runs)
    assert done.code == 2
    assert "receipts are not replaced" in done.err
    assert receipt.read_bytes() == before


def test_a_receipt_gives_back_the_report_without_plots(receipt: Path, runs: Path) -> None:
    [run] = (runs / "runs").glob("2*")
    report = Report.from_json(run / "report.json")
    board = rank([report])
    assert rank([ledger.read_receipt(receipt).report()]).rows == board.rows
    assert (
        Study.model_validate_json(cli("share", "leaderboard", "receipt.jsonl", "--json", cwd=runs).out).rows
        == board.rows
    )


def test_an_altered_receipt_is_not_ranked(receipt: Path, runs: Path) -> None:
    receipt.write_text(receipt.read_text().replace("fake", "face", 1))
    done = cli("share", "leaderboard", "receipt.jsonl", cwd=runs)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "was altered" in done.err
    forge(receipt, lambda lines: kld(lines, "score").update(value=99.0))
    done = cli("share", "leaderboard", "receipt.jsonl", cwd=runs)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "kld, score" in done.err
