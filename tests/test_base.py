"""fidelab without extras: commands of the base import nothing of them, and what is missing is named in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fidelab.core import registry
from fidelab.core.errors import MissingPackageError
from fidelab.core.registry import late, require
from fidelab.models.tiny import GGUF_NAME, make_tiny
from fidelab.results.store import RunFolder
from tests.imports.sample import refract_report, write
from tests.run.harness import SMALL, compare, write_inputs

ROOT = Path(__file__).parents[1]
HF = ("torch", "transformers", "pyarrow", "accelerate", "tokenizers")
EXTRAS = (*HF, "ray", "llama_cpp", "pandas")
# Runs the command line in a process to which these packages are not installed.
LAUNCHER = """
import sys
gone = set(sys.argv.pop(1).split(","))
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
from fidelab.cli import main
main()
"""


def fidelab(folder: Path, *words: object, gone: tuple[str, ...] = EXTRAS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCHER, ",".join(gone), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a run, and files that others wrote."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny(folder / "model", positions=128)
    done = compare(folder, "tilt[q=0.9]", limit=2, windows=8)
    assert done.code == 0, done.err
    write(folder, refract_report(), "refract.json")
    (folder / "preset.yaml").write_text("model: Qwen/Qwen3-8B\nengine: vllm\nkv: fp8_e4m3\n")
    return folder


BASE = [
    (["--help"], "Compare"),
    (["estimate", "--layers", "28", "--kv-heads", "4", "--head-dim", "128", "--params", "7.6e9"], "57,344"),
    (["estimate", "explain", "-o", "page.html"], "page.html"),
    (["checkpoint", "audit", "model"], "verdict: ok"),
    (["checkpoint", "audit", f"model/{GGUF_NAME}"], "verdict: ok"),
    (["report", "latest"], "tilt"),
    (["check", "latest", "--max-kld", "9", "--baseline", "latest"], "unchanged"),
    (["runs", "list"], "fake"),
    (["serve", "start", "./preset.yaml", "--dry-run"], "--kv-cache-dtype fp8_e4m3"),
]


NOT_HERE = "fidelab: engine vllm is not installed: fidelab setup install vllm"


def outcome(done: subprocess.CompletedProcess[str], shown: str) -> tuple[int, bool]:
    """The exit code, and whether the text was shown; (0, True) also where an engine's own environment is missing here.

    What an engine needs is installed apart from the base and from every extra, and one line names the command.
    """
    if done.returncode == 2 and done.stderr.startswith(NOT_HERE):
        return 0, True
    return done.returncode, shown in done.stdout


@pytest.mark.parametrize(("words", "shown"), BASE)
def test_a_command_of_the_base_needs_no_extra(words: list[str], shown: str, made: Path) -> None:
    done = fidelab(made, *words)
    assert outcome(done, shown) == (0, True), done.stderr


@pytest.mark.full
def test_the_wheel_by_itself_runs_the_commands_of_the_base(made: Path, tmp_path: Path) -> None:
    """In an empty environment, with the versions of the lock file; the checkpoints' commands come with their wheel."""
    pip, python = [sys.executable, "-m", "pip"], tmp_path / "env/bin/python"
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, ROOT / "checkpoints"], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    constraints = ROOT / "src/fidelab/doctor/constraints.txt"

    def install(pattern: str) -> None:
        [wheel] = tmp_path.glob(pattern)
        subprocess.run([*pip, "--python", python, "install", "-q", "-c", constraints, wheel], check=True)

    def outcomes() -> dict[str, tuple[int, bool | str]]:
        found: dict[str, tuple[int, bool | str]] = {}
        for words, shown in BASE:
            command = [str(tmp_path / "env/bin/fidelab"), *words]
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False)
            of = outcome(done, shown)
            found[" ".join(words)] = of if of == (0, True) else (done.returncode, done.stderr)
        return found

    install("fidelab-*.whl")
    [packages] = tmp_path.glob("env/lib/python*/site-packages")
    assert not {*EXTRAS} & {path.name for path in packages.iterdir()}
    assert sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) < 360e6
    needs = 'fidelab: this command needs fidelab-checkpoints: pip install "fidelab[checkpoints]"\n'
    of_both: dict[str, tuple[int, bool | str]] = {" ".join(words): (0, True) for words, _ in BASE}
    of_base = {words: (2, needs) if words.startswith("checkpoint ") else found for words, found in of_both.items()}
    assert outcomes() == of_base
    install("fidelab_checkpoints-*.whl")
    assert outcomes() == of_both


