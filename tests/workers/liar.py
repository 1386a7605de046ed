"""A worker that breaks the protocol, run as a program: ``python liar.py KIND``.

Those of :data:`SAYS` speak it themselves, with the standard library alone; those of :data:`WRITES` are the real worker
with another writer, whose captures are whole and hold what is not an answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

OPENED = {"type": "Opened", "seconds": 1.0, "phases": {"import": 0.5}}
DONE = {"type": "Done", "ran": {"versions": {"fake": "1"}, "device": "cpu"}}
IDLE = {"type": "Idle"}
CAPTURED = {"type": "Captured", "index": 0, "path": "/nowhere", "seconds": 0.1}


def write(*messages: object) -> None:
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()


def hello(**changes: Any) -> dict[str, Any]:
    return {"type": "Hello", "pid": os.getpid(), "protocol": int(sys.argv[2]), **changes}


def done(**ran: Any) -> dict[str, Any]:
    return {"type": "Done", "ran": {"versions": {"fake": "1"}, "device": "cpu", **ran}}


def met(*messages: object) -> Callable[[], None]:
    """The greeting, the job, the open model, and then these."""

    def talk() -> None:
        write(hello())
        sys.stdin.readline()
        write(OPENED, *messages)

    return talk


def said(*messages: object) -> Callable[[], None]:
    """These at once."""
    return lambda: write(*messages)


def end(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


def kill() -> None:
    write(hello())
    os.kill(os.getpid(), signal.SIGKILL)


def endless() -> None:
    write(hello())
    sys.stdout.buffer.write(b"x" * (6 << 20))
    sys.stdout.buffer.flush()


def deaf() -> None:
    """Greets and never reads."""
    write(hello(), OPENED, IDLE, DONE)


SAYS: Mapping[str, Callable[[], None]] = {
    "exits-silently": end(0),
    "exits-with-7": end(7),
    "killed": kill,
    "prints-text": said(b"Welcome to host42"),
    "unknown-type": said({"type": "Sulk"}),
    "another-protocol": lambda: write(hello(protocol=99)),
    "seconds-of-text": met({**OPENED, "seconds": "soon"}),
    "success-without-a-capture": met(CAPTURED, IDLE, DONE),
    "success-at-once": met(IDLE, DONE),
    "failed-with-half-a-character": met({"type": "Failed", "kind": "failed", "reason": "\ud800"}),
    "ran-odd-proof": met(IDLE, done(proof=["shown"])),
    "endless-line": endless,
    "floods": met(*[{"type": "Progress", "tokens": 1}] * 3000),
    "deaf": deaf,
}


def odd(name: str) -> None:
    """The real worker, whose captures are changed on their way to the disk."""
    import numpy as np

    import fidelab.workers.child as child
    from fidelab.captures.writer import CaptureWriter

    rows = np.full((7, 256), -5.0, np.float32)

    class Odd(CaptureWriter):
        def add(self, item: int, arrays: Mapping[str, Any]) -> None:
            shape = arrays["logprobs" if "logprobs" in arrays else "seconds"].shape
            top = {"topk_ids": np.zeros(shape, np.int32), "topk_logprobs": np.full(shape, 0.5, np.float32)}
            changed: dict[str, dict[str, Any]] = {
                "writes-vectors": {"logprobs": rows.reshape(-1)},
                "writes-numbers": {"logprobs": rows.astype(np.int64)},
                "writes-other-names": {"lies": rows},
                "writes-negative-ids": {"ids": np.array([-5, 3], np.int32), "logprobs": rows[:2]},
                "writes-ids-of-halves": {"ids": np.array([0.5]), "logprobs": rows[:1]},
                "writes-few-rows": {"logprobs": rows[:1]},
                "writes-no-vocabulary": {"logprobs": rows[:, :0]},
                "writes-not-a-number": {"logprobs": np.full_like(rows, np.nan)},
                "writes-above-0": top,
                "writes-times-that-run-back": {"seconds": np.array([3.0, 2.0, 1.0])},
                "writes-sums-above-1": {**top, "topk_logprobs": np.full(shape, -0.1, np.float32)},
            }
            super().add(item, {**arrays, **changed.get(name, {})} if name != "writes-other-names" else changed[name])

        def finish(self, estimator: str, ran: Mapping[str, Any], facts: Mapping[str, Any], against: str = "") -> Any:
            match name:
                case "writes-odd-items":
                    self._items[0]["parts"] = "one"
                case "writes-fewer-items":
                    del self._items[1:]
                case "writes-another-key":
                    self._manifest["key"]["probe"] = "0" * 64
                case "writes-an-odd-record":
                    ran = {**ran, "proof": 5, "versions": None}
                case "writes-an-odd-kind":
                    self._manifest["kind"] = 5
                case "writes-odd-facts":
                    facts = {"tokens": "many", "seconds": []}
            top = name in ("writes-above-0", "writes-sums-above-1")
            return super().finish("topk" if top else estimator, ran, facts, against)

    vars(child)["CaptureWriter"] = Odd
    sys.exit(child.main())


WRITES = (
    *("writes-vectors", "writes-numbers", "writes-other-names", "writes-negative-ids", "writes-ids-of-halves"),
    *("writes-few-rows", "writes-no-vocabulary", "writes-not-a-number", "writes-above-0", "writes-sums-above-1"),
    *("writes-odd-items", "writes-fewer-items", "writes-another-key", "writes-an-odd-record", "writes-an-odd-kind"),
    "writes-odd-facts",
)


if __name__ == "__main__":
    SAYS[sys.argv[1]]() if sys.argv[1] in SAYS else odd(sys.argv[1])
