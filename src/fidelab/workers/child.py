"""Worker process: opens one engine, streams answers into captures, exits.

Runs as ``python -m fidelab.workers.child [ENGINE]`` in the engine's environment, where ``ENGINE`` is imported before a
job arrives; besides the engine itself only the standard library and numpy are imported.  Messages go out on the
original standard output.  Output of the engine is sent to standard error, which the parent keeps as the arm's log.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TextIO

from fidelab.captures.container import Array
from fidelab.captures.requests import Generate, Request, Served, request_from_record
from fidelab.captures.writer import CaptureWriter, store_head
from fidelab.core import Arm, Status, Vocabulary, finite
from fidelab.core.errors import EngineError, FidelabError, NotSupportedError
from fidelab.core.serial import from_json, to_json
from fidelab.engines import ENGINES
from fidelab.engines.base import Answer, Engine, no_ways
from fidelab.engines.variables import variables_of
from fidelab.workers.memory import peak_bytes, resident_bytes
from fidelab.workers.messages import (
    PROTOCOL,
    Captured,
    Compared,
    Done,
    Failed,
    Hello,
    Idle,
    Job,
    Message,
    More,
    Opened,
    ProbeFailed,
    ProbeTask,
    Progress,
    Written,
    decode,
    encode,
)

Further = queue.SimpleQueue[list[ProbeTask]]
Replies = queue.SimpleQueue[Compared | None]  # None: the parent is gone

ORPHANED = 3  # exit code of a child whose parent went away
_PROGRESS_EVERY = 0.2  # seconds between progress messages


class _Outbox:
    """Sends messages; bundles progress.  ``log`` receives tracebacks."""

    def __init__(self, stream: IO[bytes], log: TextIO) -> None:
        self._stream = stream
        self.log = log
        self._tokens = self._decoded = 0
        self._last = 0.0

    def send(self, message: Message) -> None:
        self._stream.write(encode(message))
        self._stream.flush()

    def progress(self, tokens: int, decoded: int) -> None:
        self._tokens += tokens
        self._decoded += decoded
        now = time.monotonic()
        if now - self._last >= _PROGRESS_EVERY:
            self.flush()
            self._last = now

    def flush(self) -> None:
        if self._tokens:
            self.send(Progress(self._tokens, self._decoded))
            self._tokens = self._decoded = 0


class _Sink:
    """The engine's view of a capture writer."""

    def __init__(self, writer: CaptureWriter, outbox: _Outbox) -> None:
        self._writer = writer
        self._outbox = outbox

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        self._writer.add(item, arrays)

    def fail(self, item: int, reason: str) -> None:
        self._writer.fail(item, reason)

    def progress(self, tokens: int, decoded: int = 0) -> None:
        self._outbox.progress(tokens, decoded)


class _Parts:
    """The parent compares the parts of a task's capture (:class:`~fidelab.captures.writer.Comparer`)."""

    def __init__(self, index: int, outbox: _Outbox, replies: Replies) -> None:
        self._index, self._outbox, self._replies = index, outbox, replies

    def begin(self, folder: Path, part: int, items: list[int]) -> None:
        self._outbox.send(Written(self._index, str(folder), part, items))

    def result(self) -> tuple[str, int]:
        reply = self._replies.get()
        if reply is None:
            self._replies.put(None)
            raise EngineError("the process that compares rows is gone")
        return reply.sha256, reply.size


def main(engine: str = "") -> int:
    """Answer on standard input and output, with an engine imported before the first word. Returns the exit code."""
    # Faulthandler writes the traceback and raises the signal again. The signal is ignored, so that the faulty
    # instruction runs once more; the kernel then ends the process and logs the fault, which it does not do for a
    # signal that has a handler.
    for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    outbox = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the engine become log lines, not broken messages
    for module in ENGINES.load(engine).imported_ahead if engine else ():
        import_module(module)
    return serve(sys.stdin.buffer, outbox, sys.stderr, on_end=exit_orphaned)


