"""Hold the kernels against their definition; exit with 1 where a gate fails.

Attention and cache writer at many shapes, the paper's error figure, a long decode; products with 4-bit weights (AWQ,
GPTQ, experts); and kernels broken on purpose, which must fail.

examples:
  k16v8 gate
  k16v8 gate --kernels interpreter --soak 100
  k16v8 gate --operations weights
  k16v8 gate --operations codec,lmcache
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from k16v8.cli.common import (
    KERNELS,
    add_json,
    add_operations,
    check_device,
    device_name,
    finite,
    note,
    number_type,
    operations,
    show_json,
    table,
    versions,
)

if TYPE_CHECKING:
    from k16v8.gates.run import Gate


_OPERATIONS = {
    **KERNELS,
    "codec": "bytes of LMCache's serde",
    "lmcache": "a chunk that LMCache stores and loads",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda. [default: cpu]")
    parser.add_argument(
        "--kernels",
        help="torch, triton (compiled), interpreter (Triton on the CPU, slow) or flashinfer. "
        "[default: triton on cuda, else torch]",
    )
    parser.add_argument(
        "--soak",
        type=number_type(0, int),
        default=500,
        help="Decode steps through page reuse; 0 leaves them out. [default: 500]",
    )
    parser.add_argument("--seed", type=number_type(0, int), default=0, help="Of the random inputs. [default: 0]")
    add_operations(parser, "attention,weights", _OPERATIONS)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """The exit code.

    Raises:
        K16V8Error: If the device or the implementation does not exist here.
    """
    from k16v8.gates.run import run_gates
    from k16v8.kernels.dispatch import load_triton

    check_device(options.device)
    asked = operations(options.operations, _OPERATIONS)
    chosen = options.kernels or ("triton" if options.device == "cuda" else "torch")
    if chosen == "interpreter":
        load_triton(interpret=True)
    gates = []
    for found in run_gates(chosen, device=options.device, seed=options.seed, soak_steps=options.soak, operations=asked):
        gates.append(found)
        if sys.stderr.isatty() and not found.passed:
            note(f"{found.group} {found.name} failed")
    failed = [found for found in gates if not found.passed]
    if options.as_json:
        show_json(
            {
                "kernels": chosen,
                "device": device_name(options.device),
                "versions": versions(),
                "seed": options.seed,
                "passed": not failed,
                "gates": [asdict(found) | {"figures": finite(found.figures)} for found in gates],
            }
        )
    else:
        print(table(("gate", "at", "figures", "result"), map(_row, gates)))
    for found in failed:
        note(f"gate failed: {found.group}, {found.name}")
    return 1 if failed else 0


def _row(found: Gate) -> tuple[str, ...]:
    figures = ", ".join(f"{key} {value:.3g}" for key, value in found.figures.items())
    shown = f"{figures} ({found.note})" if found.note else figures
    return found.group, found.name, shown, "passed" if found.passed else "FAILED"
