"""Environments of arms: each engine is queried in its environment before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fidelab.core import Arm, Estimator
from fidelab.engines.base import Engine
from fidelab.environments.environment import Environment
from fidelab.models import Model


def loads_safetensors(engine: type[Engine]) -> bool:
    """Whether the engine loads a safetensors folder. For a server only the tokenizer is loaded here."""
    return engine.checkpoint_format == "safetensors" and not engine.is_server


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
