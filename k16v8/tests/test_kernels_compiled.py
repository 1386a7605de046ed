"""What compiled code says about speed where no GPU is: spills, widths of loads, matrix units, what is loaded ahead."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import forked

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

_COMMAND = "from k16v8.cli import main; raise SystemExit(main())"
_FORMATS = "bf16/bf16,bf16/fp8_e4m3,fp8_e4m3/fp8_e4m3"
# Window, soft-cap, sinks and scales per token at once: some registers are lacking, for some bytes of a thread.
_SPILLS = {("extend", "fp8_e4m3", "fp8_e4m3", "all"), ("extend", "bf16", "fp8_e4m3", "all")}
# With Triton 3.6, three programs per multiprocessor leave 168 registers, two fewer than decode takes.
_SPILLS |= {("decode", "bf16", "fp8_e4m3", "plain"), ("verify", "bf16", "fp8_e4m3", "all")}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str, str], Any]:
    """(kernel, K, V, options) → the record on sm_90, 32/8 heads of dimension 128, pages of 64 as engines have them."""
    cache: Path = tmp_path_factory.mktemp("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_CACHE_DIR": str(cache)}
    words = ["compile", "--operations", "attention", "--target", "sm_90", "--formats", _FORMATS, "--page", "64"]
    done = forked.run(["-c", _COMMAND, *words, "--json"], environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    return {(one["kernel"], one["k_format"], one["v_format"], one["options"]): one for one in results}


@pytest.mark.full
def test_registers_suffice_but_for_named_exceptions(compiled: dict[Any, Any]) -> None:
    assert {key for key, one in compiled.items() if one["spilled"]} <= _SPILLS
    assert all(one["spilled"] <= 72 and 0 < one["registers"] <= 255 for one in compiled.values())


@pytest.mark.full
def test_a_thread_of_decode_loads_16_bytes_of_keys_or_values_at_once(compiled: dict[Any, Any]) -> None:
    for key, one in compiled.items():
        if key[0] in ("decode", "verify") and key[3] == "plain":
            assert set(one["loads"]) == {"4", "16"}, key  # 4: lengths and the block table
            assert one["asynchronous"] >= one["loads"]["16"] - 2, key  # but for the queries


@pytest.mark.full
def test_products_are_on_the_matrix_units(compiled: dict[Any, Any]) -> None:
    for kernel, unit in (("decode", "mma"), ("verify", "mma"), ("extend", "wgmma")):
        assert {one["matrix"] for key, one in compiled.items() if key[0] == kernel} == {unit}


@pytest.mark.full
def test_while_a_tile_is_computed_enough_of_the_next_is_under_way(compiled: dict[Any, Any]) -> None:
    """4.8 TB/s at 700 ns on 132 multiprocessors: 25 KB for each."""
    for key, one in compiled.items():
        if key[0] in ("decode", "verify"):
            assert one["in_flight"] >= 48 * 1024, key


@pytest.mark.full
def test_occupancy_is_known_of_every_kernel(compiled: dict[Any, Any]) -> None:
    assert all(one["programs"] >= 1 for one in compiled.values())
    for key, one in compiled.items():  # registers alone, by hand: four warps of one program in four partitions
        if key[0] in ("decode", "verify"):
            assert one["programs"] <= 16384 // (-(-one["registers"] * 32 // 256) * 256), key


_PROGRAMS = """
import json
from k16v8.gates.compile import compile_kernels
shapes, pairs = ((32, 8), (28, 4)), (("bf16", "fp8_e4m3"),)
found = compile_kernels(("sm_90",), pairs=pairs, pages=(64,), heads=shapes, kernels=("decode",))
print(json.dumps([[one.heads, one.options, one.programs, one.spilled] for one in found]))
"""


def test_three_programs_of_decode_fit_a_multiprocessor_where_a_page_holds_whole_tiles() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forked.run(["-c", _PROGRAMS], environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one[:2] for one in found] == [[32, "plain"], [32, "all"], [28, "plain"], [28, "all"]]
    assert all(programs >= 3 and spilled <= 8 for _, _, programs, spilled in found), found


_WAITS = """
import re
import triton
from k16v8.gates.compile import compile_kernels
texts, compiler = [], triton.compile

def kept(*args, **kwargs):
    done = compiler(*args, **kwargs)
    texts.append(done.asm["amdgcn"])
    return done

triton.compile = kept
pairs = (("bf16", "fp8_e4m3"),)
for one in compile_kernels(("gfx942", "gfx950"), pairs=pairs, pages=(64,), kernels=("decode",)):
    assert one.error is None, one
assert len(texts) == 4
for text in texts:
    before, wait, after = text.partition(";;#ASMSTART\\n\\ts_waitcnt vmcnt(0)")
    assert wait and "s_barrier" in after
    until, _, _ = after.partition("s_barrier")
    assert "_store_" not in until  # nothing is stored between the wait and the barrier
"""


def test_on_amd_each_wave_waits_for_its_stores_before_the_barrier_of_the_merge() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forked.run(["-c", _WAITS], environment)
    assert done.returncode == 0, done.stderr


_FIGURES = """
from k16v8.gates import compile
ptx = '''
ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
ld.global.b32 { %r5 }, [ %rd2 + 0 ];
ld.global.L1::evict_last.v2.b32 { %r5, %r6 }, [ %rd2 + 0 ];
cp.async.cg.shared.global [ %r7 + 0 ], [ %rd3 + 0 ], 0x10, %r8;
cp.async.ca.shared.global [ %r7 + 0 ], [ %rd3 + 0 ], 0x4, %r8;
wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {}, 0;
'''
found = compile._read_nvidia(ptx, "Function decode:  REG:200 STACK:24 SHARED:1024 LOCAL:8 CONSTANT[0]:680")
assert found == dict(registers=200, spilled=32, loads={4: 2, 8: 1, 16: 2}, asynchronous=2, matrix="wgmma"), found
amd = '''
\\tglobal_load_dwordx4 v[4:7], v[2:3], off
\\tglobal_load_b128 v[4:7], v[2:3], off
\\tbuffer_load_dword v4, v2, s[0:3], 0 offen
\\tglobal_load_d16_hi_b16 v4, v[2:3], off
\\tglobal_load_ushort v4, v[2:3], off
\\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
    .private_segment_fixed_size: 20
    .vgpr_count:     151
'''
found = compile._read_amd(amd)
assert found == dict(registers=151, spilled=20, loads={2: 2, 4: 1, 16: 2}, matrix="mfma"), found
"""


def test_figures_are_read_from_the_code_as_it_is_written() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forked.run(["-c", _FIGURES], environment)
    assert done.returncode == 0, done.stderr
