"""A node's part of scoring on a cluster: some items of the reference with all arms, on the GPU or the CPUs reserved.

Tickets and answers are JSON. Columns go through a file that all nodes see, about 120 bytes per row.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fidelab.axes.rows import NumpyScorer, item_rows
from fidelab.captures.reader import Capture
from fidelab.core import Estimator, using_cores
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, FidelabError
from fidelab.engines.base import one_line
from fidelab.scoring.tiles import TileJob, columns_of, job_of, record_of

if TYPE_CHECKING:
    from fidelab.axes.rows import Scorer

_TILE_ROWS, _TILE_BYTES = 1 << 10, 3 << 29  # of a scorer on the CPU, all sides together
_NO_GPU = "the cluster gave a GPU, and torch sees none: scoring runs on the CPU"
_NO_TORCH = "torch is not installed: scoring runs on the CPU, by numpy"


@dataclass(frozen=True)
class Scored:
    """How a share was compared.

    ``device``: ``cuda``, ``mps``, ``cpu``, or ``numpy`` where torch was not used.  ``said``: one line about a device
    that could not be used as planned, or empty.  ``error``: reason why there are no columns, or empty.
    """

    node: str
    device: str = ""
    said: str = ""
    error: str = ""
    seconds: float = 0.0


def share_ticket(
    jobs: Mapping[bool, Sequence[TileJob]], share: tuple[int, int], found: Path, *, cpus: int, gpu: bool
) -> str:
    """Return the ticket of the i-th of n shares.

    ``jobs``: by whether torch compares them.  ``found``: file for the columns, whose groups are those of torch and
    then the others.  ``cpus``: reserved for it.  ``gpu``: whether a GPU is.
    """
    groups = [{**record_of(one), "torch": torch} for torch in (True, False) for one in jobs[torch]]
    return json.dumps({"groups": groups, "share": share, "found": str(found), "cpus": cpus, "gpu": gpu})


def compare_share(ticket: str) -> str:
    """Compare what a ticket names, write the columns to its file, and return a :class:`Scored`."""
    asked, began, said = json.loads(ticket), time.monotonic(), list[str]()
    node, device, error = os.uname().nodename, "", ""
    groups = asked["groups"]
    with using_cores(asked["cpus"]):
        scorers: dict[bool, Scorer] = {False: NumpyScorer()}
        if any(group["torch"] for group in groups):
            scorers[True] = _torch_scorer(asked["cpus"], said, gpu=asked["gpu"])
        try:
            columns: dict[str, Any] = {}
            for number, group in enumerate(groups):
                columns |= columns_of(number, job_of(group), scorers[group["torch"]], tuple(asked["share"]))
            found = Path(asked["found"])
            partial = found.with_suffix(".partial.npz")
            np.savez(partial, **columns)
            partial.replace(found)
        except (FidelabError, OSError, MemoryError, RuntimeError, *UNTRUSTED_DATA_ERRORS) as problem:
            error = one_line(problem)
        device = str(getattr(scorers.get(True), "device", "numpy"))
    done = Scored(node, device, said[-1] if said else "", error, round(time.monotonic() - began, 3))
    return json.dumps(vars(done))


def _torch_scorer(threads: int, said: list[str], *, gpu: bool) -> Scorer:
    """The scorer of a node; a GPU is used only where one is reserved."""
    try:
        from fidelab.metrics.scorer import CPU, TileScorer  # which imports torch
    except ImportError:
        said.append(_NO_TORCH)
        return NumpyScorer()
    scorer = TileScorer(threads, None if gpu else CPU, said.append)
    if gpu and scorer.device.type == "cpu" and not said:
        said.append(_NO_GPU)
    return scorer


def scoring_bytes(jobs: Sequence[TileJob]) -> int:
    """Return the bytes of memory that comparing these takes, at most: two heads in float32, and a tile."""
    heads: dict[str, int] = {}
    tile = 0
    for one in jobs:
        ref, tests = Capture(one.ref, verify=False), [Capture(folder, verify=False) for folder, _ in one.tests]
        for capture in (ref, *tests):
            items = (i for i in range(len(capture.items)) if item_rows(capture, i))
            if (first := next(items, None)) is not None and capture.manifest["head"]:
                width = capture.array_shape(first, str(Estimator.HIDDEN))[1]
                heads[capture.manifest["head"]["file"]] = 4 * capture.vocabulary.size * width
        rows = max((item_rows(ref, i) for i in range(len(ref.items))), default=0) * (1 + len(tests))
        tile = max(tile, min(_TILE_BYTES, 6 * ref.vocabulary.size * min(rows, _TILE_ROWS)))
    return sum(sorted(heads.values())[-2:]) + tile
