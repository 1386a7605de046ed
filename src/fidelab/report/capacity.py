"""GiB at a context and users that fit, as text.  See docs/metrics/bytes.md#gib-at-a-context."""

from __future__ import annotations

from collections.abc import Iterator

from fidelab.report.cells import Estimate
from fidelab.results.capacity_record import ArmCapacity, Capacity
from fidelab.results.numbers import MINUS, counted, format_gib, format_tokens, one_line
from fidelab.results.record import ArmRecord, Report

_MAX_CACHE_SHARE = 0.2
"""Share of the cache in what one user loads, below which smaller weights save more than any cache format."""


def gib_heading(report: Report) -> str:
    """Return the heading of :func:`gib_estimate`; ``GiB`` where no context is known."""
    if report.capacity is None:
        return "GiB"
    return f"{'' if _with_weights(report) else 'cache '}GiB at {format_tokens(report.capacity.n_ctx)}"


def gib_estimate(arm: ArmRecord, report: Report) -> Estimate:
    """Return weights and the cache of one sequence, or the cache alone where weights are unknown, in GiB."""
    if report.capacity is None or arm.capacity is None:
        return Estimate()
    size = arm.capacity.total_bytes if _with_weights(report) else arm.capacity.cache_bytes
    return Estimate() if size is None else Estimate(format_gib(size), order=f"{size:g}")


def _with_weights(report: Report) -> bool:
    found = [arm.capacity for arm in report.candidates if arm.capacity is not None]
    return all(one.weight_bytes is not None for one in found)


def memory_lines(report: Report) -> tuple[str, ...]:
    """Return the lines of the answer about memory; empty where bytes are unknown.

    With a recommended candidate they compare it with the baseline; else they have the figures of the reference.
    """
    capacity, found = report.capacity, report.recommendation
    if capacity is None or found is None or capacity.before is None:
        return ()
    if found.arm is None:
        if found.kind == "reference" or capacity.before.weight_bytes is None:
            return ()
        return tuple(filter(None, (_size_line(capacity, capacity.before), _fit_line(capacity, capacity.before, None))))
    arm = next((arm for arm in report.candidates if arm.name == found.arm), None)
    if arm is None or arm.capacity is None:
        return ()
    lines = [_change_line(report, capacity, capacity.before, arm), _fit_line(capacity, capacity.before, arm.capacity)]
    if capacity.before.weight_bytes == arm.capacity.weight_bytes:
        lines.append(_weights_line(capacity, capacity.before))
    return tuple(filter(None, lines))


def _change_line(report: Report, capacity: Capacity, before: ArmCapacity, arm: ArmRecord) -> str:
    """``KV cache at 32k tokens: 4.50 → 2.39 GiB (−47%), model + cache 9.10 → 7.00 GiB``."""
    after = arm.capacity
    if after is None:
        return ""
    change = round(100 * (after.cache_bytes / before.cache_bytes - 1)) if before.cache_bytes else 0
    than = "" if capacity.baseline == report.reference.name else f" against {one_line(capacity.baseline)}"
    text = f"KV cache at {format_tokens(capacity.n_ctx)} tokens: "
    if change:
        sizes = format_gib(before.cache_bytes, after.cache_bytes)
        text += f"{sizes} GiB ({MINUS if change < 0 else '+'}{abs(change)}%{than})"
    else:
        text += f"{format_gib(after.cache_bytes)} GiB"
    if before.total_bytes is not None and after.total_bytes is not None:
        text += f", model + cache {format_gib(before.total_bytes, after.total_bytes)} GiB"
    return text + _computed(capacity, arm.engine)


def _computed(capacity: Capacity, engine: str) -> str:
    """Say that an engine does not store the format whose bytes are shown."""
    return f" (size of the format, which engine {one_line(engine)} does not store)" * (engine in capacity.computed)


def _size_line(capacity: Capacity, one: ArmCapacity) -> str:
    text = f"KV cache at {format_tokens(capacity.n_ctx)} tokens: {format_gib(one.cache_bytes)} GiB"
    text += f" ({one_line(capacity.baseline)})"
    return text if one.total_bytes is None else f"{text}, model + cache {format_gib(one.total_bytes)} GiB"


def _fit_line(capacity: Capacity, before: ArmCapacity, after: ArmCapacity | None) -> str:
    """``fits 24 GiB: at most 4 → 8 users of 32k, one user up to 131,072 → 262,144 tokens``; empty without a memory."""
    last = after or before
    if capacity.memory_bytes is None or last.users is None or last.total_bytes is None:
        return ""
    if last.users == 0:
        needed, found = format_gib(last.total_bytes), format_gib(capacity.memory_bytes)
        tokens = f"; {last.tokens:,} tokens fit" if last.tokens else ""
        length = format_tokens(capacity.n_ctx)
        return f"does not fit {_memory(capacity)}: one user of {length} needs {needed} GiB, has {found} GiB{tokens}"
    of = format_tokens(capacity.n_ctx)
    users = counted(last.users, "user")
    if after is not None and before.users is not None and before.users != after.users:
        users = f"{before.users:,} → {users}"
    return f"fits {_memory(capacity)}: at most {users} of {of}{_one_user(capacity, before, after)}"


def _one_user(capacity: Capacity, before: ArmCapacity, after: ArmCapacity | None) -> str:
    """``, one user up to 20,000 → 30,000 tokens``; empty where one user has room for the largest context."""
    pair = [one.tokens for one in (before, after) if one is not None]
    if any(tokens is None for tokens in pair):
        return ""
    capped = [min(tokens, capacity.limit or tokens) for tokens in pair if tokens is not None]
    if capacity.limit is not None and all(tokens == capacity.limit for tokens in capped):
        return ""
    return f", one user up to {' → '.join(f'{tokens:,}' for tokens in dict.fromkeys(capped))} tokens"


def _memory(capacity: Capacity) -> str:
    """``24 GiB``, ``2 × RTX-4090 (22.9 GiB)``, ``RTX-4090 (21.6 GiB, 90% of it)``."""
    name, size = one_line(capacity.memory_of), f"{format_gib(capacity.memory_bytes)} GiB"
    if capacity.devices > 1:
        name = f"{capacity.devices} × {name}"
    share = "" if capacity.reserved_share is None else f", {capacity.reserved_share:.0%} of it"
    plain = capacity.devices == 1 and not share and name.lower().endswith("gib")
    return name if plain else f"{name} ({size}{share})"


def _weights_line(capacity: Capacity, before: ArmCapacity) -> str:
    """Say where weights dominate. With several users caches do."""
    total = before.total_bytes
    if not total or before.cache_bytes / total >= _MAX_CACHE_SHARE or (before.users or 0) > 1:
        return ""
    share = before.cache_bytes / total
    text = f"{share:.0%}" if share >= 0.01 else "less than 1%"
    return f"The cache is {text} of what you load. Smaller weights save more: --candidate model=…"


def capacity_notes(report: Report) -> Iterator[str]:
    """Return what GiB and users leave out, for the details and the page."""
    capacity = report.capacity
    if capacity is None or all(arm.capacity is None for arm in report.candidates):
        return
    source = {
        "option": "asked for",
        "server": "the server's limit",
        "model": "the model's limit, 32k at most",
        "default": "the model's limit is unknown",
    }[capacity.n_ctx_from]
    text = f"GiB at {capacity.n_ctx:,} tokens ({source}): bytes of weights and of one sequence's cache"
    yield f"{text}, without activations and buffers of the engine"
    if capacity.memory_bytes is not None:
        yield "Users and tokens that fit are upper bounds for the same reason"
