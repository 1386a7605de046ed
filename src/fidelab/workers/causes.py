"""Known messages of engines → likely cause and remedy, so that a failed arm explains itself."""

from __future__ import annotations

import re
import signal

__all__ = ["explain", "explain_exit"]

_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY",
        "out of device memory: use a smaller --n-ctx or batch",
    ),
    (
        r"DefaultCPUAllocator: can't allocate|MemoryError|Cannot allocate memory",
        "out of host memory: free some, or use a smaller --n-ctx",
    ),
    (r"No space left on device|no space left", "the disk is full: free some space, or choose another --output-dir"),
    (r"Torch not compiled with CUDA|No CUDA GPUs are available|no NVIDIA driver", "no usable GPU: pass --device cpu"),
    (
        r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks",
        "hybrid model with the default concurrency: lower max_num_seqs",
    ),
    (
        r"Requested prompt logprobs of \d+, which is greater than max allowed",
        "the engine caps log-probabilities: raise max_logprobs",
    ),
    (r"Free memory on device .* is less than desired", "an earlier process still holds device memory: end it"),
    (r"invalid argument for batch_prefill", "this attention backend rejects the model: choose another one"),
    (
        r"model type .* but Transformers does not recognize",
        "the installed transformers does not know this model: upgrade it",
    ),
)


def explain(lines: list[str]) -> str | None:
    """The cause behind the last known message in a log, or ``None``."""
    for line in reversed(lines):
        for pattern, cause in _CAUSES:
            if re.search(pattern, line, re.IGNORECASE):
                return cause
    return None


def explain_exit(returncode: int) -> str:
    """What an exit status says."""
    if returncode >= 0:
        return f"the worker exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    hint = " (often the kernel's out-of-memory killer)" if -returncode == signal.SIGKILL else ""
    return f"the worker was ended by {name}{hint}"
