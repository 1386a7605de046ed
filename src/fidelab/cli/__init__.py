"""The command line: thin commands over :mod:`fidelab.run`; one module per command group.

Exit codes: 0 good, 1 shown to be bad (a limit missed, an arm failed), 2 usage or bad input (one line on standard
error), 3 undecided or unverified, 130 stopped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fidelab.cli import (
    advise,
    audit,
    baseline,
    bench,
    captures,
    check,
    compare,
    convert,
    doctor,
    engines,
    extensions,
    formats,
    imports,
    launch,
    ledger,
    models,
    phases,
    physics,
    presets,
    profiles,
    quantize,
    runs,
    sample_size,
    studies,
)
from fidelab.cli.commands import Commands, Group

# ClickException, which typer keeps in one place or another by version
_FlagError: type[Exception] = typer.BadParameter.__mro__[2]


class _Stopped(Exception):
    """Ctrl-C, as an exception that typer does not handle (it would exit silently)."""

    def __init__(self, folder: Path | None, command: str) -> None:
        self.folder = folder
        self.command = command


_COMPARE, _RESULTS, _SPEED, _CHECKPOINTS, _MACHINE = _PANELS = (
    "Compare",
    "Results",
    "Speed",
    "Checkpoints",
    "Models, engines and this machine",
)


class _Root(Group):
    def list_commands(self, ctx: Any) -> list[str]:
        """By the panels of ``--help``, which appear in the order of their first commands."""
        order = {panel: place for place, panel in enumerate(_PANELS)}
        panels = {name: str(getattr(command, "rich_help_panel", "")) for name, command in self.commands.items()}
        return sorted(panels, key=lambda name: order.get(panels[name], len(order)))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _Stopped(getattr(stop, "folder", None), getattr(stop, "command", "")) from None
        except BrokenPipeError:  # "| head" closed our output
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0


app = Commands(
    name="fidelab",
    cls=_Root,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _commands in {
    _COMPARE: (compare.compare, compare.run, studies.bisect, sample_size.plan_size),
    _RESULTS: (
        runs.report,
        check.check,
        runs.charts,
        runs.rescore,
        phases.capture,
        phases.score,
        ledger.export,
        ledger.leaderboard,
        ledger.publish,
        ledger.verify,
    ),
    _SPEED: (advise.advise, launch.launch, launch.stop, physics.explain),
    _CHECKPOINTS: (audit.audit, convert.convert, quantize.quantize, studies.calibrate, studies.sensitivity),
    _MACHINE: (doctor.doctor, formats.formats),
}.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
for _name, _group, _panel in (
    ("profiles", profiles.app, _COMPARE),
    ("baseline", baseline.baseline, _RESULTS),
    ("import", imports.app, _RESULTS),
    ("runs", ledger.app, _RESULTS),
    ("bench", bench.app, _SPEED),
    ("physics", physics.app, _SPEED),
    *((module.__name__.rpartition(".")[2], module.app, _MACHINE) for module in (models, engines, presets, captures)),
):
    app.add_typer(_group, name=_name, rich_help_panel=_panel)
extensions.register(app, {"bench": bench.app}, panel=_SPEED)


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
    """Which quantized configuration may I run on my engine, and what do I lose and gain?

    [bold]Examples[/bold]

      fidelab compare smollm2-135m --dtype float32 --reference f32 --kv k16v8

      fidelab compare Qwen/Qwen2.5-7B-Instruct --kv k16v8

      fidelab check latest --max-kld 0.01

      fidelab run experiment.yaml --set axes.kld.windows=64

      fidelab report runs/20260101-120000-smollm2-135m
    """


def main() -> None:
    """Run the command line; turn every error that a user can mend into one line and exit code 2."""
    from fidelab.cli.output import guard_streams
    from fidelab.core import waiting_variables
    from fidelab.core.errors import FidelabError
    from fidelab.core.registry import missing_package

    guard_streams()
    os.environ |= waiting_variables(os.environ)  # read when torch is first imported
    _show_fetches()
    try:
        code = app(prog_name="fidelab", standalone_mode=False)
        sys.stdout.flush()
    except FidelabError as error:
        code = _fault(str(error))
    except _FlagError as error:
        code = _usage(error)
    except typer.Abort:
        code = _fault("stopped")
    except _Stopped as stop:
        hint = f"Go on with: {stop.command} --resume {stop.folder}" if stop.folder else "What was finished is kept."
        print(f"fidelab: stopped; no process was left behind. {hint}", file=sys.stderr)
        code = 130
    except ImportError as error:
        missing = missing_package(error)
        name = error.name or "a package"
        code = _fault(str(missing or f"{name} cannot be imported ({error}); see: python -m fidelab.doctor"))
    except OSError as error:
        code = _fault(f"{error.filename or 'input/output'}: {error.strerror or error}")
    sys.exit(code if isinstance(code, int) else 0)


def _show_fetches() -> None:
    """Log on standard error what takes long, such as fetching and converting a model."""
    import logging

    logger = logging.getLogger("fidelab")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fidelab: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _fault(text: str) -> int:
    print(f"fidelab: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _usage(error: Any) -> int:
    """A flag or a command that typer refused; without any command it has printed the help already."""
    text = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    return _fault(f"{text} (see: {context.command_path if context else 'fidelab'} --help)") if text else 2
