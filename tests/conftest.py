"""Fixtures that several rooms share."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
from safetensors.numpy import save_file

import forked
from fidelab.core import cache_dir, waiting_variables
from fidelab.models import Model, pull
from fidelab.run import runner
from fidelab.workers import fork_server, parent
from tests.local_worker import LocalWorker

# Spinning OpenMP threads starve whatever else runs on the machine; read when torch is first imported.
os.environ |= waiting_variables(os.environ)
if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores have tests of their own
    os.environ.setdefault("OMP_NUM_THREADS", "1")

USERS_CACHE = "TESTS_USERS_CACHE"  # variable with the folder that tests of installed engines use

# What runs of tests remember is none of the user's.
_STATE = tempfile.TemporaryDirectory(prefix="fidelab-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name
os.environ["XDG_CONFIG_HOME"] = f"{_STATE.name}/config"

# Nor do engines that a user has installed, and what runs on them took, change a test.  Models are there already, and
# processes side by side share what they find out.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _users, _own = cache_dir(), Path(_STATE.name, "cache")
    _own.mkdir()
    for shared in ("models", "locks"):
        (_users / shared).mkdir(parents=True, exist_ok=True)
        (_own / shared).symlink_to(_users / shared)
    os.environ |= {"FIDELAB_CACHE": str(_own), USERS_CACHE: str(_users)}

# A shell's background job ignores Ctrl-C, and so would all that tests start and stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine examples are drawn and tried slowly, and that says nothing about the code.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

MakeFolder = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that run the language model first: of files side by side, none that is long should begin last."""
    if importlib.util.find_spec("llama_cpp") is None:
        for item in items:
            if item.get_closest_marker("llamacpp"):
                item.add_marker(pytest.mark.skip(reason="llama-cpp-python is not installed"))
    long = {item.path for item in items if item.get_closest_marker("model")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: Python's collector need not walk it again, three million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def whole_lines() -> Iterator[None]:
    """Most tests read whole lines; what a narrow terminal does to them is in tests/cli/test_cli_terminal.py."""
    with mock.patch.dict(os.environ, {"COLUMNS": "2000"}):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_timings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure is not an estimate for the user's runs, and theirs is none for tests."""
    with mock.patch("fidelab.plan.estimate.cache_dir", return_value=tmp_path_factory.mktemp("timings")):
        yield


_by_default, _by_group = runner.spawner, parent._end_group
_processes = False  # whether the test asks for workers that are processes of their own


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test asks for holds for the fixtures of its module, too, which are set up before those of the test."""
    global _processes
    _processes = item.get_closest_marker("processes") is not None


def _spawner(resolved: Any, servers: Any, loads: Any = None) -> Any:
    arm, environment = resolved.arm, resolved.environment
    own = _processes or arm.engine not in ("fake", "hf", "openai") or {"crash", "hang"} & dict(arm.options).keys()
    variables = {} if own else runner._variables(resolved)
    if own or "PYTHONPATH" in variables or environment.image:
        return _by_default(resolved, servers, loads)
    return lambda log: LocalWorker(log, variables)


def _end(process: Any) -> None:
    if isinstance(process, LocalWorker):
        process.end()
    else:
        _by_group(process)


@pytest.fixture(scope="session", autouse=True)
def workers_in_this_process() -> Iterator[None]:
    """Run workers of engines fake, hf and openai in the test's process; tests marked ``processes`` start real ones.

    An arm that crashes or hangs when asked always gets a process of its own, and so does one with shim folders, a
    prefix or an image.
    """
    with mock.patch.object(runner, "spawner", _spawner), mock.patch.object(parent, "_end_group", _end):
        yield


_started = fork_server._started


def _forked(command: Sequence[str], stdin: int, env: Mapping[str, str]) -> Any:
    python, *arguments = command
    if python != sys.executable or arguments[-1:] != ["hf"]:
        return _started(command, stdin, env)
    with Path(os.devnull).open("r+b") as nowhere:
        return forked.start(arguments, env, stdin, nowhere.fileno(), nowhere.fileno(), any_threads=True)


@pytest.fixture(scope="session", autouse=True)
def forked_fork_servers() -> Iterator[None]:
    """Fork servers of engine hf do not import torch and Transformers each."""
    with mock.patch.object(fork_server, "_started", _forked):
        yield


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The embedded model; fetched and converted on first use."""
    return pull("smollm2-135m")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty fidelab cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FIDELAB_CACHE", str(folder))
    return folder


@pytest.fixture
def make_folder(cache: Path) -> MakeFolder:
    """Writes a checkpoint of 320 float32 parameters; keywords change its config, ``None`` drops a key."""

    def make(folder: Path, **changes: Any) -> Path:
        folder.mkdir(parents=True)
        kind: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
        sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        kept = {key: value for key, value in {**kind, **sizes, **heads, **changes}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        table = np.arange(256, dtype=np.float32).reshape(32, 8)
        layer = np.ones((8, 8), dtype=np.float32)
        tensors = {"model.embed_tokens.weight": table, "model.layers.0.self_attn.q_proj.weight": layer}
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make
