"""Resolve one arm from the user's input: its name, its KV format, and the settings that it inherits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fidelab.config.schema import ArmConfig, EngineConfig, Experiment
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import UsageError
from fidelab.engines import k16v8
from fidelab.engines.base import engine_class
from fidelab.engines.hf import kernels as hf_kernels
from fidelab.engines.hf.kernels import ATTENTION, AUTO
from fidelab.engines.hf.weights import NATIVE, WEIGHTS
from fidelab.engines.variables import check_env
from fidelab.environments.asked import native_kv
from fidelab.models import Model
from fidelab.models.weights import file_sha256

DTYPES = {"bf16": "bfloat16", "f16": "float16"}


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
    _refuse_flags_in_env(engine.name, env)
    if options.get(WEIGHTS) == NATIVE and WEIGHTS in engine_class(engine.name).options:
        del options[WEIGHTS]
    return Arm(
        name=config.label,
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


def _refuse_flags_in_env(engine: str, env: Mapping[str, str]) -> None:
    """Refuse variables that only the engine's server reads.

    Raises:
        UsageError: If there is one. The message says what to write.
    """
    dialect = engine_class(engine).dialect
    for name in env:
        if dialect is not None and dialect.variable_prefix and name.startswith(dialect.variable_prefix):
            option = dialect.names.get(dialect.variables.get(name, "").removeprefix("no-"), "")
            fields = {"": "", "@k": "kv=K/V", "@v": "kv=K/V", "@threads": "threads", "@model": "model"}
            own = fields.get(str(option), f"{option}=VALUE")
            instead = f"write {own}" if own else "leave it out"
            raise UsageError(f"env.{name} is read by {dialect.programs[0]} only, not by engine {engine}: {instead}")


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
    return config.model_copy(update={"model": None, "name": config.label, "engine_args": args})


def inherited_kv(arm: ArmConfig, reference: ArmConfig, experiment: Experiment) -> KVSpec:
    """Return the KV format of an arm that names none: the reference's, or the native format of another engine."""
    own, base = (config.engine or experiment.engine for config in (arm, reference))
    same = own.name == base.name and reference.kv
    return reference.kv if same and reference.kv else native_kv(own)


def with_kv(arm: ArmConfig, kv: KVSpec) -> ArmConfig:
    """Return the arm with a KV format filled in. It keeps its name, since it does not differ in that format."""
    return arm if arm.kv else arm.model_copy(update={"kv": kv, "name": arm.label or kv.label})


# ------------------------------------------------------------------------------------------- attention


def same_attention(arms: Sequence[Arm]) -> tuple[list[Arm], str | None]:
    """Give one attention to all arms that are compared, and return the reason if that is not k16v8's on a GPU.

    Engine ``hf`` takes k16v8's kernels on a GPU where they hold an arm's formats.  A second kernel in the run moves a
    KLD by more than a good format does, so there all take them or none.  Arms that name an attention keep it.
    """
    ours = (arm for arm in arms if engine_class(arm.engine).shares_attention and arm.device.startswith("cuda"))
    free = [arm for arm in ours if ATTENTION not in dict(arm.options)]
    refusals = [f"{arm.name}: {reason}" for arm in free if (reason := hf_kernels.refusal(arm)) is not None]
    if not refusals:
        return list(arms), None
    chosen = {ATTENTION: hf_kernels.THEIRS}
    theirs = [replace(arm, options=tuple(sorted({**dict(arm.options), **chosen}.items()))) for arm in free]
    return [theirs[free.index(arm)] if arm in free else arm for arm in arms], refusals[0]


def other_attention(reference: Arm, arm: Arm) -> str | None:
    """Return the attention that an arm of engine ``hf`` requests if the reference there requests another one.

    ``auto`` if only the reference names an attention.
    """
    if arm.engine != reference.engine or not engine_class(arm.engine).shares_attention:
        return None
    asked, base = (dict(one.options).get(ATTENTION) for one in (arm, reference))
    return (asked or AUTO) if asked != base else None
