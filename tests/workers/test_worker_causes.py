"""Causes: known messages of engines are explained, unknown ones are left alone."""

from __future__ import annotations

import signal

import pytest

from fidelab.workers.causes import explain, explain_exit


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "device memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "host memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("no space left on the device while writing x", "disk is full"),
        ("AssertionError: Torch not compiled with CUDA enabled", "--device cpu"),
        ("ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (12)", "lower max_num_seqs"),
        ("ValueError: Requested prompt logprobs of 50, which is greater than max allowed: 20", "max_logprobs"),
        ("ValueError: Free memory on device cuda:0 (3/24 GiB) on startup is less than desired", "still holds"),
        ("ValueError: The checkpoint has model type `new` but Transformers does not recognize this", "upgrade"),
    ],
)
def test_a_known_message_is_explained(line: str, said: str) -> None:
    cause = explain(["starting", line, "traceback ends"])
    assert cause is not None
    assert said in cause


def test_the_last_known_message_counts() -> None:
    assert explain(["No space left on device", "CUDA out of memory"]) == explain(["CUDA out of memory"])


@pytest.mark.parametrize("lines", [[], [""], ["all is well"], ["ValueError: shapes differ"]])
def test_an_unknown_message_has_no_cause(lines: list[str]) -> None:
    assert explain(lines) is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "status 3"),
        (-signal.SIGSEGV, "SIGSEGV"),
        (-signal.SIGKILL, "out-of-memory killer"),
        (-(signal.SIGRTMIN + 3), f"signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_an_exit_is_put_in_words(code: int, said: str) -> None:
    assert said in explain_exit(code)
