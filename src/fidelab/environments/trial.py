"""Try an engine out: a real prefill and a real decode in its environment with a KV format.

An installation tries the native format.  Another format is tried when the first arm that requests it fails:
:func:`diagnose` separates the format's fault from the model's, and the result is kept in the environment.

Importing an engine proves little: a miscompiled library crashes with its first batch of tokens.  The model is small and
has random weights that are generated here, so that a trial needs no network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fidelab.captures.container import to_float32
from fidelab.captures.manifest import capture_key
from fidelab.captures.reader import Capture, find_captures
from fidelab.captures.requests import Generate, Prefill, Request, request_record
from fidelab.core import Arm, KVSpec, Status, digest, usable_cores
from fidelab.core.errors import CaptureError, FidelabError, OutputError
from fidelab.core.scratch import scratch
from fidelab.core.serial import to_json
from fidelab.engines.k16v8 import meaning
from fidelab.engines.variables import thread_variables
from fidelab.environments.environment import Environment
from fidelab.environments.queries import ask
from fidelab.models.cache import cache_dir
from fidelab.workers.messages import Job, ProbeTask
from fidelab.workers.parent import Worker

_PREFILL = 64  # tokens: more than one, since the kernels of one token and of many differ
_DECODE = 8
_POSITIONS = 256
_HEAD_DIM = 128  # the size that every engine's GPU kernels take
_DEADLINE = 600.0  # seconds for one format, load and compilation included
_THREADS = 4


@dataclass(frozen=True)
class Trial:
    """Outcome of one KV format's trial.

    Attributes:
        status: ``ok``, ``failed`` (crash, wrong or missing answers), or ``not_supported``: the engine refused the arm.
            A refusal may be due to the trial model's shape, so it does not apply to other models.
        reason: why it did not run, with the path of the log; ``None`` if it ran.
    """

    status: Status
    reason: str | None = None


def faults_of(trials: Mapping[str, Trial]) -> dict[str, str]:
    """Return format → reason of the formats that failed their trial; refused formats are not among them."""
    sound = (Status.OK, Status.NOT_SUPPORTED)
    return {name: str(trial.reason) for name, trial in trials.items() if trial.status not in sound}


def diagnose(arm: Arm, environment: Environment) -> str:
    """Return why a failed arm's KV format does not run on a small model either; empty if it does.

    Only environments that fidelab made are tried, since they keep the result: plans refuse the format from then on.
    """
    trials: Mapping[str, Trial] = {}
    if environment.folder is not None:
        with suppress(FidelabError):  # the user must see the arm's own failure
            trials = try_out(environment, cache_dir() / "logs", names=[arm.kv.label])
    return faults_of(trials).get(arm.kv.label, "")


def try_out(
    environment: Environment, logs: Path, say: Callable[[str], None] = lambda line: None, names: Collection[str] = ()
) -> dict[str, Trial]:
    """Run KV formats that the engine reports as supported, each in a process, and return the outcomes by format.

    An environment that fidelab made stores them, for these versions of the engine on this machine.

    Args:
        environment: the engine's environment.
        logs: a folder for the workers' logs; those of formats that ran are removed again.
        say: receives a line for each format.
        names: formats to try; empty: all.

    Raises:
        EngineError: If the engine cannot be asked, or the trial model cannot be made.
    """
    from fidelab.models.tiny import GGUF_NAME, make_tiny

    trials: dict[str, Trial] = {}
    with scratch("trial") as room, ask(environment) as asked:
        model = make_tiny(room / "model", "Q8_0", positions=_POSITIONS, head_dim=_HEAD_DIM)
        path = model / GGUF_NAME if asked.checkpoint_format == "gguf" else model
        device = "cpu" if asked.about.device == "cpu" else "cuda"
        for name in names or asked.kv_names():
            arm = Arm(
                name=name,
                engine=environment.engine,
                model="a small model of random weights",
                path=str(path),
                weights="",
                kv=meaning(KVSpec.parse(name), "bf16"),
                dtype="bfloat16",
                device=device,
                threads=min(_THREADS, usable_cores()),
            )
            if asked.supports(arm).ok:  # regardless of earlier trials
                say(f"trying {name}")
                trials[name] = _tried(arm, environment, room / f"store-{len(trials)}", logs)
        faults = faults_of(trials)
        with suppress(OutputError):  # somebody else's environment
            environment.remember(asked.versions(), {name: faults.get(name) for name in trials})
    return trials


def _tried(arm: Arm, environment: Environment, store: Path, logs: Path) -> Trial:
    """Have an arm prefill and decode, and return the outcome."""
    log = logs / f"trial-{arm.engine}-{arm.name}.log".replace("/", "_")
    log.unlink(missing_ok=True)
    tasks = [
        ProbeTask(request_record(request), str(store / request.axis), capture_key(arm, request, {}, 0))
        for request in _probes()
    ]
    job = Job(to_json(arm), str(store), tasks, {"size": 512, "sha256": digest()}, env=thread_variables(arm.threads))
    container = environment.container(arm, store, env=job.env)
    outcome = Worker(
        job,
        log=log,
        env={**thread_variables(arm.threads), **environment.variables()},
        deadline=_DEADLINE,
        listen=lambda _message: None,
        command=environment.command("fidelab.workers.child", container),
        end=container.end if container else None,
    ).run()
    status, reason = outcome.status, outcome.reason
    if status is Status.OK and (reason := _unusable(store)) is not None:
        status = Status.FAILED
    if status is Status.OK:
        log.unlink(missing_ok=True)
        return Trial(status)
    return Trial(status, f"{reason}; log: {log}")


def _probes() -> tuple[Request, Request]:
    tokens = tuple(2 + i % 256 for i in range(_PREFILL))
    return (
        Prefill("prefill", (tokens,), 0, _PREFILL - 2, ((0,) * (_PREFILL - 1),)),
        Generate("decode", (tokens,), _DECODE, stop=()),
    )


def _unusable(store: Path) -> str | None:
    """Return the fault of the answers; ``None`` if they have the requested tokens and only finite numbers."""
    captures = {}
    try:
        captures = {capture.axis: capture for capture in map(Capture, find_captures(store))}
        for capture in captures.values():
            if fault := capture.items[0]["failed"]:
                return str(fault)
            for name in capture.names(0):
                if not np.isfinite(to_float32(capture.array(0, name))).all():
                    return f"{capture.axis} gave {name} that are not finite"
        if len(captures) == len(_probes()) and len(captures["decode"].ids(0)) == _DECODE:
            return None
    except CaptureError as error:
        return str(error)
    return f"it answered {', '.join(captures) or 'nothing'}, with less than was asked"
