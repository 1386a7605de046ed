"""Texts that people paste: what is read of each, what is noted, and what is named by its form."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fidelab.cli.dry_run import show_pasted
from fidelab.config.pasted import PastedCommand, read_pasted
from fidelab.config.schema import ServeConfig
from fidelab.config.serve import ServeCommand, read_change, read_served
from fidelab.core.errors import ConfigError, FidelabError, UsageError
from fidelab.engines.base import engine_class


def served(text: str) -> ServeCommand:
    return read_served(text, lambda engine: engine_class(engine).controlled)


def settings(text: str) -> dict[str, Any]:
    return served(text).settings()


def pasted(text: str) -> PastedCommand:
    return read_pasted(text, "--serve")


# ---------------------------------------------------------------------------------- commands found in the field

COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:latest
    environment:
      - VLLM_ATTENTION_BACKEND=FLASHINFER
    command: >
      --model owner/small
      --kv-cache-dtype fp8
      --speculative-config '{"method":"mtp","num_speculative_tokens":2}'
"""
POSITIONAL = """\
sudo docker run -d --restart always --runtime nvidia --gpus '"device=0,1,2,3"' --ipc=host --name ds \
-e HF_HUB_OFFLINE=1 -v /data/model:/root/.cache/huggingface -p 127.0.0.1:3731:8000 \
lazymio/vllm-backport:latest-sm80 owner/small \
--served-model-name beast --tensor-parallel-size 4 --kv-cache-dtype fp8_ds_mla --max-model-len 204800
"""
VARIABLES = (
    "LLAMA_ARG_CACHE_TYPE_K=q8_0 LLAMA_ARG_CACHE_TYPE_V=q8_0 LLAMA_ARG_FLASH_ATTN=on LLAMA_ARG_CTX_SIZE=8192 "
    "llama-server -m small.gguf"
)


def test_a_compose_file_is_read_as_docker_run() -> None:
    found = settings(COMPOSE)
    assert found["engine"] == {"name": "vllm", "image": "vllm/vllm-openai:latest"}
    assert (found["model"], found["reference"]) == ("owner/small", {"kv": "fp8"})
    assert found["env"] == {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}
    assert json.loads(found["engine_args"]["speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 2}
    [(written, read)] = found["serve"]["translated"].items()
    assert written == "Compose file, container vllm"
    assert read.startswith(
        "docker run -e VLLM_ATTENTION_BACKEND=FLASHINFER vllm/vllm-openai:latest --model owner/small"
    )


def test_a_fork_of_an_image_takes_the_model_as_a_word() -> None:
    found = settings(POSITIONAL)
    assert found["engine"] == {"name": "vllm", "image": "lazymio/vllm-backport:latest-sm80"}
    assert (found["model"], found["reference"]) == ("owner/small", {"kv": "fp8_ds_mla"})
    assert found["engine_args"] == {"enforce-eager": "no", "tp": "4", "max-model-len": "204800"}


@pytest.mark.parametrize(
    ("image", "words", "engine", "program"),
    [
        ("my/vllm", "serve m", "vllm", ["serve"]),
        ("ghcr.io/ggml-org/llama.cpp:full", "--server -m m", "llamacpp", ["--server"]),
        ("--entrypoint= vllm/vllm-openai", "vllm serve m", "vllm", ["vllm", "serve"]),
        ("--entrypoint bash lmsysorg/sglang", "-c 'sglang serve --model-path m'", "sglang", ["serve"]),
        ("vllm/vllm-openai", "bash -c 'vllm serve m'", "vllm", ["vllm", "serve"]),
        ("vllm/vllm-openai", "python3 -u -m vllm.entrypoints.openai.api_server --model m", "vllm",
         ["python3", "-m", "vllm.entrypoints.openai.api_server"]),
    ],
)  # fmt: skip
def test_a_container_starts_the_server_in_several_ways(image: str, words: str, engine: str, program: list[str]) -> None:
    found = served(f"docker run --gpus all {image} {words}")
    assert (found.engine, list(found.program), found.settings()["model"]) == (engine, program, "m")


@pytest.mark.parametrize("words", ["python3 serve.py", "bash serve.sh"])
def test_a_program_in_an_image_is_not_taken_for_a_model(words: str) -> None:
    with pytest.raises(UsageError, match=r"not a known server|runs the script"):
        served(f"docker run vllm/vllm-openai {words}")


def test_variables_of_llama_server_are_its_flags() -> None:
    found = settings(VARIABLES)
    assert (found["reference"], found["engine_args"]) == ({"kv": "q8_0"}, {"flash-attn": "on"})
    change = read_change("LLAMA_ARG_CACHE_TYPE_K=q4_0 LLAMA_ARG_CACHE_TYPE_V=q4_0", served(VARIABLES), lambda _: {})
    assert change["kv"] == "q4_0"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("python -m sglang.launch_server --model-path m --tp 4 --disable-cuda-graph --kv-cache-dtype fp8_e5m2",
         {"cuda-graph": "off", "tp": "4"}),
        ("llama-server -m m -ngl 99 -ncmoe 20 --numa distribute -ts 3,1 -fa on",
         {"n-gpu-layers": "99", "n-cpu-moe": "20", "numa": "distribute", "tensor-split": "3,1", "flash-attn": "on"}),
        ("llama-server -m m -fa auto", {"flash-attn": "auto"}),
        ("llama-server -m m -fa 1", {"flash-attn": "on"}),
        ("llama-server -m m -fa disabled", {"flash-attn": "off"}),
        ("python3 -u -m sglang.launch_server --model-path m --kv-cache-dtype fp8_e4m3", {"cuda-graph": "on"}),
        ("vllm serve m \\   # 8B\n  --kv-cache-dtype fp8 \\  # save memory\n  --max-model-len 32768",
         {"enforce-eager": "no", "max-model-len": "32768"}),
        ("vllm serve m ––kv-cache-dtype fp8 —max-model-len 8192", {"enforce-eager": "no", "max-model-len": "8192"}),
        ("export VLLM_USE_V1=1\nMODEL=m\nvllm serve $MODEL --kv-cache-dtype fp8", {"enforce-eager": "no"}),
        ("ExecStart=/usr/local/bin/llama-server -m m -ctk q8_0 -ctv q8_0 -fa on --host 0.0.0.0", {"flash-attn": "on"}),
    ],
)  # fmt: skip
def test_commands_of_the_field_give_their_options(text: str, options: dict[str, str]) -> None:
    found = settings(text)
    assert (found["model"], found["engine_args"]) == ("m", options)


