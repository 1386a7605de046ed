"""Receipts: one altered digit is found, and so is a hash made anew over figures that the captures do not give."""

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
from fidelab.core.errors import InputError
from fidelab.ledger import receipt as ledger
from fidelab.ledger.receipt import Verified, json_schema
from fidelab.results.record import Report
from fidelab.results.study import Study
from fidelab.run.pipeline import recompute
from fidelab.studies.leaderboard import rank
from tests.run.harness import Done, cli, refused

Plain = dict[str, Any]
SCHEMA_FILE = Path(__file__).parents[2] / "schema" / "fidelab.receipt-0.schema.json"


@pytest.fixture
def receipt(runs: Path) -> Path:
    done = cli("share", "publish", "latest", "-o", "receipt.json", cwd=runs)
    assert (done.code, done.out, done.err) == (0, "receipt.json\n", "")
    return runs / "receipt.json"


def plain_of(path: Path) -> Plain:
    plain: Plain = json.loads(path.read_text())
    return plain


def forge(path: Path, change: Callable[[Plain], None]) -> None:
    """Alter a receipt and make its hash anew, as somebody would who knows how."""
    plain = plain_of(path)
    change(plain)
    del plain["sha256"]
    plain["sha256"] = hashlib.sha256(canonical_json(plain).encode()).hexdigest()
    path.write_text(canonical_json(plain) + "\n")


def candidate(plain: Plain) -> Plain:
    arm: Plain = plain["report"]["candidates"][0]
    return arm


def kld(plain: Plain, name: str) -> Plain:
    return next(metric for metric in candidate(plain)["axes"]["kld"]["metrics"] if metric["name"] == name)


def verify(path: Path, run: Path | None = None) -> Verified:
    return ledger.verify(path, lambda *given: recompute(*given).report, run)


def faults(path: Path, run: Path | None = None) -> str:
    return "\n".join(verify(path, run).faults)


def faults_or_refusal(path: Path) -> str:
    try:
        return faults(path)
    except InputError as error:
        return str(error)


def run_of(cwd: Path) -> Path:
    [path] = (cwd / "runs").glob("2*")
    return path


def test_an_untouched_receipt_is_verified_and_its_numbers_are_computed_again(receipt: Path, runs: Path) -> None:
    done = cli("share", "verify", "receipt.json", "--json", cwd=runs)
    [entry] = json.loads(done.out)["receipts"]
    assert (done.code, entry["verdict"], entry["faults"], entry["remark"]) == (0, "verified", [], "")
    numbers = len(re.findall(r'"value":-?\d', receipt.read_text()))
    assert entry["recomputed"] > numbers > 50


def test_a_receipt_that_nobody_computed_again_is_not_verified(receipt: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(receipt, tmp_path / "elsewhere")
    done = cli("share", "verify", "receipt.json", cwd=tmp_path / "elsewhere")
    assert done.code == 3
    assert "receipt.json: consistent, not verified: " in done.out


def test_it_holds_to_the_schema_which_is_the_one_in_its_folder(receipt: Path) -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()
    jsonschema.Draft202012Validator(json_schema()).validate(plain_of(receipt))


def test_it_holds_the_figures_of_the_report_and_the_hashes_of_its_captures(receipt: Path, runs: Path) -> None:
    plain, report = plain_of(receipt), json.loads((run_of(runs) / "report.json").read_text())
    assert kld(plain, "mean") == next(
        m for m in report["candidates"][0]["axes"]["kld"]["metrics"] if m["name"] == "mean"
    )
    manifests = [json.loads(path.read_text()) for path in (runs / "runs" / "captures").glob("*/*/manifest.json")]
    listed = {checksum for parts in plain["captures"].values() for checksum in parts.values()}
    assert listed == {manifest["checksum"] for manifest in manifests}


def test_no_text_and_no_folder_of_this_machine_is_in_it(receipt: Path, runs: Path) -> None:
    text = receipt.read_text()
    assert str(runs.parent.parent) not in text
    assert "text.txt" in text
    assert all(found["plots"] == [] for found in candidate(plain_of(receipt))["axes"].values())


def test_any_altered_digit_is_caught(receipt: Path, tmp_path: Path) -> None:
    text = receipt.read_text()
    digits = [match.start() for match in re.finditer(r"\d", text)]
    copy = tmp_path / "elsewhere.json"
    for place in random.Random(7).sample(digits, 60):
        copy.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
        assert faults_or_refusal(copy), text[place - 40 : place + 20]


def test_a_digit_that_no_float_can_tell_is_caught(receipt: Path) -> None:
    forge(receipt, lambda plain: kld(plain, "mean").update(noise=0.30000000000000004))
    text = receipt.read_text()
    assert float("0.30000000000000005") == 0.30000000000000004
    receipt.write_text(text.replace("0.30000000000000004", "0.30000000000000005"))
    assert "it was altered" in faults(receipt)


@pytest.mark.parametrize("left", [0.5, 0.999])
def test_a_receipt_that_was_cut_off_is_refused_in_one_line(left: float, receipt: Path, runs: Path) -> None:
    text = receipt.read_text()
    receipt.write_text(text[: int(left * len(text))])
    assert "receipt.json is not a receipt" in refused(cli("share", "verify", receipt, cwd=runs))


def test_a_fault_exits_with_1_and_names_the_file(receipt: Path, runs: Path) -> None:
    receipt.write_text(receipt.read_text().replace('"usable_cores":', '"usable_core5":', 1))
    done = cli("share", "verify", receipt, cwd=runs)
    assert done.code == 1
    assert "receipt.json: it was altered" in done.err


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda plain: candidate(plain)["verdict"].update(band="EXCELLENT"), "verdict: EXCELLENT is better than"),
        (lambda plain: kld(plain, "score").update(value=99.9), "is not 100 · exp"),
        (lambda plain: candidate(plain)["composite"].update(value=99.9), "is not the harmonic mean"),
        (
            lambda plain: candidate(plain)["benches"]["decode"]["metrics"][0].update(value=640.0),
            "is not the median of its repeats",
        ),
        (lambda plain: plain["report"]["recommendation"].update(arm="int1"), "which is not a candidate"),
    ],
    ids=["verdict", "score", "composite", "speed", "recommendation"],
)
def test_figures_that_contradict_each_other_are_caught_without_captures(
    change: Callable[[Plain], None], fault: str, receipt: Path, tmp_path: Path
) -> None:
    forge(receipt, change)
    assert fault in faults(receipt, None)


