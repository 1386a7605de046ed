"""``fidelab serve start`` with the real servers of three engines: each completes, and says what it runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from fidelab.environments.servers import records
from fidelab.models import Model
from tests.real.harness import installed
from tests.run.harness import Done, cli

pytestmark = [pytest.mark.long, pytest.mark.model]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records of this test's own; what it leaves running is ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    for server in records():
        os.killpg(server.pid, signal.SIGKILL)


def words(engine: str) -> list[object]:
    installed(engine)
    return ["smollm2-cpu", "--engine", engine, "--threads", 1, "--device", "cpu"]


@contextmanager
def launched(engine: str, cwd: Path, *changes: str) -> Iterator[dict[str, Any]]:
    """A detached server, and what the command said about it."""
    done = cli("serve", "start", *words(engine), *sets(changes), "--detach", "--json", cwd=cwd)
    assert done.code == 0, done.err
    yield json.loads(done.out)
    assert cli("serve", "stop", cwd=cwd).code == 0
    assert records() == []


def sets(changes: tuple[str, ...]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def check(engine: str, cwd: Path, *changes: str) -> Done:
    return cli("serve", "check", *words(engine), *sets(changes), cwd=cwd)


def completion(url: str) -> str:
    body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.parametrize(
    ("engine", "other", "runs"), [("llamacpp", "q8_0", "f16"), ("vllm", "fp8_e4m3", "auto"), ("sglang", "k16v8", "bf")]
)
def test_a_launched_server_completes_and_its_check_fails_for_another_kv_type(
    smollm2: Model, tmp_path: Path, engine: str, other: str, runs: str
) -> None:
    with launched(engine, tmp_path) as said:
        assert completion(said["server"]["url"]).startswith(" Paris")
        assert said["seconds"] > 0
        found = {one["what"]: one for one in said["findings"]}
        assert found["context"]["declared"] == found["context"]["effective"] == "2048"
        assert "tokens" in found["pool size"]["more"]
        same = check(engine, tmp_path)
        assert same.code == 0, same.err
        differing = check(engine, tmp_path, f"kv={other}")
        assert differing.code == 1
        assert f"KV type: declared {other}, runs {runs}" in differing.err


@pytest.mark.parametrize(("engine", "kv"), [("llamacpp", "f16/q8_0"), ("vllm", "k16v8"), ("sglang", "k16v8")])
def test_a_server_with_a_pair_of_formats_is_recognised(smollm2: Model, tmp_path: Path, engine: str, kv: str) -> None:
    with launched(engine, tmp_path, f"kv={kv}") as said:
        assert said["findings"][0]["effective"] == ("f16/q8_0" if engine == "llamacpp" else "bfloat16/fp8_e4m3")
        assert check(engine, tmp_path).code == 1  # the preset itself has another


def test_vllm_tells_that_it_speculates(smollm2: Model, tmp_path: Path) -> None:
    ngram = 'speculative-config={"method": "ngram", "num_speculative_tokens": 3}'
    done = cli("serve", "start", *words("vllm"), "--set", ngram, "--force", "--detach", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    found = {one["what"]: one for one in json.loads(done.out)["findings"]}
    assert found["speculation"]["effective"] == found["speculation"]["declared"] == "ngram, 3"
    undeclared = check("vllm", tmp_path)
    assert undeclared.code == 1
    assert "speculation: declared none, runs ngram, 3" in undeclared.err


def test_a_server_that_dies_while_it_starts_is_explained(smollm2: Model, tmp_path: Path) -> None:
    done = cli("serve", "start", *words("vllm"), "--set", "max-model-len=99999999", "--force", "--detach", cwd=tmp_path)
    assert done.code == 2
    assert "the server exited with status 1: the context is longer than the model's own" in done.err
    assert records() == []
