"""Compile the Triton kernels for processors that this machine does not have: "compiled, never run".

Triton needs no device to compile: its wheel has NVIDIA's assembler and AMD's back end.  The check is that every kernel
compiles in the configuration that would be launched, and that its shared memory fits the target. Facts of the compiled
code about speed are recorded: registers and what did not fit them, the width of loads, the matrix instructions, and how
many tiles are loaded ahead. They are evidence, not measurements.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from k16v8.errors import UnknownNameError
from k16v8.kernels.cache import PagedCache, Scaling, storage
from k16v8.kernels.checks import MAX_ROWS
from k16v8.kernels.reference import Attention
from k16v8.kernels.weights import LAYOUTS, Layout, QuantizedWeight

if TYPE_CHECKING:
    from k16v8.kernels.launch import Target, Tiles
    from k16v8.kernels.variants import Variant

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100", "gfx1201")
OPTIONS = ("plain", "all")
KERNELS = ("write", "schedule", "decode", "verify", "extend", "gather")
# products of 4-bit weights, and the rows of each
WEIGHT_KERNELS = {"gemv": 16, "gemm-32": 32, "gemm-64": 64, "gemm": 512, "experts": 16, "sum": 16}
PAIRS = (("bf16", "bf16"), ("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "bf16"))

_BATCH = 16
HEADS = (32, 8)  # of queries, and of keys and values
PAGES = (64, 16)  # of tokens: as the plug-ins for engines ask for, and the smallest that they have


@dataclass(frozen=True)
class Compiled:
    """Result of one kernel on one target.

    ``options``: ``plain``, or ``all`` with window, soft-cap, sinks, scales per token and head, and counting of what
    saturates.  Of products with 4-bit weights: ``all`` with ``g_idx``, and routing weights for experts; ``layout``,
    ``group`` and ``dtype`` (of activations) say which, and nothing of a cache is set.  ``shared`` and ``limit``: bytes
    of shared memory.

    Of the code: ``registers`` of a thread; ``spilled``: bytes of memory that each thread has because they are too few;
    ``loads``: bytes that one thread's load from global memory takes → such instructions (the block table and scales
    are narrow); ``asynchronous``: how many of them go to shared memory by themselves; ``matrix``: the unit of the
    products (mma, wgmma, tcgen05, mfma, wmma).

    ``heads``, ``kv_heads``: of attention.

    ``tile``: bytes of K and V of one step, without scales; ``buffers``: tiles of K or V in shared memory, the fewer of
    both; ``programs``: that fit one multiprocessor by registers, warps and shared memory; ``in_flight``: bytes of K
    and V at least under way to one multiprocessor while its programs compute (NVIDIA; decode and extend).
    """

    kernel: str
    target: str
    k_format: str
    v_format: str
    head_dim: int
    page: int
    options: str
    shared: int | None
    limit: int
    layout: str = ""
    group: int = 0
    dtype: str = "bf16"
    rows: int = 0
    tokens: int = 0
    warps: int = 0
    stages: int = 0
    registers: int | None = None
    spilled: int | None = None
    loads: dict[int, int] = field(default_factory=dict)
    asynchronous: int = 0
    matrix: str = ""
    tile: int | None = None
    buffers: int | None = None
    programs: int | None = None
    in_flight: int | None = None
    heads: int = 0
    kv_heads: int = 0
    error: str | None = None
    status: str = "compiled, never run"

    @property
    def passed(self) -> bool:
        """Whether it compiled and fits."""
        return self.error is None


def compile_kernels(
    targets: tuple[str, ...],
    *,
    pairs: tuple[tuple[str, str], ...] = PAIRS,
    head_dims: tuple[int, ...] = (128,),
    pages: tuple[int, ...] = PAGES,
    heads: tuple[tuple[int, int], ...] = (HEADS,),
    kernels: tuple[str, ...] = KERNELS,
) -> Iterator[Compiled]:
    """Compile every kernel for every target, one result after another.

    FP8 is the fnuz type on gfx942, the only one that it has.

    ``heads``: of queries, and of keys and values.

    Raises:
        NotSupportedError: If Triton is missing, or this process runs its interpreter.
        UnknownNameError: If a target, a format or a kernel does not exist.
    """
    for kind, names, known in (("target", targets, TARGETS), ("kernel", kernels, KERNELS)):
        for name in names:
            if name not in known:
                raise UnknownNameError(kind, name, known)
    for k_format, v_format in pairs:
        storage(k_format), storage(v_format)
    from k16v8.kernels.dispatch import load_triton

    load_triton(interpret=False)
    for target, shape, head_dim, page, (k_format, v_format), kernel, options in product(
        targets, heads, head_dims, pages, pairs, kernels, OPTIONS
    ):
        yield _compile(kernel, target, k_format, v_format, head_dim, page, options, shape)


def compile_weight_kernels(
    targets: tuple[str, ...],
    *,
    layouts: tuple[Layout, ...] = LAYOUTS,
    groups: tuple[int, ...] = (128,),
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    kernels: tuple[str, ...] = tuple(WEIGHT_KERNELS),
) -> Iterator[Compiled]:
    """Compile the products with 4-bit weights for every target, one result after another.

    ``gemv`` is a product of up to 16 rows in splits, ``sum`` adds these, ``gemm-32`` and ``gemm-64`` are products of up
    to so many rows, ``gemm`` of more, ``experts`` one of up to 16 rows for each expert.

    Raises:
        NotSupportedError: If Triton is missing, or this process runs its interpreter.
        UnknownNameError: If a target, a layout or a kernel does not exist.
    """
    for kind, names, known in (
        ("target", targets, TARGETS),
        ("kernel", kernels, WEIGHT_KERNELS),
        ("layout of 4-bit weights", layouts, LAYOUTS),
    ):
        for name in names:
            if name not in known:
                raise UnknownNameError(kind, name, known)
    from k16v8.kernels.dispatch import load_triton

    load_triton(interpret=False)
    for target in targets:
        for layout in layouts:
            for group in groups:
                for dtype in dtypes:
                    for kernel in kernels:
                        for options in OPTIONS:
                            if kernel != "sum" or options == "plain":
                                yield _compile_weights(kernel, target, layout, group, dtype, options)


def _compile_weights(kernel: str, name: str, layout: Layout, group: int, dtype: torch.dtype, options: str) -> Compiled:
    from k16v8.kernels import matmul

    target = _target(name)
    full, many = options == "all", 8 if kernel == "experts" else 0
    stack, inputs, outputs, rows = (many,) if many else (), 4096, 4096, WEIGHT_KERNELS[kernel]

    def empty(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    weight = QuantizedWeight(
        layout,
        empty(*stack, *((inputs, outputs // 8) if layout == "awq" else (inputs // 8, outputs))),
        empty(*stack, inputs // group, outputs // 8),
        empty(*stack, inputs // group, outputs, kind=torch.float16),
        group,
        empty(*stack, inputs) if full else None,
    )
    x, out, part = empty(rows, inputs, kind=dtype), empty(rows, outputs, kind=dtype), empty(1, 1, 1, kind=torch.float32)
    tile = matmul.matmul_tiles(rows, weight, target)
    result = Compiled(
        kernel, name, "", "", 0, 0, options, None, target.shared_memory, layout, group,
        "bf16" if dtype == torch.bfloat16 else "f16",
    )  # fmt: skip
    if kernel == "sum":
        return _built(
            result,
            matmul.sum_kernel,
            matmul.sum_arguments(part, out, rows, 8),
            matmul.sum_constants(target),
            matmul.SUM_TILE,
            target,
        )
    routing = empty(rows, 2, kind=torch.float32) if full and many else None
    split = kernel == "gemv"
    arguments = matmul.matmul_arguments(
        x, weight, part if split else out, rows=rows, splits=8, routing=routing, shared=2 if many else 1
    )
    constants = matmul.matmul_constants(
        dtype, weight, tile, target, experts=bool(many), routed=routing is not None, split=split
    )
    return _built(result, matmul.matmul_kernel, arguments, constants, tile, target)


def _empty_cache(k_format: str, v_format: str, kv_heads: int, head_dim: int, page: int, scaling: Scaling) -> PagedCache:
    return PagedCache.allocate(
        64,
        page,
        kv_heads,
        head_dim,
        batch=_BATCH,
        max_blocks=64,
        k_format=k_format,
        v_format=v_format,
        k_scaling=scaling,
        v_scaling=scaling,
        device="meta",
    )


def _target(name: str) -> Target:
    from k16v8.kernels.launch import Target

    return Target("cuda", int(name[3:]), 1) if name.startswith("sm_") else Target("hip", name, 1)


def _compile(
    kernel: str,
    name: str,
    k_format: str,
    v_format: str,
    head_dim: int,
    page: int,
    options: str,
    shape: tuple[int, int],
) -> Compiled:
    target = _target(name)
    if name == "gfx942":
        k_format, v_format = (x + "fnuz" if x == "fp8_e4m3" else x for x in (k_format, v_format))
    result = Compiled(
        kernel, name, k_format, v_format, head_dim, page, options, None, target.shared_memory,
        heads=shape[0], kv_heads=shape[1],
    )  # fmt: skip
    found = _variant(kernel, target, k_format, v_format, head_dim, page, options == "all", shape)
    return _built(result, found.function, found.arguments, found.constants, found.tile, target)


def _built(
    result: Compiled,
    function: Any,
    arguments: Sequence[object],
    constants: Mapping[str, object],
    tile: Tiles,
    target: Target,
) -> Compiled:
    """Compile and read what the code says."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from k16v8.kernels.launch import compile_options
    from k16v8.kernels.occupancy import resident_programs

    result = replace(result, rows=tile.rows, tokens=tile.tokens, warps=tile.warps, stages=tile.stages)
    types = dict(zip(function.arg_names, (_type(x) for x in arguments), strict=False))
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(arguments)
        if _aligned(x) and not _unspecialized(function.params[i])
    }
    try:
        done = triton.compile(
            ASTSource(
                fn=function,
                signature=types | dict.fromkeys(constants, "constexpr"),
                constexprs={(function.arg_names.index(key),): value for key, value in constants.items()},
                attrs=aligned,
            ),
            target=GPUTarget(target.backend, target.arch, target.warp),
            options=compile_options(tile),
        )
    except Exception as fault:  # whatever the compiler raises is the result
        return replace(result, error=" ".join(str(fault).split())[-300:], status="does not compile")
    shared = int(done.metadata.shared)
    result = replace(result, **(_nvidia(done.asm) if target.backend == "cuda" else _read_amd(done.asm["amdgcn"])))
    assert result.registers is not None
    result = replace(result, programs=resident_programs(target, result.registers, shared, tile.warps))
    if result.kernel in ("decode", "verify", "extend"):
        result = _pipeline(result, done.asm["ttgir"], target)
    if shared > target.shared_memory:
        excess = f"needs {shared} bytes of shared memory, {result.target} has {target.shared_memory}"
        return replace(result, shared=shared, error=excess, status="compiles, does not fit")
    return replace(result, shared=shared)


