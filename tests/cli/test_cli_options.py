"""Options are declared once: groups of them, and what their declarations promise."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import fidelab.cli
from fidelab.cli.options import (
    AxesOptions,
    EngineOptions,
    Options,
    ServableEngineOptions,
    expand_options,
)

# It hands its options to the command of another package: names are all they share with the others.
KERNELS = ("diagnose attention",)

# Option → commands whose option of this name is not that of the others, and why.
OTHERS = {
    option: set(commands.split(", "))
    for option, commands in {
        "--all": "serve stop",  # servers, not metrics
        "--base": "reproduce llama.cpp-pr",  # a file in Q8_0
        "--base-url": "bench serve, bench sweep, serve check, eval",  # of any server
        "--batch": "estimate model",  # cells of a table
        "--budget": "compare",  # a time, not bytes
        "--benches": "bench offline",  # benches are what it is for: never none
        "--candidate": "diagnose layers, bench offline",  # exactly one; one of several arms
        "--device": "estimate model",  # rows of the device table
        "--dry-run": "serve start, reproduce run, checkpoint quantize",  # a command, stages or modules, not jobs
        "--dtype": "checkpoint convert",  # of what is not quantized, not of a computation
        # engines that pass on states; the engine of a plan; a filter; the preset's own; whose formats are meant
        "--engine": "diagnose layers, diagnose sensitivity, setup formats, serve start, serve show, serve check, "
        "estimate model, eval",
        "--image": "setup engines",  # what is listed instead
        "--floor": "diagnose layers",  # captures all again, not a quarter
        "--context": "estimate model",  # several
        "--fit": "bench sweep",  # a flag: cells whose requests fit
        "--force": "serve start",  # starts a server
        # formats of servers, of no run, of no candidate; exactly one; the first is the reference; a label
        "--kv": "estimate model, diagnose layers, diagnose sensitivity, bench offline, bench serve, bench sweep, eval",
        "--configuration": "report",  # of two forms alone
        "--max-kld": "check",  # decides, and recommends nothing
        "--json": "check",  # a file
        "--reference": "estimate model, compare",  # a format of no run; a packed reference, too
        "--text": "compare",  # by the engine
        "--to": "checkpoint convert",  # a form of weights
        "--tp": "estimate model",  # what a device holds
        # the model on the server; the model whose cache is counted; a label
        "--model": "bench serve, bench sweep, setup formats, import kld-dumps",
        # one context, of no axis; one context
        "--n-ctx": "diagnose layers, diagnose sensitivity, checkpoint calibrate, reproduce llama.cpp-pr",
        # a candidate's
        "--name": "import refract, import kld-dumps, import loads, import lm-eval, import nemo-evaluator",
        "--out": "report",  # a file or a folder
        "--output": "estimate explain, runs page",  # a page, not a folder
        # with captures; in a folder of its own; no run was made, only its folder
        "--output-dir": "compare, diagnose layers, diagnose sensitivity, checkpoint calibrate, reproduce run, "
        "import refract, import kld-dumps, import loads, import lm-eval, import nemo-evaluator",
        "--prompts": "bench serve, bench sweep",  # of a load; how prompts are sent
        "--python": "setup install",  # makes the environment
        "--repeats": "bench offline",  # answers of a bench, not passes over loads
        "--resume": "checkpoint quantize, reproduce run",  # a flag: the output is named; a profile's folder
        "--seed": "bench serve, bench sweep",  # of prompts and arrivals
        "--set": "reproduce run, serve start, serve show, serve check",  # of a profile or an arm, not an experiment
        "--stride": "import kld-dumps",  # what the dumps were made with
        "--timeout": "serve start",  # of a start, not of a request
        "--windows": "diagnose layers, diagnose sensitivity, checkpoint calibrate",  # of no axis
    }.items()
}


class _Size(Options, panel="Sizes"):
    rows: Annotated[int, typer.Option(help="How many.")]
    wide: Annotated[bool, typer.Option("--wide", help="More columns.")] = False


class _BigSize(_Size):
    wide: Annotated[bool, typer.Option("--wide", help="Fewer columns otherwise.")] = True
    tall: Annotated[str | None, typer.Option(help="A height.")] = None


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its words, without the program's."""

    def below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, (*words, name))
            else:
                yield " ".join((*words, name)), command

    return below(typer.main.get_command(fidelab.cli.app), ())


