"""Baselines: reports kept under a name, one file each, in a folder that can be committed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fidelab.core.errors import InputError, UnknownNameError, UsageError
from fidelab.results.record import Report
from fidelab.results.store import CONFIG, REPORT, RunFolder, find_run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@=-]{0,99}")


@dataclass(frozen=True)
class Baselines:
    """``<folder>/<name>.json``."""

    folder: Path

    def path(self, name: str) -> Path:
        """Path of a baseline, existing or not.

        Raises:
            UsageError: the name is not a valid file name.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"baseline {name!r}: a name has up to 100 letters, digits and . _ + @ = -, and begins with a letter "
                "or digit"
            )
        return self.folder / f"{name}.json"

    def names(self) -> list[str]:
        """All names, in alphabetical order."""
        files = self.folder.glob("*.json") if self.folder.is_dir() else ()
        return sorted(path.stem for path in files if _NAME.fullmatch(path.stem))

    def save(self, name: str, run: Path, *, force: bool = False) -> Path:
        """Keep a run's report; ``force`` replaces one of the same name.

        Raises:
            UsageError: the name is not a valid file name, or is taken.
            InputError: there is no valid report.
            OutputError: the file cannot be written.
        """
        path = self.path(name)
        report = read_run(run)
        if path.exists() and not force:
            raise UsageError(f"baseline {name!r} exists in {self.folder}; replace it with --force")
        return report.write(path)

    def read(self, what: str) -> tuple[str, Report]:
        """A report by a baseline's name, else a run's folder, a report's file or ``latest``; and how to call it.

        A folder that has the name of a baseline is written ``./name``.

        Raises:
            InputError: there is no valid report.
            UnknownNameError: there is neither a baseline nor a file or folder of this name.
        """
        if _NAME.fullmatch(what) and self.path(what).is_file():
            return what, Report.from_json(self.path(what))
        path = find_run(Path(what))
        if path.is_dir() or path.is_file() or not _NAME.fullmatch(what) or what.endswith(".json"):
            report = read_run(path)
            return report.run_id, report
        hint = f"They lie in {self.folder}; a run's folder or a report.json will do, too."
        raise UnknownNameError("baseline", what, self.names(), hint=hint)


def read_run(run: Path) -> Report:
    """The report of a run's folder, or of a file.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = run / REPORT if run.is_dir() else run
    if path.is_file():
        return Report.from_json(path)
    if not run.is_dir():
        raise InputError(f"{run}: there is no such run folder or report")
    if (run / CONFIG).is_file():
        return RunFolder.open(run).read_report()
    raise InputError(f"{run} is not a run folder: it holds no {REPORT}")
