"""Servers started on this machine: their processes, and the records by which they are found and ended.

A server leads its own process group.  Its record (in the user's state, one file each) has its pid and start time, since
a pid alone may belong to another process by now.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fidelab.core import digest, read_file, slug, state_dir, strict_json, write_atomically
from fidelab.core.errors import EngineError, OutputError
from fidelab.core.serial import from_json, to_json
from fidelab.engines.openai.http import Client, Refused
from fidelab.engines.openai.named import misnamed, model_named, names_of
from fidelab.workers.failures import explain, explain_exit

_GRACE_SECONDS = 15.0  # seconds between asking a server to end and killing its group
_PAUSE = 0.2  # seconds between two looks whether it answers
_REMIND = 30.0  # seconds between two lines about a server that does not answer yet
_LOG_TAIL_LINES = 12  # lines of a log that are shown
_MAX_LOG_BYTES = 4 << 20  # bytes of a log that are read from its beginning, where servers print their settings
_MAX_RECORD_BYTES = 1 << 20
_KEPT_STARTS = 5
_PROC = Path("/proc")
# The last line of a traceback, after the prefix that engines put before each line of their processes.
_EXCEPTION = re.compile(r"(?:\(\w+ pid=\d+\) )?(?:ERROR [^\]]*\] +)?((?:\w+\.)*\w*(?:Error|Exception): .+)")


@dataclass(frozen=True)
class ServerRecord:
    """A server that was started here.

    ``begun``: start of its process in system ticks, which differs when a pid is reused.  ``arm``: the declared
    :class:`Arm` as plain data.
    """

    name: str
    url: str
    pid: int
    begun: str
    log: str
    command: tuple[str, ...]
    arm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether this process runs; another process with its pid does not count."""
        return _begun(self.pid) == self.begun

    def keep(self) -> None:
        """Write the record.

        Raises:
            OutputError: If the record cannot be written.
        """
        _write(_folder() / f"{self.name}.json", to_json(self))

    def forget(self) -> None:
        """Remove the record, if it is still this server's."""
        if any(record == self for record in _read_records()):
            (_folder() / f"{self.name}.json").unlink(missing_ok=True)


def records() -> list[ServerRecord]:
    """Return running servers, sorted by name.  Records of ended servers are removed."""
    alive = []
    for record in _read_records():
        if record.alive:
            alive.append(record)
        else:
            record.forget()
    return sorted(alive, key=lambda server: server.name)


@contextmanager
def start(
    name: str, command: Sequence[str], variables: Mapping[str, str], url: str, arm: Mapping[str, Any]
) -> Iterator[tuple[ServerRecord, subprocess.Popen[bytes]]]:
    """Start a server; on any exception inside, Ctrl-C included, it is ended and its record removed.

    Args:
        name: the preset's name, and the record's, with a number if a server of that name runs.
        command, variables: as for ``subprocess``; the variables are set on top of this process' own.
        url: the server's address.
        arm: the declared arm.

    Raises:
        EngineError: If the server cannot be started.
        OutputError: If the log or the record cannot be written.
    """
    taken = {record.name for record in records()}
    plain = slug(name)
    free = next(one for n in range(1, 10_000) if (one := plain if n == 1 else f"{plain}-{n}") not in taken)
    log = _folder() / f"{free}.log"
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # commands and logs may hold secrets
        out = log.open("wb")
    except OSError as error:
        raise OutputError(f"cannot write {error.filename or log} ({error.strerror or error})") from error
    with out:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the whole group
            )
        except OSError as error:
            raise EngineError(f"the server cannot be started: {error.strerror} ({command[0]})") from None
    server = ServerRecord(free, url, process.pid, _begun(process.pid) or "", str(log), tuple(command), arm)
    try:
        server.keep()
        yield server, process
    except BaseException:
        _end_group(process.pid, lambda: process.poll() is not None)
        server.forget()
        raise


def wait_until_healthy(
    server: ServerRecord, process: subprocess.Popen[bytes], limit: float, say: Callable[[str], None]
) -> float:
    """Wait until the server answers, and return the seconds.  ``say`` gets a line from time to time.

    Raises:
        EngineError: If the server ended (the message has its last lines and a likely cause), or does not answer within
            ``limit`` seconds.
    """
    client = Client(f"{server.url}/v1", None, 5.0)
    began = time.monotonic()
    said = began
    while not _is_healthy(client):
        seconds = time.monotonic() - began
        if process.poll() is not None:
            raise EngineError(died(server, process.returncode, say))
        if seconds > limit:
            _print_last_lines(server, say)
            raise EngineError(f"the server did not answer within {limit:g} s: raise --timeout; log: {server.log}")
        if time.monotonic() - said > _REMIND:
            said = time.monotonic()
            say(f"still starting after {seconds:.0f} s; log: {server.log}")
        time.sleep(_PAUSE)
    return time.monotonic() - began


