"""Profiles: the protocol of a published measurement, in stages, with its figures.

A profile's stage is an experiment or a command of fidelab.  ``{name}`` in its texts is replaced by a parameter of the
profile (``model``, ``device``, …). ``{folder}`` is the stage's folder, and ``{stages}`` that of all stages. A variant
(``tiny``) has other parameters and may replace parts of stages.

The folder ``experiments`` holds experiment files that ``fidelab compare -f NAME`` finds by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fidelab.config.load import read_yaml, validate_as
from fidelab.core.errors import ConfigError, UnknownNameError, UsageError, nearest_first

_PROFILE_DIR = Path(__file__).parent
_EXPERIMENTS = _PROFILE_DIR / "experiments"
_STRICT_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
_NAME = r"^[a-z0-9][a-z0-9-]*$"  # a stage is a folder of this name
_PLACE = re.compile(r"\{(\w+)\}")
_FOLDERS = ("folder", "stages")  # placeholders that are known only when a stage runs

Amount = Annotated[float, Field(gt=0)]
Value = str | int | float


class Needs(BaseModel):
    """Requirements of a stage on the machine. Sizes are in GB (10^9 bytes); all GPUs are alike."""

    model_config = _STRICT_CONFIG

    device: Literal["cpu", "gpu", "cuda", "rocm"] | None = Field(default=None, description="kind of device")
    gpus: Annotated[int, Field(ge=1)] | None = Field(default=None, description="number of GPUs")
    gpu_memory: Amount | None = Field(default=None, description="GB of each GPU")
    memory: Amount | None = Field(default=None, description="GB of the host")
    disk: Amount | None = Field(default=None, description="GB free where runs are written")
    cores: Annotated[int, Field(ge=1)] | None = Field(default=None, description="usable CPU cores")
    hours: Amount | None = Field(default=None, description="expected duration in hours, for information")
    packages: tuple[str, ...] = Field(default=(), description="modules that fidelab's interpreter can import")
    engines: tuple[str, ...] = Field(default=(), description="engines with an environment here")
    data: tuple[str, ...] = Field(default=(), description="sets of data: gsm8k, wikitext-2, or a file")
    stages: tuple[str, ...] = Field(default=(), description="stages of this profile that must have ended well")
    never: str | None = Field(default=None, description="why no machine can run it in this variant")


class Source(BaseModel):
    """Source of the protocol and the expected figures."""

    model_config = _STRICT_CONFIG

    title: str = Field(description="title of the document")
    url: str = Field(default="", description="public address; empty where the profile repeats nobody's measurement")
    setup: str = Field(default="", description="device, model and software of the source")


class Pins(BaseModel):
    """Versions with which the profile was written."""

    model_config = _STRICT_CONFIG

    models: dict[str, str | None] = Field(
        default_factory=dict, description="checkpoint → revision; null where its source names none"
    )
    packages: dict[str, str] = Field(default_factory=dict, description="package → version, for fidelab's interpreter")


class StageChange(BaseModel):
    """Replacements of a variant."""

    model_config = _STRICT_CONFIG

    needs: Needs | None = Field(default=None, description="needs, replacing the stage's")
    experiment: dict[str, Any] | None = Field(default=None, description="settings that override the experiment's")
    command: tuple[Value, ...] | None = Field(default=None, description="words, replacing the stage's")


class Stage(BaseModel):
    """An experiment, or the words of a command of fidelab."""

    model_config = _STRICT_CONFIG

    name: str = Field(pattern=_NAME, description="name, unique in the profile")
    about: str = Field(default="", description="what it measures, in one line")
    needs: Needs = Field(default_factory=Needs, description="requirements on the machine")
    experiment: dict[str, Any] | None = Field(default=None, description="experiment, as fidelab compare -f takes it")
    command: tuple[Value, ...] | None = Field(
        default=None, description="command of fidelab, without that word; or k16v8 …"
    )
    variants: dict[str, StageChange] = Field(default_factory=dict, description="variant → its replacements")

    @model_validator(mode="after")
    def _check_kind(self) -> Stage:
        if (self.experiment is None) == (self.command is None):
            raise ValueError("a stage has either 'experiment' or 'command'")
        if self.command is not None and not self.command:
            raise ValueError("command: name a command of fidelab or k16v8")
        return self


class Figure(BaseModel):
    """A figure of the source, and where a stage's JSON has ours."""

    model_config = _STRICT_CONFIG

    name: str = Field(description="name of the figure")
    stage: str = Field(description="stage that measures it")
    at: str = Field(description="path in the stage's JSON: key.key[name=x].key; a metric counts as its value")
    value: float | None = Field(default=None, description="value in the source; null where it has none")
    unit: str = Field(default="", description="unit, as in reports")


