"""Query an engine's class methods: in this process, or in a small one of the engine's environment."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import fidelab
from fidelab.core import Arm, Estimator, KVSpec, errors, plain_json
from fidelab.core.errors import EngineError, FidelabError
from fidelab.core.serial import fits, to_json
from fidelab.engines import ENGINES
from fidelab.engines.base import Support
from fidelab.engines.format_names import names_of
from fidelab.engines.k16v8 import meaning
from fidelab.environments.environment import Environment
from fidelab.workers.ask import answer
from fidelab.workers.messages import PROTOCOL, check_text

_LIMIT = 120.0  # seconds for one answer: it may import the engine
_GRACE_SECONDS = 5.0  # seconds of grace to end
_MAX_LINE_BYTES = 4 << 20  # bytes of an answer
_KINDS: Mapping[str, Any] = {
    "versions": Mapping[str, str],
    "kv_names": list[str],
    "formats": Mapping[str, str],
    "check_kv": Any,
    "supports": list[bool | str],
    "control_for": str | None,
    "about": Mapping[str, Any],
    "about.estimator": str,
    "about.checkpoint_format": str,
    "about.build": str | None,
    "about.device": str,
    "about.provenance": Mapping[str, str],
    "about.shims": list[Mapping[str, str]],
    "about.variables": Mapping[str, str],
}
"""Expected type of the answer to each question, and of each field of an engine's :class:`About`."""


@dataclass(frozen=True)
class About:
    """An engine's installation.

    Attributes:
        build: device that it is built for (cpu, cuda, hip); ``None`` if unknown.
        device: the build's device if the machine has one, else cpu.
        provenance: for each distribution ``stock``, ``modified: …`` or ``built from …``.
        shims: path and hash of the folders on PYTHONPATH besides fidelab's.
        variables: variables of its environment that may change its results
            (:func:`~fidelab.engines.variables.variables_of`).
    """

    estimator: Estimator
    checkpoint_format: str
    build: str | None
    device: str
    provenance: Mapping[str, str]
    shims: tuple[Mapping[str, str], ...]
    variables: Mapping[str, str]


class EngineAnswers(ABC):
    """Class side of the engine contract; each method raises the same errors as the engine's own.

    For an engine in another environment, they also raise EngineError if the environment is broken or does not answer.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.python = platform.python_version()  # of the engine's interpreter

    @cached_property
    def about(self) -> About:
        """The engine's installation."""
        fields = self._ask("about")
        return About(**{**fields, "estimator": Estimator(fields["estimator"]), "shims": tuple(fields["shims"])})

    def formats(self) -> dict[str, str]:
        """Return the KV formats of this engine, each with the reason why it cannot run here, or an empty text.

        The answers are those of :meth:`verdict` for a model that computes in bfloat16.
        """
        failing = self._failing
        return {name: why or _did_not_run(failing, name) for name, why in self._ask("formats").items()}

    def verdict(self, arm: Arm) -> Support:
        """Return whether an arm may run: by the engine's own answer, then by the trial of its formats."""
        own = self.supports(arm)
        if not own.ok:
            return own
        failing = self._failing
        # what a format means depends on the native type of the model
        tried = [
            name for name in failing if arm.kv in [meaning(KVSpec.parse(name), native) for native in ("bf16", "f16")]
        ]
        return Support(False, _did_not_run(failing, tried[0])) if tried else own

    @property
    def _failing(self) -> Mapping[str, str]:
        return self.environment.failing(self.versions()) if self.environment.folder else {}

    def ahead(self, question: str, **fields: Any) -> None:  # noqa: B027  (no gain in this process)
        """Send a question whose answer or error is read later, so that other engines can be asked in the meantime."""

    @property
    def estimator(self) -> Estimator:
        """The default estimator: how the engine obtains distributions."""
        return self.about.estimator

    @property
    def checkpoint_format(self) -> str:
        """The checkpoint format of ``Arm.path``."""
        return self.about.checkpoint_format

    def versions(self) -> dict[str, str]:
        """See :meth:`Engine.versions`."""
        return dict(self._ask("versions"))

    def kv_names(self) -> list[str]:
        """See :meth:`Engine.kv_names`; includes ``k16v8`` if the engine has both of its formats."""
        return list(self._ask("kv_names"))

    def check_kv(self, kv: KVSpec) -> None:
        """See :meth:`Engine.check_kv`."""
        self._ask("check_kv", kv=kv)

    def supports(self, arm: Arm) -> Support:
        """See :meth:`Engine.supports`."""
        return Support(*self._ask("supports", arm=arm))

    def control_for(self, reference: KVSpec, native: str) -> str | None:
        """See :meth:`Engine.control_for`."""
        name = self._ask("control_for", kv=reference, native=native)
        return None if name is None else str(name)

    def greet(self) -> None:  # noqa: B027  (this process need not start)
        """Wait until the engine can be asked; raises as :func:`ask`."""

    @abstractmethod
    def _ask(self, question: str, **fields: Any) -> Any:
        """Return the answer to a question of :func:`fidelab.workers.ask.answer`."""


