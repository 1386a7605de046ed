"""Schema → settings: names looked up, model found, arms complete.

What cannot be is found here, before anything runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from fidelab.axes import AXES
from fidelab.axes.base import Axis
from fidelab.config.load import explain_validation
from fidelab.config.schema import ArmConfig, Experiment
from fidelab.core import Arm, FormatSpec, KVSpec, usable_cores
from fidelab.engines import ENGINES
from fidelab.engines.base import Engine, Verdict
from fidelab.errors import ConfigError, OutputError, UnknownNameError, UsageError
from fidelab.models import Model, resolve
from fidelab.models.weights import file_sha256

__all__ = ["Settings", "resolve_arm", "resolve_experiment"]

_DTYPES = {"bf16": "bfloat16", "f16": "float16"}
_BITS16 = ("k16v8",)


@dataclass(frozen=True)
class Settings:
    """A resolved experiment.  ``unsupported`` maps an arm's name to why its engine cannot run it."""

    experiment: Experiment
    model: Model
    reference: Arm
    control: Arm | None
    candidates: tuple[Arm, ...]
    axes: Mapping[str, Axis]
    unsupported: Mapping[str, str]
    versions: Mapping[str, str]
    output_dir: Path
    captures_dir: Path

    def arms(self) -> list[Arm]:
        """Reference, control, candidates: in the order in which they run."""
        return [self.reference, *([self.control] if self.control else []), *self.candidates]


def resolve_experiment(experiment: Experiment) -> Settings:
    """Look everything up.

    Raises:
        FidelabError: one line naming what was wrong and what to do.
    """
    engine: type[Engine] = ENGINES.load(experiment.engine)
    axes = {name: _axis(name, values) for name, values in experiment.axes.items()}
    _check_kv_names(experiment, engine)
    model = resolve(experiment.model)
    if (model.kind == "fake") != (experiment.engine == "fake"):
        raise UsageError("model 'fake' and engine 'fake' go together: give both or neither")
    experiment = _fill(experiment, model, axes)
    reference = resolve_arm(experiment, experiment.reference, engine, model)
    candidates = tuple(resolve_arm(experiment, arm, engine, model) for arm in experiment.candidates)
    _refuse_twins(candidates)
    control = _control(experiment, engine, model, reference)
    arms = [reference, *([control] if control else []), *candidates]
    _refuse_namesakes(arms)
    verdicts: dict[str, Verdict] = {arm.name: engine.supports(arm) for arm in arms}
    if not verdicts[reference.name].ok:
        raise UsageError(f"the reference cannot run on engine {experiment.engine}: {verdicts[reference.name].reason}")
    output = _folder(Path(experiment.output_dir), "--output-dir")
    captures = _folder(Path(experiment.captures_dir or output / "captures"), "captures_dir")
    return Settings(
        experiment=experiment,
        model=model,
        reference=reference,
        control=control,
        candidates=candidates,
        axes=axes,
        unsupported={name: verdict.reason for name, verdict in verdicts.items() if not verdict.ok},
        versions=engine.versions(),
        output_dir=output,
        captures_dir=captures,
    )


def _fill(experiment: Experiment, model: Model, axes: Mapping[str, Axis]) -> Experiment:
    """Every default and "auto" replaced by what it means here, so that the resolved file says it."""
    return experiment.model_copy(
        update={
            "dtype": _DTYPES[model.native] if experiment.dtype == "auto" else experiment.dtype,
            "threads": experiment.threads or usable_cores(),
            "device": _device(experiment.device, model),
            "axes": {name: axis.settings.model_dump(mode="json") for name, axis in axes.items()},
        }
    )


def _device(asked: str, model: Model) -> str:
    if model.kind == "fake" or asked == "cpu":
        return "cpu"
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(asked).type
    except RuntimeError:
        raise UsageError(f"--device {asked!r} is not a device; write cpu, cuda or cuda:0") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {asked}: no usable GPU here; pass --device cpu")
    return asked


