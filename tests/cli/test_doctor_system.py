"""``fidelab doctor --system`` on recorded machines: their files in a folder, and tools that print as theirs did."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fidelab.doctor import Diagnosis, DoctorCheck, system
from fidelab.doctor.known_bad import KNOWN_BAD, Pair
from fidelab.doctor.system import System, examine_system
from fidelab.doctor.text import lines
from tests.run.harness import cli

ROOT = Path(__file__).parents[2]
KERNEL = "6.14.0-33-generic"
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (x@y)  Tue Jan 1\nGCC version: 13\n"
SMI = """
if [ "$1" = topo ]; then printf ' \\tGPU0\\tGPU1\\n GPU0\\tX\\tOK\\n GPU1\\tOK\\tX\\n\\nLegend:\\n  OK = Status Ok\\n'
else printf 'NVIDIA RTX PRO 6000, 12.0, 97887, 1024\\nNVIDIA RTX PRO 6000, 12.0, 97887, 0\\n'; fi
"""
ROCMINFO = """cat <<'END'
Agent 1
*******
  Name:                    AMD Ryzen 9
  Marketing Name:          AMD Ryzen 9
*******
Agent 2
*******
  Name:                    gfx1201
  Uuid:                    GPU-1
  Marketing Name:          AMD Radeon AI PRO R9700
*******
Agent 3
*******
  Name:                    gfx1201
  Uuid:                    GPU-2
  Marketing Name:          AMD Radeon AI PRO R9700
