"""``fidelab doctor --system``: driver, GPUs, the ways between them, the kernel's options, versions known to be bad.

Facts are read from files below a root, which tests record, and from the tools of the drivers; nothing is changed.
Where there are two GPUs or more, copies between them are timed and an all-reduce is tried, in a process of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fidelab.doctor.check import CAUGHT, DoctorCheck, reason
from fidelab.doctor.known_bad import KNOWN_BAD
from fidelab.results.numbers import one_line

__all__ = ["System", "examine_system", "transports"]

_GROUP = "system"
_TOOLS = ("usr/bin", "usr/local/bin", "opt/rocm/bin")
_NVIDIA, _AMD = "0x10de", "0x1002"
_TOOL_LIMIT = 30.0  # seconds for a tool's answer
_PROBE_LIMIT = 180.0  # seconds for copies and one all-reduce, torch's import included
_KERNEL_OPTIONS = ("CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_HSA_AMD_P2P")
_ACS, _REDIRECT = 0x0D, 0x04  # PCIe capability; the bit of its control register that redirects requests of peers
_XGMI, _PCIE = "11", "2"  # types of links in the kernel's topology of AMD GPUs
_VARIABLES = ("NCCL_", "RCCL_", "HSA_", "HIP_VISIBLE", "ROCR_VISIBLE", "CUDA_VISIBLE")
_VIA = re.compile(r"NCCL INFO .*\bvia ([A-Z][\w/ -]*?)(?:/\d+)*\s*(?:comm |$)")
_PROBE = """
import json, sys, time
import torch
count = torch.cuda.device_count()
x = [torch.zeros(1 << 28, dtype=torch.uint8, device=i) for i in range(count)]
def sync():
    for i in range(count):
        torch.cuda.synchronize(i)
for i in range(count):
    for j in range(count):
        if i != j:
            x[j].copy_(x[i]); sync()
            began = time.perf_counter()
            for _ in range(4):
                x[j].copy_(x[i])
            sync()
            speed = 4 * x[i].numel() / (time.perf_counter() - began) / 1e9
            print("copy", json.dumps([i, j, speed, torch.cuda.can_device_access_peer(i, j)]), flush=True)
print("reducing", flush=True)
torch.cuda.nccl.all_reduce([part[:1 << 20].view(torch.float32) for part in x]); sync()
print("reduced", flush=True)
"""


@dataclass(frozen=True)
class _GPU:
    """One GPU; ``kind``: its compute capability, or AMD's name of the processor.  Memory in MiB."""

    name: str
    kind: str
    total: int
    used: int


@dataclass
class System:
    """What is read: files below ``root``, the tools there, and packages of engines' environments.

    ``packages``: by environment the folder of its packages; by default those of this interpreter and of the engines
    that fidelab installed.  ``python``: what measures; by default that of the first of them whose torch is for GPUs.
    """

    root: Path = Path("/")
    packages: Mapping[str, Path] | None = None
    python: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """A file's content, stripped; empty where it cannot be read."""
        try:
            return self.path(name).read_text("utf-8", "replace").strip("\0 \n")
        except OSError:
            return ""

    def tool(self, name: str, *words: str) -> str | None:
        """What a tool prints; ``None`` where it is absent or fails."""
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

    def kernel_option(self, name: str) -> str | None:
        """``y``, ``m`` or ``n``; ``None`` where the kernel's configuration cannot be read."""
        text = ""
        with suppress(OSError, EOFError):
            text = gzip.decompress(self.path("/proc/config.gz").read_bytes()).decode("utf-8", "replace")
        kernel = self.text("/proc/sys/kernel/osrelease")
        text = text or self.text(f"/boot/config-{kernel}") or self.text(f"/lib/modules/{kernel}/config")
        match = re.search(rf"^{name}=(\w)", text, re.M)
        return match[1] if match else "n" if text else None


def examine_system(system: System | None = None) -> list[DoctorCheck]:
    """Driver, GPUs, links, kernel, the measured ways between GPUs, and versions known to be bad.

    What is known to be bad is ``broken``; what costs speed, or cannot be told, is a ``warning``.
    """
    found: list[DoctorCheck] = []
    try:
        found.extend(_examined(system or System()))  # keeps what it has found when it fails
    except CAUGHT as error:
        found.append(DoctorCheck(_GROUP, "fidelab", "broken", reason(error), "report it to fidelab", needed=True))
    return found


def transports(log: str) -> dict[str, int]:
    """By NCCL's or RCCL's own log (``NCCL_DEBUG=INFO``): transport → connections that take it, most first."""
    found: dict[str, int] = {}
    for match in filter(None, map(_VIA.search, log.splitlines())):
        found[match[1]] = found.get(match[1], 0) + 1
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


