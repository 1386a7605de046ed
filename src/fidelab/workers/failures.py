"""Likely causes and remedies for known messages of engines, and the place of a crash."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

_OTHER_BACKEND = "try another one (attention-backend=torch_native, then triton)"
_CAUSES: tuple[tuple[str, str], ...] = (
    # memory and disk
    (
        r"out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY",
        "out of device memory: use a smaller --n-ctx or batch",
    ),
    (
        r"DefaultCPUAllocator: can't allocate|MemoryError|Cannot allocate memory",
        "out of host memory: free some, or use a smaller --n-ctx",
    ),
    (r"No space left on device|no space left", "the disk is full: free some space, or choose another --output-dir"),
    (r"Free memory on device .* is less than desired", "an earlier process still holds device memory: end it"),
    (
        r"No available memory for the cache blocks",
        "no memory is left for the KV cache: raise kv-cache-memory or gpu-memory-utilization",
    ),
    (
        r"larger than the (available KV cache memory|maximum number of tokens that can be stored in KV cache)",
        "the KV cache does not hold one sequence of the model's length: lower max-model-len, or raise kv-cache-memory",
    ),
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "no memory is left for the KV cache: raise mem-fraction-static",
    ),
    (
        r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks",
        "hybrid model with the default concurrency: lower max_num_seqs",
    ),
    # devices and builds
    (r"Torch not compiled with CUDA|No CUDA GPUs are available|no NVIDIA driver", "no usable GPU: pass --device cpu"),
    (
        r"Failed to infer device type",
        "this vLLM finds no device that it is built for: install the build for this machine (fidelab setup install "
        "vllm), or fix the GPU's driver",
    ),
    (
        r"SGLang.*(No module named '(torchvision|sgl_kernel)'|libcuda\.so)",
        "SGLang imports GPU libraries even for CPUs: use the environment of fidelab setup install sglang --cpu",
    ),
    (
        r"libcuda\.so\S* *: cannot open shared object|libcuda\.so\S* (is |was )?not found",
        "this build needs NVIDIA's driver, which is not here: install the build for CPUs (fidelab setup install)",
    ),
    (r"no kernel image is available for execution", "this build has no kernels for this GPU: install one that has"),
    (
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        "the GPU's driver is too old for this build: update the driver",
    ),
    (
        r"module 'aiter' has no attribute",
        "this image's AITER does not fit its engine: repair it, or put a folder with a shim before it (--pythonpath)",
    ),
    (
        r"HSA[ _]?exception|HSA_STATUS_ERROR_EXCEPTION|Memory access fault by GPU",
        f"a kernel of this attention backend faulted on the AMD GPU: {_OTHER_BACKEND}",
    ),
    (
        r"invalid argument for batch_prefill",
        "this attention backend rejects the model: choose another one (attention-backend; it changes what fp8 runs)",
    ),
    (
        r"(Symbol not found|undefined symbol): _?(llama|ggml)_",
        "program and library of llama.cpp are of different builds: install both from one, or unset LLAMA_CPP_LIB_PATH",
    ),
    # models and their files
    (
        r"model type .* but Transformers does not recognize",
        "the installed transformers does not know this model: upgrade it",
    ),
    (
        r"OfflineModeIsEnabled|LocalEntryNotFoundError|couldn't connect to .?http",
        "the model lies on a hub that is out of reach: fetch it where there is a network (fidelab setup fetch)",
    ),
    (r"gated repo|GatedRepoError", "the model is gated: accept its owner's terms on the hub, and set HF_TOKEN"),
    (
        r"No module named '?flash_attn",
        "the model's vision tower wants flash-attn: install it there, or take a text-only model",
    ),
    (
        r"KeyError: .*experts\.w(13|2|1|3)_",
        "the fused expert layers ignore which layers the checkpoint leaves unquantized: use a newer engine",
    ),
    (
        r"filled by no checkpoint tensor|(100 ?%|\ball)( [\w-]+){0,4} NaN",
        "layers were left unloaded: the engine does not know them, or not in this weight format; use a newer engine",
    ),
    (
        r"unknown model architecture",
        "this llama.cpp does not know the model's architecture: use a newer one (fidelab setup install llamacpp)",
    ),
    (
        r"invalid magic characters|GGUF file is version \d+|invalid ggml type",
        "this is not a GGUF file, or of a version or a type that this llama.cpp does not read: use a newer one",
    ),
    (
        r"not within the file bounds|wrong number of tensors|missing tensor '",
        "the GGUF file is damaged or incomplete: fetch it again",
    ),
    # engines' own limits
    (
        r"greater than the derived max_model_len|longer than the derived (context )?length",
        "the context is longer than the model's own: lower max-model-len or context-length",
    ),
    (
        r"error: (unrecognized arguments|invalid argument)|unknown argument|error: argument --",
        "the server does not take one of its options: look for its name in the line, and correct the configuration",
    ),
    (
        r"No module named '(fastapi|uvicorn|sse_starlette|starlette_context|pydantic_settings)'",
        "the engine is installed without its server's packages: pip install 'llama-cpp-python[server]' there",
    ),
    (
        r"CPU FP8 KV cache requires Intel AMX",
        "SGLang's FP8 cache wants AMX on CPUs, and a build with kernels for it: use auto or bfloat16",
    ),
    (
        r"parameters were filled by no checkpoint tensor",
        "the checkpoint and the engine's model differ: use a newer engine, or look at the names of its tensors",
    ),
    (
        r"Requested prompt logprobs of \d+, which is greater than max allowed",
        "the engine caps log-probabilities: raise max_logprobs, or use the engine in fidelab's own worker",
    ),
    (
        r"Address already in use|Errno 98\b|port \d+ is (already )?(in use|taken|occupied)",
        "the port is taken: end the program that listens there, or choose another one",
    ),
)
# Messages that engines add to every failure: used where no specific one matches.
_GENERAL: tuple[tuple[str, str], ...] = (
    (
        r"failed to load model|error loading model",
        "llama.cpp cannot load the file: look for the first error in the log",
    ),
)


_BARE_ASSERTION = re.compile(r"(^|[\s.])AssertionError:?\s*$")
_ENGINE_FRAME = re.compile(r"\b(sglang|vllm)/\S*\.py|attention", re.IGNORECASE)


def explain(lines: list[str]) -> str | None:
    """Return the likely cause by the last known message in a log, or ``None``."""
    for table in (_CAUSES, _GENERAL):
        for line in reversed(lines):
            for pattern, cause in table:
                if re.search(pattern, line, re.IGNORECASE):
                    return cause
    # SGLang's check of attention on Blackwell ends so, without a message
    if any(map(_BARE_ASSERTION.search, lines)) and any(map(_ENGINE_FRAME.search, lines)):
        return f"a check of the engine failed; on Blackwell often that of the attention backend: {_OTHER_BACKEND}"
    return None


def explain_exit(returncode: int, dump: Sequence[str] = ()) -> str:
    """Describe an exit status and the place of a crash.

    Args:
        returncode: as in ``subprocess``: negative for a signal.
        dump: faulthandler's text (see :func:`split_dump`), which names the Python function.
    """
    if returncode >= 0:
        return f"the worker exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    hint = " (often the kernel's out-of-memory killer)" if -returncode == getattr(signal, "SIGKILL", 9) else ""
    place = _python_function(dump)
    where = f" in {place}" if place else ""
    return f"the worker was ended by {name}{hint}{where}"


# ------------------------------------------------------------------------------------------------------------ crashes

_DUMP = "Fatal Python error: "
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WRONG_CODE = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE)


def crashed_in_code(returncode: int) -> bool:
    """Whether a fault in machine code ended the process. Its log then does not hold the cause."""
    return -returncode in _WRONG_CODE


def split_dump(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a log from faulthandler's text at its end after a crash."""
    at = next((i for i, line in enumerate(lines) if line.startswith(_DUMP)), len(lines))
    return list(lines[:at]), list(lines[at:])


def _python_function(dump: Sequence[str]) -> str | None:
    """The innermost Python function of the crashed thread, or of the main thread if that has none."""
    begins = [i for i, line in enumerate(dump) if line.startswith(("Current thread ", "Thread "))]
    current = [i for i in begins if dump[i].startswith("Current")]
    for line in dump[(current or begins[-1:] or [0])[0] :]:
        if match := _FRAME.match(line):
            parts = Path(match["file"]).parts[-2:]
            return f"{match['function']} ({'/'.join(parts)}, line {match['line']})"
    return None
