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

__all__ = ["answer", "main", "reply"]


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
        fields: dict[str, Any] = dict(request)
        engine, question = ENGINES.load(fields.pop("engine")), fields.pop("ask")
        for name, cls in (("kv", KVSpec), ("arm", Arm)):
            if name in fields:
                fields[name] = cls.from_record(fields[name])
        return {"value": answer(engine, question, **fields)}
    except FidelabError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except (Exception, SystemExit) as error:  # what importing somebody else's package may raise
        message = " ".join(str(error).split())[:300]
        return {"error": "EngineError", "text": ": ".join(filter(None, (type(error).__name__, message)))}


def answer(engine: type[Engine], question: str, **fields: Any) -> Any:
    """What an engine's class says about itself, as JSON has it.

    ``question``: a class method of the engine, with its arguments as ``fields``; or ``about``, for how the engine is
    installed in this interpreter.
    """
    match question:
        case "versions":
            return engine.versions()
        case "kv_names":
            return [str(name) for name in engine.kv_names()]
        case "about":
            target = build(engine.packages)
            return {
                "estimator": str(engine.estimator),
                "form": engine.form,
                "build": target,
                "device": device(target),
                "provenance": provenance((*engine.packages, *engine.examined)),
                "shims": shims(),
                "variables": variables_of(engine, os.environ),
            }
        case "check_kv":
            return engine.check_kv(fields["kv"])
        case "supports":
            verdict = engine.supports(fields["arm"])
            return [verdict.ok, verdict.reason]
        case "control_for":
            return engine.control_for(fields["kv"], fields["native"])
        case other:
            raise ValueError(f"no question {other!r}")


if __name__ == "__main__":
    sys.exit(main())