# ------------------------------------------------------------------------------------------------------- checks


def _examined(system: System) -> Iterator[DoctorCheck]:
    cards = dict(_displays(system))
    nvidia, amd = (sorted(n for n, v in cards.items() if v == vendor) for vendor in (_NVIDIA, _AMD))
    facts: dict[str, tuple[str, ...]] = {}
    yield _kernel(system)
    driver = _nvidia_driver(system)
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
        yield _none(cards)
    yield from _links(system, [*nvidia, *amd])
    several = len(gpus) > 1
    if amd:
        yield from _kernel_options(system, several)
    if several:
        yield _iommu(system)
        yield _acs(system, [*nvidia, *amd])
        if nvidia:
            yield from _peers_nvidia(system)
        if amd:
            yield from _peers_amd(system)
    facts["CPU"] = ("AMX",) if re.search(r"^flags.*\bamx_tile\b", system.text("/proc/cpuinfo"), re.M) else ()
    facts["MES firmware"] = tuple(_firmware(system, amd))
    environments = dict(_environments(system))
    bad = list(_known_bad(system, facts, environments))
    if any(check.status == "broken" and "GPUs with" in check.detail for check in bad):  # some hang the whole machine
        yield _ok("bandwidth", "between GPUs: unmeasured, because of what is known bad below")
    else:
        yield from _measured(system, several, environments)
    yield from _variables(system)
    yield from _fabric(system, driver)
    yield from bad


def _ok(name: str, detail: str) -> DoctorCheck:
    return DoctorCheck(name, _GROUP, "ok", one_line(detail))


def _warning(name: str, detail: str, remedy: str | None = None) -> DoctorCheck:
    return DoctorCheck(name, _GROUP, "warning", one_line(detail), remedy)


def _broken(name: str, detail: str, remedy: str) -> DoctorCheck:
    return DoctorCheck(name, _GROUP, "broken", one_line(detail), remedy, needed=True)


def _kernel(system: System) -> DoctorCheck:
    words = [
        word for word in system.text("/proc/cmdline").split() if "iommu" in word or word.startswith(("pci=", "amdgpu."))
    ]
    return _ok("kernel", ", ".join([system.text("/proc/sys/kernel/osrelease") or "not told", *words]))


def _none(cards: Mapping[str, str]) -> DoctorCheck:
    if set(cards.values()) & {_NVIDIA, _AMD}:
        return _warning("gpu", "there is one, and no tool of its driver tells about it", "install or load its driver")
    return _ok("gpu", "none: nothing between GPUs to look at")


def _displays(system: System) -> Iterator[tuple[str, str]]:
    """Address and vendor of PCI devices that draw or compute: of GPUs."""
    for device in _devices(system):
        if _read(device, "class").startswith(("0x03", "0x12")):
            yield device.name, _read(device, "vendor")


def _devices(system: System) -> list[Path]:
    with suppress(OSError):
        return sorted(system.path("/sys/bus/pci/devices").iterdir())
    return []


def _read(device: Path, name: str) -> str:
    try:
        return (device / name).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


# --- drivers and GPUs


def _nvidia_driver(system: System) -> str:
    match = re.search(r"Kernel Module.*?\s(\d{3}(?:\.\d+)+)\s", system.text("/proc/driver/nvidia/version") + "\n")
    return match[1] if match else ""


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
    """Names by rocminfo, which lists GPUs in the order of their addresses; memory by the kernel."""
    agents = re.findall(
        r"^  Name:\s+(gfx\w+).*?^  Marketing Name:\s+(.*?)\s*$", system.tool("rocminfo") or "", re.M | re.S
    )
    for index, card in enumerate(cards):
        device = system.path(f"/sys/bus/pci/devices/{card}")
        total, used = (_read(device, f"mem_info_vram_{name}") for name in ("total", "used"))
        if not total.isdigit():
            continue
        kind, name = agents[index] if index < len(agents) else ("gfx?", "AMD GPU")
        yield _GPU(name, kind, int(total) >> 20, int(used or 0) >> 20)


def _firmware(system: System, cards: Iterable[str]) -> Iterator[str]:
    for card in cards:
        with suppress(ValueError):
            text = _read(system.path(f"/sys/bus/pci/devices/{card}"), "fw_version/mes_fw_version")
            yield str(int(text, 16) & 0xFFF)


def _fabric(system: System, driver: str) -> Iterator[DoctorCheck]:
    """NVSwitch machines: the fabric manager has to be of the driver's very version."""
    match = re.search(r"(\d{3}(?:\.\d+)+)", system.tool("nv-fabricmanager", "--version") or "")
    if match and driver and match[1] != driver:
        remedy = f"install the fabric manager {driver}, and restart it"
        yield _broken(
            "fabric manager", f"{match[1]} beside driver {driver}: GPUs behind NVSwitch cannot be used", remedy
        )


