"""The cross-engine experiment as users write it: one model, several engines, each with its own 8-bit cache.

Engines may read the model from different files: a line has a ``model`` of its own where its engine needs another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fidelab.config.schema import ArmConfig, Dtype, EngineConfig, Experiment, KVFormat, Options

KIND = "cross-engine"
_STRICT_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineLine(BaseModel):
    """One engine: its 16-bit reference and the candidate that is compared with it."""

    model_config = _STRICT_CONFIG

    engine: EngineConfig = Field(description="engine, or its name, python, image and pythonpath")
    name: str | None = Field(default=None, description="how tables call the line; the engine's name by default")
    model: str | None = Field(
        default=None,
        description="the model in this engine's own files (a .gguf file for llamacpp); the experiment's by default",
    )
    reference: KVFormat | None = Field(default=None, description="KV format of the reference; the engine's native one")
    candidate: KVFormat = Field(description="KV format of the candidate: the engine's 8-bit cache")
    engine_args: Options = Field(default_factory=dict, description="engine options of both configurations")
    dtype: Dtype = Field(default="auto", description="compute type of both configurations")

    @property
    def label(self) -> str:
        """Name of the line in tables."""
        return self.name or self.engine.name


class CrossEngine(BaseModel):
    """One text and its token ids on every engine, and each engine's candidate against its own reference."""

    model_config = _STRICT_CONFIG

    kind: Literal["cross-engine"]
    model: str = Field(description="embedded name, hub id with optional @revision, folder, or .gguf file")
    engines: list[EngineLine] = Field(min_length=1, description="engines, in the order in which they run")
    axes: dict[str, dict[str, Any]] | None = Field(
        default=None, description="tests and their settings; the four tests and perplexity in quick sizes"
    )
    text: str = Field(default="default", description="evaluation text: a name or a UTF-8 file")
    prompts: str = Field(default="default", description="prompt set: 'default', a .jsonl or a .txt file")
    floor: float = Field(default=0.25, ge=0, le=1, description="share of the items run again; 0: none")
    seed: int = Field(default=42, ge=0, description="seed of the bootstrap")
    device: str = Field(default="auto", description="cpu, cuda, cuda:0 … or auto")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of a worker; all usable cores by default")
    deadline: float | None = Field(
        default=14_400, gt=0, description="seconds for one configuration, model load included"
    )
    output_dir: str = Field(default="runs", description="where runs are written")
    benches: dict[str, dict[str, Any]] = Field(
        default_factory=lambda: {"prefill": {"lengths": [512]}, "decode": {"depths": [512]}},
        description="benches and their settings; {}: none",
    )

    @field_validator("axes", "benches", mode="before")
    @classmethod
    def _empty_for_none(cls, value: Any) -> Any:
        return {k: {} if v is None else v for k, v in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.axes is not None and not self.axes:
            raise ValueError("axes: name at least one test, or omit 'axes'")
        labels = [line.label for line in self.engines]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"engines: two are called {twice[0]!r}; give one of them another 'name'")
        return self

    def experiment(self, line: EngineLine, axes: Mapping[str, Mapping[str, Any]], output_dir: str) -> Experiment:
        """Experiment of one engine: its candidate against its own reference.  Captures are shared by all lines.

        A line's own model is that of both configurations. Token ids are those of the experiment's model on every line.
        """
        return Experiment(
            model=self.model,
            engine=line.engine,
            engine_args=line.engine_args,
            reference=ArmConfig(kv=line.reference, model=line.model),
            control="none",
            candidates=[ArmConfig(kv=line.candidate, model=line.model)],
            axes={name: dict(values) for name, values in axes.items()},
            benches=self.benches,
            speed=False,
            text=self.text,
            prompts=self.prompts,
            floor=self.floor,
            seed=self.seed,
            dtype=line.dtype,
            device=self.device,
            threads=self.threads,
            deadline=self.deadline,
            output_dir=output_dir,
            captures_dir=f"{self.output_dir}/captures",
        )
