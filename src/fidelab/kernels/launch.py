"""What a launch needs to know besides its tensors: how the kernel runs, tile sizes, strides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fidelab.kernels.cache import PagedCache, Scaling, scaling_of
from fidelab.kernels.reference import Attention

__all__ = ["Target", "Tiles", "interpreted", "power_of_two", "scale_code", "scale_strides", "target_of", "tiles"]

_HIP_FP8 = {"gfx942": "fp8_e4m3fnuz"} | dict.fromkeys(("gfx950", "gfx1200", "gfx1201"), "fp8_e4m3")
_SCALES: dict[Scaling, int] = {"none": 0, "per-tensor": 1, "per-token-head": 2}


@dataclass(frozen=True)
class Target:
    """A processor as Triton names it: ``cuda`` 90, ``hip`` gfx942; ``interpreter``."""

    backend: str
    arch: int | str = 0
    multiprocessors: int = 1

    def native(self, name: str) -> bool:
        """Whether the processor converts this FP8 format itself; where not, kernels do it on bits."""
        if self.backend == "cuda":
            return name == "fp8_e4m3" and int(self.arch) >= 89
        return self.backend == "hip" and name == _HIP_FP8.get(str(self.arch))

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
    """Tile sizes: ``rows`` of queries, ``tokens`` of the cache; warps; stages of the software pipeline."""

    rows: int
    tokens: int
    warps: int
    stages: int


def tiles(kernel: str, target: Target, head_dim: int, ratio: int) -> Tiles:
    """The configuration of a kernel, chosen to stay within the target's shared memory."""
    if kernel in ("write", "merge"):
        return Tiles(1, 1, 4, 1)
    if target.backend == "interpreter":  # the interpreter's cost is per operation; edges must still be crossed
        return Tiles(16 if kernel == "decode" else 32, 32, 1, 1)
    wide = power_of_two(head_dim) >= 256
    roomy = target.shared_memory >= 163 * 1024
    if kernel == "decode":
        rows = max(16, power_of_two(ratio))
        return Tiles(rows, 32 if wide and not roomy else 64, 4, 3 if roomy else 2 if target.backend == "cuda" else 1)
    if roomy:
        return Tiles(128, 64, 8, 3 if not wide else 2)
    return Tiles(64, 32 if wide else 64, 4, 2 if target.backend == "cuda" and not wide else 1)


def compile_options(tile: Tiles) -> dict[str, object]:
    """Options of Triton's compiler.  Fusion of multiplications and additions is asked for: its default changes."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def interpreted() -> bool:
    """Whether this process runs Triton kernels in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


@cache
def target_of(device: torch.device) -> Target:
    """The target behind a torch device."""
    if interpreted():
        return Target("interpreter")
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Target("hip", str(found.gcnArchName).split(":")[0], found.multi_processor_count)
    return Target("cuda", found.major * 10 + found.minor, found.multi_processor_count)


def dot_types(target: Target, q: torch.dtype, v_format: str) -> tuple[tl.dtype, tl.dtype]:
    """Types of the factors of Q·K and of P·V.

    Codes are exact in either 16-bit type.  Probabilities go with float16 where V fits it: it has three bits more.
    Where V is bfloat16 they are split into two bfloat16 terms.
    """
    if target.backend == "interpreter":
        return tl.float32, tl.float32
    return (tl.bfloat16 if q == torch.bfloat16 else tl.float16), (tl.bfloat16 if v_format == "bf16" else tl.float16)


def power_of_two(n: int) -> int:
    """The next power of two, at least ``n``."""
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
    """The arguments of a kernel that reads a cache, in their order.  An absent scale is any pointer, never read."""
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
        "K_SCALE": scale_code(cache.k_scale),
        "V_SCALE": scale_code(cache.v_scale),
        "K_NATIVE": target.native(cache.k_format),
        "V_NATIVE": target.native(cache.v_format),
    }


def attention_constants(q: torch.dtype, cache: PagedCache, attention: Attention, target: Target) -> dict[str, object]:
    """The constexprs of a kernel that attends."""
    qk, pv = dot_types(target, q, cache.v_format)
    return {
        "WINDOW": attention.window,
        "SOFTCAP": attention.softcap,
        "QK": qk,
        "PV": pv,
        "Q_FORMAT": {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[q],
    }
