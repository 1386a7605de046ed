"""``fidelab kernels``: the gates of our attention kernels, and compiling them for processors that are not here."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fidelab.cli import compare as flags
from fidelab.cli.output import note

if TYPE_CHECKING:
    from rich.console import Console

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
    import torch

    from fidelab.errors import UsageError
    from fidelab.kernels.dispatch import load_triton
    from fidelab.kernels.gates import run_gates

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r}: there are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
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
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "versions": _versions(),
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

    What passes is "compiled, never run": no figure and no result follows from it.

    [bold]Example[/bold]

      fidelab kernels compile --target sm_90,gfx942
    """
    from fidelab.kernels.compile import PAIRS, compile_kernels

    results = list(
        compile_kernels(
            tuple(target.split(",")),
            pairs=PAIRS if formats is None else tuple(_pair(text) for text in formats.split(",")),
            head_dims=_numbers(head_dim, "--head-dim"),
            pages=_numbers(page, "--page"),
        )
    )
    if as_json:
        record = {"versions": _versions(), "results": [asdict(result) for result in results]}
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        table = _table("target", "kernel", "K", "V", "dim", "page", "options", "shared", "limit", "status")
        for done in results:
            shared = "" if done.shared is None else f"{done.shared:,}"
            numbers = (str(done.head_dim), str(done.page), done.options, shared, f"{done.limit:,}")
            table.add_row(done.target, done.kernel, done.k_format, done.v_format, *numbers, done.status)
        _console().print(table)
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


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    from fidelab.errors import UsageError

    if not all(part.isdecimal() for part in text.split(",")):
        raise UsageError(f"{flag} {text!r}: write numbers, separated by commas")
    return tuple(map(int, text.split(",")))


def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: of(package) for package in ("fidelab", "torch", "triton")}


def _record(found: Gate) -> dict[str, Any]:
    """JSON has no NaN and no infinity, which broken kernels give: null."""
    record = asdict(found)
    record["figures"] = {key: value if math.isfinite(value) else None for key, value in found.figures.items()}
    return record


def _show_gates(gates: list[Gate]) -> None:
    from rich.text import Text

    table = _table("gate", "at", "figures", "result")
    for found in gates:
        figures = ", ".join(f"{key} {value:.3g}" for key, value in found.figures.items())
        shown = f"{figures} ({found.note})" if found.note else figures
        table.add_row(*map(Text, (found.group, found.name, shown, "passed" if found.passed else "FAILED")))
    _console().print(table)


def _table(*headings: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)  # a file or a pipe has no width of its own
