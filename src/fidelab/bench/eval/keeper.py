"""Files of an evaluation: report and page, written after each kind, so that a stopped run keeps its results."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fidelab.bench.eval.measure import Evaluated, EvalWatch
from fidelab.bench.eval.record import EVAL, Change, measurement
from fidelab.bench.eval.settings import EvalSettings
from fidelab.bench.serving.record import server_arm, server_report
from fidelab.config.load import dump
from fidelab.core import slug
from fidelab.engines.openai.server import Server
from fidelab.report.html import write_html
from fidelab.results.record import Report
from fidelab.results.store import RunFolder


class EvalKeeper(EvalWatch):
    """Watch that makes the run folder when the server answers, and keeps its report up to date.

    Everything is passed on to the watch ``shown``.
    """

    def __init__(
        self,
        output_dir: Path,
        command: str,
        settings: EvalSettings,
        shown: EvalWatch,
        *,
        model: str | None = None,
        name: str | None = None,
        kv: str | None = None,
    ) -> None:
        self._output_dir = output_dir
        self._command = command
        self._settings = settings
        self._shown = shown
        self._labels = {"model": model, "name": name, "kv": kv}
        self._created = datetime.now(UTC).replace(microsecond=0)
        self.folder: RunFolder | None = None
        self.report: Report | None = None

    def reached(self, server: Server, url: str) -> None:
        config = dump(self._settings, {"command": self._command, "created": self._created.isoformat()})
        self.folder = RunFolder.create(self._output_dir, f"eval-{slug(server.model)}", config)
        self._shown.reached(server, url)

    def begin(self, name: str) -> None:
        self._shown.begin(name)

    def finished(self, evaluated: Evaluated) -> None:
        self.keep(evaluated)
        self._shown.finished(evaluated)

    def keep(self, evaluated: Evaluated, change: Change | None = None) -> Report:
        """Write the report in its current state."""
        assert self.folder is not None
        settings = self._settings
        arm = server_arm(evaluated.server, EVAL, measurement(evaluated, settings, change), **self._labels)
        self.report = server_report(
            arm,
            run_id=self.folder.run_id,
            created=self._created,
            command=self._command,
            settings={"benches": {EVAL: settings.model_dump(mode="json")}},
            comparability_key={f"benches.{EVAL}": {"kinds": list(settings.kinds)}},
        )
        self.report.write(self.folder.report)
        return self.report

    def finish(self) -> None:
        """Write the report's page, too."""
        if self.report is not None and self.folder is not None:
            write_html(self.report, self.folder.html)
            self.folder.link_latest()