@pytest.mark.parametrize("words", [("import", "refract", "refract.json"), ("report", "--rescore", "latest")])
def test_what_computes_intervals_needs_nothing_of_an_engine(words: tuple[str, ...], made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    done = fidelab(tmp_path, *words)
    assert done.returncode == 0, done.stderr


def test_an_audit_without_extras_names_the_rules_that_did_not_run(made: Path) -> None:
    found = json.loads(fidelab(made, "checkpoint", "audit", "model", "--json").stdout)["findings"]
    [finding] = [finding for finding in found if finding["rule"] == "tokenizer-unchecked"]
    assert finding["text"] == "tokenizer.json: this check needs tokenizers: pip install 'fidelab[hf]'"


def test_doctor_reports_what_the_main_job_needs(made: Path) -> None:
    done = fidelab(made, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    checks = {(check["name"], check["group"]): check for check in json.loads(done.stdout)["checks"]}
    assert "transformers" in checks["hf", "engines"]["detail"]


@pytest.mark.parametrize(
    ("words", "gone", "needs"),
    [
        (
            ["compare", "model", "--kv", "int4"],
            EXTRAS,
            "this run needs PyTorch and Transformers: pip install 'fidelab[hf]'",
        ),
        (["bench", "model", "--kv", "int4"], EXTRAS, "needs PyTorch and Transformers: pip install"),
        (["diagnose", "layers", "model", "--kv", "int4"], EXTRAS, "needs PyTorch and Transformers: pip install"),
        (["compare", "model", "--kv", "q8_0", "--engine", "llamacpp"], EXTRAS, "PyTorch and Transformers: pip"),
        (["compare", "model", "--kv", "int4"], ("transformers",), "Transformers: pip install 'fidelab[hf]'"),
        (["compare", "model", "--kv", "int4"], ("torch",), "PyTorch: pip install 'fidelab[hf]'"),
        (
            ["estimate", "other"],
            ("transformers",),
            "shape of model_type 'granite' needs Transformers: pip install 'fidelab[hf]'",
        ),
        (["estimate", "other"], ("torch",), "shape of model_type 'granite' needs PyTorch: pip install 'fidelab[hf]'"),
    ],
)
def test_a_missing_or_half_installed_extra_is_one_line(
    words: list[str], gone: tuple[str, ...], needs: str, made: Path
) -> None:
    (made / "other").mkdir(exist_ok=True)
    config = {"model_type": "granite", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (made / "other/config.json").write_text(json.dumps(config))
    before = [*(made / "runs").iterdir()]
    done = fidelab(made, *words, gone=gone)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert needs in done.stderr
    assert [*(made / "runs").iterdir()] == before


@pytest.mark.parametrize("runs", [1, 2])
def test_an_installation_with_only_what_a_run_asks_for_runs_it(runs: int, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    sizes = ("--windows", 4, "--n-ctx", 16, "--n-predict", 4, "--limit", 2, "--no-floor", "--runs", runs)
    words = ("compare", "fake", *SMALL, "--kv", "tilt", *sizes)
    refused = fidelab(tmp_path, *words)
    assert refused.stderr == "fidelab: this run needs PyTorch: pip install 'fidelab[hf]'\n"
    assert not (tmp_path / "runs").exists()
    done = fidelab(tmp_path, *words, gone=tuple({*EXTRAS} - {"torch"}))
    assert done.returncode == 0, done.stderr


def test_an_extra_that_another_one_installs_is_not_asked_for_as_well() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[\[<>=;]", package)[0] for package in packages} for extra, packages in extras.items()}
    for extra, inner in registry._CONTAINS.items():
        for name in inner:
            assert names[name] <= names[extra] or f"fidelab[{name}]" in extras[extra] or "fidelab[hf]" in extras[extra]


def test_a_report_is_written_without_positions_where_pyarrow_is_missing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs", symlinks=True)
    done = fidelab(tmp_path, "report", "latest", "--rescore", gone=HF)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs").glob("2*")
    assert not RunFolder(folder).positions.exists()
    assert "positions.parquet needs pyarrow: pip install" in (folder / "report.html").read_text()


def test_a_late_module_is_imported_on_first_use_and_an_unknown_one_stays_an_import_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    special = late("scipy.special")
    assert special.expit(0.0) == 0.5
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"^it needs pyarrow: pip install 'fidelab\[parquet\]'$"):
        require("pyarrow", "it")
    with pytest.raises(ModuleNotFoundError, match="nonesuch"):
        require("nonesuch")


def test_a_program_stopped_within_exec_of_a_text_ends_with_130_and_not_by_the_signal(tmp_path: Path) -> None:
    text = """
import sys
from fidelab.core import interrupted
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    sys.exit(interrupted())
"""
    (tmp_path / "stopped.py").write_text(text)
    found = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run([sys.executable, "-m", "stopped"], env=found).returncode == 130
