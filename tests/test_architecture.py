"""The rooms and import arrows of ARCHITECTURE.md, and what engine environments may be asked to import."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import fidelab
from fidelab.engines import ENGINES

SOURCE = Path(fidelab.__file__).parent
ROOT = Path(__file__).parents[1]
MOST_ROOMS, MOST_FLOORS, MOST_UNBOUND, MOST_IMPORTED = 26, 9, 2, 12
HUBS = {"cli", "run", "studies"}  # they conduct others
MOST_FILES_OF_RUN = 10


def _table() -> dict[str, set[str] | None]:
    """Room → rooms that it imports, as ARCHITECTURE.md has them; ``None``: anything."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text.partition("## Rooms")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert rows, "no table of rooms in ARCHITECTURE.md"
    return {
        room: None if cell.strip() == "anything" else {name.strip() for name in cell.split(",")} - {"–"}
        for room, cell in rows
    }


ARROWS = _table()
OUTSIDE = {"__init__", "__main__"}  # the package's own faces

THIRD_PARTY: dict[str, set[str]] = {
    "core": set(),
    "captures": {"numpy"},
    "workers": {"numpy"},
    "engines": {
        "psutil",
        "httpx",
        "numpy",
        "torch",
        "transformers",
        "llama_cpp",
        "vllm",
        "sglang",
        "k16v8",
        "pydantic",
    },
    "formats": {"torch"},
    "bench": {"aiohttp", "httpx", "huggingface_hub", "numpy", "prometheus_client", "pydantic", "torch", "yaml"},
    "metrics": {"numpy", "psutil", "rapidfuzz", "scipy", "torch", "triton"},
    "config": {"pydantic", "yaml"},
}
EXTRAS: dict[str, set[str]] = {
    "torch": {
        *(
            "axes",
            "cli",
            "doctor",
            "engines",
            "environments",
            "formats",
            "metrics",
            "models",
            "physics",
            "plan",
            "studies",
        )
    },
    "transformers": {"engines", "inputs", "models", "physics"},
    "tokenizers": {"models"},
    "triton": {"metrics"},
    "scipy": {"metrics", "physics"},
}
"""Packages that the base does not install → rooms that may import them, in the functions that need them."""
AT_ONCE = ("engines/hf/", "formats/known.py", "formats/weights.py", "metrics/scorer.py", "metrics/fused")
"""Files that are themselves imported where an extra is needed."""
LEAN_MODULES = [
    *("fidelab.core", "fidelab.captures.requests", "fidelab.captures.writer", "fidelab.engines.base"),
    *("fidelab.workers.child", "fidelab.workers.ask"),
    *(f"fidelab.engines.{name}.adapter" for name in ("hf", "llamacpp", "vllm", "sglang", "openai")),
]


@functools.cache
def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def _imports(path: Path, *, at_once: bool = False) -> tuple[str, ...]:
    """Absolute names of everything a file imports, wherever in the file; ``at_once``: when it is imported itself."""
    return tuple(_named(_tree(path).body if at_once else ast.walk(_tree(path)), path))


def _named(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imported_rooms(path: Path) -> set[str]:
    names = (name.split(".") for name in _imports(path))
    return {parts[1] for parts in names if parts[0] == "fidelab" and len(parts) > 1} - {_room(path)} & set(ARROWS)


@functools.cache
def _used() -> dict[str, set[str]]:
    """Room → rooms that its files import."""
    used = {room: set[str]() for room in ARROWS}
    for path in _files():
        if _room(path) in used:
            used[_room(path)] |= _imported_rooms(path)
    return used


def test_the_table_of_rooms_names_every_room_and_no_other() -> None:
    assert {_room(path) for path in _files()} - OUTSIDE == set(ARROWS)


def test_a_room_imports_what_its_row_lists_and_lists_what_it_imports() -> None:
    wrong = {
        room: {"unlisted": _used()[room] - listed, "unused": listed - _used()[room]}
        for room, listed in ARROWS.items()
        if listed is not None and _used()[room] != listed
    }
    assert wrong == {}


def test_few_rooms_may_import_anything() -> None:
    assert sum(rooms is None for rooms in ARROWS.values()) <= MOST_UNBOUND
    assert len(ARROWS) <= MOST_ROOMS


def test_no_room_imports_many_others_except_those_that_conduct() -> None:
    many = {room for room, rooms in _used().items() if len(rooms) > MOST_IMPORTED}
    assert many <= HUBS
    assert len([path for path in _files() if _room(path) == "run"]) <= MOST_FILES_OF_RUN


def test_every_arrow_points_down_and_the_house_is_low() -> None:
    order = graphlib.TopologicalSorter(_used())
    order.prepare()  # raises CycleError where rooms import each other
    floors = 0
    while order.is_active():
        floors += 1
        ready = order.get_ready()
        order.done(*ready)
    assert floors <= MOST_FLOORS


def _way() -> list[tuple[str, str]]:
    """Caller and function of each step of a setting, as docs/design.md has them."""
    text = (ROOT / "docs" / "design.md").read_text("utf-8").partition("## Way of a setting")[2].partition("\n## ")[0]
    return re.findall(r"^\| (?:`([\w.]+)`)? ?\| `([\w.]+)` \|", text, re.MULTILINE)


def test_the_way_of_a_setting_exists_and_enters_each_room_at_one_place() -> None:
    way = _way()
    assert len(way) > 10
    entries: dict[str, list[str]] = {}
    reached = [way[0][1].rpartition(".")[0]]
    for caller, function in way:
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), function
        if caller:
            assert caller in reached or caller == "fidelab.workers.child", f"{caller} has not been reached"
            assert re.search(rf"\b{name}\b", Path(str(importlib.import_module(caller).__file__)).read_text("utf-8"))
        if (room := module.split(".")[1]) != caller.partition("fidelab.")[2].partition(".")[0]:
            entries.setdefault(room, []).append(function)
        reached.append(module)
    assert {room: calls for room, calls in entries.items() if len(calls) > 1} == {}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, too; those of the package's own face for type checkers alone do not."""
    modules = {_module(path) for path in _files()}
    graph: dict[str, set[str]] = {}
    for path in _files():
        names = _imports(path, at_once=path == SOURCE / "__init__.py")
        named = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[_module(path)] = (named & modules) - {_module(path)}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_a_room_imports_only_the_packages_that_it_may_need() -> None:
    beyond = {}
    for path in _files():
        packages = {name.split(".")[0] for name in _imports(path)} - set(sys.stdlib_module_names) - {"fidelab"}
        if more := packages - THIRD_PARTY.get(_room(path), packages):
            beyond[str(path.relative_to(SOURCE))] = more
    assert beyond == {}


