"""4-bit weights that vLLM packs, read by the kernels of k16v8."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.harness import installed, ran_there

pytestmark = pytest.mark.long

SOURCE = Path(__file__).parents[2] / "k16v8" / "src"


def test_weights_that_vllm_packs_are_the_same_weights_to_our_kernels(tmp_path: Path) -> None:
    said = ran_there(installed("vllm", SOURCE), "vllm_weights", tmp_path, str(tmp_path / "said.json"))
    assert {name.partition(" ")[0] for name in said} == {"awq", "gptq", "g_idx"}
    for name, one in said.items():
        assert one["equal"], name
        assert one["relative_l2"] < 1e-6, name
