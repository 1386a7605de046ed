"""Axis lm-eval: a real engine's answers, scored by the harness, against the harness' own ``hf`` model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fidelab
from fidelab.axes.lm_eval import LMEval, LMEvalSettings
from fidelab.cli.axes import axis_settings
from fidelab.errors import InputError, UsageError
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
def report(model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(model, tasks, [*TASKS], tmp_path_factory.mktemp("runs"))


def run(model: Path, tasks: Path, names: list[str], folder: Path, *kv: str) -> Report:
    return fidelab.compare(
        str(model),
        engine="hf",
        dtype="float32",
        reference="f32",
        candidates=list(kv or ("int4",)),
        axes={"lm-eval": {"tasks": names, "include_path": str(tasks)}},
        output_dir=folder,
    )
