"""``fidelab quantize`` with llm-compressor: ``make test-quantize``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.quantize import measured

from fidelab.environments.environment import engines_dir, read_marker
from fidelab.environments.recipes import variants

TOOL = "llm-compressor"


@pytest.mark.parametrize(("method", "group"), [("gptq", 64), ("gptq", 32), ("awq", 64)])
def test_calibration_loses_less_than_rounding_to_nearest_in_the_same_format(
    method: str, group: int, tmp_path: Path
) -> None:
    if not any(read_marker(engines_dir() / name) for name in variants(TOOL)):
        if os.environ.get("FIDELAB_REQUIRE_TOOLS") == "1":
            pytest.fail(f"{TOOL} is required, and absent: make test-quantize")
        pytest.skip(f"{TOOL} is absent: make test-quantize")
    found = measured(tmp_path, "smollm2-135m", group, None, method)
    assert (found.better, found.worse, found.differs) == (method, "rtn", True)
    assert found.ci is not None
    assert found.ci[0] > 0
