"""Profiles: the protocol of a published measurement, in stages, with its figures.

A profile's stage is an experiment, a command of fidelab, or a computation from published figures.  ``{name}`` in its
texts is replaced by a parameter of the profile (``model``, ``device``, …). ``{folder}`` is the stage's folder, and
``{stages}`` that of all stages. A variant (``tiny``) has other parameters and may replace parts of stages.

The folder ``experiments`` holds experiment files that ``fidelab compare -f NAME`` finds by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fidelab.config.load import apply_overrides, read_yaml, validate_as
from fidelab.core import shell_line
from fidelab.core.errors import ConfigError, UnknownNameError, nearest_first

_PROFILE_DIR = Path(__file__).parent
_EXPERIMENTS = _PROFILE_DIR / "experiments"
_PLACE = re.compile(r"\{(\w+)\}")
_FOLDERS = {"folder": "{folder}", "stages": "{stages}"}  # known only when a stage runs

Amount = Annotated[float, Field(gt=0)]
Value = str | int | float


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Needs(_Strict):
    """Requirements of a stage on the machine. Sizes are in GB (10^9 bytes); all GPUs are alike."""

    device: Literal["cpu", "gpu", "cuda"] | None = Field(default=None, description="kind of device")
    gpus: Annotated[int, Field(ge=1)] | None = Field(default=None, description="number of GPUs")
    gpu_memory: Amount | None = Field(default=None, description="GB of each GPU")
    memory: Amount | None = Field(default=None, description="GB of the host")
    disk: Amount | None = Field(default=None, description="GB free where runs are written")
    hours: Amount | None = Field(default=None, description="expected duration in hours, for information")
    packages: tuple[str, ...] = Field(default=(), description="modules that fidelab's interpreter can import")
    engines: tuple[str, ...] = Field(default=(), description="engines with an environment here")
    data: tuple[str, ...] = Field(default=(), description="sets of data: gsm8k, wikitext-2, or a file")
    stages: tuple[str, ...] = Field(default=(), description="stages of this profile that must have ended well")
    never: str | None = Field(default=None, description="why no machine can run it in this variant")


class Source(_Strict):
    """Source of the protocol and the expected figures."""

    title: str = Field(description="title of the document")
    url: str = Field(default="", description="public address; empty where the profile repeats nobody's measurement")
    setup: str = Field(default="", description="device, model and software of the source")


class Pins(_Strict):
    """Versions with which the profile was written."""

    models: dict[str, str | None] = Field(
        default_factory=dict, description="checkpoint → revision; null where its source names none"
    )
    packages: dict[str, str] = Field(default_factory=dict, description="package → version, for fidelab's interpreter")


class StageChange(_Strict):
    """Replacements of a variant."""

    needs: Needs | None = Field(default=None, description="needs, replacing the stage's")
    experiment: dict[str, Any] | None = Field(default=None, description="settings that override the experiment's")
    command: tuple[Value, ...] | None = Field(default=None, description="words, replacing the stage's")


class Computation(_Strict):
    """A figure that follows from others: a function of ``fidelab.studies.arithmetic`` and its arguments."""

    function: str = Field(description="name of the function")
    of: dict[str, Any] = Field(
        description="its arguments by name; a text such as '0.021' is a figure as printed, a number is exact"
    )


class Stage(_Strict):
    """An experiment, the words of a command of fidelab, or computations."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="name, unique in the profile; that of its folder")
    about: str = Field(default="", description="what it measures, in one line")
    needs: Needs = Field(default_factory=Needs, description="requirements on the machine")
    experiment: dict[str, Any] | None = Field(default=None, description="experiment, as fidelab compare -f takes it")
    command: tuple[Value, ...] | None = Field(
        default=None, min_length=1, description="command of fidelab, without that word; or k16v8 …"
    )
    compute: dict[str, Computation] | None = Field(
        default=None, min_length=1, description="name of a figure → its computation; nothing is measured"
    )
    variants: dict[str, StageChange] = Field(default_factory=dict, description="variant → its replacements")

    @model_validator(mode="after")
    def _check_kind(self) -> Stage:
        if [self.experiment, self.command, self.compute].count(None) != 2:
            raise ValueError("a stage has either 'experiment' or 'command' or 'compute'")
        return self


