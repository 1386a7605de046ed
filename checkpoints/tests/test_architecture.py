"""What the package imports: three rooms of fidelab, few packages, and no circles between its modules."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import fidelab_checkpoints

SOURCE = Path(fidelab_checkpoints.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = {"core", "models", "config"}
ALWAYS = {"numpy", "safetensors", "gguf", "pydantic"}
LATE = {"torch", "transformers"}  # of the extra hf of fidelab: imported in functions that need them
# File → packages besides those, imported late: it runs in the environment of llm-compressor.
BESIDES = {"quantizer.py": {"llmcompressor", "compressed_tensors", "datasets"}}


@functools.cache
def imports(path: Path, *, at_once: bool = False) -> tuple[str, ...]:
    """Absolute names of everything a file imports, wherever in the file; ``at_once``: when it is imported itself."""
    tree = ast.parse(path.read_text("utf-8"))
    return tuple(_named(tree.body if at_once else ast.walk(tree), path))


def _named(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path, *, at_once: bool = False) -> set[str]:
    """Third-party packages that a file imports, fidelab among them."""
    named = {name.partition(".")[0] for name in imports(path, at_once=at_once)}
    return named - set(sys.stdlib_module_names) - {"fidelab_checkpoints"}


def test_of_fidelab_only_three_rooms_are_imported_and_each_of_them() -> None:
    names = [name.split(".") for path in FILES for name in imports(path)]
    assert {tuple(parts[1:2]) for parts in names if parts[0] == "fidelab"} == {(room,) for room in ROOMS}


def test_only_the_packages_that_it_requires_are_imported_and_those_of_extras_late() -> None:
    allowed = {path.name: ALWAYS | LATE | BESIDES.get(path.name, set()) | {"fidelab"} for path in FILES}
    assert {path.name: more for path in FILES if (more := packages(path) - allowed[path.name])} == {}
    at_once = {path.name: packages(path, at_once=True) - ALWAYS - {"fidelab"} for path in FILES}
    assert {name: more for name, more in at_once.items() if more} == {}


def test_the_packages_that_are_imported_at_once_are_those_that_the_distribution_requires() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    required = {text.partition(">")[0] for text in project["dependencies"]}
    assert set().union(*(packages(path) for path in FILES)) & (ALWAYS | {"fidelab"}) == required == ALWAYS | {"fidelab"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count, too."""
    modules = {f"fidelab_checkpoints.{path.stem}": path for path in FILES if path.stem != "__init__"}

    def reached(target: str) -> Iterator[str]:
        """Modules whose names a dotted name begins with, part by part."""
        parts = target.split(".")
        names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        return (name for name in names if name in modules)

    graph = {name: {other for target in imports(path) for other in reached(target)} for name, path in modules.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_the_face_of_the_package_is_light_and_its_interface_needs_no_package_of_an_extra() -> None:
    script = """
import json, sys
import fidelab_checkpoints
light = "numpy" not in sys.modules
import fidelab_checkpoints.interface
print(json.dumps([light, sorted({"torch", "transformers", "tokenizers", "scipy"} & {*sys.modules})]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, []]


def test_the_interface_lists_all_that_it_imports() -> None:
    from fidelab_checkpoints import interface

    [exported] = [path for path in FILES if path.name == "interface.py"]
    given = {name.rpartition(".")[2] for name in imports(exported) if name.startswith("fidelab_checkpoints.")}
    assert given | {"WORKER"} == set(interface.__all__)
    assert (SOURCE / f"{interface.WORKER.rpartition('.')[2]}.py").is_file()