def test_a_forged_hash_without_contradictions_is_caught_by_the_captures_alone(receipt: Path, runs: Path) -> None:
    def change(plain: Plain) -> None:
        metric = kld(plain, "median")
        metric["value"] *= 0.99

    forge(receipt, change)
    assert faults(receipt) == ""
    assert "tilt[q=0.6], axes, kld, metrics, median, value: the receipt says" in faults(receipt, run_of(runs))


def test_a_receipt_is_told_from_one_of_another_run(receipt: Path, runs: Path, made: Done) -> None:
    capture = next((runs / "runs" / "captures").glob("*/kld-*"))
    manifest = json.loads((capture / "manifest.json").read_text())
    manifest["facts"]["seconds"] = 123.0  # other captures with the same answers
    (capture / "manifest.json").write_text(dump_manifest(manifest))
    assert re.search(r"captures, \S+, kld: the receipt says", faults(receipt, run_of(runs)))
    assert faults(receipt, made.folder) == ""


def test_captures_that_are_gone_cannot_be_computed_again_and_that_is_a_fault_where_they_were_named(
    receipt: Path, runs: Path
) -> None:
    shutil.rmtree(runs / "runs" / "captures")
    assert "cannot be computed again" in faults(receipt, run_of(runs))
    elsewhere = verify(receipt)
    assert (elsewhere.faults, elsewhere.recomputed) == ((), None)
    assert "not available" in elsewhere.remark


def test_verifying_writes_nothing(receipt: Path, runs: Path) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run_of(runs).rglob("*")}

    before = state()
    verify(receipt, run_of(runs))
    assert state() == before


def test_what_is_no_receipt_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    assert "x is not a receipt" in refused(cli("share", "verify", "x", cwd=tmp_path))
    (tmp_path / "x").write_text("")
    assert cli("share", "verify", "x", cwd=tmp_path).code == 2


def test_a_receipt_is_never_replaced(receipt: Path, runs: Path) -> None:
    before = receipt.read_bytes()
    assert "receipts are not replaced" in refused(cli("share", "publish", "latest", "-o", "receipt.json", cwd=runs))
    assert receipt.read_bytes() == before


def test_a_receipt_gives_back_the_report_without_plots(receipt: Path, runs: Path) -> None:
    [run] = (runs / "runs").glob("2*")
    report = Report.from_json(run / "report.json")
    board = rank([report])
    assert rank([ledger.report_of(receipt)]).rows == board.rows
    assert (
        Study.model_validate_json(cli("share", "leaderboard", "receipt.json", "--json", cwd=runs).out).rows
        == board.rows
    )


def test_an_altered_receipt_is_not_ranked(receipt: Path, runs: Path) -> None:
    receipt.write_text(receipt.read_text().replace("fake", "face", 1))
    assert "was altered" in refused(cli("share", "leaderboard", "receipt.json", cwd=runs))
    forge(receipt, lambda plain: kld(plain, "score").update(value=99.0))
    assert "kld, score" in refused(cli("share", "leaderboard", "receipt.json", cwd=runs))
