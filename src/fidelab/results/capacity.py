"""GiB at a context and users that fit, by the bytes in a report.  See docs/metrics/bytes.md#gib-at-a-context."""

from __future__ import annotations

from fidelab.core.errors import UsageError
from fidelab.core.fit import sequences_that_fit, tokens_that_fit
from fidelab.results.capacity_record import ArmCapacity, Capacity, CapacityQuestion
from fidelab.results.record import ArmRecord, Report
from fidelab.results.sizes import REFERENCE, cache_baseline

MAX_DEFAULT_CONTEXT = 32_768
"""Tokens of the default context, where neither a server nor the model has a smaller limit."""


def check_context(n_ctx: int, limit: int | None, of: str = "the model") -> None:
    """Refuse a context beyond a limit.

    Raises:
        UsageError: If it is. The message has the limit.
    """
    if limit is not None and n_ctx > limit:
        raise UsageError(f"--context {n_ctx:,}: {of} has a limit of {limit:,} tokens; use --context {limit} or less")


def with_capacity(report: Report, question: CapacityQuestion | None) -> Report:
    """Return the report with the memory of each configuration; without a question only the old figures are removed."""
    if question is None:
        return report.model_copy(update={"capacity": None})
    arms = (report.reference, *([report.control] if report.control else []), *report.candidates)
    found = cache_baseline(report.reference, arms[1:], question.n_ctx)
    source, scale, name = found if found is not None else (report.reference, 1.0, REFERENCE)
    before = _capacity(source, question, scale, report.reference)
    capacity = Capacity(
        **question.model_dump(), baseline=report.reference.name if name == REFERENCE else name, before=before
    )
    return report.model_copy(
        update={
            "capacity": capacity,
            "reference": _with(report.reference, question),
            "control": None if report.control is None else _with(report.control, question),
            "candidates": tuple(_with(arm, question) for arm in report.candidates),
        }
    )


def asked_again(report: Report, n_ctx: int | None, memory: tuple[float, str] | None) -> Report:
    """Return a finished report with the memory at another context, or of another device.

    Args:
        n_ctx: tokens of a sequence; ``None``: those of the report.
        memory: bytes of each device, and the memory in words; ``None``: those of the report.

    Raises:
        UsageError: If the context is beyond the report's limit, or the report does not have the bytes.
    """
    old = report.capacity
    if old is None and n_ctx is None:
        raise UsageError("this report names no context: add --context, e.g. --context 32k")
    if all(arm.ran is None or arm.ran.sequence_bytes is None for arm in (report.reference, *report.candidates)):
        raise UsageError("--context and --fit need the bytes of the caches, and this report has none")
    question = old or CapacityQuestion(n_ctx=n_ctx or 1, n_ctx_from="option")
    fields = CapacityQuestion.model_validate(question.model_dump(include=set(CapacityQuestion.model_fields)))
    if n_ctx is not None:
        check_context(n_ctx, fields.limit, "the server" if fields.n_ctx_from == "server" else "the model")
        fields = fields.model_copy(update={"n_ctx": n_ctx, "n_ctx_from": "option"})
    if memory is not None:
        size, name = memory
        whole = size * fields.devices * (fields.reserved_share or 1.0)
        fields = fields.model_copy(update={"memory_bytes": whole, "memory_of": name})
    return with_capacity(report, fields)


def _with(arm: ArmRecord, question: CapacityQuestion) -> ArmRecord:
    return arm.model_copy(update={"capacity": _capacity(arm, question) if arm.measured else None})


def _capacity(
    arm: ArmRecord, question: CapacityQuestion, kv_scale: float = 1.0, weights_of: ArmRecord | None = None
) -> ArmCapacity | None:
    """Return the memory of an arm; ``None`` if the bytes of its cache are unknown.

    ``kv_scale``: factor of keys and values.  ``weights_of``: the arm whose weights count, by default the same.
    """
    ran, loaded = arm.ran, (weights_of or arm).ran
    cache = None if ran is None else ran.bytes_of_sequence(question.n_ctx, kv_scale)
    if ran is None or cache is None or (sequence := ran.sequence_bytes) is None:
        return None
    weights = loaded.size if loaded is not None else None
    memory = question.memory_bytes
    if memory is None or weights is None:
        return ArmCapacity(cache_bytes=cache, weight_bytes=weights)

    def peak(tokens: int) -> float:
        return sequence.peak_bytes(tokens, packed=True, kv_scale=kv_scale)

    return ArmCapacity(
        cache_bytes=cache,
        weight_bytes=weights,
        users=sequences_that_fit(weights, cache, memory),
        tokens=tokens_that_fit(weights, peak, memory),
    )