def test_a_powershell_command_keeps_the_backslashes_of_its_paths() -> None:
    found = settings(".\\llama-server.exe -m C:\\models\\small-Q4_K_M.gguf `\n  -ngl 99 `\n  -ctk q8_0 -ctv q8_0\n")
    assert (found["model"], found["reference"]) == ("C:\\models\\small-Q4_K_M.gguf", {"kv": "q8_0"})
    assert found["serve"]["translated"] == {
        "PowerShell command line": "the same command for Linux",
        ".\\llama-server.exe": "llama-server",
    }


def test_a_value_after_a_switch_is_named() -> None:
    text = "docker run --gpus all --entrypoint /usr/local/bin/vllm lmcache/vllm-openai:latest serve m "
    with pytest.raises(UsageError, match="takes no value: leave out 'false' or write --no-enable-chunked-prefill"):
        read_served(f"{text}--enable-chunked-prefill false", lambda _: {})


# ------------------------------------------------------------------------------------------------- what is noted


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("$ vllm serve m", {"$": "prompt of a shell"}),
        ("# vllm serve m", {"#": "prompt of a shell"}),
        ("vllm serve m 2>&1 | tee -a log",
         {"2>&1": "concerns the server's output", "| tee …": "concerns the server's output"}),
        ("cd /srv && vllm serve m", {"cd …": "not run: paths are read from the current folder"}),
        ("pip install vllm; vllm serve m", {"pip …": "not run: only the server's command is read"}),
        ("A=1\nvllm serve m", {"A=1": "set without export: the server does not see it"}),
        ("vllm serve m &\nwait", {"&": "the server would run in the background",
                                  "wait": "not run: only the server's command is read"}),
        ('vllm serve m "$@"', {"$@": "arguments of the script: none are known here"}),
        ("numactl -N 0 vllm serve m",
         {"numactl -N 0": "places the server on cores, memory or nodes; configurations run without it"}),
        ("python3 -u -O -m sglang.launch_server --model m", {"python3 -u -O": "switches of the interpreter"}),
    ],
)  # fmt: skip
def test_parts_around_the_command_are_ignored_with_their_reason(text: str, ignored: dict[str, str]) -> None:
    found = pasted(text)
    assert found.ignored == ignored
    assert "m" in found.words


def test_a_file_of_variables_is_ignored_with_its_reason() -> None:
    found = settings("docker run --env-file .env vllm/vllm-openai --model m")
    assert found["serve"]["ignored"]["--env-file .env"].startswith("a file of variables, which is not read")
    assert found["serve"]["wrapper"][2:4] == ["--env-file", ".env"]


