"""Environment variables on which an engine's numbers may depend: part of a capture's key and of the runtime info.

They are selected by prefix, since engines read far more variables than they document; in doubt a variable counts.
Exceptions are listed below.  Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from fidelab.core import waiting_variables
from fidelab.core.errors import UsageError
from fidelab.engines.base import Engine

NODE_PROCESS = "FIDELAB_NODE_PROCESS"
"""Variable of a worker on a cluster's node: the process of the cluster that has its job."""

# Set by a cluster for a worker: owner of the job, and which of the node's equal devices it got.
_PLACEMENT_VARIABLES = (NODE_PROCESS, "RAY_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Read by all engines: thread pools, BLAS, torch, compilers, drivers, and libraries loaded before others.
_COMMON = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "LD_PRELOAD", "LD_LIBRARY_PATH"),
    *("ATEN_", "TORCH", "PYTORCH_", "TRITON_", "FIDELAB_", "K16V8"),
    *("CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCM_", "ROCR_", "ROCBLAS_", "MIOPEN_"),
)
# Also read by each engine; for an engine that is not listed, variables that begin with its name.
_OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "hf": (
        "TRANSFORMERS_",
        "ACCELERATE_",
        "USE_HUB_KERNELS",
        "DISABLE_KERNEL_MAPPING",
        "LOCAL_KERNELS",
        "FLASH_ATTENTION_",
    ),
    "llamacpp": ("LLAMA_", "GGML_"),
    "vllm": ("VLLM_", "FLASHINFER_", "FLASH_ATTENTION_", "LMCACHE_", "RAY_"),
    "sglang": ("SGLANG_", "SGL_", "FLASHINFER_", "FLASH_ATTENTION_", "LMCACHE_"),
}
# Always set by fidelab to the arm's threads, which are in the key themselves.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Logs, progress bars, usage statistics, folders where something is kept, and how long a thread waits: no number depends
# on them.
_COSMETIC = re.compile(
    r".*(_LOG_LEVEL|_LOGLEVEL|_LOGGING_LEVEL|_LOGGING_PREFIX|_LOGGING_COLOR|_LOGGING_CONFIG_PATH|_CONFIGURE_LOGGING"
    r"|_VERBOSITY|_PROGRESS_BARS?|_USAGE_STATS|_USAGE_SOURCE|_DO_NOT_TRACK|_TELEMETRY"
    r"|_CACHE_DIR|_CACHE_ROOT|_CACHE_PATH|_CONFIG_ROOT)|(FIDELAB|LLAMA|TRANSFORMERS)_CACHE|TORCH_HOME"
    r"|TORCH_LOGS(_OUT)?|TRANSFORMERS_OFFLINE|OPENBLAS_THREAD_TIMEOUT"
)
# Left out altogether: no number depends on a secret, and a hash of a weak secret reveals it.
_SECRET = re.compile(r".*(_KEYS?|_TOKEN|_PASSWORD|_PASSWD|_SECRET|_CREDENTIALS?|API_?KEY.*|ACCESS_KEY.*|SECRET_.*)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # in a URL


def variables_of(engine: type[Engine], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that may change what this engine computes, sorted by name.

    Empty for a server, which has its own environment.  A variable set to the empty string is kept.  Variables
    that a cluster sets for its workers are left out: they identify where an arm ran, not how.
    """
    if engine.is_server:
        return {}
    placed = _PLACEMENT_VARIABLES if NODE_PROCESS in environment else ()
    prefixes = _COMMON + _OF_ENGINE.get(engine.name, (f"{engine.name.upper()}_",))
    return {
        name: _LOGIN.sub("", value)
        for name, value in sorted(environment.items())
        if name.startswith(prefixes)
        and not name.startswith(placed)
        and name not in _THREADS
        and not _COSMETIC.fullmatch(name)
        and not _SECRET.fullmatch(name)
    }


# Variables that fidelab sets for every worker, and what to write instead.
_CONTROLLED = {
    **dict.fromkeys(_THREADS, "pass --threads"),
    **dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"), "name folders with --pythonpath"),
    "CUDA_VISIBLE_DEVICES": "pass --device, or set it for all of fidelab",
    "K16V8": "write the pair as kv=K/V",
    **dict.fromkeys(
        (
            *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "NUMBA_NUM_THREADS"),
            *("FIDELAB_CAPTURE", "FIDELAB_SERVING", "FIDELAB_LOGPROBS"),
        ),
        "the capture needs its own value",
    ),
}


def check_env(names: Iterable[str]) -> None:
    """Refuse variables that an arm must not set.

    Raises:
        UsageError: If fidelab sets this variable, or it is not a valid name.
    """
    for name in names:
        if name in _CONTROLLED:
            raise UsageError(f"env.{name} cannot be set for one configuration: {_CONTROLLED[name]}")
        if _SECRET.fullmatch(name):
            raise UsageError(
                f"env.{name} cannot be set for one configuration: keys and tokens are set for all of fidelab"
            )
        if not _NAME.fullmatch(name):
            raise UsageError(f"env.{name}: that is not a name of an environment variable")


def thread_variables(threads: int) -> dict[str, str]:
    """Return variables that keep a worker to its number of threads, to set on top of its environment."""
    fixed = dict.fromkeys(_THREADS, str(threads)) | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return fixed | waiting_variables(os.environ)
