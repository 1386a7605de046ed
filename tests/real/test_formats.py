"""What the commands say of KV formats is what compare does, for every engine that there is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.test_cli_terminal import answer, faults, wrong
from tests.environments.agreement import RUNS, check_agreement
from tests.real.harness import STORES_FP8, installed
from tests.run.harness import cli


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


def test_a_format_of_another_engine_is_answered_with_those_of_as_many_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("vllm")
    monkeypatch.setenv("COLUMNS", "80")
    words = "compare M --kv q8_0 --engine vllm"
    assert wrong(words, "of as many bits here: fp8_e4m3, int8_per_token_head", answer(words, tmp_path)) == []


@pytest.mark.parametrize("words", ["setup formats", "setup formats --engine vllm"])
def test_what_installed_engines_store_fits_into_80_columns_and_does_not_fail_in_20(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("vllm")
    for columns, allowed in ((80, 80), (20, sys.maxsize)):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = cli(*words.split(), cwd=tmp_path)
        assert (done.code, faults(done.out, allowed), faults(done.err, allowed)) == (0, [], []), done
        assert "bfloat16" in done.out
