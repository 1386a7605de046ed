"""The command line: ``k16v8 gate|compile|audit|bench``; one module per command.

Exit codes: 0 fine, 1 a gate failed, 2 usage or bad input (one line on standard error), 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import k16v8
from k16v8.cli import audit, bench_command, compile, gate
from k16v8.errors import K16V8Error, UsageError

__all__ = ["main"]

_COMMANDS = {"gate": gate, "compile": compile, "audit": audit, "bench": bench_command}


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process's command line; the exit code, also where it ends in an error.

    What went wrong is one line on standard error.
    """
    # Read when torch is first imported: spinning OpenMP threads starve, and are starved by, whatever else runs; those
    # that sleep at once lose as much between small operations.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ["OMP_WAIT_POLICY"] = "passive"
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        if options.run is None:
            parser.print_help()
            return 2
        code: int = options.run(options)
        sys.stdout.flush()
    except SystemExit as end:  # --help, --version
        return end.code if isinstance(end.code, int) else 0
    except K16V8Error as error:
        return _fault(str(error))
    except KeyboardInterrupt:
        _fault("stopped; what was finished is kept")
        return 130
    except BrokenPipeError:  # "| head" closed our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except ImportError as error:
        return _fault(f"{error.name or 'a package'} cannot be imported ({error})")
    except OSError as error:
        return _fault(f"{error.filename or 'input/output'}: {error.strerror or error}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="k16v8",
        description="Check, audit and measure kernels: attention with 16-bit keys and 8-bit values, and products with "
        "4-bit weights.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"k16v8 {k16v8.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, module in _COMMANDS.items():
        help_text, *more = (module.__doc__ or "").split("\n\n", 1)
        command = commands.add_parser(
            name,
            help=" ".join(help_text.split()),
            description="\n\n".join((help_text, *more)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _fault(text: str) -> int:
    print(f"k16v8: {' '.join(text.split())}", file=sys.stderr)
    return 2
