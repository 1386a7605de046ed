"""Axis lm-eval: a real engine's answers, scored by the harness, against the harness' own ``hf`` model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fidelab
from fidelab.axes.base import AxisInputs
from fidelab.axes.lm_eval import LMEval, LMEvalSettings, _Answers, _loaded, _manager, _scored, _tasks
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture, find_captures
from fidelab.cli.axes import axis_settings
from fidelab.config.schema import Experiment
from fidelab.config.trust import demands
from fidelab.core import Estimator
from fidelab.core.errors import CaptureError, InputError, UsageError
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve
from fidelab.models.tiny import make_tiny
from fidelab.results.record import Report

harness = pytest.importorskip("lm_eval", reason="needs pip install 'fidelab[lm-eval]'")

WORDS = ("blue", "green", "a stone", "seven", "paper and glass", "no", "rain", "the old clock")
SPLIT = """
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
"""
TASKS = {
    "colours": """
task: colours
output_type: multiple_choice
doc_to_text: "Question {{number}}: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "echo": """
task: echo
output_type: generate_until
doc_to_text: "Question {{number}}: {{question}}\\nAnswer:"
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
""",
    "prose": """
task: prose
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{question}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The harness without a network, its caches in a folder of this test."""
    import datasets

    folder = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), positions=128)


@pytest.fixture(scope="module")
def tasks(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), [""] * 12)


def write_tasks(folder: Path, written: list[str]) -> Path:
    lines = [
        {
            "number": n,
            "question": " ".join(WORDS[(n * k) % len(WORDS)] for k in range(3, 5 + n % 3)),
            "choices": [WORDS[(n + k) % len(WORDS)] for k in range(2 + n % 3)],
            "answer": n % 2,
            "written": answer,
        }
        for n, answer in enumerate(written)
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + SPLIT.format(data=data))
    return folder


@pytest.fixture(scope="module")
def oracle(model: Path, tasks: Path) -> dict[str, Any]:
    """What the harness finds with its own model class on the same checkpoint in float32."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        own, tasks=[*TASKS], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def report(model: Path, tasks: Path, folder: Path) -> Report:
    return fidelab.compare(
        str(model),
        engine="hf",
        dtype="float32",
        reference="f32",
        control="none",
        candidates=["int4"],
        axes={"lm-eval": {"tasks": [*TASKS], "include_path": str(tasks)}},
        output_dir=str(folder),
    )


def inputs(model: Path) -> AxisInputs:
    return AxisInputs(Tokenizer.load(resolve(str(model))), Text("none", "none", (), ""), (), 128)


def reference_answers(folder: Path, part: str) -> _Answers:
    """The reference's answers as they lie on disk."""
    found = [path for path in find_captures(folder / "captures") if path.name.startswith(f"lm-eval.{part}-")]
    first = [each for each in map(Capture, found) if each.manifest["key"]["replicate"] == 0]
    [capture] = [each for each in first if each.manifest["asked"]["name"] == "f32"]
    answers = _Answers()
    answers.read(Pair.match(capture, capture), "ref")
    return answers


def cells(report: Report, name: str) -> dict[tuple[str, str], Any]:
    """Values of a metric of the only candidate by task and the harness' metric."""
    metrics = report.candidates[0].axes["lm-eval"].metrics
    return {(str(m.cell["task"]), str(m.cell["metric"])): m.value for m in metrics if m.name == name and m.cell}


@pytest.mark.full
def test_log_likelihoods_are_those_of_the_harness_own_model(
    folder: Path, report: Report, oracle: dict[str, Any]
) -> None:
    answers = reference_answers(folder, "loglikelihood").values
    samples = {name: oracle["samples"][name] for name in ("colours", "prose")}
    seen = 0
    for name, documents in samples.items():
        for document in documents:
            for index, [value] in enumerate(document["resps"]):
                found = answers[name, document["doc_id"], index]
                wanted = value if isinstance(value, tuple | list) else (value, None)
                assert found[0] == pytest.approx(float(wanted[0]), abs=1e-4)
                assert wanted[1] is None or bool(found[1]) == bool(wanted[1])
                seen += 1
    assert seen > 30


def test_answers_are_those_of_the_harness_own_model(folder: Path, report: Report, oracle: dict[str, Any]) -> None:
    answers = reference_answers(folder, "generate").values
    for document in oracle["samples"]["echo"]:
        assert answers["echo", document["doc_id"], 0] == document["resps"][0][0]


