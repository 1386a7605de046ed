"""Description of this machine: its processor, GPUs and memory, and fidelab's commit."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fidelab.core import plain_json


def cpu_name() -> str:
    """Return the processor's model name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return " ".join(next(names, "").split()) or platform.processor() or platform.machine()


def graphics(root: Path = Path("/")) -> dict[str, Any]:
    """Return ``gpus`` (names) and ``gpu_driver`` (version), as reported by the kernel's NVIDIA and AMD drivers.

    The result is empty without a GPU.  Only files are read, so that no driver starts.
    """
    nvidia = root / "proc/driver/nvidia"
    named = [_file_text(path) for path in sorted(nvidia.glob("gpus/*/information"))]
    gpus = [name for text in named for name in re.findall(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)]
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _file_text(nvidia / "version"))
    driver = version[1] if version else _file_text(root / "sys/module/amdgpu/version").strip()
    if driver and not gpus:
        names = (_file_text(path).strip() for path in sorted(root.glob("sys/class/drm/card*/device/product_name")))
        gpus = [name for name in names if name]
    return {**({"gpus": gpus} if gpus else {}), **({"gpu_driver": driver} if driver else {})}


@cache
def gpu_memory(root: Path = Path("/")) -> tuple[float, ...]:
    """Return the bytes of each GPU's memory, as nvidia-smi or the kernel's AMD driver reports them; empty without."""
    import shutil
    import subprocess

    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
            return tuple(float(line) * 2**20 for line in listed.splitlines() if line.strip())
    files = sorted(root.glob("sys/class/drm/card*/device/mem_info_vram_total"))
    return tuple(float(text) for path in files if (text := _file_text(path).strip()).isdecimal())


@cache
def machine() -> str:
    """Return processor and GPUs; equal machines run the same kernels."""
    return "; ".join([cpu_name(), *graphics().get("gpus", [])])


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


@cache
def source_commit() -> str | None:
    """Return the commit of fidelab's own code, with ``-dirty`` if tracked files differ from it.

    It comes from git for a checkout, and from the metadata for a package installed from a repository, else unknown.
    """
    import subprocess
    from importlib.metadata import PackageNotFoundError, distribution

    import fidelab

    root = Path(fidelab.__file__).resolve().parents[2]
    if (root / ".git").exists():
        # Without optional locks: a run writes nothing into the checkout, and one that is killed leaves no index.lock.
        git = ["git", "--no-optional-locks", "-C", str(root)]
        with suppress(OSError, subprocess.SubprocessError):
            commit, changes = (
                subprocess.run([*git, *words], capture_output=True, text=True, timeout=30, check=True).stdout.strip()
                for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
            )
            return commit + ("-dirty" if changes else "")
    with suppress(PackageNotFoundError, LookupError, TypeError, ValueError):
        origin = plain_json(distribution("fidelab").read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])
    return None


def host_memory() -> int:
    """Return the bytes of memory that this process may use: of the machine, or of its control group."""
    import psutil

    total, group = int(psutil.virtual_memory().total), cgroup_memory()
    return min(total, group[0]) if group is not None else total


def cgroup_memory(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int] | None:
    """Return the lowest memory limit of this process' control groups and the least memory left, both in bytes.

    File cache that the kernel would give up counts as left.  ``None`` without a limit or without control groups.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits, left = [], []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # the limits of parent groups apply, too
            limit, used = (_number(root / folder / name) for name in names[:2])
            if limit is not None and used is not None:
                limits.append(limit)
                left.append(max(0, limit - used + _statistic(root / folder / "memory.stat", names[2])))
    return (min(limits), min(left)) if limits else None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _statistic(file: Path, key: str) -> int:
    try:
        pairs = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get(key, 0))