@contextmanager
def ask(environment: Environment, limit: float = _LIMIT, files: Sequence[str] = ()) -> Iterator[EngineAnswers]:
    """Yield the engine of an environment, which answers while the context lasts.

    ``limit``: seconds for one answer.  ``files``: files in the questions, which an engine in a container must see.

    Raises:
        EngineError: If its interpreter does not start, or speaks another protocol version.
    """
    with start(environment, limit, files) as asked:
        asked.greet()
        yield asked


@contextmanager
def start(environment: Environment, limit: float = _LIMIT, files: Sequence[str] = ()) -> Iterator[EngineAnswers]:
    """Like :func:`ask`, without waiting for the interpreter.  The first answer raises its errors.

    Raises:
        EngineError: If its interpreter does not start.
    """
    if environment.is_current:
        yield _Here(environment)
        return
    there = _There(environment, limit, files)
    try:
        yield there
    except BaseException:
        there.end(grace=0)
        raise
    else:
        there.end()


def _did_not_run(failing: Mapping[str, str], name: str) -> str:
    return f"it did not run in its trial: {failing[name]}" if name in failing else ""


class AssumedEngine(EngineAnswers):
    """An engine that is not installed, for planning.  Adapter and tables answer where they can; else the answer is yes.

    Attributes:
        problem: the reason why the engine cannot be asked, and the remedy.
    """

    def __init__(self, environment: Environment, problem: str) -> None:
        super().__init__(environment)
        self.problem = problem

    def _ask(self, question: str, **fields: Any) -> Any:
        engine = ENGINES.load(self.environment.engine)
        if question in ("control_for", "check_kv"):
            return answer(engine, question, **fields)
        about: dict[str, Any] = {"build": None, "device": "cpu", "provenance": {}, "shims": (), "variables": {}}
        known = {"estimator": str(engine.estimator), "checkpoint_format": engine.checkpoint_format}
        kv_names = names_of(engine)  # none: whatever is asked is assumed
        return {"supports": [True, ""], "kv_names": kv_names, "about": {**known, **about}}.get(question, {})


class _Here(EngineAnswers):
    """An engine in this process."""

    def _ask(self, question: str, **fields: Any) -> Any:
        return answer(ENGINES.load(self.environment.engine), question, **fields)


