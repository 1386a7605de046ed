"""``fidelab serve start``, ``stop`` and ``presets``, with a small real server in place of llama.cpp's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from fidelab.engines.base import Support
from fidelab.engines.fake import FakeEngine
from fidelab.environments import launch
from fidelab.environments.servers import records
from tests.models.tiny_gguf import write_gguf
from tests.processes import alive, until
from tests.run.harness import Done, cli, refused, write_inputs

SERVER = Path(__file__).parents[1] / "environments" / "small_llama_server.py"
DEADLINE = 60.0  # seconds: a guard against hangs


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of the user's own, and a ``llama-server`` on PATH; what a test leaves running is ended."""
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SERVER}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    for server in records():
        os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Path]:
    """Writes a preset into the user's folder, or into another one."""

    def write(name: str = "mine", folder: Path | None = None, **changes: Any) -> Path:
        model = write_gguf(tmp_path / "model.gguf")
        data = {
            "about": "a preset of a test",
            "engine": {"name": "llamacpp", "python": sys.executable},
            "model": str(model),
            "kv": "q8_0",
            "engine_args": {"flash-attn": "on"},
            "serve": {"n-ctx": 1024},
            **changes,
        }
        path = (folder or tmp_path / "config" / "fidelab" / "presets") / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(data))
        return path

    return write


@pytest.fixture
def mine(own: Callable[..., Path]) -> Path:
    """The preset ``mine``, of a small llama-server."""
    return own()


def launched(tmp_path: Path, *words: object) -> Done:
    return cli("serve", "start", "mine", "--force", "--detach", *words, cwd=tmp_path)


def url_of(done: Done) -> str:
    return str(json.loads(done.out)["server"]["url"])


def gone(pid: int) -> bool:
    """Whether a process ends soon."""
    return until(lambda: not alive(pid), DEADLINE)


