"""Figures of single positions: the tail of KL per arm, and the worst positions, from ``positions.parquet``.

The file is read one row group at a time, and only counts are kept: a run of 20 arms × 100,000 positions stays small.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError
from fidelab.core.registry import require

PER_DECADE = 10
EDGES: NDArray[np.float64] = 10.0 ** (np.arange(-12 * PER_DECADE, 3 * PER_DECADE + 1) / PER_DECADE)
"""Thresholds of the tail (nats), 1e-12 … 1e3."""
COLUMNS = ("arm", "window", "position", "kl", "top1_agrees", "reference_confidence")
_CONTEXT = "n_ctx"  # files of one context may lack it
N_WORST = 10


@dataclass(frozen=True, order=True)
class Worst:
    """One position. Its fields are in the order of the ranking (KL first)."""

    kl: float
    window: int
    position: int
    confidence: float
    top1: bool


@dataclass
class ArmPositions:
    """One arm: ``above`` [edges] counts the usable positions with KL > edge; ``worst`` is sorted, largest KL first."""

    n: int = 0
    usable: int = 0
    above: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(EDGES), np.int64))
    worst: list[Worst] = field(default_factory=list)

    def tail(self) -> NDArray[np.float64]:
        """Return the share of the usable positions with KL > each of ``EDGES``."""
        return self.above / max(1, self.usable)


def read_positions(
    path: Path, expected: Mapping[str, int | None], contexts: Mapping[str, int | None] | None = None
) -> dict[str, ArmPositions]:
    """Read tails and worst positions of the ``expected`` arms (name → number of positions, if known).

    ``contexts``: name → the context whose positions count, if the file has a column of contexts.

    Raises:
        InputError: If the file is missing, unreadable, or of another run. The message is one line.
        MissingPackageError: If pyarrow is not installed.
    """
    pa, pq = (require(name, "positions.parquet") for name in ("pyarrow", "pyarrow.parquet"))  # without types
    measured = {name: ArmPositions() for name in expected}
    if not path.is_file():
        raise InputError("this report has no positions.parquet next to it")
    try:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=[*COLUMNS, _CONTEXT])
                if lacking := set(COLUMNS) - set(table.column_names):
                    raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
                columns = {name: table[name].to_numpy() for name in table.column_names if name != "arm"}
                arms = table["arm"].cast(pa.string()).combine_chunks().dictionary_encode()
                for code, name in enumerate(arms.dictionary.to_pylist()):
                    rows = arms.indices.to_numpy() == code
                    if (context := (contexts or {}).get(name)) is not None and _CONTEXT in columns:
                        rows &= columns[_CONTEXT] == context
                    if name in measured:
                        _add(measured[name], {key: values[rows] for key, values in columns.items()}, expected[name])
    except Exception as error:  # damage shows as many kinds of error, and the report is made whatever the file holds
        why = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"positions.parquet cannot be read ({why})") from error
    for name, arm in measured.items():
        n = expected[name]
        if arm.n == 0 or (n and arm.n % n):  # a candidate that is also the control is there twice
            raise InputError("positions.parquet belongs to another run: its configurations or positions differ")
    return measured


def _add(arm: ArmPositions, group: Mapping[str, NDArray[Any]], most: int | None) -> None:
    """Count a group's rows; rows beyond the first ``most`` are counted only in ``n``.  A KL that is null is NaN."""
    values = group["kl"].astype(np.float64)
    left = len(values) if most is None else max(0, most - arm.n)
    arm.n += len(values)
    rows = np.flatnonzero(np.isfinite(values[:left]))
    kl = values[rows]
    arm.usable += len(kl)
    passed = np.bincount(np.searchsorted(EDGES, kl, side="left"), minlength=len(EDGES) + 1)
    arm.above += len(kl) - np.cumsum(passed)[:-1]
    worst = rows[kl > 0]
    if len(worst) > N_WORST:
        worst = worst[values[worst] >= np.partition(values[worst], -N_WORST)[-N_WORST]]
    new = (
        Worst(
            float(values[row]),
            int(group["window"][row]),
            int(group["position"][row]),
            float(group["reference_confidence"][row]),
            bool(group["top1_agrees"][row]),
        )
        for row in worst
    )
    arm.worst = heapq.nlargest(N_WORST, [*arm.worst, *new])
