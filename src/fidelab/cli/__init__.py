"""The command line: thin commands over :mod:`fidelab.run`; one module per command group.

Exit codes: 0 good, 1 shown to be bad (a limit missed, an arm failed), 2 usage or bad input (one line on standard
error), 3 undecided or unverified, 130 stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fidelab.cli.commands import Commands, Group
from fidelab.cli.defaults import default_map
from fidelab.run.signals import interrupts_raise

# ClickException, whose place depends on the version of typer
_FlagError: type[Exception] = typer.BadParameter.__mro__[2]


class _Stopped(Exception):
    """Ctrl-C, as an exception that typer does not handle (it would exit silently)."""

    def __init__(self, folder: Path | None, command: str) -> None:
        self.folder = folder
        self.command = command


_COMPARE, _RESULTS, _SPEED, _MODELS, _MACHINE = _PANELS = (
    "Compare",
    "Results",
    "Speed and size",
    "Diagnosis and checkpoints",
    "This machine",
)


_TABLE = {
    "compare": ("compare:compare", _COMPARE),
    "eval": ("eval:evaluate", _COMPARE),
    "check": ("check:check", _RESULTS),
    "report": ("report:report", _RESULTS),
    "doctor": ("doctor:doctor", _MACHINE),
    "reproduce": ("reproduce:app", _COMPARE),
    "runs": ("runs:app", _RESULTS),
    "share": ("share:app", _RESULTS),
    "import": ("imports:app", _RESULTS),
    "bench": ("bench:app", _SPEED),
    "estimate": ("estimate:app", _SPEED),
    "serve": ("serve:app", _SPEED),
    "diagnose": ("diagnose:app", _MODELS),
    "checkpoint": ("checkpoint:app", _MODELS),
    "setup": ("setup:app", _MACHINE),
}
"""Commands and groups: the module with the name of the function or group, and the panel of ``--help``."""


class _Commands(Mapping[str, Any]):
    """Commands of the table; importing and building all of them would take most of the time of a small command."""

    def __getitem__(self, name: str) -> Any:
        if name not in _TABLE:
            raise KeyError(name)
        return _built(name)

    def __contains__(self, name: object) -> bool:
        return name in _TABLE

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)


@cache
def _built(name: str) -> Any:
    """Import the module of a command or group, and build it."""
    place, panel = _TABLE[name]
    file, _, attribute = place.partition(":")
    module = import_module(f"fidelab.cli.{file}")
    found = getattr(module, attribute)
    only = Commands()
    if isinstance(found, typer.Typer):
        only.add_typer(found, name=name, rich_help_panel=panel)
    else:
        only.command(name, rich_help_panel=panel, brief=getattr(module, "BRIEF", ()))(found)
    return typer.main.get_group(only).commands[name]


class _Root(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(Any, _Commands())

    def list_commands(self, ctx: Any) -> list[str]:
        """List commands by the panels of ``--help``, which appear in the order of their first commands."""
        return sorted(_TABLE, key=lambda name: _PANELS.index(_TABLE[name][1]))

    def invoke(self, ctx: Any) -> Any:
        try:
            with interrupts_raise():
                ctx.default_map = default_map(self)
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _Stopped(getattr(stop, "folder", None), getattr(stop, "command", "")) from None
        except BrokenPipeError:  # "| head" closed our output
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        except Exception as error:
            if "KeyboardInterrupt" in str(error):  # native code, such as pydantic's, reports it so
                raise _Stopped(None, "") from None
            raise


app = Commands(
    name="fidelab",
    cls=_Root,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        import fidelab

        print(f"fidelab {fidelab.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measure what quantized KV caches and weights cost in accuracy, and save in memory, on your engine.

    [bold]Examples[/bold]

      fidelab compare smollm2-135m --kv q8_0 --kv fp8_e4m3 --quick

      fidelab compare Qwen/Qwen2.5-7B-Instruct --engine vllm --kv fp8_e4m3

      fidelab check latest --max-kld 0.01

      fidelab report latest
    """


def main() -> None:
    """Run the command line and exit; output that cannot be written is an error of its own."""
    from fidelab.cli.output import flush_output

    code = _run()
    try:
        flush_output()
    except OSError as error:
        code = code if code == 2 else _fault(f"standard output: {error.strerror or error}")
    sys.exit(code)


def _run() -> int:
    """Run the command line; turn every error that a user can fix into one line and exit code 2."""
    from fidelab.cli.output import flush_output, guard_streams, note
    from fidelab.core import interrupted, resume_line, waiting_variables
    from fidelab.core.errors import FidelabError
    from fidelab.core.registry import missing_package
    from fidelab.core.scratch import sweep

    guard_streams()
    sweep()
    os.environ |= waiting_variables(os.environ)  # read when torch is first imported
    import logging

    logger = logging.getLogger("fidelab")
    if not logger.handlers:
        logger.addHandler(_log_handler())
        logger.setLevel(logging.INFO)
    try:
        code = app(prog_name="fidelab", standalone_mode=False)
    except FidelabError as error:
        code = _fault(str(error))
    except _FlagError as error:
        from fidelab.cli.mistakes import explain

        text = explain(error, sys.argv[1:])  # empty: without any command, typer has printed the help
        code = _fault(text) if text else 2
    except typer.Abort:
        code = _fault("stopped")
    except _Stopped as stop:
        hint = f"Resume with: {resume_line(stop.folder, stop.command)}" if stop.folder else "Finished parts are kept."
        note(f"fidelab: stopped; no process is left. {hint}")
        code = interrupted()
    except ImportError as error:
        missing = missing_package(error)
        name = error.name or "a package"
        code = _fault(str(missing or f"{name} cannot be imported ({error}); see: python -m fidelab.doctor"))
    except RecursionError:  # what no reader refused before
        code = _fault("a file, an answer or an option is nested too deeply to be read")
    except OSError as error:
        place = error.filename or "input/output"
        try:
            flush_output()
        except OSError:
            place = error.filename or "standard output"
        code = _fault(f"{place}: {error.strerror or error}")
    return code if isinstance(code, int) else 0


def _log_handler() -> Any:
    """Return a handler that prints what the package logs like every other line for the user."""
    import logging

    from fidelab.cli.output import note

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(f"fidelab: {record.getMessage()}")

    return Noted()


def _fault(text: str) -> int:
    from fidelab.cli.output import note

    note(f"fidelab: {' '.join(map(str.strip, text.strip().splitlines()))}")
    return 2
