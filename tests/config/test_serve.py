"""The command line of a running server as an experiment's arms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.experiment import validate
from fidelab.config.serve import ServeCommand, program_python, read_change, read_served
from fidelab.core.errors import ConfigError, InputError, UsageError
from fidelab.engines.base import engine_class

VLLM = "vllm serve owner/m --max-model-len 4096 --enable-prefix-caching --port 8001 --dtype half"


def controlled(engine: str) -> Mapping[str, str]:
    """The engine's own, as every command passes it on."""
    return engine_class(engine).controlled


def read(text: str) -> ServeCommand:
    return read_served(text, controlled)


def settings(text: str) -> dict[str, Any]:
    return read(text).settings()


def change(text: str, of: str = VLLM) -> dict[str, Any]:
    fields = read_change(text, read(of), controlled)
    assert fields.pop("name") == text
    return fields


def test_flags_of_vllm_are_options_fields_and_words_that_go_into_no_arm() -> None:
    found = settings(VLLM)
    assert (found["model"], found["engine"], found["dtype"]) == ("owner/m", "vllm", "float16")
    assert found["engine_args"] == {"max-model-len": "4096", "enforce-eager": "no"}  # a server compiles unless told
    assert found["serve"]["words"] == ["--enable-prefix-caching", "--port", "8001"]
    assert found["serve"]["ignored"] == {
        "--enable-prefix-caching": "captures compute every position; test paths asks what a hit in the cache changes",
        "--port 8001": "only concerns serving",
    }


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("vllm serve m --enforce-eager -tp 2 -q fp8", {"tp": "2", "quantization": "fp8"}),
        ("vllm serve m --enforce-eager -O3", {"optimization-level": "3"}),
        ("vllm serve --enforce-eager m", {}),
        ("vllm serve m --enforce-eager --no-async-scheduling", {"async-scheduling": "no"}),
        ("vllm serve m --enforce-eager --kv_cache_memory_bytes=4G", {"kv-cache-memory": "4G"}),
        ("vllm serve m --enforce-eager -sc.method ngram -sc.num_speculative_tokens 3",
         {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'}),
        ("""vllm serve m --enforce-eager --hf-overrides '{"a": "b c"}'""", {"hf-overrides": '{"a": "b c"}'}),
        ("python3 -m vllm.entrypoints.openai.api_server --enforce-eager --model m --swap 3", {"swap": "3"}),
    ],
)  # fmt: skip
def test_each_way_to_write_an_option_of_vllm_is_read(command: str, options: dict[str, str]) -> None:
    found = settings(command)
    assert found["model"] == "m"
    assert found["engine_args"] == {"enforce-eager": "yes", **options}


@pytest.mark.parametrize(
    "program", ["python -m sglang.launch_server", "sglang serve", "/opt/vllm/bin/python3 -m sglang.launch_server"]
)
def test_flags_of_sglang_are_options(program: str) -> None:
    found = settings(f"{program} --model-path m --tp 2 --disable-cuda-graph --kv-cache-dtype fp8_e5m2 --device cpu")
    assert (found["engine"], found["reference"], found["device"]) == ("sglang", {"kv": "fp8_e5m2"}, "cpu")
    assert found["engine_args"] == {"tp": "2", "cuda-graph": "off"}
    assert settings("sglang serve --model-path m")["engine_args"] == {"cuda-graph": "on"}


def test_flags_of_llama_server_are_options() -> None:
    found = settings("llama-server -m m.gguf -ctk q8_0 -c 4096 -ngl -1 -fa -b 256 -ub 64 --no-mmap -t 2 -np 4 --jinja")
    assert (found["engine"], found["model"], found["threads"]) == ("llamacpp", "m.gguf", "2")
    assert found["reference"] == {"kv": "q8_0/f16"}
    assert found["engine_args"] == {**{"n-gpu-layers": "-1", "flash-attn": "on", "n-batch": "256", "n-ubatch": "64"}}
    assert found["serve"]["words"] == ["-c", "4096", "--no-mmap", "-np", "4", "--jinja"]


def test_variables_before_a_command_are_the_arms_and_those_of_this_shell_fill_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHERE", "/data")
    found = settings("VLLM_CPU_KVCACHE_SPACE=4 OMP_NUM_THREADS=3 vllm serve ${WHERE}/m")
    assert (found["env"], found["threads"]) == ({"VLLM_CPU_KVCACHE_SPACE": "4"}, "3")
    assert found["model"] == "/data/m"


