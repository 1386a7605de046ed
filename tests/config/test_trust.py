"""A settings file from somebody else starts nothing, sends nothing and reads nothing elsewhere before it is trusted."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.config.experiment import validate
from fidelab.config.schema import Experiment
from fidelab.config.trust import Trust, check_trust, demands
from fidelab.core.errors import UsageError
from fidelab.engines import ENGINES
from fidelab.engines.harmless import table
from fidelab.engines.openai.http import read_key
from tests.engines.openai_server import Served, save_model, serving
from tests.run.harness import Done, cli

SIZES = {"kld": {"windows": 1, "n_ctx": 16}}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is trusted yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "fidelab" / "trusted-files"


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with a command and a shim that leave a mark when they run."""
    folder = tmp_path / "room"
    (folder / "shims").mkdir(parents=True)
    mark = folder / "mark"
    (folder / "shims" / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (folder / "python").write_text(f'#!/bin/sh\ntouch "{mark}"\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    (folder / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(60)))
    return folder


def write(folder: Path, **changes: Any) -> Path:
    """An experiment on the fake engine, in a file."""
    data: dict[str, Any] = {"model": "fake", "engine": "fake", "reference": "exact", "candidates": ["tilt"]}
    data |= {"axes": SIZES, "control": "none", "floor": 0, "twins": 0, "text": "text.txt", **changes}
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def fake(**where: Any) -> dict[str, Any]:
    return {"name": "fake", **where}


PYTHON = {"python": "./python"}
LINE = "kv=tilt,engine=fake,python=./python"
PROGRAMS: dict[str, dict[str, Any]] = {
    "python": {"engine": fake(**PYTHON)},
    "pythonpath": {"engine": fake(pythonpath=["shims"])},
    "of-the-reference": {"reference": {"kv": "exact", "engine": fake(**PYTHON)}},
    "of-the-control": {"control": {"kv": "tilt[q=0.51]", "engine": fake(**PYTHON)}},
    "of-a-candidate": {"candidates": ["tilt[q=0.7]", {"kv": "tilt", "engine": fake(**PYTHON)}]},
    "in-one-line": {"candidates": [LINE]},
    "of-a-cross-engine": {"kind": "cross-engine", "engines": [{"engine": fake(**PYTHON), "candidate": "tilt"}]},
}
CROSS = ("model", "axes", "floor", "text", "kind", "engines")


def refused(done: Done, *said: str) -> str:
    """The one line of a command that was refused."""
    assert (done.code, done.out) == (2, ""), done
    [line] = done.err.splitlines()
    assert all(words in line for words in said), line
    return line


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["run", "dry-run"])
@pytest.mark.parametrize("where", PROGRAMS)
def test_a_program_of_a_file_is_named_and_not_started(where: str, flags: tuple[str, ...], room: Path) -> None:
    file = write(room, **PROGRAMS[where])
    if "kind" in PROGRAMS[where]:
        data = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({key: data[key] for key in CROSS}))
    before = sorted(room.rglob("*"))
    line = refused(
        cli("compare", "-f", "experiment.yaml", *flags, cwd=room), "--trust experiment.yaml", "Nothing was run"
    )
    assert any(words in line for words in ("python './python'", "pythonpath 'shims'"))
    assert sorted(room.rglob("*")) == before


HF = {"model": "smollm2-135m", "engine": "hf", "reference": "f32"}
ASKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({**HF, "candidates": ["kv=f32,attention=evil/kernel"]}, ("attention 'evil/kernel' is code of a hub",)),
    ({"serve": {"wrapper": ["docker", "run", "-v", "/:/host", "evil"], "words": ["--port", "1"]}},
     ("docker run -v /:/host evil", "would appear in the commands")),
    ({"executor": {"name": "ray", "address": "head.example:6379"}}, ("address 'head.example:6379'", "is a cluster")),
    *(({"executor": {"name": "ray", "address": address}}, ("executor.address",))
      for address in ("a\nb:1", "head 1:2", "$(x):1", "http://x:1", "head")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), ASKED)
