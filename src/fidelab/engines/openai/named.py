"""The model that an answer names, by one rule for all clients of servers.

An answer must name the model that was requested, or another name under which the server lists that model: vLLM answers
by the first of its ``--served-model-name``.  An answer without a name counts as the requested model's, since servers
that have one model often leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def model_named(answer: Mapping[str, Any]) -> str | None:
    """Return the name of the model in an answer or an event, if it has one."""
    name = answer.get("model")
    return name if isinstance(name, str) and name else None


def names_of(model: str, listed: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the name of a model and its others in a server's list of models: those with the same ``root``."""
    roots = {root for entry in listed if entry.get("id") == model and isinstance(root := entry.get("root"), str)}
    same = (name for entry in listed if entry.get("root") in roots and isinstance(name := entry.get("id"), str))
    return tuple(dict.fromkeys((model, *same)))


def misnamed(name: str, model: str) -> str:
    """Describe an answer that names another model than the requested one."""
    return f"the server answered as model {name}, not as {model}"
