"""Compare and drop rows on the nodes of a cluster."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fidelab.axes.base import load_axis
from fidelab.captures.store import Readers
from fidelab.core import Estimator
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS
from fidelab.core.roles import TWIN, kind_of
from fidelab.results.outcomes import ArmResult
from fidelab.run.cluster import Cluster, Lost, Needs
from fidelab.scoring.dropping import compared_pairs, drop_where_compared, exclusive

_LOGGER = logging.getLogger(__name__)


def drop_rows_on_cluster(
    cluster: Cluster,
    axes: Mapping[str, Mapping[str, Any]],
    results: Sequence[ArmResult],
    folder: Path,
    readers: Readers,
) -> None:
    """Drop rows on a cluster where all arms have answered, hidden states included. Its nodes compare the rows.

    ``axes``: their settings by name.  ``folder``: folder that all nodes see. Rows that a node did not compare are left
    to scoring.
    """
    pairs = compared_pairs(results)
    for twins in (True, False):
        running = []
        with ExitStack() as held:
            for result, base in pairs:
                if (kind_of(result.role) == TWIN) == twins and held.enter_context(exclusive(readers, result)):
                    arms = {"result": result.record(folder), "base": base.record(folder)}
                    ticket = json.dumps({"axes": axes, "folder": str(folder), **arms})
                    running.append(cluster.submit(ticket, Needs(cpus=1, gpus=0), _drop_here))
            for handle in running:
                try:
                    handle.result()
                except (Lost, *UNTRUSTED_DATA_ERRORS) as error:
                    _LOGGER.debug("rows are compared here: %s", error)


def _drop_here(ticket: str) -> str:
    """Node's part of :func:`drop_rows_on_cluster`."""
    asked = json.loads(ticket)
    result, base = (ArmResult.from_record(asked[name], Path(asked["folder"])) for name in ("result", "base"))
    axes = {name: load_axis(name, values) for name, values in asked["axes"].items()}
    drop_where_compared(axes, result, base, (Estimator.LOGPROBS, Estimator.HIDDEN))
    return ""
