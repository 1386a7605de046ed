"""``--dry-run``: jobs, tokens, expected disk and, after a two-second request, time."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fidelab.config.schema import Experiment
    from fidelab.runs.conduct import Prepared

__all__ = ["show_plan"]

_PROBE_SECONDS = 2.0


def show_plan(experiment: Experiment, as_json: bool) -> None:
    """Print the plan; nothing is run and nothing is written."""
    from fidelab.plan.disk import conversion_bytes, needed_bytes
    from fidelab.runs.conduct import prepare

    prepared = prepare(experiment, convert=False)
    rate = _tokens_per_second(prepared)
    jobs: list[dict[str, Any]] = []
    for planned in prepared.plan.jobs:
        missing = planned.missing()
        tokens = sum(capture.tokens for capture in missing)
        label = planned.arm.kv.label
        jobs.append({"role": planned.role, "kv": label, "captures_missing": len(missing), "tokens": tokens})
    total: int = sum(job["tokens"] for job in jobs)
    plan: dict[str, Any] = {
        "jobs": jobs,
        "not_supported": dict(prepared.settings.unsupported),
        "unavailable": dict(prepared.plan.unavailable),
        "remarks": list(prepared.plan.remarks),
        "follows": [name for name, axis in prepared.settings.axes.items() if axis.follows],
        "tokens": total,
        "disk_bytes": needed_bytes(prepared.plan),
        "conversion_bytes": conversion_bytes(prepared.plan),
        "probe_tokens_per_second": round(rate, 1) if rate else None,
        "seconds": round(total / rate) if rate else None,
    }
    if as_json:
        print(json.dumps(plan))
        return
    names = [*(job["role"] for job in jobs), *plan["not_supported"]]
    wide, kv_wide = max(map(len, (*names, " " * 28))), max(len(job["kv"]) for job in jobs)
    for job in jobs:
        state = f"{job['tokens']:>9,} tokens" if job["captures_missing"] else "captured already"
        print(f"{job['role']:<{wide}} {job['kv']:<{kv_wide}} {state}")
    for name, reason in plan["not_supported"].items():
        print(f"{name:<{wide}} not supported: {reason}")
    for name, reason in plan["unavailable"].items():
        print(f"axis {name:<{wide - 5}} not measurable: {reason}")
    for remark in plan["remarks"]:
        print(remark)
    if plan["follows"]:
        print(f"not counted: questions that follow from the reference's answers ({', '.join(plan['follows'])})")
    mib = plan["disk_bytes"] / 2**20
    print(f"\ntotal {total:,} tokens, {mib:.1f} MiB of captures in {prepared.settings.captures_dir}")
    if plan["conversion_bytes"]:
        mib = plan["conversion_bytes"] / 2**20
        print(f"and {mib:,.1f} MiB in the cache: a GGUF file's weights, converted once for engines that need that")
    if rate:
        seconds, source = total / rate, "from a 2-second matrix-multiply probe"
        print(f"about {seconds:,.0f} s of computing at {rate:,.0f} tok/s ({source}), plus model loads")
    else:
        print("no estimate of time: the model has no weights to multiply", file=sys.stderr)


def _tokens_per_second(prepared: Prepared) -> float | None:
    """Matrix multiplications of the model's width, for two seconds: 2 · parameters operations make one token.

    Attention and the format's own work are left out, so the estimate is a lower bound of the time.
    """
    import torch

    settings = prepared.settings
    model, experiment = settings.model, settings.experiment
    if not model.parameters:
        return None
    torch.set_num_threads(experiment.threads or 1)
    dtype = getattr(torch, experiment.dtype)
    d, rows = model.hidden_size, 512
    x = torch.randn(rows, d, device=experiment.device).to(dtype)
    w = torch.randn(d, 4 * d, device=experiment.device).to(dtype)
    x @ w  # warm-up
    done, began = 0, time.monotonic()
    while (elapsed := time.monotonic() - began) < _PROBE_SECONDS:
        x @ w
        if experiment.device.startswith("cuda"):
            torch.cuda.synchronize()
        done += 1
    operations = done * 2 * rows * d * 4 * d / elapsed
    return operations / (2 * model.parameters)
