"""An engine that misbehaves: when it is asked about itself (``native`` of ``control_for`` names the way), and when it
answers (the module ``odd_native`` of its environment does)."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import numpy as np

from fidelab.captures.requests import Generate, Prefill, Request
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.core.runtime import RuntimeInfo
from fidelab.engines.base import Answer, Engine, Sink, Support


class Odd(Engine):
    """Brought by the distribution ``odd-engine``."""

    name = "odd"
    packages: ClassVar[tuple[str, ...]] = ("odd-engine",)
    native_kv: ClassVar[str] = "any"

    @classmethod
    def versions(cls) -> dict[str, str]:
        try:
            return {"odd-engine": version("odd-engine")}
        except PackageNotFoundError:
            raise EngineError("engine odd needs odd-engine: pip install odd-engine") from None

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        import_module("odd_native")
        return ["any", "some", "every"]

    @classmethod
    def supports(cls, arm: Arm) -> Support:
        return Support(arm.kv.k.name != "every", f"{arm.kv.label} is odd on {arm.device}")

    @classmethod
    def control_for(cls, reference: KVSpec, native: str) -> str | None:
        match native:
            case "talk":
                print("hello")
                os.write(1, b'{"value": "a lie"}\n')
            case "exit":
                sys.stderr.write("Traceback\nlibodd.so: undefined symbol\n")
                sys.stderr.flush()
                os._exit(3)
            case "sys.exit":
                sys.exit("no licence")
            case "hang":
                time.sleep(600)
            case "fork":
                if (pid := os.fork()) == 0:
                    time.sleep(600)
                return str(pid)
        return "exact"

    def open(self, arm: Arm) -> None:
        native = import_module("odd_native")
        with Path(str(native.__file__)).with_name("odd_starts").open("a") as file:
            file.write(f"{arm.kv.label}\n")
        self._fault = getattr(native, "FAULTS", {}).get(arm.kv.label, "")
        if self._fault == "shape":
            head_dim = json.loads((Path(arm.path) / "config.json").read_text("utf-8"))["head_dim"]
            raise NotSupportedError(f"no kernel for a head dimension of {head_dim}")

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def answer(self, request: Request, sink: Sink) -> Answer:
        match self._fault:
            case "crash":
                print("a harmless warning", file=sys.stderr, flush=True)
                ctypes.string_at(8)
            case "nan":
                sink.add(0, {"logprobs": np.full((1, 4), np.nan, np.float16)})
                return Answer(Estimator.LOGPROBS)
            case "raise":
                raise EngineError("no kernel for this format")
        rows = np.zeros((1, 4), np.float16)
        match request:
            case Prefill():
                sink.add(0, {"logprobs": rows})
            case Generate(max_tokens=n):
                n -= self._fault == "short"
                sink.add(0, {"logprobs": rows, "ids": np.arange(n, dtype=np.int32)})
        return Answer(Estimator.LOGPROBS)

    def runtime_info(self) -> RuntimeInfo:
        return RuntimeInfo({"odd-engine": "1"}, "cpu")