class Figure(_Strict):
    """A figure of the source, and where a stage's JSON has ours."""

    name: str = Field(description="name of the figure")
    stage: str = Field(description="stage that measures it")
    at: str = Field(description="path in the stage's JSON: key.key[name=x].key; a metric counts as its value")
    value: float | None = Field(default=None, description="value in the source; null where it has none")
    unit: str = Field(default="", description="unit, as in reports")
    divisor: Amount = Field(default=1, description="divisor of our value: 1073741824 where the source prints GiB")
    tolerance: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="largest difference at which both agree, usually half a unit of the last printed digit; null: the "
        "figures are not judged",
    )
    remark: str = Field(default="", description="why the figures differ, or what has to be known to read them")


class Variant(_Strict):
    """The same protocol at another size."""

    about: str = Field(description="purpose, in one line")
    parameters: dict[str, Value] = Field(default_factory=dict, description="parameters that differ")
    differences: tuple[str, ...] = Field(default=(), description="further differences from the source's")


class Profile(_Strict):
    """A profile as its file has it."""

    kind: Literal["profile"] = Field(description="profile")
    purpose: str = Field(description="question that the profile answers")
    source: Source = Field(description="source of the protocol")
    needs: Needs = Field(default_factory=Needs, description="needs of every stage")
    pins: Pins = Field(default_factory=Pins, description="versions that the profile was written for")
    parameters: dict[str, Value] = Field(
        description="name → value that replaces {name}; 'model' is one where a model runs"
    )
    stages: tuple[Stage, ...] = Field(min_length=1, description="stages, in their order")
    expected: tuple[Figure, ...] = Field(default=(), description="figures of the source")
    differences: tuple[str, ...] = Field(default=(), description="differences of this protocol from the source's")
    variants: dict[str, Variant] = Field(default_factory=dict, description="name → variant")
    collect: bool = Field(default=False, description="put the output of the stages into the record, for sharing")

    @model_validator(mode="after")
    def _names_exist(self) -> Profile:
        names = [stage.name for stage in self.stages]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two stages have the name {twice!r}")
        named = [(f"expected figure {figure.name!r}", "stage", figure.stage, names) for figure in self.expected]
        for place, stage in enumerate(self.stages):
            where, changed = f"stage {stage.name!r}", [change.needs or Needs() for change in stage.variants.values()]
            wanted = [name for needs in (stage.needs, *changed) for name in needs.stages]
            named += [(where, "earlier stage", name, names[:place]) for name in wanted]
            named += [(where, "variant", name, list(self.variants)) for name in stage.variants]
        for where, kind, name, known in named:
            if name not in known:
                raise ValueError(f"{where}: unknown {kind} {name!r}; known: {', '.join(known) or 'none'}")
        return self


class ResolvedProfile(Profile):
    """A profile in one variant, its parameters put in; :func:`fidelab.studies.profiles.run_profile` takes it."""

    name: str
    variant: str | None


def names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.stem for path in _PROFILE_DIR.glob("*.yaml"))


def load_profile(name: str, trusted: Sequence[Path] = ()) -> Profile:
    """Return a profile that comes with the package, or in a file that the user trusts.

    Raises:
        UnknownNameError: the profile does not exist.
        ConfigError: If the file is not a profile, or is not trusted.
    """
    if name in names():
        path = _PROFILE_DIR / f"{name}.yaml"
    elif not (path := Path(name)).is_file():
        raise UnknownNameError("profile", name, names())
    elif not {path.resolve(), path.resolve().parent} & {file.resolve() for file in trusted}:
        raise ConfigError(
            f"{name} may run any command of fidelab, which a file may not do unasked: if you trust it, add "
            f"{shell_line('--trust', name)}"
        )
    data = read_yaml(path, keys="'kind: profile' and 'stages:'", kind="the file of a profile")
    if data.get("kind") != "profile":
        raise ConfigError(
            f"{name} is not a profile: 'kind: profile' is missing (an experiment is run by fidelab compare -f)"
        )
    return validate_as(Profile, data, name)


