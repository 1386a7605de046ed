"""The tables of harmless options against the engines' own parsers: every option that they have, with odd values."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import pytest

from fidelab.config.experiment import validate
from fidelab.config.trust import demands
from fidelab.engines import ENGINES
from fidelab.engines.harmless import Amount, Count, Either, Listed, Switch
from fidelab.engines.llamacpp.placement import OPTIONS as PLACEMENT
from tests.engines.test_harmless import REACHES
from tests.real.harness import installed

VALUES = ("0", "1", "-1", "134744072", "1e9", "true", '{"a": {"b": 1}}', "evil.Module", "a\x1bb", "x/y", "10.0.0.1")
OWN = {  # options of fidelab, and names of what the engine's own parser calls otherwise
    "vllm": {"estimator", "force", "model-runner", "tp", "chunked-prefill", "kv-cache-memory"},
    "sglang": {"estimator", "cuda-graph", "tp"},
    "llamacpp": {"estimator", "flash-attn", *PLACEMENT},
}
LIST = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
""",
    "sglang": """
import argparse, os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
""",
}
PRINT = """
import json
told = {}
for action in parser._actions:
    try:
        number = not isinstance(action.type("1"), (bool, str))
    except Exception:
        number = False
    kind = "switch" if action.nargs == 0 else "number" if number else "text"
    told |= {name[2:]: [kind, str(action.nargs)] for name in action.option_strings if name.startswith("--")}
print("\\n" + json.dumps(told))
"""
FIELDS = """
import ctypes, json
from llama_cpp import llama_cpp as native
told = {}
for structure in (native.llama_context_params, native.llama_model_params):
    for name, kind in structure._fields_:
        told[name.replace("_", "-")] = ["switch" if kind is ctypes.c_bool else kind.__name__, "None"]
from llama_cpp.server.settings import ModelSettings, ServerSettings
for name in (*ModelSettings.model_fields, *ServerSettings.model_fields):
    told.setdefault(name.replace("_", "-"), ["setting", "None"])
print("\\n" + json.dumps(told))
"""
NUMBERS = ("number", "c_", "setting")
# Flags of llama-server that the bindings do not have.
SERVER = {"cache-ram", "chat-template", "cont-batching", "ctx-checkpoints", "ctx-size", "draft-max", "draft-min"}
SERVER |= {
    "draft-p-min",
    "jinja",
    "mmproj",
    "model-draft",
    "parallel",
    "spec-ngram-size-m",
    "spec-ngram-size-n",
    "spec-type",
}


@cache
def told(engine: str) -> dict[str, list[str]]:
    """Option → type and number of values, as the engine's own parser has them."""
    python = installed(engine).python
    code = FIELDS if engine == "llamacpp" else LIST[engine] + PRINT
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    options: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert len(options) > 40
    return options


def asked(engine: str, key: str, value: str) -> bool:
    experiment: dict[str, Any] = {"model": "m", "engine": engine, "axes": {"kld": {}}, "reference": "auto"}
    settings = validate({**experiment, "engine_args": {key: value}, "candidates": ["fp8_e4m3"]}, "test")
    return bool(demands(settings))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_no_option_of_the_engine_passes_unasked_but_what_the_table_lists(engine: str) -> None:
    table = ENGINES.load(engine).harmless
    passed = {(key, value) for key in told(engine) for value in VALUES if not asked(engine, key, value)}
    aliases = ENGINES.load(engine).aliases
    assert {key for key, _ in passed if aliases.get(key, key) not in table} == set()
    assert {key for key, _ in passed if REACHES.search(key)} <= {"speculative-draft-model-path"}
    wrong = {(k, v) for k, v in passed if not table[aliases.get(k, k)].values.allows(v)}
    assert wrong == set()
    counted = {k for k, _ in passed if isinstance(table[aliases.get(k, k)].values, Count | Amount | Listed)}
    assert {key for key in counted if not told(engine)[key][0].startswith(NUMBERS)} == set()
    assert len(counted) >= 8


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_each_row_is_an_option_of_the_engine_and_of_its_type(engine: str) -> None:
    table, options = ENGINES.load(engine).harmless, told(engine)
    known = {*options, *OWN[engine], *(SERVER if engine == "llamacpp" else ())}
    assert set(table) - known == set()
    for name in table.keys() & options.keys():
        kind, nargs = options[name]
        values = table[name].values
        if isinstance(values, Count | Amount):
            assert kind.startswith(NUMBERS), name
        if isinstance(values, Switch):
            assert kind in ("switch", "setting") or nargs == "?", name
        if isinstance(values, Listed):
            assert nargs == "+", name
        if kind == "switch":
            assert isinstance(values, Switch | Either), name