END
"""


class Machine:
    """A recorded machine: files below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
        self.write("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 quiet\n")
        self.write("/proc/cpuinfo", "flags\t\t: fpu avx512f\n")
        self.environ: dict[str, str] = {}
        self.packages: dict[str, Path] = {}

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def tool(self, name: str, script: str, folder: str = "usr/bin") -> Path:
        path = self.write(f"{folder}/{name}", f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def card(self, address: str, vendor: str, bridge: str = "0000:00:01.1", **files: str) -> None:
        """A GPU below a bridge, as the kernel shows both."""
        device = f"/sys/devices/pci0000:00/{bridge}/{address}"
        given = {"class": "0x030000", "vendor": vendor, **files}
        for name, content in given.items():
            self.write(f"{device}/{name}", f"{content}\n")
        for name, place in ((address, device), (bridge, f"/sys/devices/pci0000:00/{bridge}")):
            link = self.root / "sys/bus/pci/devices" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(self.root / place.lstrip("/"))

    def package(self, environment: str, *names: str) -> None:
        folder = self.root / "envs" / environment / "site-packages"
        for name in names:
            (folder / f"{name}.dist-info").mkdir(parents=True)
        self.packages[environment] = folder

    def checks(self) -> list[DoctorCheck]:
        return examine_system(System(self.root, self.packages, self.environ))

    def check(self, name: str) -> DoctorCheck:
        [found] = [check for check in self.checks() if check.name == name]
        return found

    def bad(self) -> list[DoctorCheck]:
        return [check for check in self.checks() if check.status == "broken"]


@pytest.fixture
def nvidia(tmp_path: Path) -> Machine:
    """Two Blackwell cards, nothing wrong."""
    machine = Machine(tmp_path / "nvidia")
    machine.write("/proc/driver/nvidia/version", NVRM.format("580.65.06"))
    machine.tool("nvidia-smi", SMI)
    machine.card("0000:01:00.0", "0x10de")
    machine.card("0000:02:00.0", "0x10de", bridge="0000:00:03.1")
    machine.package("vllm", "torch-2.9.0+cu130", "nvidia_nccl_cu13-2.28.9")
    return machine


@pytest.fixture
def amd(tmp_path: Path) -> Machine:
    """Two RDNA4 cards, nothing wrong."""
    machine = Machine(tmp_path / "amd")
    (machine.root / "sys/module/amdgpu").mkdir(parents=True)
    machine.write("/opt/rocm/.info/version", "7.1.1-1234\n")
    machine.tool("rocminfo", ROCMINFO, "opt/rocm/bin")
    for address, bridge in (("0000:03:00.0", "0000:00:01.1"), ("0000:07:00.0", "0000:00:03.1")):
        memory = {"mem_info_vram_total": str(32 << 30), "mem_info_vram_used": str(1 << 30)}
        machine.card(address, "0x1002", bridge, **memory, **{"fw_version/mes_fw_version": "0x00000080"})
    for node in ("1", "2"):
        folder = f"/sys/class/kfd/kfd/topology/nodes/{node}"
        machine.write(f"{folder}/properties", "cpu_cores_count 0\nsimd_count 128\n")
        machine.write(f"{folder}/p2p_links/0/properties", f"type 2\nnode_from {node}\nnode_to {3 - int(node)}\n")
    machine.package("vllm", "torch-2.9.0+rocm7.0")
    return machine


def test_a_sound_machine_has_nothing_bad_and_is_described(nvidia: Machine, amd: Machine) -> None:
    for machine, driver, card, gpu, peers in (
        (nvidia, "NVIDIA 580.65.06, open kernel module", "gpu 0",
         "NVIDIA RTX PRO 6000, compute capability 12.0, 95.6 GiB, 1.0 GiB in use", "between all GPUs"),
        (amd, "amdgpu of the kernel, ROCm 7.1.1", "gpu 1",
         "AMD Radeon AI PRO R9700, gfx1201, 32.0 GiB, 1.0 GiB in use", "over PCIe"),
    ):  # fmt: skip
        checks = {check.name: check for check in machine.checks()}
        assert {check.status for check in checks.values()} == {"ok"}, checks
        assert [checks[name].detail for name in ("driver", card, "peer access")] == [driver, gpu, peers]


def test_gpus_that_do_not_reach_each_other_are_a_warning(nvidia: Machine, amd: Machine) -> None:
    nvidia.tool("nvidia-smi", SMI.replace("\\tOK", "\\tCNS"))
    assert "chipset" in nvidia.check("peer access").detail
    for file in (amd.root / "sys/class/kfd").rglob("p2p_links/0/properties"):
        file.unlink()
    assert "host memory" in amd.check("peer access").detail


P2P, DMA = "CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA"
BIOS = "in the BIOS, enable Above 4G Decoding and Resizable BAR"


@pytest.mark.parametrize(
    ("kernel", "parameter", "remedy"),
    [
        (f"{DMA}=y\n# {P2P} is not set\n", "N", f"build the kernel with {P2P}=y"),
        ("CONFIG_X=y\n", "Y", f"build the kernel with {P2P}=y and {DMA}=y"),
        (f"{P2P}=y\n{DMA}=y\n", "N", "start the kernel with amdgpu.pcie_p2p=1"),
        (f"{P2P}=y\n{DMA}=y\n", "Y", BIOS),
        (None, "N", "start the kernel with amdgpu.pcie_p2p=1"),
        (None, "", f"{BIOS}; the kernel needs {P2P} and {DMA}"),
    ],
)
def test_amd_gpus_without_peer_access_name_the_option_of_the_kernel_that_is_missing(
    amd: Machine, kernel: str | None, parameter: str, remedy: str
) -> None:
    for file in (amd.root / "sys/class/kfd").rglob("p2p_links/0/properties"):
        file.unlink()
    amd.write("/sys/module/amdgpu/parameters/pcie_p2p", f"{parameter}\n")
    if kernel is not None:
        (amd.root / "proc").mkdir(exist_ok=True)
        (amd.root / "proc/config.gz").write_bytes(gzip.compress(kernel.encode()))
    assert amd.check("peer access").remedy == remedy


def test_a_damaged_configuration_of_the_kernel_is_taken_as_unknown(amd: Machine) -> None:
    for file in (amd.root / "sys/class/kfd").rglob("p2p_links/0/properties"):
        file.unlink()
    (amd.root / "proc").mkdir(exist_ok=True)
    (amd.root / "proc/config.gz").write_bytes(gzip.compress(b"CONFIG_X=y" * 100)[:-9])
    assert amd.check("peer access").remedy == f"{BIOS}; the kernel needs {P2P} and {DMA}"


def test_a_gpu_without_its_driver_is_bad(tmp_path: Path) -> None:
    for vendor, module in (("0x10de", "nvidia"), ("0x1002", "amdgpu")):
        machine = Machine(tmp_path / module)
        machine.card("0000:01:00.0", vendor)
        [bad] = machine.bad()
        assert bad.name == "driver"
        assert f"modprobe {module}" in (bad.remedy or "")


def test_a_driver_older_than_the_cuda_of_torch_is_bad_in_the_environment_that_has_it(nvidia: Machine) -> None:
    nvidia.write("/proc/driver/nvidia/version", NVRM.format("575.51.03"))
    nvidia.package("sglang", "torch-2.9.0", "nvidia_cuda_runtime_cu12-12.8.90")
    [bad] = nvidia.bad()
    assert bad.detail.startswith("CUDA of torch 13.0 with NVIDIA driver 575.51.03 in vllm: torch cannot use the GPU")
    assert "580" in (bad.remedy or "")


def test_a_torch_without_kernels_for_the_gpu_is_bad_and_what_reports_disagree_about_a_warning(nvidia: Machine) -> None:
    nvidia.package("new", "nvidia_nccl_cu13-2.30.7")
    assert nvidia.bad() == []
    [warned] = [check for check in nvidia.checks() if check.name == "known bad"]
    assert (warned.status, "NCCL 2.30.7" in warned.detail) == ("warning", True)
    nvidia.package("old", "torch-2.7.0", "nvidia_cuda_runtime_cu12-12.6.77")
    [bad] = nvidia.bad()
    assert bad.detail.startswith("compute capability 12.0 with CUDA of torch 12.6.77 in old:")


def test_rocm_whose_rccl_hangs_on_rdna4_is_bad_unless_its_protocol_is_set(amd: Machine) -> None:
    amd.write("/opt/rocm/.info/version", "7.2.4-99\n")
    [bad] = amd.bad()
    assert "NCCL_PROTO=Simple" in (bad.remedy or "")
    assert bad.detail.startswith("2 GPUs with gfx1201 with ROCm 7.2.4")
    amd.environ = {"NCCL_PROTO": "simple"}
    assert amd.bad() == []


def test_llama_cpp_that_gcc_12_built_with_amx_is_bad(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("/proc/cpuinfo", "flags\t\t: fpu amx_tile amx_bf16\n")
    machine.package("llamacpp", "llama_cpp_python-0.3.16")
    library = "envs/llamacpp/site-packages/llama_cpp/lib/libggml-cpu.so"
    machine.write(library, b"\0ggml_backend_amx_mul_mat\0GCC: (Debian 12.2.0-14) 12.2.0\0")
    assert [check.name for check in machine.bad()] == ["known bad"]
    machine.write(library, b"\0ggml_backend_amx_mul_mat\0GCC: (Debian 14.2.0-1) 14.2.0\0")
    assert machine.bad() == []


@pytest.mark.parametrize("pair", KNOWN_BAD, ids=lambda pair: " ".join(pair.conditions.values()))
def test_a_row_of_the_table_holds_at_its_versions_and_not_without_one_of_them(pair: object) -> None:
    assert isinstance(pair, Pair)
    facts: dict[str, tuple[str, ...]] = {}
    for name, condition in pair.conditions.items():
        first = condition.split(",")[0]
        facts[name] = ("0.1" if first.startswith("<") else first.lstrip(">="),)
    assert pair.matching_versions(facts, {})
    assert pair.source
    assert pair.remedy
    for name in facts:
        assert not pair.matching_versions({**facts, name: ()}, {})
    if pair.variable:
        assert not pair.matching_versions(facts, dict([pair.variable]))


def test_no_line_is_longer_than_80_columns_and_each_finding_says_what_to_do(amd: Machine) -> None:
    for file in (amd.root / "sys/class/kfd").rglob("p2p_links/0/properties"):
        file.unlink()
    amd.write("/opt/rocm/.info/version", "6.3.1\n")
    checks = amd.checks()
    assert {check.status for check in checks} == {"ok", "warning", "broken"}
    assert all(check.remedy for check in checks if check.status != "ok")
    shown = lines(Diagnosis(tuple(checks), good="well"), 80)
    assert max(map(len, shown)) <= 80
    verdict = next(number for number, line in enumerate(shown) if line.startswith("not ready"))
    assert shown[verdict].startswith("not ready: known bad: gfx1201 with ROCm 6.3.1")
    assert all(line.startswith("  ") for line in shown[verdict + 1 :])  # the rest of a long one


def test_the_command_exits_with_1_where_something_is_known_to_be_bad(
    amd: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> tuple[int, Mapping[str, object]]:
        done = cli("doctor", "--system", "--json", cwd=tmp_path)
        return done.code, json.loads(done.out)

    monkeypatch.setattr(system, "System", lambda: System(amd.root, amd.packages, {}))
    code, record = command()
    assert (code, record["ready"], record["reasons"]) == (0, True, [])
    amd.write("/opt/rocm/.info/version", "6.3.1\n")
    code, record = command()
    assert (code, record["ready"]) == (1, False)


def test_it_needs_the_standard_library_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "fidelab.doctor", "--system"]
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "known bad" in done.stdout, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1)


def test_a_fault_of_its_own_keeps_what_was_found(nvidia: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_peers_nvidia", lambda _system: 1 / 0)
    checks = nvidia.checks()
    assert checks[-1].group == "fidelab"
    assert {"driver", "gpu 1"} <= {check.name for check in checks}