class Variant(BaseModel):
    """The same protocol at another size."""

    model_config = _STRICT_CONFIG

    about: str = Field(description="purpose, in one line")
    needs: Needs = Field(default_factory=Needs, description="default needs of stages in this variant")
    parameters: dict[str, Value] = Field(default_factory=dict, description="parameters that differ")
    differences: tuple[str, ...] = Field(default=(), description="further differences from the source's")


class Profile(BaseModel):
    """A profile as its file has it."""

    model_config = _STRICT_CONFIG

    kind: Literal["profile"] = Field(description="profile")
    purpose: str = Field(description="question that the profile answers")
    source: Source = Field(description="source of the protocol")
    needs: Needs = Field(default_factory=Needs, description="needs of every stage")
    pins: Pins = Field(default_factory=Pins, description="versions that the profile was written for")
    parameters: dict[str, Value] = Field(description="name → value that replaces {name}; 'model' is one")
    stages: tuple[Stage, ...] = Field(min_length=1, description="stages, in their order")
    expected: tuple[Figure, ...] = Field(default=(), description="figures of the source")
    differences: tuple[str, ...] = Field(default=(), description="differences of this protocol from the source's")
    variants: dict[str, Variant] = Field(default_factory=dict, description="name → variant")
    collect: bool = Field(default=False, description="put the output of the stages into the record, for sharing")

    @field_validator("parameters")
    @classmethod
    def _have_no_folder(cls, value: dict[str, Value]) -> dict[str, Value]:
        for name in value:
            if name in _FOLDERS or not name.isidentifier():
                raise ValueError(f"{name!r} cannot be the name of a parameter")
        return value

    @model_validator(mode="after")
    def _names_exist(self) -> Profile:
        stages = [stage.name for stage in self.stages]
        if twice := next((name for name in stages if stages.count(name) > 1), None):
            raise ValueError(f"two stages have the name {twice!r}")
        for place, stage in enumerate(self.stages):
            changes = stage.variants.values()
            wanted = {name for needs in (stage.needs, *(c.needs for c in changes if c.needs)) for name in needs.stages}
            for name in sorted(wanted):
                if name not in stages[:place]:
                    raise ValueError(f"stage {stage.name!r} needs {name!r}, which is not a stage before it")
            for name in stage.variants:
                if name not in self.variants:
                    raise ValueError(f"stage {stage.name!r} has variant {name!r}, which is not in 'variants'")
            for change in changes:
                if (change.experiment is not None and stage.experiment is None) or (
                    change.command is not None and stage.command is None
                ):
                    raise ValueError(f"stage {stage.name!r}: a variant cannot turn an experiment into a command")
        for figure in self.expected:
            if figure.stage not in stages:
                nearest = nearest_first(figure.stage, stages)[0]
                raise ValueError(
                    f"expected figure {figure.name!r}: unknown stage {figure.stage!r}; did you mean {nearest!r}?"
                )
        return self


class Resolved(BaseModel):
    """A profile in one variant, its parameters put in; :func:`fidelab.studies.profiles.run_profile` takes it."""

    model_config = _STRICT_CONFIG

    name: str
    variant: str | None
    purpose: str
    source: Source
    pins: Pins
    parameters: dict[str, Value]
    stages: tuple[Stage, ...]
    expected: tuple[Figure, ...]
    differences: tuple[str, ...]
    collect: bool


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
    elif not any(path.resolve() in (file.resolve(), *file.resolve().glob("*")) for file in trusted):
        raise ConfigError(
            f"{name} may run any command of fidelab, which a file may not do unasked: if you trust it, add "
            f"--trust {name}"
        )
    data = read_yaml(path, keys="'kind: profile' and 'stages:'")
    if data.get("kind") != "profile":
        raise ConfigError(
            f"{name} is not a profile: 'kind: profile' is missing (an experiment is run by fidelab compare -f)"
        )
    return validate_as(Profile, data, name)


