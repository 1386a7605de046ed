"""Help: every command has it, led by an example that is itself a command, and it costs little."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fidelab
from tests.runs.harness import cli

COMMANDS = [
    (),
    ("compare",),
    ("run",),
    ("bisect",),
    ("capture",),
    ("score",),
    ("rescore",),
    ("report",),
    ("repeat",),
    ("formats",),
    ("doctor",),
    ("plan-size",),
    ("audit",),
    ("import",),
    ("import", "refract"),
    ("import", "throughput"),
    ("import", "kld-dumps"),
    ("diff",),
    ("claims",),
    ("baseline",),
    ("baseline", "save"),
    ("baseline", "list"),
    ("baseline", "remove"),
    ("bench",),
    ("bench", "offline"),
    ("bench", "serve"),
    ("bench", "sweep"),
    ("bench", "calibrate"),
    ("bench", "speculation"),
    ("charts",),
    ("models",),
    ("models", "list"),
    ("models", "pull"),
    ("models", "path"),
    ("engines",),
    ("engines", "list"),
    ("engines", "install"),
    ("engines", "remove"),
    ("runs",),
    ("runs", "list"),
    ("runs", "show"),
    ("runs", "diff"),
    ("runs", "gc"),
    ("leaderboard",),
    ("publish",),
    ("verify",),
    ("export",),
    ("captures",),
    ("captures", "list"),
    ("captures", "gc"),
]
_GROUPS = ("runs", "models", "engines", "captures", "import", "baseline", "bench")
WITH_EXAMPLES = [words for words in COMMANDS if not words or words[0] not in _GROUPS]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for every line, and no colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def examples(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(ref=\$\()?fidelab ", line)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], wide: None, tmp_path: Path) -> None:
    for flag in ("--help", "-h"):
        done = cli(*words, flag, cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        assert "Usage: fidelab" in done.out


@pytest.mark.parametrize("words", WITH_EXAMPLES, ids=" ".join)
def test_help_is_led_by_examples(words: tuple[str, ...], wide: None, tmp_path: Path) -> None:
    text = cli(*words, "--help", cwd=tmp_path).out
    assert examples(text)
    assert text.index("Example") < text.index("Options")


@pytest.mark.parametrize("words", WITH_EXAMPLES, ids=" ".join)
def test_examples_name_commands_and_flags_that_exist(words: tuple[str, ...], wide: None, tmp_path: Path) -> None:
    for example in examples(cli(*words, "--help", cwd=tmp_path).out):
        used = [word for word in shlex.split(example.replace("$(", "").replace(")", "")) if word != "ref=fidelab"]
        command = used[1] if used[0] == "fidelab" else used[0]
        flags = {word for word in used if word.startswith("--")}
        known = cli(command, "--help", cwd=tmp_path).out
        assert flags <= set(re.findall(r"--[a-z][a-z-]*", known))


def test_examples_fit_into_eighty_columns(wide: None, tmp_path: Path) -> None:
    for words in COMMANDS:
        for example in examples(cli(*words, "--help", cwd=tmp_path).out):
            assert len(example) <= 78


def test_a_flag_has_no_value_and_a_value_has_a_short_name(wide: None, tmp_path: Path) -> None:
    for words in COMMANDS:
        options = cli(*words, "--help", cwd=tmp_path).out.partition("╭─ Options")[2]
        assert re.findall(r"<(?:bool|int|float|str|list.*?)>|BOOL|BOOLEAN", options) == [], words


def test_commands_and_options_stand_in_groups(wide: None, tmp_path: Path) -> None:
    def panels(*words: str) -> list[str]:
        return re.findall(r"╭─ (.*?) ─+╮", cli(*words, "--help", cwd=tmp_path).out)

    assert panels() == ["Options", "Compare", "Results", "Speed", "Checkpoints", "Models, engines and this machine"]
    assert panels("compare") == ["Arguments", "Options", "Arms", "What is measured", "Scoring", "Engine"]


def test_paragraphs_are_wrapped_by_the_terminal_alone(wide: None, tmp_path: Path) -> None:
    text = cli("diff", "--help", cwd=tmp_path).out
    assert "by the intervals of axes. Only what was measured alike is compared; everything else is named." in text


def complete(words: str, cwd: Path) -> list[str]:
    """What bash is told at the end of ``words``, by a process of its own."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(re.findall(" +", words))), "_FIDELAB_COMPLETE": "complete_bash"}
    code = "from fidelab.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fidelab comp", ["compare"]),
        ("fidelab compare --eng", ["--engine", "--engine-arg"]),
        ("fidelab compare m --engine v", ["vllm"]),
        ("fidelab compare m --axes kld,traj", ["kld,trajectory"]),
        ("fidelab compare m --kv k16", ["k16v8"]),
        ("fidelab compare m --kv f16/q8", ["f16/q8_0"]),
        ("fidelab compare m --engine vllm --kv k16", []),
        ("fidelab bench serve --random-", ["--random-output-len", "--random-input-len"]),
        ("fidelab report runs/2", ["runs/20260101-120000-a"]),
    ],
)
def test_the_shell_completes_commands_options_and_names(words: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "20260101-120000-a").mkdir(parents=True)
    assert complete(words, tmp_path) == completed


