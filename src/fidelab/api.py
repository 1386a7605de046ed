"""The Python API behind the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fidelab.config.load import validate
from fidelab.results.record import Report

__all__ = ["compare"]


def compare(
    model: str,
    *,
    reference: str | Mapping[str, Any] | None = None,
    candidates: Sequence[str | Mapping[str, Any]],
    engine: str | Mapping[str, Any] = "hf",
    control: str = "auto",
    axes: Mapping[str, Mapping[str, Any]] | Sequence[str] = ("trajectory", "kld"),
    **settings: Any,
) -> Report:
    """Run a reference and candidates and score them; the report also lies in ``output_dir``.

    Args:
        model: embedded name, hub id with optional ``@revision``, folder, or ``.gguf`` file.
        reference, control, candidates: KV formats (a name, ``K/V``, options in brackets) or whole arms
            (``{"kv": "fp8_e4m3", "model": "./awq"}``, ``"kv=fp8_e4m3,block-size=32"``); the engine's native format
            where no reference is named.
        engine: ``hf``, ``llamacpp``, ``vllm``, ``sglang``, ``openai``; with ``python``, ``prefix`` or ``pythonpath``:
            ``{"name": "vllm", "python": PATH}``.
        axes: names, or name → settings (``{"kld": {"windows": 8}}``).
        settings: any other key of an experiment file: ``text``, ``prompts``, ``dtype``, ``seed``, ``output_dir`` …

    Raises:
        FidelabError: anything that can be mended, in one line.
    """
    from fidelab.runs.conduct import execute

    fields = {
        "engine": engine,
        "reference": reference or {},
        "control": control,
        "candidates": list(candidates),
        "axes": list(axes) if not isinstance(axes, Mapping) else {name: dict(values) for name, values in axes.items()},
        **settings,
    }
    call = ", ".join([repr(model), *(f"{name}={value!r}" for name, value in fields.items())])
    return execute(validate({"model": model, **fields}, "compare"), command=f"fidelab.compare({call})")[0]
