"""Resolve one arm from the user's input: its name, its KV format, and the settings that it inherits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fidelab.config.presets import cells_of
from fidelab.config.schema import ArmConfig, EngineConfig, Experiment, ServeConfig
from fidelab.config.serve import PORTS, move_folders
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import NotSupportedError, UnknownNameError, UsageError
from fidelab.engines import ENGINES, k16v8
from fidelab.engines.hf import kernels as hf_kernels
from fidelab.engines.hf.weights import NATIVE, WEIGHTS, rounding_of
from fidelab.engines.variables import check_env
from fidelab.environments.queries import EngineAnswers
from fidelab.models import Model
from fidelab.models.weights import file_sha256
from fidelab.run.deploy import engine_class

DTYPES = {"bf16": "bfloat16", "f16": "float16"}
_HF = "hf"  # the engine whose attention can be chosen
_JITTER = "jitter"  # the option of engines that have twins
ATTENTION, AUTO = "attention", "auto"  # its option for them, and what leaving that away is called


def resolve_arm(experiment: Experiment, config: ArmConfig, model: Model, dtype: str = "auto") -> Arm:
    """Return an arm with nothing optional left. ``k16v8`` is replaced by its formats for this model.

    ``dtype``: the compute type of arms that name none; ``auto`` is the model's own.
    """
    engine = config.engine or experiment.engine
    kv = k16v8.meaning(config.kv or native_kv(engine), model.native)
    path, weights = model.path, model.weights
    if engine_class(engine.name).checkpoint_format == "gguf" and model.gguf:  # two files may convert to one folder
        path, weights = model.gguf, file_sha256(model.gguf)
    dtype = config.dtype or dtype
    aliases = engine_class(engine.name).aliases
    shared, own = (
        _canonical_options(engine.name, options, aliases)
        for options in (experiment.engine_args if engine.name == experiment.engine.name else {}, config.engine_args)
    )
    without = _canonical_options(engine.name, dict.fromkeys(config.without, ""), aliases)
    options = {key: value for key, value in shared.items() if key not in without} | own
    env = {**experiment.env, **config.env}
    check_env(env)
    if engine.name == _HF and options.get(WEIGHTS) == NATIVE:
        del options[WEIGHTS]
    return Arm(
        name=_name(config),
        engine=engine.name,
        model=config.model or experiment.model,
        path=str(path),
        weights=weights,
        kv=kv,
        dtype=DTYPES[model.native] if dtype == "auto" else dtype,
        device=experiment.device,
        threads=experiment.threads or 1,
        options=tuple(sorted(options.items())),
        env=tuple(sorted(env.items())),
    )


def _canonical_options(engine: str, options: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Options with dashes and under the names that fidelab has for them.

    Raises:
        UsageError: If one is given twice, under two names.
    """
    found: dict[str, str] = {}
    for key, value in options.items():
        dashed = key.replace("_", "-")
        name = aliases.get(dashed, dashed)
        if name in found:
            raise UsageError(f"engine {engine}: {name} is given twice, also as {key}; leave one of them out")
        found[name] = value
    return found


def served_name(config: ArmConfig, engine: EngineConfig) -> ArmConfig:
    """Return an arm with the server's name of its model. The tokenizer stays that of the experiment's model."""
    if config.model is None or not engine_class(engine.name).is_server:
        return config
    args = {**config.engine_args, "model": config.model}
    return config.model_copy(update={"model": None, "name": _name(config), "engine_args": args})


def _name(config: ArmConfig) -> str:
    """Return the arm's name, by default what it differs in."""
    if config.name:
        return config.name
    differences = [
        Path(config.model).name if config.model else None,
        config.engine.name if config.engine else None,
        config.engine.image if config.engine else None,
        config.kv.label if config.kv else None,
        config.dtype,
        *(_host(value) if key == "base-url" else f"{key}={value}" for key, value in config.engine_args.items()),
        *(f"{key}={value}" for key, value in config.env.items()),
        *(f"without {key}" for key in config.without),
    ]
    return " ".join(filter(None, differences))


def _host(address: str) -> str:
    """A server's address, short: ``http://127.0.0.1:8000/v1`` → ``127.0.0.1:8000``; without a user and a password."""
    return re.sub(r"^\w+://([^/@]*@)?", "", address).rstrip("/").removesuffix("/v1") or address


def native_kv(engine: EngineConfig) -> KVSpec:
    """Return the format of an engine's cache if none is specified."""
    return KVSpec.parse(engine_class(engine.name).native_kv)


def inherited_kv(arm: ArmConfig, reference: ArmConfig, experiment: Experiment) -> KVSpec:
    """Return the KV format of an arm that names none: the reference's, or the native format of another engine."""
    own, base = (config.engine or experiment.engine for config in (arm, reference))
    same = own.name == base.name and reference.kv
    return reference.kv if same and reference.kv else native_kv(own)


def with_kv(arm: ArmConfig, kv: KVSpec) -> ArmConfig:
    """Return the arm with a KV format filled in. It keeps its name, since it does not differ in that format."""
    return arm if arm.kv else arm.model_copy(update={"kv": kv, "name": _name(arm) or kv.label})


def check_kv_name(config: ArmConfig, engine: EngineConfig, answers: EngineAnswers) -> None:
    """Refuse a format whose name the engine does not know. An engine without any format names is not installed.

    Raises:
        UnknownNameError: If the engine does not know the format. The message lists the formats that it knows.
    """
    if config.kv is None:
        return
    known = answers.kv_names()
    for fmt in (config.kv.k, config.kv.v):
        if known and fmt.name not in known:
            raise UnknownNameError(f"KV format of engine {engine.name}", fmt.name, known)


