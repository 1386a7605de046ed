"""``fidelab share mirror``: what the trackers' own files hold afterwards, and what never leaves."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fidelab.ledger.mirror import mirrored
from fidelab.results.record import Report
from fidelab.results.table import tabulate
from tests.report.sample import sample_report
from tests.run.harness import Done, cli

wandb_here = pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: pip install 'fidelab[wandb]'")
trackio_here = pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio: pip install 'fidelab[trackio]'")
NAMED = "tilt[q=0.6]"


@pytest.fixture
def calls() -> Iterator[tuple[str, list[bytes]]]:
    """A server's address, and what was sent there."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    sent.append(connection.recv(4096))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", sent


def run_mirror(made: Done, cwd: Path, target: str, address: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, output and messages of the command, in a process whose trackers know a key and reach one server."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "")
    folders = {f"WANDB_{name}_DIR": str(cwd / "wandb-own") for name in ("DATA", "CACHE", "CONFIG", "ARTIFACT")}
    keys = {"WANDB_API_KEY": "k" * 40, "HF_TOKEN": "hf_secret", "WANDB_BASE_URL": address, "HF_ENDPOINT": address}
    done = subprocess.run(
        [sys.executable, "-c", "from fidelab.cli import main; main()", "share", "mirror", made.folder, "--to", target],
        cwd=cwd,
        env={**os.environ, **proxies, **folders, **keys, **variables},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: seven bytes, then LevelDB's log format (blocks of 32 KiB)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if room < 7 or kind == 0:
            at += room
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def items_of(records: list[Any], kind: str, part: str) -> dict[str, Any]:
    """Names (nested ones joined by a point) and values of all records of a kind."""
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == kind:
            for item in getattr(getattr(record, kind), part):
                found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def expected(made: Done) -> dict[str, float]:
    report = Report.from_json(made.folder / "report.json")
    table = tabulate(report).metrics
    return {
        "/".join(filter(None, key[1:])): metric.value
        for key, metric in table.items()
        if key.role == "candidate" and metric.value is not None
    }


# ------------------------------------------------------------------------------------------------- what is mirrored


def test_every_figure_goes_with_the_ends_of_its_interval() -> None:
    report = sample_report()
    content = mirrored(report)
    one = report.candidates[0]
    low, high = one.axes["kld"].ci("mean") or (0.0, 0.0)
    names = [f"{one.name}/kld/mean{end}" for end in ("", "_low", "_high")]
    assert [content.figures[name] for name in names] == [one.axes["kld"].value("mean"), low, high]
    columns, rows = content.tables["figures"]
    assert len(rows) == len(tabulate(report).metrics)
    [row] = [
        dict(zip(columns, row, strict=True))
        for row in rows
        if row[:3] == ("candidate", one.name, "kld") and row[4] == "mean"
    ]
    assert (row["value"], row["low"], row["high"], row["unit"]) == (one.axes["kld"].value("mean"), low, high, "nats")


def test_no_folder_of_this_machine_is_mirrored() -> None:
    report = sample_report()
    one = report.candidates[0].model_copy(update={"model": "/home/somebody/models/m", "reason": "see /home/somebody/x"})
    moved = report.model_copy(update={"candidates": (one,), "command": "fidelab compare /home/somebody/models/m"})
    content = mirrored(moved)
    assert "somebody" not in json.dumps([content.config, content.figures, content.tables])
    assert "models/m" not in content.config["command"]
    assert content.config["command"].endswith(" m")


# ------------------------------------------------------------------------------------------------------- the trackers


@pytest.mark.full
@wandb_here
def test_an_offline_run_of_wandb_holds_figures_verdicts_provenance_tables_and_page(
    made: Done, tmp_path: Path, calls: tuple[str, list[bytes]]
) -> None:
    code, out, err = run_mirror(made, tmp_path, "wandb", calls[0], WANDB_MODE="offline")
    assert (code, err) == (0, "")
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    assert out.startswith(str(folder))
    [file] = folder.glob("*.wandb")
    records = list(wandb_records(file))
    history, summary = items_of(records, "history", "item"), items_of(records, "summary", "update")
    assert expected(made).items() <= history.items()
    assert f"{NAMED}/kld/mean_high" in history
    assert summary[f"{NAMED}/verdict"] == made.arm(NAMED)["verdict"]["band"]
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, run.display_name) == ("fidelab", made.folder.name)
    assert config["environment"] == made.report["environment"]
    assert config["command"] == made.report["command"]
    assert config["arms"][f"candidate {NAMED}"]["weights_sha256"] == made.arm(NAMED)["weights_sha256"]
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in folder.rglob("*.table.json")}
    assert set(tables) == {"arms", "figures"}
    assert [row[1] for row in tables["arms"]["data"]].count(NAMED) == 1
    [page] = folder.rglob("report_*.html")
    assert page.read_text() == (made.folder / "report.html").read_text()
    assert calls[1] == []