def test_code_of_a_hub_commands_of_a_report_and_clusters_are_asked_for_and_an_address_is_a_host_and_a_port(
    change: dict[str, Any], said: tuple[str, ...], room: Path
) -> None:
    refused(cli("compare", "-f", write(room, **change), "--dry-run", cwd=room), *said)


def test_trust_lets_a_file_run_and_is_remembered(room: Path, memory: Path) -> None:
    file = write(room, engine=fake(**PYTHON))
    first = cli("compare", "-f", file, "--trust", file, cwd=room)
    assert first.code == 0, first.err
    assert (room / "mark").exists()
    assert str(file) in memory.read_text()
    assert cli("compare", "-f", file, "--set", "axes.kld.windows=2", cwd=room).code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [({"seed": 7}, "python './python'"), ({"engine": fake(python="./other")}, "python './other'")],
    ids=["anything", "the-command"],
)
def test_a_trusted_file_that_was_changed_is_asked_for_again(change: dict[str, Any], said: str, room: Path) -> None:
    assert cli("compare", "-f", write(room, engine=fake(**PYTHON)), "--dry-run", "--trust", room, cwd=room).code == 0
    refused(cli("compare", "-f", write(room, **{"engine": fake(**PYTHON), **change}), "--dry-run", cwd=room), said)


def test_trust_of_relative_words_holds_for_the_programs_they_named(room: Path, tmp_path: Path) -> None:
    for words in ({"pythonpath": ["shims"]}, PYTHON):
        file = write(room, engine=fake(**words))
        assert cli("compare", "-f", file, "--dry-run", "--trust", file, cwd=room).code == 0
    other = tmp_path / "other"
    shutil.copytree(room, other)
    refused(cli("compare", "-f", "experiment.yaml", "--dry-run", cwd=other), "python './python'")


def test_another_file_that_is_trusted_does_not_help(room: Path) -> None:
    (room / "mine.yaml").write_text("model: fake")
    refused(
        cli("compare", "-f", write(room, engine=fake(**PYTHON)), "--trust", "mine.yaml", cwd=room), "python './python'"
    )


def test_words_given_as_flags_are_not_asked_for(room: Path) -> None:
    flags = ("--set", "engine.python=./python")
    for words in (PYTHON, {}):
        assert cli("compare", "-f", write(room, engine=fake(**words)), "--dry-run", *flags, cwd=room).code == 0
    line = write(room, candidates=[LINE])
    assert cli("compare", "-f", line, "--dry-run", "--set", f"candidates=['{LINE}']", cwd=room).code == 0


_CLASS = '{"method": "custom_class", "model": "evil.X", "num_speculative_tokens": 2}'
UNLISTED = [
    ("compilation-config", '{"custom_ops": ["evil.op"]}'),
    ("ec-transfer-config", '{"ec_connector_module_path": "evil.module"}'),
    ("structured-outputs-config", '{"backend": "evil/module"}'),
    ("hicache-storage-backend-extra-config", '{"module": "evil"}'),
    ("load-format", "evil_plugin"),
    ("trust-remote-code", "yes"),
    ("tool-parser-plugin", "parser.py"),
    ("base-url", "http://other.example/v1"),
    ("speculative-config", _CLASS),
    ("speculative-config", '{"model": "evil.X", "num_speculative_tokens": 2}'),  # vLLM reads that as a class
    ("speculative-config", '{"method": "ngram", "model": "evil.X"}'),
    ("speculative-config", '{"method": ["ngram"], "num_speculative_tokens": 2}'),
    ("speculative-config", '{"method": "draft_model", "model": "/elsewhere/model"}'),
    ("speculative-config", '{"method": "draft_model", "draft_load_config": {"load_format": "evil"}}'),
    ("speculative-config.method", "custom_class"),
    ("attention-backend", "evil.Backend"),
    ("quantization", "evil/format"),
    *((name, "134744072") for name in ("data-parallel-address", "master-addr", "kv-ip", "nccl-port", "rpc-port")),
    *(("host", value) for value in ("0", "134744072", "::")),
    ("enable-anything", "1"),
    ("enable-anything", "no"),
    ("ssl-verify", "off"),
    ("any-new-one", "word"),
    ("any-new-one", "3"),
    ("trust_remote_code", "1"),
    ("hf-overrides", '{"trust_remote_code": 1}'),
    ("allow-code", "2"),
    ("max-model-len", "-1"),
    ("max-model-len", "1e9"),
    ("max-num-seqs", "true"),
    ("max-num-seqs", "4\n"),
    ("max-num-seqs", '{"a": 1}'),
    ("gpu-memory-utilization", "2"),
]


