"""Inspect the installed packages of an engine's environment: whether they are unmodified, and their target device.

Everything is read from the packages' files; none of them is imported.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import platform
import re
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import fidelab
from fidelab.core import canonical_json, digest, plain_json

_GPU_FILES = {"cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvmap"), "hip": ("/dev/kfd",)}
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one after every start of the machine
_LLAMA_LIBRARIES = {"cuda": "libggml-cuda", "hip": "libggml-hip"}


def provenance(packages: Sequence[str]) -> dict[str, str]:
    """Return the state of each installed distribution: ``stock``, ``modified: …`` or ``built from …``.

    ``stock``: the hashes of all its Python files are those of the package's RECORD; compiled files are not read.
    """
    return {name: _label(metadata.distribution(name)) for name in packages if is_installed(name)}


def shims() -> list[dict[str, str]]:
    """Return ``{"folder", "sha256"}`` of each folder on PYTHONPATH except fidelab's own, hashing Python files."""
    own_package = Path(fidelab.__file__).resolve().parent
    folders = [Path(text) for text in os.environ.get("PYTHONPATH", "").split(os.pathsep) if text]
    return [
        {"folder": str(folder), "sha256": _content(folder)}
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and (folder / "fidelab").resolve() != own_package
    ]


def build(packages: Sequence[str]) -> str | None:
    """Return the device that the engine's packages are built for: ``cuda``, ``hip`` or ``cpu``; ``None`` if unknown."""
    if any(name.endswith("-cpu") and is_installed(name) for name in packages):
        return "cpu"
    return _llama_build() if "llama-cpp-python" in packages else _torch_build()


def device(built: str | None) -> str:
    """Return ``cuda`` or ``hip`` if the packages are built for it and the kernel has such a device, else ``cpu``."""
    return built if built and any(Path(file).exists() for file in _GPU_FILES.get(built, ())) else "cpu"


def gpu_files() -> list[str]:
    """Return the device files of GPUs. Without any, libraries need not be asked."""
    return [file for names in _GPU_FILES.values() for file in names if Path(file).exists()]


def state(packages: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """Return a hash of everything that an engine's answers about itself depend on; ``None`` if that is unknown.

    It covers size and time of each file of the distributions, of fidelab and of k16v8.  It also covers the folders on
    ``sys.path``, which change with every installation, shims, ``variables``, Python, devices, and the boot time of the
    machine (for drivers and hardware).  It is ``None`` for distributions built from local sources.
    """
    distributions = [metadata.distribution(name) for name in packages if is_installed(name)]
    if any(_source(distribution) for distribution in distributions):
        return None
    files: list[str] = []
    roots = [str(folder) for folder in map(package_folder, ("fidelab", "k16v8")) if folder]
    for base, recorded in map(_recorded, distributions):
        files += [f"{base}/{name}" for name in recorded if "__pycache__" not in name.split("/")]
        roots += [f"{base}/{root}" for root in _roots(recorded)]
    files += [f"{root}/{name}" for root in roots for name in _python_files(root)]
    boot = _BOOT.read_text("utf-8") if _BOOT.exists() else platform.node()
    return digest(
        canonical_json([sys.version, sys.executable, boot, gpu_files(), shims(), dict(variables)]), *_stats(files)
    )


def _stats(files: Iterable[str]) -> Iterator[str]:
    """Size and time of files and of the folders on ``sys.path``."""
    for path in (*sorted(set(files)), *sys.path):
        try:
            status = Path(path or ".").stat()
        except OSError:
            yield f"{path} is not there"
            continue
        yield f"{path} {status.st_size} {status.st_mtime_ns}"


def _torch_build() -> str | None:
    folder = package_folder("torch")
    if folder is None:
        return None
    text = (folder / "version.py").read_text("utf-8")
    named = [name for name in ("hip", "cuda") if re.search(rf"^{name}\b[^=]*= *['\"]", text, re.MULTILINE)]
    return named[0] if named else "cpu"


def _llama_build() -> str | None:
    folder = package_folder("llama_cpp")
    if folder is None:
        return None
    libraries = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or folder / "lib")  # an own build
    names = [path.name for path in libraries.glob("*")]
    return next((kind for kind, stem in _LLAMA_LIBRARIES.items() if any(n.startswith(stem) for n in names)), "cpu")


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; ``None`` without it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def versions_of(*names: str) -> dict[str, str]:
    """Return the versions of those of some distributions that are installed."""
    return {name: metadata.version(name) for name in names if is_installed(name)}


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed in this interpreter's environment."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _label(distribution: metadata.Distribution) -> str:
    if source := _source(distribution):
        return f"built from {source}"
    base, files = _recorded(distribution)
    changed = sorted({*_altered(base, files), *_added(base, files)})
    if not changed:
        return "stock"
    differ = "1 file differs" if len(changed) == 1 else f"{len(changed)} files differ"
    return f"modified: {differ} from the package, first {changed[0]}"


