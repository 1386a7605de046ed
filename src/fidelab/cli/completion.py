"""Values that a shell completes: formats, engines, tests, benches, devices, texts, runs, presets and profiles.

A shell asks in a process of its own at each press of the key, so nothing here imports an engine's package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import typer

Completer = Callable[[typer.Context, str], list[str]]


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def engine(context: typer.Context, incomplete: str) -> list[str]:
    """Return engines that begin so."""
    from fidelab.engines import ENGINES

    return _begin((name for name in ENGINES.names() if name != "fake"), incomplete)


def kv_format(context: typer.Context, incomplete: str) -> list[str]:
    """Return formats of the engine that the line names, also after ``K/``."""
    from fidelab.core.errors import FidelabError
    from fidelab.engines import DEFAULT, engine_name
    from fidelab.engines.base import engine_class
    from fidelab.engines.format_names import names_of

    side, slash, rest = incomplete.rpartition("/")
    with suppress(FidelabError):
        names = names_of(engine_class(engine_name(str(context.params.get("engine") or DEFAULT))))
        return [f"{side}{slash}{name}" for name in _begin(names, rest)]
    return []


def _listed(names: Callable[[], Iterable[str]]) -> Completer:
    """Return the completer of a comma-separated list."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        done, comma, rest = incomplete.rpartition(",")
        return [f"{done}{comma}{name}" for name in _begin(names(), rest) if name not in done.split(",")]

    return complete


def _axes() -> Iterator[str]:
    from fidelab.axes import AXES

    yield from (*AXES.names(), "core", "full", "all")


def _benches() -> Iterator[str]:
    from fidelab.bench import BENCHES

    yield from (*BENCHES.names(), "offline")


axes, benches = _listed(_axes), _listed(_benches)


def device(context: typer.Context, incomplete: str) -> list[str]:
    """Return kinds of devices."""
    return _begin(("auto", "cpu", "cuda", "cuda:0"), incomplete)


def text(context: typer.Context, incomplete: str) -> list[str]:
    """Return the texts of the package and of the hub; a shell completes files by itself."""
    from fidelab.core.names import TEXTS

    return _begin(TEXTS, incomplete)


def run(context: typer.Context, incomplete: str) -> list[str]:
    """Return runs of the folder of runs, the newest first, after ``latest``."""
    from fidelab.config.user import runs_folder
    from fidelab.core.errors import FidelabError
    from fidelab.results.store import CONFIG, LATEST

    with suppress(FidelabError, OSError):
        folder = runs_folder()
        found = [path for path in folder.glob("*") if (path / CONFIG).is_file() and not path.is_symlink()]
        names = [str(path) if incomplete.startswith(f"{folder}") else path.name for path in sorted(found, reverse=True)]
        return _begin([LATEST, *names], incomplete)
    return []


def preset(context: typer.Context, incomplete: str) -> list[str]:
    """Return bundled presets and the user's own."""
    from fidelab.config.presets import listing

    return _begin(listing(), incomplete)


def profile(context: typer.Context, incomplete: str) -> list[str]:
    """Return published measurements that can be repeated."""
    from fidelab.config.profiles import names

    return _begin(names(), incomplete)