# --- links and the kernel


def _links(system: System, cards: Iterable[str]) -> Iterator[DoctorCheck]:
    for card in cards:
        device = system.path(f"/sys/bus/pci/devices/{card}")
        names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
        width, widest, speed, fastest = (_read(device, name).removesuffix(" PCIe") for name in names)
        if not width or not speed:
            continue
        detail = f"{card}: x{width} of x{widest}, {speed} of {fastest}"
        if width.isdigit() and widest.isdigit() and int(width) < int(widest):
            yield _warning(
                "pcie link", detail, "put the card into a slot with all lanes, or live with slower loads and copies"
            )
        else:
            yield _ok("pcie link", detail + ("" if speed == fastest else " (slower while idle)"))


def _kernel_options(system: System, several: bool) -> Iterator[DoctorCheck]:
    """What AMD's driver needs for copies between GPUs over PCIe."""
    values = {name: system.kernel_option(name) for name in _KERNEL_OPTIONS}
    if None in values.values():
        yield _warning(
            "kernel options", "the kernel's configuration cannot be read", "look for it in /boot or /proc/config.gz"
        )
        return
    detail = ", ".join(f"{name.removeprefix('CONFIG_')}={value}" for name, value in values.items())
    lacking = [name for name, value in values.items() if value == "n"]
    if lacking and several:
        remedy = f"boot a kernel with {', '.join(lacking)}: without, copies between GPUs go through host memory"
        yield _warning("kernel options", detail, remedy)
    else:
        yield _ok("kernel options", detail)


def _iommu(system: System) -> DoctorCheck:
    groups = system.path("/sys/kernel/iommu_groups")
    kinds = {_read(group, "type") or "on" for group in groups.iterdir()} if groups.is_dir() else set()
    if not kinds:
        return _ok("iommu", "off")
    if kinds <= {"identity"}:
        return _ok("iommu", "on, passes addresses through")
    remedy = "add iommu=pt to the kernel's command line, or turn the IOMMU off in the BIOS"
    return _warning("iommu", "on, translates addresses: copies between GPUs may hang, get lost or be slow", remedy)


def _acs(system: System, cards: Iterable[str]) -> DoctorCheck:
    """Access control on the bridges above GPUs, which sends what they say to each other up to the root."""
    bridges = {part for card in cards for part in _above(system, card)}
    states = {bridge: _redirects(system.path(f"/sys/bus/pci/devices/{bridge}/config")) for bridge in sorted(bridges)}
    redirecting = [bridge for bridge, state in states.items() if state]
    if redirecting:
        remedy = "turn ACS off in the BIOS, or boot with pci=disable_acs_redir=BRIDGES"
        return _warning("pcie acs", f"redirects copies between GPUs at {', '.join(redirecting)}", remedy)
    if None in states.values():
        return _warning("pcie acs", "only root may read it", "run it again as root: sudo fidelab doctor --system")
    return _ok("pcie acs", "no bridge above a GPU redirects")


def _above(system: System, card: str) -> list[str]:
    """Addresses of the bridges above a device, by where it lies in the tree of devices."""
    place = system.path(f"/sys/bus/pci/devices/{card}").resolve()
    return [
        parent.name for parent in place.parents if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", parent.name)
    ]