# ------------------------------------------------------------------------------------------- its server

_HOST = "127.0.0.1"
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
        serve = _in_its_image(experiment.serve, experiment, arm)
    repository, _, revision = arm.model.partition("@")
    is_hub = "snapshots" in Path(arm.path).parts  # as huggingface_hub keeps them
    inside = {here: there for there, here in serve.mounts.items()}
    path = repository if is_hub else move_folders(arm.path, inside)
    options = tuple((key, move_folders(value, inside)) for key, value in arm.options)
    pasted = bool(serve.program or serve.wrapper)
    named = replace(arm, path=path, model=path if pasted else arm.model, options=options)
    try:
        words = cls.serve_command(named, _HOST, PORTS.get(arm.engine, 8000))
        variables = {name: move_folders(value, inside) for name, value in cls.serve_variables(named).items()}
    except (NotSupportedError, ImportError):
        return None
    if is_hub and revision:
        words += ["--revision", revision]
    if pasted:
        words = _as_pasted(words, path, serve)
    elif is_hub or Path(arm.model).is_absolute():  # the path says the same
        words = _without_pair(words, *_ALIASES)
    if serve.wrapper:
        given = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
        return " ".join(map(_quoted, [*serve.wrapper[:-1], *given, serve.wrapper[-1], *words]))
    return " ".join([*(f"{name}={_quoted(value)}" for name, value in variables.items()), *map(_quoted, words)])


def _in_its_image(serve: ServeConfig, experiment: Experiment, arm: Arm) -> ServeConfig:
    """Return the pasted words with the image of the arm; empty where it runs in an installed engine."""
    if not serve.wrapper or not experiment.engine.image:
        return serve
    configs = (experiment.reference, *experiment.candidates, *cells_of(experiment))
    config = next((each for each in configs if _name(each) == arm.name), experiment.reference)
    image = (config.engine or experiment.engine).image
    return serve.model_copy(update={"wrapper": (*serve.wrapper[:-1], image)}) if image else ServeConfig()


def _as_pasted(words: Sequence[str], path: str, serve: ServeConfig) -> list[str]:
    """The words of an engine's server with the program, the host and what else goes into no arm as they were pasted."""
    at = words.index(path)
    rest = _without_pair(words[at + 1 :], "--host", "--port")
    return [*serve.program, *([serve.model_flag] if serve.model_flag else []), path, *rest, *serve.words]


def _without_pair(words: Sequence[str], *flags: str) -> list[str]:
    """Return the words without some flags and their values."""
    return [word for n, word in enumerate(words) if word not in flags and (n == 0 or words[n - 1] not in flags)]


def _quoted(word: str) -> str:
    """Shell-quote a word, with the home directory abbreviated to ``~``."""
    home = f"{Path.home()}/"
    return f"~/{shlex.quote(word.removeprefix(home))}" if word.startswith(home) else shlex.quote(word)


# ------------------------------------------------------------------------------------------- twins


def family(arm: Arm) -> tuple[str, ...]:
    """Return the key of an arm's family: engine, weights, compute type and formats. A family shares one twin."""
    return arm.engine, arm.weights, rounding_of(arm), arm.dtype, arm.kv.k.name, arm.kv.v.name


def twins_of(arms: Sequence[Arm]) -> dict[str, Arm]:
    """Return, by the name of each family's first arm, a twin with other last bits, if its engine can make one."""
    first = {family(arm): arm for arm in reversed(arms) if _JITTER not in dict(arm.options)}
    named = {arm.name: arm for arm in first.values() if engine_class(arm.engine).has_jitter}
    return {arm.name: _with_option(arm, _JITTER, "1") for arm in arms if arm.name in named}


# ------------------------------------------------------------------------------------------- attention


def same_attention(arms: Sequence[Arm]) -> tuple[list[Arm], str | None]:
    """Give one attention to all arms that are compared, and return the reason if that is not k16v8's on a GPU.

    Engine ``hf`` takes k16v8's kernels on a GPU where they hold an arm's formats.  A second kernel in the run moves a
    KLD by more than a good format does, so there all take them or none.  Arms that name an attention keep it.
    """
    free = [arm for arm in arms if _chooses(arm)]
    refusals = [f"{arm.name}: {reason}" for arm in free if (reason := hf_kernels.refusal(arm)) is not None]
    if not refusals:
        return list(arms), None
    return [_with_option(arm, ATTENTION, hf_kernels.THEIRS) if arm in free else arm for arm in arms], refusals[0]


def other_attention(reference: Arm, arm: Arm) -> str | None:
    """Return the attention that an arm of engine ``hf`` requests if the reference there requests another one.

    ``auto`` if only the reference names an attention.
    """
    if not arm.engine == reference.engine == _HF:
        return None
    asked, base = (dict(one.options).get(ATTENTION) for one in (arm, reference))
    return (asked or AUTO) if asked != base else None


def _chooses(arm: Arm) -> bool:
    return arm.engine == _HF and arm.device.startswith("cuda") and ATTENTION not in dict(arm.options)


def _with_option(arm: Arm, key: str, value: str) -> Arm:
    return replace(arm, options=tuple(sorted({**dict(arm.options), key: value}.items())))
