"""The GitHub Action's steps, run as a runner runs them: bash, inputs as variables, files for summary and outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_cli_check import write_runs

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action" / "action.yml").read_text("utf-8"))


def step(name: str, inputs: dict[str, str], room: Path) -> tuple[int, str, str]:
    """Exit code of a step, and what it left in the job summary and in the outputs."""
    [found] = [step for step in ACTION["runs"]["steps"] if step["name"] == name]
    given = {key: spec.get("default") for key, spec in ACTION["inputs"].items()} | inputs

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: str(given[match[1]]), text)

    (room / "bin").mkdir(exist_ok=True)
    tool = room / "bin" / "fidelab"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fidelab "$@"\n')
    tool.chmod(0o755)
    files = {key: room / key.lower() for key in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in files.values():
        file.touch()
    environment = {
        **os.environ,
        **{key: filled(value) for key, value in found["env"].items()},
        **{key: str(file) for key, file in files.items()},
        "RUNNER_TEMP": str(room),
        "PATH": f"{tool.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_DRY_RUN": "1",
        "PIP_NO_DEPS": "1",
    }
    script = room / "step.sh"
    script.write_text(found["run"])
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", script], cwd=room, env=environment, check=False
    )
    summary, output = (file.read_text() for file in files.values())
    return done.returncode, summary, output


@pytest.mark.parametrize(
    ("inputs", "code", "decision"),
    [
        ({"run": "runs/before", "limits": "--max-kld 0.1"}, 0, "GO"),
        ({"run": "runs/before", "policy": "policy.yaml"}, 1, "NO-GO"),
        ({"run": "runs/before", "limits": "--max-kld 0.03"}, 3, "INCONCLUSIVE"),
        ({"run": "runs/none", "limits": "--max-kld 0.1"}, 2, ""),
        ({"run": "runs/before", "limits": "--max-kld 1; touch injected"}, 2, ""),
    ],
)
def test_the_check_leaves_its_decision_in_the_summary_and_the_outputs(
    inputs: dict[str, str], code: int, decision: str, tmp_path: Path
) -> None:
    write_runs(tmp_path)
    (tmp_path / "policy.yaml").write_bytes((ROOT / "examples" / "check" / "policy.yaml").read_bytes())
    returned, summary, output = step("Check", inputs, tmp_path)
    assert returned == code
    assert summary.startswith(f"**{decision}**: `before`") if decision else not summary
    assert output.splitlines() == [f"decision={decision}", f"junit={tmp_path}/fidelab-check.xml"]
    assert not (tmp_path / "injected").exists()


def test_the_package_is_installed_by_pip(tmp_path: Path) -> None:
    assert step("Install", {"package": "pyyaml"}, tmp_path)[0] == 0


def test_the_example_workflow_gives_the_action_inputs_that_it_has() -> None:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "check" / "workflow.yml").read_text("utf-8"))
    [used] = [step for step in workflow["jobs"]["check"]["steps"] if step.get("uses") == "./action"]
    assert used["with"].keys() <= ACTION["inputs"].keys()
    assert {name for name, spec in ACTION["inputs"].items() if spec.get("required")} <= used["with"].keys()