def resolve(name: str, profile: Profile, variant: str | None = None, overrides: Sequence[str] = ()) -> ResolvedProfile:
    """Return the profile as it would be run.

    Args:
        name: The user's name for the profile.
        profile: The profile as loaded.
        variant: One of its variants; ``None`` means the protocol at its full size.
        overrides: ``NAME=VALUE`` of parameters, which take precedence over the variant's.

    Raises:
        UnknownNameError: If the variant or parameter does not exist.
        ConfigError: If a text names a parameter that the profile does not have, or a parameter's value fits no setting.
    """
    if variant is not None and variant not in profile.variants:
        raise UnknownNameError(f"variant of profile {name}", variant, profile.variants)
    chosen = profile.variants[variant] if variant else Variant(about="")
    values, given = {**profile.parameters, **chosen.parameters}, dict[str, Any]()
    apply_overrides(given, overrides)
    if unknown := next((key for key in given if key not in values), None):
        raise UnknownNameError(f"parameter of profile {name}", unknown, values)
    values |= given
    stages = []
    for stage in profile.stages:
        change = stage.variants.get(variant or "", StageChange())
        always = Needs(stages=stage.needs.stages, data=stage.needs.data, packages=stage.needs.packages)
        own = (change.needs or Needs(),) if variant else (profile.needs, stage.needs)
        needs = dict[str, Any]()  # of all; of the same amount the last one counts
        for part in (always, *own):
            for key, value in part.model_dump(exclude_defaults=True).items():
                needs[key] = (*dict.fromkeys((*needs.get(key, ()), *value)),) if isinstance(value, tuple) else value
        data = {
            "name": stage.name,
            "about": stage.about,
            "needs": needs,
            "experiment": None if stage.experiment is None else _over(stage.experiment, change.experiment or {}),
            "command": change.command or stage.command,
            "compute": stage.model_dump()["compute"],
        }
        stages.append(fill(data, {**values, **_FOLDERS}, f"{name}: stage {stage.name!r}"))
    expected = [
        fill(figure.model_dump(), {**values, **_FOLDERS}, f"{name}: figure {figure.name!r}")
        for figure in profile.expected
    ]
    replaced = {
        **{"name": name, "variant": variant, "parameters": values, "stages": stages, "expected": expected},
        **{"needs": {}, "variants": {}, "differences": [*profile.differences, *chosen.differences]},
    }
    return validate_as(ResolvedProfile, {**profile.model_dump(), **replaced}, name)


def _over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others over them.

    Groups are merged, all else is replaced, and null removes a key.
    """
    merged = dict(base)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _over(merged[key], value)
        else:
            merged[key] = value
    return merged


def fill(value: Any, known: Mapping[str, Value], where: str) -> Any:
    """Fill in parameters in all texts of a value; a text that is only one parameter becomes its value.

    Raises:
        ConfigError: If a text names something that is not ``known``.
    """
    if isinstance(value, Mapping):
        return {key: fill(inner, known, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [fill(inner, known, where) for inner in value]
    if not isinstance(value, str):
        return value
    if unknown := next((name for name in _PLACE.findall(value) if name not in known), None):
        available = ", ".join(nearest_first(unknown, known))
        raise ConfigError(f"{where}: {{{unknown}}} is not a parameter; available: {available}")
    whole = _PLACE.fullmatch(value)
    return known[whole[1]] if whole else _PLACE.sub(lambda match: str(known[match[1]]), value)


# ------------------------------------------------------------------------------------------------- experiments


def experiments() -> list[str]:
    """Return the experiment files that come with the package, by name."""
    return sorted(path.stem for path in _EXPERIMENTS.glob("*.yaml"))


def find_experiment(path: Path) -> Path:
    """Return the file that a user means: one that exists, else the bundled experiment NAME or experiments/NAME.yaml.

    Raises:
        ConfigError: If there is neither.  The message lists the bundled experiments, and how to run a profile.
    """
    bundled = _EXPERIMENTS / f"{path.stem}.yaml"
    if path.exists():
        return path
    if path.parent in (Path(), Path("experiments")) and path.suffix in ("", ".yaml") and bundled.exists():
        return bundled
    known = ", ".join(nearest_first(path.stem, experiments()))
    hint = f"; {path} is a profile: {shell_line('fidelab', 'reproduce', path)}" if str(path) in names() else ""
    raise ConfigError(f"{path} does not exist; name an experiment file or a bundled one: {known}{hint}")