def serve(inbox: IO[bytes], outbox: IO[bytes], log: TextIO, *, on_end: Callable[[], None]) -> int:
    """Send the greeting, read one job, and answer its tasks and those that follow. Returns the exit code.

    ``log`` receives tracebacks. ``on_end`` is called in another thread when the inbox ends, before the work stops, and
    in this one when nobody reads the outbox: the parent is gone, and what the engine started has to end, too.
    """
    try:
        return _serve(inbox, _Outbox(outbox, log), on_end)
    except BrokenPipeError:
        on_end()
        return ORPHANED


def _serve(inbox: IO[bytes], box: _Outbox, on_end: Callable[[], None]) -> int:
    box.send(Hello(pid=os.getpid()))
    line = inbox.readline()
    if not line:
        return ORPHANED
    job = decode(line)
    if not isinstance(job, Job) or job.protocol != PROTOCOL:
        box.send(Failed(Status.FAILED, f"worker speaks protocol {PROTOCOL}, the parent another one"))
        return 1
    further: Further = queue.SimpleQueue()
    replies: Replies = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(os.dup(inbox.fileno()), further, replies, on_end), daemon=True).start()
    try:
        _work(job, box, further, replies)
    except NotSupportedError as error:
        box.send(Failed(Status.NOT_SUPPORTED, str(error)))
        return 1
    except Exception as error:
        traceback.print_exc(file=box.log)
        box.send(Failed(Status.FAILED, reason_of(error)))
        return 1
    return 0


def _work(job: Job, outbox: _Outbox, further: Further, replies: Replies) -> None:
    started = time.monotonic()
    os.environ.update(job.env)
    arm = from_json(Arm, job.arm)
    cls: type[Engine] = ENGINES.load(arm.engine)
    variables = variables_of(cls, os.environ)  # before the engine sets some of its own
    engine = cls()
    engine.foreseen = frozenset(str(task.request["kind"]) for task in job.tasks)
    engine.seed = job.tasks[0].seed if job.tasks else 0
    adapter = time.monotonic() - started
    engine.open(arm)
    engine.mark("warm-up")  # phases that it did not separate
    phases = {"import": adapter + engine.phases.pop("import", 0.0), **engine.phases}
    loaded = resident_bytes()
    if job.sample_text:
        # Refuse an engine whose token ids of the sample text are not those that the requests were made with
        sample, actual = list(job.sample_ids), engine.tokenize(job.sample_text)
        if sample != actual:
            at = next(
                (i for i, (a, b) in enumerate(zip(sample, actual, strict=False)) if a != b),
                min(len(sample), len(actual)),
            )
            raise EngineError(
                f"the engine's tokenizer differs from the model's at token {at} of a sample; results could not be "
                "compared"
            )
    outbox.send(Opened(time.monotonic() - started, phases))
    answering = _Answering(engine, arm, job, {"variables": variables, "loaded_host_bytes": loaded}, outbox, replies)
    tasks = job.tasks
    while True:
        for task in tasks:
            answering.attempt(task)
        outbox.send(Idle())
        if not (tasks := further.get()):
            break
    outbox.send(Done(finite(answering.runtime_info())))
    try:
        engine.close()
    except Exception:  # everything is answered; the log keeps later errors
        traceback.print_exc(file=outbox.log)