def resolve(
    name: str, profile: Profile, variant: str | None = None, parameters: Mapping[str, Value] | None = None
) -> Resolved:
    """Return the stages as they would be run.

    Args:
        name: The user's name for the profile.
        profile: The profile as loaded.
        variant: One of its variants; ``None`` means the protocol at its full size.
        parameters: Values from the command line, which take precedence over the variant's.

    Raises:
        UnknownNameError: If the variant or parameter does not exist.
        ConfigError: If a text names a parameter that the profile does not have, or a parameter's value fits no setting.
    """
    if variant is not None and variant not in profile.variants:
        raise UnknownNameError(f"variant of profile {name}", variant, profile.variants)
    chosen = profile.variants[variant] if variant else Variant(about="")
    values = {**profile.parameters, **chosen.parameters}
    for key, value in (parameters or {}).items():
        if key not in values:
            raise UnknownNameError(f"parameter of profile {name}", key, values)
        values[key] = value
    known = {**values, **{key: f"{{{key}}}" for key in _FOLDERS}}
    stages = []
    for stage in profile.stages:
        change = stage.variants.get(variant or "", StageChange())
        own = change.needs or (chosen.needs if variant else merged_needs(profile.needs, stage.needs))
        needed = merged_needs(Needs(stages=stage.needs.stages, data=stage.needs.data), own)
        fields: dict[str, Any] = {
            "name": stage.name,
            "about": stage.about,
            "experiment": None if stage.experiment is None else _over(stage.experiment, change.experiment or {}),
            "command": change.command or stage.command,
        }
        for key in ("experiment", "command"):
            fields[key] = _filled(fields[key], known, f"{name}: stage {stage.name!r}")
        needs = _filled(needed.model_dump(exclude_defaults=True), known, f"{name}: stage {stage.name!r}")
        stages.append(validate_as(Stage, {**fields, "needs": needs}, name, f"stage {stage.name!r}"))
    return Resolved(
        name=name,
        variant=variant,
        purpose=profile.purpose,
        source=profile.source,
        pins=profile.pins,
        parameters=values,
        stages=tuple(stages),
        expected=tuple(
            validate_as(Figure, _filled(figure.model_dump(), known, where), name, f"figure {figure.name!r}")
            for figure in profile.expected
            for where in (f"{name}: figure {figure.name!r}",)
        ),
        differences=(*profile.differences, *chosen.differences),
        collect=profile.collect,
    )


def parse_parameters(words: Sequence[str]) -> dict[str, Value]:
    """Parse ``name=value`` words; values are read as YAML.

    Raises:
        UsageError: If a word does not have this form.
    """
    found: dict[str, Value] = {}
    for word in words:
        key, equals, text = word.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        if not equals or not key or isinstance(value, list | dict) or value is None:
            raise UsageError(f"--set {word!r}: write name=value, the name being a parameter of the profile")
        found[key] = str(value) if not isinstance(value, int | float) or isinstance(value, bool) else value
    return found


def merged_needs(first: Needs, second: Needs) -> Needs:
    """Return both requirements; if both state the same amount, the second one counts."""
    lists = {
        key: tuple(dict.fromkeys((*getattr(first, key), *getattr(second, key))))
        for key in ("packages", "engines", "data", "stages")
    }
    return Needs.model_validate(
        {**first.model_dump(exclude_none=True), **second.model_dump(exclude_none=True), **lists}
    )


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


def _filled(value: Any, known: Mapping[str, Value], where: str) -> Any:
    """Fill in parameters; a text that is only one parameter becomes its value."""
    if isinstance(value, Mapping):
        return {key: _filled(inner, known, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(inner, known, where) for inner in value]
    if not isinstance(value, str):
        return value
    for name in _PLACE.findall(value):
        if name not in known:
            raise ConfigError(
                f"{where}: {{{name}}} is not a parameter; available: {', '.join(nearest_first(name, known))}"
            )
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
    if path.exists():
        return path
    is_bundled = path.parent in (Path(), Path("experiments")) and path.suffix in ("", ".yaml")
    if is_bundled and path.stem in experiments():
        return _EXPERIMENTS / f"{path.stem}.yaml"
    known = ", ".join(nearest_first(path.stem, experiments()))
    hint = f"; {path} is a profile: fidelab reproduce {path}" if str(path) in names() else ""
    raise ConfigError(f"{path} does not exist; name an experiment file or a bundled one: {known}{hint}")
