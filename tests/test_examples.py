"""The examples run as scripts, and what they print follows from the run that they leave."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml

from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from tests.report.sample import sample_report
from tests.run.harness import cli, write_inputs

EXPERIMENT = Path(__file__).parents[1] / "examples" / "experiment.yaml"
QUANTIZE = Path(__file__).parents[1] / "examples" / "quantize"
NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare_kv_formats.ipynb"
GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
SCRIPT = Path(__file__).parents[1] / "examples" / "compare_kv_formats.py"
FAKE = ("--model", "fake", "--engine", "fake", "--dtype", "auto", "--reference", "exact", "--n-ctx", "16")
INPUTS = ("--text", "text.txt", "--prompts", "prompts.txt", "--windows", "4", "--limit", "2", "--n-predict", "8")


def small(source: str) -> str:
    """The calls of a snippet with sizes that take seconds."""
    return source.replace("quick=True", 'quick=True, windows=2, n_ctx=32, control="none", dtype="float32"')


def snippets() -> list[str]:
    """The Python of the guide."""
    return re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.model
def test_the_guides_snippets_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(snippets()) >= 3
    for source in snippets():
        exec(small(source).replace("print(report.best.name, report.path)", "print(report.path)"), {})
    assert len([*(tmp_path / "runs").glob("2*")]) == 2


@pytest.mark.full
def test_the_guides_snippets_are_typed(tmp_path: Path) -> None:
    files = [tmp_path / f"snippet{n}.py" for n, _ in enumerate(snippets())]
    for file, source in zip(files, snippets(), strict=True):
        file.write_text(source)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    done = subprocess.run([*words, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.model
def test_the_cells_of_the_notebook_run_without_ipython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "IPython", None)
    book = json.loads(NOTEBOOK.read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
    names: dict[str, Any] = {}
    for source in cells:
        exec(small(source), names)
    assert names["report"].path.parent == tmp_path / "runs"
    assert names["q8"].kld >= 0


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own."""
    return subprocess.run([sys.executable, str(SCRIPT), *words], cwd=cwd, capture_output=True, text=True, check=False)


def section(out: str, title: str) -> str:
    """What stands below a title of the script's output."""
    return next(part for part in f"\n{out}".split("\n# ") if part.startswith(title)).split("\n\n", 1)[1]