class _Answering:
    """Answers tasks one after another.  ``facts``: fields of the record that were known when the model was loaded."""

    def __init__(
        self, engine: Engine, arm: Arm, job: Job, facts: Mapping[str, Any], outbox: _Outbox, replies: Replies
    ) -> None:
        self._engine, self._arm, self._job, self._outbox, self._replies = engine, arm, job, outbox, replies
        self._facts = facts
        self._stored: tuple[Answer, dict[str, Any]] | None = None  # the last head that was written, and its record
        self._index = 0

    def attempt(self, task: ProbeTask) -> None:
        """Answer one task.  Its failure is reported and does not affect the others."""
        began, index = time.monotonic(), self._index
        self._index += 1
        try:
            path = self._answer(task, index)
        except Exception as error:
            traceback.print_exc(file=self._outbox.log)
            self._outbox.flush()
            self._outbox.send(ProbeFailed(index, reason_of(error)))
        else:
            self._outbox.flush()
            self._outbox.send(Captured(index, str(path), time.monotonic() - began))

    def runtime_info(self) -> dict[str, Any]:
        """Runtime info for manifests: the engine's record, its installation and variables, and peak memory in bytes."""
        memory = {**self._facts, "peak_host_bytes": peak_bytes(), "peak_device_bytes": self._engine.peak_device_bytes()}
        return {**self._engine.runtime_info().record(), **self._job.about, **memory}

    def _answer(self, task: ProbeTask, index: int) -> Path:
        request, self._engine.seed = request_from_record(task.request), task.seed
        if request.kind not in self._engine.kinds and not isinstance(request, Served):
            raise NotSupportedError(f"engine {self._engine.name} answers no {request.kind} probes")
        vocabulary = Vocabulary(**self._job.vocabulary)
        parts = _Parts(index, self._outbox, self._replies) if task.compared else None
        asked = to_json(self._arm)
        writer = CaptureWriter(Path(task.target), request, task.key, asked, vocabulary, task.against, parts)
        try:
            answer = self._answered(request, writer)
            if answer.head is not None:
                # Record of the answer's head. A head with the arrays of the last answer is not written again.
                assert answer.head is not None
                if self._stored is None or self._stored[0].head is not answer.head:
                    self._stored = (
                        answer,
                        store_head(Path(self._job.store), answer.head, answer.softcap, answer.scale),
                    )
                writer.head({**self._stored[1], "softcap": answer.softcap, "scale": answer.scale})
            return writer.finish(answer.estimator, self.runtime_info(), answer.facts)
        except BaseException:
            writer.abort()
            raise

    def _answered(self, request: Request, writer: CaptureWriter) -> Answer:
        """The engine's answer.  For a missing serving mode it has no rows, so that other modes continue."""
        sink = _Sink(writer, self._outbox)
        self._engine.reset_peak()
        if isinstance(request, Generate) and request.sampling is not None and not self._engine.samples:
            raise NotSupportedError(
                f"engine {self._engine.name} cannot draw tokens from a seed here: leave out temperature, or take the "
                "reference to engine hf, llamacpp or vllm"
            )
        if not isinstance(request, Served):
            return self._engine.answer(request, sink)
        try:
            if request.kind not in self._engine.kinds:
                raise NotSupportedError(no_ways(self._engine.name))
            if request.way not in self._engine.ways:
                raise NotSupportedError(f"engine {self._engine.name} has no way {request.way!r}")
            return self._engine.answer(request, sink)
        except NotSupportedError as error:
            for item in range(len(request.windows)):
                writer.fail(item, str(error))
            return Answer(self._engine.estimator_for(self._arm), facts={"not_supported": str(error)})


def reason_of(error: BaseException) -> str:
    """Return one line for an exception: fidelab's own messages as they are, others with their type."""
    if isinstance(error, FidelabError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the device while writing {error.filename or 'a capture'}"
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _listen(inbox: int, further: Further, replies: Replies, on_end: Callable[[], None]) -> None:
    """Put further tasks and replies into their queues, and none when the inbox ends; closes the descriptor then.

    The parent holds standard input open; its death, by SIGKILL too, closes it.  The descriptor is read directly: a
    thread inside ``sys.stdin`` would hold the lock that the interpreter's exit needs.
    """
    pending = b""
    while chunk := os.read(inbox, 1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            match decode(line):
                case More(tasks=tasks):
                    further.put(tasks)
                case Compared() as reply:
                    replies.put(reply)
    os.close(inbox)
    on_end()
    further.put([])
    replies.put(None)


def exit_orphaned() -> None:
    """End this process, and all that the engine has started."""
    if os.getpgrp() == os.getpid():  # the engine's own processes end, too
        os.killpg(0, signal.SIGKILL)
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
