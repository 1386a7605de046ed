"""What the commands say of KV formats is what compare does, for every engine that there is."""

from __future__ import annotations

from pathlib import Path

from tests.environments.agreement import RUNS, check_agreement
from tests.real.harness import STORES_FP8, installed


def test_formats_engines_list_and_doctor_say_of_every_engine_and_format_what_compare_does(tmp_path: Path) -> None:
    engines = ("hf", "llamacpp", "sglang", "vllm")
    for engine in engines[1:]:
        installed(engine)
    verdicts = check_agreement(engines, "smollm2-135m", tmp_path)
    runs = {engine: {name for (e, name), text in verdicts.items() if (e, text) == (engine, RUNS)} for engine in engines}
    assert {"f32", "bf16", "int4", "q8_0", "k16v8"} <= runs["hf"]
    assert {"f16", "q8_0", "iq4_nl"} <= runs["llamacpp"]
    assert {"auto", "bfloat16", "k16v8"} <= runs["sglang"]
    assert {"auto", "k16v8"} <= runs["vllm"]
    assert ("fp8_e4m3" in runs["vllm"]) == STORES_FP8