@pytest.mark.parametrize(("key", "value"), UNLISTED)
def test_an_option_that_is_not_known_to_be_harmless_is_asked_for(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "parser.py").write_text("")  # beside the file, as whoever sent it would have it
    asked = demands(settings_with({key: value}))
    assert [(demand.key, demand.value) for demand in asked] == [(key.replace("_", "-"), value)]


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        *(("vllm", "max-model-len", "32768"), ("vllm", "max-model-len", "32k"), ("vllm", "kv-cache-memory", "4G")),
        *(("vllm", "attention-backend", "TRITON_ATTN"), ("vllm", "cudagraph-capture-sizes", "[1, 2, 4]")),
        *(("hf", "weights", "int4[group=64]"), ("hf", "attn-implementation", "sdpa"), ("hf", "attention", "sdpa")),
        ("openai", "base-url", "http://127.0.0.1:8001/v1"),
        ("vllm", "speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'),
        ("vllm", "speculative-config", '{"method": "eagle3", "model": "owner/some.head", "num_speculative_tokens": 3}'),
        *(("sglang", "chunked-prefill-size", "-1"), ("sglang", "speculative-algorithm", "eagle3")),
        *(("llamacpp", "ngl", "-1"), ("llamacpp", "flash-attn", "auto"), ("llamacpp", "rope-freq-scale", "0.25")),
    ],
)
def test_what_an_engines_table_lists_passes_unasked(engine: str, key: str, value: str) -> None:
    assert demands(settings_with({key: value}, engine)) == []


def test_what_passes_on_one_engine_is_asked_for_on_another() -> None:
    assert demands(settings_with({"context-length": "4096"}, "sglang")) == []
    assert [demand.key for demand in demands(settings_with({"context-length": "4096"}, "vllm"))] == ["context-length"]


def settings_with(options: dict[str, str], engine: str = "vllm") -> Experiment:
    arms = {"reference": "auto", "candidates": ["fp8_e4m3"]}
    return validate({"model": "fake", "engine": engine, "engine_args": options, "axes": SIZES, **arms}, "test")


def test_the_guide_shows_each_engines_table_of_harmless_options() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
    for name in ("hf", "llamacpp", "sglang", "vllm", "openai"):
        assert "\n".join(table(ENGINES.load(name).harmless)) in guide


@pytest.mark.parametrize("key", ["output_dir", "captures_dir"])
def test_a_folder_elsewhere_is_not_written_to_unasked(key: str, room: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    refused(cli("compare", "-f", write(room, **{key: str(elsewhere)}), cwd=room), f"{key} ", "would be written to")
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("LD_PRELOAD=./evil.so vllm serve smollm2-135m", "env.LD_PRELOAD './evil.so'"),
        ("docker run evil/image vllm serve smollm2-135m", "image 'evil/image'"),
        ("vllm serve smollm2-135m --trust-remote-code", "trust-remote-code 'yes'"),
    ],
)
def test_a_servers_command_in_a_file_is_asked_about(
    command: str, said: str, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Experiment] = []
    monkeypatch.setattr("fidelab.cli.compare.launch", lambda experiment, *_: begun.append(experiment))
    (room / "serve.sh").write_text(command)
    words = ("compare", "--serve", "serve.sh", "--kv", "fp8_e4m3", "--dry-run")
    refused(cli(*words, cwd=room), said, "--trust serve.sh")
    assert not begun
    assert cli(*words, "--trust", "serve.sh", cwd=room).code == 0
    [experiment] = begun
    assert experiment.engine.name == "vllm"


