"""Number of programs of a compiled kernel that one multiprocessor holds at once, by the vendor's rules.

NVIDIA: CUDA C++ Programming Guide, "Compute Capabilities", and the CUDA Occupancy Calculator.  AMD: LLVM's AMDGPU
back end (``GCNSubtarget``, "Register Budget"); a multiprocessor is a compute unit on gfx9, a work-group processor
(two compute units, as a kernel runs by default) on gfx11 and gfx12.
"""

from __future__ import annotations

from dataclasses import dataclass

from k16v8.errors import UsageError
from k16v8.kernels.launch import Target

FALLBACK_PROGRAMS = 2
"""Programs for each multiprocessor where nothing is compiled: under the interpreter, and for tensors on the CPU."""

_SIMDS = 4  # partitions of a multiprocessor, each with registers of its own; so it is on all targets


@dataclass(frozen=True)
class _Limits:
    """Limits of one multiprocessor.  ``registers``: 32-bit ones of a partition, counted for a whole warp."""

    registers: int
    granule: int  # registers of a warp are a multiple of it
    warps: int  # of a partition
    programs: int
    shared: int  # bytes
    reserved: int  # bytes of shared memory that the system takes of each program
    shared_granule: int


def resident_programs(target: Target, registers: int, shared: int, warps: int) -> int:
    """Programs that fit one multiprocessor by registers, warps, shared memory and their own number.

    Args:
        target: The processor.
        registers: Of one thread.
        shared: Bytes of one program.
        warps: Of one program.

    Returns:
        The number of programs; 0 where not even one fits.

    Raises:
        UsageError: If the target has no occupancy rules here (the interpreter).
    """
    limits = _limits(target)
    each = -(-max(1, registers) * target.warp // limits.granule) * limits.granule  # registers of a warp
    held = min(limits.registers // each, limits.warps) * _SIMDS
    taken = -(-(shared + limits.reserved) // limits.shared_granule) * limits.shared_granule
    return min(held // warps, limits.programs, limits.shared // taken if taken else limits.programs)


def _limits(target: Target) -> _Limits:
    if target.backend == "cuda":
        arch = int(target.arch)
        warps = 64 if arch in (80, 90, 100, 103) else 48
        programs = {86: 16, 87: 16, 89: 24, 110: 24, 120: 24, 121: 24}.get(arch, 32)
        # 1 KB of what a multiprocessor has is the most that one program cannot ask for
        return _Limits(65536 // _SIMDS, 256, warps // _SIMDS, programs, target.shared_memory + 1024, 1024, 128)
    if target.backend == "hip" and target.warp == 64:  # gfx90a and later: 512 registers of a lane, in eights
        return _Limits(512 * 64, 8 * 64, 8, 16, target.shared_memory, 0, 512)
    if target.backend == "hip":  # 1,536 registers of a lane in twenty-fours, but smaller chips have 1,024 in sixteens
        large = str(target.arch) in ("gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201")
        lane, granule = (1536, 24) if large else (1024, 16)
        return _Limits(lane * 32, granule * 32, 16, 32, 2 * target.shared_memory, 0, 512)
    raise UsageError(f"{target.backend} has no multiprocessors: nothing limits how many programs it holds")
