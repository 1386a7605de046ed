"""Files of one model next to each other: the table, the figures as CSV, badge and frontier."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fidelab.core.errors import UsageError
from fidelab.models.local import bits_per_weight
from fidelab.report.markdown import render_markdown
from fidelab.report.runs import rows_of, runs_csv
from fidelab.report.standalone import badge_svg
from fidelab.report.view import build_view
from fidelab.report.weights import weights_of
from fidelab.results.record import ArmRecord, Report
from tests.models.tiny_gguf import write_gguf
from tests.report.sample import sample_report
from tests.run.harness import cli


def with_file(arm: ArmRecord, file: str, size: int, bits: float) -> ArmRecord:
    assert arm.ran is not None
    ran = arm.ran.model_copy(update={"weight_bytes": size, "bits_per_weight": bits})
    return arm.model_copy(update={"model": f"/models/{file}", "ran": ran})


@pytest.fixture
def files() -> Report:
    """The sample, its first candidate another GGUF file than the reference."""
    report = sample_report()
    first, *others = report.candidates
    reference = with_file(report.reference, "tiny-F16.gguf", 3 << 30, 16.0)
    candidates = [with_file(first, "tiny-Q8_0.gguf", 3 << 29, 8.5), *others]
    return report.model_copy(update={"reference": reference, "candidates": tuple(candidates)})


def test_the_table_has_file_size_bits_and_the_verdict_of_the_main_table(files: Report) -> None:
    view = build_view(files)
    [table] = [table for table in view.beside if table.key == "weights"]
    assert table.rows[0][1:] == ("tiny-F16.gguf", "3.00", "16.00", "–", "–", "reference")
    row = table.rows[1]
    assert row[1:4] == ("tiny-Q8_0.gguf", "1.50", "8.50")
    assert row[-1] == next(one.mark for one in view.candidates if one.name == row[0])


def test_markdown_has_the_table(files: Report) -> None:
    assert "| configuration | file | GiB | bits per weight | KLD | same top | verdict |" in render_markdown(files)


def test_a_run_of_one_model_has_no_table_of_weights() -> None:
    assert weights_of(sample_report(), {}) is None


def test_csv_has_bytes_and_bits_of_the_weights(files: Report) -> None:
    first = next(csv.DictReader(io.StringIO(runs_csv(rows_of("run", files)))))
    kld = files.candidates[0].axes["kld"]
    assert (first["weight_bytes"], first["bits_per_weight"]) == (str(3 << 29), "8.5")
    assert float(first["kld_nats"]) == kld.value("mean")


def test_a_badge_holds_the_figures_and_is_whole_svg() -> None:
    report = sample_report()
    root = ElementTree.fromstring(badge_svg(report, report.candidates[0]))
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == report.candidates[0].name
    assert words[1].startswith("KLD ")
    assert words[1].endswith("% same top")


def test_a_configuration_without_a_kld_has_no_badge() -> None:
    report = sample_report()
    bare = report.candidates[0].model_copy(update={"axes": {}})
    with pytest.raises(UsageError, match="has no KLD"):
        badge_svg(report, bare)


def test_the_command_prints_csv_and_writes_the_images_and_refuses_what_has_no_effect(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(sample_report().to_json())
    name = sample_report().candidates[0].name
    assert cli("report", report, "--csv", cwd=tmp_path).out.startswith("run,created,model")
    for form in (("badge", "--configuration", name), ("frontier",)):
        done = cli("report", report, "--format", *form, cwd=tmp_path)
        assert (done.code, done.out[:4]) == (0, "<svg")
    for words in (("--csv", "--markdown"), ("--format", "frontier", "--configuration", name)):
        done = cli("report", report, *words, cwd=tmp_path)
        assert (done.code, done.err.count("\n")) == (2, 1)


def test_bits_per_weight_are_those_of_the_tensors_alone_and_of_all_parts(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf")
    assert bits_per_weight(one) == 32.0
    parts = [write_gguf(tmp_path / f"m-0000{n}-of-00002.gguf", seed=n) for n in (1, 2)]
    assert bits_per_weight(parts[0]) == 32.0
