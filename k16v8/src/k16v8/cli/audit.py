"""Measure the error of any attention implementation against float64; exit with 1 where it is over tolerance.

Errors are relative to the RMS of the output, per query and head: the median and the worst. The tolerance follows
from the output's type: for bfloat16 0.29% and 0.78%.

A function of yours: attend(q, k, v, *, causal, scale) -> out; q and out [batch, heads, Q, dim], k and v
[batch, kv_heads, T, dim], the queries being the last Q of T tokens. It may take window, softcap, k_scale and
v_scale, too (FP8 keys and values); cases that need what it lacks are left out. Modules are looked for in the
current folder as well.

Where fidelab is installed, "fidelab diagnose attention MODEL [--layers 0,7] [--text FILE] [--n-ctx TOKENS]"
captures a model's own q, k and v, and audits on them.

examples:
  k16v8 audit
  k16v8 audit --implementation mymodule:attend,sdpa-math --lengths 128,1024
  k16v8 audit --tensors layers.safetensors --lengths 128,1024
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from k16v8.cli.common import (
    add_json,
    check_device,
    device_name,
    finite,
    note,
    number_type,
    parse_numbers,
    show_json,
    table,
    versions,
)
from k16v8.errors import InputError, NotSupportedError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from k16v8.audit.run import Finding

_HEADER = 8  # bytes of a safetensors file before its JSON: the length of that


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "--implementation",
        help="Names and module:function, separated by commas. Names: sdpa-math, sdpa-flash, sdpa-efficient, "
        "sdpa-cudnn, eager, k16v8-torch, k16v8-triton, flash-attn, flashinfer. [default: all but eager]",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda. [default: cpu]")
    parser.add_argument("--dtype", default="bf16", help="Of inputs and outputs: bf16, f16 or f32. [default: bf16]")
    parser.add_argument(
        "--lengths",
        default="128,1024,4096,16384",
        help="KV lengths, separated by commas. [default: 128,1024,4096,16384]",
    )
    parser.add_argument("--head-dim", type=number_type(1, int), help="Of random inputs. [default: 64]")
    parser.add_argument(
        "--tensors",
        type=Path,
        help="A safetensors file with a model's q, k and v instead of random inputs (or layer.q, layer.k, layer.v of "
        "several): [heads, tokens, dim] after rotary embedding, q of the last tokens.",
    )
    parser.add_argument("--self-test", action="store_true", help="Audit seven known faults, which it must find.")
    parser.add_argument("--seed", type=number_type(0, int), help="Of random inputs. [default: 0]")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """The exit code.

    Raises:
        K16V8Error: If a name, a flag or a file is invalid, or nothing could be measured.
    """
    from k16v8.audit import run as audit
    from k16v8.audit.faults import self_test
    from k16v8.audit.implementations import IMPLEMENTATIONS, implementation

    device, path = options.device, options.tensors
    check_device(device)
    if options.dtype not in audit.DTYPES:
        raise UnknownNameError("type", options.dtype, audit.DTYPES)
    kv_lengths = parse_numbers(options.lengths, "--lengths")
    if 0 in kv_lengths:
        raise UsageError(f"--lengths {options.lengths!r}: a length is 1 or more")
    drawn = {"--head-dim": options.head_dim, "--seed": options.seed}
    if path is not None and (lost := [flag for flag, value in drawn.items() if value is not None]):
        raise UsageError(f"{lost[0]} is for random inputs: leave it out, or --tensors")
    head_dim, seed = options.head_dim or 64, options.seed or 0
    metadata: Mapping[str, str] = {}
    if options.self_test:
        if options.implementation is not None or path is not None:
            raise UsageError("--self-test has implementations and inputs of its own; leave the others out")
        judged = list(self_test(head_dim=head_dim, device=device, seed=seed))
        findings, failed = [one for one, _ in judged], [one for one, right in judged if not right]
    else:
        every = [name for name in IMPLEMENTATIONS if name != "eager"]
        audited = [implementation(name) for name in (_parse_names(options.implementation) or every)]
        if path is not None:
            tensors, metadata = read_tensors(path)
            inputs = audit.recorded_inputs(tensors, kv_lengths, device=device)
        else:
            kind = audit.DTYPES[options.dtype]
            inputs = audit.random_inputs(kv_lengths, head_dim=head_dim, dtype=kind, device=device, seed=seed)
        findings = list(audit.audit(audited, inputs))
        failed = [one for one in findings if one.status == "over"]
        if all(one.status == "not_supported" for one in findings):
            raise NotSupportedError(f"nothing was measured; {findings[0].implementation}: {findings[0].reason}")
    asked = {one.kv_length for one in findings}
    unmeasured = [length for length in kv_lengths if length not in asked and not options.self_test]
    model = metadata.get("model")
    if options.as_json:
        show_json(
            {
                "device": device_name(device),
                "versions": versions(),
                "seed": seed,
                "self_test": options.self_test,
                "tensors": None if path is None or model else path.name,
                "model": model,
                "not_measured": unmeasured,
                "tolerance": {
                    name: dict(zip(("median", "worst"), audit.tolerance(kind), strict=True))
                    for name, kind in audit.DTYPES.items()
                },
                "passed": not failed,
                "findings": [finite(asdict(one)) for one in findings],
            }
        )
    else:
        _show_findings(findings)
    if unmeasured:
        shown = ", ".join(f"{length:,}" for length in unmeasured)
        more = "; --n-ctx makes the window longer" if model else ""
        note(f"KV length {shown} not measured: there is no query at it{more}")
    what = "judged wrongly" if options.self_test else "over tolerance"
    for one in failed:
        note(
            f"{what}: {one.implementation}, {one.case} at KV length {one.kv_length}: "
            f"median {100 * one.median:.3g}%, worst {100 * one.worst:.3g}%"
        )
    return 1 if failed else 0


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """All q, k and v of a safetensors file, and its metadata: ``model`` says where they were captured.

    Raises:
        InputError: If the file does not exist or is incomplete.
    """
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    if not path.is_file():
        raise InputError(f"--tensors {path}: no such file")
    try:
        raw = bytearray(path.read_bytes())
        start = _HEADER + int.from_bytes(raw[:_HEADER], "little")
        header = json.loads(raw[_HEADER:start])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            if name.rpartition(".")[2] in ("q", "k", "v"):
                first, end = entry["data_offsets"]
                flat = torch.frombuffer(raw[start + first : start + end], dtype=kinds[entry["dtype"]])
                tensors[name] = flat.view(entry["shape"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"--tensors {path}: no complete safetensors file of 16- or 32-bit floats") from error
    return tensors, metadata


def _parse_names(text: str | None) -> list[str]:
    """Return the names in the given order, each once; modules of the current folder can be imported."""
    if not text:
        return []
    folder = str(Path.cwd())
    if ":" in text and folder not in sys.path:
        sys.path.insert(0, folder)
    return list(dict.fromkeys(text.split(",")))


def _show_findings(findings: list[Finding]) -> None:
    """A line per implementation and case, a column per length; below, what was not measured and why."""
    kv_lengths = sorted({one.kv_length for one in findings})
    lines: dict[str, dict[str, dict[int, str]]] = {one.implementation: {} for one in findings}
    lacks: dict[str, dict[str, list[str]]] = {one.implementation: {} for one in findings}  # reason → cases
    for one in findings:
        if one.status == "not_supported":
            lacks[one.implementation].setdefault(one.reason, []).append(one.case)
        else:
            shown = f"{100 * one.median:.3g}/{100 * one.worst:.3g}" + (" OVER" if one.status == "over" else "")
            lines[one.implementation].setdefault(one.case, {})[one.kv_length] = shown
    headings = ("implementation", "case", *(f"KV {length:,}" for length in kv_lengths))
    rows = [
        (name, case, *(cells.get(length, "") for length in kv_lengths))
        for name, cases in lines.items()
        for case, cells in cases.items()
    ]
    print(table(headings, rows))
    print("median/worst error of a query in %, relative to the RMS of its output")
    for name, reasons in lacks.items():
        for reason, without in reasons.items():
            where = f" at {', '.join(dict.fromkeys(without))}" if lines[name] else ""
            print(f"{name} not measured{where}: {reason}")
            if not lines[name]:
                break  # the first reason says enough of what cannot run here at all
