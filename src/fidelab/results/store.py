"""The folder of a run: paths of its files and atomic writing."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.core import digest, read_file, resume_line, slug, strict_json, write_atomically
from fidelab.core.errors import InputError, MissingPackageError, OutputError
from fidelab.core.locks import lock
from fidelab.core.registry import require
from fidelab.core.scratch import scratch
from fidelab.results.record import Report
from fidelab.results.study import STUDY

RUNS = Path("runs")  # where runs are written unless specified otherwise
LATEST = "latest"
"""Name of the newest run, and of the link to it that runs leave."""
CONFIG = "config.resolved.yaml"
EVENTS = "events.jsonl"
OUTCOMES = "outcomes.json"
POSITIONS = "positions.parquet"
REPORT = "report.json"
HTML = "report.html"
_STAMP, _STAMPED = "%Y%m%d-%H%M%S", 15  # how names of runs begin, and characters of that
_MAX_FILE_BYTES = 64 << 20  # of the settings and of the outcomes
_KIND = re.compile(r"^kind: *(\S+)", re.MULTILINE)  # of settings that are not an experiment


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run: ``runs/<run_id>``."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path, label: str, config: str) -> RunFolder:
        """Create a folder named by time and label. It contains the resolved experiment from the first moment.

        Raises:
            OutputError: If it cannot be made.
        """
        stem = f"{time.strftime(_STAMP)}-{label}"
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            with scratch("run", beside=output_dir / stem) as room:
                temporary = room / "run"
                temporary.mkdir()
                (temporary / CONFIG).write_text(config, "utf-8")
                return cls(_rename_unused(temporary, output_dir / stem))
        except OSError as error:
            raise OutputError(
                f"cannot make a run folder in {output_dir}: {error.strerror or error}; name another --output-dir"
            ) from None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run.

        Raises:
            InputError: If the folder is not a run, or is one of another kind (layers, a run across engines).
        """
        if not (path / CONFIG).is_file():
            what = "holds no config.resolved.yaml" if path.is_dir() else "does not exist"
            raise InputError(f"{path} is not a run folder: it {what}")
        try:
            text = read_file(path / CONFIG, _MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise InputError(f"{path / CONFIG}: cannot be read: {error.strerror or error}") from None
        if other := _KIND.search(text):
            raise InputError(
                f"{path} compares nothing in the way of a run, it is of kind {other[1]}: its record lies there, "
                f"and the command that repeats it stands at the top of {CONFIG}"
            )
        return cls(path)

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """Path of the resolved experiment."""
        return self.path / CONFIG

    @property
    def report(self) -> Path:
        """Path of the report."""
        return self.path / REPORT

    @property
    def html(self) -> Path:
        """Path of the report's page."""
        return self.path / HTML

    @property
    def positions(self) -> Path:
        """Path of the table with one row per scored position and arm."""
        return self.path / POSITIONS

    def read_report(self, name: Path | None = None) -> Report:
        """Read the report; ``name`` is the folder's name in messages.

        Raises:
            InputError: If the run was stopped before its report was written, or the report is damaged.
        """
        if not self.report.is_file():
            name = name or self.path
            raise InputError(f"{name} has no report yet; finish the run with: {resume_line(name)}")
        return Report.from_json(self.report)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the folder as being written until the block, or this process, ends."""
        with self.config.open("rb") as file:
            with suppress(OSError):  # a file system without locks
                lock(file, shared=True)
            yield

    @property
    def being_written(self) -> bool:
        """Whether a running process is inside :meth:`writing`; on another host only if the file system has locks."""
        try:
            with self.config.open("rb") as file:
                lock(file, wait=False)
        except BlockingIOError:
            return True
        except OSError:  # no file, or no locks
            return False
        return False

    def log(self, role: str) -> Path:
        """Return the path of a worker's log. A digest keeps names apart that become equal in a file name."""
        kind, _, name = role.partition(":")
        return self.path / "logs" / (f"{kind}-{slug(name)}-{digest(name)[:6]}.log" if name else f"{kind}.log")

    def event(self, name: str, **fields: Any) -> None:
        """Append one line to the event log."""
        line = json.dumps({"time": round(time.time(), 3), "event": name, **fields}, ensure_ascii=False)
        with (self.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write_outcomes(self, record: Mapping[str, Any]) -> None:
        """Write the outcome of every arm: everything that scoring needs besides the captures."""
        write_atomically(self.path / OUTCOMES, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    def read_outcomes(self) -> dict[str, Any]:
        """Read the outcomes that :meth:`write_outcomes` wrote.

        Raises:
            InputError: If the run was stopped before its first arm finished, or the file is damaged.
        """
        path = self.path / OUTCOMES
        try:
            return dict(strict_json(read_file(path, _MAX_FILE_BYTES)))
        except FileNotFoundError:
            raise InputError(
                f"{self.path} has no finished configuration yet; resume with: {resume_line(self.path)}"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error}); repair it with: {resume_line(self.path)}") from None

    def link_latest(self) -> None:
        """Let the link ``latest`` next to this folder point to it; without links, and inside of a run, nothing happens.

        A file or folder of that name is kept.
        """
        place = self.path.parent / LATEST
        if (self.path.parent / CONFIG).exists() or (place.exists() and not place.is_symlink()):
            return
        with suppress(OSError, NotImplementedError), scratch("link", beside=place) as room:
            (room / LATEST).symlink_to(self.path.name, target_is_directory=True)
            (room / LATEST).replace(place)

    def sweep(self) -> None:
        """Remove temporary files left by a killed process."""
        for left in self.path.glob(".*.tmp"):
            left.unlink(missing_ok=True)

    def write_positions(self, tables: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Write (arm name, columns) tables as row groups of one parquet file, where pyarrow is installed."""
        try:
            pa, pq = require("pyarrow"), require("pyarrow.parquet")  # without types
        except MissingPackageError:
            self.positions.unlink(missing_ok=True)  # of what is scored again
            return
        temporary = self.positions.with_name(f".{POSITIONS}.{os.getpid()}.tmp")
        writer: Any = None
        try:
            for arm, columns in tables:
                size = len(next(iter(columns.values())))
                names = pa.DictionaryArray.from_arrays(pa.array([0] * size, pa.int32()), pa.array([arm]))
                # NaN becomes null; pyarrow's own switch for that imports pandas
                arrays = {name: pa.array(values, mask=np.not_equal(values, values)) for name, values in columns.items()}
                table = pa.table({"arm": names, **arrays})
                writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd")
                writer.write_table(table)
            if writer is None:
                self.positions.unlink(missing_ok=True)
            else:
                writer.close()
                temporary.replace(self.positions)
        except OSError as error:
            raise OutputError(f"{self.positions}: cannot write: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)


def has_report(folder: Path) -> bool:
    """Whether a run is finished: its report, or the record of its study, lies there."""
    return (folder / REPORT).is_file() or (folder / STUDY).is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether a run was stopped before its report."""
    return not has_report(folder) and not RunFolder(folder).being_written


def find_run(
    name: Path,
    usable: Callable[[Path], bool] = has_report,
    *,
    wanted: str = "finished run",
    runs: Path = RUNS,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Find the run that a person names: its folder, a file of it, its name in ``runs``, or ``latest``.

    ``latest`` is the newest run in ``runs`` that the command can use, and ``FOLDER/latest`` the one in another folder.
    A path that exists takes precedence, except for the link ``latest`` that runs leave.  Any other path is returned as
    it is.

    Args:
        usable: whether a run's folder can be used by the command.
        wanted: what ``usable`` accepts, in words.
        runs: folder of the runs.
        say: is told which run ``latest`` is.

    Raises:
        InputError: If the name is ``latest`` and the folder holds no run that can be used.
    """
    if name.name in (REPORT, HTML, CONFIG) and (name.parent / CONFIG).is_file() and name.parent.name != LATEST:
        return name.parent
    if name.name in (REPORT, HTML, CONFIG) and name.parent.name == LATEST and name.parent.is_symlink():
        return name.parent.resolve()
    if name.name != LATEST or (name.exists() and not name.is_symlink()):
        inside = runs / name
        return inside if len(name.parts) == 1 and not name.exists() and (inside / CONFIG).is_file() else name
    folder = name.parent if len(name.parts) > 1 else runs
    found = [path for path in folder.glob("*") if (path / CONFIG).is_file() and not path.is_symlink()]
    if not found:
        raise InputError(f"{folder} holds no run, so none is the latest: name a run's folder")
    found.sort(key=lambda path: (path.name[:_STAMPED], (path / CONFIG).stat().st_mtime_ns), reverse=True)
    latest = next(filter(usable, found), None)
    if latest is None:
        finish = f"; finish the newest with: {resume_line(found[0])}" if is_unfinished(found[0]) else ""
        count = "1 run" if len(found) == 1 else f"{len(found)} runs"
        raise InputError(f"{folder} holds {count}, and no {wanted}{finish or ': name a run folder'}")
    say(f"latest is {latest}")
    return latest


def read_run(run: Path) -> Report:
    """Read the report of a run's folder, or of a file.

    Raises:
        InputError: If there is no report, or it is damaged.
    """
    path = run / REPORT if run.is_dir() else run
    if path.is_file():
        return Report.from_json(path)
    if not run.is_dir():
        raise InputError(f"{run}: there is no such run folder or report")
    if (run / CONFIG).is_file():
        return RunFolder.open(run).read_report()
    raise InputError(f"{run} is not a run folder: it holds no {REPORT}")


def _rename_unused(temporary: Path, wanted: Path) -> Path:
    """Rename to an unused name; run folders are never empty, so none is overwritten."""
    for attempt in range(1000):
        path = wanted if attempt == 0 else wanted.with_name(f"{wanted.name}-{attempt}")
        try:
            return temporary.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
    raise OutputError(f"cannot find a free name for a run under {wanted.parent}")
