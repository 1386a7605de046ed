"""Commands in documents: the parsers take every one of them, and those that need no model run."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import typer.main

from fidelab.axes.base import load_axis
from fidelab.bench.base import load_bench
from fidelab.cli import app
from fidelab.cli.rules import check_flags
from fidelab.config.schema import Experiment
from fidelab.core.errors import FidelabError
from tests.run.harness import cli, write_inputs

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "console", "yaml")
# A prompt, the "run:" of a workflow or the word of a screen's last lines (Next, Report, More) may stand before it.
IN_BLOCK = re.compile(r"^ *(?:[$] |- run: |run: |[A-Z]\w+ {2,})?((?:fidelab|k16v8) [a-z-].*)$", re.MULTILINE)
INDENTED = re.compile(r"^    ((?:fidelab|k16v8) [a-z-].*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
PROGRAM = re.compile(r"(?:fidelab|k16v8) [a-z-]")
OPERATORS = ("|", "||", "&&", ";", ">")
# Commands that read a finished run, or nothing but tables of the package: they run here.
QUICK = re.compile(
    r"fidelab (?:(?:check|report) latest|runs (?:list|show latest|page -o)|share reference latest|estimate|compare fake"
    r"|reproduce (?:list|show)|setup models|serve presets)\b"
)
# A browser, the hub, files of other tools, tasks of another run, or a value that the reader puts in.
NEEDS_MORE = re.compile(
    r"--open|hf://|Qwen|gate\.yaml|main\.json|\.(?:csv|json) --y|lm-eval|estimate --device|\.gguf|_RUN|[A-Z]{4,}"
)


class Written(NamedTuple):
    """A command of a page.  Inline code may name a command without the values that it needs."""

    text: str
    inline: bool

    @property
    def words(self) -> list[str]:
        """The words as a shell reads them, with all that a synopsis puts in brackets, up to a pipe or a redirection."""
        text = re.sub(r"\[(-[^\]]*)\]", r"\1", self.text)
        words = ["1" if word == "N" else word for word in shlex.split(text, comments=True) if word != "…"]
        return words[: next((place for place, word in enumerate(words) if word in OPERATORS), None)]


def commands(text: str) -> Iterator[Written]:
    """Commands in a document's blocks and in its inline code."""
    for block in FENCE.finditer(text):
        if block[1] in SHELL:
            for line in IN_BLOCK.finditer(re.sub(r"\\\n *", " ", block[2])):
                yield Written(line[1], inline=False)
    yield from (Written(line[1], inline=False) for line in INDENTED.finditer(FENCE.sub("", text)))
    for paragraph in FENCE.sub("", text).split("\n\n"):
        for code in INLINE.findall(paragraph):
            if PROGRAM.match(code):
                yield Written(" ".join(code.split()), inline=True)


@functools.cache
def fidelab_root() -> Any:
    return typer.main.get_command(app)


def parse_fidelab(words: list[str]) -> None:
    """Let typer read a command as ``main`` does, without running it."""
    context = fidelab_root().make_context("fidelab", words)
    while hasattr(context.command, "commands"):
        left = [*context._protected_args, *context.args]
        if not left:
            return
        name, command, left = context.command.resolve_command(context, left)
        context = command.make_context(name, left, parent=context)
    check_flags(context)


def fault(command: Written) -> str | None:
    """What a parser has against a command."""
    program, *words = command.words
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            if program == "fidelab":
                parse_fidelab(words)
            else:
                k16v8 = pytest.importorskip("k16v8.cli")
                if k16v8._parser().parse_args(words).run is None:
                    return "names no command"
        except (typer.Exit, SystemExit):  # --help, --version
            return None
        except Exception as error:
            return None if command.inline and is_unfinished(error, words) else f"{type(error).__name__}: {error}"
    return None