def test_a_detached_server_goes_on_answering_and_each_declared_setting_is_compared_with_what_runs(
    tmp_path: Path, mine: Path
) -> None:
    done = launched(tmp_path, "--json")
    assert done.code == 0, done.err
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 2}).encode()
    request = Request(f"{url_of(done)}/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as answer:
        assert json.load(answer)["choices"][0]["text"] == " Paris."
    found = {one["what"]: one for one in json.loads(done.out)["findings"]}
    shown = {what: (one["declared"], one["effective"], one["differs"]) for what, one in found.items()}
    assert shown["KV type"] == ("q8_0", "q8_0", False)
    assert shown["context"] == ("1024", "1024", False)
    assert shown["attention backend"] == ("on", "enabled", False)
    assert found["pool size"]["more"] == "1,024 tokens"


def test_a_server_with_another_kv_type_is_ended_and_the_difference_said(
    tmp_path: Path, own: Callable[..., Path]
) -> None:
    own(env={"SMALL_KV": "f16", "SMALL_CHILD": str(tmp_path / "child")})
    done = launched(tmp_path)
    assert done.code == 1
    assert "KV type: declared q8_0, runs f16" in done.err
    assert records() == []
    assert gone(int((tmp_path / "child").read_text()))


def test_a_server_that_dies_while_it_starts_or_never_answers_is_ended_with_its_cause(
    tmp_path: Path, own: Callable[..., Path]
) -> None:
    own(env={"SMALL_DIES": "error: CUDA_ERROR_OUT_OF_MEMORY in ggml"})
    done = launched(tmp_path)
    assert done.code == 2
    assert "the server exited with status 1: out of device memory" in done.err
    assert "  | error: CUDA_ERROR_OUT_OF_MEMORY in ggml\n" in done.err
    assert records() == []
    own(env={"SMALL_DEAF": "1", "SMALL_CHILD": str(tmp_path / "child")})
    done = launched(tmp_path, "--timeout", "3")
    assert done.code == 2
    assert "the server did not answer within 3 s" in done.err
    assert gone(int((tmp_path / "child").read_text()))


def test_a_server_that_answers_as_another_model_is_ended_and_its_name_said(
    tmp_path: Path, own: Callable[..., Path]
) -> None:
    own(env={"SMALL_ANSWERS_AS": "other", "SMALL_CHILD": str(tmp_path / "child")})
    done = launched(tmp_path)
    assert done.code == 2
    assert "the server answered as model other, not as " in done.err
    assert records() == []
    assert gone(int((tmp_path / "child").read_text()))


@contextmanager
def in_foreground(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``fidelab serve start mine``, whose server answers."""
    script = "import sys; sys.argv[0] = 'fidelab'; from fidelab.cli import main; main()"
    command = [sys.executable, "-c", script, "serve", "start", "mine", "--force"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            assert any("answers at" in line for line in process.stdout)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_command_ends_its_server(tmp_path: Path, own: Callable[..., Path], number: int) -> None:
    own(env={"SMALL_CHILD": str(tmp_path / "child")})
    with in_foreground(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(DEADLINE) == (130 if number == signal.SIGINT else 128 + number)
    assert gone(int((tmp_path / "child").read_text()))
    assert records() == []


def test_a_server_that_ends_later_is_a_fault(tmp_path: Path, mine: Path) -> None:
    with in_foreground(tmp_path) as process:
        os.kill(records()[0].pid, signal.SIGKILL)
        assert process.wait(DEADLINE) == 1
        assert process.stderr is not None
        assert "fidelab: the server was ended by SIGKILL" in process.stderr.read()
    assert records() == []


def test_the_first_start_is_told_from_later_ones(tmp_path: Path, mine: Path) -> None:
    first = launched(tmp_path)
    cli("serve", "stop", cwd=tmp_path)
    second = launched(tmp_path)
    assert "(first start)" in first.out
    assert "the first start of this command here, which may compile" in first.err
    assert "(start 2 of this command)" in second.out
    assert "earlier starts took" in second.err


def test_a_dry_run_prints_the_command_as_the_preset_and_flags_say_and_starts_nothing(
    tmp_path: Path, mine: Path
) -> None:
    done = cli("serve", "start", "mine", "--dry-run", "--port", "18999", cwd=tmp_path)
    assert (done.code, done.out.startswith("llama-server --model ")) == (0, True)
    assert "--flash-attn on --ctx-size 1024" in done.out
    assert "--cache-type-k q8_0 --cache-type-v q8_0 --host 127.0.0.1 --port 18999" in done.out
    changes = ("--set", "kv=f16", "--set", "n-ctx=64", "--set", "n-batch=32", "--set", "serve.parallel=2")
    done = cli("serve", "start", "mine", "--dry-run", *changes, cwd=tmp_path)
    assert done.code == 0, done.err
    shown = done.out.splitlines()[0]
    flags = ("--cache-type-k f16", "--ctx-size 64", "--batch-size 32", "--parallel 2", "--flash-attn on")
    assert [shown.count(flag) for flag in flags] == [1] * len(flags)
    assert not (tmp_path / "state").exists()


def test_variables_of_llama_server_in_a_preset_are_the_settings_that_they_mean(
    tmp_path: Path, own: Callable[..., Path]
) -> None:
    env = {"LLAMA_ARG_N_CPU_MOE": 20, "LLAMA_ARG_THREADS_HTTP": "2", "LLAMA_ARG_CACHE_TYPE_K": "q8_0", "A": "1"}
    own(kv=None, env={**env, "LLAMA_ARG_CACHE_TYPE_V": "q8_0"})
    done = cli("serve", "start", "mine", "--dry-run", cwd=tmp_path)
    assert done.code == 0, done.err
    shown = done.out.splitlines()[0]
    assert shown.startswith("A=1 llama-server")
    flags = ("--cache-type-k q8_0 --cache-type-v q8_0", "--n-cpu-moe 20", "--threads-http 2")
    assert [shown.count(flag) for flag in (*flags, "LLAMA_ARG")] == [1, 1, 1, 0]
    own(env=env)  # keys and values of q8_0
    assert "kv is q8_0, and a variable in env says q8_0/f16" in refused(
        cli("serve", "start", "mine", "--dry-run", cwd=tmp_path)
    )


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpu_files", list)


@pytest.mark.usefixtures("without_gpus")
def test_a_preset_for_gpus_shows_its_command_for_gpus_on_a_machine_without(tmp_path: Path) -> None:
    for words in (("serve", "show", "gemma4-31b"), ("serve", "start", "gemma4-31b", "--dry-run")):
        done = cli(*words, cwd=tmp_path)
        assert (done.code, "SGLANG_USE_CPU_ENGINE" in done.out) == (0, False), done.err
        assert "--attention-backend torch_native --context-length 8192 --tp-size 2 --dtype bfloat16" in done.out
        assert "--device cuda" in done.out
    assert "# not here: it needs a GPU, and this machine has none" in done.out


@pytest.mark.usefixtures("without_gpus")
def test_a_preset_for_gpus_is_refused_on_a_machine_without(tmp_path: Path) -> None:
    line = refused(cli("serve", "start", "gemma4-31b", cwd=tmp_path))
    assert "gemma4-31b cannot run here: it needs a GPU, and this machine has none" in line


def test_a_dry_run_needs_no_engine(tmp_path: Path, own: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own(engine="sglang", model="owner/model", kv="auto", engine_args={}, serve={})
    done = cli("serve", "start", "mine", "--dry-run", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    planned = json.loads(done.out)
    assert "python -m sglang.launch_server --model-path owner/model" in planned["shown"]
    assert planned["missing"].startswith("engine sglang is not installed: ")
    assert "engine sglang is not installed" in refused(cli("serve", "start", "mine", cwd=tmp_path))


def test_a_server_that_its_engine_does_not_support_is_refused(
    tmp_path: Path, own: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(engine="fake", model="fake", kv="exact", engine_args={}, serve={})
    monkeypatch.setattr(FakeEngine, "serve_command", classmethod(lambda cls, arm, host, port: ["fake"]))
    monkeypatch.setattr(FakeEngine, "supports", classmethod(lambda cls, arm: Support(False, "no such cache here")))
    line = refused(cli("serve", "start", "mine", cwd=tmp_path))
    assert "mine cannot run here: no such cache here" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "kv"), "write KEY=VALUE"),
        (("--set", "kv=q8_0/q4_0", "--set", "flash-attn=off"), "V = q4_0 needs flash attention: omit flash-attn=off"),
        (("--set", "engine=vllm"), "another engine by --engine"),
        (("--set", "dtype=int3"), "dtype: Input should be"),
        (("--engine", "vllm"), "--engine vllm: preset mine is of engine llamacpp"),
        (("--port", "70000"), "--port 70000: ports go to 65535"),
        (("--host", "no.such.host.invalid"), "--host no.such.host.invalid: "),
        (("--set", "model=./nowhere.gguf"), "nowhere.gguf is not a file here"),
        (("devstrall",), "unknown preset 'devstrall'; did you mean 'devstral'?"),
    ],
)
def test_what_cannot_be_launched_is_said_in_one_line(
    tmp_path: Path, mine: Path, words: tuple[str, ...], message: str
) -> None:
    name = () if words[0] == "devstrall" else ("mine",)
    assert message in refused(cli("serve", "start", *name, "--dry-run", *words, cwd=tmp_path))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("hf", "engine hf has no server of its own: vllm, sglang and llamacpp have one"),
        ("openai", "engine openai is for servers that run: give the address of one with"),
        ("{name: vllm, image: 'x:1'}", "image x:1: fidelab starts servers of installed engines"),
    ],
)
def test_a_preset_whose_server_cannot_be_started_is_refused(tmp_path: Path, engine: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(f"model: owner/model\nengine: {engine}\n")
    done = cli("serve", "start", "./p.yaml", "--trust", "p.yaml", cwd=tmp_path)
    assert (done.code, message in done.err) == (2, True), done.err


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path, mine: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launched(tmp_path, "--port", port)
    assert done.code == 2
    assert f"--port {port}: Address already in use; name another" in done.err
    assert not (tmp_path / "state").exists()


def test_presets_check_fails_where_a_running_server_differs(tmp_path: Path, mine: Path) -> None:
    url = url_of(launched(tmp_path, "--json"))
    same = cli("serve", "check", "mine", cwd=tmp_path)
    other = cli("serve", "check", "mine", "--set", "kv=f16", cwd=tmp_path)
    log = next((tmp_path / "state").rglob("*.log"))
    remote = cli("serve", "check", "mine", "--base-url", url, "--log", log, "--set", "n-batch=64", cwd=tmp_path)
    assert same.code == 0, same.err
    assert (other.code, other.err) == (1, "fidelab: KV type: declared f16, runs q8_0\n")
    assert (remote.code, remote.err) == (1, "fidelab: n-batch: declared 64, runs 512\n")


def test_presets_check_claims_nothing_where_a_server_does_not_tell_or_is_of_another_engine(
    tmp_path: Path, mine: Path
) -> None:
    url = url_of(launched(tmp_path, "--json"))
    done = cli("serve", "check", "mine", "--base-url", url, cwd=tmp_path)
    assert done.code == 3
    assert "KV type: the server does not report it; --log names its output" in done.err
    other = cli("serve", "check", "smollm2-cpu-vllm", "--base-url", url, cwd=tmp_path)
    assert f"{url} is not a server of engine vllm: look what listens there" in refused(other)


def test_stop_ends_the_whole_group(tmp_path: Path, own: Callable[..., Path]) -> None:
    own(env={"SMALL_CHILD": str(tmp_path / "child")})
    launched(tmp_path)
    (server,) = records()
    done = cli("serve", "stop", cwd=tmp_path)
    assert done.out.startswith(f"mine ended (process {server.pid}")
    assert gone(server.pid)
    assert gone(int((tmp_path / "child").read_text()))
    assert cli("serve", "stop", cwd=tmp_path).out == "no server runs that fidelab started\n"


def test_stop_leaves_another_process_with_the_recorded_pid_alone(tmp_path: Path, mine: Path) -> None:
    launched(tmp_path)
    (file,) = (tmp_path / "state").rglob("mine.json")
    record = json.loads(file.read_text())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as bystander:
        file.write_text(json.dumps({**record, "pid": bystander.pid}))
        done = cli("serve", "stop", cwd=tmp_path)
        assert done.out == "no server runs that fidelab started\n"
        assert bystander.poll() is None
        bystander.kill()
    os.killpg(record["pid"], signal.SIGKILL)


def test_stop_asks_which_of_several(tmp_path: Path, mine: Path) -> None:
    launched(tmp_path)
    launched(tmp_path)
    assert "several servers run: name one of mine, mine-2, or pass --all" in refused(cli("serve", "stop", cwd=tmp_path))
    assert cli("serve", "stop", "mine-2", cwd=tmp_path).out.startswith("mine-2 ended")
    wrong = cli("serve", "stop", "mine-2", cwd=tmp_path)
    assert (wrong.code, "unknown running server 'mine-2'" in wrong.err) == (2, True)
    assert cli("serve", "stop", "--all", cwd=tmp_path).out.startswith("mine ended")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"env": {"LD_PRELOAD": "x.so"}}, "env.LD_PRELOAD 'x.so' is a variable that would be set"),
        ({"engine": {"name": "vllm", "python": "./python"}}, "python './python' is a program"),
        ({"serve": {"tool-parser-plugin": "parser.py"}}, "tool-parser-plugin 'parser.py' is an option that may load"),
    ],
)
def test_a_strangers_preset_is_shown_and_asked_for(
    tmp_path: Path, own: Callable[..., Path], changes: dict[str, Any], shown: str
) -> None:
    changes = {"engine": "llamacpp", **changes}
    file = own("foreign", tmp_path / "elsewhere", **changes)
    compare = ("compare", "--preset", file, "--kv", "x")
    for words in (("serve", "start", file, "--dry-run"), ("serve", "show", file), compare):
        line = refused(cli(*words, cwd=tmp_path))
        assert shown in line
        assert f"add --trust {file}" in line


def test_a_trusted_preset_is_remembered(tmp_path: Path, own: Callable[..., Path]) -> None:
    file = own("foreign", tmp_path / "elsewhere", env={"A": "1"}, engine="llamacpp")
    words = ("serve", "show", file)
    assert cli(*words, "--trust", file, cwd=tmp_path).code == 0
    assert cli(*words, cwd=tmp_path).code == 0
    own("foreign", tmp_path / "elsewhere", env={"A": "2"}, engine="llamacpp")
    assert cli(*words, cwd=tmp_path).code == 2
    own(env={"A": "1"}, engine="llamacpp")  # one's own, which is not asked for
    assert cli("serve", "show", "mine", cwd=tmp_path).code == 0


def compared(tmp_path: Path, *words: object) -> tuple[Done, dict[str, Any]]:
    """A small comparison from preset ``mine``, and its resolved settings."""
    write_inputs(tmp_path)
    sizes = ("--axes", "kld", "--windows", 4, "--n-ctx", 16, "--text", "text.txt", "--control", "none", "--no-floor")
    done = cli("compare", *words, "--preset", "mine", "--kv", "tilt", *sizes, cwd=tmp_path)
    assert done.code == 0, done.err
    return done, yaml.safe_load((done.folder / "config.resolved.yaml").read_text())


def test_a_comparison_and_a_bench_begin_from_a_preset(tmp_path: Path, own: Callable[..., Path]) -> None:
    own(engine="fake", model="fake", kv="exact", engine_args={}, serve={"chat-template": "chatml"}, env={"A": "1"})
    done, resolved = compared(tmp_path)
    assert (resolved["model"], resolved["engine"], resolved["env"]) == ("fake", "fake", {"A": "1"})
    assert (done.arm("reference")["name"], done.arm("reference")["kv"]["k"]) == ("mine", "exact")
    assert "preset" not in resolved["reference"]
    small = ("--benches", "decode", "--depths", 0, "--decode-tokens", 2, "--repeats", 1)
    done = cli("bench", "--preset", "mine", *small, cwd=tmp_path)
    assert done.report["reference"]["name"] == "mine", done.err


def test_what_the_command_line_says_goes_before_the_preset(tmp_path: Path, own: Callable[..., Path]) -> None:
    own(engine="fake", model="other", kv="tilt", engine_args={}, serve={})
    _, resolved = compared(tmp_path, "fake", "--reference", "exact")
    assert (resolved["model"], resolved["reference"]["kv"]) == ("fake", "exact")
    other = cli("compare", "--preset", "mine", "--engine", "vllm", "--kv", "tilt", cwd=tmp_path)
    assert "--engine vllm: preset mine is of engine fake" in refused(other)


def test_presets_list_has_ones_own_beside_those_of_the_package_and_a_broken_one_hides_no_others(
    tmp_path: Path, mine: Path, own: Callable[..., Path]
) -> None:
    rows = {row["name"]: row for row in json.loads(cli("serve", "presets", "--json", cwd=tmp_path).out)["presets"]}
    assert rows["mine"]["whose"] == "yours"
    lab = {"devstral", "coder-30b", "coder-next", "coder-next-ream", "gemma4", "gemma4-31b", "qwen35", "qwen35-moe"}
    assert lab <= rows.keys()
    assert {f"smollm2-cpu-{engine}" for engine in ("llamacpp", "sglang", "vllm")} <= rows.keys()
    own("broken", kvv="q8_0")
    done = cli("serve", "presets", cwd=tmp_path)
    assert done.code == 1
    assert "unknown key 'kvv'; did you mean 'kv'?" in done.err
    assert "devstral" in done.out