def _variant(
    kernel: str,
    target: Target,
    k_format: str,
    v_format: str,
    head_dim: int,
    page: int,
    full: bool,
    shape: tuple[int, int],
) -> Variant:
    """Arguments of a launch.  ``verify``: decode of as many queries as fit a tile."""
    from k16v8.kernels.variants import variants

    heads, kv_heads = shape
    cache = _empty_cache(k_format, v_format, kv_heads, head_dim, page, "per-token-head" if full else "none")
    attention = Attention()
    if full:
        attention = Attention(window=4096, softcap=50.0, sinks=torch.empty(heads, device="meta"))
    queries = MAX_ROWS // (heads // kv_heads) if kernel == "verify" else 1
    found = variants(cache, heads, torch.bfloat16, attention, target, count=full, queries=queries)
    return next(variant for variant in found if variant.name == ("decode" if kernel == "verify" else kernel))


def _nvidia(asm: dict[str, Any]) -> dict[str, Any]:
    """Registers and spills as the assembler has them; instructions as they stand in PTX."""
    from triton import knobs

    binary = os.memfd_create("kernel.cubin")  # leaves nothing behind if this process is killed
    with os.fdopen(binary, "wb") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", f"/proc/self/fd/{binary}"]
        usage = subprocess.run(command, pass_fds=(binary,), capture_output=True, text=True, check=True).stdout
    return _read_nvidia(asm["ptx"], usage)


