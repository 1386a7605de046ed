"""Files of a load: report and requests, written cell by cell, so that a stopped load keeps its finished cells."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fidelab
from fidelab.bench.base import CellResult
from fidelab.bench.load_cell import Drive
from fidelab.bench.load_figures import answer
from fidelab.bench.serving.contact import Contact
from fidelab.bench.serving.measure import ServingWatch
from fidelab.config.load import dump
from fidelab.core import KVSpec, Status, slug, usable_cores
from fidelab.engines import CLIENT
from fidelab.engines.openai.server import Server
from fidelab.report.html import write_html
from fidelab.results.measurement import Measurement
from fidelab.results.record import ArmRecord, Report, RuntimeRecord
from fidelab.results.request_log import append_requests, request_row
from fidelab.results.store import RunFolder


class Requests(ServingWatch):
    """Watch that keeps the requests of one arm's load, in an existing run folder."""

    def __init__(self, folder: Path, arm: str) -> None:
        self._folder = folder
        self._arm = arm

    def driven(self, number: int, repeat: int, drive: Drive) -> None:
        append_requests(self._folder, ({"arm": self._arm, **row} for row in _rows(number, repeat, drive)))


class Keeper(ServingWatch):
    """Watch that makes the run folder when the server answers, and keeps it up to date.

    Everything is passed on to the watch ``shown``.
    """

    def __init__(
        self, output_dir: Path, command: str, shown: ServingWatch, *, name: str | None = None, kv: str | None = None
    ) -> None:
        self._shown = shown
        self.begin = shown.begin  # type: ignore[method-assign]
        self._output_dir = output_dir
        self._command = command
        self._name = name
        self._kv = kv
        self._created = datetime.now(UTC).replace(microsecond=0)
        self._contact: Contact | None = None
        self.folder: RunFolder | None = None
        self.report: Report | None = None

    def reached(self, contact: Contact) -> None:
        config = dump(contact.settings, {"command": self._command, "created": self._created.isoformat()})
        self._contact = contact
        self.folder = RunFolder.create(self._output_dir, f"serve-{slug(contact.server.model)}", config)
        self._shown.reached(contact)

    def driven(self, number: int, repeat: int, drive: Drive) -> None:
        assert self.folder is not None
        append_requests(self.folder.path, _rows(number, repeat, drive))
        self._shown.driven(number, repeat, drive)

    def measured(self, cell: CellResult, serving: Measurement) -> None:
        self.keep(serving)
        self._shown.measured(cell, serving)

    def keep(self, serving: Measurement) -> Report:
        """Write the report in its current state."""
        assert self.folder is not None
        self.report = self._report(serving)
        self.report.write(self.folder.report)
        return self.report

    def finish(self) -> None:
        """Write the report's page, too."""
        if self.report is not None and self.folder is not None:
            write_html(self.report, self.folder.html)
            self.folder.link_latest()

    def _report(self, serving: Measurement) -> Report:
        assert self._contact is not None
        assert self.folder is not None
        server, settings = self._contact.server, self._contact.settings
        serving = serving.model_copy(update={"summary": answer(serving)})
        arm = server_arm(server, "serving", serving, model=settings.model, name=self._name, kv=self._kv)
        return server_report(
            arm,
            run_id=self.folder.run_id,
            created=self._created,
            command=self._command,
            settings={"benches": {"serving": settings.model_dump(mode="json")}},
            comparability_key={"benches.serving": comparability(self._contact)},
        )


def server_arm(
    server: Server,
    bench: str,
    measured: Measurement,
    *,
    model: str | None = None,
    name: str | None = None,
    kv: str | None = None,
) -> ArmRecord:
    """Return the record of a model on a server, with what a bench measured.

    ``model``: as the user knows it; ``name``: of the row in reports; ``kv``: a label of its KV format.
    """
    reported = server.kv or (None, None)
    return ArmRecord(
        status=Status.FAILED if measured.status is Status.NOT_SUPPORTED else measured.status,
        reason=measured.reason,
        name=name or server.model,
        engine=CLIENT,
        model=model or server.model,
        kv=KVSpec.parse(kv) if kv else None,
        ran=RuntimeRecord.model_validate(
            {
                "k_dtype": reported[0],
                "v_dtype": reported[1],
                "versions": {server.kind: server.version} if server.version else {},
                "server": server.kind,
                **dict(server.facts),
            }
        ),
        benches={bench: measured},
    )


def server_report(arm: ArmRecord, **fields: Any) -> Report:
    """Return the report of a run against a server.

    It describes the client's machine; of the server, only its address and what it reports are known.
    """
    environment = {
        "fidelab": fidelab.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "usable_cores": usable_cores(),
    }
    return Report(fidelab_version=fidelab.__version__, environment=environment, reference=arm, **fields)


def comparability(contact: Contact) -> dict[str, Any]:
    """Return the settings that must agree to compare two loads, besides the cell's name.

    See docs/metrics/between-runs.md#comparability.
    """
    settings = contact.settings
    return {
        "endpoint": settings.endpoint,
        "prompts": contact.form,
        "ignore_eos": settings.ignore_eos and "ignore_eos" in contact.additions,
        "goodput": dict(settings.goodput),
        "duration": settings.duration,
        "tokenizer": contact.tokenizer.model.name,
    }


def _rows(number: int, repeat: int, drive: Drive) -> Iterator[dict[str, Any]]:
    """Yield a line for each request of a cell."""
    sent = {request.index: request for request in drive.requests}
    for exchange in drive.result.exchanges:
        asked = sent[exchange.index]
        yield request_row(
            exchange,
            drive.result.started,
            cell=number,
            repeat=repeat,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
        )
