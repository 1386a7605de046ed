"""The command that starts an engine's own server with the settings of an arm."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fidelab.config.schema import Experiment, ServeConfig
from fidelab.config.serve import move_folders
from fidelab.core import Arm
from fidelab.core.errors import NotSupportedError
from fidelab.engines import ENGINES
from fidelab.engines.base import engine_class
from fidelab.engines.llamacpp.perplexity import own_server

_HOST, _PORT = "127.0.0.1", 8000
_ALIASES = ("--served-model-name", "--alias")


def serve_command(experiment: Experiment | None, arm: Arm) -> str | None:
    """Return the command line that starts the engine's own server with the settings of this arm.

    If the experiment was made from such a command, its other words are kept, and folders are those of its image.
    ``None`` if the engine has no server, or its server lacks such options.
    """
    if arm.engine not in ENGINES.names():
        return None
    cls, serve = engine_class(arm.engine), ServeConfig()
    if experiment is not None and experiment.serve is not None and arm.engine == experiment.engine.name:
        serve = experiment.serve
        if serve.wrapper and experiment.engine.image:  # the pasted words with the image of the arm
            config = next((each for each in experiment.arms if each.label == arm.name), experiment.reference)
            image = (config.engine or experiment.engine).image  # none: it runs in an installed engine
            wrapper = (*serve.wrapper[:-1], image)
            serve = serve.model_copy(update={"wrapper": wrapper}) if image else ServeConfig()
    if experiment is not None and experiment.engine.bin is not None:
        return " ".join(map(_quoted, own_server(arm, Path(experiment.engine.bin), experiment.context)))
    repository, _, revision = arm.model.partition("@")
    is_hub = "snapshots" in Path(arm.path).parts  # as huggingface_hub keeps them
    inside = {here: there for there, here in serve.mounts.items()}
    path = repository if is_hub else move_folders(arm.path, inside)
    options = tuple((key, move_folders(value, inside)) for key, value in arm.options)
    pasted = bool(serve.program or serve.wrapper)
    named = replace(arm, path=path, model=path if pasted else arm.model, options=options)
    try:
        words = cls.serve_command(named, _HOST, cls.dialect.port if cls.dialect else _PORT)
        variables = {name: move_folders(value, inside) for name, value in cls.serve_variables(named).items()}
    except (NotSupportedError, ImportError):
        return None
    if is_hub and revision:
        words += ["--revision", revision]
    if pasted:  # with the program, the host and what else goes into no arm as they were pasted
        rest = _without_pair(words[words.index(path) + 1 :], "--host", "--port")
        words = [*serve.program, *([serve.model_flag] if serve.model_flag else []), path, *rest, *serve.words]
    elif is_hub or Path(arm.model).is_absolute():  # the path says the same
        words = _without_pair(words, *_ALIASES)
    if serve.wrapper:
        given = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
        return " ".join(map(_quoted, [*serve.wrapper[:-1], *given, serve.wrapper[-1], *words]))
    return " ".join([*(f"{name}={_quoted(value)}" for name, value in variables.items()), *map(_quoted, words)])


def _without_pair(words: Sequence[str], *flags: str) -> list[str]:
    """Return the words without some flags and their values."""
    return [word for n, word in enumerate(words) if word not in flags and (n == 0 or words[n - 1] not in flags)]


def _quoted(word: str) -> str:
    """Shell-quote a word, with the home directory abbreviated to ``~``."""
    home = f"{Path.home()}/"
    return f"~/{shlex.quote(word.removeprefix(home))}" if word.startswith(home) else shlex.quote(word)
