"""Environments of arms: each engine is queried in its environment before anything loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fidelab.config.schema import EngineConfig
from fidelab.core import Arm, Estimator
from fidelab.core.errors import EngineError
from fidelab.engines import ENGINES
from fidelab.engines.base import Engine
from fidelab.engines.variables import thread_variables, variables_of
from fidelab.environments.environment import Environment, locate
from fidelab.environments.queries import Assumed, EngineAnswers, ask
from fidelab.models import Model

_STOCK = "stock"


def engine_class(name: str) -> type[Engine]:
    """Return the adapter. Its class variables hold in every environment."""
    cls: type[Engine] = ENGINES.load(name)
    return cls


def loads_safetensors(engine: type[Engine]) -> bool:
    """Whether the engine loads a safetensors folder. For a server only the tokenizer is loaded here."""
    return engine.checkpoint_format == "hf" and not engine.is_server


@dataclass(frozen=True)
class ResolvedArm:
    """An arm with its engine's adapter, its model, the environment of its engine, and the versions installed there.

    ``versions`` also records modified engines, folders that precede the packages, and variables of the worker's
    environment that may change results. Captures of another build, or made under other variables, are therefore not
    shared.  ``about``: how it is installed in full, for the record.  ``draft``: the model that drafts for it.
    ``unasked``: the engine still has to be asked, on the device where the arm runs, whether it can run the arm.
    ``borrowed``: another user ran it; ``model`` is not its own, and nothing of it runs here.
    """

    arm: Arm
    engine_class: type[Engine]
    model: Model
    environment: Environment
    versions: Mapping[str, str]
    about: Mapping[str, Any] = field(default_factory=dict)
    draft: Model | None = None
    unasked: bool = False
    borrowed: bool = False

    @property
    def estimator(self) -> Estimator:
        """Estimator of this arm's distributions on its engine."""
        return self.engine_class.estimator_for(self.arm)

    @property
    def lacks_weights(self) -> bool:
        """Whether the engine loads safetensors while the model, or its draft model, has its weights in a GGUF file."""
        if self.borrowed:
            return False
        models = [model for model in (self.model, self.draft) if model is not None]
        return any(model.text_only for model in models) and loads_safetensors(self.engine_class)


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
                self._found[config] = Assumed(Environment(config.name, sys.executable), str(error))
                return self._found[config]
            files = self._files() if environment.image else ()
            self._found[config] = self._stack.enter_context(ask(environment, files=files))
        return self._found[config]


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
    if isinstance(asked, Assumed):
        return {"not_installed": asked.problem}
    return {
        **({"image": {"name": image.name, "digest": image.digest}} if image else {}),
        **({"provenance": dict(asked.about.provenance)} if asked.about.provenance else {}),
        **({"pythonpath": shims} if shims else {}),
    }


def _shim_names(asked: EngineAnswers) -> list[dict[str, str]]:
    """Shim folders by their last part, without the private path on this machine."""
    return [{**shim, "folder": Path(shim["folder"]).name} for shim in asked.about.shims]
