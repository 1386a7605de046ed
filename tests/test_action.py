"""The GitHub Action and the example workflows, run as a runner runs them.

Steps run in bash, with inputs as variables and files for the summary and the outputs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_cli_check import write_runs

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "check"
ACTION = yaml.safe_load((ROOT / "action" / "action.yml").read_text("utf-8"))


def bash(script: str, room: Path, environment: dict[str, str]) -> tuple[int, str, str, str]:
    """Exit code of a step's script, what it printed, and what it left in the job summary and in the outputs."""
    (room / "bin").mkdir(exist_ok=True)
    python = room / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    files = {key: room / key.lower() for key in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in files.values():
        file.touch()
    known = {
        **os.environ,
        **environment,
        **{key: str(file) for key, file in files.items()},
        "RUNNER_TEMP": str(room),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    (room / "step.sh").write_text(script)
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    done = subprocess.run(words, cwd=room, env=known, check=False, capture_output=True, text=True)
    summary, output = (file.read_text() for file in files.values())
    return done.returncode, done.stdout + done.stderr, summary, output


def step(name: str, inputs: dict[str, str], room: Path, **environment: str) -> tuple[int, str, str, str]:
    """Run a step of the action; see :func:`bash`."""
    [found] = [step for step in ACTION["runs"]["steps"] if step["name"] == name]
    given = {key: spec.get("default") for key, spec in ACTION["inputs"].items()} | inputs

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: str(given[match[1]]), text)

    return bash(found["run"], room, {**environment, **{key: filled(value) for key, value in found["env"].items()}})


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
    returned, printed, summary, output = step("Check", inputs, tmp_path)
    assert returned == code, printed
    assert summary.startswith(f"**{decision}**: `before`") if decision else not summary
    assert output.splitlines() == [f"decision={decision}", f"junit={tmp_path}/fidelab-check.xml"]
    assert (tmp_path / "fidelab-check.xml").exists() == bool(decision)
    annotated = {"NO-GO": "::error title=NO-GO::", "INCONCLUSIVE": "::warning title=INCONCLUSIVE::"}
    assert annotated.get(decision, "") in printed
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize(
    ("inputs", "installed"),
    [({}, "/actions/OWNER/fidelab/v1/action/.."), ({"package": "fidelab==0.2.0"}, "fidelab==0.2.0")],
)
def test_the_version_of_the_action_is_installed_unless_a_package_is_named(
    inputs: dict[str, str], installed: str, tmp_path: Path
) -> None:
    (tmp_path / "pip.py").write_text("import sys\nprint(sys.argv[1:])\n")
    place = {"GITHUB_ACTION_PATH": "/actions/OWNER/fidelab/v1/action", "PYTHONPATH": str(tmp_path)}
    code, printed, *_ = step("Install", inputs, tmp_path, **place)
    assert (code, printed.strip()) == (0, str(["install", installed]))
    assert (ROOT / "action" / ".." / "pyproject.toml").is_file()


def test_the_action_names_no_path_of_the_repository_that_uses_it() -> None:
    steps = ACTION["runs"]["steps"]
    assert [step for step in steps if "uses" in step] == []
    paths = {path for step in steps for path in re.findall(r"[\w$}.]*/[\w./-]*", step["run"])}
    assert paths == {"$GITHUB_ACTION_PATH/..", "$RUNNER_TEMP/fidelab-check.xml"}
    assert {step["shell"] for step in steps} == {"bash"}  # a composite step without one does not run


def workflow(name: str) -> list[dict[str, Any]]:
    """The steps of an example's only job."""
    [job] = yaml.safe_load((EXAMPLES / name).read_text("utf-8"))["jobs"].values()
    return list(job["steps"])


def test_the_workflow_with_the_action_gives_it_inputs_that_it_has() -> None:
    [used] = [step for step in workflow("workflow-action.yml") if "fidelab" in step.get("uses", "")]
    assert used["uses"].startswith("OWNER/fidelab/action@v")
    assert used["with"].keys() <= ACTION["inputs"].keys()
    assert {name for name, spec in ACTION["inputs"].items() if spec.get("required")} <= used["with"].keys()


def test_the_documents_show_the_action_by_the_name_that_works_elsewhere() -> None:
    names = re.findall(r"uses: (\S*/action@?\S*)", (ROOT / "docs" / "check.md").read_text("utf-8"))
    [used] = [step["uses"] for step in workflow("workflow-action.yml") if "fidelab" in step.get("uses", "")]
    assert names == [used]


def here(command: str) -> str:
    """A command of a workflow with this interpreter in place of ``uvx``, and sizes that take seconds."""
    found, n = re.subn(r"uvx (--from '[^']+' )?fidelab", f"{shlex.quote(sys.executable)} -m fidelab", command)
    assert n == 1, command
    return found.replace("--quick", "--quick --windows 6 --n-ctx 64 --control none")


def documented() -> list[str]:
    """The commands of the workflow that the documents show."""
    [block] = re.findall(r"```yaml\n(- run: .*?)```", (ROOT / "docs" / "check.md").read_text("utf-8"), re.DOTALL)
    return [step["run"] for step in yaml.safe_load(block)]


def test_the_documents_show_the_commands_of_the_example() -> None:
    assert documented() == [step["run"] for step in workflow("workflow.yml") if "run" in step]


@pytest.mark.model
def test_the_example_workflow_runs_by_the_words_that_it_prints(tmp_path: Path) -> None:
    for step in workflow("workflow.yml"):
        if "run" in step:
            code, printed, *_ = bash(here(step["run"]), tmp_path, {})
            assert code == 0, printed
        elif step.get("if") == "always()":
            assert [pattern for pattern in step["with"]["path"].split() if not [*tmp_path.glob(pattern)]] == []
    assert (tmp_path / "github_step_summary").read_text().startswith("**GO**: ")
    assert "GO: " in printed
