"""``fidelab kernels audit``: the error of any attention implementation against float64."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import compare as flags
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
    from fidelab.kernels.audit import Finding

__all__ = ["audit"]


def audit(
    implementation: Annotated[
        str | None,
        typer.Option(
            help="Names and module:function, separated by commas. Names: sdpa-math, sdpa-flash, sdpa-efficient, "
            "sdpa-cudnn, eager, fidelab-torch, fidelab-triton, flash-attn, flashinfer. \\[default: all but eager]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of inputs and outputs: bf16, f16 or f32.")] = "bf16",
    lengths: Annotated[str, typer.Option(help="KV lengths, separated by commas.")] = "128,1024,4096,16384",
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="Of random inputs. \\[default: 64]", show_default=False)
    ] = None,
    tensors: Annotated[
        Path | None,
        typer.Option(
            help="A safetensors file with a model's q, k and v instead of random inputs (or layer.q, layer.k, "
            "layer.v of several): \\[heads, tokens, dim] after rotary embedding, q of the last tokens.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model whose q, k and v are captured while it reads a text, instead of random inputs.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="With --model: layers, separated by commas. \\[default: the first, the middle and the last]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="With --model: 'default', 'wikitext-2', or a UTF-8 file.", show_default=False),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "--n-ctx",
            min=8,
            help="With --model: tokens of the window. \\[default: the largest of --lengths, 4096 at most]",
            show_default=False,
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Audit seven known faults, which it must find.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of random inputs. \\[default: 0]", show_default=False)
    ] = None,
    as_json: flags.Json = False,
) -> None:
    """Measure the error of any attention implementation against float64; exit with 1 where it is over tolerance.

    Errors are relative to the RMS of the output, per query and head: the median and the worst. The tolerance follows
    from the output's type: for bfloat16 0.29% and 0.78%.

    A function of yours: attend(q, k, v, *, causal, scale) -> out; q and out \\[batch, heads, Q, dim], k and v
    \\[batch, kv_heads, T, dim], the queries being the last Q of T tokens. It may take window, softcap, k_scale and
    v_scale, too (FP8 keys and values); cases that need what it lacks are left out. Modules are looked for in the
    current folder as well.

    [bold]Examples[/bold]

      fidelab kernels audit

      fidelab kernels audit --implementation mymodule:attend,sdpa-math --lengths 128,1024

      fidelab kernels audit --model smollm2-135m --layers 0,7,29 --lengths 128,1024
    """
    from fidelab.cli.kernels_inputs import captured_tensors, read_tensors
    from fidelab.errors import NotSupportedError, UnknownNameError, UsageError
    from fidelab.kernels import audit as room
    from fidelab.kernels.audit_candidates import IMPLEMENTATIONS
    from fidelab.kernels.audit_candidates import implementation as named
    from fidelab.kernels.audit_faults import self_test as faults

    check_device(device)
    if dtype not in room.DTYPES:
        raise UnknownNameError("type", dtype, room.DTYPES)
    kv_lengths = parse_numbers(lengths, "--lengths")
    if 0 in kv_lengths:
        raise UsageError(f"--lengths {lengths!r}: a length is 1 or more")
    own = {"--layers": layers, "--text": text, "--n-ctx": n_ctx}
    if model is None and (lost := [flag for flag, value in own.items() if value is not None]):
        raise UsageError(f"{lost[0]} is for q, k and v of a model: name one with --model")
    if model is not None and tensors is not None:
        raise UsageError("--model and --tensors both say where q, k and v come from; give one of them")
    drawn = {"--head-dim": head_dim, "--seed": seed}
    if (model or tensors) and (lost := [flag for flag, value in drawn.items() if value is not None]):
        raise UsageError(f"{lost[0]} is for random inputs: leave it out, or --{'model' if model else 'tensors'}")
    head_dim, seed = head_dim or 64, seed or 0
    if self_test:
        if implementation is not None or tensors is not None or model is not None:
            raise UsageError("--self-test has implementations and inputs of its own; leave the others out")
        judged = list(faults(head_dim=head_dim, device=device, seed=seed))
        findings, failed = [one for one, _ in judged], [one for one, right in judged if not right]
    else:
        names = _names(implementation) if implementation else [name for name in IMPLEMENTATIONS if name != "eager"]
        audited = [named(name) for name in names]
        if model is not None:
            chosen = () if layers is None else parse_numbers(layers, "--layers")
            captured = captured_tensors(model, chosen, text or "default", n_ctx, max(kv_lengths), dtype, device)
            inputs = room.recorded_inputs(captured, kv_lengths, device=device)
        elif tensors is not None:
            inputs = room.recorded_inputs(read_tensors(tensors), kv_lengths, device=device)
        else:
            kind = room.DTYPES[dtype]
            inputs = room.random_inputs(kv_lengths, head_dim=head_dim, dtype=kind, device=device, seed=seed)
        findings = list(room.audit(audited, inputs))
        failed = [one for one in findings if one.status == "over"]
        if all(one.status == "not_supported" for one in findings):
            raise NotSupportedError(f"nothing was measured; {findings[0].implementation}: {findings[0].reason}")
    asked = {one.kv_length for one in findings}
    unmeasured = [length for length in kv_lengths if length not in asked and not self_test]
    if as_json:
        record = {
            "device": device_name(device),
            "versions": versions(),
            "seed": seed,
            "self_test": self_test,
            "tensors": None if tensors is None else tensors.name,
            "model": model,
            "not_measured": unmeasured,
            "tolerance": {
                name: dict(zip(("median", "worst"), room.tolerance(kind), strict=True))
                for name, kind in room.DTYPES.items()
            },
            "passed": not failed,
            "findings": [finite(asdict(one)) for one in findings],
        }
        sys.stdout.write(json.dumps(record, indent=2, allow_nan=False) + "\n")
    else:
        _show_findings(findings)
    if unmeasured:
        shown = ", ".join(f"{length:,}" for length in unmeasured)
        more = "; --n-ctx makes the window longer" if model else ""
        note(f"fidelab: KV length {shown} not measured: there is no query at it{more}")
    what = "judged wrongly" if self_test else "over tolerance"
    for one in failed:
        note(
            f"fidelab: {what}: {one.implementation}, {one.case} at KV length {one.kv_length}: "
            f"median {100 * one.median:.3g}%, worst {100 * one.worst:.3g}%"
        )
    if failed:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    """In the given order, each once; modules of the current folder can be imported."""
    folder = str(Path.cwd())
    if ":" in text and folder not in sys.path:
        sys.path.insert(0, folder)
    return list(dict.fromkeys(text.split(",")))


def _show_findings(findings: list[Finding]) -> None:
    """A line per implementation and case, a column per length; below, what was not measured and why."""
    from rich.text import Text

    kv_lengths = sorted({one.kv_length for one in findings})
    lines: dict[str, dict[str, dict[int, str]]] = {one.implementation: {} for one in findings}
    lacks: dict[str, dict[str, list[str]]] = {one.implementation: {} for one in findings}  # reason → cases
    for one in findings:
        if one.status == "not_supported":
            lacks[one.implementation].setdefault(one.reason, []).append(one.case)
        else:
            shown = f"{100 * one.median:.3g}/{100 * one.worst:.3g}" + (" OVER" if one.status == "over" else "")
            lines[one.implementation].setdefault(one.case, {})[one.kv_length] = shown
    table = new_table("implementation", "case", *(f"KV {length:,}" for length in kv_lengths))
    for name, cases in lines.items():
        for case, cells in cases.items():
            table.add_row(*map(Text, (name, case, *(cells.get(length, "") for length in kv_lengths))))
    console = new_console()
    console.print(table)
    console.print("median/worst error of a query in %, relative to the RMS of its output")
    for name, reasons in lacks.items():
        for reason, without in reasons.items():
            where = f" at {', '.join(dict.fromkeys(without))}" if lines[name] else ""
            console.print(Text(f"{name} not measured{where}: {reason}"))
            if not lines[name]:
                break  # the first reason says enough of what cannot run here at all
