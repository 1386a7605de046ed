"""``k16v8 gate`` and ``k16v8 compile``: what they print and how they end."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import pytest

from command import assert_one_line, command
from k16v8.gates import run as gates


@pytest.mark.full
def test_gates_that_pass_end_with_0_and_a_record_of_versions() -> None:
    done = command("gate", "--soak", "0", "--json")
    assert done.exit_code == 0, done
    record = json.loads(done.stdout)
    assert record["kernels"] == "torch"
    assert record["versions"]["torch"] == metadata.version("torch")
    assert record["passed"]
    assert all(gate["passed"] for gate in record["gates"])


@pytest.mark.full
def test_a_gate_that_fails_is_named_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "RELATIVE_L2", 1e-4)
    done = command("gate", "--soak", "0")
    assert done.exit_code == 1
    assert "gate failed: attention, decode k16v8" in done.stderr
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gate", "--device", "tpu"), "there are cpu and cuda"),
        (("gate", "--kernels", "cutlass"), "unknown kernel implementation"),
        (("gate", "--kernels", "triton"), "need a GPU"),
        (("compile", "--target", "sm_12"), "unknown target"),
        (("compile", "--formats", "bf16"), "write K/V"),
        (("compile", "--formats", "bf16/fp9"), "unknown kernel format"),
        (("compile", "--head-dim", "x"), "write numbers"),
    ],
)
def test_bad_flags_are_one_line(words: tuple[str, ...], message: str) -> None:
    done = command(*words)
    assert_one_line(done, message)


def test_without_triton_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    done = command("compile")
    assert_one_line(done, "pip install 'k16v8[triton]'")
