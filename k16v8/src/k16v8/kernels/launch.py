"""Settings of a launch besides its tensors: how the kernel runs, tile sizes, strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k16v8.errors import UsageError
from k16v8.kernels.cache import PagedCache, Scaling, scaling_of, storage
from k16v8.kernels.knobs import KNOBS
from k16v8.kernels.reference import Attention

_HIP_FP8 = {"gfx942": "fp8_e4m3fnuz"} | dict.fromkeys(("gfx950", "gfx1200", "gfx1201"), "fp8_e4m3")
_SCALES: dict[Scaling, int] = {"none": 0, "per-tensor": 1, "per-token-head": 2}


@dataclass(frozen=True)
class Target:
    """A processor as Triton names it: ``cuda`` 90, ``hip`` gfx942; ``interpreter``."""

    backend: str
    arch: int | str = 0
    multiprocessors: int = 1

    def native(self, name: str) -> str:
        """Return the processor's conversion of this FP8 format, ``ptx`` or ``cast``; empty if kernels convert bits."""
        if self.backend == "cuda":
            return "ptx" if name == "fp8_e4m3" and int(self.arch) >= 89 else ""
        return "cast" if self.backend == "hip" and name == _HIP_FP8.get(str(self.arch)) else ""

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program may have."""
        if self.backend == "cuda":
            return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}.get(int(self.arch), 99) * 1024
        return (160 if self.arch == "gfx950" else 64) * 1024

    @property
    def warp(self) -> int:
        """Threads of a warp."""
        return 64 if str(self.arch).startswith("gfx9") else 32


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: ``rows`` of queries, ``tokens`` of the cache; warps; stages of the software pipeline.

    ``registers``: of a thread at most; 0 leaves it to the compiler.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int = 0


def tiles(kernel: str, target: Target, cache: PagedCache) -> Tiles:
    """Return the tile sizes of ``decode``, ``extend`` or ``write`` for a target; :mod:`k16v8.kernels.knobs` may turn
    those of decode.
    """
    chosen = _tiles(kernel, target, cache)
    return replace(chosen, **KNOBS.of_tiles) if kernel == "decode" else chosen


def _tiles(kernel: str, target: Target, cache: PagedCache) -> Tiles:
    """The sizes for a target.

    Its numbers rest on what the compiler says (``k16v8 compile``: spills, shared memory, buffers) and on the
    length of the loop; only decode on sm_90 was measured.  What still spills at D = 128 (up to 72 bytes of a thread) is
    decode of drafts with FP8 values and all options at once (16 bytes, for three programs on a multiprocessor), and
    extend: FP8 keys with window, soft-cap, sinks and scales per token all at once on sm_90, the same with 16-bit
    keys there and on sm_120, FP8 keys and values on gfx1100.  Smaller tiles cost all other calls more.
    """
    widths = [max(16, power_of_two(dim)) for dim in (cache.head_dim, cache.v_dim)]
    wide = max(widths) >= 256
    if kernel == "write":
        return Tiles(1, 1, 4, 1)
    if target.backend == "interpreter":  # the interpreter's cost is per operation; edges must still be crossed
        return Tiles(16 if kernel == "decode" else 32, 32, 1, 1)
    roomy = target.shared_memory >= 163 * 1024
    if target.backend == "hip":
        if target.warp == 32:  # static: 32 tokens, and 4 warps in extend, spill on gfx1100; unmeasured
            return Tiles(16, 16, 4, 1) if kernel == "decode" else Tiles(64, 16, 8, 1)
        # static: two stages load one tile ahead into registers; 64 tokens leave room for two programs; unmeasured
        return Tiles(16, 32, 4, 2) if kernel == "decode" else Tiles(64, 32, 4, 1 if wide else 2)
    if kernel == "decode":
        # static: below five stages K and V have one buffer each, for the block table takes a stage of its own, and
        # nothing is in flight while a tile is worked on.  A tile of 32 KB (16 KB in small shared memory) lets two to
        # four programs share a multiprocessor of sm_90 with one tile each in flight, which is more than its latency
        # asks for.  Measured on an H200 (16-bit keys, FP8 values, 32 sequences of 32K tokens): 8 warps take 15 to 60%
        # more time, 32 tokens 12%, three stages 20%; twice the tokens, or two warps, take 1 to 2% less, but spill.
        size = sum(
            width * storage(name).dtype.itemsize // storage(name).per_byte
            for width, name in zip(widths, (cache.k_format, cache.v_format), strict=True)
        )
        tokens = power_of_two((32 if roomy else 16) * 1024 // size + 1) // 2
        return Tiles(16, min(max(tokens, 32), 128 * 128 // max(widths), 128), 4, 5)
    if roomy:
        # static: 128 rows halve the traffic from L2; 128 tokens take a fifth fewer instructions but spill with
        # windows and scales per token; with D = 256 more than 32 tokens spill.  Unmeasured.
        return Tiles(128, 32 if wide else 64, 8, 5 if target.shared_memory >= 227 * 1024 else 3)
    return Tiles(64, 32, 8, 2 if wide else 5)  # static: 4 warps or 64 tokens spill on sm_120; unmeasured


def compile_options(tile: Tiles) -> dict[str, object]:
    """Return the options of Triton's compiler.  Fused multiply-add is set explicitly, since its default changes."""
    limit = {"maxnreg": tile.registers} if tile.registers else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True, **limit}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[object],
    constants: Mapping[str, object],
    tile: Tiles,
    device: torch.device,
) -> None:
    """Launch ``kernel`` on the device where its tensors lie.

    Triton launches on the current device, which is another one where a model is spread over several.
    """
    with current(device):
        kernel[grid](*arguments, **constants, **compile_options(tile))


