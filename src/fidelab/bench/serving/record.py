"""A load's files: report and requests, written cell by cell, so that a load that is stopped keeps what it has."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import fidelab
from fidelab.bench.base import CellResult
from fidelab.bench.load_cell import Drive, Pool
from fidelab.bench.serving.conduct import ServingWatch
from fidelab.bench.serving.contact import Contact
from fidelab.config.load import dump
from fidelab.core import KVSpec, Status, slug, usable_cores
from fidelab.metrics.serving import percentiles
from fidelab.models.weights import file_sha256
from fidelab.report.html import write_html
from fidelab.results.measurement import Measurement
from fidelab.results.record import ArmRecord, Report, RuntimeRecord, write_atomically
from fidelab.results.request_log import append_requests, request_row
from fidelab.results.store import RunFolder


class Requests(ServingWatch):
    """Only keeps the requests of one arm's load, in a run folder that others look after."""

    def __init__(self, folder: Path, arm: str) -> None:
        self._folder = folder
        self._arm = arm

    def driven(self, number: int, repeat: int, drive: Drive) -> None:
        append_requests(self._folder, ({"arm": self._arm, **row} for row in _rows(number, repeat, drive)))


class Keeper(ServingWatch):
    """Makes the run folder when the server answers, and keeps it up to date; everything is passed on to ``shown``."""

    def __init__(
        self,
        output_dir: Path,
        command: str,
        shown: ServingWatch,
        *,
        name: str | None = None,
        kv: str | None = None,
        bench: str = "serving",
    ) -> None:
        self._output_dir = output_dir
        self._command = command
        self._shown = shown
        self._name = name
        self._kv = kv
        self._bench = bench
        self._created = datetime.now(UTC).replace(microsecond=0)
        self._contact: Contact | None = None
        self._drives: list[Drive] = []
        self.folder: RunFolder | None = None
        self.report: Report | None = None

    def reached(self, contact: Contact) -> None:
        config = dump(contact.settings, {"command": self._command, "created": self._created.isoformat()})
        self._contact = contact
        self.folder = RunFolder.create(self._output_dir, f"serve-{slug(contact.server.model)}", config)
        self._shown.reached(contact)

    def begin(self, title: str, requests: int) -> None:
        self._shown.begin(title, requests)

    def advance(self, done: int, requests: int) -> None:
        self._shown.advance(done, requests)

    def driven(self, number: int, repeat: int, drive: Drive) -> None:
        assert self.folder is not None
        append_requests(self.folder.path, _rows(number, repeat, drive))
        self._drives.append(drive)
        self._shown.driven(number, repeat, drive)

    def measured(self, cell: CellResult, serving: Measurement) -> None:
        self.keep(serving)
        self._shown.measured(cell, serving)

    def close(self) -> None:
        self._shown.close()

    def keep(self, serving: Measurement) -> Report:
        """Write the report as it stands."""
        assert self.folder is not None
        self.report = self._report(serving)
        self.report.write(self.folder.report)
        return self.report

    def finish(self) -> None:
        """Write the page, too."""
        if self.report is not None and self.folder is not None:
            write_html(self.report, self.folder.html)

    def save_result(self, folder: Path, name: str | None = None) -> Path:
        """Write the figures of a single load as ``vllm bench serve --save-result`` does; repeats count as one load.

        ``name``: of the file; by default what vLLM would call it.

        Raises:
            OutputError: the file cannot be written.
        """
        assert self._contact is not None
        result = _result(self._contact, self._drives, self._created)
        limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
        model = slug(str(result["model_id"]).rpartition("/")[2])
        name = name or f"{result['backend']}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"
        return write_atomically(folder / name, json.dumps(result) + "\n")

    def _report(self, serving: Measurement) -> Report:
        assert self._contact is not None
        assert self.folder is not None
        server, settings = self._contact.server, self._contact.settings
        reported = server.kv or (None, None)
        arm = ArmRecord(
            status=Status.FAILED if serving.status is Status.NOT_SUPPORTED else serving.status,
            reason=serving.reason,
            name=self._name or server.model,
            engine="openai",
            model=settings.model or server.model,
            kv=KVSpec.parse(self._kv) if self._kv else None,
            ran=RuntimeRecord.model_validate(
                {
                    "k_dtype": reported[0],
                    "v_dtype": reported[1],
                    "versions": {server.kind: server.version} if server.version else {},
                    "server": server.kind,
                    **dict(server.facts),
                }
            ),
            benches={self._bench: serving},
        )
        return Report(
            run_id=self.folder.run_id,
            created=self._created,
            fidelab_version=fidelab.__version__,
            command=self._command,
            environment=_environment(),
            settings={"benches": {self._bench: settings.model_dump(mode="json")}},
            comparability_key={f"benches.{self._bench}": comparability(self._contact)},
            reference=arm,
        )


def comparability(contact: Contact) -> dict[str, Any]:
    """Settings that must agree to compare two loads, besides the cell's name. See docs/metrics.md#comparability."""
    settings = contact.settings
    return {
        "endpoint": settings.endpoint,
        "prompts": contact.form,
        "ignore_eos": settings.ignore_eos and "ignore_eos" in contact.additions,
        "temperature": settings.temperature,
        "goodput": dict(settings.goodput),
        "duration": settings.duration,
        "ramp": settings.ramp,
        "trace": None if settings.trace is None else file_sha256(Path(settings.trace)),
        **({} if settings.dataset_path is None else {"dataset": file_sha256(Path(settings.dataset_path))}),
        "tokenizer": None if contact.tokenizer is None else contact.tokenizer.model.name,
    }


def _result(contact: Contact, drives: Sequence[Drive], created: datetime) -> dict[str, Any]:
    """Our figures of a load under vLLM's names, as far as both mean the same."""
    settings = contact.settings
    [asked] = settings.cells()
    pool = Pool(asked, drives)
    good = pool.good()
    backend = "openai-chat" if settings.endpoint == "chat" else "openai"
    result = {
        "date": created.astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": contact.server.model,
        "tokenizer_id": contact.tokenizer.model.name if contact.tokenizer else None,
        "num_prompts": len(pool.sent),
        "request_rate": settings.request_rate or "inf",
        "max_concurrency": asked.concurrency,
        "duration": pool.seconds,
        "completed": len(pool.done),
        "failed": pool.failed,
        "total_input_tokens": sum(exchange.prompt_tokens or 0 for exchange in pool.done),
        "total_output_tokens": sum(exchange.output_tokens or 0 for exchange in pool.done),
        "request_throughput": pool.per_second(len(pool.done)),
        "request_goodput": None if good is None else pool.per_second(good),
        "output_throughput": pool.output_rate(),
        "total_token_throughput": pool.total_rate(),
    }
    for name in settings.percentile_metrics:
        values = pool.latencies.of(name)
        if len(values):
            parts = {"mean": float(values.mean()), "median": float(np.median(values)), "std": float(values.std())}
            parts |= percentiles(values, settings.metric_percentiles)
            result |= {f"{part}_{name}_ms": value for part, value in parts.items()}
    return result


def _rows(number: int, repeat: int, drive: Drive) -> Iterator[dict[str, Any]]:
    """One line for each request of a cell."""
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


def _environment() -> dict[str, Any]:
    """The client's machine; of the server's nothing is known but its address."""
    return {
        "fidelab": fidelab.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "usable_cores": usable_cores(),
    }