def test_a_container_gives_its_image_its_mounts_and_its_variables(tmp_path: Path) -> None:
    found = settings(
        f"docker run --gpus all --rm -v {tmp_path}:/models -e VLLM_A=1 -e HF_TOKEN=secret -p 80:8000 "
        "vllm/vllm-openai:v1 "
        '--model /models/m --speculative-config \'{"model": "/models/draft"}\' --chat-template /models/x'
    )
    assert (found["model"], found["env"]) == (f"{tmp_path}/m", {"VLLM_A": "1"})
    assert found["engine_args"]["speculative-config"] == f'{{"model": "{tmp_path}/draft"}}'
    serve = found["serve"]
    assert serve["mounts"] == {"/models": str(tmp_path)}
    assert serve["words"] == ["--chat-template", "/models/x"]
    assert serve["wrapper"][-3:] == ["-p", "80:8000", "vllm/vllm-openai:v1"]
    assert found["engine"] == {"name": "vllm", "image": "vllm/vllm-openai:v1"}
    assert "secret" not in str(serve["wrapper"])


def test_an_image_may_be_told_the_whole_command() -> None:
    found = settings("podman run --ipc=host lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path a/b")
    assert (found["engine"], found["model"]) == ({"name": "sglang", "image": "lmsysorg/sglang:latest"}, "a/b")
    found = settings("docker run --entrypoint vllm any/image serve a/b")
    assert (found["engine"]["name"], found["serve"]["program"]) == ("vllm", ["serve"])
    found = settings("docker run ghcr.io/ggml-org/llama.cpp:server -m /m.gguf")
    assert found["engine"] == "llamacpp"
    assert "have no Python" in found["serve"]["ignored"]["ghcr.io/ggml-org/llama.cpp:server"]


@pytest.mark.parametrize("mark", ["", "@"])
def test_a_file_may_hold_the_command(mark: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(
        "#!/bin/bash\nset -e\nexport VLLM_A=1  # why\n\nexec vllm serve m \\\n  # long prompts\n"
        "  --max-model-len 100 \\\n  --block-size 32  # pages\n"
    )
    found = settings(f"{mark}{file}")
    assert (found["model"], found["env"]) == ("m", {"VLLM_A": "1"})
    assert found["engine_args"] == {"enforce-eager": "no", "max-model-len": "100", "block-size": "32"}


@pytest.mark.parametrize("flags", ["--api-key sk-1234", "--api-key=sk-1234", "--hf-token sk-1234"])
def test_a_secret_is_in_no_setting(flags: str) -> None:
    found = read(f"HF_TOKEN=hf-5678 vllm serve m {flags}")
    assert "sk-1234" not in str(found.settings())
    assert "hf-5678" not in str(found.settings())
    assert {*found.secrets} == {"sk-1234", "hf-5678"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve m; rm -rf x", "more than one command: 'rm' comes after 'vllm'; paste one"),
        ("vllm serve m | nc host 80", "more than one command: 'nc'"),
        ("vllm serve m && reboot", "more than one command: 'reboot'"),
        ("vllm serve m < answers", "'<' is not read"),
        ("vllm serve $(cat m)", r"\$\(…\) runs a command"),
        ('vllm serve "$(cat m)"', r"\$\(…\) runs a command"),
        ("vllm serve `cat m`", "` runs a command"),
        ("(vllm serve m)", r"'\(' is shell syntax"),
        ("vllm serve m\nvllm serve n", "more than one command"),
        ("vllm serve m --x 'y", "no closing quotation"),
        ("vllm serve $NOT_SET_HERE", r"\$NOT_SET_HERE is not set here"),
        ("vllm serve m --tokenizer $MY_API_KEY", r"\$MY_API_KEY is a secret"),
        ("vllm serve m n", "'n' does not belong to a flag"),
        ("vllm serve --port 80", "does not name a model"),
        ("vllm serve m --config x.yaml", "--config reads options from a file"),
        ("llama-server -hf a/b:Q4", "-hf names a file of a hub"),
        ("nginx -c x", "nginx -c x is not a known server"),
        ("bash", "bash is a shell"),
        ("bash serve.sh --port 1", "bash runs the script serve.sh; give the script itself: --serve @FILE"),
        ("docker run", "names no image"),
        ("docker run -v ~no-such-user/x:/m vllm/vllm-openai --model /m", "~no-such-user/x: "),
        ("~no-such-user/serve.sh", "~no-such-user/serve.sh: "),
        ("docker run a/b --model m", "does not say which server it starts"),
        ("docker run --env-file x vllm/vllm-openai", "does not name a model"),
        ("", "nothing is not a known server"),
        ("@/nowhere/serve.sh", "does not exist"),
    ],
)
def test_what_is_not_a_single_command_of_a_server_is_refused(command: str, said: str) -> None:
    with pytest.raises((ConfigError, InputError, UsageError), match=said):
        read(command)


