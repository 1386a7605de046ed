"""The device and the software of a bench, for its record."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import k16v8

__all__ = ["describe", "slug", "versions"]

_PACKAGES = ("torch", "triton", "transformers", "flash_attn", "flash_attn_3", "flashinfer-python")
_QUERIED = (
    *("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.limit", "power.draw", "temperature.gpu"),
)


def describe(device: torch.device) -> dict[str, object]:
    """Name and sizes; on a GPU also what nvidia-smi says of driver, clocks (MHz) and power (W), where it is there."""
    if device.type != "cuda":
        return {"type": "cpu", "name": _processor(), "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
        "l2": found.L2_cache_size,
        **_nvidia_smi(str(found.uuid)),
    }


def _nvidia_smi(uuid: str) -> dict[str, object]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(_QUERIED, values, strict=True)) if len(values) == len(_QUERIED) else {}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu {names[0] if names else platform.machine()}"


def versions() -> dict[str, str | None]:
    """Of k16v8, CUDA and the packages whose kernels may run; ``None`` for what is not installed."""
    found: dict[str, str | None] = {"k16v8": k16v8.__version__, "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def slug(name: str) -> str:
    """A device's name as a file's: ``nvidia-h200``."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
