"""A pasted server command runs as arms, and the command in the report starts the same server."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from fidelab.config.schema import Experiment
from fidelab.config.serve import read_served
from fidelab.engines.llamacpp.serve import python_server
from fidelab.models import Model, resolve
from fidelab.plan.arms import resolve_arm
from fidelab.plan.speed import REPEATS
from tests.real.harness import NEEDS_FP8, installed
from tests.real.servers import HERE, serving
from tests.run.harness import Done, cli

pytestmark = [pytest.mark.long, pytest.mark.model]
SMALL = ("--axes", "kld", "--windows", 2, "--n-ctx", 64, "--control", "none", "--no-floor", "--device", "cpu")


def pasted(command: str, change: str, cwd: Path) -> Done:
    done = cli("compare", "--serve", command, "--change", change, *SMALL, "--threads", 1, cwd=cwd)
    assert done.code == 0, done.err
    assert done.arm(change)["status"] == "ok"
    return done


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Variables and words as a shell makes them of a line of the report."""
    words = [str(Path(word).expanduser()) if word.startswith("~") else word for word in shlex.split(command)]
    first = next(n for n, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:first]), words[first:]


def answered(url: str, path: str, **body: object) -> str:
    data = json.dumps(body).encode() if body else None
    with urlopen(Request(f"{url}{path}", data, {"Content-Type": "application/json"}), timeout=120) as response:
        return str(response.read().decode())


@NEEDS_FP8
def test_the_command_of_vllm_in_the_report_starts_the_server_that_was_compared(smollm2: Model, tmp_path: Path) -> None:
    python = installed("vllm").python
    command = (
        f"vllm serve {smollm2.path} --served-model-name served --enforce-eager --max-model-len 256 --max-num-seqs 3 "
        "--kv-cache-memory-bytes 32M --port 1 --dtype bfloat16"
    )
    done = pasted(command, "--kv-cache-dtype fp8_e4m3", tmp_path)
    assert done.report["settings"]["serve"]["ignored"] == dict.fromkeys(
        ("--served-model-name served", "--port 1"), "only concerns serving"
    )
    assert done.arm("--kv-cache-dtype fp8_e4m3")["ran"]["k_format"] == "fp8_e4m3"
    shown = done.arm("--kv-cache-dtype fp8_e4m3")["serve_command"]
    details = cli("report", "latest", "--details", cwd=tmp_path)
    assert f" {shown}\n" in details.out
    variables, words = words_of(shown)
    assert words[:2] == ["vllm", "serve"]
    with serving([python, str(HERE / "vllm_serve.py"), *words[1:]], tmp_path / "log", variables) as url:
        [model] = json.loads(answered(url, "/v1/models"))["data"]
        assert (model["id"], model["max_model_len"]) == ("served", 256)
        assert 'cache_dtype="fp8_e4m3"' in answered(url, "/metrics")


def test_the_command_of_llama_cpp_in_the_report_starts_the_server_that_was_compared(
    smollm2: Model, tmp_path: Path
) -> None:
    python = installed("llamacpp").python
    unrotated = {"LLAMA_ATTN_ROT_DISABLE": "1"}
    flags = "-c 256 -b 128 -ub 64 -fa on --alias served --port 1 -t 1"
    command = f"LLAMA_ATTN_ROT_DISABLE=1 llama-server -m {smollm2.gguf} {flags}"
    done = pasted(command, "-ctk q8_0 -ctv q4_0", tmp_path)
    ran = done.arm("-ctk q8_0 -ctv q4_0")["ran"]
    assert (ran["k_dtype"], ran["v_dtype"], ran["k_rotated"]) == ("q8_0", "q4_0", False)
    for role in ("reference", "-ctk q8_0 -ctv q4_0"):  # measured unasked, in the process that saved the outputs
        [rate] = done.arm(role)["benches"]["decode"]["metrics"]
        assert (rate["unit"], rate["value"] > 0, len(rate["repeats"])) == ("tok/s", True, REPEATS)
    shown = done.arm("-ctk q8_0 -ctv q4_0")["serve_command"]
    variables, words = words_of(shown)
    assert (variables, words[0]) == (unrotated, "llama-server")
    assert "-c 256 --alias served --port 1" in shown
    # The package brings a server with other flags: it is told what the command says once it is read again.
    served = read_served(" ".join(map(shlex.quote, words)), lambda engine: {})
    experiment = Experiment.model_validate({**served.settings(), "device": "cpu", "candidates": ["q8_0"]})
    arm = resolve_arm(experiment, experiment.reference, resolve(experiment.model))
    log = tmp_path / "log"
    host = python_server(arm, "127.0.0.1", 1)
    at = host.index("--host")
    settings = [*host[1:at], *host[at + 4 :], "--n_ctx", "256", "--verbose", "true"]
    with serving([python, *settings], log, {}) as url:
        found = json.loads(answered(url, "/v1/completions", prompt="One, two,", max_tokens=4))
        assert found["usage"]["completion_tokens"] == 4
    assert re.search(r"K \(q8_0\).*V \(q4_0\)", log.read_text(errors="replace"))
