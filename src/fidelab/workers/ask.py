"""The process that answers questions about an engine, in the environment where the engine would run.

Runs as ``python -m fidelab.workers.ask``; it loads only the imports of the engine's class methods.  One JSON
object per line: first a greeting, ``{"protocol", "fidelab", "python"}``, then for each request ``{"ask", "engine",
…}`` a reply, ``{"value"}`` or ``{"error": class of the error tree, "text"}``.  Output of the engine goes to standard
error.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fidelab
from fidelab.core import Arm, KVSpec, digest, write_atomically
from fidelab.core.errors import FidelabError, OutputError
from fidelab.core.serial import from_json
from fidelab.engines import ENGINES
from fidelab.engines.base import Engine
from fidelab.engines.installed import build, device, provenance, shims, state
from fidelab.engines.k16v8 import K16V8, meaning
from fidelab.engines.variables import variables_of
from fidelab.workers.messages import PROTOCOL

_MODEL_DTYPE = "bf16"  # of the model that formats are asked about


def main() -> int:
    """Send the greeting, and answer until standard input ends."""
    gc.disable()  # it would take a quarter of the time of importing an engine, and the process is short
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # prints of the engine are not for the asker
        greeting = {"protocol": PROTOCOL, "fidelab": fidelab.__version__, "python": platform.python_version()}
        print(json.dumps(greeting), file=out, flush=True)
        for line in sys.stdin.buffer:
            print(json.dumps(reply(json.loads(line))), file=out, flush=True)
    return 0


def reply(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one request, or the error that occurred."""
    try:
        fields: dict[str, Any] = dict(request)
        engine, question = ENGINES.load(fields.pop("engine")), fields.pop("ask")
        for name, cls in (("kv", KVSpec), ("arm", Arm)):
            if name in fields:
                fields[name] = from_json(cls, fields[name])
        return {"value": answer(engine, question, **fields)}
    except FidelabError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except (Exception, SystemExit) as error:  # errors that the import of another package may raise
        message = " ".join(str(error).split())[:300]
        return {"error": "EngineError", "text": ": ".join(filter(None, (type(error).__name__, message)))}


def answer(engine: type[Engine], question: str, **fields: Any) -> Any:
    """Return an engine class's answer about itself, as JSON.

    ``question``: a class method of the engine, with its arguments as ``fields``; ``about``, for how the engine is
    installed in this interpreter; or ``formats``, for each KV format that may be written and why it cannot run here
    (empty: it can), in a model that computes in bfloat16.  ``store``: a folder where the answer is cached.
    """
    match question:
        case "versions":
            return engine.versions()
        case "kv_names":
            return kv_names(engine)
        case "formats":
            store = fields.get("store")
            now = state((*engine.packages, *engine.examined), variables_of(engine, os.environ)) if store else None
            if not store or now is None:
                return _refusals(engine)
            kept = Path(store) / f"{engine.name}-{digest(sys.prefix)[:16]}.json"
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not there, or damaged
                record = json.loads(kept.read_text("utf-8"))
                if record["state"] == now:
                    return {str(name): str(why) for name, why in record["formats"].items()}
            formats = _refusals(engine)
            with contextlib.suppress(OutputError):  # a cache that is read-only or full
                write_atomically(kept, json.dumps({"state": now, "formats": formats}))
            return formats
        case "about":
            target = build(engine.packages)
            return {
                "estimator": str(engine.estimator),
                "checkpoint_format": engine.checkpoint_format,
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


def kv_names(engine: type[Engine]) -> list[str]:
    """Return the KV formats that may be written for an engine: its own, and ``k16v8`` if it has both halves."""
    names = [str(name) for name in engine.kv_names()]
    return [*names, K16V8] if engine.separate_kv and "fp8_e4m3" in names and K16V8 not in names else names


def _refusals(engine: type[Engine]) -> dict[str, str]:
    target = "cpu" if device(build(engine.packages)) == "cpu" else "cuda"
    return {name: _refusal(engine, name, target) for name in kv_names(engine)}


def _refusal(engine: type[Engine], name: str, device: str) -> str:
    """Reason why the checks of every arm refuse this format; empty if they do not."""
    path = "/model.gguf" if engine.checkpoint_format == "gguf" else "/model"
    try:
        kv = meaning(KVSpec.parse(name), _MODEL_DTYPE)
        engine.check_kv(kv)
        verdict = engine.supports(Arm("", engine.name, "the model", path, "", kv, "bfloat16", device, threads=1))
    except FidelabError as error:
        return str(error)
    except OSError:  # it needs the model to decide
        return ""
    return "" if verdict.ok else verdict.reason


if __name__ == "__main__":
    status = main()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)  # to take an imported engine apart takes a second, and nobody waits for it