@pytest.mark.parametrize("words", [("kernels",), ("bench", "kernels")])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_another_packages_command_is_its_own(words: tuple[str, ...], flag: str, tmp_path: Path) -> None:
    done = cli(*words, flag, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "usage: k16v8" in done.out


def test_brackets_in_help_are_shown(wide: None, tmp_path: Path) -> None:
    text = cli("compare", "--help", cwd=tmp_path).out
    for shown in (
        "NAME[key=value,…]",
        "fp8_e4m3[scale=per-token-head]",
        "[default: 32]",
        "[default: the engine's native one]",
    ):
        assert shown in text


def test_every_flag_of_compare_is_explained(wide: None, tmp_path: Path) -> None:
    text = cli("compare", "--help", cwd=tmp_path).out
    flags = """--reference --kv --candidate --engine --python --image --prefix --pythonpath --base-url --model --force
        --control --axes --text --windows --n-ctx --protocol --stride --prompts
        --n-predict --limit --template --quick --set --seed --bands --no-floor --dtype --device --threads --engine-arg
        --benches        --deadline --output-dir --fail-under --json --plot --dry-run --resume"""
    assert [flag for flag in flags.split() if flag not in text] == []


def test_no_command_at_all_shows_the_help_and_exits_with_2(wide: None, tmp_path: Path) -> None:
    done = cli(cwd=tmp_path)
    assert done.code == 2
    assert "Usage: fidelab" in done.out + done.err


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    done = cli("--version", cwd=tmp_path)
    assert (done.code, done.out) == (0, f"fidelab {fidelab.__version__}\n")


def loaded(code: str, *argv: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after ``code``."""
    script = f"import sys; sys.argv = {['fidelab', *argv]!r}\ntry:\n    {code}\nexcept SystemExit: pass\n"
    report = "print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script + report], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "transformers", "numpy", "scipy", "pyarrow", "yaml", "jinja2", "huggingface_hub"}


@pytest.mark.parametrize(
    ("code", "argv"),
    [
        ("import fidelab", ()),
        ("import fidelab; fidelab.__version__", ()),
        ("from fidelab.cli import main; main()", ("--help",)),
        ("from fidelab.cli import main; main()", ("compare", "--help")),
        ("from fidelab.cli import main; main()", ("--version",)),
    ],
    ids=["import", "version", "help", "compare-help", "version-flag"],
)
def test_nothing_heavy_is_loaded_before_it_is_used(code: str, argv: tuple[str, ...]) -> None:
    ours = HEAVY if argv == ("compare", "--help") else {*HEAVY, "pydantic"}  # typer reads a command's types with it
    assert loaded(code, *argv) & ours == set()


def test_names_of_the_package_are_found_when_they_are_used() -> None:
    assert {"compare", "Report"} <= set(fidelab.__all__)
    for name in fidelab.__all__:
        assert getattr(fidelab, name) is not None
    module: Any = fidelab
    with contextlib.suppress(AttributeError):
        _ = module.no_such_name
        raise AssertionError("a name that does not exist was found")
