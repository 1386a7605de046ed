"""Start an arm's own server in its engine's environment, wait for it, and compare it with the declared settings."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fidelab.config.schema import Preset
from fidelab.core import Arm, usable_cores
from fidelab.core.errors import EngineError, InputError, NotSupportedError, UsageError
from fidelab.core.paths import expand
from fidelab.core.serial import to_json
from fidelab.engines import k16v8
from fidelab.engines.base import Engine, engine_class
from fidelab.engines.installed import gpu_files
from fidelab.engines.openai.http import Client
from fidelab.engines.server_settings import Finding, findings
from fidelab.engines.variables import check_env
from fidelab.environments.asked import Engines, check_kv_name, native_kv
from fidelab.environments.environment import Environment, locate, read_marker
from fidelab.environments.servers import ServerRecord, Starts, first_answer, start, wait_until_healthy, written_log
from fidelab.models import embedded
from fidelab.models import path as model_path
from fidelab.models.local import local_model

_SETTINGS_TIMEOUT = 10.0  # seconds for one address of a server's settings
_PYTHON = "python"  # how server commands call the interpreter of the engine's environment


@dataclass(frozen=True)
class Plan:
    """A server that can be started: the arm with the server's own options, and the command of its process.

    ``shown``: the engine's own command, for people.  ``missing``: why it cannot be started here; a dry run alone
    plans such a server, without ``command``.
    """

    arm: Arm
    url: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    shown: str
    missing: str = ""


@dataclass(frozen=True)
class RunningServer:
    """A running server and its reported settings.

    ``seconds``: time until it answered; ``earlier``: times of earlier starts of the same command.
    """

    server: ServerRecord
    process: subprocess.Popen[bytes]
    seconds: float
    earlier: tuple[float, ...]
    findings: tuple[Finding, ...] = field(default=())


def arm_of(preset: Preset, *, device: str = "auto", threads: int | None = None) -> Arm:
    """Return the arm of a preset with its server's own options. Models on a hub are not fetched.

    Raises:
        InputError: If the engine needs a GGUF file and the model has none here.
        FidelabError: If the model or the format is invalid.
    """
    cls = engine_class(preset.engine_name)
    check_env(preset.env)
    kv = preset.kv or native_kv(preset.engine)
    native = "f16" if preset.dtype == "float16" else "bf16"
    return Arm(
        name=str(preset.name),
        engine=preset.engine_name,
        model=preset.model,
        path=_model(preset.model, cls),
        weights="",
        kv=k16v8.meaning(kv, native),
        dtype=preset.dtype or "auto",
        device=_device(preset.device or "auto" if device == "auto" else device),
        threads=threads or usable_cores(),
        options=tuple(sorted({**preset.engine_args, **preset.serve}.items())),
        env=tuple(sorted(preset.env.items())),
    )


def plan(
    preset: Preset,
    arm: Arm,
    host: str,
    port: int | None,
    environment: Environment | None = None,
    *,
    dry_run: bool = False,
) -> Plan:
    """Plan a server without starting it.  ``port`` ``None``: a free one; ``environment``: the one of :func:`check`.

    ``dry_run``: an engine or a device that this machine lacks is noted in the plan.

    Raises:
        UsageError: If the port is taken, or the address does not belong to this machine.
        NotSupportedError: As :func:`check_servable`.
        EngineError: If the engine is not installed.
    """
    cls, engine = engine_class(preset.engine_name), preset.engine
    port = _port(host, port)
    shown_host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url, shown, variables = f"http://{shown_host}:{port}", server_command(arm, host, port), cls.serve_variables(arm)
    if dry_run and (missing := _missing_device(arm)):
        return Plan(arm, url, (), variables, shown, missing)
    try:
        if environment is None:
            environment = locate(engine.name, python=engine.python, pythonpath=engine.pythonpath)
        command = cls.environment_command(arm, host, port)
    except EngineError as error:
        if not dry_run:
            raise
        return Plan(arm, url, (), variables, shown, str(error))
    if command[:2] == [_PYTHON, "-m"]:  # with the environment's interpreter
        command = [*environment.command(command[2]), *command[3:]]
    return Plan(arm, url, tuple(command), {**environment.variables(), **variables}, shown)


def server_command(arm: Arm, host: str, port: int) -> str:
    """Return the command of the engine's own server, with its variables. Raises as :meth:`Engine.serve_command`."""
    cls = engine_class(arm.engine)
    variables = [f"{name}={shlex.quote(value)}" for name, value in cls.serve_variables(arm).items()]
    return " ".join([*variables, shlex.join(cls.serve_command(arm, host, port))])


def check_servable(preset: Preset, arm: Arm) -> None:
    """Refuse an arm whose server cannot be started here. The engine is not queried.

    Raises:
        NotSupportedError: If its engine has no server, or none with these options, or the arm names an image.
    """
    cls = engine_class(preset.engine_name)
    if cls.is_server:
        raise NotSupportedError(f"engine {cls.name} is for servers that run: give the address of one with --base-url")
    cls.serve_command(arm, "127.0.0.1", 0)
    if preset.engine.image:
        raise NotSupportedError(
            f"image {preset.engine.image}: fidelab starts servers of installed engines only: leave the image out, or "
            "start its container and give the address with --base-url"
        )


