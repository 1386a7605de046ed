"""Rows of hidden states of all arms compared at once: many in a process of their own with torch, few by numpy here.

Of each item the reference's logits are computed once for all arms.  The process may use a device, which engines have
left by then, and gives its memory back when it ends.
``python -m fidelab.scoring.tiles TICKET FIGURES`` is that process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.base import load_axis
from fidelab.axes.rows import NumpyScorer, compare_many, figures_of, item_rows
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.core import Estimator
from fidelab.core.scratch import scratch

if TYPE_CHECKING:
    from fidelab.axes.rows import Scorer

Figures = dict[tuple[Path, Path], dict[int, dict[str, NDArray[Any]]]]
"""Columns of rows, by test item, of pairs of folders of captures."""

MIN_OPERATIONS = 1.5e11
"""Operations of a capture's product with the head, from which on torch is faster by more than its start takes.

Of one capture, however many are compared with it: an arm's figures do not depend on the other arms of its run.
"""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class TileJob:
    """A capture of the reference, and the captures compared with it, some of which hold only part of the items."""

    axis: str
    settings: Mapping[str, Any]
    ref: Path
    tests: Sequence[tuple[Path, bool]]


def is_comparable(ref: Capture, test: Capture) -> bool:
    """Whether both hold hidden states."""
    return all(side.estimator is Estimator.HIDDEN and not side.against for side in (ref, test))


def operations(capture: Capture) -> float:
    """Return the floating-point operations of a capture's product with the head."""
    shapes = [capture.array_shape(i, "hidden") for i in range(len(capture.items)) if item_rows(capture, i)]
    return sum(2.0 * rows * width for rows, width in shapes) * capture.vocabulary.size


def compare_in_process(asked: Sequence[TileJob], threads: int) -> Figures:
    """Return the figures of all rows that ``asked`` names, without those that cannot be compared.

    ``threads``: of the CPU.
    """
    with scratch("scoring") as room:
        ticket, found = room / "ticket.json", room / "figures.npz"
        ticket.write_text(json.dumps({"threads": threads, "groups": [*map(record_of, asked)]}), "utf-8")
        words = [sys.executable, "-m", "fidelab.scoring.tiles", str(ticket), str(found)]
        variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(words, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            _LOGGER.warning("%s", line)
        if done.returncode or not found.is_file():
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            _LOGGER.warning("scoring goes on without torch: %s", why)
            return {}
        return read_figures(found, asked)


def compare_here(asked: TileJob) -> Figures:
    """Return the figures of all rows that ``asked`` names, by numpy and in this process."""
    figures: list[dict[int, dict[str, NDArray[Any]]]] = [{} for _ in asked.tests]
    for k, t, columns in _compare(asked, NumpyScorer()):
        figures[k][t] = columns
    return {(asked.ref, folder): found for (folder, _), found in zip(asked.tests, figures, strict=True)}


def main(ticket: str, found: str) -> None:
    """Compare the captures that a ticket names, and write the columns under the names ``group.test.item.column``."""
    from fidelab.metrics.scorer import TileScorer

    given = json.loads(Path(ticket).read_text("utf-8"))
    scorer = TileScorer(given["threads"], say=lambda line: print(line, flush=True))
    columns: dict[str, Any] = {}
    for group, one in enumerate(given["groups"]):
        columns |= columns_of(group, job_of(one), scorer)
    np.savez(found, **columns)


def record_of(asked: TileJob) -> dict[str, Any]:
    """Return a job as JSON."""
    return {**vars(asked), "ref": str(asked.ref), "tests": [[str(folder), part] for folder, part in asked.tests]}


def job_of(record: Mapping[str, Any]) -> TileJob:
    """Return the job of :func:`record_of`."""
    tests = [(Path(folder), bool(partial)) for folder, partial in record["tests"]]
    return TileJob(record["axis"], record["settings"], Path(record["ref"]), tests)


def columns_of(group: int, asked: TileJob, scorer: Scorer, share: tuple[int, int] = (0, 1)) -> dict[str, NDArray[Any]]:
    """Compare what a job names; return its columns by ``group.test.item.column``, as :func:`read_figures` finds them.

    ``share``: (i, n) takes the i-th of n shares of the reference's items, with all tests.
    """
    found = _compare(asked, scorer, share)
    return {f"{group}.{k}.{t}.{name}": column for k, t, figures in found for name, column in figures.items()}


def read_figures(file: Path, asked: Sequence[TileJob]) -> Figures:
    """Return the columns of a file of :func:`columns_of`, whose groups are ``asked``."""
    figures: Figures = {}
    with np.load(file, allow_pickle=False) as columns:
        for name in columns.files:
            group, test, item, column = name.split(".")
            one = asked[int(group)]
            pair = figures.setdefault((one.ref, one.tests[int(test)][0]), {})
            pair.setdefault(int(item), {})[column] = columns[name]
    return figures


def _compare(
    asked: TileJob, scorer: Scorer, share: tuple[int, int] = (0, 1)
) -> Iterator[tuple[int, int, dict[str, NDArray[Any]]]]:
    """Number of the test, its item, and the columns of its rows."""
    axis, ref = load_axis(asked.axis, asked.settings), Capture(asked.ref, verify=False)
    pairs = [Pair.match(ref, Capture(folder, verify=False), subset=partial) for folder, partial in asked.tests]
    tests: dict[int, list[tuple[int, int]]] = {}
    after: dict[int, NDArray[np.int64]] = {}
    for k, pair in enumerate(pairs):
        for r, t, targets in axis.compared(pair):
            tests.setdefault(r, []).append((k, t))
            after[r] = targets
    for item, some in [*tests.items()][share[0] :: share[1]]:
        rows = compare_many(ref, [(pairs[k].test, t) for k, t in some], item, after[item], scorer)
        for (k, t), comparison in zip(some, rows, strict=True):
            yield k, t, figures_of(comparison)


if __name__ == "__main__":
    main(*sys.argv[1:])