def resolve_arm(experiment: Experiment, config: ArmConfig, engine: type[Engine], model: Model) -> Arm:
    """One arm with nothing optional left; ``k16v8`` becomes what it means for this model."""
    written = KVSpec.parse(config.kv)
    kv = replace(written, k=_meaning(written.k, "k", model), v=_meaning(written.v, "v", model))
    engine.check_kv(kv)
    path, weights = model.path, model.weights
    if engine.form == "gguf" and model.gguf:  # two files may convert to one folder and yet compute differently
        path, weights = model.gguf, file_sha256(model.gguf)
    return Arm(
        name=config.name or config.kv,
        engine=experiment.engine,
        model=experiment.model,
        path=str(path),
        weights=weights,
        kv=kv,
        dtype=experiment.dtype,
        device=experiment.device,
        threads=experiment.threads or 1,
        options=tuple(sorted({**experiment.engine_args, **config.engine_args}.items())),
    )


def _meaning(fmt: FormatSpec, side: str, model: Model) -> FormatSpec:
    """``k16v8``: keys in the model's native 16-bit type, values fp8_e4m3 with scale 1.0, saturating."""
    if fmt.name not in _BITS16:
        return fmt
    if fmt.options:
        raise UsageError(
            f"KV format {fmt}: k16v8 takes no options; write K/V, as in '{model.native}/fp8_e4m3[scale=per-token-head]'"
        )
    return FormatSpec(model.native) if side == "k" else FormatSpec("fp8_e4m3")


def _check_kv_names(experiment: Experiment, engine: type[Engine]) -> None:
    """Unknown names are found before a model is fetched."""
    known = list(engine.kv_names())
    known += [name for name in _BITS16 if "fp8_e4m3" in known]
    configs = [experiment.reference, *experiment.candidates]
    if isinstance(experiment.control, ArmConfig):
        configs.append(experiment.control)
    for config in configs:
        spec = KVSpec.parse(config.kv)
        for fmt in (spec.k, spec.v):
            if fmt.name not in known:
                raise UnknownNameError(f"KV format of engine {experiment.engine}", fmt.name, known)


def _control(experiment: Experiment, engine: type[Engine], model: Model, reference: Arm) -> Arm | None:
    if experiment.control == "none":
        return None
    if experiment.control == "auto":
        name = engine.control_for(reference.kv, model.native)
        return None if name is None else resolve_arm(experiment, ArmConfig(kv=name), engine, model)
    return resolve_arm(experiment, experiment.control, engine, model)


def _refuse_twins(candidates: tuple[Arm, ...]) -> None:
    names: set[str] = set()
    prints: dict[str, str] = {}
    for arm in candidates:
        twin = prints.get(arm.fingerprint())
        if twin is not None or arm.name in names:
            same = f" (it means the same as {twin!r})" if twin not in (None, arm.name) else ""
            raise UsageError(f"candidate {arm.name!r} is given twice{same}; name each once")
        names.add(arm.name)
        prints[arm.fingerprint()] = arm.name


def _refuse_namesakes(arms: Sequence[Arm]) -> None:
    """Reports and verdicts know an arm by its name."""
    prints: dict[str, str] = {}
    for arm in arms:
        if prints.setdefault(arm.name, arm.fingerprint()) != arm.fingerprint():
            raise UsageError(f"two different arms are named {arm.name!r}; give one of them another 'name'")


def _axis(name: str, values: Mapping[str, object]) -> Axis:
    cls: type[Axis] = AXES.load(name)
    try:
        return cls(cls.Settings.model_validate(dict(values)))
    except ValidationError as error:
        raise ConfigError(explain_validation(error, "settings", cls.Settings, f"axes.{name}")) from None


def _folder(path: Path, what: str) -> Path:
    """An existing or creatable folder, absolute."""
    path = path.expanduser().absolute()
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise OutputError(f"{what} {path}: {part} is a file; name a folder")
            if not os.access(part, os.W_OK):
                raise OutputError(f"{what} {path}: {part} is not writable; name another folder")
            break
    return path
