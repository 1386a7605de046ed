"""Many ways to paste one command mean the same: wrappers, prompts, line ends, quotes, variables, files of the field."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from fidelab.config.serve import read_served
from fidelab.engines.base import engine_class

N_VARIANTS = 200
JSON = '{"method": "ngram", "num_speculative_tokens": 2}'


@dataclass(frozen=True)
class Base:
    """A server's command: its program, an image that starts it by itself, its model and its other words."""

    program: tuple[str, ...]
    image: str
    model: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...]
    env: Mapping[str, str] = field(default_factory=dict)
    image_has_entrypoint: bool = True

    @property
    def words(self) -> list[str]:
        """All words after the program."""
        return [*self.model, *(word for flag in self.flags for word in flag)]


BASES = (
    Base(
        ("vllm", "serve"),
        "vllm/vllm-openai:latest",
        ("owner/m",),
        (
            ("--kv-cache-dtype", "fp8"),
            ("--max-model-len", "4096"),
            ("--speculative-config", JSON),
            ("--enforce-eager",),
        ),
        {"VLLM_A": "1", "VLLM_B": "a b"},
    ),
    Base(
        ("python3", "-m", "vllm.entrypoints.openai.api_server"),
        "lazymio/vllm-backport:latest-sm80",
        ("--model", "owner/m"),
        (("-tp", "2"), ("--port", "8001"), ("--block-size=32",)),
    ),
    Base(
        ("python3", "-m", "sglang.launch_server"),
        "lmsysorg/sglang:latest",
        ("--model-path", "owner/m"),
        (("--kv-cache-dtype", "fp8_e5m2"), ("--disable-cuda-graph",), ("--host", "0.0.0.0")),
        {"SGLANG_A": "1"},
        image_has_entrypoint=False,
    ),
    Base(
        ("llama-server",),
        "ghcr.io/ggml-org/llama.cpp:server-cuda",
        ("-m", "m.gguf"),
        (("-ctk", "q8_0"), ("-ctv", "q8_0"), ("-fa", "on"), ("-ngl", "-1"), ("--jinja",)),
        {"LLAMA_ARG_UBATCH": "64"},
    ),
)


def meaning(text: str) -> dict[str, Any]:
    """What a comparison takes of a command, whatever starts the server."""
    served = read_served(text, lambda engine: engine_class(engine).controlled)
    found = served.settings()
    ignored = found.pop("serve")["words"]
    return {**found, "engine": served.engine, "ignored": sorted(ignored)}