def first_answer(server: ServerRecord, limit: float, say: Callable[[str], None]) -> None:
    """Ask for one token, since some engines only then build their attention kernels and log their names.

    Raises:
        EngineError: If the server returns no token (``say`` receives its last lines), or answers as another model.
    """
    client = Client(f"{server.url}/v1", None, limit)
    try:
        listed = client.models()
        model = listed[0]["id"]
        answer = client.post("/completions", {"model": model, "prompt": "The", "max_tokens": 1, "temperature": 0})
    except (EngineError, LookupError, TypeError) as error:
        why = str(error) if isinstance(error, EngineError) else "it lists no model"
        _print_last_lines(server, say)
        raise EngineError(f"the server answers, and completes nothing ({why}); log: {server.log}") from None
    if (name := model_named(answer)) is not None and name not in names_of(model, listed):
        raise EngineError(f"{misnamed(client.clean(name), model)}; log: {server.log}")


def died(server: ServerRecord, returncode: int, say: Callable[[str], None]) -> str:
    """Return why a server ended early: its exit status and the likely cause.  ``say`` receives its last lines."""
    lines = written_log(server.log, last=True).splitlines()
    _print_last_lines(server, say)
    what = explain_exit(returncode).replace("worker", "server")
    cause = explain(lines) or next((match[1] for line in lines if (match := _EXCEPTION.match(line))), None)
    if cause is None:
        return f"{what}; log: {server.log}"
    return f"{what.partition(' (')[0]}: {' '.join(cause.split())[:300]}; log: {server.log}"


def end(server: ServerRecord) -> bool:
    """End a server's process group; return ``False`` if it had ended before."""
    alive = server.alive
    if alive:
        _end_group(server.pid, lambda: not server.alive)
    server.forget()
    return alive


def written_log(path: str, *, last: bool = False) -> str:
    """Return the output of a server: the beginning, or the ``last`` part; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - (_MAX_LOG_BYTES >> 4)))
            return file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


class Starts:
    """Durations of earlier starts of one command in one environment, in seconds.  The first may compile.

    Args:
        parts: identity of the command: its words without the address, the engine's versions.
    """

    def __init__(self, *parts: str) -> None:
        self._key = digest(*parts)
        self._path = _folder() / "starts"
        self._all = _object(self._path)
        seconds = self._all.get(self._key)
        self.earlier = [float(x) for x in seconds if isinstance(x, int | float)] if isinstance(seconds, list) else []

    def add(self, seconds: float) -> None:
        """Store one more duration; if that fails, the next start counts as the first again."""
        everything = {**_object(self._path), self._key: [*self.earlier, round(seconds, 2)][-_KEPT_STARTS:]}
        with contextlib.suppress(OutputError):
            _write(self._path, everything)


# ----------------------------------------------------------------------------------------------------- inside


def _is_healthy(client: Client) -> bool:
    """Return whether the server answers ``/health``, or lists its models if it lacks that address."""
    try:
        client.text("/health")
        return True
    except Refused as error:
        if error.status != 404:
            return False
    except EngineError:
        return False
    try:
        return bool(client.get("/models").get("data"))
    except EngineError:
        return False


def _print_last_lines(server: ServerRecord, say: Callable[[str], None]) -> None:
    lines = [line.rstrip() for line in written_log(server.log, last=True).splitlines() if line.strip()]
    for line in lines[-_LOG_TAIL_LINES:]:
        say(f"  | {line[:300]}")


def _end_group(pid: int, gone: Callable[[], bool]) -> None:
    """Ask a process group to end, and kill the rest of it."""

    def wait() -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        while not gone() and time.monotonic() < deadline:
            time.sleep(_PAUSE / 4)

    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGTERM)
            wait()
    finally:  # a second Ctrl-C does not leave it running
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    wait()


def _begun(pid: int) -> str | None:
    """Return the start of a process, in ticks since the machine's start; ``None`` if it does not run."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        return None if fields[0] in "ZX" else f"{boot} {fields[19]}"
    except (OSError, IndexError):
        if _PROC.joinpath("self").exists():
            return None
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def _folder() -> Path:
    return state_dir() / "servers"


def _read_records() -> list[ServerRecord]:
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(ValueError):  # of another version, or not a record
            found.append(from_json(ServerRecord, _object(path)))
    return [record for record in found if record.pid > 1]


def _object(path: Path) -> dict[str, Any]:
    try:
        value = strict_json(read_file(path, _MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {error.filename or path} ({error.strerror or error})") from error
    write_atomically(path, json.dumps(content, indent=2) + "\n")
