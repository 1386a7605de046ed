"""Table of versions that do not work together: drivers, runtimes, libraries and GPUs.

A row is added if a report names both versions and their effect; the row describes its source in words.  Rows with
contradicting reports are warnings.  All others make ``fidelab doctor --system`` exit with 1.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fidelab.doctor.software import release

Facts = Mapping[str, tuple[str, ...]]
"""Component → its versions: several where GPUs differ; for one without versions its name."""

_OPERATORS = {"<": operator.lt, ">=": operator.ge, "==": operator.eq}
_CONDITION = re.compile(r"(<|>=|==)(.+)")


@dataclass(frozen=True)
class Pair:
    """Two components that do not work together.

    ``conditions``: the affected versions (``>=545,<546``) or the required name, by fact.  ``variable``: an environment
    variable, with the value that avoids the harm.  ``settled``: no report contradicts it.
    """

    conditions: Mapping[str, str]
    harm: str
    remedy: str
    source: str
    variable: tuple[str, str] | None = None
    settled: bool = True

    def matching_versions(self, facts: Facts, environ: Mapping[str, str]) -> str:
        """Return the versions found here as text.

        The text is empty if the pair is not here, or the harm is avoided.
        """
        if self.variable and environ.get(self.variable[0], "").lower() == self.variable[1].lower():
            return ""
        met = []
        for name, condition in self.conditions.items():
            version = next((version for version in facts.get(name, ()) if _satisfies(version, condition)), None)
            if version is None:
                return ""
            text = f"{version} {name}" if name == "GPUs" else f"{name} {version}"
            met.append(version if version == condition else text)
        return " with ".join(met)


def _satisfies(version: str, condition: str) -> bool:
    parts = [_CONDITION.fullmatch(part) for part in condition.split(",")]
    if not all(parts):
        return version == condition
    return all(_OPERATORS[part[1]](release(version), release(part[2])) for part in parts if part)


_CUDA_NOTES = "the minimum driver versions in the CUDA release notes"
_SEVERAL = {"GPUs": ">=2"}

KNOWN_BAD: tuple[Pair, ...] = (
    Pair(
        {"CUDA of torch": ">=13", "NVIDIA driver": "<580"},
        "torch cannot use the GPU",
        "update the driver to 580 or newer, or install torch built for CUDA 12",
        _CUDA_NOTES,
    ),
    Pair(
        {"CUDA of torch": ">=12,<13", "NVIDIA driver": "<525"},
        "torch cannot use the GPU",
        "update the driver to 525 or newer",
        _CUDA_NOTES,
    ),
    Pair(
        {"compute capability": ">=10", "CUDA of torch": "<12.8"},
        "torch has no kernels for this GPU",
        "install torch built for CUDA 12.8 or newer",
        "CUDA 12.8 is the first toolkit that compiles for Blackwell",
    ),
    Pair(
        {"compute capability": ">=10", "NVIDIA driver": "<570"},
        "the driver does not know this GPU",
        "update the driver to 570 or newer",
        "the driver that came with CUDA 12.8 is the first for Blackwell",
    ),
    *(
        Pair(
            {**_SEVERAL, "NVIDIA driver": f">={branch},<{branch + 1}"},
            "the driver reports copies between GPUs that do not arrive: NCCL hangs",
            "update the driver, or set NCCL_P2P_DISABLE=1",
            "reports in vLLM's issue 5458",
            ("NCCL_P2P_DISABLE", "1"),
        )
        for branch in (545, 555)
    ),
    Pair(
        {**_SEVERAL, "compute capability": ">=10", "NCCL": ">=2.30.4"},
        "some runs hang while NCCL sets up NVLink multicast",
        "set NCCL_NVLS_ENABLE=0, or install an NCCL before 2.30.4",
        "NVIDIA's nccl issue 2167: seen on B300 and GB10, not at every start, and not by all",
        ("NCCL_NVLS_ENABLE", "0"),
        settled=False,
    ),
    Pair(
        {**_SEVERAL, "AMD GPU": "gfx1201", "ROCm": ">=7.2,<7.3"},
        "all-reduce never ends: its RCCL takes the tuning of another GPU",
        "set NCCL_PROTO=Simple, or go back to ROCm 7.1.1",
        "vLLM's issue 40980, where ROCm 7.1.1 is sound",
        ("NCCL_PROTO", "Simple"),
    ),
    *(
        Pair(
            {"AMD GPU": name, "ROCm": "<6.4.1"},
            "ROCm does not know this GPU",
            "install ROCm 6.4.1 or newer",
            "AMD's system requirements list RDNA4 from 6.4.1 on",
        )
        for name in ("gfx1200", "gfx1201")
    ),
    Pair(
        {"AMD GPU": "gfx1151", "MES firmware": "==131"},  # 0x83
        "the GPU hangs under load, or faults on memory",
        "install another linux-firmware: MES 0x80 is sound",
        "AMD's ROCm issue 5724",
    ),
    Pair(
        {"CPU": "AMX", "GCC of llama.cpp": ">=12,<13"},
        "llama.cpp crashes in the first prefill: its AMX code is miscompiled",
        "fidelab setup install llamacpp --cpu, which builds without AMX",
        "found with fidelab's own trial of llama.cpp",
    ),
)
