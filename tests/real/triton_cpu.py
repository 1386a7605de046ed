"""Triton's interpreter as its CPU backend, so that vLLM's Model Runner V2 runs where no compiler for CPUs is installed.

A plug-in keeps vLLM's choice of the asynchronous scheduler, which its CPU platform otherwise undoes.

vLLM runs V2 on CPUs where Triton has a backend named ``cpu``.  With ``TRITON_INTERPRET=1`` no kernel is compiled, so
the backend needs to be found and to name its device, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

_DRIVER = """import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError
"""
_COMPILER = """from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language):
        raise NotImplementedError

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}

    def pack_metadata(self, metadata):
        return metadata

    def get_codegen_implementation(self, options):
        return {}
"""
_PLUGIN = """def keep_scheduling():
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"].__func__

    def check_and_update_config(cls, config):
        asynchronous = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
"""


def shim(folder: Path) -> Path:
    """A folder for ``--pythonpath`` that brings the backend; ``TRITON_INTERPRET=1`` has to be set, too."""
    package, about = folder / "triton_interpreter", folder / "triton_interpreter-0.dist-info"
    for each in (package, about):
        each.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "scheduling.py").write_text(_PLUGIN)
    (package / "driver.py").write_text(_DRIVER)
    (package / "compiler.py").write_text(_COMPILER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-interpreter\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[triton.backends]\ncpu = triton_interpreter\n[vllm.general_plugins]\n"
        "keep_scheduling = triton_interpreter.scheduling:keep_scheduling\n"
    )
    return folder
