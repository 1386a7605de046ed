"""Programs per multiprocessor, against answers worked out by hand from the vendors' tables, and grids that follow."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

import forked

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def _run(script: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forked.run(["-c", script], environment)
    assert done.returncode == 0, done.stderr


_BY_HAND = """
from k16v8.errors import UsageError
from k16v8.kernels.launch import Target
from k16v8.kernels.occupancy import resident_programs

for arch, registers, shared, warps, programs, why in (
    # 16,384 registers of a partition: 128 * 32 = 4,096 for a warp, 4 warps, 16 in all; 228 KB hold 4 of 55 + 1 KB
    (90, 128, 56320, 4, 4, "registers and shared memory"),
    (90, 145, 56320, 4, 3, "4,640 registers become 4,864: 3 warps of a partition"),
    (90, 128, 60 * 1024, 4, 3, "61 KB of 228"),
    (90, 128, 0, 4, 4, "registers alone"),
    (90, 255, 0, 8, 1, "8,192 for a warp: 2 of a partition"),
    (90, 168, 0, 3, 4, "5,376 for a warp: 3 of a partition, 12 in all"),
    (90, 32, 0, 4, 16, "2,048 threads"),
    (90, 16, 0, 1, 32, "32 programs"),
    (90, 16, 227 * 1024, 4, 1, "all that one program may have"),
    (90, 16, 228 * 1024, 4, 0, "more than that"),
    (100, 128, 56320, 4, 4, "as sm_90"),
    (120, 32, 0, 4, 12, "1,536 threads"),
    (120, 128, 48 * 1024, 4, 2, "49 KB of 100"),
    (120, 16, 0, 1, 24, "24 programs"),
    (89, 16, 0, 1, 24, "24 programs"),
    (86, 16, 0, 1, 16, "16 programs"),
    (80, 128, 40 * 1024, 4, 4, "41 KB of 164, and registers"),
    # 512 registers of a lane in eights: 122 become 128, 4 waves on each of 4 SIMDs
    ("gfx942", 122, 12288, 4, 4, "registers"),
    ("gfx942", 136, 12288, 4, 3, "512 / 136 = 3"),
    ("gfx942", 128, 24 * 1024, 4, 2, "24 KB of 64"),
    ("gfx950", 128, 48 * 1024, 4, 3, "48 KB of 160"),
    ("gfx942", 16, 0, 4, 8, "8 waves of a SIMD"),
    # 1,536 registers of a lane in twenty-fours: 108 become 120, 12 waves on each of 4 SIMDs
    ("gfx1201", 108, 8192, 4, 12, "registers"),
    ("gfx1100", 32, 0, 4, 16, "16 waves of a SIMD"),
    ("gfx1201", 108, 20 * 1024, 4, 6, "20 KB of 128"),
    ("gfx1103", 96, 0, 4, 10, "1,024 / 96 = 10"),
):
    target = Target("hip" if isinstance(arch, str) else "cuda", arch)
    found = resident_programs(target, registers, shared, warps)
    assert found == programs, (arch, registers, shared, warps, why, found)
try:
    resident_programs(Target("interpreter"), 1, 1, 1)
except UsageError:
    pass
else:
    raise AssertionError("the interpreter has no multiprocessors")
"""


def test_occupancy_is_what_the_vendors_tables_give_by_hand() -> None:
    _run(_BY_HAND)


_PROGRAMS = """
from types import SimpleNamespace
import torch
from k16v8.kernels import decode, launch
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.reference import Attention

warmups = []

class Kernel:  # as Triton's: registers are known once the code is loaded
    def __init__(self, registers):
        self.registers = registers
    def warmup(self, *arguments, grid, **constants):
        warmups.append(constants["WINDOW"])
        made = SimpleNamespace(metadata=SimpleNamespace(shared=56320))
        made._init_handles = lambda: setattr(made, "n_regs", self.registers)
        return made

cache = PagedCache.allocate(1, 16, 8, 128, batch=8, max_blocks=2048, k_format="bf16", v_format="fp8_e4m3")
decode.target_of = lambda device: launch.Target("cuda", 90, 132)
assert decode.decode_programs(torch.bfloat16, 32, cache) == 2, "tensors on the CPU: the fallback"
assert decode.plan_decode(8, 32, cache).slots == 2 * 132

decode._on_gpu = lambda found: True
for registers, programs in ((128, 4), (145, 3)):
    decode._PROGRAMS.clear()
    decode.decode_kernel = Kernel(registers)
    warmups.clear()
    for attention in (Attention(), Attention(), Attention(window=4096), Attention(scale=0.5)):
        assert decode.decode_programs(torch.bfloat16, 32, cache, attention) == programs
    assert warmups == [0, 4096], warmups  # once for each variant
    plan = decode.plan_decode(8, 32, cache, multiprocessors=132)
    assert (plan.slots, plan.programs % 132) == (programs * 132, 0)
"""


def test_the_grid_follows_the_programs_of_the_compiled_variant_which_is_asked_once() -> None:
    _run(_PROGRAMS)