def test_accuracies_are_those_that_the_harness_gives(report: Report, oracle: dict[str, Any]) -> None:
    found = cells(report, "reference task metric")
    assert found["colours", "acc"] == oracle["results"]["colours"]["acc,none"]
    assert found["colours", "acc_norm"] == oracle["results"]["colours"]["acc_norm,none"]
    assert found["echo", "exact_match"] == oracle["results"]["echo"]["exact_match,none"]
    assert found["prose", "nats per byte"] / math.log(2) == pytest.approx(
        oracle["results"]["prose"]["bits_per_byte,none"], abs=1e-6
    )
    assert math.exp(found["prose", "nats per word"]) == pytest.approx(
        oracle["results"]["prose"]["word_perplexity,none"], rel=1e-5
    )


def test_documents_are_paired_and_get_a_certificate(report: Report) -> None:
    arm = report.candidates[0]
    axis = arm.axes["lm-eval"]
    values = {m.name: m.value for m in axis.metrics if not m.cell and m.value is not None}
    assert axis.n_items == axis.n_clusters == 24  # colours and echo; nothing of prose is right or wrong
    wanted = 100 * (values["accuracy"] - values["reference accuracy"])
    assert values["difference"] == pytest.approx(wanted)
    assert values["difference"] == pytest.approx(100 * (values["gained"] - values["lost"]) / 24)
    assert arm.certificates["lm-eval"].flips[0].harmful == values["lost"]


def test_the_noise_floor_is_of_whole_documents(folder: Path, report: Report) -> None:
    assert report.floor["lm-eval"].status == "identical"
    assert report.floor["lm-eval"].n_items == 6


def settings(tasks: Path, *names: str, **changes: Any) -> LMEvalSettings:
    return LMEvalSettings.model_validate({"tasks": names, "include_path": str(tasks), **changes})


def test_tasks_follow_their_axis_on_the_command_line() -> None:
    assert axis_settings("kld,lm-eval:arc_easy,piqa,trajectory", {}) == {
        "kld": {},
        "lm-eval": {"tasks": ["arc_easy", "piqa"]},
        "trajectory": {},
    }
    assert "lm-eval" not in axis_settings("all", {})


def test_an_axis_without_tasks_says_how_to_name_them(model: Path) -> None:
    with pytest.raises(UsageError, match="lm-eval:arc_easy"):
        LMEval(LMEvalSettings()).requests(inputs(model))


def test_an_answer_that_would_be_drawn_is_refused_by_name(tasks: Path, tmp_path: Path, model: Path) -> None:
    text = (tasks / "echo.yaml").read_text().replace("generation_kwargs:", "generation_kwargs:\n  do_sample: true")
    (tmp_path / "echo.yaml").write_text(text)
    with pytest.raises(InputError, match="task echo draws its answers"):
        LMEval(settings(tmp_path, "echo")).requests(inputs(model))


def test_a_task_whose_documents_changed_is_not_scored(folder: Path, report: Report, tmp_path: Path, home: Path) -> None:
    answers = reference_answers(folder, "loglikelihood")
    changed = write_tasks(tmp_path, ["other"] * 12)
    own = settings(changed, "colours")
    with pytest.raises(CaptureError, match="colours has another document 0"):
        _scored(_tasks(own), answers, [("colours", 0)], own)


def test_top_tokens_alone_are_refused_with_the_engine_s_name(folder: Path, report: Report, tasks: Path) -> None:
    found = [path for path in find_captures(folder / "captures") if path.name.startswith("lm-eval.loglikelihood-")]
    capture = Capture(found[0])
    capture.estimator = Estimator.TOPK
    score = LMEval(settings(tasks, "colours")).score_parts({"loglikelihood": Pair.match(capture, capture)}, 0)
    assert "hf reports only the most likely tokens" in score.not_measurable


def test_an_unknown_task_is_named_with_near_ones(tasks: Path, model: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fidelab.axes.lm_eval._manager", lambda path, defaults: _manager(path, False))
        with pytest.raises(InputError, match="no task 'colour'; near are colours"):
            LMEval(settings(tasks, "colour")).requests(inputs(model))


def test_a_settings_file_may_not_name_a_folder_of_tasks_unasked(tmp_path: Path) -> None:
    file = {"model": "fake", "candidates": ["int4"], "axes": {"lm-eval": {"tasks": ["a"], "include_path": "tasks"}}}
    found = [demand for demand in demands(Experiment.model_validate(file)) if "include_path" in demand.key]
    assert [demand.what for demand in found] == ["is a folder whose code would be run"]


def test_without_the_harness_the_command_that_installs_it_is_named(
    tasks: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    _manager.cache_clear()
    _loaded.cache_clear()
    with pytest.raises(UsageError, match=r"pip install 'fidelab\[lm-eval\]'"):
        LMEval(settings(tasks, "colours")).requests(inputs(model))
