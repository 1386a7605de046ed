"""List of all engines with their environments, versions and usable formats."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from fidelab.core.errors import EngineError, FidelabError
from fidelab.engines import ENGINES
from fidelab.engines.base import Engine
from fidelab.environments.container import find_image
from fidelab.environments.environment import (
    MARKER,
    Environment,
    engines_dir,
    provided_here,
    read_marker,
    recipe_shims,
    update_command,
)
from fidelab.environments.queries import About, EngineAnswers, start
from fidelab.environments.recipes import install_command, variants
from fidelab.models.cache import cache_dir

_TEST_ENGINE = "fake"


@dataclass(frozen=True)
class InstalledEngine:
    """One engine in one environment.

    Attributes:
        environment: ``None`` if the engine is not installed.
        refused: KV formats that cannot run there, and why.
        update: the command that reinstalls it, if its recipe has changed since.
        problem: reason why the engine does not work there, with ``remedy``; the other fields are empty then.
    """

    engine: str
    name: str
    environment: Environment | None
    versions: Mapping[str, str] = field(default_factory=dict)
    kv_names: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    about: About | None = None
    update: str | None = None
    problem: str | None = None
    remedy: str | None = None

    @property
    def label(self) -> str:
        """The environment in words."""
        if self.environment is None or self.environment.is_current or self.environment.image:
            return self.name
        return f"environment {self.name}"

    @property
    def build(self) -> str:
        """``stock``, or the change of each package."""
        provenance = self.about.provenance if self.about else {}
        other = [f"{package} {label}" for package, label in provenance.items() if label != "stock"]
        return ", ".join(other) or "stock"


def listing(
    engines: Sequence[str] | None = None, limit: float = 120.0, image: str | None = None
) -> list[InstalledEngine]:
    """Return every engine but the test engine, in each of its environments; like :func:`asking`, but waits."""
    with asking(engines, limit, image) as answers:
        return answers()


@contextmanager
def asking(
    engines: Sequence[str] | None = None, limit: float = 120.0, image: str | None = None
) -> Iterator[Callable[[], list[InstalledEngine]]]:
    """Ask all environments of these engines at once, each in its own process; ``limit``: seconds for one answer.

    Yields a function that waits for the answers, so that the caller may do other work in the meantime.  An engine's
    environments come in the order in which runs would take them; an engine without any has one entry.  Processes that
    still work when the context is left are ended.  ``image``: ask in this container image instead.

    Raises:
        EngineError: If the image is missing.
    """
    names = [name for name in ENGINES.names() if name != _TEST_ENGINE] if engines is None else engines
    with ExitStack() as stack:
        places: Iterable[InstalledEngine] = chain.from_iterable(map(_places, names))
        if image is not None:
            found = find_image(image)
            places = (
                InstalledEngine(engine, f"image {image}", Environment(engine, "python3", image=found))
                for engine in names
                if not getattr(ENGINES.load(engine), "is_server", False)  # servers are queried from this machine
            )
        begun = [_begun(place, stack, limit) for place in places]
        yield lambda: [place if asked is None else _answered(place, asked) for place, asked in begun]


def chosen(places: Sequence[InstalledEngine]) -> dict[str, InstalledEngine]:
    """Return the first working environment of each engine, else its first one."""
    found: dict[str, InstalledEngine] = {}
    for place in places:
        if place.engine not in found or (found[place.engine].problem is not None and place.problem is None):
            found[place.engine] = place
    return found


def _places(engine: str) -> Iterator[InstalledEngine]:
    """Yield the environments of one engine without their answers, or the problem."""
    try:
        cls: type[Engine] = ENGINES.load(engine)
        here = provided_here(cls)
    except (Exception, SystemExit) as error:  # an adapter of another package
        problem = " ".join(str(error).split())
        yield InstalledEngine(engine, engine, None, problem=problem, remedy="repair or remove its package")
        return
    if here and cls.is_server:
        yield InstalledEngine(engine, "a server", Environment(engine, sys.executable), cls.versions())
        return
    folders = [engines_dir() / name for name in variants(engine)]
    unfinished = [folder for folder in folders if (folder / MARKER).exists() and read_marker(folder) is None]
    made = [folder for folder in folders if folder not in unfinished and os.access(_python(folder), os.X_OK)]
    if here:
        yield InstalledEngine(engine, "this interpreter", Environment(engine, sys.executable))
    for folder in folders:
        if folder in unfinished:
            problem = f"{folder} is unfinished"
            yield InstalledEngine(engine, folder.name, None, problem=problem, remedy=install_command(engine))
        elif folder in made:
            try:
                shims = recipe_shims(folder)
            except EngineError as error:
                yield InstalledEngine(engine, folder.name, None, problem=str(error), remedy=install_command(engine))
            else:
                environment = Environment(engine, str(_python(folder)), pythonpath=shims)
                yield InstalledEngine(engine, folder.name, environment, update=update_command(folder))
    if not (here or unfinished or made):
        yield InstalledEngine(engine, engine, None, problem="not installed", remedy=install_command(engine))


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _begun(place: InstalledEngine, stack: ExitStack, limit: float) -> tuple[InstalledEngine, EngineAnswers | None]:
    """Return an environment with its answers, all questions sent; without answers if the engine cannot be asked."""
    if place.environment is None or place.versions:
        return place, None
    try:
        asked = stack.enter_context(start(place.environment, limit))
    except FidelabError as error:
        return _broken(place, str(error)), None
    asked.ahead("versions")
    asked.ahead("about")
    asked.ahead("formats", store=str(cache_dir() / "answers"))
    return place, asked


def _answered(place: InstalledEngine, asked: EngineAnswers) -> InstalledEngine:
    try:
        versions, about, formats = asked.versions(), asked.about, asked.formats()
    except FidelabError as error:
        return _broken(place, str(error))
    except (Exception, SystemExit) as error:  # errors that the import of another package may raise
        return _broken(place, " ".join(f"{type(error).__name__}: {error}".split()))
    refused = {name: why for name, why in formats.items() if why}
    return replace(place, versions=versions, kv_names=list(formats), refused=refused, about=about)


def _broken(place: InstalledEngine, problem: str) -> InstalledEngine:
    if place.environment is not None and place.environment.image is not None:  # if the engine is not installed
        why = re.split(r": (?:fidelab setup engines|pip) install", problem)[0]
        return replace(place, problem=why, remedy="use an image that has it")
    made = place.environment is not None and read_marker(Path(place.environment.python).parents[1]) is not None
    flags = ["--reinstall"] if made and place.update is None else []  # a plain installation would leave it as it is
    return replace(place, problem=problem, remedy=install_command(place.engine, *flags))