def started(room: Path, *flags: str) -> Path:
    """The folder of a run that this user started by flags."""
    sizes = ("--axes", "kld", "--windows", "1", "--n-ctx", "16", "--text", "text.txt", "--no-floor")
    done = cli(
        *("compare", "fake", "--engine", "fake", "--reference", "exact", "--kv", "tilt", *sizes, *flags), cwd=room
    )
    assert done.code == 0, done.err
    return done.folder


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="text"),
        pytest.param(("--python", "./python"), id="python"),
        pytest.param(("--pythonpath", "shims"), id="pythonpath", marks=pytest.mark.full),
    ],
)
def test_ones_own_run_is_resumed_unasked(flags: tuple[str, ...], room: Path, tmp_path: Path) -> None:
    folder = started(room, *flags)
    moved = folder.rename(tmp_path / "moved")
    assert cli("compare", "--resume", moved, cwd=room).code == 0
    assert cli("compare", "-f", moved / "config.resolved.yaml", "--dry-run", cwd=room).code == 0


@pytest.fixture
def strange(room: Path, memory: Path) -> Path:
    """The same, of somebody else: a command was put into it, and nothing of it is remembered here."""
    folder = started(room, "--python", "./python")
    for left in (memory, room / "mark"):
        left.unlink()
    return folder


def test_a_folder_of_somebody_else_starts_nothing(strange: Path, room: Path) -> None:
    before = sorted(strange.rglob("*"))
    said = ("python './python'", f"--trust {strange / 'config.resolved.yaml'}", "text ")
    refused(cli("compare", "--resume", strange, cwd=room), *said)
    refused(cli("compare", "-f", strange / "config.resolved.yaml", "--dry-run", cwd=room), *said)
    refused(cli("compare", "-f", strange / "config.resolved.yaml", "--set", "runs=2", cwd=room), *said)
    assert sorted(strange.rglob("*")) == before
    assert not (room / "mark").exists()


def test_a_folder_of_somebody_else_is_resumed_once_trusted(strange: Path, room: Path) -> None:
    assert cli("compare", "--resume", strange, "--trust", strange / "config.resolved.yaml", cwd=room).code == 0
    assert cli("compare", "--resume", strange, cwd=room).code == 0


def test_a_folder_of_somebody_else_is_resumed_by_the_same_flags(strange: Path, room: Path) -> None:
    flags = ("--python", "./python", "--text", room / "text.txt")
    assert cli("compare", "--resume", strange, *flags, cwd=room).code == 0
    refused(cli("compare", "--resume", strange, *flags[:2], cwd=room), "text ")
    refused(cli("compare", "--resume", strange, *flags, "--pythonpath", "shims", cwd=room), "does not ask for it")


def test_trust_alone_is_not_a_flag_of_a_new_run(room: Path) -> None:
    refused(cli("compare", "fake", "--engine", "fake", "--kv", "tilt", "--trust", "x", cwd=room), "--resume")


def test_a_repeat_of_somebody_else_starts_nothing_and_ones_own_goes_on(room: Path, memory: Path) -> None:
    file = write(room, engine=fake(**PYTHON))
    done = cli("compare", "-f", file, "--set", "runs=2", "--trust", file, cwd=room)
    assert done.code == 0, done.err
    folder = done.folder
    assert cli("compare", "--resume", folder, cwd=room).code == 0
    for left in (memory, room / "mark", *folder.glob("*/report.json")):
        left.unlink()
    refused(cli("compare", "--resume", folder, cwd=room), "python './python'", f"--trust {folder}")
    assert not (room / "mark").exists()
    done = cli("compare", "--resume", folder, "--trust", folder, cwd=room)  # the runs in it have files of their own
    assert (done.code, "config.resolved.yaml asks for" in done.err) == (2, True)
    assert not (room / "mark").exists()


