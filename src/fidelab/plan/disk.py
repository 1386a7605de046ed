"""How much disk the captures of a plan take."""

from __future__ import annotations

import shutil

from fidelab.captures.requests import Forced, Generate, Prefill, Request, Served
from fidelab.core import Arm, Estimator
from fidelab.engines import ENGINES
from fidelab.errors import OutputError
from fidelab.models import Model, check_conversion
from fidelab.plan.build import Plan, base_of

__all__ = ["check_disk", "conversion_bytes", "expected_rows", "needed_bytes"]

_TOPK_BYTES = 20 * 8  # token ids and log-probabilities of the top 20, the most that servers return


def check_disk(plan: Plan, runs: int = 1) -> None:
    """Check that the captures of a plan, or of several runs of it, will fit.

    Raises:
        OutputError: they will not; says what is needed and what is free.
    """
    folder = plan.settings.captures_dir
    need = runs * needed_bytes(plan)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if need > free:
        what, remedy = "captures", "fewer --windows, --drop-rows, or another --output-dir"
        if runs > 1:
            what, remedy = f"captures of {runs} runs", "fewer --runs, or another output_dir"
        sizes = f"about {need / 2**30:.2f} GiB in {folder}, {free / 2**30:.2f} GiB are free"
        raise OutputError(f"{what} need {sizes}: use {remedy}")


def conversion_bytes(plan: Plan) -> int:
    """Bytes that the weights of GGUF files will take as safetensors, for engines that need them so.

    Raises:
        OutputError: they will not fit.
    """
    deployed = [job.resolved for job in plan.jobs]
    models = {one.model.weights: one.model for one in deployed if one.lacks_weights}
    return sum(map(check_conversion, models.values()))


def needed_bytes(plan: Plan) -> int:
    """Bytes that the captures still to be made will take at most, output heads included.

    Where rows are dropped, an arm's are there until it and its twin are compared.
    """
    need, passing, heads = 0, 0, {}
    for job in plan.jobs:
        deployed = job.resolved
        row = _row_bytes(deployed.model, deployed.estimator, job.arm)
        here = sum(expected_rows(capture.request) for capture in job.missing()) * row
        waits = not base_of(job.role) or any(base_of(other.role) == job.role for other in plan.jobs)
        if plan.settings.experiment.keep_rows or waits or deployed.estimator is not Estimator.LOGPROBS:
            need += here
        else:
            passing = max(passing, here)
        if here and deployed.estimator is Estimator.HIDDEN:
            heads[deployed.model.weights] = deployed.model.head_bytes * (2 if _in_float32(job.arm) else 1)
    has_heads = any((plan.settings.captures_dir / "heads").glob("*.safetensors"))
    return need + passing + (0 if has_heads else sum(heads.values()))


def expected_rows(request: Request) -> int:
    """Rows that a request's capture holds, at most."""
    match request:
        case Prefill() | Served():
            return len(request.windows) * request.n_rows
        case Generate():
            return len(request.prompts) * request.max_tokens if request.rows else 0
        case Forced():
            return sum(map(len, request.continuations))
        case _:
            return 0


def _row_bytes(model: Model, estimator: Estimator, arm: Arm) -> int:
    if estimator is Estimator.HIDDEN:
        return model.hidden_size * (4 if _in_float32(arm) else 2)
    return _TOPK_BYTES if estimator is Estimator.TOPK else model.vocab_size * 2


def _in_float32(arm: Arm) -> bool:
    """Whether the arm's states, and what they are multiplied with, take 32 bits; llama.cpp computes in that type."""
    return arm.dtype == "float32" or ENGINES.load(arm.engine).checkpoint_format == "gguf"
