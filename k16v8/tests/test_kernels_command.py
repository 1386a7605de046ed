"""``fidelab kernels``: what it prints and how it ends."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner, Result

from fidelab.cli import kernels
from k16v8.errors import NotSupportedError, UsageError
from k16v8.gates import run as gates


def _run(*words: str) -> Result:
    return CliRunner().invoke(kernels.app, list(words))


def test_gates_that_pass_end_with_0_and_a_record_of_versions() -> None:
    done = _run("gate", "--soak", "0", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["kernels"] == "torch"
    assert record["versions"]["torch"] == torch.__version__
    assert record["passed"]
    assert all(gate["passed"] for gate in record["gates"])


def test_a_gate_that_fails_is_named_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "RELATIVE_L2", 1e-4)
    done = _run("gate", "--soak", "0")
    assert done.exit_code == 1
    assert "gate failed: attention, decode k16v8" in done.stderr
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("gate", "--device", "tpu"), UsageError, "there are cpu and cuda"),
        (("gate", "--kernels", "cutlass"), UsageError, "unknown kernel implementation"),
        (("gate", "--kernels", "triton"), NotSupportedError, "need a GPU"),
        (("compile", "--target", "sm_12"), UsageError, "unknown target"),
        (("compile", "--formats", "bf16"), UsageError, "write K/V"),
        (("compile", "--formats", "bf16/fp9"), UsageError, "unknown kernel format"),
        (("compile", "--head-dim", "x"), UsageError, "write numbers"),
    ],
)
def test_bad_flags_are_one_line(words: tuple[str, ...], error: type[Exception], message: str) -> None:
    done = _run(*words)
    assert isinstance(done.exception, error)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_without_triton_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    done = _run("compile")
    assert isinstance(done.exception, NotSupportedError)
    assert "pip install 'fidelab[kernels]'" in str(done.exception)
