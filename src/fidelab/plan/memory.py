"""Memory and GPUs that the configurations of a run ask for, next to what this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fidelab.engines.server_settings import count_of
from fidelab.environments.host import gpu_memory, graphics, host_memory
from fidelab.models.resolve import quantized_as
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.resolve import Settings

_COMPUTE_BYTES = {"float32": 4, "float64": 8}  # of a weight in the type that is computed with; else 2


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one model's weights as they are computed with, and of the memory that holds them: ``of`` in words."""

    model: str
    dtype: str
    needed_bytes: int
    found_bytes: int
    of: str


def memory_needs(settings: Settings) -> tuple[MemoryNeed, ...]:
    """Return a line for each model, compute type and device of a run here; servers elsewhere have none.

    Weights alone count: caches and activations come on top.
    """
    if settings.experiment.executor.name != "local":
        return ()
    found = {}
    for resolved in settings.resolved.values():
        need = _need(resolved)
        if need is not None:
            found[need.model, need.dtype, need.of] = need
    return tuple(found.values())


def rank_remarks(settings: Settings) -> Iterator[str]:
    """Say where tensor parallelism asks for more GPUs than this machine has, a line for each number of them.

    A cluster and servers elsewhere have none.
    """
    if settings.experiment.executor.name != "local":
        return
    asked = dict.fromkeys(_ranks(one) for one in settings.resolved.values() if _runs_here(one))
    if all(ranks == 1 for ranks, _ in asked):
        return  # without asking how many GPUs there are, which takes a second
    here = max(len(gpu_memory()), len(graphics().get("gpus", [])))
    for ranks, on_gpus in asked:
        if ranks <= max(here, 1) or (on_gpus and not here):  # a driver that tells no number
            continue
        shared = "" if on_gpus else f"; here {ranks} processes share its processor"
        yield f"tensor parallelism over {ranks} asks for {ranks} GPUs, this machine has {here or 'none'}{shared}"


def _ranks(resolved: ResolvedArm) -> tuple[int, bool]:
    """Processes that share the model's layers, and whether each has a GPU."""
    arm = resolved.arm
    return max(1, count_of(dict(arm.options).get("tp", "")) or 1), arm.device.startswith("cuda")


def _runs_here(resolved: ResolvedArm) -> bool:
    return not (resolved.borrowed or resolved.model.kind == "fake" or resolved.engine_class.is_server)


def _need(resolved: ResolvedArm) -> MemoryNeed | None:
    arm, model = resolved.arm, resolved.model
    if not _runs_here(resolved) or not model.parameters:
        return None
    kept = quantized_as(model) and quantized_as(model) not in resolved.engine_class.dequantizes
    stored = resolved.engine_class.checkpoint_format == "gguf" or (model.gguf is None and bool(kept))
    needed = model.weight_bytes if stored else model.parameters * _COMPUTE_BYTES.get(arm.dtype, 2)
    dtype = "its stored types" if stored else arm.dtype
    if arm.device.startswith("cuda"):
        sizes, names = gpu_memory(), graphics().get("gpus", [])
        count, _ = _ranks(resolved)
        if len(sizes) < count:
            return None
        of = names[0] if count == 1 and names else f"{count} GPUs"
        return MemoryNeed(model.name, dtype, int(needed or 0), int(sum(sizes[:count])), of)
    return MemoryNeed(model.name, dtype, int(needed or 0), host_memory(), "this machine")