def test_signs_of_a_shell_in_quotes_are_values() -> None:
    assert settings("vllm serve m --x 'a;b|$(c)'")["engine_args"]["x"] == "a;b|$(c)"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("--kv-cache-dtype fp8_e4m3", {"kv": "fp8_e4m3"}),
        ("--kv-cache-dtype fp8_e4m3 --block-size 32", {"kv": "fp8_e4m3", "engine_args": {"block-size": "32"}}),
        ("--max-model-len 100", {"engine_args": {"max-model-len": "100"}}),
        ("--enforce-eager", {"engine_args": {"enforce-eager": "yes"}}),
        ("--no-max-model-len", {"without": ["max-model-len"]}),
        ("--no-dtype", {"dtype": "auto"}),
        ("VLLM_A=1", {"env": {"VLLM_A": "1"}}),
        ("VLLM_A=1 --quantization fp8", {"env": {"VLLM_A": "1"}, "engine_args": {"quantization": "fp8"}}),
        ("--model other/m --revision abc", {"model": "other/m@abc"}),
    ],
)
def test_a_change_is_what_an_arm_differs_in(text: str, fields: dict[str, Any]) -> None:
    assert change(text) == fields


LLAMA = "llama-server -m m.gguf -ctk q8_0 -ctv q8_0"
LAYERS = "vllm serve m --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 1 29 --enforce-eager"
SGLANG = "python -m sglang.launch_server --model-path m --disable-x --disable-cuda-graph"
DRAFTS = """vllm serve m -sc '{"method": "ngram", "num_speculative_tokens": 3}'"""


@pytest.mark.parametrize(
    ("base", "text", "fields"),
    [
        (LLAMA, "-ctv q4_0", {"kv": "q8_0/q4_0"}),
        (LLAMA, "--no-cache-type-v", {"kv": "q8_0/f16"}),
        (LLAMA, "-ctk f16 -ctv f16", {"kv": "f16"}),
        (LAYERS, "--no-kv-cache-dtype-skip-layers", {"kv": "fp8"}),
        ("vllm serve m --kv-cache-dtype fp8", "--no-kv-cache-dtype", {"kv": "auto"}),
        (SGLANG, "--no-disable-x", {"without": ["disable-x"]}),
        (SGLANG, "--no-disable-cuda-graph", {"engine_args": {"cuda-graph": "on"}}),
        (DRAFTS, "-sc.num_speculative_tokens 5",
         {"engine_args": {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 5}'}}),
    ],
)  # fmt: skip
def test_half_a_format_its_layers_a_negation_and_one_part_of_json_change(
    base: str, text: str, fields: dict[str, Any]
) -> None:
    assert change(text, base) == fields
    assert settings(LAYERS)["reference"] == {"kv": "fp8[skip-layers=0,1,29]"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--port 9000", "changes nothing that is compared: --port 9000 .only concerns serving"),
        (
            "--no-enable-prefix-caching",
            "captures compute every position; test paths asks what a hit in the cache changes",
        ),
        ("--max-model-len 4096", "the pasted command says the same"),
        ("", "changes nothing"),
        ("kv=fp8 --x; y", "is shell syntax"),
        ("fp8", "'fp8' is neither a flag nor NAME=value"),
        ("--block-size 32 x", "'x' does not belong to a flag"),
        ("OMP_NUM_THREADS=2", "threads is the same for all configurations"),
    ],
)
def test_a_change_that_changes_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        change(text)


def test_what_is_read_is_an_ordinary_experiment() -> None:
    fields = [read_change(text, read(VLLM), controlled) for text in ("--kv-cache-dtype fp8", "--no-max-model-len")]
    experiment = validate({**settings(VLLM), "candidates": fields}, "test")
    assert [arm.name for arm in experiment.candidates] == ["--kv-cache-dtype fp8", "--no-max-model-len"]
    assert experiment.serve is not None
    again = validate(experiment.model_dump(mode="json"), "again")
    assert again == experiment


@pytest.mark.parametrize(
    "first",
    ["#!{python}", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''", "#!/usr/bin/env python3.99"],
    ids=["shebang", "long path", "env"],
)
def test_the_python_of_a_program_on_the_path_is_found_by_its_script(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, program = tmp_path / "python3.99", tmp_path / "vllm"
    for file, text in ((python, "#!/bin/sh\n"), (program, first.format(python=python))):
        file.write_text(f"{text}\nimport vllm\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert program_python(read("vllm serve m")) == str(python)
    assert program_python(read(f"{program} serve m")) == str(python)
    program.write_bytes(b"\x7fELF\x02")
    assert program_python(read("vllm serve m")) is None
    assert program_python(read("docker run vllm/vllm-openai --model m")) is None


def test_a_file_does_not_choose_the_python_by_a_path(tmp_path: Path) -> None:
    program, file = tmp_path / "vllm", tmp_path / "serve.txt"
    program.write_text("#!/usr/bin/python3\n")
    program.chmod(0o755)
    file.write_text(f"{program} serve m\n")
    assert program_python(read(f"@{file}")) is None