def _read_nvidia(ptx: str, usage: str) -> dict[str, Any]:
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", ptx)
    plain = re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+) ", ptx)
    loads = [int(size, 16) for size in copies] + [int(many or 1) * int(bits) // 8 for many, bits in plain]
    unit = re.search(r"\b(tcgen05|wgmma|mma)\.(?:mma|sync|mma_async)", ptx)
    return {
        "registers": _number(r"REG:(\d+)", usage),
        "spilled": _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        "loads": dict(sorted(Counter(loads).items())),
        "asynchronous": len(copies),
        "matrix": unit[1] if unit else "",
    }


def _read_amd(text: str) -> dict[str, Any]:
    """Read the figures of the assembler text; registers are those of vectors, accumulators included."""
    sizes = {"ubyte": 1, "u8": 1, "ushort": 2, "u16": 2, "b16": 2, "dword": 4, "b32": 4}
    sizes |= {"b64": 8, "b96": 12, "b128": 16, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    kinds = re.findall(r"\b(?:global|buffer)_load_(?:lds_)?(?:d16_)?(?:hi_)?(\w+?)(?:_d16(?:_hi)?)? ", text)
    unit = re.search(r"\bv_(mfma|wmma)", text)
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "spilled": _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        "loads": dict(sorted(Counter(sizes[kind] for kind in kinds if kind in sizes).items())),
        "matrix": unit[1] if unit else "",
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


def _pipeline(result: Compiled, ttgir: str, target: Target) -> Compiled:
    """Add the bytes that are loaded ahead to the result."""
    sides = (storage(name) for name in (result.k_format, result.v_format))
    tile = result.tokens * sum(side.width(result.head_dim) * side.dtype.itemsize for side in sides)
    # buffers of K and V: [how many, tokens, columns]
    held = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    buffers = min(map(int, held), default=1)
    result = replace(result, tile=tile, buffers=buffers)
    if target.backend != "cuda" or result.programs is None:
        return result
    return replace(result, in_flight=result.programs * (buffers - 1) * tile)


_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _type(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return _TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


def _unspecialized(parameter: Any) -> bool:
    """Whether Triton must not specialize on the alignment of an argument."""
    return bool(parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)


def _aligned(x: object) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0)
