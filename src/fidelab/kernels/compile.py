"""Compiling the Triton kernels for processors that are not here: "compiled, never run".

Triton needs no device to compile: its wheel has NVIDIA's assembler and AMD's back end.  What is checked is that
every kernel compiles in the configuration that would be launched, and that its shared memory fits the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fidelab.errors import UnknownNameError
from fidelab.kernels.cache import PagedCache, Scaling, storage
from fidelab.kernels.reference import Attention

if TYPE_CHECKING:
    from fidelab.kernels.launch import Target

__all__ = ["KERNELS", "OPTIONS", "PAIRS", "TARGETS", "Compiled", "compile_kernels"]

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100", "gfx1201")
OPTIONS = ("plain", "all")
KERNELS = ("write", "decode", "merge", "extend")
PAIRS = (("bf16", "bf16"), ("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "bf16"))

_RATIO = 4  # query heads per KV head


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel on one target.

    ``options``: ``plain``, or ``all`` with window, soft-cap, sinks, scales per token and head, and counting of what
    saturates.  ``shared`` and ``limit``: bytes of shared memory.
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
    error: str | None = None
    status: str = "compiled, never run"

    @property
    def passed(self) -> bool:
        """It compiled and fits."""
        return self.error is None


def compile_kernels(
    targets: tuple[str, ...],
    *,
    pairs: tuple[tuple[str, str], ...] = PAIRS,
    head_dims: tuple[int, ...] = (128,),
    pages: tuple[int, ...] = (16,),
    kernels: tuple[str, ...] = KERNELS,
) -> Iterator[Compiled]:
    """Compile every kernel for every target, one result after another.

    FP8 is the fnuz type on gfx942, the only one that it has.

    Raises:
        NotSupportedError: Triton is missing, or this process runs its interpreter.
        UnknownNameError: a target, a format or a kernel that does not exist.
    """
    for kind, names, known in (("target", targets, TARGETS), ("kernel", kernels, KERNELS)):
        for name in names:
            if name not in known:
                raise UnknownNameError(kind, name, known)
    for k_format, v_format in pairs:
        storage(k_format), storage(v_format)
    from fidelab.kernels.dispatch import load_triton

    load_triton(interpret=False)
    for target in targets:
        for head_dim in head_dims:
            for page in pages:
                for k_format, v_format in pairs:
                    for kernel in kernels:
                        for options in OPTIONS:
                            yield _compile(kernel, target, k_format, v_format, head_dim, page, options)


def _compile(kernel: str, name: str, k_format: str, v_format: str, head_dim: int, page: int, options: str) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fidelab.kernels.launch import Target, compile_options, tiles

    backend: str = "cuda" if name.startswith("sm_") else "hip"
    target = Target(backend, int(name[3:]) if backend == "cuda" else name, 1)
    if name == "gfx942":
        k_format, v_format = (x + "fnuz" if x == "fp8_e4m3" else x for x in (k_format, v_format))
    result = Compiled(kernel, name, k_format, v_format, head_dim, page, options, None, target.shared_memory)
    function, arguments, constants = _launch(kernel, target, k_format, v_format, head_dim, page, options == "all")
    types = dict(zip(function.arg_names, (_type(x) for x in arguments), strict=False))
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(arguments) if _aligned(x)}
    try:
        done = triton.compile(
            ASTSource(
                fn=function,
                signature=types | dict.fromkeys(constants, "constexpr"),
                constexprs={(function.arg_names.index(key),): value for key, value in constants.items()},
                attrs=aligned,
            ),
            target=GPUTarget(backend, target.arch, target.warp),
            options=compile_options(tiles(kernel, target, head_dim, _RATIO)),
        )
    except Exception as fault:  # whatever the compiler raises is the result
        return replace(result, error=" ".join(str(fault).split())[-300:], status="does not compile")
    shared = int(done.metadata.shared)
    if shared > target.shared_memory:
        excess = f"needs {shared} bytes of shared memory, {name} has {target.shared_memory}"
        return replace(result, shared=shared, error=excess, status="compiles, does not fit")
    return replace(result, shared=shared)


def _launch(
    kernel: str, target: Target, k_format: str, v_format: str, head_dim: int, page: int, full: bool
) -> tuple[Any, list[Any], dict[str, object]]:
    """The Triton function, its arguments and constexprs, as a launch would pass them; 4 query heads per KV head."""
    from fidelab.kernels.decode import decode_constants, decode_kernel, merge_constants, merge_kernel
    from fidelab.kernels.extend import extend_constants, extend_kernel
    from fidelab.kernels.launch import cache_arguments
    from fidelab.kernels.write import write_arguments, write_constants, write_kernel

    batch, kv_heads, heads, splits = 16, 8, 8 * _RATIO, 16
    scaling: Scaling = "per-token-head" if full else "none"
    cache = PagedCache.allocate(
        64,
        page,
        kv_heads,
        head_dim,
        batch=batch,
        max_blocks=64,
        k_format=k_format,
        v_format=v_format,
        k_scaling=scaling,
        v_scaling=scaling,
        device="meta",
    )
    q = torch.empty(batch, heads, head_dim, dtype=torch.bfloat16, device="meta")
    part, lse = q.float(), torch.empty(batch, heads, device="meta")
    starts, attention = cache.lengths, Attention()
    if full:
        attention = Attention(window=4096, softcap=50.0, sinks=part[0, :, 0])
    scale = attention.scale_for(head_dim)
    if kernel == "write":
        kv = q[:, :kv_heads]
        arguments = write_arguments(kv, kv, cache, starts.long(), None)
        return write_kernel, [*arguments], write_constants(cache, count=full)
    if kernel == "merge":
        arguments = (part, lse, part, q, lse, *q.stride()[:2], lse.stride(0))
        return merge_kernel, [*arguments], merge_constants(heads, head_dim, splits, sinks=full, target=target)
    if kernel == "decode":
        arguments = (q, part, lse, *cache_arguments(cache), *q.stride()[:2], scale)
        constants = decode_constants(q.dtype, heads, cache, attention, splits, target)
        return decode_kernel, [*arguments], constants
    strides = (*q.stride()[:2], *q.stride()[:2], lse.stride(0))
    arguments = (q, starts, q, q, lse, *cache_arguments(cache), *strides, scale)
    constants = extend_constants(q.dtype, heads, cache, attention, target)
    return extend_kernel, [*arguments], constants


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


def _aligned(x: object) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0)
