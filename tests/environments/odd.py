"""An engine that misbehaves when it is asked about itself.  ``native`` of ``control_for`` names the way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from fidelab.core import Arm, KVSpec
from fidelab.engines.base import Answer, Engine, Ran, Sink, Verdict
from fidelab.errors import EngineError
from fidelab.probes import Probe

__all__ = ["Odd"]


class Odd(Engine):
    """Brought by the distribution ``odd-engine``."""

    name = "odd"
    packages: ClassVar[tuple[str, ...]] = ("odd-engine",)

    @classmethod
    def versions(cls) -> dict[str, str]:
        try:
            return {"odd-engine": version("odd-engine")}
        except PackageNotFoundError:
            raise EngineError("engine odd needs odd-engine: pip install odd-engine") from None

    @classmethod
    def kv_names(cls) -> Sequence[str]:
        import_module("odd_native")
        return ["any", "every"]

    @classmethod
    def supports(cls, arm: Arm) -> Verdict:
        return Verdict(arm.kv.k.name == "any", f"{arm.kv.label} is odd on {arm.device}")

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
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def answer(self, probe: Probe, sink: Sink) -> Answer:
        raise NotImplementedError

    def ran(self) -> Ran:
        raise NotImplementedError