@wandb_here
def test_wandb_learns_neither_machine_nor_user_nor_keys_nor_code(
    made: Done, tmp_path: Path, calls: tuple[str, list[bytes]]
) -> None:
    assert run_mirror(made, tmp_path, "wandb", calls[0], WANDB_MODE="offline")[0] == 0
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = folder.glob("*.wandb")
    records = list(wandb_records(file))
    kinds = {record.WhichOneof("record_type") for record in records}
    assert not kinds & {"stats", "output", "output_raw", "environment"}
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.host, run.HasField("git")) == ("", False)
    sent = b"".join(record.SerializeToString() for record in records)
    for word in ("k" * 40, "hf_secret", "prompt 1"):
        assert word.encode() not in sent
    assert not [path.name for path in (folder / "files").rglob("*") if path.suffix in (".txt", ".py", ".log", ".yaml")]


@pytest.mark.full
@wandb_here
def test_a_wandb_that_is_switched_off_or_knows_no_key_is_an_error_in_one_line(
    made: Done, tmp_path: Path, calls: tuple[str, list[bytes]]
) -> None:
    code, _, err = run_mirror(made, tmp_path, "wandb", calls[0], WANDB_MODE="disabled")
    assert (code, err.count("\n")) == (2, 1)
    assert "WANDB_MODE=disabled" in err
    own = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    code, _, err = run_mirror(made, tmp_path, "wandb", calls[0], **own)
    assert (code, err.count("\n")) == (2, 1)
    assert "API key" in err


@trackio_here
def test_trackio_keeps_figures_verdicts_provenance_tables_and_page_here(
    made: Done, tmp_path: Path, calls: tuple[str, list[bytes]]
) -> None:
    done = run_mirror(made, tmp_path, "trackio", calls[0], TRACKIO_DIR=str(tmp_path / "kept"))
    assert done == (0, f"{tmp_path / 'kept'}\n", "")
    with sqlite3.connect(tmp_path / "kept" / "fidelab.db") as database:
        [(name, step, logged)] = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        [(config,)] = database.execute("SELECT config FROM configs").fetchall()
    logged, config = json.loads(logged), json.loads(config)
    assert (name, step) == (made.folder.name, 0)
    assert expected(made).items() <= logged.items()
    assert config["verdicts"][NAMED] == made.arm(NAMED)["verdict"]["band"]
    assert config["environment"] == made.report["environment"]
    assert {row["arm"] for row in logged["arms"]["_value"]} >= {NAMED, "exact"}
    assert len(logged["figures"]["_value"]) == len(tabulate(Report.from_json(made.folder / "report.json")).metrics)
    [page] = (tmp_path / "kept" / "media").rglob("*.html")
    assert page.read_text() == (made.folder / "report.html").read_text()
    assert calls[1] == []


@trackio_here
def test_a_run_that_trackio_has_is_not_written_twice(
    made: Done, tmp_path: Path, calls: tuple[str, list[bytes]]
) -> None:
    folder = {"TRACKIO_DIR": str(tmp_path / "kept")}
    assert run_mirror(made, tmp_path, "trackio", calls[0], **folder)[0] == 0
    code, _, err = run_mirror(made, tmp_path, "trackio", calls[0], **folder)
    assert (code, err.count("\n")) == (2, 1)
    assert f"fidelab has {made.folder.name} already" in err
    with sqlite3.connect(tmp_path / "kept" / "fidelab.db") as database:
        assert database.execute("SELECT count(*) FROM metrics").fetchone() == (1,)


@trackio_here
def test_what_trackio_cannot_write_is_an_error_in_one_line(
    made: Done, tmp_path: Path, calls: tuple[str, list[bytes]]
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run_mirror(made, tmp_path, "trackio", calls[0], TRACKIO_DIR=str(tmp_path / "file" / "x"))
    assert (code, err.count("\n")) == (2, 1)
    assert "Not a directory" in err


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("target", ["wandb", "trackio"])
def test_without_the_package_one_line_names_the_command(made: Done, tmp_path: Path, target: str) -> None:
    with mock.patch.dict(sys.modules, {target: None}):
        done = cli("share", "mirror", made.folder, "--to", target, cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"pip install 'fidelab[{target}]'" in done.err


def test_an_unfinished_run_and_an_unknown_tracker_are_refused_in_one_line(runs: Path) -> None:
    [run] = (runs / "runs").glob("2*")
    done = cli("share", "mirror", run, "--to", "mlflow", cwd=runs)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "'wandb', 'trackio'" in done.err
    (run / "report.json").unlink()
    done = cli("share", "mirror", run, "--to", "trackio", cwd=runs)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--resume" in done.err
