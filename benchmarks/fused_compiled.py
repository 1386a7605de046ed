"""The scorer's fused kernel compiled for GPUs that are not here: registers, spills, shared memory.  Nothing runs.

python benchmarks/fused_compiled.py [--processors sm_80,sm_90,sm_120,gfx942] [--json]

Triton's wheel has the compilers and NVIDIA's assembler. ``spills`` are bytes of a thread in memory; those in the loop
of the products cost time at every step, the others once in a tile.  Exit code 1: a variant does not compile, needs more
shared memory than the processor has, or spills in its loop.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fidelab.metrics import fused

PROCESSORS = ("sm_80", "sm_90", "sm_120", "gfx942")
SHARED = {"sm_80": 163, "sm_90": 227, "sm_120": 99, "gfx942": 64}  # KB that one program may have
WIDTHS = (4096, 8192)
SIDES = (2, 5)
POINTERS = {"targets": "*i32", "ids": "*i32", "counts": "*i32", "held": "*i32"}
NUMBERS = {"n", "size", "start", "tile", "tiles", "all_tiles", "width"}
SCALARS = {"scale_p", "scale_q", "cap_p", "cap_q"}


@dataclass(frozen=True)
class Compiled:
    """One variant: ``tile`` is rows × tokens × states; ``in_loop``: instructions of the loop that spill."""

    kernel: str
    processor: str
    width: int
    sides: int
    heads: int
    capped: bool
    tile: str
    warps: int
    registers: int
    spilled: int
    in_loop: int
    matrix: str
    shared: int
    fits: bool


def main() -> None:
    """Compile every variant and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processors", default=",".join(PROCESSORS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    processors = given.processors.split(",")
    if unknown := [name for name in processors if name not in PROCESSORS]:
        raise SystemExit(f"--processors: {unknown[0]} is not one of {', '.join(PROCESSORS)}")
    found = []
    if not given.json:
        titles = (
            "kernel | processor | d | sides | heads | tile | warps | registers | spills, bytes | in the loop | unit"
        )
        print(f"| {titles} | KB |\n|---|---|---:|---:|---:|---|---:|---:|---:|---:|---|---:|")
    for one in _variants(processors):
        found.append(one)
        if not given.json:
            cells = (
                *(f"{one.kernel}{', soft-cap' if one.capped else ''}", one.processor, one.width, one.sides),
                *(one.heads, one.tile),
                *(one.warps, one.registers, one.spilled, one.in_loop, one.matrix, f"{one.shared / 1024:.0f}"),
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if given.json:
        print(json.dumps([asdict(one) for one in found]))
    sys.exit(any(not one.fits or one.in_loop for one in found))


def _variants(processors: list[str]) -> Iterator[Compiled]:
    for processor in processors:
        for name in ("first", "second"):
            for width in WIDTHS:
                for sides in SIDES:
                    yield _compiled(name, processor, width, sides)
            yield _compiled(name, processor, WIDTHS[0], SIDES[0], heads=2)
            yield _compiled(name, processor, WIDTHS[0], SIDES[0], capped=True)


def _compiled(name: str, processor: str, width: int, sides: int, *, heads: int = 1, capped: bool = False) -> Compiled:
    kernel: Any = getattr(fused, f"{name}_kernel")
    pieces = width > fused.EXACT_WIDTH
    tile = fused.tiles_for(processor, sides, same=heads == 1, half=True, pieces=pieces)
    constants = {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "PARTS": tile.parts, "SIDES": sides,
        "SAME": heads == 1, "EVEN": True, "DOT": fused.dot_type(processor, half=True),
        "PIECE": fused.EXACT_WIDTH if pieces else 0, "BIAS_P": capped, "BIAS_Q": capped, "CAP_P": capped,
        "CAP_Q": capped,
    }  # fmt: skip
    names = list(kernel.arg_names)

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in NUMBERS:
            return "i32"
        if argument in SCALARS:
            return "fp32"
        return POINTERS.get(argument, "*bf16" if argument in ("states", "weight_p", "weight_q") else "*fp32")

    signature = {argument: type_of(argument) for argument in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(names)
        if signature[argument].startswith("*") or argument == "width"
    }
    nvidia = processor.startswith("sm_")
    target = GPUTarget("cuda", int(processor[3:]), 32) if nvidia else GPUTarget("hip", processor, 64)
    done: Any = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(key),): value for key, value in constants.items()},
            attrs=aligned,
        ),
        target=target,
        options=tile.options(),
    )
    registers, spilled, in_loop, matrix = _nvidia(done.asm) if nvidia else _amd(done.asm["amdgcn"])
    shared = int(done.metadata.shared)
    return Compiled(
        name, processor, width, sides, heads, capped, f"{tile.rows}×{tile.columns}×{tile.depth}", tile.warps, registers,
        spilled, in_loop, matrix, shared, shared <= SHARED[processor] * 1024,
    )  # fmt: skip


def _nvidia(asm: dict[str, Any]) -> tuple[int, int, int, str]:
    """Registers, spilled bytes, spills between the first and the last product, and the unit of the products."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(asm["cubin"])
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary))
        lines = _output(knobs.nvidia.cuobjdump.path, "--dump-sass", str(binary)).splitlines()
    products = [number for number, line in enumerate(lines) if re.search(r"\b(HGMMA|HMMA|OMMA)\b", line)]
    between = lines[products[0] : products[-1]] if products else []
    unit = re.search(r"\b(wgmma|mma)\.(?:mma|sync)", asm["ptx"])
    return (
        _number(r"REG:(\d+)", usage),
        _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in between),
        unit[1] if unit else "",
    )


def _amd(text: str) -> tuple[int, int, int, str]:
    lines = text.splitlines()
    products = [number for number, line in enumerate(lines) if "v_mfma" in line]
    between = lines[products[0] : products[-1]] if products else []
    spills = sum("scratch_" in line for line in between)
    return (
        _number(r"\.vgpr_count:\s+(\d+)", text),
        _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        spills,
        "mfma",
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"the compiler's output has no {pattern}")
    return int(found[1])


if __name__ == "__main__":
    main()
