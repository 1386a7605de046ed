"""The import arrows of ARCHITECTURE.md, and what engine environments may be asked to import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fidelab

SOURCE = Path(fidelab.__file__).parent
EVERYONE = {"core", "errors", "probes", "registry"}

# Room → rooms it may import besides EVERYONE.  `None`: anything (the conductor and the command line).
ARROWS: dict[str, set[str] | None] = {
    "cli": None,
    "api": None,
    "run": None,
    "repeat": None,
    "asking": None,
    "scoring": None,
    "measuring": None,
    "attribution": None,
    "isolating": None,
    "cross_engine": None,
    "bisecting": None,
    "serving": None,
    "composing": None,
    "sizing": None,
    "phases": None,
    "doctor": None,
    "environments": {"engines", "workers", "models.cache", "models.tiny", "captures.container", "captures.reader"},
    "__main__": None,
    "__init__": None,
    "core": set(),
    "probes": set(),
    "errors": set(),
    "registry": set(),
    "config": set(),
    "profiles": set(),
    "formats": set(),
    "plugins": {"formats"},
    "engines": {"formats", "plugins", "captures.container"},
    "workers": {"engines", "captures.writer", "captures.container"},
    "captures": set(),
    "models": set(),
    "inputs": {"models"},
    "metrics": set(),
    "axes": {"inputs", "captures", "metrics", "capability", "results.axis_record", "results.panels"},
    "capability": {"inputs"},
    "load": {"inputs", "metrics"},
    "benches": {"inputs", "captures", "metrics", "load", "results.bench_record", "results.bench_values"}
    | {"results.serving_record", "results.axis_record"},
    "benching": None,
    "plan": {"config", "engines", "environments", "axes", "benches", "models", "captures", "workers.messages"},
    "results": {"metrics"},
    "report": {"results"},
    "imports": {"results", "report", "metrics", "captures.container"},
}
THIRD_PARTY: dict[str, set[str]] = {
    "core": set(),
    "probes": {"numpy"},
    "errors": set(),
    "registry": set(),
    "captures": {"numpy"},
    "workers": {"numpy"},
    "engines": {"numpy", "torch", "transformers", "llama_cpp", "vllm", "sglang", "k16v8"},
    "formats": {"torch"},
    "load": {"numpy", "httptools", "orjson", "prometheus_client", "uvloop"},
    "plugins": {"numpy", "torch", "transformers", "vllm", "sglang"},
    "metrics": {"numpy", "rapidfuzz", "scipy", "torch"},
    "config": {"pydantic", "yaml"},
}
LEAN_MODULES = [
    *("fidelab.core", "fidelab.captures.requests", "fidelab.captures.writer", "fidelab.engines.base"),
    *("fidelab.workers.child", "fidelab.workers.ask"),
    *(f"fidelab.engines.{name}" for name in ("hf", "llamacpp", "vllm", "sglang", "openai")),
]


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path, *, at_once: bool = False) -> Iterator[str]:
    """Absolute names of everything a file imports, wherever in the file; ``at_once``: when it is imported itself."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _allowed(target: str, room: str) -> bool:
    allowed = ARROWS[room]
    parts = target.split(".")
    if allowed is None or len(parts) == 1 or parts[1] in EVERYONE or parts[1] == room:
        return True
    return parts[1] in allowed or any(target.startswith(f"fidelab.{arrow}") for arrow in allowed if "." in arrow)


def test_every_room_is_on_the_map() -> None:
    assert {_room(path) for path in _files()} <= set(ARROWS)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_what_stands_behind_its_arrow(path: Path) -> None:
    ours = [name for name in _imports(path) if name.split(".")[0] == "fidelab"]
    assert [name for name in ours if not _allowed(name, _room(path))] == []


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_the_packages_that_it_may_need(path: Path) -> None:
    budget = THIRD_PARTY.get(_room(path))
    if budget is not None:
        packages = {name.split(".")[0] for name in _imports(path)} - set(sys.stdlib_module_names) - {"fidelab"}
        assert packages <= budget


def test_the_package_k16v8_is_imported_by_engines_alone_and_late() -> None:
    """It is a contender: fidelab works without it (``test_without_k16v8.py``)."""

    def among(names: Iterator[str]) -> bool:
        return any(name.partition(".")[0] == "k16v8" for name in names)

    assert {_room(path) for path in _files() if among(_imports(path))} == {"engines"}
    # this one is imported itself where an arm asks for the package
    assert [path.stem for path in _files() if among(_imports(path, at_once=True))] == ["hf_paged"]


@pytest.mark.parametrize("module", LEAN_MODULES)
def test_what_runs_in_engine_environments_needs_numpy_alone(module: str) -> None:
    script = f"import {module}, sys, json; print(json.dumps(sorted({{n.split('.')[0] for n in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # what the interpreter itself brings (site hooks of an editable install) does not count
    bare = subprocess.run(
        [sys.executable, "-c", "import sys, json; print(json.dumps([n.split('.')[0] for n in sys.modules]))"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(json.loads(done.stdout)) - set(json.loads(bare.stdout)) - set(sys.stdlib_module_names)
    assert {name for name in loaded if not name.startswith("_")} <= {"fidelab", "numpy"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = (
        "import fidelab, sys; print([m for m in ('numpy', 'torch', 'pydantic', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
