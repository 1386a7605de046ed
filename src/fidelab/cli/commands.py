"""Typer as every module here uses it, with a readable ``--help``: short metavars for values, none for flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from copy import copy
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
import typer.core
from typer.models import ArgumentInfo, CommandFunctionType, OptionInfo

from fidelab.cli.rules import check_flags
from fidelab.cli.values import named
from fidelab.core.errors import UsageError
from fidelab.core.lines import columns

_VALUES = {int: "N", float: "N", Path: "PATH", str: "TEXT"}


class _Shown:
    """Help text of a command or a group."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters; a flag has no metavar, since it takes no value."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line without hidden arguments."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        hidden = [p.get_usage_pieces(ctx) for p in self.get_params(ctx) if getattr(p, "hidden", False)]
        return [piece for piece in pieces if [piece] not in hidden]


def _set_help_width() -> None:
    """Let typer print help as wide as everything else."""
    from typer import rich_utils

    rich_utils.MAX_WIDTH = columns()


class _Command(_Shown, typer.core.TyperCommand):
    """A command.  With ``brief``, ``--help`` shows only these parameters, and ``--help-all`` shows all."""

    brief: Collection[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, unless one is a short option of another tool, such as ``-fa``."""
        if any(word[:1] == "-" and word[1:2].isalpha() and len(word.partition("=")[0]) > 2 for word in args):
            from fidelab.cli.mistakes import unknown_joined

            if text := unknown_joined(ctx, args):
                raise UsageError(text)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless its flags do not go together."""
        check_flags(ctx)
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _set_help_width()
        parameters = self.get_params(ctx)
        if not self.brief or ctx.meta.get("help_all"):
            return super().format_help(ctx, formatter)
        shown = [(parameter, parameter.hidden, getattr(parameter, "rich_help_panel", None)) for parameter in parameters]
        for parameter, hidden, _ in shown:
            parameter.hidden = hidden or parameter.name not in (*self.brief, "help", "help_all")
            parameter.rich_help_panel = None
        try:
            return super().format_help(ctx, formatter)
        finally:
            for parameter, hidden, panel in shown:
                parameter.hidden, parameter.rich_help_panel = hidden, panel


class Group(_Shown, typer.core.TyperGroup):
    """A group of commands.

    If the group has a ``default`` command, words that do not begin with a command are passed to it: ``fidelab bench
    MODEL``.
    """

    default: ClassVar[str | None] = None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _set_help_width()
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            if self.default is not None:
                args = [self.default, *args]
            elif text := self._meant(ctx, args[0]):
                raise UsageError(text)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return commands, and values of the default command's argument, that begin so."""
        found: list[Any] = super().shell_complete(ctx, incomplete)
        if self.default is None or incomplete.startswith("-"):
            return found
        command = self.commands[self.default]
        inner = command.make_context(self.default, [], parent=ctx, resilient_parsing=True)
        arguments = (one for one in command.get_params(inner) if one.param_type_name == "argument")
        argument = next(arguments, None)
        return found if argument is None else [*found, *argument.shell_complete(inner, incomplete)]

    def _meant(self, ctx: Any, word: str) -> str:
        """Return the message for a word that is not a command of this group."""
        from fidelab.cli.mistakes import unknown_command

        if ctx.command_path.endswith(" import") and any(word.lower() in tool for tool in _LOADS):
            return f"no command '{ctx.command_path} {word}'; did you mean: {ctx.command_path} loads"
        root = ctx.find_root()
        return unknown_command(ctx, word, _paths(root.command, root.command_path))


_LOADS = ("vllm-bench-serve", "sglang-bench_serving", "guidellm")  # tools whose files `import loads` reads


def _paths(group: Any, path: str) -> Iterator[tuple[str, str]]:
    """Names of the commands below a group, each with the words that call it."""
    for name, command in group.commands.items():
        if not command.hidden:
            yield name, f"{path} {name}"
            yield from _paths(command, f"{path} {name}") if isinstance(command, Group) else ()


class Commands(typer.Typer):
    """A group whose commands are declared by functions, as in typer.

    Args:
        default: The command to run if none is named.
    """

    def __init__(self, *, cls: type[Group] = Group, default: str | None = None, **settings: Any) -> None:
        if default is not None:
            cls = type(cls.__name__, (cls,), {"default": default})
            settings["context_settings"] = {"ignore_unknown_options": True}
        super().__init__(cls=cls, no_args_is_help=True, rich_markup_mode="rich", **settings)

    def command(
        self, name: str | None = None, *, brief: Collection[str] = (), **settings: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Like ``typer.Typer.command``, with metavars derived from the type (options) or the name (arguments).

        ``brief``: names of the parameters that ``--help`` shows; ``--help-all`` shows all parameters.
        """
        register = super().command

        def declare(function: CommandFunctionType) -> CommandFunctionType:
            hints = get_type_hints(function, include_extras=True)
            for argument, hint in hints.items():
                if get_origin(hint) is not Annotated:
                    continue
                kind, declared = get_args(hint)[:2]
                if isinstance(declared, ArgumentInfo) and declared.metavar is None:
                    declared.metavar = argument.upper()
                elif isinstance(declared, OptionInfo) and (parser := declared.parser) is not None:
                    # typer has taken the first name for the default
                    names = [
                        name for name in (declared.default, *(declared.param_decls or ())) if isinstance(name, str)
                    ]
                    own = f"--{argument.replace('_', '-')}"
                    flag = next((name for name in names if name.startswith("--")), own)
                    declared = copy(declared)
                    declared.parser = named(parser, flag)
                    hints[argument] = Annotated[kind, declared]
                elif isinstance(declared, OptionInfo) and declared.metavar is None:
                    kinds = [kind, *get_args(kind), *(inner for part in get_args(kind) for inner in get_args(part))]
                    declared.metavar = next((_VALUES[each] for each in kinds if each in _VALUES), None)
            if (signature := getattr(function, "__signature__", None)) is not None:  # of expanded groups
                parameters = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
                function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
            function.__annotations__ = hints  # otherwise typer would evaluate the annotations' text again
            # each paragraph in one line, since the terminal wraps it; indented lines are examples and stay as they are
            paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
            lines = (text if text[:1] == " " else text.replace("\n", " ") for text in paragraphs)
            text = settings.pop("help", None) or "\n\n".join(lines)
            cls = type("_Brief", (_Command,), {"brief": brief}) if brief else _Command
            return register(name, cls=cls, help=text, **settings)(function)

        return declare
