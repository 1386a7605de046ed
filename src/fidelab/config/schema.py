"""The experiment as users write it (pydantic).  Optional fields stay optional here; ``plan`` resolves them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_serializer,
    model_validator,
)

from fidelab.config.arms import arm_fields
from fidelab.config.grid import Levels, cell_fields, check_vary, levels_of, option_key, parse_vary
from fidelab.core import KVSpec
from fidelab.core.amounts import parse_seconds, parse_tokens
from fidelab.core.errors import UsageError
from fidelab.core.names import AUTO_TEXT
from fidelab.core.share import Share, WholeShare
from fidelab.engines import DEFAULT, engine_name
from fidelab.engines.base import runs_own_program

_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")  # docker would take a leading dash for a flag

_OPTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}")

_STRICT_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _default_axes() -> dict[str, dict[str, Any]]:
    return {"trajectory": {}, "kld": {}}


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(BaseModel):
    """An engine, and the environment in which it runs; a bare name where that is found by itself."""

    model_config = _STRICT_CONFIG

    name: str = Field(description="engine")
    python: str | None = Field(default=None, description="interpreter of the engine's environment")
    image: str | None = Field(default=None, description="container image with the engine, run by docker or podman")
    pythonpath: tuple[str, ...] = Field(default=(), description="folders whose modules precede the engine's")
    bin: str | None = Field(default=None, description="folder of own programs of llama.cpp: llama-perplexity runs")

    @field_validator("name")
    @classmethod
    def _canonical_name(cls, value: str) -> str:
        return engine_name(value)

    @field_validator("image")
    @classmethod
    def _is_reference(cls, value: str | None) -> str | None:
        if value is not None and not _IMAGE.fullmatch(value):
            raise ValueError(f"{value!r} is not a valid image reference: use repository:tag or repository@digest")
        return value

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _programs_alone(self) -> Self:
        if self.bin is not None and (self.python or self.image or self.pythonpath or not runs_own_program(self.name)):
            raise ValueError(
                "bin names the user's own llama.cpp: engine llamacpp, without python, image and pythonpath"
            )
        return self

    def all_fields(self) -> dict[str, Any]:
        """Return the fields as plain data, also where a bare name would do."""
        return {
            "name": self.name,
            "python": self.python,
            "image": self.image,
            **({"pythonpath": list(self.pythonpath)} if self.pythonpath else {}),
            **({"bin": self.bin} if self.bin else {}),
        }

    @model_serializer
    def _serialize_compact(self) -> str | dict[str, Any]:
        environment = {"python": self.python, "image": self.image, "pythonpath": [*self.pythonpath], "bin": self.bin}
        environment = {key: value for key, value in environment.items() if value}
        return {"name": self.name, **environment} if environment else self.name


def _text_values(value: Any) -> Any:
    return {key: _as_text(item) for key, item in value.items()} if isinstance(value, dict) else value


def _as_text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case dict() | list():
            return json.dumps(value)
        case _:
            return str(value)


def _dashed(value: Any) -> Any:
    """Write names with dashes, as command lines have them."""
    if not isinstance(value, dict):
        return value
    names = [str(key).replace("_", "-") for key in value]
    if (odd := next((name for name in names if not _OPTION_NAME.fullmatch(name)), None)) is not None:
        raise ValueError(f"{odd!r} is not the name of an option: write letters, digits, dashes and dots")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is given twice, with dashes and with underscores")
    return dict(zip(names, _text_values(value).values(), strict=True))


Variables = Annotated[dict[str, str], BeforeValidator(_text_values)]
"""Environment variables; files may hold numbers."""

Options = Annotated[dict[str, str], BeforeValidator(_dashed)]
"""Engine options; files may hold numbers, booleans (``yes``, ``no``), and lists and mappings, which become JSON."""


def _kv(value: Any, handler: ValidatorFunctionWrapHandler) -> KVSpec:
    """Parse a format's text; a parsed format stays as it is."""
    if isinstance(value, KVSpec):
        return value
    if not isinstance(value, str):
        raise ValueError("write the KV format as text: a name, or K/V, with options in brackets")
    try:
        return KVSpec.parse(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


KVFormat = Annotated[InstanceOf[KVSpec], WrapValidator(_kv), PlainSerializer(lambda spec: spec.label, return_type=str)]
"""Written as text and read once; files hold what the user wrote."""


class ArmConfig(BaseModel):
    """One configuration: its KV format, and what differs from the experiment's defaults.

    Files may name a ``preset``, too: :mod:`fidelab.config.presets` reads it before this class sees the configuration.
    """

    model_config = _STRICT_CONFIG

    kv: KVFormat | None = Field(default=None, description="KV format: a name, K/V, with options in brackets")
    name: str | None = Field(
        default=None, description="name of the configuration in reports; by default its differences"
    )
    engine: EngineConfig | None = Field(default=None, description="engine of this configuration only")
    model: str | None = Field(default=None, description="checkpoint only of this configuration, of the same tokenizer")
    dtype: Dtype | None = Field(default=None, description="compute type of this configuration only")
    engine_args: Options = Field(default_factory=dict, description="engine options of this configuration only")
    env: Variables = Field(
        default_factory=dict, description="environment variables of this configuration's process only"
    )
    without: tuple[str, ...] = Field(
        default=(), description="options of the experiment's engine_args that this configuration omits"
    )

    @property
    def label(self) -> str:
        """The name, by default what the arm differs in."""
        if self.name:
            return self.name
        differences = [
            Path(self.model).name if self.model else None,
            self.engine.name if self.engine else None,
            self.engine.image if self.engine else None,
            self.kv.label if self.kv else None,
            self.dtype,
            *(_host(value) if key == "base-url" else f"{key}={value}" for key, value in self.engine_args.items()),
            *(f"{key}={value}" for key, value in self.env.items()),
            *(f"without {key}" for key in self.without),
        ]
        return " ".join(filter(None, differences))


def _host(address: str) -> str:
    """A server's address, short: ``http://127.0.0.1:8000/v1`` → ``127.0.0.1:8000``; without a user and a password."""
    return re.sub(r"^\w+://([^/@]*@)?", "", address).rstrip("/").removesuffix("/v1") or address


class ServeConfig(BaseModel):
    """Parts of a server's command line besides the configurations; the report's commands repeat them."""

    model_config = _STRICT_CONFIG

    program: tuple[str, ...] = Field(default=(), description="words before the flags; empty: the image starts alone")
    wrapper: tuple[str, ...] = Field(default=(), description="docker run … IMAGE, where the server runs in a container")
    model_flag: str = Field(default="", description="flag that names the model; empty: a separate word")
    words: tuple[str, ...] = Field(default=(), description="flags that no configuration uses")
    mounts: dict[str, str] = Field(default_factory=dict, description="folder in the image → folder here")
    ignored: dict[str, str] = Field(default_factory=dict, description="ignored words → the reason")
    taken: tuple[str, ...] = Field(default=(), description="words that became part of the configurations")
    translated: dict[str, str] = Field(default_factory=dict, description="parts as pasted → as they were read")


class Preset(ArmConfig):
    """A configuration in a separate file, from which a server can be started."""

    engine: EngineConfig = Field(description="engine of the configuration")
    model: str = Field(description="checkpoint of the configuration")
    about: str = Field(default="", description="description, in one line")
    device: Literal["cpu", "cuda"] | None = Field(default=None, description="device that it needs; null: any")
    serve: Options = Field(default_factory=dict, description="options of its server only: template, parsers …")

    @property
    def engine_name(self) -> str:
        """The engine's name."""
        return self.engine.name

    def arm_fields(self) -> dict[str, Any]:
        """Fields of an arm that a comparison uses."""
        return self.model_dump(mode="json", exclude={"about", "device", "serve"}, exclude_defaults=True)


class Limits(BaseModel):
    """Requirements for recommending a candidate (allowed loss, saving), and its non-inferiority margin."""

    model_config = _STRICT_CONFIG

    max_kld: float | None = Field(default=None, gt=0, description="largest mean KL, nats")
    max_flips: WholeShare | None = Field(default=None, description="largest share of flips (changed top tokens): 1%")
    max_accuracy_loss: Share | None = Field(default=None, description="largest net loss of correct predictions: 1%")
    min_saving: Share | None = Field(default=None, description="smallest share of bytes saved: 40%")
    min_tokens_per_s: float | None = Field(default=None, gt=0, description="lowest rate of generated tokens, tok/s")
    margin: Share | None = Field(
        default=None, description="non-inferiority margin: loss of accuracy to rule out; 1% by default"
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        flips, loss = self.max_flips, self.max_accuracy_loss
        if flips is not None and loss is not None and loss > flips:
            raise ValueError(
                f"max_accuracy_loss {loss:.3g} is above max_flips {flips:.3g}: no more than the flips can be "
                "lost, so leave one of the two out"
            )
        return self


def merged_fields(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an arm with other values for some; options and variables are replaced one by one."""
    maps = {
        key: {**fields[key], **value}
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(fields.get(key), dict) and key != "engine"
    }
    return {**fields, **changes, **maps}


class ExecutorConfig(BaseModel):
    """Placement of the configurations' processes."""

    model_config = _STRICT_CONFIG

    name: Literal["local", "ray"] = Field(default="local", description="this machine, or a Ray cluster")
    address: str | None = Field(
        default=None,
        pattern=r"^(auto|local|(ray://)?[\w.\-\[\]:]+:\d{1,5})$",
        description="ray: auto, host:port or local",
    )
    gpus: float | None = Field(
        default=None,
        gt=0,
        description="ray: GPUs per configuration on cuda, below 1 to share; its tensor parallel size by default",
    )

    @field_validator("gpus")
    @classmethod
    def _is_share_or_whole(cls, value: float | None) -> float | None:
        if value is not None and value > 1 and value != int(value):
            raise ValueError(f"{value:g} GPUs cannot be given: write a whole number, or a share below 1 such as 0.25")
        return value

    @model_validator(mode="after")
    def _gpus_of_cluster(self) -> ExecutorConfig:
        if self.name == "local" and self.gpus is not None:
            raise ValueError("gpus is for clusters: omit it, or write name: ray")
        return self


class Experiment(BaseModel):
    """One experiment: a reference, a control, candidates, tests and settings."""

    model_config = _STRICT_CONFIG

    model: str = Field(description="embedded name, hub id with optional @revision, folder, or .gguf file")
    engine: EngineConfig = Field(
        default_factory=lambda: EngineConfig(name=DEFAULT), description="engine of all configurations"
    )
    engine_args: Options = Field(default_factory=dict, description="engine options of all configurations")
    env: Variables = Field(default_factory=dict, description="environment variables of all configurations' processes")
    serve: ServeConfig | None = Field(
        default=None,
        description="parts of a pasted server command besides the configurations; written by compare --serve",
    )
    reference: ArmConfig = Field(
        default_factory=ArmConfig, description="configuration that all others are compared with"
    )
    reference_from: str | None = Field(
        default=None, description="packed reference instead: a folder, or hf://owner/name[@revision]"
    )
    control: ArmConfig | Literal["auto", "full", "none"] = Field(
        default="auto",
        description="control, which should cost nothing; full: also separate format loss from kernel loss",
    )
    candidates: list[ArmConfig] = Field(
        default_factory=list,
        description="candidate configurations; empty only without a comparison, or with vary",
    )
    vary: dict[str, list[str]] = Field(
        default_factory=dict,
        description="key of a configuration → its values; all combinations run",
    )
    axes: dict[str, dict[str, Any]] = Field(default_factory=_default_axes, description="tests and their settings")
    benches: dict[str, dict[str, Any]] = Field(default_factory=dict, description="benches and their settings")
    speed: bool | None = Field(
        default=None,
        description="measure the decode rate in the processes that save outputs, in seconds; null: on servers and GPUs",
    )
    quick_start: bool | Literal["auto"] = Field(
        default=False,
        description="start engines without compilation and graphs where prompts alone are read; auto: if one would "
        "compile",
    )
    text: str = Field(
        default=AUTO_TEXT,
        description="evaluation text: a name or a UTF-8 file; auto: agents for core tests on a GPU or a server, else "
        "default",
    )
    prompts: str = Field(default="default", description="prompt set: 'default', a .jsonl or a .txt file")
    traffic: str | None = Field(default=None, description="log of requests that provides text and prompts")
    skip_bad: bool = Field(default=False, description="skip and count invalid records of the log of requests")
    keep_rows: bool = Field(
        default=False,
        description="keep full logits after scoring; false: only the figures that scoring needs",
    )
    keep_text: bool = Field(default=False, description="include texts of the log of requests in reports")
    runs: int = Field(
        default=1, ge=1, le=99, description="independent runs with fresh captures; metrics list the values as repeats"
    )
    floor: float = Field(
        default=0.25, ge=0, le=1, description="share of the items run again to measure run-to-run noise; 0: none"
    )
    twins: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="share of the KLD items that each candidate family answers once more with the last bits of some "
        "weights flipped, for the candidates' floors; 0: none",
    )
    seed: int = Field(default=42, ge=0, description="seed of the bootstrap")
    bands: Literal["fidelab", "refract"] = Field(default="fidelab", description="band table of the composite")
    dtype: Dtype = Field(default="auto", description="compute type")
    device: str = Field(default="auto", description="cpu, cuda, cuda:0 … or auto")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of a worker; all usable cores by default, 4 on a cluster"
    )
    deadline: float | None = Field(
        default=14_400, gt=0, description="seconds for one configuration, model load included"
    )
    budget: float | None = Field(
        default=None, gt=0, description="time limit in seconds, or 90s, 10m, 2h; no look begins that would exceed it"
    )
    executor: ExecutorConfig = Field(
        default_factory=ExecutorConfig, description="placement of the configurations' processes"
    )
    context: int | None = Field(
        default=None,
        ge=1,
        description="tokens of a sequence for which memory is reported: 32k, 32768; by default the limit of the server "
        "or of the model, at most 32k",
    )
    fit: str | None = Field(
        default=None,
        description="memory in which users and tokens must fit: 24GiB, 24GB, or a device such as RTX-4090; by default "
        "that of the GPU found",
    )
    force: bool = Field(default=False, description="run even if a known engine bug applies")
    limits: Limits = Field(
        default_factory=Limits, description="requirements for recommending a candidate (allowed loss, saving)"
    )
    output_dir: str = Field(default="runs", description="folder of the runs")
    captures_dir: str | None = Field(default=None, description="folder of captures; <output_dir>/captures by default")

    _cells: tuple[ArmConfig, ...] | None = PrivateAttr(default=None)
    _left_out: tuple[str, ...] = PrivateAttr(default=())

    @property
    def levels(self) -> list[Levels]:
        """The values of each cell of the grid, by key."""
        return levels_of(self.vary)

    @property
    def cells(self) -> tuple[ArmConfig, ...]:
        """The configurations of the grid that ``vary`` spans, named by their levels.

        Those that begin from a preset are known where :func:`fidelab.config.experiment.validate` made the experiment.
        """
        if self._cells is not None:
            return self._cells
        return tuple(ArmConfig.model_validate(cell_fields(levels)) for levels in self.levels)

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line for each file that a pattern of candidates matches and that holds no language model."""
        return self._left_out

    @property
    def arms(self) -> tuple[ArmConfig, ...]:
        """All configurations as written: reference, control if it is written out, candidates and cells of the grid."""
        control = (self.control,) if isinstance(self.control, ArmConfig) else ()
        return self.reference, *control, *self.candidates, *self.cells

    @field_validator("budget", "deadline", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        return parse_seconds(value) if isinstance(value, str) else value

    @field_validator("context", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        return parse_tokens(value) if isinstance(value, str) else value

    @field_validator("reference", mode="before")
    @classmethod
    def _parse_reference(cls, value: Any) -> Any:
        return arm_fields(value) if isinstance(value, str) else value

    @field_validator("control", mode="before")
    @classmethod
    def _parse_control(cls, value: Any) -> Any:
        return arm_fields(value) if isinstance(value, str) and value not in ("auto", "full", "none") else value

    @field_validator("candidates", mode="before")
    @classmethod
    def _parse_arms(cls, value: Any) -> Any:
        return [arm_fields(v) if isinstance(v, str) else v for v in value] if isinstance(value, list) else value

    @field_validator("vary", mode="before")
    @classmethod
    def _levels(cls, value: Any) -> Any:
        if isinstance(value, list):
            return parse_vary(value)
        if isinstance(value, dict):
            return {
                option_key(str(key)): [str(v).strip() for v in values] if isinstance(values, list) else values
                for key, values in value.items()
            }
        return value

    @field_validator("vary")
    @classmethod
    def _is_grid(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        check_vary(value)
        for levels in levels_of(value):
            try:
                ArmConfig.model_validate({key: text for key, text in cell_fields(levels).items() if key != "preset"})
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None
        return value

    @field_validator("axes", "benches", mode="before")
    @classmethod
    def _parse_axes(cls, value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return {v: {} for v in value}
        if isinstance(value, dict):
            return {k: {} if v is None else v for k, v in value.items()}
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Experiment:
        if not self.axes and not self.benches:
            raise ValueError("axes: name at least one test, or a bench")
        if self.axes and not self.candidates and not self.vary:
            raise ValueError("candidates: name at least one")
        if self.benches and self.executor.name != "local":
            raise ValueError("benches compare timings on one machine: omit them, or use executor local")
        if self.speed and self.executor.name != "local":
            raise ValueError("speed: timings are compared on one machine; leave it out, or use executor local")
        if self.speed and not self.axes:
            raise ValueError("speed: it is measured while tests run; name a test, or bench decode instead")
        if self.speed and (other := next((name for name in ("decode", "serving") if name in self.benches), None)):
            raise ValueError(f"speed: bench {other} measures it; leave out one of the two")
        if self.device == "cpu" and self.executor.gpus is not None:
            raise ValueError("executor.gpus needs device: cuda; omit it otherwise")
        if self.traffic is not None and not (self.text in (AUTO_TEXT, "default") and self.prompts == "default"):
            raise ValueError("traffic gives the text and the prompts: leave out text and prompts")
        return self