def declarations() -> dict[str, dict[str, tuple[object, ...]]]:
    """Option → command → type, default and help."""
    found: dict[str, dict[str, tuple[object, ...]]] = {}
    for words, command in commands():
        for parameter in command.params:
            if parameter.opts[0].startswith("--") and words not in KERNELS:
                kind = getattr(parameter, "type", None) or parameter.type_descriptor.annotation
                declared = (str(kind), parameter.multiple, parameter.required, parameter.default, parameter.help)
                found.setdefault(parameter.opts[0], {})[words] = declared
    return found


def run(command: Any, *words: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, words)


def test_a_command_gets_its_groups_as_objects() -> None:
    seen: dict[str, Any] = {}

    @expand_options
    def command(name: Annotated[str, typer.Argument()], size: _BigSize, loud: bool = False) -> None:
        seen.update(name=name, loud=loud, **size.settings())

    assert run(command, "ann", "--rows", "3", "--loud", "--tall", "x").exit_code == 0
    assert seen == {"name": "ann", "loud": True, "rows": 3, "wide": True, "tall": "x"}


def test_a_subclass_has_the_fields_of_its_base_first_and_its_own_defaults() -> None:
    shown = {parameter.name: parameter.default for parameter in _BigSize.parameters()}
    assert shown == {"rows": inspect.Parameter.empty, "wide": True, "tall": None}
    assert list(shown) == ["rows", "wide", "tall"]


def test_help_shows_a_group_in_its_panel_and_a_subclass_in_that_of_its_base() -> None:
    panels = [parameter.annotation.__metadata__[0].rich_help_panel for parameter in _BigSize.parameters()]
    assert panels == ["Sizes"] * 3


def test_an_option_without_a_default_is_required() -> None:
    @expand_options
    def command(size: _Size) -> None:
        raise AssertionError

    assert run(command).exit_code == 2


def test_two_groups_with_an_option_of_the_same_name_are_refused() -> None:
    def command(size: _Size, other: _BigSize) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name"):
        expand_options(command)


def given(group: type[Options], **fields: Any) -> Any:
    """A group as typer would fill it."""
    return group(**{parameter.name: parameter.default for parameter in group.parameters()} | fields)


def test_an_engine_says_its_place_and_its_options() -> None:
    options = given(ServableEngineOptions, engine="openai", base_url="http://x/v1", engine_arg=["a=1"], deadline=5.0)
    assert options.settings() == {
        "engine": {"name": "openai", "python": None, "image": None, "pythonpath": []},
        "engine_args": {"a": "1", "base-url": "http://x/v1"},
        "env": {},
        "dtype": "auto",
        "device": "auto",
        "threads": None,
        "deadline": 5.0,
    }


def test_a_deadline_that_was_not_given_is_left_to_the_schema() -> None:
    assert "deadline" not in given(EngineOptions).settings()


def test_settings_of_axes_are_those_whose_flags_were_given() -> None:
    said = given(AxesOptions, axes="kld", windows=4, limit=None).settings()
    assert said == {"axes": {"kld": {"windows": 4}}, "text": "auto", "prompts": "default"}


def test_a_quick_look_measures_kld_alone_unless_axes_are_named() -> None:
    assert list(given(AxesOptions).settings()["axes"]) == ["trajectory", "kld"]
    assert list(given(AxesOptions, quick=True).settings()["axes"]) == ["kld"]
    assert list(given(AxesOptions, quick=True, axes="core").settings()["axes"]) == ["trajectory", "kld"]


def test_an_option_of_several_commands_is_the_same_in_all_unless_there_is_a_reason() -> None:
    differing = {
        option: {words: declared for words, declared in owners.items() if words not in OTHERS.get(option, {})}
        for option, owners in declarations().items()
    }
    assert {option: owners for option, owners in differing.items() if len(set(owners.values())) > 1} == {}


def test_every_reason_for_an_option_of_its_own_is_still_needed() -> None:
    declared = declarations()
    for option, owners in OTHERS.items():
        common = {value for words, value in declared[option].items() if words not in owners}
        for words in owners:
            assert declared[option][words] not in common, (option, words)


def test_no_option_is_declared_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(Path(fidelab.cli.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Option", "typer.Argument"):
                places.setdefault(ast.unparse(node), []).append(f"{path.name}:{node.lineno}")
    assert {declared: where for declared, where in places.items() if len(where) > 1} == {}