def left(cwd: Path) -> tuple[Report, RunFolder]:
    """The run that the script made."""
    [folder] = (cwd / "runs").glob("2*")
    return Report.from_json(folder / "report.json"), RunFolder.open(folder)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The script on the fake engine, and what it printed: three candidates of which two cost little or nothing."""
    cwd = tmp_path_factory.mktemp("example")
    write_inputs(cwd)
    done = run(cwd, *FAKE, *INPUTS, "--kv", "tilt[q=0.52]", "tilt[q=0.9]", "exact")
    assert done.returncode == 0, done.stderr
    return cwd, done.stdout


def test_card_frame_and_worst_positions_are_those_of_the_run(fake: tuple[Path, str]) -> None:
    report, _ = left(fake[0])
    assert report.to_markdown() in fake[1]
    report, _ = left(fake[0])
    shown = section(fake[1], "As a data frame")
    assert [arm.name for arm in (report.reference, *report.candidates) if arm.name not in shown] == []
    kl = pq.read_table(left(fake[0])[1].positions).column("kl").to_pandas()
    assert f"{kl.max():.6f}" in section(fake[1], "The positions that change most")


def test_the_choice_is_the_smallest_near_lossless_cache() -> None:
    smallest = runpy.run_path(str(SCRIPT))["smallest"]
    report = sample_report()
    assert smallest(report.to_pandas()) == "k16v8: 34,560 bytes per token, 38% of the reference's"
    assert smallest(sample_report(candidates=report.candidates[1:3]).to_pandas()) == "none of the candidates"


def test_the_worst_positions_have_the_largest_kl_of_their_arm(tmp_path: Path) -> None:
    kl = [0.1, None, 0.3, 0.2, 9.0, 0.0, 0.0]
    pd.DataFrame({"arm": [*"aaaab", *"cc"], "position": range(7), "kl": kl}).to_parquet(tmp_path / "p.parquet")
    worst = runpy.run_path(str(SCRIPT))["worst_positions"](tmp_path / "p.parquet", n=2)
    assert list(worst["position"]) == [4, 2, 3]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "--kv", "int5000", "--reference", "f32", "--model", "no/such/model/here")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.full
@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_the_experiment_file_plans_and_runs(tmp_path: Path) -> None:
    planned = cli("compare", "-f", EXPERIMENT, "--dry-run", "--json", cwd=tmp_path)
    assert planned.code == 0, planned.err
    roles = [job["role"] for job in json.loads(planned.out)["jobs"]]
    arms = ("k16v8", "fp8_e4m3[scale=per-token-head]", "four bits")
    assert [role for role in roles if role[:4] != "twin"] == [
        *("reference", "control"),
        *(f"candidate:{name}" for name in arms),
        "floor",
    ]
    small = ("axes.kld.windows=1", "axes.kld.n_ctx=64", "axes.trajectory.limit=1", "floor=0", "twins=0", "control=none")
    done = cli("compare", "-f", EXPERIMENT, *(word for text in small for word in ("--set", text)), cwd=tmp_path)
    assert done.code == 0, done.err
    assert [done.arm(name)["status"] for name in arms] == ["ok"] * 3


@pytest.mark.long
@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_the_example_runs_on_the_embedded_model(tmp_path: Path) -> None:
    sizes = ("--windows", "2", "--n-ctx", "128", "--limit", "2", "--n-predict", "8")
    done = run(tmp_path, "--kv", "k16v8", *sizes)
    assert done.returncode == 0, done.stderr
    report, _ = left(tmp_path)
    assert report.to_markdown() in done.stdout
    assert "17280.0" in section(done.stdout, "As a data frame")
    assert 0.0002 < report.to_pandas().set_index("name").loc["k16v8", "kld_mean"] < 0.002


SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LINEAR: dict[str, object] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 128,
}
LINEAR |= {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}


def planned(tmp_path: Path, recipe: str, config: str, **fields: object) -> dict[str, Any]:
    """What a dry run prints for a model of random weights, with a copy of the recipe next to a text."""
    built = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **fields))
    built.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "calibration.txt").write_text("some words\n")
    shutil.copy(QUANTIZE / recipe, tmp_path)
    done = cli("checkpoint", "quantize", "./model", "--recipe", recipe, "--dry-run", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_the_recipe_for_dense_models_quantizes_all_but_the_head(tmp_path: Path) -> None:
    found = planned(tmp_path, "dense.yaml", "LlamaConfig")
    assert len(found["quantized"]) == 2 * 7
    assert found["kept"] == {"lm_head": "head"}


def test_the_recipe_for_experts_takes_704_inputs_on_two_devices_and_keeps_routers(tmp_path: Path) -> None:
    found = planned(tmp_path, "moe.yaml", "Qwen3MoeConfig", moe_intermediate_size=704, **EXPERTS)
    assert sum("experts" in name for name in found["quantized"]) == 2 * 4 * 3
    assert {kind for name, kind in found["kept"].items() if name != "lm_head"} == {"router"}


def test_the_recipe_for_experts_balances_them() -> None:
    recipe = yaml.safe_load((QUANTIZE / "moe.yaml").read_text())
    assert (recipe["calibration"]["all_experts"], recipe["calibration"]["balance"]) == (True, 4)


def test_the_recipe_for_hybrids_keeps_recurrent_and_full_attention_and_quantizes_experts(tmp_path: Path) -> None:
    found = planned(tmp_path, "hybrid.yaml", "Qwen3NextConfig", moe_intermediate_size=128, **EXPERTS, **LINEAR)
    assert all(".mlp." in name for name in found["quantized"])
    assert sum(".experts." in name for name in found["quantized"]) == 2 * 4 * 3
    assert {"recurrent", "router", "head"} <= set(found["kept"].values())
    assert any("self_attn" in name for name in found["kept"])
