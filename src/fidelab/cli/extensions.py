"""Commands of other packages: all words after their names are passed on.

A package declares them as entry points of group ``fidelab.commands``.  The name is the command's, with a dot where it
belongs to a group (``bench.kernels``: ``fidelab bench kernels``); what it names takes the words and returns the exit
code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

import typer

GROUP = "fidelab.commands"
# The commands of k16v8 are declared here too, so that without k16v8 they print what to install.
_KNOWN = (EntryPoint("kernels", "k16v8.cli:main", GROUP), EntryPoint("bench.kernels", "k16v8.cli:bench", GROUP))
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def register(app: typer.Typer, groups: Mapping[str, typer.Typer], *, panel: str) -> None:
    """Add the commands to ``app``, or to the group that they belong to; those of unknown groups are left out.

    ``panel``: the frame of ``--help`` in which those of ``app`` are.
    """
    parents = {"": app, **groups}
    for point in {point.name: point for point in (*_KNOWN, *entry_points(group=GROUP))}.values():
        group, _, name = point.name.rpartition(".")
        if group in parents:
            text = f"A command of the package {_package(point)}; all words are passed on."
            options = {"help": text, "context_settings": _PASSED_ON, "add_help_option": False}
            where = {} if group else {"rich_help_panel": panel}
            parents[group].command(name, **options, **where)(_command(point))  # type: ignore[arg-type]


def _command(point: EntryPoint) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        if point.name == "kernels" and context.args[:1] == ["audit"]:
            from fidelab.cli.kernels_audit import with_tensors

            with with_tensors(context.args) as words:
                code = _load(point)(words)
        else:
            code = _load(point)(context.args)
        raise typer.Exit(code)

    return run


def _load(point: EntryPoint) -> Callable[[list[str]], int]:
    from fidelab.core.errors import UsageError

    package = _package(point)
    try:
        loaded: Callable[[list[str]], int] = point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        command = point.name.replace(".", " ")
        raise UsageError(
            f"fidelab {command} is a command of the package {package}, which is not installed: pip install {package}"
        ) from error
    return loaded


def _package(point: EntryPoint) -> str:
    return point.module.partition(".")[0]
