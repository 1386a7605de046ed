"""``fidelab checkpoint quantize`` around its worker, here a small program; tests/real has the real one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.tests.quantized import write_quantized
from fidelab.core.errors import EngineError, InputError, UsageError
from fidelab.environments.checkpoints import checkpoints
from fidelab.models.tiny import make_tiny
from fidelab.results.record import Report
from fidelab.studies.quantize import RECORD, quantize
from fidelab_checkpoints.files import open_checkpoint

WORKER = """
import json, os, pathlib, shutil, sys, time
# of "-m PACKAGE.MODULE JOB"
assert (pathlib.Path(os.environ["PYTHONPATH"]) / sys.argv[2].partition(".")[0]).is_dir(), sys.argv
job = json.loads(pathlib.Path(sys.argv[-1]).read_text())
here = pathlib.Path(__file__).parent
(here / "calls").open("a").write("x")
print(json.dumps({"stage": "at work"}), flush=True)
mode = (here / "mode").read_text()
if mode == "sleep":
    time.sleep(60)
if mode == "fail":
    print(json.dumps({"failed": "out of luck"}), flush=True)
    sys.exit(1)
shutil.copytree(here / "quantized", job["output"])
print(json.dumps({"done": {"llm-compressor": "0"}}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "tiny", "Q8_0")
    write_quantized(tmp_path / "quantized", "compressed-tensors")
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "worker.py"} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "mode").write_text("work")
    (tmp_path / "recipe.yaml").write_text("method: rtn\nscheme: {group: 32}\nfidelity: null\n")
    return tmp_path


def run(folder: Path, *, resume: bool = False) -> Path:
    python = str(folder / "python")
    recipe, output = folder / "recipe.yaml", folder / "out"
    return quantize(str(folder / "tiny"), recipe, output, resume=resume, python=python).output


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text()) if (folder / "calls").exists() else 0


def test_the_output_has_the_audit_and_the_record_and_nothing_else_is_left(folder: Path) -> None:
    output = run(folder)
    assert json.loads((output / "fidelab-audit.json").read_text())["verdict"] == "ok"
    record = json.loads((output / RECORD).read_text())
    assert record["recipe"]["scheme"]["group"] == 32
    assert len(record["quantized"]) > 0
    assert not (folder / "out.work").exists()
    with pytest.raises(UsageError, match="exists; name another folder"):
        run(folder)


def test_a_tool_that_quantizes_other_modules_than_the_plan_says_is_caught(folder: Path) -> None:
    kept = "layers.0.mlp.down_proj"
    (folder / "recipe.yaml").write_text(f"method: rtn\nscheme: {{group: 32}}\nkeep: ['re:.*{kept}']\nfidelity: null\n")
    with pytest.raises(EngineError, match=f"quantized {kept}, and 0 more that the recipe keeps"):
        run(folder)
    shutil.rmtree(folder / "out.work")
    (folder / "recipe.yaml").write_text("method: rtn\nscheme: {group: 32}\nfidelity: null\n")
    shutil.rmtree(folder / "quantized")
    write_quantized(folder / "quantized", "compressed-tensors", keep=(kept,))
    with pytest.raises(EngineError, match=f"left {kept} in 16 bits"):
        run(folder)
    assert not (folder / "out").exists()


def test_a_recipe_that_does_not_fit_is_refused_before_the_tool_starts(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("method: rtn\nkeep: ['re:nothing']\nfidelity: null\n")
    with pytest.raises(InputError, match="matches 0 modules"):
        run(folder)
    assert calls(folder) == 0
    assert not (folder / "out.work").exists()


def test_a_failed_worker_is_resumed_and_another_recipe_is_not(folder: Path) -> None:
    (folder / "mode").write_text("fail")
    with pytest.raises(EngineError, match="out of luck; resume with --resume"):
        run(folder)
    assert not (folder / "out").exists()
    with pytest.raises(UsageError, match="left from an interrupted run"):
        run(folder)
    (folder / "mode").write_text("work")
    before = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(before + "tp: 2\n")
    with pytest.raises(UsageError, match="begun with another recipe"):
        run(folder, resume=True)
    (folder / "recipe.yaml").write_text(before)
    assert run(folder, resume=True).is_dir()
    assert calls(folder) == 2


def test_finished_weights_are_not_made_again_by_a_resumed_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise InputError("stopped here")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "audit", stop)
        with pytest.raises(InputError, match="stopped here"):
            run(folder)
    assert run(folder, resume=True).is_dir()
    assert calls(folder) == 1


def test_the_comparison_tells_the_results_own_bytes_and_is_not_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n\n".join(f"Paragraph {n} tells of {n} ships that left the harbour of a small town." for n in range(20))
    (folder / "test.txt").write_text(text)
    fidelity = "{text: test.txt, windows: 2, n_ctx: 32}"
    (folder / "recipe.yaml").write_text(f"method: rtn\nscheme: {{group: 32}}\nfidelity: {fidelity}\n")

    def stop(*_: object, **__: object) -> None:
        raise InputError("stopped here")

    with monkeypatch.context() as patched:
        patched.setattr("fidelab.studies.quantize.write_html", stop)
        with pytest.raises(InputError, match="stopped here"):
            run(folder)
    monkeypatch.setattr("fidelab.studies.quantize.execute", stop)
    output = run(folder, resume=True)
    [arm] = Report.from_json(output / "fidelab-report.json").candidates
    with open_checkpoint(output) as checkpoint:
        assert arm.ran is not None
        assert arm.ran.weight_bytes == checkpoint.nbytes
        assert arm.capacity is not None
        assert arm.capacity.weight_bytes == checkpoint.nbytes  # not those of the dense copy that ran
    assert arm.model == output.name
    # 4 bits of code, and for each 32 of them a scale of 16 bits and a zero point of 4
    sentence = "quantized by rtn to W4A16 in groups of 32: 14 modules at 4.62 bits per weight, scales included"
    [said] = [said for said in arm.ran.remarks if said.startswith("quantized")]
    assert said == f"{sentence}; kept in 16 bits: head (1)"
    assert sentence in (output / "fidelab-report.html").read_text("utf-8")
    for file in [*output.glob("*.json"), *output.glob("*.html")]:  # they are published
        assert str(folder) not in file.read_text("utf-8"), file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_worker_and_leaves_what_can_be_resumed(folder: Path, number: signal.Signals) -> None:
    (folder / "mode").write_text("sleep")
    words = [*("checkpoint", "quantize", "tiny", "--recipe", "recipe.yaml", "-o", "out", "--python"), "./python"]
    command = [sys.executable, "-m", "fidelab", *words]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if calls(folder):
                break
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "continue by the same command with --resume" in said
    assert (folder / "out.work" / "state.json").is_file()
    (folder / "mode").write_text("work")
    assert run(folder, resume=True).is_dir()