def test_where_nothing_can_be_remembered_the_person_is_asked_again(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (room / "no-folder").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(room / "no-folder"))
    folder = started(room)
    refused(cli("compare", "--resume", folder, cwd=room), "text ")
    assert cli("compare", "--resume", folder, "--trust", folder, cwd=room).code == 0


def test_a_variable_of_a_file_goes_to_no_host(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    save_model(room / "model")
    with serving(Served()) as server:
        arms = [f"base-url={server.url},api-key-env=AWS_SECRET_ACCESS_KEY"]
        other = "base-url=http://other.example/v1"
        file = write(room, model="model", engine="openai", reference=other, candidates=arms)
        line = refused(cli("compare", "-f", file, cwd=room), "api-key-env 'AWS_SECRET_ACCESS_KEY'", server.url)
        assert server.keys == []
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:80/v1", True),
        ("http://0.0.0.0:8000", True),
        ("http://localhost.evil.example/v1", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://192.168.0.7:8000", False),
        ("https://api.example.com/v1", False),
        ("http://[::1", False),
    ],
)
def test_the_default_key_goes_to_this_machine_alone(url: str, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    monkeypatch.setenv("MINE", "mine")
    assert read_key(url, None) == ("sk" if sent else None)
    assert read_key(url, "MINE") == "mine"
    with pytest.raises(UsageError, match=r"UNSET .* is not set"):
        read_key(url, "UNSET")


Place = Callable[[Path, Path], str]
ELSEWHERE: dict[str, Place] = {
    "absolute": lambda _folder, secret: str(secret),
    "dots": lambda folder, secret: f"{folder}/../{secret.name}",
    "link": lambda folder, secret: str(_linked(folder, secret)),
}


def _linked(folder: Path, secret: Path) -> Path:
    (folder / "link.txt").symlink_to(secret)
    return folder / "link.txt"


@pytest.mark.parametrize("way", ELSEWHERE)
@pytest.mark.parametrize("key", ["text", "prompts", "haystack", "data"])
def test_a_file_elsewhere_is_asked_for_and_one_beside_is_not(key: str, way: str, room: Path) -> None:
    secret = room.parent / "secret.txt"
    secret.write_text((room / "text.txt").read_text())
    axis = {"haystack": "rniah", "data": "gsm8k"}.get(key)

    def ask(value: str) -> Done:
        changes: dict[str, Any] = {key: value} if axis is None else {"axes": {**SIZES, axis: {key: value}}}
        return cli("compare", "-f", write(room, **changes), "--dry-run", cwd=room)

    refused(
        ask(ELSEWHERE[way](room, secret)), f"{key} ", "is a file in another folder that would be read", "secret.txt"
    )
    assert "asks for" not in ask(str(room / "text.txt")).err


def test_what_a_file_asks_for_cannot_hide_in_control_characters(room: Path) -> None:
    line = refused(cli("compare", "-f", write(room, engine=fake(python="./python \x1b[2K\x1b]0;x\x07")), cwd=room))
    assert line.isprintable()


def test_a_flag_that_repeats_a_files_path_holds_however_the_path_is_written(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.txt").write_text("a text elsewhere")
    file = write(room, text=str(tmp_path / "other.txt"))
    monkeypatch.chdir(tmp_path)
    written = yaml.safe_load(file.read_text())
    experiment = validate(written, "test")
    check_trust(experiment, written, file, Trust(words={("text", "other.txt")}, exact=True))
    with pytest.raises(UsageError, match="does not ask for it"):
        check_trust(experiment, written, file, Trust(words={("text", "absent.txt")}, exact=True))