@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("––port", "--port"), ("—port", "--port"), ("–port", "--port"), ("−−port", "--port"), ("―port=1", "--port=1"),
        ("–m", "-m"), ("—m", "-m"), ("–ctk", "-ctk"), ("−ngl", "-ngl"), ("--kv‑cache‑dtype", "--kv-cache-dtype"),
        ("−1", "-1"), ("a–b", "a–b"), ("--x=a–b", "--x=a–b"),
    ],
)  # fmt: skip
def test_dashes_of_editors_are_hyphens_where_flags_begin(word: str, plain: str) -> None:
    found = pasted(f"llama-server {word}")
    assert found.words == ("llama-server", plain)
    assert len(found.translated) == (word != plain)


def test_quotes_of_editors_are_plain_quotes() -> None:
    found = pasted("vllm serve m --speculative-config ‘{“method”: “ngram”}’ --x “a b”")
    assert found.words[-3:] == ('{"method": "ngram"}', "--x", "a b")
    assert found.translated == {"typographic quotes ‘ ’ “ ”": "plain quotes \" '"}


def test_dry_run_lists_what_was_taken_translated_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    text = "$ sudo nice -n 5 llama-server -m m.gguf –ctk q8_0 --port 1 | tee log"
    show_pasted(ServeConfig.model_validate(settings(text)["serve"]))
    assert capsys.readouterr().err.splitlines() == [
        "fidelab: taken from --serve: -m m.gguf, -ctk q8_0",
        "fidelab: translated from --serve: –ctk (typographic dash) → -ctk",
        "fidelab: ignored from --serve: $ (prompt of a shell)",
        "fidelab: ignored from --serve: | tee … (concerns the server's output)",
        "fidelab: ignored from --serve: sudo (only starts the server)",
        "fidelab: ignored from --serve: nice -n 5 (changes the server's priority, time or output; configurations run "
        "without it)",
        "fidelab: ignored from --serve: --port 1 (only concerns serving)",
    ]


# ------------------------------------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=b\nvllm $A ${A} \"$A\" '$A' \\$A ${A}c", ["vllm", "b", "b", "b", "$A", "$A", "bc"]),
        ('vllm ${NOT_SET:-x} ${NOT_SET-y z} "${NOT_SET:-y z}" ${NOT_SET:+w}', ["vllm", "x", "y", "z", "y z"]),
        ("A=b\nvllm ${A:-x} ${A:+w} ${N:-${A}}", ["vllm", "b", "w", "b"]),
        ("ARGS='--a 1  --b'\nvllm $ARGS \"$ARGS\"", ["vllm", "--a", "1", "--b", "--a 1  --b"]),
        ("ARGS=(--a 'x y'\n  --b)  # more\nARGS+=(--c)\nvllm \"${ARGS[@]}\"", ["vllm", "--a", "x y", "--b", "--c"]),
        ("A=1\nA+=2\nvllm $A", ["vllm", "12"]),
        ("A=1\nunset A\nvllm ${A:-none}", ["vllm", "none"]),
        ("EMPTY=\nvllm $EMPTY \"$EMPTY\" ''", ["vllm", "", ""]),
        ("A=m; B=$A/n; vllm $B", ["vllm", "m/n"]),
        ("bash -c 'A=1; vllm $A'", ["vllm", "1"]),
        ("""vllm '{"a":"b"}' "{\\"a\\":1}" a\\ b""", ["vllm", '{"a":"b"}', '{"a":1}', "a b"]),
        ("vllm serve m\n--port 1\n  # why\n--seed 2", ["vllm", "serve", "m", "--port", "1", "--seed", "2"]),
        ("vllm serve m \\", ["vllm", "serve", "m"]),
        ("vllm serve m \\ --port 1 \\  -q fp8", ["vllm", "serve", "m", "--port", "1", "-q", "fp8"]),
        ("vllm serve m \\\n  > log 2>&1", ["vllm", "serve", "m"]),
        ("> vllm serve m \\\n>  --port 1", ["vllm", "serve", "m", "--port", "1"]),
        ("docker run –it –gpus all vllm/x –tp 2", ["docker", "run", "-it", "--gpus", "all", "vllm/x", "-tp", "2"]),
        ("`vllm serve m`", ["vllm", "serve", "m"]),
        ("!vllm serve m", ["vllm", "serve", "m"]),
        ('["vllm", "serve", "m"]', ["vllm", "serve", "m"]),
    ],
)
def test_words_are_those_that_a_shell_would_make(text: str, words: list[str]) -> None:
    assert list(pasted(text).words) == words


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("export A=1 B='b c'\nC=3 vllm", {"A": "1", "B": "b c", "C": "3"}),
        ("A=1\nexport A\nvllm", {"A": "1"}),
        ("set -a\nA=1\nset +a\nB=2\nvllm $B", {"A": "1"}),
        ("declare -x A=1\nvllm", {"A": "1"}),
        ("sudo A=1 env B=2 vllm", {"A": "1", "B": "2"}),
        ("docker exec -e A=1 -it name vllm", {"A": "1"}),
        ("mpirun -x A=1 -np 1 vllm", {"A": "1"}),
        ("time A=1 vllm", {"A": "1"}),
        ("export A=1\nexport A=2\nvllm", {"A": "2"}),
        ("$env:A = '1'; vllm.exe", {"A": "1"}),
        ('set A=1\nset "B=2 3"\nvllm', {"A": "1", "B": "2 3"}),
        ("Environment=A=1 'B=b c'\nEnvironment=C=50%%\nExecStart=vllm", {"A": "1", "B": "b c", "C": "50%"}),
    ],
)
def test_the_server_gets_exported_variables_alone(text: str, variables: dict[str, str]) -> None:
    found = pasted(text)
    assert (dict(found.variables), found.words[:1]) == (variables, ("vllm",))


