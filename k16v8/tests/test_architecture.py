"""What the package imports: nothing of fidelab, few packages, and no circles between its modules."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import k16v8

SOURCE = Path(k16v8.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ALWAYS = {"torch", "triton"}
# Folder → packages besides those: the engine that a plug-in is for, and what the bench decodes whole models with.
BESIDES = {
    "plugins/transformers": {"transformers"},
    "plugins/vllm": {"vllm"},
    "plugins/sglang": {"sglang"},
    "plugins/lmcache": {"lmcache", "numpy", "google_crc32c"},
    "bench": {"transformers"},
}
# Folder → folders that it may import.
ARROWS = {
    "kernels": set[str](),
    "gates": {"kernels"},
    "audit": {"kernels"},
    "plugins": {"kernels"},
    "bench": {"kernels", "gates", "plugins"},
    "cli": {"kernels", "gates", "audit", "bench"},
}


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(path: Path) -> str:
    return str(path.relative_to(SOURCE).parent)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_torch_triton_and_the_engine_of_a_plug_in_are_imported(path: Path) -> None:
    packages = {name.partition(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"k16v8"}
    assert packages <= ALWAYS | BESIDES.get(folder(path), set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_imports_only_what_stands_behind_its_arrow(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    if room in ARROWS:
        targets = {name.split(".")[1] for name in imports(path) if name.startswith("k16v8.")}
        assert targets & ARROWS.keys() <= ARROWS[room] | {room}


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {".".join(("k16v8", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in FILES}
    graph = {
        name: {other for other in modules for target in imports(path) if f"{target}.".startswith(f"{other}.")}
        for name, path in modules.items()
        if path.name != "__init__.py"
    }
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "module",
    ["k16v8", "k16v8.cli", "k16v8.plugins.vllm.plugin", "k16v8.plugins.sglang.plugin", "k16v8.plugins.shared"],
)
def test_what_every_engine_of_an_environment_loads_is_the_standard_library_alone(module: str) -> None:
    script = "import sys, json; before = {*sys.modules}; import MODULE; print(json.dumps([*({*sys.modules} - before)]))"
    done = subprocess.run(
        [sys.executable, "-c", script.replace("MODULE", module)], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)} - set(sys.stdlib_module_names)
    assert loaded == {"k16v8"}
