"""Help: every command has it, led by an example that is itself a command, and it costs little."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import fidelab
from fidelab.config import profiles
from fidelab.config.presets import listing
from tests.run.harness import Done, cli

# Group of commands → its commands.
GROUPS = {
    "runs": "list page show",
    "bench": "offline serve sweep speculation",
    "estimate": "model explain",
    "diagnose": "layers sensitivity attention",
    "checkpoint": "audit convert quantize calibrate make-fragile",
    "serve": "start stop presets show check",
    "share": "reference",
    "reproduce": "list show llama.cpp-pr",
    "import": "refract kld-dumps",
    "setup": "engines install models fetch formats clean",
}
ALONE = ("compare", "eval", "check", "report", "doctor")
COMMANDS: list[tuple[str, ...]] = [
    (),
    *((name,) for name in (*ALONE, *GROUPS)),
    *((group, name) for group, names in GROUPS.items() for name in names.split()),
]
WITH_EXAMPLES = [words for words in COMMANDS if words == () or words[0] in ALONE]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for every line, and no colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    monkeypatch.setenv("NO_COLOR", "1")


def examples(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(ref=\$\()?fidelab ", line)]


@pytest.fixture(scope="module")
def asked() -> dict[tuple[str, ...], Done]:
    """What commands said so far; help depends on nothing but its words."""
    return {}


@pytest.fixture
def shown(asked: dict[tuple[str, ...], Done], wide: None, tmp_path: Path) -> Callable[..., Done]:
    """What a command says to these words."""

    def show(*words: str) -> Done:
        if words not in asked:
            asked[words] = cli(*words, cwd=tmp_path)
        return asked[words]

    return show


def test_every_command_has_help(shown: Callable[..., Done]) -> None:
    wrong = []
    for words in COMMANDS:
        for flag in ("--help", "-h"):
            done = shown(*words, flag)
            if (done.code, done.err) != (0, "") or "Usage: fidelab" not in done.out:
                wrong.append((*words, flag))
    assert wrong == []


def test_help_is_led_by_examples_that_fit_into_eighty_columns(shown: Callable[..., Done]) -> None:
    wrong = []
    for words in WITH_EXAMPLES:
        text = shown(*words, "--help").out
        if not examples(text) or text.index("Example") >= text.index("Options"):
            wrong.append(words)
    assert wrong == []
    found = [(words, example) for words in COMMANDS for example in examples(shown(*words, "--help").out)]
    assert [one for one in found if len(one[1]) > 78] == []


def test_examples_name_commands_and_flags_that_exist(shown: Callable[..., Done]) -> None:
    unknown = []
    for words in WITH_EXAMPLES:
        for example in examples(shown(*words, "--help").out):
            used = [word for word in shlex.split(example.replace("$(", "").replace(")", "")) if word != "ref=fidelab"]
            command = used[1] if used[0] == "fidelab" else used[0]
            flags = {word for word in used if word.startswith("--")}
            known = set(
                re.findall(r"--?[a-z][a-z-]*", shown(command, "--help-all" if command == "compare" else "--help").out)
            )
            unknown += [(words, example, flag) for flag in flags - known]
    assert unknown == []


def test_a_flag_has_no_value_and_a_value_has_a_short_name(shown: Callable[..., Done]) -> None:
    wrong = []
    for words in COMMANDS:
        options = shown(*words, "--help").out.partition("╭─ Options")[2]
        wrong += [(words, name) for name in re.findall(r"<(?:bool|int|float|str|list.*?)>|BOOL|BOOLEAN", options)]
    assert wrong == []


def test_commands_and_options_stand_in_groups(shown: Callable[..., Done]) -> None:
    def panels(*words: str) -> list[str]:
        return re.findall(r"╭─ (.*?) ─+╮", shown(*words, "--help").out)

    assert panels() == ["Options", "Compare", "Results", "Speed and size", "Diagnosis and checkpoints", "This machine"]
    assert panels("compare") == ["Arguments", "Options"]
    assert re.findall(r"╭─ (.*?) ─+╮", shown("compare", "--help-all").out)[2:] == [
        "Configurations",
        "Measurement",
        "Scoring",
        "Engine",
    ]


def test_there_are_fifteen_commands(shown: Callable[..., Done]) -> None:
    listed = re.findall(r"^│ ([a-z]+) ", shown("--help").out, re.M)
    assert sorted(listed) == sorted({words[0] for words in COMMANDS if words})
    assert len(listed) == 15


def test_help_of_compare_shows_a_dozen_options_on_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    text = cli("compare", "--help", cwd=tmp_path).out
    shown = re.findall(r"^│ (--[a-z-]+)", text, re.M)
    assert set(shown) == {
        *("--engine", "--kv", "--candidate", "--serve", "--change", "--reference", "--text", "--traffic", "--quick"),
        *("--windows", "--n-ctx", "--axes", "--output-dir", "--help-all", "--help"),
    }
    assert len(text.rstrip().splitlines()) <= 51


def test_brackets_in_help_are_shown_and_paragraphs_are_wrapped_by_the_terminal_alone(
    shown: Callable[..., Done],
) -> None:
    text = shown("compare", "--help-all").out
    for told in ("NAME[key=value,…]", "[default: 32, or fewer where all is decided]", "[default: native]"):
        assert told in text
    text = shown("check", "--help").out
    assert "whole 95% interval. If the interval crosses a limit, the required sample size is printed." in text


def asking(words: str) -> dict[str, str]:
    """What bash sets where it asks what may follow ``words``."""
    return {"COMP_WORDS": words, "COMP_CWORD": str(len(re.findall(" +", words))), "_FIDELAB_COMPLETE": "complete_bash"}


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fidelab comp", ["compare"]),
        ("fidelab compare --eng", ["--engine", "--engine-arg"]),
        ("fidelab bench serve --random-", ["--random-output-len", "--random-input-len"]),
    ],
)
def test_the_shell_completes_commands_and_options(
    words: str, completed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in asking(words).items():
        monkeypatch.setenv(name, value)
    assert cli(cwd=tmp_path).out.split() == completed


@pytest.fixture
def runs_there(tmp_path: Path) -> Path:
    """A working folder with two runs, an unfinished download and the link to the latest run."""
    for name in ("20260101-000000-old", "20260202-000000-new"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.resolved.yaml").write_text("")
    (tmp_path / "runs" / "captures").mkdir()
    (tmp_path / "runs" / "latest").symlink_to("20260202-000000-new")
    return tmp_path


NEWEST_FIRST = ["latest", "20260202-000000-new", "20260101-000000-old"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fidelab compare M --engine v", ["vllm"]),
        ("fidelab compare M --engine f", []),  # the fake engine is for tests
        ("fidelab compare M --kv q8", ["q8_0"]),
        ("fidelab compare M --engine llamacpp --kv q4", ["q4_1", "q4_0"]),
        ("fidelab compare M --engine llamacpp --kv f16/q8", ["f16/q8_0"]),
        ("fidelab compare M --engine unknown --kv q", []),
        ("fidelab compare M --axes rn", ["rniah"]),
        ("fidelab compare M --axes kld,traj", ["kld,trajectory"]),
        ("fidelab compare M --axes kld,kl", []),  # each once
        ("fidelab compare M --benches dec", ["decode"]),
        ("fidelab compare M --device cu", ["cuda", "cuda:0"]),
        ("fidelab compare M --text ag", ["agents"]),
        ("fidelab check ", NEWEST_FIRST),
        ("fidelab report 2026020", ["20260202-000000-new"]),
        ("fidelab report runs/2026010", ["runs/20260101-000000-old"]),
        ("fidelab reproduce refract", ["refract-full", "refract-quick"]),  # the command run may be left out
        ("fidelab reproduce l", ["list", "llama.cpp-pr", "lab-bench"]),
        ("fidelab check latest --baseline 20260101", ["20260101-000000-old"]),
    ],
)
def test_the_shell_completes_values(
    words: str, completed: list[str], runs_there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in asking(words).items():
        monkeypatch.setenv(name, value)
    assert cli(cwd=runs_there).out.split() == completed


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("fidelab compare M --preset ", listing),
        ("fidelab reproduce run ", profiles.names),
        ("fidelab reproduce show ", profiles.names),
    ],
)
def test_the_shell_completes_all_presets_and_profiles(
    words: str, names: Callable[[], Iterable[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in asking(words).items():
        monkeypatch.setenv(name, value)
    assert cli(cwd=tmp_path).out.split() == [*names()] != []


@pytest.mark.parametrize(
    ("words", "completed"), [("fidelab comp", ["compare"]), ("fidelab check ", NEWEST_FIRST)], ids=["command", "value"]
)
def test_a_process_of_its_own_completes(words: str, completed: list[str], runs_there: Path) -> None:
    called = [sys.executable, "-c", "from fidelab.cli import main; main()"]
    env = {**os.environ, **asking(words)}
    done = subprocess.run(called, cwd=runs_there, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


def test_the_version_is_the_packages_and_no_command_at_all_shows_the_help(wide: None, tmp_path: Path) -> None:
    done = cli("--version", cwd=tmp_path)
    assert (done.code, done.out) == (0, f"fidelab {fidelab.__version__}\n")
    done = cli(cwd=tmp_path)
    assert done.code == 2
    assert "Usage: fidelab" in done.out + done.err


HEAVY = {"torch", "transformers", "numpy", "scipy", "pyarrow", "yaml", "jinja2", "huggingface_hub"}
# In this order in one interpreter, which has loaded at each step what the steps before it needed, too.
STEPS: dict[str, tuple[str, set[str]]] = {
    "import": ("import fidelab", {*HEAVY, "pydantic"}),
    "version": ("fidelab.__version__", {*HEAVY, "pydantic"}),
    "version-flag": ("run('--version')", {*HEAVY, "pydantic"}),
    "help": ("run('--help')", {*HEAVY, "pydantic"}),
    "compare-help": ("run('compare', '--help')", HEAVY),  # typer reads a command's types with pydantic
}
RUN = """
import contextlib, io, json, sys
def run(*words):
    from fidelab.cli import main
    sys.argv = ['fidelab', *words]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    assert out.getvalue()
def tell(step):
    print(json.dumps([step, sorted({name.partition('.')[0] for name in sys.modules})]))
"""


def test_nothing_heavy_is_loaded_before_it_is_used() -> None:
    script = RUN + "".join(f"{code}\ntell({step!r})\n" for step, (code, _) in STEPS.items())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = dict(map(json.loads, done.stdout.splitlines()))
    assert list(loaded) == list(STEPS)
    assert [(step, name) for step, (_, without) in STEPS.items() for name in without & set(loaded[step])] == []


def test_names_of_the_package_are_found_when_they_are_used() -> None:
    assert {"compare", "Report"} <= set(fidelab.__all__)
    for name in fidelab.__all__:
        assert getattr(fidelab, name) is not None
    module: Any = fidelab
    with contextlib.suppress(AttributeError):
        _ = module.no_such_name
        raise AssertionError("a name that does not exist was found")