@pytest.mark.parametrize(
    "text",
    [
        "KEY=sk-1234567\nvllm serve m --api-key $KEY",
        "MY_TOKEN=sk-1234567\nvllm serve m",
        "huggingface-cli login --token sk-1234567\nHF_TOKEN=sk-1234567 vllm serve m",
        "services:\n  a:\n    image: vllm/vllm-openai\n    command: --model m --api-key sk-1234567\n"
        "    environment: {HF_TOKEN: sk-1234567}\n",
        "docker exec -e HF_TOKEN=sk-1234567 x vllm serve m",
        "srun --export=ALL,HF_TOKEN=sk-1234567 vllm serve m",
        "Environment=HF_TOKEN=sk-1234567\nExecStart=vllm serve m",
        'env: [{name: HF_TOKEN, value: sk-1234567}]\nimage: vllm/vllm-openai\nargs: ["--model", "m"]',
    ],
)
def test_a_secret_is_in_no_note_and_no_setting(text: str) -> None:
    assert "sk-1234567" not in json.dumps(settings(text))


@pytest.mark.parametrize("text", ["HF_TOKEN=$MINE vllm serve m", "MY_TOKEN=${MINE}\nvllm serve m --api-key $MY_TOKEN"])
def test_a_secret_in_the_environment_is_not_looked_up(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "sk-1234567")
    found = pasted(text)
    assert "sk-1234567" not in json.dumps(settings(text))
    assert "sk-1234567" not in repr(vars(found))


# --------------------------------------------------------------------------------- forms that are named, not read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("for m in a b; do vllm serve $m; done", r"a loop \(for\), which is not run"),
        ("if [ -d x ]; then\nvllm serve m\nfi", r"a condition \(if\)"),
        ("run() {\nvllm serve m\n}", "'\\(' is shell syntax"),
        ("vllm serve m <<EOF\nx\nEOF", "begins a here-document"),
        ("vllm serve $(cat m)", r"\$\(…\) runs a command; write its result"),
        ("M=`cat m`\nvllm serve $M", "` runs a command; write its result"),
        ("diff <(vllm serve m) x", r"<\(…\) runs a command"),
        ("vllm serve <MODEL>", "<MODEL> is a placeholder; write its value"),
        ("vllm serve $1", r"\$1 is an argument of the script; write its value"),
        ("X=ab\nvllm serve ${X%b}", r"\$\{X%b\} is not read; write its value"),
        ('vllm serve "${ARGS[@]}"', r"\$\{ARGS\[@\]\} is not set here"),
        ("MY_KEY=x\nvllm serve m --tokenizer $MY_KEY", r"\$MY_KEY is a secret"),
        ("A=aaaaaaaaaa\n" + "A=$A$A\n" * 40 + "vllm serve $A", "a variable has more than 100,000 characters"),
        ("A=(a b)\n" + 'A+=("${A[@]}")\n' * 40 + 'vllm "${A[@]}"', "a variable has more than 100,000 characters"),
        ("eval vllm serve m", "a command made of text"),
        ("FROM vllm/vllm-openai\nCMD [\"--model\", \"m\"]", "this is a Dockerfile"),
        ("import vllm\nllm = vllm.LLM('m')", "this is a Python program"),
        ("[Container]\nImage=vllm/vllm-openai", "this is a file of settings"),
        ("serve-not-here.sh", "this is the name of a file that is not here"),
        ("docker compose up -d", "docker compose up starts the services of a file; paste the file: @compose.yaml"),
        ("ExecStart=/opt/llama-server -m %h/m.gguf", "%h is a specifier of systemd; write its value"),
        ("models:\n  a:\n    cmd: llama-server -m m", "neither a Compose file nor a Kubernetes manifest"),
        ("services: {a: {image: nginx}, b: {image: redis}}", r"no container .* a known server \(there are a, b\)"),
        ("services:\n  a: {image: vllm/a, command: --model m}\n  b: {image: vllm/b, command: --model n}",
         r"several containers of this Compose file start a server \(a, b\); keep one"),
        ("services: {a: {image: vllm/a, command: '--model ${NOT_SET_HERE}'}}", r"\$NOT_SET_HERE is not set here"),
        ("args:\n  - --model\n  - m", "Kubernetes fragment without an image"),
        ("apiVersion: v1\nkind: Service\nspec: {}", "manifest of kind Service has no container"),
        ("image: vllm/vllm-openai\nenv: [{name: M, valueFrom: {x: y}}]\nargs: [--model, $(M)]",
         r"\$\(M\) is not in this file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_its_form(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        served(text)
    assert "\n" not in str(error.value)


def test_yaml_that_is_broken_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match="--serve:3:1 is not YAML"):
        served("services:\n  a: [\n")


