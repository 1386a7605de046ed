"""``fidelab kernels``: gates of our attention kernels, an audit of any, compiling for processors that are not here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import compare as flags
from fidelab.cli.kernels_audit import audit
from fidelab.cli.kernels_common import (
    check_device,
    device_name,
    finite,
    new_console,
    new_table,
    parse_numbers,
    versions,
)
from fidelab.cli.output import note

if TYPE_CHECKING:
    from fidelab.kernels.gates import Gate

__all__ = ["app"]

app = typer.Typer(help="Check the attention kernels; compile them for other processors.", no_args_is_help=True)


@app.command("gate")
def gate(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kernels: Annotated[
        str | None,
        typer.Option(
            help="torch, triton (compiled) or interpreter (Triton on the CPU, slow). \\[default: triton on cuda, else "
            "torch]",
            show_default=False,
        ),
    ] = None,
    soak: Annotated[int, typer.Option(min=0, help="Decode steps through page reuse; 0 leaves them out.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    as_json: flags.Json = False,
) -> None:
    """Hold the kernels against their definition; exit with 1 where a gate fails.

    Attention and cache writer at many shapes, the paper's error figure, a long decode, and kernels broken on purpose,
    which must fail.

    [bold]Examples[/bold]

      fidelab kernels gate

      fidelab kernels gate --kernels interpreter --soak 100
    """
    from fidelab.kernels.dispatch import load_triton
    from fidelab.kernels.gates import run_gates

    check_device(device)
    chosen = kernels or ("triton" if device == "cuda" else "torch")
    if chosen == "interpreter":
        load_triton(interpret=True)
    gates = []
    for found in run_gates(chosen, device=device, seed=seed, soak_steps=soak):
        gates.append(found)
        if sys.stderr.isatty() and not found.passed:
            note(f"fidelab: {found.group} {found.name} failed")
    failed = [found for found in gates if not found.passed]
    if as_json:
        record = {
            "kernels": chosen,
            "device": device_name(device),
            "versions": versions(),
            "seed": seed,
            "passed": not failed,
            "gates": [_record(found) for found in gates],
        }
        sys.stdout.write(json.dumps(record, indent=2, allow_nan=False) + "\n")
    else:
        _show_gates(gates)
    for found in failed:
        note(f"fidelab: gate failed: {found.group}, {found.name}")
    if failed:
        raise typer.Exit(1)


@app.command("compile")
def compile_(
    target: Annotated[
        str, typer.Option(help="Processors, separated by commas.")
    ] = "sm_90,sm_120,gfx942,gfx1201,gfx1100",
    formats: Annotated[
        str | None,
        typer.Option(
            help="K and V formats, for example bf16/fp8_e4m3,int4/int4. \\[default: 16 bit and FP8, all four pairs]",
            show_default=False,
        ),
    ] = None,
    head_dim: Annotated[str, typer.Option(help="Head dimensions, separated by commas.")] = "128",
    page: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "16",
    as_json: flags.Json = False,
) -> None:
    """Compile every kernel for processors that are not here, and check that its shared memory fits.

    What passes is "compiled, never run": no result follows from it. What the code says about speed is shown: registers
    of a thread, bytes of them spilled to memory, the widest load from global memory in bytes; --json has more.

    [bold]Example[/bold]

      fidelab kernels compile --target sm_90,gfx942
    """
    from fidelab.kernels.compile import PAIRS, compile_kernels

    results = list(
        compile_kernels(
            tuple(target.split(",")),
            pairs=PAIRS if formats is None else tuple(_pair(text) for text in formats.split(",")),
            head_dims=parse_numbers(head_dim, "--head-dim"),
            pages=parse_numbers(page, "--page"),
        )
    )
    if as_json:
        record = {"versions": versions(), "results": [asdict(result) for result in results]}
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        headings = ("target", "kernel", "K", "V", "dim", "page", "options", "shared", "regs", "spill", "load", "status")
        table = new_table(*headings)
        for done in results:
            shared = "" if done.shared is None else f"{done.shared:,}"
            code = ["" if x is None else str(x) for x in (done.registers, done.spilled, max(done.loads, default=None))]
            numbers = (str(done.head_dim), str(done.page), done.options, shared, *code)
            table.add_row(done.target, done.kernel, done.k_format, done.v_format, *numbers, done.status)
        new_console().print(table)
    failed = [result for result in results if not result.passed]
    for result in failed:
        note(
            f"fidelab: {result.kernel} for {result.target}, {result.k_format}/{result.v_format}, head dimension "
            f"{result.head_dim}: {result.error}"
        )
    if failed:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    from fidelab.errors import UsageError

    k_format, slash, v_format = text.partition("/")
    if not slash:
        raise UsageError(f"--formats {text!r}: write K/V, for example bf16/fp8_e4m3")
    return k_format, v_format


def _record(found: Gate) -> dict[str, Any]:
    return asdict(found) | {"figures": finite(found.figures)}


def _show_gates(gates: list[Gate]) -> None:
    from rich.text import Text

    table = new_table("gate", "at", "figures", "result")
    for found in gates:
        figures = ", ".join(f"{key} {value:.3g}" for key, value in found.figures.items())
        shown = f"{figures} ({found.note})" if found.note else figures
        table.add_row(*map(Text, (found.group, found.name, shown, "passed" if found.passed else "FAILED")))
    new_console().print(table)


app.command("audit")(audit)
