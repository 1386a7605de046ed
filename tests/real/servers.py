"""Real servers on free ports of the loopback address, one thread each, ended by their process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.real.harness import installed

HERE = Path(__file__).parent
PATIENCE = 240  # seconds until a server has to answer
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


@contextmanager
def llamacpp_server(gguf: Path, log: Path, **more: object) -> Iterator[str]:
    """The server of llama-cpp-python; it answers one request at a time.  ``more``: flags of its own."""
    python = installed("llamacpp").python
    if subprocess.run([python, "-c", "import llama_cpp.server.app"], capture_output=True, check=False).returncode:
        pytest.skip("engine llamacpp is installed without its server (llama-cpp-python[server])")
    flags: dict[str, object] = {"model": gguf, "model_alias": "served", "n_threads": 1, "n_threads_batch": 1}
    flags |= {"n_ctx": 512, "interrupt_requests": "false", **more}  # else a request ends the one before it
    words = [str(part) for key, value in flags.items() for part in (f"--{key}", value)]
    with serving([python, "-m", "llama_cpp.server", *words], log, {}) as url:
        yield url


@contextmanager
def vllm_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """``vllm serve``, eager and with a small cache."""
    python = installed("vllm").python
    words = ["serve", str(model), "--served-model-name", "served", "--enforce-eager", "--dtype", "bfloat16"]
    words += ["--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "32M"]
    words += ["--no-enable-prefix-caching", *flags]
    own = {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1"}
    with serving([python, str(HERE / "vllm_serve.py"), *words], log, own) as url:
        yield url


@contextmanager
def sglang_server(model: Path, log: Path) -> Iterator[str]:
    """SGLang's server, with import stand-ins for what wants CUDA."""
    environment = installed("sglang")
    words = ["--model-path", str(model), "--served-model-name", "served", "--device", "cpu", "--dtype", "bfloat16"]
    words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"]
    words += ["--disable-cuda-graph", "--mem-fraction-static", "0.1", "--max-total-tokens", "4096"]
    words += ["--disable-radix-cache", "--enable-metrics", "--skip-server-warmup"]
    own = {"SGLANG_USE_CPU_ENGINE": "1", **environment.variables()}
    with serving([environment.python, "-m", "sglang.launch_server", *words], log, own) as url:
        yield url


@contextmanager
def serving(argv: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Start it, wait until it answers, end it and what it started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*argv, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=out,
            env={**os.environ, **QUIET, **variables},
            start_new_session=True,  # its children end with it
        )
    try:
        _wait(process, url, log)
        yield url
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            urlopen(f"{url}/v1/models", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.25)
    raise AssertionError(log.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the group is its own
    except ProcessLookupError:
        pass
    process.wait(20)