def _redirects(config: Path) -> bool | None:
    """Whether a bridge's configuration space redirects requests; ``None`` where only its first bytes can be read."""
    try:
        data = config.read_bytes()
    except OSError:
        return None
    at = 0x100
    if len(data) <= at:
        return None
    seen = set()
    while at and at + 8 <= len(data) and at not in seen:
        seen.add(at)
        header = int.from_bytes(data[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(data[at + 6] & _REDIRECT)
        at = header >> 20
    return False


def _peers_nvidia(system: System) -> Iterator[DoctorCheck]:
    matrix = system.tool("nvidia-smi", "topo", "-p2p", "r")
    if matrix is None:
        return
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s+(X|\w+)\s", line)]
    words = [word for row in rows for word in row[1:] if word != "X" and not word.startswith("GPU")]
    bad = sorted({word for word in words if word != "OK"})
    if bad:
        meaning = {"CNS": "the chipset does not allow it", "GNS": "the GPU does not", "TNS": "the topology does not"}
        why = ", ".join(meaning.get(word, word) for word in bad)
        yield _warning(
            "peer access", f"not between all GPUs: {why}", "NCCL goes through host memory: prefer fewer, larger GPUs"
        )
    elif words:
        yield _ok("peer access", "between all GPUs")


def _peers_amd(system: System) -> Iterator[DoctorCheck]:
    """By the kernel's topology: XGMI, PCIe, or none."""
    nodes = system.path("/sys/class/kfd/kfd/topology/nodes")
    gpus = (
        {node.name: node for node in sorted(nodes.iterdir()) if _property(node, "simd_count") not in ("", "0")}
        if nodes.is_dir()
        else {}
    )
    found: set[str] = set()
    for node in gpus.values():
        for link in [*node.glob("io_links/*"), *node.glob("p2p_links/*")]:
            if _property(link, "node_to") in gpus:
                found.add(_property(link, "type"))
    if _XGMI in found:
        yield _ok("peer access", "by XGMI")
    elif _PCIE in found:
        yield _ok("peer access", "over PCIe")
    elif len(gpus) > 1:
        remedy = "see kernel options above; BIOS: enable Above 4G Decoding and Resizable BAR"
        yield _warning("peer access", "none: copies between GPUs go through host memory", remedy)


def _property(folder: Path, name: str) -> str:
    match = re.search(rf"^{name} (\S+)", _read(folder, "properties"), re.M)
    return match[1] if match else ""


# --- what is measured


def _measured(system: System, several: bool, environments: Mapping[str, Mapping[str, str]]) -> Iterator[DoctorCheck]:
    if not several:
        yield _ok("bandwidth", "between GPUs: unmeasured, there are not two")
        return
    able = [name for name, found in environments.items() if "CUDA of torch" in found or "ROCm of torch" in found]
    python = system.python or (_interpreter(able[0]) if able else None)
    if python is None:
        yield _warning(
            "bandwidth", "between GPUs: unmeasured, no torch for GPUs is installed", "fidelab engines install vllm"
        )
        return
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET,GRAPH"}
    process = subprocess.Popen(
        [python, "-c", _PROBE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**system.environ, **debug},
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=_PROBE_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        if "reducing" in output.splitlines():
            remedy = "set NCCL_P2P_DISABLE=1; see iommu, pcie acs and known bad versions here"
            yield _broken("transport", f"an all-reduce did not end within {_PROBE_LIMIT:g} s", remedy)
    yield from _speeds(output)
    yield from _transport(output)


def _speeds(output: str) -> Iterator[DoctorCheck]:
    copies = [json.loads(line.removeprefix("copy ")) for line in output.splitlines() if line.startswith("copy [")]
    if not copies:
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
        yield _warning("bandwidth", f"between GPUs: unmeasured, {last.strip()[:120]}", "see torch in fidelab doctor")
        return
    speeds = [speed for _, _, speed, _ in copies]
    i, j, slowest, _ = min(copies, key=lambda copy: copy[2])
    peers = "all by peer access" if all(peer for *_, peer in copies) else "not all by peer access"
    yield _ok("bandwidth", f"between GPUs: {slowest:.1f} ({i} to {j}) to {max(speeds):.1f} GB/s, {peers}")


def _transport(output: str) -> Iterator[DoctorCheck]:
    chosen = transports(output)
    if not chosen:
        return
    detail = ", ".join(f"{name} ({count} connections)" for name, count in chosen.items())
    if any(name.startswith("NET/Socket") for name in chosen):
        yield _warning(
            "transport",
            detail,
            "NCCL goes over the network within one machine: unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE",
        )
    else:
        yield _ok("transport", detail)


def _variables(system: System) -> Iterator[DoctorCheck]:
    found = [f"{name}={value}" for name, value in sorted(system.environ.items()) if name.startswith(_VARIABLES)]
    if found:
        yield _ok("variables", ", ".join(found))


# --- versions


def _environments(system: System) -> Iterator[tuple[str, dict[str, str]]]:
    """By environment the versions of packages that the table of known-bad pairs names."""
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


def _interpreter(environment: str) -> str | None:
    python = Path(environment) / "bin" / "python"
    return str(python) if os.access(python, os.X_OK) else None


def _known_bad(
    system: System, facts: Mapping[str, tuple[str, ...]], environments: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorCheck]:
    """Each pair of the table that is here, once for each environment whose packages it names."""
    known = [
        (name, {**facts, **{key: (version,) for key, version in found.items()}}) for name, found in environments.items()
    ]
    hits: dict[str, DoctorCheck] = {}
    for place, here in known or [("", dict(facts))]:
        for pair in KNOWN_BAD:
            met = pair.found(here, system.environ)
            if not met:
                continue
            where = f" in {Path(place).name}" if set(pair.conditions) - set(facts) else ""
            detail = f"{met}{where}: {pair.harm} ({pair.source})"
            make = _broken if pair.settled else _warning
            hits.setdefault(detail, make("known bad", detail, pair.remedy))
    yield from hits.values()
    if not hits:
        yield _ok("known bad", f"none of {len(KNOWN_BAD)} pairs of versions is here")
