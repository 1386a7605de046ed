"""Make the golden runs again, score them, and print what changed figure by figure: ``make golden``.

``--score-only``: score the stored captures again, run no engine.  ``--recode``: also write the stored runs anew, as
today's reader reads what today's writer wrote.  Names of runs choose some.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.golden import adapter
from tests.golden.bundle import DATA, Bundle, names
from tests.golden.rows import Row, differences, read_rows, write_rows
from tests.golden.runs import RUNS
from tests.golden.studies import AUDITS, PHYSICS, SENSITIVITY, SHAPES, STUDIES, study

ROWS = DATA / "rows.csv"
FIXTURES = [
    *(("audit", name) for name in AUDITS),
    *(("physics", name) for name in (*PHYSICS, *SHAPES)),
    *(("sensitivity", name) for name in SENSITIVITY),
]
"""Command and name of each fixture of the other commands."""


def scored(bundle: Bundle, name: str, room: Path) -> list[Row]:
    """The rows of a stored run, scored again."""
    return adapter.rows(adapter.score(bundle, adapter.unpack(bundle, room), room), name)


def main() -> None:
    """Regenerate what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="names of runs; all unless some are named")
    parser.add_argument("--score-only", action="store_true", help="score the stored captures again; run no engine")
    parser.add_argument("--recode", action="store_true", help="write the stored runs anew by today's reader and writer")
    asked = parser.parse_args()
    chosen = asked.runs or [*RUNS]
    before = read_rows(ROWS) if ROWS.is_file() else []
    after = [row for row in before if row.run not in chosen and row.run in RUNS]
    for name in chosen:
        print(f"{name} …", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            room = Path(folder)
            if asked.recode:
                adapter.recoded(Bundle.read(name), room / "recoded").write(name)
            elif not asked.score_only:
                (room / "run").mkdir()
                adapter.run(RUNS[name], room / "run").write(name)
            (room / "scored").mkdir()
            after += scored(Bundle.read(name), name, room / "scored")
    for stale in sorted({*names()} - {*RUNS}):
        for ending in ("json", "npz"):
            (DATA / f"{stale}.{ending}").unlink()
    _write(ROWS, before, after)
    if not asked.runs:
        _write(STUDIES, read_rows(STUDIES) if STUDIES.is_file() else [], _studies())


def _studies() -> list[Row]:
    found = []
    for kind, name in FIXTURES:
        with tempfile.TemporaryDirectory() as folder:
            found += study(kind, name, Path(folder))
    return found


def _write(path: Path, before: list[Row], after: list[Row]) -> None:
    """Write rows, and print what changed."""
    write_rows(path, after)
    changed = differences(before, after, scale=0.0)
    beyond = {*differences(before, after)}
    for line in changed:
        print(line if line in beyond else f"{line} (within the tolerance)")
    print(f"{path.name}: {len(after)} rows, {len(changed)} changed, {len(beyond)} of them beyond the tolerance")


if __name__ == "__main__":
    main()
