"""``fidelab doctor --system``: driver, GPUs, the links between them, and versions known to be bad.

Facts are read from files below a root folder, which tests record, and from the tools of the drivers.  Nothing is run on
a GPU.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fidelab.doctor.check import CAUGHT, DoctorCheck, reason
from fidelab.doctor.known_bad import KNOWN_BAD
from fidelab.results.numbers import one_line

_GROUP = "system"
_TOOLS = ("usr/bin", "usr/local/bin", "opt/rocm/bin")
_NVIDIA, _AMD = "0x10de", "0x1002"
_TOOL_LIMIT = 30.0  # seconds for a tool's answer
_PEER_OPTIONS = ("CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA")  # of a kernel whose AMD GPUs reach each other over PCIe
_MAX_CONFIG_CHARACTERS = 2**22  # a kernel's configuration has about 300,000
_XGMI, _PCIE = "11", "2"  # types of links in the kernel's topology of AMD GPUs


@dataclass(frozen=True)
class _GPU:
    """One GPU; ``kind``: its compute capability, or AMD's name of the processor.  Memory in MiB."""

    name: str
    kind: str
    total: int
    used: int


@dataclass
class System:
    """Sources of the check: files and tools below ``root``, and the packages of engines' environments.

    ``packages``: the package folder by environment; by default of this interpreter and of the engines that fidelab
    installed.
    """

    root: Path = Path("/")
    packages: Mapping[str, Path] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's content, stripped; empty if it cannot be read."""
        return _read(self.path(name))

    def tool(self, name: str, *words: str) -> str | None:
        """Return the output of a tool; ``None`` if it is absent or fails."""
        folders = os.pathsep.join(str(self.path(folder)) for folder in _TOOLS)
        if self.root == Path("/"):
            folders = os.pathsep.join((self.environ.get("PATH", ""), folders))
        found = shutil.which(name, path=folders)
        if found is None:
            return None
        try:
            done = subprocess.run(
                [found, *words], capture_output=True, text=True, errors="replace", timeout=_TOOL_LIMIT, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout


def examine_system(system: System | None = None) -> list[DoctorCheck]:
    """Check the driver, the GPUs, the links between them, and versions known to be bad.

    Known faults are ``broken``.  Losses of speed and unknowns are a ``warning``.
    """
    found: list[DoctorCheck] = []
    try:
        found.extend(_examined(system or System()))  # keeps its findings when it fails
    except CAUGHT as error:
        found.append(DoctorCheck(_GROUP, "fidelab", "broken", reason(error), "report it to fidelab", needed=True))
    return found


# ------------------------------------------------------------------------------------------------------- checks


def _examined(system: System) -> Iterator[DoctorCheck]:
    # Address and vendor of the PCI devices that draw or compute: GPUs
    displays: list[tuple[str, str]] = []
    for device in sorted(system.path("/sys/bus/pci/devices").glob("*")):
        if _read(device / "class").startswith(("0x03", "0x12")):
            displays.append((device.name, _read(device / "vendor")))
    cards = dict(displays)
    nvidia, amd = (sorted(n for n, v in cards.items() if v == vendor) for vendor in (_NVIDIA, _AMD))
    facts: dict[str, tuple[str, ...]] = {}
    match = re.search(r"Kernel Module.*?\s(\d{3}(?:\.\d+)+)\s", system.text("/proc/driver/nvidia/version") + "\n")
    driver = match[1] if match else ""
    rocm = system.text("/opt/rocm/.info/version").partition("-")[0]
    if driver or nvidia:
        yield _check_nvidia(system, driver)
        facts["NVIDIA driver"] = (driver,) if driver else ()
    if amd:
        yield _check_amd(system, rocm)
        facts["ROCm"] = (rocm,) if rocm else ()
    gpus = [*_nvidia_gpus(system), *_amd_gpus(system, amd)]
    facts["compute capability"] = tuple({gpu.kind for gpu in gpus if not gpu.kind.startswith("gfx")})
    facts["AMD GPU"] = tuple({gpu.kind for gpu in gpus if gpu.kind.startswith("gfx")})
    facts["GPUs"] = (str(len(gpus)),)
    for index, gpu in enumerate(gpus):
        kind = gpu.kind if gpu.kind.startswith("gfx") else f"compute capability {gpu.kind}"
        detail = f"{gpu.name}, {kind}, {gpu.total / 1024:.1f} GiB, {gpu.used / 1024:.1f} GiB in use"
        yield _ok(f"gpu {index}", detail)
    if not gpus:
        yield (
            _warning("gpu", "there is one, and no tool of its driver reports it", "install or load its driver")
            if set(cards.values()) & {_NVIDIA, _AMD}
            else _ok("gpu", "none")
        )
    if len(gpus) > 1:
        yield from _peers_nvidia(system)
        # Checks of the links by the kernel's topology: XGMI, PCIe, or none
        nodes = system.path("/sys/class/kfd/kfd/topology/nodes").glob("*")
        devices = {node.name: node for node in nodes if _property(node, "simd_count") not in ("", "0")}
        links = [link for node in devices.values() for kind in ("io", "p2p") for link in node.glob(f"{kind}_links/*")]
        found = {_property(link, "type") for link in links if _property(link, "node_to") in devices}
        if _XGMI in found:
            yield _ok("peer access", "by XGMI")
        elif _PCIE in found:
            yield _ok("peer access", "over PCIe")
        elif len(devices) > 1:
            yield _warning("peer access", "none: copies between GPUs go through host memory", _amd_peer_remedy(system))
    facts["CPU"] = ("AMX",) if re.search(r"^flags.*\bamx_tile\b", system.text("/proc/cpuinfo"), re.M) else ()
    firmware: list[str] = []
    for card in amd:
        with suppress(ValueError):
            firmware.append(str(int(system.text(f"/sys/bus/pci/devices/{card}/fw_version/mes_fw_version"), 16) & 0xFFF))
    facts["MES firmware"] = tuple(firmware)
    yield from _known_bad_checks(system, facts, dict(_environments(system)))


def _ok(name: str, detail: str) -> DoctorCheck:
    return DoctorCheck(name, _GROUP, "ok", one_line(detail))


def _warning(name: str, detail: str, remedy: str | None = None) -> DoctorCheck:
    return DoctorCheck(name, _GROUP, "warning", one_line(detail), remedy)


def _broken(name: str, detail: str, remedy: str) -> DoctorCheck:
    return DoctorCheck(name, _GROUP, "broken", one_line(detail), remedy, needed=True)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace").strip("\0 \n")
    except OSError:
        return ""


# --- drivers and GPUs


def _check_nvidia(system: System, driver: str) -> DoctorCheck:
    if not driver:
        return _broken(
            "driver",
            "an NVIDIA GPU is here, its kernel module is not loaded",
            "install NVIDIA's driver, or: modprobe nvidia",
        )
    kind = "open" if "Open Kernel Module" in system.text("/proc/driver/nvidia/version") else "proprietary"
    return _ok("driver", f"NVIDIA {driver}, {kind} kernel module")


def _check_amd(system: System, rocm: str) -> DoctorCheck:
    if not system.path("/sys/module/amdgpu").is_dir():
        return _broken(
            "driver", "an AMD GPU is here, the module amdgpu is not loaded", "install AMD's driver, or: modprobe amdgpu"
        )
    version = system.text("/sys/module/amdgpu/version")
    detail = f"amdgpu {version or 'of the kernel'}, ROCm {rocm or 'not installed'}"
    agents = system.tool("rocminfo")
    if agents is None and rocm:
        return _warning("driver", f"{detail}; rocminfo fails", "join the groups render and video, and log in again")
    return _ok("driver", detail)


def _nvidia_gpus(system: System) -> Iterator[_GPU]:
    query = "--query-gpu=name,compute_cap,memory.total,memory.used"
    for line in (system.tool("nvidia-smi", query, "--format=csv,noheader,nounits") or "").splitlines():
        fields = [part.strip() for part in line.split(",")]
        with suppress(ValueError):
            name, kind, total, used = fields
            yield _GPU(name, kind, *(int(text) if text.isdigit() else 0 for text in (total, used)))


def _amd_gpus(system: System, cards: Iterable[str]) -> Iterator[_GPU]:
    """Yield GPUs: names by rocminfo, which lists GPUs in the order of their addresses, and memory by the kernel."""
    agents = re.findall(
        r"^  Name:\s+(gfx\w+).*?^  Marketing Name:\s+(.*?)\s*$", system.tool("rocminfo") or "", re.M | re.S
    )
    for index, card in enumerate(cards):
        device = system.path(f"/sys/bus/pci/devices/{card}")
        total, used = (_read(device / f"mem_info_vram_{name}") for name in ("total", "used"))
        if not total.isdigit():
            continue
        kind, name = agents[index] if index < len(agents) else ("gfx?", "AMD GPU")
        yield _GPU(name, kind, int(total) >> 20, int(used or 0) >> 20)


# --- ways between GPUs


def _amd_peer_remedy(system: System) -> str:
    """Return the way to peer access of AMD GPUs, by the kernel's options and amdgpu's parameter where they are told."""
    try:
        with gzip.open(system.path("/proc/config.gz"), "rt", errors="replace") as file:
            built = set(file.read(_MAX_CONFIG_CHARACTERS).splitlines())
    except (OSError, EOFError, zlib.error):
        built = None
    lacking = [option for option in _PEER_OPTIONS if built is None or f"{option}=y" not in built]
    if built is not None and lacking:
        return f"build the kernel with {' and '.join(f'{option}=y' for option in lacking)}"
    if system.text("/sys/module/amdgpu/parameters/pcie_p2p") == "N":
        return "start the kernel with amdgpu.pcie_p2p=1"
    bios = "in the BIOS, enable Above 4G Decoding and Resizable BAR"
    return f"{bios}; the kernel needs {' and '.join(lacking)}" if lacking else bios


def _peers_nvidia(system: System) -> Iterator[DoctorCheck]:
    matrix = system.tool("nvidia-smi", "topo", "-p2p", "r")
    if matrix is None:
        return
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s+(X|\w+)\s", line)]
    words = [word for row in rows for word in row[1:] if word != "X" and not word.startswith("GPU")]
    meaning = {"CNS": "the chipset does not allow it", "GNS": "the GPU does not", "TNS": "the topology does not"}
    if why := ", ".join(meaning.get(word, word) for word in sorted({*words} - {"OK"})):
        remedy = "NCCL goes through host memory: prefer fewer, larger GPUs"
        yield _warning("peer access", f"not between all GPUs: {why}", remedy)
    elif words:
        yield _ok("peer access", "between all GPUs")


def _property(folder: Path, name: str) -> str:
    match = re.search(rf"^{name} (\S+)", _read(folder / "properties"), re.M)
    return match[1] if match else ""


# --- versions


def _environments(system: System) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield for each environment the versions of packages that the table of known-bad pairs names."""
    places = dict(system.packages) if system.packages is not None else dict(_installed())
    for name, folder in places.items():
        found: dict[str, str] = {}
        for info in sorted(folder.glob("*.dist-info")):
            package, _, version = info.name.removesuffix(".dist-info").partition("-")
            package = package.lower()
            if package == "torch":
                found["torch"] = version
                if match := re.search(r"\+cu(\d+)(\d)$", version):
                    found["CUDA of torch"] = f"{match[1]}.{match[2]}"
                elif match := re.search(r"\+rocm([\d.]+)", version):
                    found["ROCm of torch"] = match[1]
            elif package in ("nvidia_cuda_runtime", "nvidia_cuda_runtime_cu12", "nvidia_cuda_runtime_cu13"):
                found.setdefault("CUDA of torch", version)
            elif package.startswith("nvidia_nccl"):
                found["NCCL"] = version
        for library in folder.glob("llama_cpp/lib/libggml-cpu*.so"):
            with suppress(OSError):
                data = library.read_bytes()
                match_gcc = re.search(rb"GCC: \([^)]*\) (\d+\.\d+)", data)
                if match_gcc and b"ggml_backend_amx" in data:
                    found["GCC of llama.cpp"] = match_gcc[1].decode()
        yield name, found


def _installed() -> Iterator[tuple[str, Path]]:
    yield sys.prefix, Path(sysconfig.get_path("purelib"))
    with suppress(*CAUGHT):
        from fidelab.environments.environment import engines_dir

        for folder in sorted(engines_dir().glob("*/lib/python*/site-packages")):
            yield str(folder.parents[2]), folder


def _known_bad_checks(
    system: System, facts: Mapping[str, tuple[str, ...]], environments: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorCheck]:
    """Yield a check of each pair of the table that is here, once for each environment whose packages it names."""
    known = [
        (name, {**facts, **{key: (version,) for key, version in found.items()}}) for name, found in environments.items()
    ]
    hits: dict[str, DoctorCheck] = {}
    for place, here in known or [("", dict(facts))]:
        for pair in KNOWN_BAD:
            if met := pair.matching_versions(here, system.environ):
                where = f" in {Path(place).name}" if set(pair.conditions) - set(facts) else ""
                detail = f"{met}{where}: {pair.harm} ({pair.source})"
                hits.setdefault(detail, (_broken if pair.settled else _warning)("known bad", detail, pair.remedy))
    yield from hits.values()
    if not hits:
        yield _ok("known bad", f"none of {len(KNOWN_BAD)} pairs of versions is here")
