"""The fused scorer's kernels on Triton's interpreter, where they give the figures of float64 numpy.

A process has Triton either compiling or interpreting, so the cases run in one of their own (``fused_cases.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import forked

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ROOT = Path(__file__).parents[2]
QUICK = (
    *("one_row", "exact_products", "bias_scale_and_cap", "kernel_that_does_not_compile", "float32_goes_through_memory"),
    *("absent_triton", "head_larger_than_the_device"),
)
FULL = (
    *("one_candidate", "width_896", "width_that_no_step_divides", "more_rows_than_a_tile", "four_candidates"),
    *("float32_factors", "small_differences", "kl_alone", "head_in_pieces", "sums_of_pieces", "shifted_logits"),
    *("far_odds", "equal_states", "equal_tokens", "broken_rows", "masked_tokens", "one_side_masks"),
    *("other_vocabularies", "mixed_heads", "memory_that_does_not_suffice", "too_many_equal_tokens"),
    "planted_faults_are_seen",
)


@cache
def _wrong(cases: tuple[str, ...]) -> dict[str, str]:
    """Case → what is wrong with it, empty where nothing is."""
    paths = [str(ROOT), str(ROOT / "k16v8" / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with contextlib.chdir(ROOT):
        done = forked.run(["-m", "tests.metrics.fused_cases", *cases], environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", QUICK)
def test_the_kernel_gives_the_figures_of_float64_and_only_where_it_is_the_faster_path(case: str) -> None:
    assert _wrong(QUICK)[case] == ""


@pytest.mark.full
@pytest.mark.parametrize("case", FULL)
def test_odd_shapes_broken_rows_and_little_memory_give_the_figures_of_float64(case: str) -> None:
    assert _wrong(FULL)[case] == ""


def test_every_case_is_run() -> None:
    source = (Path(__file__).parent / "fused_cases.py").read_text("utf-8")
    helpers = {"bfloat16", "sides", "exact", "right", "by_kernel", "after", "check", "scored", "right_without", "main"}
    named = {line[4:].partition("(")[0] for line in source.splitlines() if line.startswith("def ")}
    assert named - helpers == {*QUICK, *FULL}
