"""Memory that the configurations of a run need for their weights, next to what this machine has."""

from __future__ import annotations

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


def _need(resolved: ResolvedArm) -> MemoryNeed | None:
    arm, model = resolved.arm, resolved.model
    if resolved.borrowed or model.kind == "fake" or resolved.engine_class.is_server or not model.parameters:
        return None
    kept = quantized_as(model) and quantized_as(model) not in resolved.engine_class.dequantizes
    stored = resolved.engine_class.checkpoint_format == "gguf" or (model.gguf is None and bool(kept))
    needed = model.weight_bytes if stored else model.parameters * _COMPUTE_BYTES.get(arm.dtype, 2)
    dtype = "its stored types" if stored else arm.dtype
    if arm.device.startswith("cuda"):
        sizes, names = gpu_memory(), graphics().get("gpus", [])
        count = max(1, count_of(dict(arm.options).get("tp", "")) or 1)
        if len(sizes) < count:
            return None
        of = names[0] if count == 1 and names else f"{count} GPUs"
        return MemoryNeed(model.name, dtype, int(needed or 0), int(sum(sizes[:count])), of)
    return MemoryNeed(model.name, dtype, int(needed or 0), host_memory(), "this machine")
