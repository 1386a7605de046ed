"""How much disk the captures of a plan take."""

from __future__ import annotations

import shutil

from fidelab.core import Estimator
from fidelab.errors import OutputError
from fidelab.models import Model
from fidelab.plan.build import Plan, expected_bytes

__all__ = ["check_disk", "needed_bytes"]

_TOPK_BYTES = 20 * 8  # ids and log-probabilities of as many tokens as servers tell


def check_disk(plan: Plan) -> None:
    """Whether the captures will fit.

    Raises:
        OutputError: they will not; says what is needed and what is free.
    """
    settings = plan.settings
    need = needed_bytes(plan)
    place = next(path for path in (settings.captures_dir, *settings.captures_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise OutputError(
            f"captures need about {need / 2**30:.2f} GiB in {settings.captures_dir}, {free / 2**30:.2f} GiB are free: "
            "use fewer --windows, or another --output-dir"
        )


def needed_bytes(plan: Plan) -> int:
    """Disk that the captures still to be made will take, heads included."""
    need, heads = 0, {}
    for job in plan.jobs:
        deployed = plan.settings.deployed[job.arm.name]
        row = _row_bytes(deployed.model, deployed.estimator, job.arm.dtype)
        here = sum(expected_bytes(capture, row) for capture in job.missing())
        need += here
        if here and deployed.estimator is Estimator.HIDDEN:
            heads[deployed.model.weights] = deployed.model.head_bytes
    return need + (0 if any((plan.settings.captures_dir / "heads").glob("*.safetensors")) else sum(heads.values()))


def _row_bytes(model: Model, estimator: Estimator, dtype: str) -> int:
    if estimator is Estimator.HIDDEN:
        return model.hidden_size * (4 if dtype == "float32" else 2)
    return _TOPK_BYTES if estimator is Estimator.TOPK else model.vocab_size * 2
