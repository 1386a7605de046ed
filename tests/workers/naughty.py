"""An engine that misbehaves in every way that a worker has to survive.  Option ``do`` names the way."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from fidelab.captures.requests import Request
from fidelab.core import Arm, Estimator
from fidelab.core.errors import NotSupportedError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.base import Answer, Engine, Sink, Support

LIES = b'{"type": "Done", "ran": {}}\n{"type": "Captured", "index": 0, "path": "/", "seconds": 0}\nnonsense\n'


class Naughty(Engine):
    """Answers every request with ones, unless told otherwise."""

    name = "naughty"
    preload = ("numpy",)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"naughty": "1"}

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        return ["any"]

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        return Support(True)

    @classmethod
    def keep_load(cls) -> None:
        """There is nothing to keep."""

    def open(self, arm: Arm) -> None:
        self._do = dict(arm.options).get("do", "")
        match self._do:
            case "unsupported":
                raise NotSupportedError("this format needs a GPU")
            case "talk":
                self._talk()
            case "spawn":  # a process of the engine's own
                print("grandchild", subprocess.Popen(["sleep", "600"]).pid, "worker", os.getpid(), flush=True)
            case "fork":  # a process that keeps the pipe to the parent open
                if (pid := os.fork()) == 0:
                    time.sleep(600)
                print("grandchild", pid, "worker", os.getpid(), flush=True)
            case "exit":
                sys.exit(7)
            case "babble":
                sys.stderr.writelines(f"babble {n}\n" for n in range(400_000))
            case "hang":
                time.sleep(600)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def answer(self, request: Request, sink: Sink) -> Answer:
        match self._do:
            case "abort":
                print("GGML_ASSERT(n > 0) failed", file=sys.stderr, flush=True)
                os.abort()
            case "crash":
                print("CUDA out of memory was fine so far", file=sys.stderr, flush=True)
                ctypes.string_at(8)
            case "talk":
                self._talk()
            case "spawn":
                time.sleep(600)
            case "raise" if request.axis == "kld":
                raise ValueError("no such\n  tensor")
            case "oom":
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "linger":
                threading.Thread(target=time.sleep, args=(600,)).start()
        for item, tokens in enumerate(request.items()):
            sink.add(item, {"logprobs": np.ones((2, 8), np.float32)})
            sink.progress(len(tokens))
        return Answer(Estimator.LOGPROBS, facts={"modules": sorted({name.split(".")[0] for name in sys.modules})})

    def runtime_info(self) -> RuntimeInfo:
        return RuntimeInfo({"naughty": "1"}, "cpu", cache_bytes_per_token=float("nan") if self._do == "nan" else 1.0)

    def close(self) -> None:
        if self._do == "close":
            raise OSError("the driver is gone")

    def _talk(self) -> None:
        print("loading …")
        print('{"type": "Done", "ran": {}}', flush=True)
        os.write(1, LIES)
        subprocess.run(["echo", "from a child"], check=True)
