"""Which processes answer the jobs of a run, and which models they share: forks of one load, or one process in turn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from fidelab.engines.base import engine_class
from fidelab.plan.build import PlannedJob
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.resolve import Settings
from fidelab.plan.speed import is_timed, measures_speed, speed_fault


def load_key(resolved: ResolvedArm) -> str | None:
    """Return the key of the model that an arm may share with others whose processes are forked; ``None``: its own."""
    if sys.platform != "linux" or resolved.environment.image:
        return None
    return engine_class(resolved.arm.engine).shared_load(resolved.arm)


def shared_loads(jobs: Iterable[PlannedJob]) -> Counter[str]:
    """Return how many jobs with missing captures open each model that they may share."""
    return Counter(key for job in jobs if job.missing() and (key := load_key(job.resolved)) is not None)


def turn_key(settings: Settings, job: PlannedJob) -> str | None:
    """Return the key of the model that a job may share with those before and after it, in one process in turn.

    ``None``: it has a process of its own, as has everything whose speed is measured.
    """
    resolved = job.resolved
    if sys.platform != "linux" or resolved.environment.image or resolved.borrowed:
        return None
    if is_timed(job) and measures_speed(settings, resolved) and not speed_fault(resolved):
        return None
    return engine_class(resolved.arm.engine).turn_load(resolved.arm)


def turns(settings: Settings, jobs: Sequence[PlannedJob]) -> Mapping[str, str]:
    """Return role → key of the jobs with missing captures that one process answers in turn, at least two in a row."""
    started = [(turn_key(settings, job), job.role) for job in jobs if job.missing()]
    found: dict[str, str] = {}
    for key, some in groupby(started, key=lambda one: one[0]):
        roles = [role for _, role in some]
        if key is not None and len(roles) > 1:
            found |= dict.fromkeys(roles, key)
    return found


def starts_and_loads(settings: Settings, jobs: Sequence[PlannedJob]) -> tuple[int, int]:
    """Return how many processes answer these jobs, and how often a model is loaded for them."""
    counts, in_turn = shared_loads(jobs), turns(settings, jobs)
    starts = loads = 0
    held: tuple[str, str] | None = None
    for job in (job for job in jobs if job.missing()):  # a server holds one model, and none beside an arm's own
        key, forked = in_turn.get(job.role), load_key(job.resolved)
        shares = ("turn", key) if key else ("fork", forked) if forked is not None and counts[forked] > 1 else None
        starts += key is None or shares != held
        loads += shares is None or shares != held
        held = shares
    return starts, loads
