"""The command that measures a format of engine hf on an engine with a server names the same format, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fidelab.config.experiment import validate
from fidelab.config.schema import ArmConfig
from fidelab.core import KVSpec, Status
from fidelab.models import resolve
from fidelab.plan.arms import resolve_arm
from fidelab.results.outcomes import ArmResult
from fidelab.scoring.score import _other_engine_command


def command(kv: str, **options: str) -> str | None:
    experiment = validate({"model": "fake", "engine": "fake", "candidates": [{"kv": "exact"}]}, "test")
    arm = resolve_arm(experiment, ArmConfig(kv=KVSpec.parse("exact")), resolve("fake"))
    arm = replace(arm, engine="hf", kv=KVSpec.parse(kv), options=tuple(sorted(options.items())))
    return _other_engine_command(ArmResult("candidate:0", arm, Status.OK))


@pytest.mark.parametrize(
    ("kv", "options", "expected"),
    [
        ("q8_0", {}, "fidelab compare fake --engine llamacpp --kv q8_0"),
        ("fp8_e4m3", {}, "fidelab compare fake --engine vllm --kv fp8_e4m3"),
        ("bf16/fp8_e4m3", {}, "fidelab compare fake --engine vllm --kv k16v8"),
        # how attention was computed is not part of the format
        ("bf16/fp8_e4m3", {"attention": "sdpa"}, "fidelab compare fake --engine vllm --kv k16v8"),
        ("bf16/fp8_e4m3", {"attention": "k16v8", "dequant": "unpack"}, "fidelab compare fake --engine vllm --kv k16v8"),
        ("bf16/fp8_e4m3", {"rotate": "hadamard"}, None),
        # other formats of the same name there: their scales are per token and head
        ("int4", {}, None),
        ("int8", {}, None),
        ("bf16/int8", {}, None),
        ("bf16/fp8_e4m3fnuz", {}, "fidelab compare fake --engine vllm --kv bf16/fp8_e4m3fnuz"),
    ],
)
def test_the_command_names_a_format_that_means_the_same_there(
    kv: str, options: dict[str, str], expected: str | None
) -> None:
    assert command(kv, **options) == expected
