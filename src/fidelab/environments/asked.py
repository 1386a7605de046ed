"""Engines asked in their environments before anything loads, and what is recorded of how they are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fidelab.config.schema import ArmConfig, EngineConfig
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import EngineError
from fidelab.engines.base import engine_class
from fidelab.engines.format_names import unknown_format
from fidelab.engines.variables import thread_variables, variables_of
from fidelab.environments.environment import Environment, locate
from fidelab.environments.queries import AssumedEngine, EngineAnswers, ask

_STOCK = "stock"


class Engines:
    """The engines of an experiment. Each environment is queried by one process, as long as this object is open.

    ``files``: models and other files that engines in containers need access to. ``assume``: an engine that is not
    installed is assumed to run what is asked of it, for a plan that runs nothing.
    """

    def __init__(self, files: Callable[[], Sequence[str]] = tuple, assume: bool = False) -> None:
        self._files = files
        self._assume = assume
        self._stack = ExitStack()
        self._found: dict[EngineConfig, EngineAnswers] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)  # an interrupt ends the processes without waiting for them

    def ask(self, config: EngineConfig) -> EngineAnswers:
        """Return the process that answers questions about this engine, in its environment.

        Raises:
            EngineError: If it is not installed, or its environment does not work. The message says what to do.
        """
        if config not in self._found:
            try:
                environment = locate(
                    config.name, python=config.python, pythonpath=config.pythonpath, image=config.image
                )
            except EngineError as error:
                if not self._assume:
                    raise
                self._found[config] = AssumedEngine(Environment(config.name, sys.executable), str(error))
                return self._found[config]
            files = self._files() if environment.image else ()
            self._found[config] = self._stack.enter_context(ask(environment, files=files))
        return self._found[config]


def native_kv(engine: EngineConfig) -> KVSpec:
    """Return the format of an engine's cache if none is specified."""
    return KVSpec.parse(engine_class(engine.name).native_kv)


def check_kv_name(config: ArmConfig, engine: EngineConfig, answers: EngineAnswers) -> None:
    """Refuse a format whose name the engine does not know. An engine without any format names is not installed.

    Raises:
        UnknownNameError: If the engine does not know the format. The message lists the formats that it knows, and says
            where the name is one.
    """
    if config.kv is None or not (known := answers.kv_names()):
        return
    for fmt in (config.kv.k, config.kv.v):
        if fmt.name not in known:
            version = next(iter(answers.versions().values()), "")
            raise unknown_format(fmt.name, known, engine.name, version)


def versions_there(asked: EngineAnswers, arm: Arm) -> dict[str, str]:
    """Return versions of an engine and its libraries, and variables of the arm's worker that may change numbers."""
    builds = {f"{name} build": text for name, text in asked.about.provenance.items() if text != _STOCK}
    image = asked.environment.image
    environment = {**asked.about.variables, **thread_variables(arm.threads), **dict(arm.env)}
    return {
        **asked.versions(),
        **builds,
        **({"image": image.digest} if image else {}),
        **{f"shim {shim['folder']}": shim["sha256"] for shim in _shim_names(asked)},
        **{f"${name}": value for name, value in variables_of(engine_class(arm.engine), environment).items()},
    }


def installation_record(asked: EngineAnswers) -> dict[str, Any]:
    """Return an engine's installation, for the record of what ran."""
    shims, image = _shim_names(asked), asked.environment.image
    if isinstance(asked, AssumedEngine):
        return {"not_installed": asked.problem}
    return {
        **({"image": {"name": image.name, "digest": image.digest}} if image else {}),
        **({"provenance": dict(asked.about.provenance)} if asked.about.provenance else {}),
        **({"pythonpath": shims} if shims else {}),
    }


def _shim_names(asked: EngineAnswers) -> list[dict[str, str]]:
    """Shim folders by their last part, without the private path on this machine."""
    return [{**shim, "folder": Path(shim["folder"]).name} for shim in asked.about.shims]
