"""Common to all imports: blocks of windows, and writing the run folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

import fidelab
from fidelab.axes import AXES
from fidelab.bench import BENCHES
from fidelab.core import Status
from fidelab.core.errors import UsageError
from fidelab.report.html import write_html
from fidelab.results.coverage import coverage
from fidelab.results.record import ArmRecord, Comparison, Report
from fidelab.results.store import RunFolder


def labels_of(ref: Path, tests: Sequence[Path], names: Sequence[str] | None) -> list[str]:
    """Return a name for each folder that is compared with ``ref``: those of ``names``, else the folders' own.

    Raises:
        UsageError: If names do not fit, or the reference is also a test.
    """
    if not tests:
        raise UsageError("name at least one folder to compare with the reference")
    if names is not None and len(names) != len(tests):
        raise UsageError(
            f"{len(names)} names for {len(tests)} test folders: give --name once per folder, in their order"
        )
    same = next((test for test in tests if test.resolve() == ref.resolve()), None)
    if same is not None:
        raise UsageError(f"{same} is the reference itself: nothing would be compared")
    labels = list(names) if names is not None else [test.resolve().name for test in tests]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UsageError(f"two test folders are named {twice!r}; tell them apart with --name")
    return labels


@dataclass(frozen=True)
class ImportedArm:
    """The run that an import wrote, and notes for the user, one per line."""

    report: Report
    folder: Path
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The origin of figures: ``facts`` for the report's environment, ``key`` for its comparability key."""

    kind: str
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    key: Mapping[str, Any]


def window_blocks(n_windows: int, overlap: int = 1) -> NDArray[np.int64]:
    """Return the resampling cluster of each window ``[n_windows]`` of a text without known documents.

    Clusters are blocks of adjacent windows.

    Blocks are ∛n_windows long (Hall, Horowitz & Jing, Biometrika 82, 1995), and no shorter than ``overlap``, the number
    of windows that share a token.
    """
    blocks: NDArray[np.int64] = np.arange(n_windows, dtype=np.int64) // max(1, round(n_windows ** (1 / 3)), overlap)
    return blocks


def write_run(
    source: Source,
    reference: ArmRecord,
    candidates: Sequence[ArmRecord],
    output_dir: Path,
    command: str,
    *,
    comparisons: Sequence[Comparison] = (),
    positions: Sequence[tuple[str, Mapping[str, NDArray[Any]]]] = (),
) -> tuple[Report, Path]:
    """Write the run folder, with the report last.

    Raises:
        OutputError: If the folder cannot be written.
    """
    settings = {"imported": {"kind": source.kind, **source.settings}}
    head = "# The figures of this run were imported; it cannot be run again from here.\n"
    folder = RunFolder.create(
        output_dir.absolute(), f"import-{source.kind}", head + yaml.safe_dump(settings, sort_keys=False)
    )
    report = Report(
        run_id=folder.run_id,
        created=datetime.now(UTC).replace(microsecond=0),
        fidelab_version=fidelab.__version__,
        command=command,
        environment={
            "fidelab": fidelab.__version__,
            "python": platform.python_version(),
            "imported": dict(source.facts),
        },
        settings=settings,
        covers=coverage(AXES, BENCHES),
        comparability_key=dict(source.key),
        reference=reference,
        candidates=tuple(candidates),
        comparisons=tuple(comparisons),
    )
    folder.event(
        "imported", kind=source.kind, status=[str(arm.status) for arm in candidates if arm.status != Status.OK]
    )
    folder.write_positions(positions)
    write_html(report, folder.html)
    report.write(folder.report)
    folder.link_latest()
    return report, folder.path