class _There(EngineAnswers):
    """An engine in a process of its environment, which starts at once and answers one question after another."""

    def __init__(self, environment: Environment, limit: float, files: Sequence[str]) -> None:
        super().__init__(environment)
        self._limit = limit
        self._buffer = b""
        self._greeted = False
        self._kept: dict[str, dict[str, Any]] = {}  # replies to questions without arguments: they do not change
        self._ahead: list[str] = []  # questions without a reply so far
        self._container = environment.container(files=files)
        self._command = environment.command("fidelab.workers.ask", self._container)
        variables = {**os.environ, **environment.variables()}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed at the end)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=variables,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the whole group
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{self._place} cannot be started: {error.strerror} ({self._command[0]})") from None

    def greet(self) -> None:
        """Read the process' greeting and check its protocol version."""
        if self._greeted:
            return
        greeting = self._hear("start")
        if greeting.get("protocol") != PROTOCOL:
            raise EngineError(
                f"{self._place} has fidelab {greeting.get('fidelab', '(unknown)')}, which speaks protocol "
                f"{greeting.get('protocol')}, this one {PROTOCOL}: install fidelab {fidelab.__version__} there"
            )
        self.python = str(greeting.get("python"))
        self._greeted = True

    def end(self, grace: float = _GRACE_SECONDS) -> None:
        """End the process and everything that the engine started; ``grace``: seconds before it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the process ends with its input
        try:
            self._process.wait(grace if self._greeted else 0)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._process.wait() and self._container is not None:
                self._container.end()
            self._process.stdout.close()
            self._log.close()

    @property
    def _place(self) -> str:
        """The environment's name in error messages."""
        return f"the environment of engine {self.environment.engine} ({self.environment.interpreter})"

    def ahead(self, question: str, **fields: Any) -> None:
        self._send(question, fields)
        self._ahead.append(question)

    def _ask(self, question: str, **fields: Any) -> Any:
        self.greet()
        while self._ahead and question not in self._kept:
            self._kept[self._ahead[0]] = self._reply(self._ahead[0])
            self._ahead.pop(0)
        if question in self._kept:
            return _value(self._kept[question])
        self._send(question, fields)
        reply = self._reply(question)
        if not fields:
            self._kept[question] = reply
        return _value(reply)

    def _send(self, question: str, fields: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        request = {"ask": question, "engine": self.environment.engine, **to_json(fields)}
        with contextlib.suppress(BrokenPipeError):  # a missing answer shows that the process ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _reply(self, question: str) -> dict[str, Any]:
        """Return the next reply: an error's name and text, or a value of the right type."""
        reply = self._hear(f"answer about its {question}")
        if "error" in reply:
            return {"error": str(reply["error"]), "text": str(reply.get("text"))}
        value: Any = reply.get("value")
        try:
            check_text(value)
            good = fits(value, _KINDS[question]) and (question != "supports" or len(value) == 2)
            if good and question == "about":
                fields = {name.partition(".")[2]: kind for name, kind in _KINDS.items() if name.startswith("about.")}
                good = value.keys() == fields.keys() and all(fits(value[name], kind) for name, kind in fields.items())
                good = good and value["estimator"] in list(Estimator) and all("folder" in s for s in value["shims"])
        except ValueError:
            good = False
        if not good:
            raise EngineError(f"{self._place} gives no usable answer about its {question}: is it fidelab's own worker?")
        return {"value": value}

    def _hear(self, what: str) -> dict[str, Any]:
        """Return the next line as an object."""
        assert self._process.stdout is not None
        end = time.monotonic() + self._limit
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._process.kill()  # it will not end on request either
                raise EngineError(f"{self._place} did not {what} within {self._limit:g} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EngineError(self._obituary(what))
            self._buffer += chunk
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise EngineError(
                    f"{self._place} prints more than {_MAX_LINE_BYTES >> 20} MiB where a line is expected"
                )
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = plain_json(line)
            if isinstance(message, dict):
                return message
        except (ValueError, RecursionError):
            pass
        text = line[:80].decode("utf-8", "replace")
        raise EngineError(f"{self._place} prints what is not an answer ({text!r}): its start-up files must be silent")

    def _obituary(self, what: str) -> str:
        """Return why the process ended before its answer."""
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        last = lines[-1][:300] if lines else f"it ended with status {code}"
        if "No module named 'numpy'" in last:
            return f"{self._place} has no numpy: install numpy there"
        if "StrEnum" in last or "SyntaxError" in last:
            return f"{self._place} is too old: Python 3.11 or newer is needed there"
        return f"{self._place} did not {what}: {last}"


def _value(reply: Mapping[str, Any]) -> Any:
    """Return the value, or raise the other process's error; one of an unknown class becomes an EngineError."""
    if "error" not in reply:
        return reply["value"]
    cls = getattr(errors, reply["error"], EngineError)
    if not (isinstance(cls, type) and issubclass(cls, FidelabError)):
        cls = EngineError
    if issubclass(cls, errors.UnknownNameError):  # whose message is made from more than a text
        cls = errors.UsageError
    raise cls(reply["text"])
