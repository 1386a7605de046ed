"""The device and the software of a bench, for its record.

::

    python -m k16v8.bench.machine    # one JSON object; exit code 2 and one line where torch sees no usable GPU
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import k16v8
from k16v8.errors import K16V8Error, NotSupportedError, one_line
from k16v8.kernels.dispatch import PAGE_STEP

_PACKAGES = (
    *("torch", "triton", "transformers", "vllm", "sglang", "sglang-kernel"),
    *("flash_attn", "flash_attn_3", "flashinfer-python"),
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVERS = {11: 450, 12: 525, 13: 580}  # CUDA → the oldest driver that runs it, by NVIDIA's table of minor versions
_QUERIED = (
    *("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.limit", "power.draw", "temperature.gpu"),
)


def describe(device: torch.device) -> dict[str, object]:
    """Describe a device by name and sizes, and a GPU also by nvidia-smi's driver, clocks (MHz) and power (W)."""
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
    """Return the versions of k16v8, CUDA and the packages whose kernels may run; ``None`` for missing ones."""
    found: dict[str, str | None] = {"k16v8": k16v8.__version__, "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def slug(name: str) -> str:
    """Return a device's name in the form of a file name: ``nvidia-h200``."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def driver_version() -> str:
    """Return the version of the NVIDIA driver, by nvidia-smi or the kernel's file; empty where there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    if not found:
        try:
            found = re.findall(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", _DRIVER_FILE.read_text())
        except OSError:
            pass
    return found[0] if found else ""


def no_gpu(torch_version: str, cuda: str | None, driver: str) -> str:
    """Return one line that says why torch sees no GPU.

    Args:
        torch_version: ``torch.__version__``.
        cuda: ``torch.version.cuda``, ``None`` for a build without CUDA.
        driver: Of :func:`driver_version`.
    """
    seen = f"driver {driver} is installed" if driver else "no NVIDIA driver was found"
    if cuda is None:
        return f"torch {torch_version} is built without CUDA ({seen}): use a Python that has a CUDA build of torch"
    least = _DRIVERS.get(int(cuda.partition(".")[0]))
    needs = f"torch {torch_version} is built for CUDA {cuda}" + (f" and needs driver {least} or later" if least else "")
    if driver and (least is None or int(driver.partition(".")[0]) >= least):
        return f"torch sees no GPU: {seen}, {needs}; check CUDA_VISIBLE_DEVICES and nvidia-smi"
    remedy = "install a newer driver, or a torch for an older CUDA" if driver else "run this on a machine with a GPU"
    return f"torch sees no GPU: {seen}, {needs}; {remedy}"


def capability_notes(name: str, capability: str) -> list[str]:
    """Return what an NVIDIA GPU of this compute capability ("9.0") lacks, one line each.

    Raises:
        NotSupportedError: If it has no bfloat16, which every kernel needs.
    """
    found = tuple(map(int, capability.split(".")))
    if found < (8, 0):
        raise NotSupportedError(f"{name} has compute capability {capability}: the kernels need 8.0 or later (bfloat16)")
    if found < (8, 9):
        return [
            f"{name} (compute capability {capability}) has no FP8 types: the kernels convert values in software, and "
            "rivals that read FP8 are not measured"
        ]
    return []


def _describe_machine(device: torch.device) -> dict[str, Any]:
    """Everything that a session records before it measures."""
    from k16v8.bench.contenders import flash_attention_3

    found = describe(device)
    notes, target, devices = [], "", 0
    if device.type == "cuda":
        devices = torch.cuda.device_count()
        if torch.version.hip is None:
            notes = capability_notes(str(found["name"]), str(found["capability"]))
            target = "sm_" + str(found["capability"]).replace(".", "")
    try:
        fa3 = {"module": flash_attention_3(device), "reason": ""}
    except NotSupportedError as error:
        fa3 = {"module": "", "reason": one_line(error)}
    return {
        "device": found,
        "devices": devices,
        "driver": driver_version(),
        "versions": versions(),
        "slug": slug(str(found["name"])),
        "target": target,
        "page_step": PAGE_STEP,
        "fa3": fa3,
        "notes": notes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine as one JSON line.  Return the exit code: 0, or 2 where there is no usable device."""
    parser = argparse.ArgumentParser(prog="python -m k16v8.bench.machine", description="Describe this machine as JSON.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="[default: cuda]")
    options = parser.parse_args(argv)
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise NotSupportedError(no_gpu(torch.__version__, torch.version.cuda, driver_version()))
        print(json.dumps(_describe_machine(torch.device(options.device))))
    except K16V8Error as error:
        print(f"k16v8: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
