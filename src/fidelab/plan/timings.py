"""How long work takes: the work in a request, and how fast an arm did such work on this machine before.

Seconds follow from two rates of an arm: seconds per token that passes through the model many at once (a prompt, a
window), and seconds that each decoding forward takes besides, whatever the number of its sequences.  Every run leaves
both in ``timings.json`` of fidelab's cache, with the seconds that its loads and captures took.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fidelab.captures.requests import Forced, Generate, Request, Served, Timed
from fidelab.core import Arm, finite
from fidelab.models import Model
from fidelab.models.cache import cache_dir
from fidelab.plan.deploy import engine_class

__all__ = ["DEFAULT", "TRIALS", "Rates", "Timings", "Work", "work_of"]

DEFAULT = "defaults: nothing like it has run on this machine"
TRIALS = ("trial.read", "trial.decode")  # the captures of a short forward

_MOST_ARMS = 256  # in the file; the oldest go
_SHORTEST = 0.05  # seconds; what took less says nothing of a rate
_FORWARD_TOKENS = {"cpu": 40.0, "cuda": 150.0}  # a decoding forward takes as long as reading so many tokens
_OPERATIONS = {"cpu": 2e10, "cuda": 5e13}  # per second: of one core, of one GPU
_UNKNOWN_READ = 1e-3  # seconds per token of a model whose parameters are not known, such as a server's
_READ_BYTES = 5e8  # of a checkpoint per second
_FACTOR = (0.1, 10.0)  # between what an axis took and what its arm's rates say


@dataclass(frozen=True)
class Work:
    """What an engine does to answer a request.

    ``read``: tokens that pass through the model many at once.  ``written``: tokens that are decoded or fed one by one,
    at most.  ``forwards``: in how many forwards that happens.  ``stretch``: how much longer a token takes than one
    with an empty cache, for the attention to what is before it.
    """

    read: int = 0
    written: int = 0
    forwards: int = 0
    stretch: float = 1.0


def work_of(request: Request, model: Model) -> Work:
    """The work in a request to a model, if no sequence stops early and sequences of a batch are decoded together."""
    items = request.items()
    lengths = list(map(len, items))
    match request:
        case Generate():
            batches = sum(1 for _ in _batches(lengths, request.batch))
            read, written, forwards = sum(lengths), len(items) * request.max_tokens, batches * request.max_tokens
        case Forced():
            written = sum(map(len, request.continuations))
            read, forwards = sum(map(len, request.prompts)), written
        case Timed():
            groups = request.groups()
            again = sum(map(len, items[: request.warmup])), len(groups[: request.warmup])
            read = sum(lengths) + again[0]
            forwards = (len(groups) + again[1]) * request.n
            written = forwards * request.batch
            lengths = list(map(len, request.prompts))
        case Served():
            written = forwards = request.n_stepped
            read = request.n_tokens - written
        case _:
            read, written, forwards = sum(lengths), 0, 0
    mean = sum(n * n for n in lengths) / max(1, sum(lengths))  # of the sequences' lengths, by token
    # Per token 2 · parameters operations, and for attention 4 · d · layers per token before it: half a sequence.
    attention = 2 * mean * model.hidden_size * (model.layers or 0)
    return Work(read, written, forwards, 1 + attention / (2 * model.parameters) if model.parameters else 1.0)


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Prompts of similar length together, as engines do that pad."""
    batch: list[int] = []
    for length in sorted(lengths):
        if batch and (len(batch) >= most or length > batch[0] + max(32, batch[0] // 2)):
            yield batch
            batch = []
        batch.append(length)
    if batch:
        yield batch


@dataclass(frozen=True)
class Rates:
    """How fast an arm is, as far as that is known.

    ``load``: seconds from a worker's start to its end that answer nothing.  ``read``: seconds per token;
    ``forward``: seconds of a decoding forward besides those of its tokens.  ``factors``: capture → what it took over
    what the rates say.  ``source``: where that is from.
    """

    load: float
    read: float
    forward: float
    source: str
    factors: Mapping[str, float] = field(default_factory=dict)

    def parts(self, work: Work, name: str = "") -> tuple[float, float]:
        """Seconds of reading and of decoding, in the capture of this name."""
        factor = self.factors.get(name, 1.0)
        token = factor * self.read * work.stretch
        return token * work.read, token * work.written + factor * self.forward * work.forwards


@dataclass(frozen=True)
class _Measured:
    """What one arm took: ``load`` seconds, and per capture its work and its seconds."""

    arm: Mapping[str, Any]
    load: float | None
    captures: Mapping[str, tuple[Work, float]]
    parameters: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        captures = {
            str(name): (Work(int(work[0]), int(work[1]), int(work[2]), float(work[3])), float(seconds))
            for name, (work, seconds) in record["captures"].items()
        }
        load = None if record["load"] is None else float(record["load"])
        return cls(dict(record["arm"]), load, captures, int(record["parameters"]))

    def record(self) -> dict[str, Any]:
        """Plain data."""
        captures = {
            name: [[work.read, work.written, work.forwards, work.stretch], seconds]
            for name, (work, seconds) in self.captures.items()
        }
        return {"arm": self.arm, "load": self.load, "parameters": self.parameters, "captures": captures}

    def rates(self, device: str, start: float, source: str) -> Rates | None:
        """The rates that explain the captures; ``None`` without any."""
        known = [(work, seconds) for work, seconds in self.captures.values() if seconds > 0]
        reading = [(work, seconds) for work, seconds in known if not work.forwards and work.read]
        decoding = [(work, seconds) for work, seconds in known if work.forwards]
        if not known:
            return None
        if reading:
            read = sum(seconds for _, seconds in reading) / sum(work.read * work.stretch for work, _ in reading)
        else:
            k = _FORWARD_TOKENS[device]
            tokens = sum((w.read + w.written) * w.stretch + k * w.forwards for w, _ in decoding)
            read = sum(seconds for _, seconds in decoding) / tokens
        forward = _FORWARD_TOKENS[device] * read
        if decoding and reading:
            spent = sum(seconds for _, seconds in decoding)
            tokens = sum((work.read + work.written) * work.stretch for work, _ in decoding)
            forward = max(spent - read * tokens, 0.1 * spent) / sum(work.forwards for work, _ in decoding)
        plain = Rates(start if self.load is None else self.load, read, forward, source)
        lowest, highest = _FACTOR
        factors = {
            name: min(highest, max(lowest, seconds / sum(plain.parts(work))))
            for name, (work, seconds) in self.captures.items()
            if seconds > 0 and sum(plain.parts(work)) > 0
        }
        return Rates(plain.load, read, forward, source, factors)


class Timings:
    """What arms took on this machine, newest last; ``path`` keeps it.  A file that cannot be read is an empty one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_dir() / "timings.json"
        self._arms: list[_Measured] = []
        self._scoring: float | None = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            stored = json.loads(self._path.read_text("utf-8"))
            arms = [_Measured.from_record(record) for record in stored["arms"]]
            self._scoring = None if stored["scoring"] is None else float(stored["scoring"])
            self._arms = arms

    # ----------------------------------------------------------------------------------------- asking

    def rates(self, arm: Arm, model: Model) -> Rates:
        """Of this arm's last run, else of the nearest arm that ran, else defaults; see :attr:`Rates.source`."""
        device, cls = arm.device.partition(":")[0], engine_class(arm.engine)
        known_device = device if device in _OPERATIONS else "cpu"
        start = cls.start_seconds + model.weight_bytes / _READ_BYTES
        wanted = _identity(arm)
        for measured, source in self._nearest(wanted):
            rates = measured.rates(known_device, start, source)
            if rates is None:
                continue
            of_engine = measured.arm["engine"] == wanted["engine"]
            scale = 1.0
            if measured.arm["weights"] != wanted["weights"] and measured.parameters and model.parameters:
                scale = model.parameters / measured.parameters
            load = rates.load if of_engine and scale == 1.0 else start
            factors = rates.factors if of_engine else {}
            return Rates(load, scale * rates.read, scale * rates.forward, source, factors)
        cores = arm.threads if known_device == "cpu" else 1
        read = 2 * model.parameters / (cores * _OPERATIONS[known_device]) or _UNKNOWN_READ
        return Rates(start, read, _FORWARD_TOKENS[known_device] * read, DEFAULT)

    def knows(self, arm: Arm) -> bool:
        """This model ran on this engine and device."""
        wanted = _identity(arm)
        return any(all(one.arm[key] == wanted[key] for key in _SAME_MODEL) for one in self._arms)

    def _nearest(self, wanted: Mapping[str, Any]) -> Iterator[tuple[_Measured, str]]:
        """Arms that ran here, the most alike first, of equals the newest."""
        for keys, words in _ALIKE:
            for one in reversed(self._arms):
                if all(one.arm[key] == wanted[key] for key in keys):
                    yield one, _source(one, words)

    @property
    def scoring(self) -> float:
        """What scoring took the last time, over what the default says."""
        return 1.0 if self._scoring is None else self._scoring

    # ---------------------------------------------------------------------------------------- keeping

    def add(self, arm: Arm, model: Model, load: float | None, captures: Mapping[str, tuple[Work, float]]) -> None:
        """Keep what an arm took.  Nothing is kept of captures too short to measure, nor of an arm without others."""
        long = {name: (work, seconds) for name, (work, seconds) in captures.items() if seconds >= _SHORTEST}
        if not long:
            return
        identity = _identity(arm)
        before = next((one for one in self._arms if one.arm == identity), None)
        if before is not None:
            load = before.load if load is None else load
            long = {**{name: took for name, took in before.captures.items() if name not in TRIALS}, **long}
        others = [one for one in self._arms if one.arm != identity]
        self._arms = [*others, _Measured(identity, load, long, model.parameters)][-_MOST_ARMS:]
        self._write()

    def add_scoring(self, factor: float) -> None:
        """Keep what scoring took over what the default says."""
        self._scoring = min(4.0, max(0.5, factor))  # a small run says little of a large one
        self._write()

    def _write(self) -> None:
        """A cache that cannot be written costs an estimate, not a run."""
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        record = {"arms": [one.record() for one in self._arms], "scoring": self._scoring, "time": time.time()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                scratch.write_text(json.dumps(finite(record)), "utf-8")
                scratch.replace(self._path)
            finally:
                scratch.unlink(missing_ok=True)


_SAME_MODEL = ("node", "engine", "weights", "device")
_ALIKE = (
    ((*_SAME_MODEL, "threads", "dtype", "kv", "options"), "its last run here"),
    ((*_SAME_MODEL, "threads", "dtype"), "the last run of {kv} on {engine}"),
    (_SAME_MODEL, "the last run of {kv} in {dtype} on {engine}"),
    (("node", "weights", "device"), "this model on engine {engine}"),
    (("node", "engine", "device"), "another model on engine {engine}"),
)


def _identity(arm: Arm) -> dict[str, Any]:
    """What tells two arms apart as far as their speed goes."""
    return {
        "node": platform.node(),
        "engine": arm.engine,
        "weights": arm.weights,
        "device": arm.device,
        "threads": arm.threads,
        "dtype": arm.dtype,
        "kv": arm.kv.label,
        "options": {key: text for key, text in arm.options if key != "jitter"},
    }


def _source(one: _Measured, words: str) -> str:
    tried = set(one.captures) <= set(TRIALS) and "another" not in words
    return ("a short forward of this model on {engine}" if tried else words).format(**one.arm)