def current(device: torch.device) -> AbstractContextManager[object]:
    """``device`` as torch's current one; there is nothing to do for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def interpreted() -> bool:
    """Return whether this process runs Triton kernels in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


@cache
def target_of(device: torch.device) -> Target:
    """Return the target of a torch device."""
    if interpreted():
        return Target("interpreter")
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Target("hip", str(found.gcnArchName).split(":")[0], found.multi_processor_count)
    return Target("cuda", found.major * 10 + found.minor, found.multi_processor_count)


def dot_types(target: Target, q: torch.dtype, k_format: str, v_format: str) -> tuple[tl.dtype, tl.dtype]:
    """Return the types of the factors of Q·K and of P·V.

    Float16 holds all codes, and hardware makes it of FP8 in one step.  Probabilities go with float16 where V fits it:
    it has three bits more.  Where V is bfloat16 they are split into two bfloat16 terms.
    """
    if target.backend == "interpreter":
        return tl.float32, tl.float32
    plain = q == torch.bfloat16 and not storage(k_format).quantized
    return (tl.bfloat16 if plain else tl.float16), (tl.bfloat16 if v_format == "bf16" else tl.float16)


def power_of_two(n: int) -> int:
    """Return the next power of two, at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def scale_code(scale: Tensor | None) -> int:
    """0: none, 1: per tensor, 2: per token and head."""
    return _SCALES[scaling_of(scale)]


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Strides of block, place and head; zeros where the scale is not one per token and head."""
    if scale is None or scale_code(scale) != 2:
        return (0, 0, 0)
    return (scale.stride(0), scale.stride(1), scale.stride(2))


def cache_arguments(cache: PagedCache) -> tuple[object, ...]:
    """The arguments of a kernel that reads a cache, in their order.  An absent scale is any pointer, never read.

    Raises:
        UsageError: If 8-bit codes, which are read in pairs, are not at even addresses, or if the tokens of a page lie
            2^31 numbers apart or more.
    """
    for side, codes, name in (("k", cache.k_cache, cache.k_format), ("v", cache.v_cache, cache.v_format)):
        pairs = storage(name).quantized and storage(name).per_byte == 1
        if pairs and (any(stride % 2 for stride in codes.stride()[:3]) or codes.data_ptr() % 2):
            raise UsageError(
                f"{side}_cache has strides {list(codes.stride())}; the Triton kernels read {name} in pairs, which must "
                "begin at even addresses"
            )
    sides = (
        ("k_cache", cache.k_cache),
        ("v_cache", cache.v_cache),
        ("k_scale", cache.k_scale),
        ("v_scale", cache.v_scale),
    )
    for what, tensor in sides:
        if tensor is not None and tensor.dim() > 1 and (cache.page - 1) * tensor.stride(1) >= 1 << 31:
            raise UsageError(
                f"{what} has strides {list(tensor.stride())}; the Triton kernels read pages whose tokens lie within "
                "2^31 numbers: put the tokens of a page closer together"
            )
    return (
        cache.k_cache,
        cache.v_cache,
        cache.k_cache if cache.k_scale is None else cache.k_scale,
        cache.v_cache if cache.v_scale is None else cache.v_scale,
        cache.block_table,
        cache.lengths,
        *cache.k_cache.stride()[:3],
        *cache.v_cache.stride()[:3],
        *scale_strides(cache.k_scale),
        *scale_strides(cache.v_scale),
        cache.block_table.stride(0),
    )


def cache_constants(cache: PagedCache, target: Target) -> dict[str, object]:
    """The constexprs of a kernel that reads a cache."""
    return {
        "D": cache.head_dim,
        "DV": cache.v_dim,
        "BLOCK_D": max(16, power_of_two(cache.head_dim)),
        "BLOCK_DV": max(16, power_of_two(cache.v_dim)),
        "PAGE": cache.page,
        "K_FORMAT": cache.k_format,
        "V_FORMAT": cache.v_format,
        "K_PAIRS": storage(cache.k_format).quantized,
        "V_PAIRS": storage(cache.v_format).quantized,
        "K_SCALE": scale_code(cache.k_scale),
        "V_SCALE": scale_code(cache.v_scale),
        "K_NATIVE": target.native(cache.k_format),
        "V_NATIVE": target.native(cache.v_format),
    }


def attention_constants(q: torch.dtype, cache: PagedCache, attention: Attention, target: Target) -> dict[str, object]:
    """The constexprs of a kernel that attends."""
    qk, pv = dot_types(target, q, cache.k_format, cache.v_format)
    return {
        "WINDOW": attention.window,
        "SOFTCAP": attention.softcap,
        "QK": qk,
        "PV": pv,
        "Q_FORMAT": {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[q],
    }
