"""The command line: thin commands over :mod:`fidelab.run`; one module per command group.

Exit codes: 0 fine, 1 a gate or an arm failed, 2 usage or bad input (one line on standard error), 130 stopped.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fidelab.cli import captures, compare, models, phases, runs

__all__ = ["app", "main"]

app = typer.Typer(
    name="fidelab",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
compare.register(app)
phases.register(app)
runs.register(app)
app.add_typer(models.app, name="models")
app.add_typer(captures.app, name="captures")


def _version(wanted: bool) -> None:
    if wanted:
        import fidelab

        typer.echo(f"fidelab {fidelab.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Which quantized configuration may I run on my engine, and what do I lose and gain?

    [bold]Examples[/bold]

      fidelab compare smollm2-135m --reference f32 --kv k16v8 --kv fp8_e4m3 --dtype float32

      fidelab compare meta-llama/Llama-3.1-8B-Instruct --kv k16v8 --kv int4 --device cuda --fail-under 99

      fidelab run experiment.yaml --set axes.kld.windows=64

      fidelab report runs/20260101-120000-smollm2-135m
    """


def main() -> None:
    """Run the command line; turn our own errors into one line and exit code 2."""
    from fidelab.errors import FidelabError

    try:
        app()
    except FidelabError as error:
        print(f"fidelab: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fidelab: stopped; no process was left behind. Go on with: fidelab compare --resume RUN_DIR", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # "| head" closed our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:
        print(f"fidelab: {error.filename or 'input/output'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