# ---------------------------------------------------------------------------------------------------- manifests


def test_a_compose_files_flags_anchors_and_other_services_are_kept_or_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    found = settings("""\
x-common: &common
  restart: always
  shm_size: 16g
services:
  web: {image: "open-webui:${NO_SUCH_TAG:?}", environment: [OLLAMA_BASE_URL=http://x]}
  llm:
    <<: *common
    image: ghcr.io/ggml-org/llama.cpp:server
    volumes: ["${WHERE}:/models", "cache:/root/.cache"]
    env_file: .env
    command: [-m, /models/m.gguf, -fa, on, -ngl, "99"]
""")
    serve = found["serve"]
    assert (found["model"], found["engine_args"]) == ("/data/m.gguf", {"n-gpu-layers": "99", "flash-attn": "on"})
    assert serve["mounts"] == {"/models": "/data"}
    assert serve["ignored"]["container web"] == "starts no known server"
    assert serve["ignored"]["env_file: .env"].startswith("a file of variables, which is not read")
    assert "restart: always" in serve["ignored"]
    assert serve["wrapper"][2:4] == ["--shm-size", "16g"]


def test_a_manifests_node_folders_are_mounts_and_values_of_the_cluster_are_noted() -> None:
    found = settings("""\
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      volumes:
        - {name: models, hostPath: {path: /data}}
        - {name: shm, emptyDir: {}}
      containers:
        - name: vllm
          image: vllm/vllm-openai:v1
          command: ["/bin/sh", "-c"]
          args: ["exec vllm serve /models/m --max-model-len $LENGTH --served-model-name x"]
          env:
            - {name: LENGTH, value: "4096"}
            - name: HF_TOKEN
              valueFrom: {secretKeyRef: {name: s, key: k}}
          volumeMounts: [{name: models, mountPath: /models}, {name: shm, mountPath: /dev/shm}]
---
apiVersion: v1
kind: Service
""")
    assert (found["model"], found["engine_args"]["max-model-len"]) == ("/data/m", "4096")
    assert found["engine"] == {"name": "vllm", "image": "vllm/vllm-openai:v1"}
    assert found["serve"]["program"] == ["serve"]
    assert found["serve"]["wrapper"][-3:] == ["--entrypoint", "vllm", "vllm/vllm-openai:v1"]
    ignored = found["serve"]["ignored"]
    assert {"env HF_TOKEN", "volume shm at /dev/shm", "kind: Service"} <= ignored.keys()


PIECES = (
    *(
        "vllm serve m",
        " --kv-cache-dtype",
        " fp8",
        "A=",
        "export ",
        "bash -c ",
        "sudo ",
        "docker run ",
        "vllm/x",
        "services:",
    ),
    *("  a:", "image: ", "- ", "ExecStart=", "$env:A", "&a", "<<", "python -m ", "uv run ", "${", "$(", " \\\n", "\n"),
    *"'\"$}`()&|><;= -–“#[]{%^*@!\\\t\0",
)


def test_every_text_is_a_command_or_refused() -> None:
    choose = random.Random(7)
    for _ in range(1000):
        text = "".join(choose.choices(PIECES, k=choose.randint(1, 12)))
        try:
            found = served(text)
        except FidelabError as error:  # any other error fails the test
            said = str(error)
        else:
            said = found.settings()["model"].replace("\n", " ")
        assert "\n" not in said, text
