"""Compile every kernel for processors that are not here, and check that its shared memory fits.

What passes is "compiled, never run": no result follows from it. What the code says about speed is shown: registers
of a thread, bytes of them spilled to memory, programs that one multiprocessor holds at once (of AMD: a compute unit, on
gfx11 and gfx12 a work-group processor), the widest load from global memory in bytes; --json has more.

example:
  k16v8 compile --target sm_90,gfx942
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from k16v8.cli.common import add_json, add_operations, note, operations, parse_numbers, show_json, table, versions
from k16v8.errors import UsageError

if TYPE_CHECKING:
    from k16v8.gates.compile import Compiled

_TARGETS = "sm_90,sm_120,gfx942,gfx1201,gfx1100"
_CODE = ("options", "shared", "regs", "spill", "programs", "load", "status")
_HEADINGS = ("target", "kernel", "K", "V", "heads", "dim", "page", *_CODE)
_WEIGHT_HEADINGS = ("target", "kernel", "layout", "group", "x", *_CODE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--target", default=_TARGETS, help=f"Processors, separated by commas. [default: {_TARGETS}]")
    parser.add_argument(
        "--formats",
        help="K and V formats, for example bf16/fp8_e4m3,int4/int4. [default: 16 bit and FP8, all four pairs]",
    )
    parser.add_argument("--head-dim", default="128", help="Head dimensions, separated by commas. [default: 128]")
    parser.add_argument("--page", default="64,16", help="Page sizes, separated by commas. [default: 64,16]")
    parser.add_argument(
        "--heads", default="32/8", help="Heads of queries / of keys and values, separated by commas. [default: 32/8]"
    )
    parser.add_argument(
        "--groups",
        default="128",
        help="Of 4-bit weights: inputs that share a scale, separated by commas. [default: 128]",
    )
    add_operations(parser, "attention,weights")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """The exit code.

    Raises:
        K16V8Error: If the target or the format does not exist, or Triton is missing.
    """
    from k16v8.gates.compile import PAIRS, compile_kernels, compile_weight_kernels

    asked, targets = operations(options.operations), tuple(options.target.split(","))
    groups = parse_numbers(options.groups, "--groups")
    if wrong := [group for group in groups if group < 32 or group % 32 or 4096 % group]:
        raise UsageError(f"--groups {wrong[0]}: they are 32, 64, 128 or another power of two from 32 to 4096")
    results: list[Compiled] = []
    if "attention" in asked:
        results += compile_kernels(
            targets,
            pairs=PAIRS if options.formats is None else tuple(map(_pair, options.formats.split(","))),
            head_dims=parse_numbers(options.head_dim, "--head-dim"),
            pages=parse_numbers(options.page, "--page"),
            heads=tuple(map(_heads, options.heads.split(","))),
        )
    if "weights" in asked:
        results += compile_weight_kernels(targets, groups=groups)
    if options.as_json:
        show_json({"versions": versions(), "results": [asdict(result) for result in results]})
    else:
        for name, headings in (("attention", _HEADINGS), ("weights", _WEIGHT_HEADINGS)):
            if name in asked:
                print(table(headings, (_row(one) for one in results if bool(one.layout) is (name == "weights"))))
    failed = [result for result in results if not result.passed]
    for result in failed:
        of = f"{result.k_format}/{result.v_format}, head dimension {result.head_dim}"
        if result.layout:
            of = f"{result.layout} in groups of {result.group}"
        note(f"{result.kernel} for {result.target}, {of}: {result.error}")
    return 1 if failed else 0


def _row(done: Compiled) -> tuple[str, ...]:
    shared = "" if done.shared is None else f"{done.shared:,}"
    code = [
        "" if x is None else str(x)
        for x in (done.registers, done.spilled, done.programs, max(done.loads, default=None))
    ]
    if done.layout:
        fixed = (done.target, done.kernel, done.layout, str(done.group), done.dtype, done.options)
        return *fixed, shared, *code, done.status
    shape = (f"{done.heads}/{done.kv_heads}", str(done.head_dim), str(done.page), done.options)
    return done.target, done.kernel, done.k_format, done.v_format, *shape, shared, *code, done.status


def _heads(text: str) -> tuple[int, int]:
    heads, slash, kv_heads = text.partition("/")
    if not (slash and heads.isdecimal() and kv_heads.isdecimal()) or not int(kv_heads) or int(heads) % int(kv_heads):
        raise UsageError(f"--heads {text!r}: write QUERIES/KV with a whole number of queries for each, as in 28/4")
    return int(heads), int(kv_heads)


def _pair(text: str) -> tuple[str, str]:
    k_format, slash, v_format = text.partition("/")
    if not slash:
        raise UsageError(f"--formats {text!r}: write K/V, for example bf16/fp8_e4m3")
    return k_format, v_format
