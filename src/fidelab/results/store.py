"""The folder of a run: where its files lie, and how they are written (whole or not at all)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.errors import InputError, OutputError
from fidelab.results.record import write_atomically

__all__ = ["RunFolder"]

CONFIG = "config.resolved.yaml"
EVENTS = "events.jsonl"
OUTCOMES = "outcomes.json"
POSITIONS = "positions.parquet"
REPORT = "report.json"
HTML = "report.html"


@dataclass(frozen=True)
class RunFolder:
    """``runs/<run_id>``."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path, label: str) -> RunFolder:
        """A new folder named by time and label.

        Raises:
            OutputError: it cannot be made.
        """
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
        for attempt in range(100):
            path = output_dir / (stem if attempt == 0 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise OutputError(
                    f"cannot make {path}: {error.strerror}; name another --output-dir"
                ) from None
            return cls(path)
        raise OutputError(f"cannot find a free name for a run under {output_dir}")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run.

        Raises:
            InputError: the folder is no run.
        """
        if not (path / CONFIG).is_file():
            what = "holds no config.resolved.yaml" if path.is_dir() else "does not exist"
            raise InputError(f"{path} is no run folder: it {what}")
        return cls(path)

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved experiment."""
        return self.path / CONFIG

    @property
    def report(self) -> Path:
        """The artifact."""
        return self.path / REPORT

    @property
    def html(self) -> Path:
        """The artifact, for people."""
        return self.path / HTML

    @property
    def positions(self) -> Path:
        """One row per scored position and arm."""
        return self.path / POSITIONS

    def log(self, role: str) -> Path:
        """What a worker printed."""
        return self.path / "logs" / f"{role.replace(':', '-').replace('/', '_')}.log"

    def event(self, name: str, **fields: Any) -> None:
        """Append one line to the telemetry."""
        line = json.dumps({"time": round(time.time(), 3), "event": name, **fields}, ensure_ascii=False)
        with (self.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write_outcomes(self, record: Mapping[str, Any]) -> None:
        """What became of every arm: all that scoring needs besides the captures."""
        write_atomically(self.path / OUTCOMES, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    def read_outcomes(self) -> dict[str, Any]:
        """The inverse of :meth:`write_outcomes`.

        Raises:
            InputError: the run was stopped before its first arm finished, or the file is damaged.
        """
        path = self.path / OUTCOMES
        try:
            return dict(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            raise InputError(
                f"{self.path} has no finished arm yet; go on with: fidelab compare --resume {self.path}"
            ) from None
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}); run again with --resume {self.path}") from None

    def write_positions(self, tables: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Write (arm name, columns) tables as row groups of one parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        temporary = self.positions.with_name(f".{POSITIONS}.{os.getpid()}.tmp")
        writer: Any = None
        try:
            for arm, columns in tables:
                size = len(next(iter(columns.values())))
                names = pa.DictionaryArray.from_arrays(pa.array([0] * size, pa.int32()), pa.array([arm]))
                table = pa.table(
                    {"arm": names, **{name: pa.array(values) for name, values in columns.items()}}
                )
                writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd")
                writer.write_table(table)
            if writer is not None:
                writer.close()
                temporary.replace(self.positions)
        except OSError as error:
            raise OutputError(f"{self.positions}: cannot write: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)
