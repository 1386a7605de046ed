"""Samples of lm-evaluation-harness: paired tests against closed forms, and folders that cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from fidelab.core.errors import FidelabError, InputError, MismatchError, UsageError
from fidelab.imports.lm_eval import import_samples
from fidelab.imports.write_run import ImportedArm
from fidelab.results.measurement import Measurement
from tests.run.harness import cli

Change = Callable[[dict[str, Any]], object]


def samples(
    folder: Path,
    right: Sequence[int],
    task: str = "arc_easy",
    time: str = "2026-06-01T10-00-00.123456",
    filters: Sequence[str] = ("none",),
    change: Change = lambda _item: None,
) -> Path:
    """A folder as the harness leaves one: a line per item and filter."""
    inner = folder / "model__name"
    inner.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, value in enumerate(right):
        for filter_ in filters:
            item = {
                "doc_id": number,
                "doc": {"question": f"q{number}"},
                "target": "1",
                "filter": filter_,
                "metrics": ["acc", "loglikelihood"],
                "doc_hash": f"d{number}",
                "prompt_hash": f"p{number}",
                "target_hash": f"t{number}",
                "acc": float(value),
                "loglikelihood": -1.5 - number,
            }
            change(item)
            lines.append(json.dumps(item))
    (inner / f"samples_{task}_{time}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def outcomes(both: int, lost: int, gained: int, neither: int) -> tuple[list[int], list[int]]:
    """Right answers of reference and arm."""
    ref = [1] * both + [1] * lost + [0] * gained + [0] * neither
    test = [1] * both + [0] * lost + [1] * gained + [0] * neither
    return ref, test


def run(folder: Path, *tests: Path, **more: Any) -> ImportedArm:
    return import_samples(folder / "ref", tests, folder / "runs", **more)


def only(imported: ImportedArm) -> Measurement:
    [arm] = imported.report.candidates
    [axis] = arm.axes.values()
    return axis


def test_a_paired_test_finds_what_the_unpaired_one_of_the_harness_does_not(tmp_path: Path) -> None:
    # the example of the harness's own discussion of it: 220 items, z-test 0.080, McNemar 0.008
    ref, test = outcomes(110, 30, 12, 68)
    samples(tmp_path / "ref", ref)
    axis = only(run(tmp_path, samples(tmp_path / "test", test)))
    assert axis.value("unpaired_p") == pytest.approx(0.080, abs=5e-4)
    assert axis.value("mcnemar_p") == pytest.approx(binomtest(12, 42).pvalue)
    assert axis.value("mcnemar_p") == pytest.approx(0.008, abs=5e-4)
    assert (axis.value("lost"), axis.value("gained"), axis.n_items) == (30, 12, 220)
    assert axis.value("difference") == pytest.approx(-100 * 18 / 220)
    low, high = axis.ci("difference") or (0, 0)
    assert low < -100 * 18 / 220 < high < 0


def test_twenty_equal_items_are_no_certificate_and_two_thousand_are(tmp_path: Path) -> None:
    states = {}
    for n in (20, 2000):
        folder = tmp_path / str(n)
        right = (np.random.default_rng(1).random(n) < 0.7).astype(int).tolist()
        samples(folder / "ref", right)
        [arm] = run(folder, samples(folder / "test", right)).report.candidates
        [certificate] = arm.certificates.values()
        states[n] = certificate.state
        assert arm.verdict is not None
    assert states == {20: "underpowered", 2000: "holds"}


def test_a_planted_loss_is_exceeded(tmp_path: Path) -> None:
    ref, test = outcomes(500, 120, 10, 370)
    samples(tmp_path / "ref", ref)
    [arm] = run(tmp_path, samples(tmp_path / "test", test)).report.candidates
    [certificate] = arm.certificates.values()
    assert certificate.state == "exceeded"
    assert arm.verdict is not None
    assert "lost 120 of 1000, gained 10" in arm.verdict.sentence


def test_filters_are_apart_and_other_metrics_are_named(tmp_path: Path) -> None:
    ref, test = outcomes(10, 3, 2, 5)
    filters = ("strict-match", "flexible-extract")
    samples(tmp_path / "ref", ref, "gsm8k", filters=filters)
    imported = run(tmp_path, samples(tmp_path / "test", test, "gsm8k", filters=filters))
    [arm] = imported.report.candidates
    assert set(arm.axes) == {"lm-eval:gsm8k:acc:strict-match", "lm-eval:gsm8k:acc:flexible-extract"}
    assert any("loglikelihood" in note and "left out" in note for note in imported.notes)


def test_of_several_runs_in_a_folder_the_last_one_counts(tmp_path: Path) -> None:
    ref, test = outcomes(10, 3, 2, 5)
    samples(tmp_path / "ref", ref)
    folder = samples(tmp_path / "test", ref)
    samples(folder, test, time="2026-06-02T10-00-00.123456")
    assert only(run(tmp_path, folder)).value("lost") == 3


def _other_content(item: dict[str, Any]) -> None:
    if item["doc_id"] == 7:
        item["doc_hash"] = "another"


def test_other_content_fewer_items_and_other_tasks_are_refused(tmp_path: Path) -> None:
    ref, test = outcomes(10, 3, 2, 5)
    samples(tmp_path / "ref", ref)
    other = samples(tmp_path / "content", test, change=_other_content)
    with pytest.raises(MismatchError, match=r"task arc_easy: item 7 has other content"):
        run(tmp_path, other)
    with pytest.raises(MismatchError, match="item 18 is in only one of"):
        run(tmp_path, samples(tmp_path / "few", test[:18]))
    with pytest.raises(MismatchError, match="arc_easy against hellaswag"):
        run(tmp_path, samples(tmp_path / "other", test, "hellaswag"))


DAMAGES = {
    "no JSON": "{",
    "a list": "[1]",
    "without a number": '{"acc": 1.0}',
    "with a text as number": '{"doc_id": "3", "acc": 1.0}',
    "twice, differently": '{"doc_id": 0, "doc_hash": "x", "acc": 1.0}',
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_line_is_one_line_with_its_number(name: str, tmp_path: Path) -> None:
    samples(tmp_path / "ref", [1, 0, 1])
    folder = samples(tmp_path / "test", [1, 0, 1])
    [file] = folder.rglob("*.jsonl")
    file.write_text(file.read_text() + DAMAGES[name] + "\n")
    with pytest.raises(FidelabError, match="line 4") as refused:
        run(tmp_path, folder)
    assert "\n" not in str(refused.value)


def test_a_folder_without_samples_and_the_reference_itself_are_refused(tmp_path: Path) -> None:
    samples(tmp_path / "ref", [1, 0])
    (tmp_path / "empty").mkdir()
    for folder, said in (("empty", "log_samples"), ("absent", "is not a folder"), ("ref", "itself")):
        with pytest.raises((InputError, UsageError), match=said):
            run(tmp_path, tmp_path / folder)


def test_the_command_writes_a_report_and_refuses_an_impossible_margin(tmp_path: Path) -> None:
    ref, test = outcomes(110, 30, 12, 68)
    samples(tmp_path / "ref", ref)
    samples(tmp_path / "test", test)
    done = cli("import", "lm-eval", "ref", "test", "--margin", "2%", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "lost 30 of 220" in " ".join(done.out.split())
    assert (done.folder / "report.html").is_file()
    refused = cli("import", "lm-eval", "ref", "test", "--margin", "200%", cwd=tmp_path)
    assert (refused.code, "margin" in refused.err) == (2, True)


def test_of_a_folder_of_several_models_one_has_to_be_named(tmp_path: Path) -> None:
    ref, test = samples(tmp_path / "ref", [1, 0, 1]), samples(tmp_path / "test", [1, 1, 1])
    (ref / "another__int4").mkdir()
    for file in (ref / "model__name").iterdir():
        (ref / "another__int4" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"holds samples of 2 models: name one of another__int4, model__name$"):
        import_samples(ref, [test], tmp_path)
    imported = import_samples(ref / "model__name", [test], tmp_path)
    assert imported.report.reference.name == "model__name"


def test_one_folder_has_its_figures_with_intervals_and_no_comparison(tmp_path: Path) -> None:
    samples(tmp_path / "out", [1] * 30 + [0] * 10)
    done = cli("import", "lm-eval", "out", cwd=tmp_path)
    assert done.code == 0
    assert "nothing was compared: name another folder" in done.err
    assert "30 of 40 right" in done.out
    metric = done.report["reference"]["axes"]["lm-eval:arc_easy:acc"]["metrics"][0]
    low, high = binomtest(30, 40).proportion_ci(method="exact")
    assert metric["value"] == 0.75
    assert metric["ci"] == pytest.approx([low, high])
    assert done.report["candidates"] == []


def test_of_several_runs_the_last_is_read_and_named(tmp_path: Path) -> None:
    ref = samples(tmp_path / "ref", [1, 1, 1], time="2026-06-02T10-00-00.1")
    samples(ref, [0, 0, 0], time="2026-06-01T10-00-00.1")
    imported = import_samples(ref, [samples(tmp_path / "test", [1, 1, 1])], tmp_path)
    [axis] = imported.report.candidates[0].axes.values()
    assert axis.value("reference_accuracy") == 1.0
    said = f"{ref} has an earlier run of arc_easy; samples_arc_easy_2026-06-02T10-00-00.1.jsonl was read"
    assert said in imported.notes


@pytest.mark.parametrize(("differ", "said"), [(0, None), (2, "prompt_hash differs in 2 of 3 items")])
def test_other_prompts_are_said_with_the_comparison(differ: int, said: str | None, tmp_path: Path) -> None:
    def change(item: dict[str, Any]) -> None:
        if item["doc_id"] < differ:
            item["prompt_hash"] = "another template"

    imported = import_samples(
        samples(tmp_path / "ref", [1, 0, 1]), [samples(tmp_path / "test", [1, 1, 1], change=change)], tmp_path
    )
    verdict = imported.report.candidates[0].verdict
    assert verdict is not None
    if said is None:
        assert not any("prompt_hash" in note for note in imported.notes)
        assert "prompt_hash" not in verdict.sentence
    else:
        assert f"arc_easy: {said} (chat template, few-shots): more than the model differs" in imported.notes
        assert said in verdict.sentence