class Writer:
    """Random choices of one variant."""

    def __init__(self, base: Base, seed: int) -> None:
        self.base = base
        self.random = random.Random(seed)

    def one(self, *choices: str) -> str:
        return self.random.choice(choices)

    def often(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def quoted(self, word: str) -> str:
        """A word in quotes that a shell takes off again."""
        if re.fullmatch(r"[\w./:=@-]+", word) and self.often(0.7):
            return word
        if '"' in word or "'" in word or self.often():
            return shlex.quote(word)
        return f'"{word}"'

    def dashed(self, word: str) -> str:
        """A flag with the dashes that editors make of hyphens."""
        if not word.startswith("-") or word[1:2].isdigit() or not self.often(0.15):
            return word
        if word.startswith("--"):
            return self.one("––", "—", "―", "−−", "–") + word[2:]
        return self.one("–", "−") + word[1:]

    def wrapped(self) -> list[str]:
        """Words of programs that start a server, none or several."""
        wrappers = (
            "sudo -E", "sudo -u me", "numactl --interleave=all", "numactl -N 0 -m 0", "taskset -c 0-3", "nice -n 5",
            "nice -10", "ionice -c 2 -n 0", "time", "time -p", "timeout 1h", "timeout -k 5 -s INT 60", "stdbuf -oL",
            "stdbuf -o L -e L", "nohup", "exec", "env", "env -u HTTP_PROXY", "setsid", "srun -N1 --gres gpu:1 --pty",
            "srun --ntasks=1 -p gpu", "mpirun -np 1 --allow-run-as-root", "mpirun -n 1 --mca btl self --bind-to none",
            "uv run", "uv run --with vllm --no-sync", "uvx", "uvx --from vllm", "conda run -n env --live-stream",
            "micromamba run -p /opt/env", "poetry run", "docker exec -it name", "docker exec -u root -w /x name",
            "podman exec name", "kubectl exec -it pod -c server --", "apptainer exec --nv a.sif", "pixi run -e cuda",
        )  # fmt: skip
        return [self.random.choice(wrappers) for _ in range(self.random.choice((0, 0, 1, 1, 2, 3)))]

    def program(self) -> list[str]:
        """The program, by a path, with switches or with another version."""
        first, *rest = self.base.program
        if rest[:1] == ["-m"]:
            first = self.one("python", "python3", "python3.12", "/opt/env/bin/python3")
            rest = [*self.one("", "-u", "-O -u", "-X dev", "-B -W ignore").split(), *rest]
        elif self.often(0.3):
            first = f"/opt/env/bin/{first}"
        return [first, *rest]

    def script(self) -> str:
        """A shell script or a line of one."""
        above, words = [], []
        env = dict(self.base.env)
        if self.often(0.4):
            above += [self.one("#!/bin/bash", "#!/usr/bin/env bash"), self.one("set -e", "set -euo pipefail")]
        above += [self.one("# a comment; don't run", "cd /srv", "source env/bin/activate", "mkdir -p logs", "")]
        for name in [*env]:
            if self.often():
                above.append(f"export {name}={shlex.quote(env.pop(name))}")
            elif self.often(0.3):
                above += [f"{name}={shlex.quote(env.pop(name))}", f"export {name}"]
        for n, word in enumerate(self.base.words):
            if not word.startswith("-") and self.often(0.3):
                above.append(f"X{n}={shlex.quote(word)}")
                words.append(self.one(f'"$X{n}"', f'"${{X{n}}}"', f'"${{X{n}:-other}}"'))
            elif not word.startswith("-") and self.often(0.1) and '"' not in word:
                words.append(f"${{NOT_SET_HERE_{n}:-{word}}}")
            else:
                words.append(self.quoted(self.dashed(word)))
        if self.often(0.15):
            above.append(f"ARGS=({' '.join(words)})")
            words = ['"${ARGS[@]}"']
        begin = [f"{name}={self.quoted(value)}" for name, value in env.items()]
        start = [*begin, *self.wrapped(), *map(self.quoted, self.program())]
        after = self.one("", "", "", " &", " 2>&1 | tee log", " > log 2>&1 &", ";", " >> log; echo done")
        return "\n".join([*above, self.joined([*start, *words]) + after]) + self.one("", "\n")

    def joined(self, words: Sequence[str]) -> str:
        """Words in one line or in several."""
        ends = [" ", " \\\n  ", " \\  \n", " \\   # a comment, isn't it\n  ", " \\\n  # a line\n  "]
        ends = ends[:1] if self.often(0.3) else ends
        return words[0] + "".join(self.random.choice(ends) + word for word in words[1:])

    def prompted(self) -> str:
        """A line from a terminal, with its prompts."""
        prompt = self.one(
            "$ ", "user@host:~$ ", "(env) $ ", "(base) root@a1b2:/workspace# ", "[me@node dir]$ ", "% ", "❯ "
        )
        begin = [f"{name}={shlex.quote(value)}" for name, value in self.base.env.items()]
        words = [*self.wrapped(), *self.program(), *map(self.quoted, self.base.words)]
        if self.often():
            lines = [f"export {text}" for text in begin]
        else:
            lines, words = [], [*begin, *words]
        lines.append(self.one(" ", " \\\n> ", " \\\n  ").join(words))
        text = "\n".join(prompt + line for line in lines)
        return f"```bash\n{text}\n```" if self.often(0.2) else text

    def shell_in_quotes(self) -> str:
        """``bash -c``, with variables outside or inside of its text."""
        words = [*self.program(), *map(shlex.quote, self.base.words)]
        env = [f"{name}={shlex.quote(value)}" for name, value in self.base.env.items()]
        inside = [f"export {text};" for text in env] if self.often() else env
        start = [*self.wrapped(), *self.one("bash -c", "sh -c", "bash -lc", "/bin/bash -c", "bash -l -c").split()]
        if self.often():
            return " ".join([*start, shlex.quote(" ".join([*inside, *words]))])
        return " ".join([*env, *start, shlex.quote(self.one("", "exec ") + " ".join(words))])

    def image_words(self) -> list[str]:
        """Words after the image: flags alone for images that start the server, else the whole command."""
        whole = not self.base.image_has_entrypoint or self.often(0.2)
        return [*(self.base.program if whole else ()), *self.base.words]

    def docker(self) -> str:
        """``docker run``."""
        program = self.one("docker run", "sudo docker run", "podman run", "docker container run", "nerdctl run")
        flags = [
            "--rm",
            "-it",
            "-d",
            "--gpus all",
            "--gpus '\"device=0,1\"'",
            "--ipc=host",
            "-p 8000:8000",
            "-v /data:/x",
        ]
        flags += [
            "--shm-size 16g",
            "--restart always",
            "--name ds",
            "--runtime=nvidia",
            "--network=host",
            "-v /x:/y:ro",
        ]
        flags = self.random.sample(flags, 4)
        for name, value in self.base.env.items():
            flags.append(self.one("-e ", "--env ", "-e", "--env=") + f"{name}={shlex.quote(value)}")
        self.random.shuffle(flags)
        words, image = self.image_words(), self.base.image
        if self.often(0.25):
            first, *rest = self.base.program
            words, flags = [*rest, *self.base.words], [*flags, self.one("--entrypoint ", "--entrypoint=") + first]
        elif self.often(0.2):
            text = shlex.join([*self.base.program, *self.base.words])
            words, flags = ["-c", text], [*flags, self.one("--entrypoint bash", "--entrypoint /bin/sh")]
        return self.joined([program, *flags, image, *map(self.quoted, words)])

    def compose(self) -> str:
        """A Compose file or its service."""
        service: dict[str, Any] = {"image": self.base.image, "restart": "always", "ports": ["8000:8000"]}
        words = self.image_words()
        if self.often(0.3):
            service["image"] = f"${{NOT_SET_IMAGE:-{self.base.image}}}"
        if self.often(0.3):
            service["entrypoint"] = list(self.base.program) if self.often() else " ".join(self.base.program)
            words = list(self.base.words)
        elif self.often(0.2):
            service["entrypoint"] = ["/bin/sh", "-c"]
            words = [shlex.join([*self.base.program, *self.base.words])]
        service["command"] = words if self.often() else shlex.join(words)
        if env := dict(self.base.env):
            service["environment"] = env if self.often() else [f"{name}={value}" for name, value in env.items()]
        if self.often(0.3):
            devices = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
            service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
        services = {"server": service}
        if self.often():
            services = {"web": {"image": "nginx:latest", "command": "nginx -g off", "env_file": ".env"}, **services}
            service["depends_on"] = ["web"]
        text = yaml.safe_dump(
            {"services": services} if self.often(0.8) else {"server": service}, sort_keys=False, width=60
        )
        return self.one("", "---\n", "# how we serve\n", "version: '3'\n" if "services:" in text else "") + text

    def systemd(self) -> str:
        """A unit or its ``ExecStart=`` line."""
        env = [f"Environment={shlex.quote(f'{name}={value}')}" for name, value in self.base.env.items()]
        words = [*self.program(), *map(shlex.quote, self.base.words)]
        start = "ExecStart=" + self.one("", "-", "") + self.one(" ", " \\\n    ").join(words)
        if self.often(0.3):
            return "\n".join([*env, start])
        head = ["[Unit]", "Description=A server", "After=network.target", "", "[Service]", "User=me"]
        tail = ["Restart=on-failure", "ExecStartPre=/bin/sleep 5", "", "[Install]", "WantedBy=multi-user.target"]
        return "\n".join([*head, *env, start, *tail])

    def kubernetes(self) -> str:
        """A manifest, a container of one, or a part of a container."""
        container: dict[str, Any] = {"name": "server", "image": self.base.image, "ports": [{"containerPort": 8000}]}
        words = list(self.base.words)
        if self.often(0.4):
            container |= {"command": ["/bin/sh", "-c"], "args": [shlex.join([*self.base.program, *words])]}
        elif self.often() or not self.base.image_has_entrypoint:
            container |= {"command": list(self.base.program), "args": words}
        else:
            container["args"] = words
        env = [{"name": name, "value": value} for name, value in self.base.env.items()]
        if self.often(0.3) and container["args"] == words:
            at = next(n for n, word in enumerate(words) if not word.startswith("-"))
            env.append({"name": "MODEL", "value": words[at]})
            container["args"] = [*words[:at], "$(MODEL)", *words[at + 1 :]]
        container |= {"env": env} if env else {}
        container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        form = self.one("manifest", "list", "container", "json")
        if form == "container":
            return yaml.safe_dump(container, sort_keys=False)
        if form == "list":
            return yaml.safe_dump(
                [{"name": "proxy", "image": "envoy:1", "args": ["-c", "x"]}, container], sort_keys=False
            )
        pod = {"template": {"spec": {"containers": [container]}}}
        whole = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": pod}
        if form == "json":
            return json.dumps(whole)
        service = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}}
        return yaml.safe_dump_all([whole, service], sort_keys=False)

    def powershell(self) -> str:
        """A command line of PowerShell."""
        lines = [f"$env:{name} = '{value}'" for name, value in self.base.env.items()]
        words = [word if re.fullmatch(r"[\w./:=@-]+", word) else f"'{word}'" for word in self.base.words]
        first, *rest = self.base.program
        program = self.one(
            f".\\{first}.exe", f"C:\\bin\\{first}.exe", f"& 'C:\\my bin\\{first}.exe'", f".\\bin\\{first}.exe"
        )
        end = self.one(" `\n  ", " ")
        return "\n".join([*lines, end.join([" ".join([program, *rest]), *words])])

    def cmd(self) -> str:
        """A command line or a batch file of cmd."""
        lines = ["@echo off", "REM it's a comment"] if self.often() else []
        lines += [self.one(f"set {name}={value}", f'set "{name}={value}"') for name, value in self.base.env.items()]
        words = []
        for word in self.base.words:
            escaped = word.replace('"', '\\"')
            words.append(word if re.fullmatch(r"[\w./:=@-]+", word) else f'"{escaped}"')
        first, *rest = self.base.program
        words = [" ".join([f"C:\\bin\\{first}.exe", *rest]), *words]
        return "\n".join([*lines, self.one(" ^\n  ", " ").join(words)])


