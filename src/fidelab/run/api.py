"""The Python API behind the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fidelab.config.experiment import validate
from fidelab.engines import DEFAULT
from fidelab.results.record import Report
from fidelab.run.runner import ProgressReporter, Silent


def compare(
    model: str,
    *,
    reference: str | Mapping[str, Any] | None = None,
    candidates: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    engine: str | Mapping[str, Any] = DEFAULT,
    control: str = "auto",
    axes: str | Mapping[str, Mapping[str, Any]] | Sequence[str] = ("trajectory", "kld"),
    progress: bool | Callable[[str, float], None] = False,
    **settings: Any,
) -> Report:
    """Run a reference and candidates, score them, and return the report, which is also written to ``output_dir``.

    Args:
        model: embedded name, hub id with optional ``@revision``, folder, or ``.gguf`` file.
        reference, control, candidates: KV formats (a name, ``K/V``, options in brackets) or whole arms
            (``{"kv": "fp8_e4m3", "model": "./awq"}``, ``"kv=fp8_e4m3,block-size=32"``); the engine's native format
            where no reference is named.  A single candidate needs no list.
        engine: ``hf``, ``llamacpp``, ``vllm``, ``sglang``, ``openai``; with ``python``, ``image`` or ``pythonpath``:
            ``{"name": "vllm", "python": PATH}``.
        axes: a name, names, or name → settings (``{"kld": {"windows": 8}}``).
        progress: ``True`` prints a line on standard error for each arm and each tenth of the run, also in a notebook. A
            function is called with the current step and the share of the tokens processed, 0 to 1.
        settings: any other key of an experiment file: ``text``, ``prompts``, ``dtype``, ``seed``, ``output_dir`` …

    Raises:
        FidelabError: For anything that the user can fix. The message is one line.
    """
    from fidelab.run.repeat import execute_all

    candidates = [candidates] if isinstance(candidates, str | Mapping) else list(candidates)
    axes = [axes] if isinstance(axes, str) else axes
    fields = {
        "engine": engine,
        "reference": reference or {},
        "control": control,
        "candidates": candidates,
        "axes": list(axes) if not isinstance(axes, Mapping) else {name: dict(values) for name, values in axes.items()},
        **settings,
    }
    call = ", ".join([repr(model), *(f"{name}={value!r}" for name, value in fields.items())])
    experiment = validate({"model": model, **fields}, "compare")
    return execute_all(
        experiment,
        command=f"fidelab.compare({call})",
        watch=lambda _number, _runs: (
            Silent() if not progress else ProgressReporter(progress if callable(progress) else _Lines().tell)
        ),
    )[0]


class _Lines:
    """A line on standard error where something else is done, and every tenth of the whole."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def tell(self, what: str, share: float) -> None:
        if (what, int(10 * share)) != self._last:
            self._last = what, int(10 * share)
            print(f"fidelab: {100 * share:3.0f}% {what}", file=sys.stderr, flush=True)