def test_packages_of_extras_are_imported_late_and_by_the_rooms_that_may() -> None:
    rooms: dict[str, set[str]] = {package: set() for package in EXTRAS}
    early = []
    for path in _files():
        for package in {name.split(".")[0] for name in _imports(path)} & EXTRAS.keys():
            rooms[package].add(_room(path))
        at_once = {name.split(".")[0] for name in _imports(path, at_once=True)} & EXTRAS.keys()
        if at_once and not str(path.relative_to(SOURCE)).startswith(AT_ONCE):
            early.append(path)
    assert rooms == EXTRAS
    assert early == []


def test_the_package_k16v8_is_imported_by_engines_alone_and_late() -> None:
    """It is a contender: fidelab works without it (``test_without_k16v8.py``)."""

    def among(names: Iterable[str]) -> bool:
        return any(name.partition(".")[0] == "k16v8" for name in names)

    assert {_room(path) for path in _files() if among(_imports(path))} == {"engines"}
    # this one is imported itself where an arm asks for the package
    assert [path.stem for path in _files() if among(_imports(path, at_once=True))] == ["paged"]


def test_the_distribution_of_checkpoints_is_named_by_one_file_and_for_types_alone() -> None:
    """fidelab finds it by its entry point, and works without it (``test_without_checkpoints.py``)."""

    def naming(*, at_once: bool) -> list[str]:
        named = ((path, _imports(path, at_once=at_once)) for path in _files())
        found = (path for path, names in named if any(name.startswith("fidelab_checkpoints") for name in names))
        return [str(path.relative_to(SOURCE)) for path in found]

    assert naming(at_once=False) == ["environments/checkpoints.py"]
    assert naming(at_once=True) == []


# Imports modules one by one, each without those of fidelab that the ones before it have loaded.
_LOADED = """
import importlib, json, sys
bare = {*sys.modules}  # what the interpreter itself brings (site hooks of an editable install) does not count
brought = {}
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fidelab"]:
        del sys.modules[name]
    importlib.import_module(module)
    brought[module] = sorted({name.partition(".")[0] for name in {*sys.modules} - bare})
print(json.dumps(brought))
"""


def _brought(*modules: str) -> dict[str, set[str]]:
    """Module → top-level packages outside the standard library that one interpreter has loaded when it has it, too."""
    words = [sys.executable, "-c", _LOADED, *modules]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return {module: set(names) - set(sys.stdlib_module_names) for module, names in json.loads(done.stdout).items()}


def test_what_runs_in_engine_environments_needs_numpy_alone() -> None:
    brought = _brought(*LEAN_MODULES)
    assert list(brought) == LEAN_MODULES
    beyond = {
        module: more
        for module, names in brought.items()
        if (more := {name for name in names if not name.startswith("_")} - {"fidelab", "numpy"})
    }
    assert beyond == {}


# File → why its words are no names of engines, though some are spelled alike.
NOT_ENGINES = {
    "config/pasted/shell.py": "the hub's command line",
    "core/registry.py": "extras of the package, as pip knows them",
    "environments/recipes.py": "what pip installs, a recipe for each environment",
    "imports/refract_axes.py": "REFRACT's backends",
    "imports/refract_file.py": "REFRACT's backends",
    "models/embedded.py": "the form of a model",
    "cli/setup.py": "the form of a model",
}
MOST_LINES_WITH_ENGINES = 4


def _lines_with(words: Collection[str], path: Path) -> set[int]:
    """Lines with a text that is one of the words, docstrings and messages apart."""
    texts = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant))
    return {node.lineno for node in texts if node.value in words}


def test_engines_are_known_by_name_to_their_own_room_and_few_others() -> None:
    """An engine describes itself; see ``Engine``. What others have to know of it, they read from there."""
    names = {*ENGINES.built_in} - {"fake"}  # which is a model's name, too
    lines = {str(path.relative_to(SOURCE)): _lines_with(names, path) for path in _files() if _room(path) != "engines"}
    found = {file: sorted(numbers) for file, numbers in lines.items() if numbers}
    assert sorted(found.keys() & NOT_ENGINES) == sorted(NOT_ENGINES)
    known = {file: numbers for file, numbers in found.items() if file not in NOT_ENGINES}
    assert sum(map(len, known.values())) <= MOST_LINES_WITH_ENGINES, known