def is_unfinished(error: Exception, words: list[str]) -> bool:
    """Whether a command only lacks values: ``fidelab import lm-eval``, ``fidelab compare -f``, ``--format FORMAT``."""
    text = str(getattr(error, "message", error))
    lacks = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError") or text.startswith("name a model")
    unset = words[-1].startswith("-") and text.endswith(("requires an argument.", "expected one argument"))
    return lacks or unset or any(word.isupper() and f"'{word}'" in text for word in words)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, whose candidates are named as in the documents, and a policy."""
    folder = tmp_path_factory.mktemp("commands")
    write_inputs(folder)
    inputs = ("--text", "text.txt", "--windows", "24", "--n-ctx", "16", "--axes", "kld")
    arms = ("--candidate", "name=q8_0,kv=decay[b=0.501]", "--candidate", "name=int4,kv=decay[b=0.7]")
    engine = ("--engine", "fake", "--engine-arg", "family=geometric", "--engine-arg", "predicts=on")
    done = cli("compare", "fake", *engine, "--reference", "exact", *arms, *inputs, "--keep-rows", cwd=folder)
    assert done.code == 0, done
    shutil.copy(ROOT / "examples" / "check" / "policy.yaml", folder / "policy.yaml")
    shutil.copytree(ROOT / "examples" / "check", folder / "examples" / "check")
    return folder


def found(page: Path) -> list[Written]:
    return list(dict.fromkeys(commands(page.read_text("utf-8"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_parsers_take_every_command_of_a_document(page: Path, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    faults = {command.text: fault(command) for command in found(page)}
    assert {text: why for text, why in faults.items() if why} == {}


def test_documents_hold_many_commands_of_both_programs() -> None:
    programs = [command.words[0] for page in PAGES for command in found(page)]
    assert programs.count("fidelab") > 250
    assert programs.count("k16v8") > 10


@pytest.mark.parametrize(
    "planted",
    [
        "```\nfidelab check runs/a --max-kdl 0.01\n```",
        "```\n$ fidelab compare MODEL \\\n    --kv-format q8_0\n```",
        "```yaml\n      - run: fidelab comprae MODEL --kv q8_0\n```",
        "```\nNext    fidelab compare smollm2-135m --enigne llamacpp\n```",
        "Run `fidelab report latest --detials` again.",
        "Run `fidelab share refrence RUN`.",
        "`fidelab estimate MODEL --weight-bits four`",
        "`k16v8 audit --model smollm2-135m`",
        "```\nk16v8 bench --device cuda --operation weights\n```",
    ],
)
def test_a_wrong_word_in_a_command_of_a_document_is_found(
    planted: str, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(room)
    [command] = commands(planted)
    assert fault(command)


def quick() -> list[str]:
    """Complete commands of documents that need neither a model nor a server, each once."""
    written = {command for page in PAGES for command in found(page) if QUICK.match(command.text)}
    return sorted({shlex.join(command.words) for command in written if not NEEDS_MORE.search(command.text)})


@pytest.mark.parametrize("command", quick())
def test_a_command_of_a_document_that_needs_no_model_runs(
    command: str, room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 and 3 are answers: a limit that the run misses, or a format that was not applied."""
    monkeypatch.chdir(room)
    if fault(Written(command, inline=False)):
        pytest.skip("inline code that names a command without its values")
    compares = command.startswith("fidelab compare")  # its run would be the latest of the others
    done = cli(*shlex.split(command)[1:], cwd=tmp_path if compares else room)
    assert done.code in (0, 1, 3), done
    assert "Traceback" not in done.err


# Files, servers' commands, packed references and presets of the reader are not here.
READS_MORE = re.compile(
    r" -f | @|--preset|preset=|--traffic|--resume|--reference (?:auto|\S*(?:/|-reference))|--bin|--trust|[$]head"
)


def compared(words: list[str], cwd: Path) -> tuple[Experiment | None, str]:
    """The settings that a comparison would run with, of its tests as well, or the line that refuses them."""
    launched: list[Experiment] = []
    with mock.patch("fidelab.cli.compare.launch", lambda experiment, *_: launched.append(experiment)):
        done = cli(*words, cwd=cwd)
    if done.code or not launched:
        return None, done.err
    try:
        for name, settings in launched[0].axes.items():
            load_axis(name, settings)
        for name, settings in launched[0].benches.items():
            load_bench(name, settings)
    except FidelabError as error:
        return None, str(error)
    return launched[0], ""


def test_the_settings_of_every_comparison_in_a_document_are_valid(tmp_path: Path) -> None:
    """Everything but the run: names of tests, benches and settings, their values, flags that do not go together."""
    for name in ("text.txt", "notes.txt"):
        (tmp_path / name).write_text("A text.")
    written = {command.text: command for page in PAGES for command in found(page) if not command.inline}
    asked = [
        one.words[1:]
        for one in written.values()
        if one.text.startswith("fidelab compare") and "…" not in one.text and not READS_MORE.search(one.text)
    ]
    read = {shlex.join(words): compared(words, tmp_path) for words in asked}
    assert {text: refused for text, (_, refused) in read.items() if refused} == {}
    assert len(read) > 40


@pytest.mark.parametrize(
    "wrong", ["--axes kdl", "--set axes.rniah.lenghts='[512]'", "--benches decoding", "--limit rniah=4"]
)
def test_a_wrong_setting_of_a_comparison_is_found(wrong: str, tmp_path: Path) -> None:
    assert compared(shlex.split(f"compare MODEL --kv q8_0 {wrong}"), tmp_path)[1]
