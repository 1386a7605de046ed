"""What the package imports: nothing of fidelab, few packages, and no circles between its modules."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import k16v8

SOURCE = Path(k16v8.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ALWAYS = {"torch", "triton"}
# Folder → packages besides those: the engine that a plug-in is for, and what the bench decodes whole models with.
BESIDES = {
    "plugins/transformers": {"transformers"},
    "plugins/vllm": {"vllm"},
    "plugins/sglang": {"sglang"},
    "plugins/lmcache": {"lmcache", "numpy"},
    "bench": {"transformers", "vllm"},
}
# Folder → folders that it may import.
ARROWS = {
    "kernels": set[str](),
    "gates": {"kernels", "plugins"},
    "audit": {"kernels"},
    "plugins": {"kernels"},
    "bench": {"kernels", "gates", "plugins"},
    "cli": {"kernels", "gates", "audit", "bench"},
}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Absolute names of everything a file imports, wherever in the file."""
    return tuple(_named(path))


def _named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(path: Path) -> str:
    return str(path.relative_to(SOURCE).parent)


def test_only_torch_triton_and_the_engine_of_a_plug_in_are_imported() -> None:
    beyond = {}
    for path in FILES:
        packages = {name.partition(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"k16v8"}
        if more := packages - ALWAYS - BESIDES.get(folder(path), set()):
            beyond[str(path.relative_to(SOURCE))] = more
    assert beyond == {}


def test_a_folder_imports_only_what_stands_behind_its_arrow() -> None:
    beyond = {}
    for path in FILES:
        room = path.relative_to(SOURCE).parts[0]
        if room in ARROWS:
            targets = {name.split(".")[1] for name in imports(path) if name.startswith("k16v8.")}
            if more := targets & ARROWS.keys() - ARROWS[room] - {room}:
                beyond[str(path.relative_to(SOURCE))] = more
    assert beyond == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {".".join(("k16v8", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in FILES}

    def reached(target: str) -> Iterator[str]:
        """Modules whose names a dotted name begins with, part by part."""
        parts = target.split(".")
        names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        return (name for name in names if name in modules)

    graph = {
        name: {other for target in imports(path) for other in reached(target)}
        for name, path in modules.items()
        if path.name != "__init__.py"
    }
    assert list(TopologicalSorter(graph).static_order())


FACES = ["k16v8", "k16v8.cli", "k16v8.plugins.vllm.plugin", "k16v8.plugins.sglang.plugin", "k16v8.plugins.shared"]
# Imports modules one by one, each without those of k16v8 that the ones before it have loaded.
LOADED = """
import importlib, json, sys
before = {*sys.modules}
brought = {}
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "k16v8"]:
        del sys.modules[name]
    importlib.import_module(module)
    brought[module] = sorted({name.partition(".")[0] for name in {*sys.modules} - before})
print(json.dumps(brought))
"""


def test_what_every_engine_of_an_environment_loads_is_the_standard_library_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *FACES], capture_output=True, text=True, check=True)
    brought = {name: set(names) - set(sys.stdlib_module_names) for name, names in json.loads(done.stdout).items()}
    assert brought == {module: {"k16v8"} for module in FACES}