KINDS: Mapping[str, Callable[[Writer], str]] = {
    "script": Writer.script,
    "prompted": Writer.prompted,
    "bash -c": Writer.shell_in_quotes,
    "docker": Writer.docker,
    "compose": Writer.compose,
    "systemd": Writer.systemd,
    "kubernetes": Writer.kubernetes,
    "powershell": Writer.powershell,
    "cmd": Writer.cmd,
}


def expected(base: Base, kind: str, text: str) -> dict[str, Any]:
    """Meaning of the plain command; the variable that a Kubernetes argument refers to is set there, too."""
    env = dict(base.env)
    found = meaning(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()),
                              shlex.join([*base.program, *base.words])]))  # fmt: skip
    if kind == "kubernetes" and "$(MODEL)" in text:
        found["env"]["MODEL"] = next(word for word in base.words if not word.startswith("-"))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_of_a_command_mean_the_same(kind: str) -> None:
    texts = set()
    for n in range(N_VARIANTS):
        base = BASES[n % len(BASES)]
        text = KINDS[kind](Writer(base, n))
        texts.add(text)
        try:
            found = meaning(text)
        except Exception as error:
            raise AssertionError(f"{error}\n{text}") from error
        assert found == expected(base, kind, text), text
    assert len(texts) > N_VARIANTS / 8