def _recorded(distribution: metadata.Distribution) -> tuple[str, dict[str, str]]:
    """Folder of a distribution, and for each file that RECORD lists its hash, as ``sha256=…``, or ``""``.

    ``Distribution.files`` has the same files as paths, whose making takes seconds for an engine, and leaves out missing
    ones since Python 3.12.
    """
    base, record = str(distribution.locate_file("")).rstrip("/"), distribution.read_text("RECORD")
    if record is None:
        return base, {file.as_posix(): "" for file in distribution.files or []}
    return base, {name: expected for name, expected, *_ in csv.reader(record.splitlines())}


def _source(distribution: metadata.Distribution) -> str | None:
    """Return the source of a distribution that was not installed from a package index."""
    try:
        direct = plain_json(distribution.read_text("direct_url.json") or "null")
    except ValueError:
        return None
    if not direct:
        return None
    commit = direct.get("vcs_info", {}).get("commit_id", "")
    return str(direct["url"]).removeprefix("file://") + (f"@{commit[:12]}" if commit else "")


def _altered(base: str, files: Mapping[str, str]) -> Iterator[str]:
    """Python files whose hash is not that of RECORD, or that are missing."""
    for name, recorded in files.items():
        if not (recorded and name.endswith(".py")):
            continue
        kind, _, expected = recorded.partition("=")
        path = f"{base}/{name}"
        try:
            status = Path(path).stat()
            actual = _hash(path, kind, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except OSError:
            yield name
            continue
        if actual != expected.rstrip("="):
            yield name


@functools.lru_cache(maxsize=1 << 16)  # a process that plans often reads a file again only after a change
def _hash(path: str, kind: str, _version: tuple[int, ...]) -> str:
    raw = hashlib.new(kind, Path(path).read_bytes()).digest()
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def _added(base: str, files: Mapping[str, str]) -> Iterator[str]:
    """Python files in the package's folders that RECORD does not list: some engines import every file there."""
    for root in _roots(files):
        for name in _python_files(f"{base}/{root}"):
            if (found := f"{root}/{name}") not in files:
                yield found


def _roots(files: Iterable[str]) -> set[str]:
    """The names of a distribution's packages."""
    return {name.partition("/")[0] for name in files if name.count("/") == 1 and name.endswith("/__init__.py")}


def _content(folder: Path) -> str:
    parts: list[bytes | str] = []
    for name in _python_files(folder):
        parts += [name, (folder / name).read_bytes()]
    return digest(*parts)


def _python_files(folder: str | Path) -> list[str]:
    """Python files of a folder, relative to it, in a fixed order, without hidden folders and environments inside."""
    sources = []
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not Path(place, name, "pyvenv.cfg").exists()
        ]
        inside = place[len(str(folder)) + 1 :].replace(os.sep, "/")
        sources += [f"{inside}/{name}".lstrip("/") for name in files if name.endswith(".py")]
    return sorted(sources)
