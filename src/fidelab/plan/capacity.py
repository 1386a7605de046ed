"""Context and memory for which a comparison reports GiB and users: as asked for, else by server, model and GPU."""

from __future__ import annotations

import re

from fidelab.config.schema import Experiment
from fidelab.core import Arm
from fidelab.core.amounts import parse_bytes
from fidelab.core.errors import UsageError
from fidelab.engines.base import engine_class
from fidelab.engines.server_settings import count_of, memory_share, server_context
from fidelab.environments.host import gpu_memory, graphics
from fidelab.physics.devices import device_of, find_device
from fidelab.plan.resolve import Settings
from fidelab.results.capacity import MAX_DEFAULT_CONTEXT, check_context
from fidelab.results.capacity_record import CapacityQuestion, ContextSource


def capacity_question(settings: Settings) -> CapacityQuestion:
    """Return context and memory of a run.

    Raises:
        UsageError: If the context is beyond the limit, or the memory is neither a size nor a device of the table.
    """
    experiment, arm = settings.experiment, settings.reference
    serve = experiment.serve
    words = () if serve is None else (*serve.ignored, *serve.words)
    server, model = server_context(arm, words), settings.model.max_positions
    n_ctx, source, limit = _context(experiment.context, server, model)
    devices = count_of(dict(arm.options).get("tp", "")) or 1
    memory, name = _memory(experiment, arm)
    share = memory_share(arm) if memory is not None else None
    engines = dict.fromkeys(one.engine for one in settings.roles.values())
    return CapacityQuestion(
        n_ctx=n_ctx,
        n_ctx_from=source,
        limit=limit,
        memory_bytes=None if memory is None else memory * devices * (share or 1.0),
        memory_of=name if memory is not None else "",
        devices=devices,
        reserved_share=share,
        computed=tuple(one for one in engines if engine_class(one).emulates),
    )


def capacity_of_own(experiment: Experiment, limit: int | None) -> CapacityQuestion:
    """Return context and memory of a run of the user's own programs, which split a model over all GPUs.

    Args:
        limit: tokens that the models read, if that is known.

    Raises:
        UsageError: As :func:`capacity_question`.
    """
    n_ctx, source, most = _context(experiment.context, None, limit)
    names, sizes = graphics().get("gpus", []), gpu_memory()
    memory: float | None = sum(sizes) or None
    name = f"{len(sizes)} × {names[0]}" if len(sizes) > 1 and names else next(iter(names), "the GPU")
    if experiment.fit is not None:
        memory, name = parse_memory(experiment.fit)
    return CapacityQuestion(
        n_ctx=n_ctx, n_ctx_from=source, limit=most, memory_bytes=memory, memory_of="" if memory is None else name
    )


def _context(asked: int | None, server: int | None, model: int | None) -> tuple[int, ContextSource, int | None]:
    """Return the context, its source, and the largest one.  A server that is started with more goes over the model."""
    limit = server if server is not None else model
    if asked is not None:
        check_context(asked, limit, "the model" if server is None else "the server")
        return asked, "option", limit
    if server is not None:
        return server, "server", limit
    return (
        (MAX_DEFAULT_CONTEXT, "default", None) if model is None else (min(model, MAX_DEFAULT_CONTEXT), "model", limit)
    )


def parse_memory(text: str) -> tuple[float, str]:
    """Parse ``24GiB``, ``24GB`` or the name of a device: bytes, and the memory in words.

    Raises:
        UsageError: If it is neither.
    """
    if re.fullmatch(r"[\d.]+(e\d+)?\s*([kmgt]i?)?b", text.strip(), re.IGNORECASE):
        size = parse_bytes(text)
        return size, re.sub(r"\s*([kmgt]i?b)", r" \1", text.strip(), flags=re.IGNORECASE)
    try:
        device = find_device(text)
    except UsageError as error:
        raise UsageError(f"--fit {text}: write a size such as 24GiB, or a device; {error}") from None
    return device.usable, device.name


def _memory(experiment: Experiment, arm: Arm) -> tuple[float | None, str]:
    """Return the memory asked for, else that of the GPU on which the reference runs; ``None`` without one."""
    if experiment.fit is not None:
        return parse_memory(experiment.fit)
    if not arm.device.startswith("cuda") or experiment.executor.name != "local" or engine_class(arm.engine).is_server:
        return None, ""
    names, sizes = graphics().get("gpus", []), gpu_memory()
    index = int(arm.device.partition(":")[2] or 0)
    name = names[index] if index < len(names) else "the GPU"
    if index < len(sizes):
        return sizes[index], name
    found = device_of(name)
    return (None, "") if found is None else (found.usable, name)
