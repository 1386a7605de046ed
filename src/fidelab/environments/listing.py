"""All engines: where each is, what it is, and what it can do there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fidelab.core import Arm, KVSpec
from fidelab.engines import ENGINES
from fidelab.engines.base import Engine
from fidelab.environments.answers import About, EngineAnswers, ask
from fidelab.environments.environment import (
    MARKER,
    Environment,
    engines_dir,
    provided_here,
    read_marker,
    remembered_shims,
)
from fidelab.environments.recipes import install_command, variants
from fidelab.errors import FidelabError

__all__ = ["Installed", "listing", "places"]

_TEST_ENGINE = "fake"


@dataclass(frozen=True)
class Installed:
    """One engine in one environment.

    Attributes:
        environment: ``None`` where the engine is installed nowhere.
        refused: KV formats that cannot run there, and why.
        problem: why the engine does not work there, with ``remedy``; the other fields are empty then.
    """

    engine: str
    name: str
    environment: Environment | None
    versions: Mapping[str, str] = field(default_factory=dict)
    kv_names: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    about: About | None = None
    problem: str | None = None
    remedy: str | None = None

    @property
    def where(self) -> str:
        """The environment in words."""
        return self.name if self.environment is None or self.environment.own else f"environment {self.name}"

    @property
    def build(self) -> str:
        """``stock``, or what was changed in which package."""
        provenance = self.about.provenance if self.about else {}
        other = [f"{package} {label}" for package, label in provenance.items() if label != "stock"]
        return ", ".join(other) or "stock"


def listing(limit: float = 120.0) -> list[Installed]:
    """Every engine but the test engine, in every environment that it has; all are asked at once, ``limit`` s each."""
    names = [name for name in ENGINES.names() if name != _TEST_ENGINE]
    with ThreadPoolExecutor() as pool:
        return [place for engine_places in pool.map(lambda name: places(name, limit), names) for place in engine_places]


def places(engine: str, limit: float = 120.0) -> list[Installed]:
    """One engine, in the order in which runs would take them; one entry without environment where there is none."""
    results = []
    try:
        cls: type[Engine] = ENGINES.load(engine)
        here = provided_here(cls)
    except (Exception, SystemExit) as error:  # an adapter of somebody else
        return [
            Installed(engine, engine, None, problem=" ".join(str(error).split()), remedy="repair or remove its package")
        ]
    if here and cls.served:
        return [Installed(engine, "a server", Environment(engine, sys.executable), cls.versions())]
    if here:
        results.append(_ask(engine, "this interpreter", Environment(engine, sys.executable), limit))
    for name in variants(engine):
        folder = engines_dir() / name
        python = folder / "bin" / "python"
        if (folder / MARKER).exists() and read_marker(folder) is None:
            command = install_command(engine)
            results.append(Installed(engine, name, None, problem=f"{folder} is unfinished", remedy=command))
        elif os.access(python, os.X_OK):
            failing = (read_marker(folder) or {}).get("failing", {})
            environment = Environment(engine, str(python), pythonpath=remembered_shims(folder))
            results.append(_ask(engine, name, environment, limit, failing))
    return results or [Installed(engine, engine, None, problem="not installed", remedy=install_command(engine))]


def _ask(
    engine: str, name: str, environment: Environment, limit: float, failing: Mapping[str, str] | None = None
) -> Installed:
    """``failing``: the formats that did not run when the environment was made, and why."""
    try:
        with ask(environment, limit) as asked:
            versions, names = asked.versions(), asked.kv_names()
            refused = {**(failing or {}), **_refused(asked, names)}
            return Installed(engine, name, environment, versions, names, refused, asked.about)
    except FidelabError as error:
        problem = str(error)
    except (Exception, SystemExit) as error:  # what importing somebody else's package may raise
        problem = " ".join(f"{type(error).__name__}: {error}".split())
    return Installed(engine, name, environment, problem=problem, remedy=install_command(engine))


def _refused(asked: EngineAnswers, names: Sequence[str]) -> dict[str, str]:
    """Formats that the engine refuses without a model, and why; empty where it needs one to tell."""
    device = "cpu" if asked.about.device == "cpu" else "cuda"
    path = "/model.gguf" if asked.form == "gguf" else "/model"
    engine = asked.environment.engine
    verdicts = {}
    for name in names:
        arm = Arm("", engine, "the model", path, "", KVSpec.parse(name), "bfloat16", device, threads=1)
        try:
            verdicts[name] = asked.supports(arm)
        except Exception:  # it looked for the model, or its process is gone
            return {}
    refused = {name: verdict.reason for name, verdict in verdicts.items() if not verdict.ok}
    return refused if len(refused) < len(names) else {}