def check(preset: Preset, arm: Arm) -> Environment:
    """Return the engine's environment, after asking the engine there whether it can run this arm.

    Raises:
        NotSupportedError: If it cannot. The message says why.
        FidelabError: If the engine is not installed, or does not know an option or a format.
    """
    if missing := _missing_device(arm):
        raise NotSupportedError(f"{arm.name} cannot run here: {missing}")
    with Engines() as engines:
        asked = engines.ask(preset.engine)
        environment = asked.environment
        check_kv_name(preset, preset.engine, asked)
        asked.check_kv(arm.kv)
        known = replace(arm, options=tuple(sorted(preset.engine_args.items())))
        verdict = asked.verdict(replace(known, dtype="bfloat16") if arm.dtype == "auto" else known)
    if not verdict.ok:
        raise NotSupportedError(f"{arm.name} cannot run here: {verdict.reason}")
    return environment


@contextmanager
def launch(planned: Plan, limit: float, say: Callable[[str], None]) -> Iterator[RunningServer]:
    """Start the server, wait until it answers and read its settings. Differences do not end it.

    The server is ended on any exception inside, Ctrl-C included, and on signals that end this process. Otherwise it is
    left running.

    Args:
        planned: server to start.
        limit: seconds within which it must answer.
        say: gets a line for each step.

    Raises:
        EngineError: If it cannot be started, ends while it starts, or does not answer.
        OutputError: If its log or its record cannot be written.
    """
    arm = planned.arm
    command = [word for word in planned.command if word not in (planned.url.rpartition(":")[2],)]
    variables = {name: value for name, value in planned.variables.items() if not name.startswith("PYTHON")}
    versions: dict[str, str] = {}  # in an environment that fidelab made
    with contextlib.suppress(IndexError):
        versions = dict((read_marker(Path(planned.command[0]).parents[1]) or {}).get("versions", {}))
    starts = Starts(arm.engine, str(versions), str(variables), *command)
    known = _FIRST_START_NOTE
    if starts.earlier:
        low, high = f"{min(starts.earlier):.0f}", f"{max(starts.earlier):.0f}"
        known = f"earlier starts took {low if low == high else f'{low} to {high}'} s"
    say(f"starting {arm.name} on engine {arm.engine}; {known}")
    started = start(arm.name, planned.command, planned.variables, planned.url, to_json(arm))
    with _signals_as_exceptions(), started as (server, process):
        seconds = wait_until_healthy(server, process, limit, say)
        starts.add(seconds)
        first_answer(server, limit, say)
        found = check_server(arm, planned.url, written_log(server.log))
        yield RunningServer(server, process, seconds, tuple(starts.earlier), tuple(found))


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn signals that would end this process silently into ``SystemExit``, as Ctrl-C is ``KeyboardInterrupt``."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # handlers are the main thread's
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_server(arm: Arm, url: str, log: str = "") -> list[Finding]:
    """Compare a running server's settings with an arm's; ``log``: its output, if known.

    Raises:
        EngineError: If it cannot be reached, or does not belong to this engine.
    """
    return findings(arm, Client(url, None, _SETTINGS_TIMEOUT), log)


_FIRST_START_NOTE = "the first start of this command here, which may compile"


def _model(name: str, cls: type[Engine]) -> str:
    """Return the model argument of a server: the path of an embedded or local model, the name of one on a hub."""
    gguf = cls.checkpoint_format == "gguf"
    if name in embedded.NAMES:
        return str(model_path(name, "gguf") if gguf else model_path(name))
    path = local_model(str(expand(name)))
    if path is not None:
        return str(path)
    if gguf:
        raise InputError(
            f"{name} is not a file here; this engine's server loads a .gguf file: name one with model=PATH"
        )
    return name


def _missing_device(arm: Arm) -> str:
    """Return why this machine lacks the arm's device; empty if it may have it."""
    if not arm.device.startswith("cuda") or gpu_files():
        return ""
    return "it needs a GPU, and this machine has none; --device cpu asks for the processor"


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    if not gpu_files():
        return "cpu"
    try:
        import torch
    except ModuleNotFoundError:  # the engine has a torch of its own
        return "cuda"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _port(host: str, port: int | None) -> int:
    """The port that was asked for, or a free one.

    Raises:
        UsageError: If the port is taken, or the address does not belong to this machine.
    """
    try:
        family = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((host, port or 0))
            return int(free.getsockname()[1])
    except OSError as error:
        where = f"--host {host}" + (f" --port {port}" if port else "")
        raise UsageError(f"{where}: {error.strerror or error}; name another, or omit --port") from None
    except OverflowError:
        raise UsageError(f"--port {port}: ports go to 65535") from None
