"""Bundles of NeMo Evaluator: paired answers, problems as clusters, its policies as rules, and damaged folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import binomtest

from fidelab.core.errors import InputError, MismatchError
from fidelab.imports.nemo_evaluator import import_bundles
from tests.run.harness import cli

GSM8K = "nemo-evaluator:gsm8k:reward"


def bundle(folder: Path, rewards: Sequence[float], name: str = "gsm8k", repeats: int = 1, **change: Any) -> Path:
    """A bundle as NeMo Evaluator leaves one: rewards of the problems in order, repeats of one side by side."""
    inner = folder / name
    inner.mkdir(parents=True)
    scores = {"mean_reward": {"value": sum(rewards) / len(rewards)}}
    head = {"run_id": f"eval-20261001T101010Z-{name}", "benchmark": {"name": name, "scores": scores}}
    (inner / f"{head['run_id']}.json").write_text(json.dumps(head))
    answers = [
        {
            **{"problem_idx": n // repeats, "repeat": n % repeats, "reward": reward, "prompt": f"q{n // repeats}"},
            **{"expected_answer": str(n // repeats), "model_response": "x", "tokens": 3},
            **change,
        }
        for n, reward in enumerate(rewards)
    ]
    (inner / "results.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return folder


def test_answers_are_paired_by_problem(tmp_path: Path) -> None:
    ref = bundle(tmp_path / "bf16", [1.0] * 80 + [1.0] * 12 + [0.0] * 4 + [0.0] * 4)
    test = bundle(tmp_path / "fp8", [1.0] * 80 + [0.0] * 12 + [1.0] * 4 + [0.0] * 4)
    axis = import_bundles(ref, [test], tmp_path / "runs").report.candidates[0].axes[GSM8K]
    assert (axis.value("lost"), axis.value("gained"), axis.n_items, axis.n_clusters) == (12, 4, 100, 100)
    assert axis.value("difference") == pytest.approx(-8.0)
    assert axis.value("mcnemar_p") == pytest.approx(binomtest(4, 16).pvalue)


def test_repeats_of_a_problem_are_one_cluster(tmp_path: Path) -> None:
    ref = bundle(tmp_path / "bf16", [1.0, 1.0, 0.0, 1.0] * 20, repeats=4)
    test = bundle(tmp_path / "fp8", [1.0, 0.0, 0.0, 1.0] * 20, repeats=4)
    axis = import_bundles(ref, [test], tmp_path / "runs").report.candidates[0].axes[GSM8K]
    assert (axis.n_items, axis.n_clusters, axis.cluster) == (80, 20, "question")
    alone = import_bundles(ref, [], tmp_path / "runs").report.reference.axes[GSM8K]
    assert (alone.value("accuracy"), alone.n_clusters) == (0.75, 20)


def test_benchmarks_of_both_are_compared_and_others_are_said(tmp_path: Path) -> None:
    ref = bundle(bundle(tmp_path / "bf16", [1.0, 0.0]), [1.0, 1.0], "mmlu")
    test = bundle(bundle(tmp_path / "fp8", [1.0, 1.0]), [1.0, 1.0], "gpqa")
    imported = import_bundles(ref, [test], tmp_path / "runs")
    assert [*imported.report.candidates[0].axes] == [GSM8K]
    assert any("do not both have gpqa, mmlu" in note for note in imported.notes)


def test_other_prompts_and_partial_rewards_are_said(tmp_path: Path) -> None:
    ref, test = bundle(tmp_path / "bf16", [1.0, 0.0]), bundle(tmp_path / "fp8", [1.0, 1.0], prompt="another")
    bundle(ref, [0.5, 1.0], "judge")
    bundle(test, [0.5, 1.0], "judge")
    notes = import_bundles(ref, [test], tmp_path / "runs").notes
    assert "gsm8k: prompt_hash differs in 2 of 2 items (chat template, few-shots): more than the model differs" in notes
    assert "nemo-evaluator:judge:reward has values other than 0 and 1 and was left out" in notes


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ('{"problem_idx": 0}', r"line 3 is not an answer of NeMo Evaluator \(KeyError: 'reward'\)"),
        ('{"problem_idx": 0.5, "reward": 1}', "problem_idx or repeat is not a whole number"),
        ('{"problem_idx": 7, "reward": "yes"}', "reward is not a number"),
        ('{"problem_idx": 0, "reward": 1}', "repeat 0 of problem 0 is there twice"),
        ("[", "line 3 is not an answer of NeMo Evaluator"),
    ],
)
def test_a_damaged_line_is_named(damage: str, said: str, tmp_path: Path) -> None:
    ref = bundle(tmp_path / "bf16", [1.0, 0.0])
    with (ref / "gsm8k" / "results.jsonl").open("a") as file:
        file.write(damage + "\n")
    with pytest.raises(InputError, match=said):
        import_bundles(ref, [], tmp_path / "runs")


def test_folders_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    ref = bundle(tmp_path / "bf16", [1.0, 0.0])
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no eval-….json"):
        import_bundles(empty, [], tmp_path / "runs")
    with pytest.raises(MismatchError, match="item 2000000 is in only one of"):
        import_bundles(ref, [bundle(tmp_path / "more", [1.0, 0.0, 1.0])], tmp_path / "runs")
    with pytest.raises(MismatchError, match="has other content"):
        import_bundles(ref, [bundle(tmp_path / "other", [1.0, 0.0], expected_answer="9")], tmp_path / "runs")
    bundle(ref / "again", [1.0, 0.0])
    with pytest.raises(InputError, match="holds gsm8k twice"):
        import_bundles(ref, [], tmp_path / "runs")
    (lone := tmp_path / "lone").mkdir()
    (lone / "eval-1.json").write_text('{"benchmark": {"name": "gsm8k"}}')
    with pytest.raises(InputError, match=r"has no results.jsonl beside it"):
        import_bundles(lone, [], tmp_path / "runs")


def policy(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump({"version": 1, **content}))
    return path


@pytest.mark.parametrize(
    ("lost", "code", "said"),
    [(0, 0, "GO"), (60, 1, "NO-GO"), (1, 3, "INCONCLUSIVE")],
)
def test_a_policy_of_nel_gate_decides_by_the_interval(lost: int, code: int, said: str, tmp_path: Path) -> None:
    n = 400 if lost else 4000
    bundle(tmp_path / "bf16", [1.0] * n)
    bundle(tmp_path / "fp8", [0.0] * lost + [1.0] * (n - lost))
    assert cli("import", "nemo-evaluator", "bf16", "fp8", cwd=tmp_path).code == 0
    benchmarks = {"gsm8k": {"tier": "critical", "max_drop": 0.01, "metric": "mean_reward"}}
    file = policy(tmp_path / "gate.yaml", defaults={"tier": "advisory"}, benchmarks=benchmarks)
    done = cli("check", "latest", "--policy", file, cwd=tmp_path)
    assert (done.code, done.out.split(":")[0]) == (code, said)


def test_a_benchmark_of_the_policy_that_the_run_lacks_is_undecided(tmp_path: Path) -> None:
    bundle(tmp_path / "bf16", [1.0] * 4000)
    bundle(tmp_path / "fp8", [1.0] * 4000)
    cli("import", "nemo-evaluator", "bf16", "fp8", cwd=tmp_path)
    required = {"mmlu": {"tier": "critical", "metric": "pass@1"}}
    done = cli("check", "latest", "--policy", policy(tmp_path / "gate.yaml", benchmarks=required), cwd=tmp_path)
    assert done.code == 3
    assert "the run has no nemo-evaluator:mmlu:reward.difference" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"defaults": {"max_relative_drop": 0.1}}, "max_relative_drop is not checked here"),
        ({"benchmarks": {"gsm8k": {"metric": "bleu"}}}, "metric bleu is not read here"),
        ({"defaults": {"max_drop": -1}}, "max_drop"),
        ({"version": 2, "defaults": {}}, "version"),
        ({"defaults": {"max_dorp": 1}}, "max_dorp"),
    ],
)
def test_a_policy_that_cannot_be_checked_is_one_line(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    bundle(tmp_path / "bf16", [1.0, 0.0])
    bundle(tmp_path / "fp8", [1.0, 1.0])
    cli("import", "nemo-evaluator", "bf16", "fp8", cwd=tmp_path)
    done = cli("check", "latest", "--policy", policy(tmp_path / "gate.yaml", **content), cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 2  # the run that "latest" is, and the fault
