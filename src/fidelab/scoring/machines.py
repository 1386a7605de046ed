"""How far the same reference on two machines differs."""

from __future__ import annotations

from dataclasses import replace

from fidelab.config.experiment import load
from fidelab.core.errors import InputError, UsageError
from fidelab.results.measurement import DECIDING
from fidelab.results.outcomes import reference_of
from fidelab.results.record import MachineDifference
from fidelab.results.store import RunFolder
from fidelab.scoring.attribution import measure_diagnostic


def machine_difference(run: RunFolder, other: RunFolder) -> MachineDifference:
    """The KLD of the other run's reference from this one's.

    Raises:
        UsageError: If the two are of one machine, or of different weights, formats or windows.
    """
    (here, facts), (there, its) = reference_of(run), reference_of(other)
    if facts.environment == its.environment:
        raise UsageError(f"--other {other.path} was made on the same machine; name a run of another one")
    for what in ("weights", "kv", "dtype", "engine"):
        if getattr(here.arm, what) != getattr(there.arm, what):
            raise UsageError(f"--other {other.path}: its reference has another {what}; run the same one there")
    found = measure_diagnostic(load(run.config), here, replace(there, role="other"))
    mean = found.scores[DECIDING].found.value("mean") if DECIDING in found.scores else None
    if mean is None:
        raise InputError(f"--other {other.path} cannot be compared: {found.reason or 'no full-vocabulary KLD'}")
    return MachineDifference(mean=max(mean, 0.0), machines=(facts.machine(), its.machine()))
