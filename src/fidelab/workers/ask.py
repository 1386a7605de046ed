"""The process that is asked about an engine: what it can do, in the environment where it would run.

Runs as ``python -m fidelab.workers.ask``; nothing is loaded but what the engine's class methods import.  One JSON
object per line: first a greeting, ``{"protocol", "fidelab", "python"}``, then for each request ``{"ask", "engine",
…}`` a reply, ``{"value"}`` or ``{"error": class of the error tree, "text"}``.  What the engine prints goes to standard
error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import fidelab
from fidelab.core import Arm, KVSpec
from fidelab.engines import ENGINES
from fidelab.engines.base import Engine
from fidelab.engines.installed import build, device, provenance, shims
from fidelab.engines.variables import variables_of
from fidelab.errors import FidelabError
from fidelab.workers.messages import PROTOCOL

__all__ = ["main", "reply"]


def main() -> int:
    """Greet, and answer until standard input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # prints of the engine are not for the asker
        greeting = {"protocol": PROTOCOL, "fidelab": fidelab.__version__, "python": platform.python_version()}
        print(json.dumps(greeting), file=out, flush=True)
        for line in sys.stdin.buffer:
            print(json.dumps(reply(json.loads(line))), file=out, flush=True)
    return 0


def reply(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request, or the error that it met."""
    try:
        return {"value": _answer(ENGINES.load(request["engine"]), request)}
    except FidelabError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except (Exception, SystemExit) as error:  # what importing somebody else's package may raise
        said = " ".join(str(error).split())[:300]
        return {"error": "EngineError", "text": ": ".join(filter(None, (type(error).__name__, said)))}


def _answer(engine: type[Engine], request: Mapping[str, Any]) -> Any:
    match request["ask"]:
        case "versions":
            return engine.versions()
        case "kv_names":
            return [str(name) for name in engine.kv_names()]
        case "about":
            built = build(engine.packages)
            return {
                "estimator": str(engine.estimator),
                "form": engine.form,
                "build": built,
                "device": device(built),
                "provenance": provenance((*engine.packages, *engine.examined)),
                "shims": shims(),
                "variables": variables_of(engine, os.environ),
            }
        case "check_kv":
            return engine.check_kv(KVSpec.from_record(request["kv"]))
        case "supports":
            verdict = engine.supports(Arm.from_record(request["arm"]))
            return [verdict.ok, verdict.reason]
        case "control_for":
            return engine.control_for(KVSpec.from_record(request["kv"]), request["native"])
        case other:
            raise ValueError(f"no question {other!r}")


if __name__ == "__main__":
    sys.exit(main())
