"""``--bin`` with a real ``llama-perplexity``, its figures and its log.  scripts/test-engines builds the program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fidelab.inputs.files import DATA
from fidelab.models import gguf_file

FOLDER = os.environ.get("FIDELAB_LLAMA_PERPLEXITY", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not FOLDER, reason="FIDELAB_LLAMA_PERPLEXITY names no folder with llama-perplexity"),
]
TEXT = DATA / "long.md"
SIZE = ("-c", "128", "--chunks", "8", "-t", "2")


def own(model: Path, *words: str) -> str:
    command = [
        f"{FOLDER}/llama-perplexity",
        "-m",
        str(model),
        "-f",
        str(TEXT),
        "-fa",
        "on",
        "--no-escape",
        *SIZE,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compare(folder: Path, model: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fidelab", "compare", model, "--engine", "llamacpp", "--bin", FOLDER, *words]
    usual = ["--text", str(TEXT), "--n-ctx", "128", "--windows", "8", "--threads", "2", "--json"]
    done = subprocess.run([*command, *usual], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def mean(arm: dict[str, Any]) -> float:
    [metric] = [m for m in arm["axes"]["kld"]["metrics"] if m["key"] == "mean" and not m["cell"]]
    return float(metric["value"])


def test_the_mean_is_that_of_the_program_itself(tmp_path: Path) -> None:
    model, base = gguf_file("smollm2-135m"), tmp_path / "base.kld"
    own(model, "--kl-divergence-base", str(base))
    report = compare(tmp_path, str(model), "--kv", "q8_0", "--kv", "q4_0", "--kv", "q8_0/q5_1")
    for arm in report["candidates"]:
        k, v = arm["kv"]["k"], arm["kv"]["v"]
        said = own(model, "-ctk", k, "-ctv", v, "--kl-divergence-base", str(base), "--kl-divergence")
        [theirs] = re.findall(r"Mean +KLD: +([\d.]+)", said)
        assert abs(mean(arm) - float(theirs)) <= 1e-5 + 0.005 * float(theirs)
        assert (arm["ran"]["proof"]["named"], arm["ran"]["k_dtype"], arm["ran"]["v_dtype"]) == ("shown", k, v)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_bytes_of_the_cache_are_those_that_the_program_allocates(name: str, tmp_path: Path) -> None:
    """Gemma's windowed layers have a cache of their own."""
    [arm] = compare(tmp_path, name, "--kv", "q8_0")["candidates"]
    said = own(gguf_file(name), "-ctk", "q8_0", "-ctv", "q8_0", "-lv", "4")
    caches = re.findall(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +\d+ layers, +\d+/(\d+) seqs", said)
    held = sum(float(size) * 2**20 / (int(cells) * int(streams)) for size, cells, streams in caches)
    assert arm["ran"]["cache_bytes_per_token"] == pytest.approx(held, rel=0.01)
