"""Options are declared once: groups of them, and what their declarations promise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

import fidelab.cli
from fidelab.cli.options import (
    AxesOptions,
    EngineOptions,
    Options,
    ServableEngineOptions,
    expand_options,
    refuse_other_options,
)
from fidelab.core.errors import UsageError

# It hands its options to the command of another package: names are all they share with the others.
KERNELS = ("diagnose attention",)


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


def test_resume_refuses_what_was_said_and_not_what_is_a_default() -> None:
    @expand_options
    def command(context: typer.Context, size: _BigSize, resume_dir: str = "") -> None:
        refuse_other_options(context, "resume_dir", "run", ("rows",))

    assert run(command, "--rows", "1", "--resume-dir", "x").exit_code == 0
    refused = run(command, "--rows", "1", "--tall", "x", "--resume-dir", "x").exception
    assert isinstance(refused, UsageError)
    assert str(refused) == "--resume-dir takes the settings of the run: leave out --tall"


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
    assert said == {"axes": {"kld": {"windows": 4}}, "text": "default", "prompts": "default"}


def test_a_quick_look_measures_kld_alone_unless_axes_are_named() -> None:
    assert list(given(AxesOptions).settings()["axes"]) == ["trajectory", "kld"]
    assert list(given(AxesOptions, quick=True).settings()["axes"]) == ["kld"]
    assert list(given(AxesOptions, quick=True, axes="core").settings()["axes"]) == ["trajectory", "kld"]


def test_no_option_is_declared_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(Path(fidelab.cli.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Option", "typer.Argument"):
                places.setdefault(ast.unparse(node), []).append(f"{path.name}:{node.lineno}")
    assert {declared: where for declared, where in places.items() if len(where) > 1} == {}
